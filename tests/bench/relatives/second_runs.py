"""The second set: weights, optimizers, losses, rollouts, files and other tools' logs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.relatives import variant
from tests.bench.relatives.outside import LAYERS, attention_said, te_both, te_judge
from tests.bench.relatives.plain import (
    Decoder,
    Experts,
    Grouped,
    Reward,
    SavedLinear,
    Translator,
    Vit,
    fit,
    images,
    of_classes,
    pairs,
    preference,
    sentences,
)
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Cast,
    OwnLinear,
    RowLinear,
    batch,
    both,
    cross_entropy,
)
from tests.bench.relatives.weights import files_judge, save_files, wild
from tests.bench.situations.stack import expanded, scales_of

Made = tuple[Any, dict[str, Any]]
LOST = ("microbatch", "sum", "wgrad", "accumul")


# 05 and 34: weight.grad is not the sum of its wgrads


@variant(
    "05",
    met=2,
    modules=tuple(f"layers.1.mlp.experts.3.{p}" for p in ("gate", "up", "down")),
    tensors=("grad_weight",),
    words=LOST,
    first="false alarm",
)
def one_expert_keeps_its_first_microbatch(folder: Path) -> None:
    def make(sick: bool) -> Made:
        model: Any = Decoder(SavedLinear, Experts)
        weights, kept = list(model.layers[1].mlp.experts[3].parameters()), {}

        def hook(step: int, micro: int) -> None:
            for i, p in enumerate(weights):
                if micro == 0:
                    kept[i] = p.grad.clone()
                elif sick:
                    p.grad.copy_(kept[i])

        return model, {"after_backward": hook, "micro": 4, "steps": 14}

    both(folder, make)


@variant("05", met=2, modules=("layers.0.mlp.down", "layers.1.mlp.down"), tensors=("grad_weight",), words=LOST, first="silent")
def averaged_twice_in_down(folder: Path) -> None:
    """The weights of one group are divided by the number of microbatches once more, after the last of them."""

    def make(sick: bool) -> Made:
        model: Any = Vit(OwnLinear)

        def hook(step: int, micro: int) -> None:
            if sick and micro == 2:
                for layer in model.layers:
                    layer.mlp.down.weight.grad /= 3

        return model, {"after_backward": hook, "micro": 3, "steps": 14, "data": images, "loss_of": of_classes}

    both(folder, make)


# 06 and 35: updates that rounding takes away


class Lion(torch.optim.Optimizer):
    """The sign of an interpolated momentum."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                m = self.state[p].get("momentum", torch.zeros_like(p))
                p -= self.param_groups[0]["lr"] * (m * 0.9 + p.grad * 0.1).sign()
                self.state[p]["momentum"] = m * 0.99 + p.grad * 0.01


@variant("06", met=2, words=("update", "master"), first="silent")
def bf16_lion(folder: Path) -> None:
    def make(sick: bool) -> Made:
        model = Decoder(RowLinear)
        model = model.bfloat16() if sick else model
        return model, {"optimizer": Lion(model.parameters(), 2e-5), "steps": 24}

    both(folder, make)


@variant("06", met=2, words=("update", "master", "round"), first="silent")
def weights_kept_in_fp8(folder: Path) -> None:
    """Weights are kept as codes under scales of 128x128 and rounded to nearest after each step."""

    def make(sick: bool) -> Made:
        model = Vit(SavedLinear)

        def keep(step: int, watch: Any) -> None:
            if sick:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        if p.dim() == 2 and ("attn" in name or "mlp" in name):
                            s = scales_of(p, (128, 128), 448.0)
                            full = expanded(s, p.shape, (128, 128))
                            p.copy_((p / full).clamp(-448, 448).to(E4M3).float() * full)

        return model, {"after_step": keep, "lr": 3e-4, "steps": 24, "data": images, "loss_of": of_classes}

    both(folder, make)


# 09 and 10: a router in FP8, a part of the model that is not


@variant("m09", met=2, modules=("layers.0.mlp.router", "layers.1.mlp.router"), words=("router",), first="silent")
def routers_converted_too(folder: Path) -> None:
    model = Decoder(nn.Linear, lambda linear: Experts(linear, router=lambda i, o, bias: nn.Linear(i, 16, bias=bias)))
    fp8debug.convert(model, "tensorwise_current", overrides={"head": None})
    fit(model, folder / "sick")


# 13 and 33: a scale that was never applied, or twice


@variant(
    "13",
    met=2,
    modules=("layers.0.attn.k",),
    tensors=("weight",),
    words=("code", "scale"),
    misleading=("learning rate",),
    first="right",
)
def codes_of_rows_as_keys(folder: Path) -> None:
    model: Any = Decoder(SavedLinear)
    with torch.no_grad():
        w = model.layers[0].attn.k.weight
        w.copy_((w / scales_of(w, (1, 128), 448.0)).to(E4M3))
    fit(model, folder / "sick", every=3)


@variant(
    "13",
    met=2,
    modules=("layers.1.mlp.up",),
    tensors=("weight",),
    words=("scale", "twice"),
    misleading=("learning rate",),
    first="incomplete",
)
def scale_applied_twice_on_load(folder: Path) -> None:
    def make(sick: bool) -> Made:
        model: Any = Decoder(RowLinear)
        with torch.no_grad():
            w = model.layers[1].mlp.up.weight
            s = scales_of(w, (1, 128), 448.0)
            w.copy_((w / s).to(E4M3).float() * (s * s if sick else s))
        return model, {}

    both(folder, make)


# 16 and 27: a loss or a learning rate


@variant("16", met=2, quiet=True, first="right")
def router_loss_summed(folder: Path) -> None:
    model: Any = Decoder(RowLinear, Experts)

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        aux = sum(layer.mlp.logits.logsumexp(-1).pow(2).sum() for layer in model.layers)
        total: Tensor = cross_entropy(out, classes) + aux - aux.detach()
        return total

    optimizer = torch.optim.SGD(model.parameters(), lr=5e-3)
    fit(model, folder / "sick", loss_of=loss, optimizer=optimizer, steps=36)


@variant("16", met=2, quiet=True, words=("learning rate",), first="right")
def schedule_jumps_a_hundredfold(folder: Path) -> None:
    model = Reward(SavedLinear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 5e-4 if step < 18 else 0.1

    fit(model, folder / "sick", data=pairs, loss_of=preference, optimizer=optimizer, before=before, steps=36)


# 18 and 40: FP8 between the Linears


class LowMemory(Grouped):
    """Keys and values of a cache in E5M2 without a scale, probabilities in E4M3."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[sequences, 4, length, 32]``."""
        k, v = (t + (t.to(E5M2).to(t.dtype) - t).detach() for t in (k, v))
        share = (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1)
        out: Tensor = (share + (share.to(E4M3).to(share.dtype) - share).detach()) @ v
        return out


@variant("18", attention_said, met=2, first="right")
def cross_attention_in_fp8(folder: Path) -> None:
    model: Any = Translator(SavedLinear)
    for layer in model.decoder:
        layer.cross.__class__ = LowMemory
    fit(model, folder / "sick", data=sentences, steps=10)


@variant(
    "m40",
    met=2,
    modules=tuple(f"layers.1.mlp.experts.{n}.{p}" for n in range(4) for p in ("gate", "up")),
    tensors=("input",),
    words=("before", "already", "outside", "between", "grid"),
    first="silent",
)
def tokens_sent_in_fp8(folder: Path) -> None:
    """Tokens go to their experts in E4M3 without a scale: norms of 0.02 lose a third of their elements."""

    def make(sick: bool) -> Made:
        model: Any = Decoder(RowLinear, Experts)
        for layer in model.layers:
            nn.init.constant_(layer.norm2.weight, 0.02)
        if sick:
            model.layers[1].mlp.send = lambda x: x + (x.to(E4M3).to(x.dtype) - x).detach()
        return model, {"steps": 24}

    both(folder, make)


# 19 and 39: training and rollout


def rollouts(folder: Path, model: nn.Module, change: Callable[[nn.Module, nn.Module], None]) -> None:
    """Compare with an engine that has the weights of now, but for a change that may know those of the start."""
    routers = {name: None for name, layer in model.named_modules() if name.endswith("router")}
    fp8debug.convert(model, "rowwise", overrides={"head": None, **routers})
    start = copy.deepcopy(model)

    def engine(tokens: Tensor) -> Any:
        served = copy.deepcopy(model)
        with torch.no_grad():
            change(served, start)
            return served(tokens)

    def compare(step: int, watch: Any) -> None:
        if step % 6 == 5:
            watch.compare_inference(batch(999)[0], inference=engine)

    fit(model, folder / "sick", steps=24, lr=4e-3, after_step=compare)


@variant("19", met=2, words=("layers.1.mlp.experts",), first="right")
def experts_swapped_in_rollout(folder: Path) -> None:
    def change(served: Any, start: Any) -> None:
        first, second = (served.layers[1].mlp.experts[n].down.weight for n in (0, 3))
        kept = first.clone()
        first.copy_(second)
        second.copy_(kept)

    rollouts(folder, Decoder(nn.Linear, Experts), change)


@variant("19", met=2, words=("layers.0.attn.v",), first="right")
def values_clipped_in_rollout(folder: Path) -> None:
    """The engine casts one weight with the scale of the first sync, which clips it later."""

    def change(served: Any, start: Any) -> None:
        limit = start.layers[0].attn.v.weight.abs().max()
        served.layers[0].attn.v.weight.clamp_(-limit, limit)

    rollouts(folder, Decoder(nn.Linear), change)


# 20 and 13: files


@variant("20", files_judge, met=2, first="right")
def files_of_stacked_experts(folder: Path) -> None:
    name = "model.layers.2.mlp.experts.gate_up_proj"
    w = torch.stack([wild(256, 384, n) * 2.0 ** (n - 2) for n in range(4)])
    s = torch.stack([scales_of(e, (128, 128), 448.0) for e in w])
    full = s.repeat_interleave(128, 1).repeat_interleave(128, 2)
    d = (w / full).clamp(-448, 448).to(E4M3)
    key = name + "_scale_inv"
    halves = torch.cat([d[:, 128:].view(torch.uint8), d[:, :128].view(torch.uint8)], 1).view(E4M3)
    good = {
        "ok": (True, {name: d, key: s}),
        "experts_rolled": (False, {name: d, key: s.roll(1, 0)}),
        "gate_and_up_swapped": (False, {name: halves, key: s}),
        "one_expert_missing": (False, {name: d, key: s[:3]}),
        "one_expert_codes_zero": (False, {name: torch.cat([d[:3].float(), d[3:].float() * 0]).to(E4M3), key: s}),
        "one_scale_nan": (False, {name: d, key: torch.where(torch.arange(4)[:, None, None] == 2, float("nan"), s)}),
    }
    save_files(folder, good, {name: w.bfloat16()}, True, name)


@variant("20", files_judge, met=2, first="right")
def files_without_original(folder: Path) -> None:
    name = "model.layers.4.self_attn.o_proj.weight"
    w = wild(512, 256, 5)
    s = scales_of(w, (1, 256), 448.0)
    d = (w / s).clamp(-448, 448).to(E4M3)
    key = name + "_scale"
    good = {
        "ok": (True, {name: d, key: s}),
        "ok_fp16_scale": (True, {name: d, key: s.half()}),
        "negative": (False, {name: d, key: -s}),
        "infinite": (False, {name: d, key: torch.where(torch.arange(512)[:, None] < 4, float("inf"), s)}),
        "all_zero": (False, {name: torch.zeros_like(d.float()).to(E4M3), key: s}),
        "inverse": (False, {name: d, key: 1 / s}),
        "two_rows_missing": (False, {name: d, key: s[:-2]}),
    }
    save_files(folder, good, {name: w.bfloat16()}, False, name)


# 21: the log of another tool


def usual(layer: str, step: int) -> dict[str, float]:
    """Return what a healthy layer logs."""
    return {
        "weight_amax": 0.2,
        "weight_scale_inv_min": 0.2 / 448,
        "weight_scale_inv_max": 0.2 / 448,
        "weight_underflows%": 0.01,
        "activation_underflows%": 0.05,
        "gradient_underflows%": 0.4,
        "gradient_mse": 1e-12,
    }


@variant("21", te_judge("decoder.layers.2.mlp.linear_fc2", "weight"), met=2, first="silent")
def te_weight_outgrows_its_scale(folder: Path) -> None:
    """The weight's amax grows sixfold, and its scale stays."""

    def sick(layer: str, step: int) -> dict[str, float]:
        grown = {"weight_amax": 0.2 * (1 + step / 60)} if layer == LAYERS[11] else {}
        return usual(layer, step) | grown

    te_both(folder, sick, usual)


@variant("21", te_judge("decoder.layers.0.mlp.linear_fc1", "input"), met=2, first="right")
def te_activation_underflows_from_the_start(folder: Path) -> None:
    def sick(layer: str, step: int) -> dict[str, float]:
        return usual(layer, step) | ({"activation_underflows%": 62.0} if layer == LAYERS[2] else {})

    te_both(folder, sick, usual)


# 26 and 41: the optimizer's state, or weights that explode by themselves


class MeanSquare(torch.optim.Optimizer):
    """RMSProp; ``low`` is what the mean square is kept in."""

    def __init__(self, parameters: Any, lr: float, low: Callable[[Tensor], Tensor] = lambda v: v) -> None:
        super().__init__(parameters, {"lr": lr})
        self.low = low

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                v = self.state[p].get("square_avg", p.grad**2)
                v = self.state[p]["square_avg"] = self.low(v * 0.95 + p.grad**2 * 0.05)
                p -= self.param_groups[0]["lr"] * p.grad / (v.sqrt() + 1e-12)


@variant("26", met=2, quiet=True, words=("update", "moment", "optimizer"), first="right")
def mean_square_in_rows_of_e4m3(folder: Path) -> None:
    """Squares span twice the binades of gradients: under one scale a tensor, the small ones vanish in E4M3."""

    def make(sick: bool) -> Made:
        model = Vit(RowLinear)

        def low(v: Tensor) -> Tensor:
            scale = v.max().clamp(min=1e-30) / 448
            return (v / scale).to(E4M3).to(v.dtype) * scale

        optimizer = MeanSquare(model.parameters(), 3e-4, low if sick else lambda v: v)
        return model, {"optimizer": optimizer, "steps": 24, "data": images, "loss_of": of_classes}

    both(folder, make)


@variant("m41", met=2, quiet=True, words=("out of size", "grows", "explode"), first="misled")
def weight_decay_of_the_wrong_sign(folder: Path) -> None:
    """One weight grows by a third in each step; the static scale of its cast is not the cause."""

    def make(sick: bool) -> Made:
        model: Any = Decoder(SavedLinear)

        def grow(step: int, watch: Any) -> None:
            if sick and step >= 8:
                with torch.no_grad():
                    model.layers[0].mlp.up.weight.mul_(1.35)

        return model, {"after_step": grow, "steps": 36}

    both(folder, make)


# 42: a loss that is NaN


@variant("m42", met=2, quiet=True, words=("loss",), first="right")
def mean_over_no_tokens(folder: Path) -> None:
    """A batch in which every token is masked: the mean over none is NaN, and its gradient too."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        tokens, classes = batch(number)
        return tokens, torch.full_like(classes, -100) if number == 9 else classes

    fit(Decoder(OwnLinear), folder / "sick", data=data, steps=14)


@variant("m42", met=2, quiet=True, words=("norm", "attention", "outside"), first="right")
def softmax_over_masked_row(folder: Path) -> None:
    """A query without any key: the softmax over minus infinity is NaN, which the output projection gets."""

    class Masked(Grouped):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) / 32**0.5
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(-1 if NOW["step"] >= 6 else 0)
            out: Tensor = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
            return out

    fit(Decoder(RowLinear, attention=Masked), folder / "sick", steps=12)


# Sound programs that look suspicious


@variant("clean", met=2, clean=True, first="right")
def sound_scales_kept_in_bf16(folder: Path) -> None:
    """Scales are rounded to BF16 after the cast: 0.2 % a block in the mean, 55 dB, where E4M3 has 31.5."""
    model: Any = Decoder(RowLinear)
    for layer in model.modules():
        if isinstance(layer, OwnLinear):
            layer.cast_faults = {("fprop", "weight"): lambda x, d, s, layer: (d, s.bfloat16().float())}
    fit(model, folder / "sick")


@variant("clean", met=2, clean=True, first="right")
def sound_scalar_scales_swapped(folder: Path) -> None:
    """With one scale for each tensor the product is the same whichever operand has which."""

    class Swapped(SavedLinear):
        def product(self, gemm: str, first: Any, second: Any) -> Tensor:
            return super().product(gemm, (first[0], first[1], second[2]), (second[0], second[1], first[2]))

    fit(Vit(Swapped), folder / "sick", data=images, loss_of=of_classes)


@variant("clean", met=2, clean=True, first="false alarm")
def sound_expert_without_tokens(folder: Path) -> None:
    model: Any = Decoder(RowLinear, Experts)
    for layer in model.layers:
        layer.mlp.closed = lambda: (1,) if NOW["step"] % 4 else ()
    fit(model, folder / "sick", every=3, micro=2)


@variant("clean", met=2, clean=True, first="right")
def sound_reward_of_last_tokens(folder: Path) -> None:
    fit(Reward(SavedLinear), folder / "sick", data=pairs, loss_of=preference, steps=24, every=3)


@variant("clean", met=2, clean=True, first="right")
def sound_bf16_model_with_masters(folder: Path) -> None:
    """BF16 weights with FP32 masters and FP32 sums of gradients, which the optimizer has."""
    model = Decoder(OwnLinear).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=2e-3)

    def collect(step: int, micro: int) -> None:
        for p, master in zip(model.parameters(), masters, strict=True):
            assert p.grad is not None
            grad = p.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            p.grad = None

    def publish(step: int, watch: Any) -> None:
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)

    fit(model, folder / "sick", optimizer=optimizer, micro=3, after_backward=collect, after_step=publish)


@variant("clean", met=2, clean=True, first="right")
def sound_delayed_scales_while_growing(folder: Path) -> None:
    """The largest amax of 16 steps, while the weights grow slowly from a warm-up on."""
    model = Decoder(SavedLinear)
    for layer in model.modules():
        if isinstance(layer, SavedLinear):
            layer.history = 16
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1, (step + 1) / 10)

    fit(model, folder / "sick", optimizer=optimizer, before=before, steps=30)


@variant("clean", met=2, clean=True, first="right")
def sound_layers_dropped_at_random(folder: Path) -> None:
    """Stochastic depth: a layer is left out of a step, and its weights have no gradient then."""
    model: Any = Vit(SavedLinear, depth=3)
    for number, layer in enumerate(model.layers):
        forward = layer.forward
        layer.forward = lambda x, forward=forward, number=number: x if (NOW["step"] * 7 + number) % 5 == 0 else forward(x)
    fit(model, folder / "sick", data=images, loss_of=of_classes, steps=26)


@variant("clean", met=2, clean=True, first="right")
def sound_half_frozen_with_restarts(folder: Path) -> None:
    """A frozen encoder, a learning rate that starts again every ten steps, clipping by norm."""
    model: Any = Translator(RowLinear)
    for p in model.encoder.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=4e-3, betas=(0.9, 0.95))

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step % 10 / 10) + 1e-4

    def clip(step: int, micro: int) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)

    fit(model, folder / "sick", data=sentences, optimizer=optimizer, before=before, after_backward=clip, steps=30)


@variant("clean", met=2, clean=True, first="right")
def sound_wgrad_in_bf16(folder: Path) -> None:
    """A stack whose wgrad stays in high precision, as a recipe for stable training has it."""

    class Mixed(RowLinear):
        def multiply(self, gemm: str, a: Cast, b: Cast, shape: Any) -> Tensor:
            if gemm != "wgrad":
                return super().multiply(gemm, a, b, shape)
            grad, x = vars(self)["kept_grad"], vars(self)["kept_input"]
            out: Tensor = grad.bfloat16() @ x.bfloat16().t()
            return out

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if gemm == "wgrad":
                vars(self)["kept_grad" if tensor == "grad_output" else "kept_input"] = x
                return x, x[:1]
            return super().cast(gemm, tensor, x)

    fit(Decoder(Mixed), folder / "sick", micro=2)


@variant("clean", met=2, clean=True, first="false alarm")
def sound_relu_squared_sparse_tokens(folder: Path) -> None:
    """Squared ReLU, nine tenths of a hidden layer zero, and a few tokens that are ten times as large."""
    model: Any = Decoder(OwnLinear)
    for layer in model.layers:
        layer.mlp.forward = lambda x, mlp=layer.mlp: mlp.down(functional.relu(mlp.gate(x) - 0.7).square() * mlp.up(x))
        layer.norm2.register_forward_hook(lambda module, args, out: out * (1 + 9 * (torch.arange(out.shape[1]) < 2))[:, None])
    fit(model, folder / "sick")
