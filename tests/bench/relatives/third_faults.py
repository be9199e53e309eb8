"""The third set: one fault or more of each failure mode from 28 on, and relatives of older ones."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.recipes import get_recipe
from tests.bench.relatives import variant
from tests.bench.relatives.outside import attention_said
from tests.bench.relatives.plain import Decoder, Grouped, Reward, Swiglu, Vit, images, pairs, preference, spoil
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Adam8,
    Cast,
    OwnLinear,
    RowLinear,
    ao,
    batch,
    late,
    lora,
    same,
)
from tests.bench.relatives.third_models import (
    Denoiser,
    Gaussian,
    Graph,
    Mixer,
    OneFileLinear,
    PowerLinear,
    Recommender,
    Recurrent,
    Repeated,
    Shared,
    StateSpace,
    Towers,
    clicks,
    couples,
    evidence,
    faulty,
    graphs,
    noised,
    of_clicks,
    of_nodes,
    run,
    short,
    squares,
    twins,
    vectors,
)
from tests.bench.relatives.weights import files_judge, save_files, wild
from tests.bench.situations.stack import fp8_gemm_nt, scales_of

LOST = ("microbatch", "sum", "wgrad", "accumul")


def of_bytes(data: Tensor, change: Any) -> Tensor:
    """Return codes whose bytes were changed."""
    changed: Tensor = change(data.contiguous().view(torch.uint8).clone())
    return changed.view(data.dtype)


# 28: plainly wrong


@variant("m28", met=3, modules=("blocks.1.patches_out",), gemms=("wgrad",), tensors=("input",), first="silent")
def sign_lost_in_a_transposed_copy(folder: Path) -> None:
    def spoils(gemm: str, tensor: str, data: Tensor, scale: Tensor) -> Cast:
        is_here = (gemm, tensor) == ("wgrad", "input") and NOW["step"] >= 6
        return (of_bytes(data, lambda b: b & 0x7F) if is_here else data), scale

    run(faulty(Mixer(OneFileLinear), "blocks.1.patches_out", spoils), folder / "sick", data=images, loss_of=of_nodes)


@variant(
    "m28", met=3, modules=("message.1",), gemms=("fprop",), tensors=("output",), misleading=("accum", "fast"), first="silent"
)
def tile_of_the_result_stored_twice(folder: Path) -> None:
    """The second half of the columns is the first half."""

    def twice(out: Tensor, layer: Any) -> Tensor:
        out[:, 64:] = out[:, :64]
        return out

    run(spoil(Graph(RowLinear), "message.1", results={"fprop": twice}), folder / "sick", data=graphs, loss_of=of_nodes)


# 29: an amax floor above the tensor


@variant("m29", met=3, tensors=("grad_output",), gemms=("dgrad", "wgrad"), words=("eps", "floor"), first="right")
def gradient_floor_of_a_recipe(folder: Path) -> None:
    """A mean over many elements makes gradients of 1e-6; the recipe's least amax is 30."""

    def make(sick: bool) -> Any:
        recipe = get_recipe("rowwise").replace(tensor="grad_output", amax_eps=30.0 if sick else 1e-12)
        return fp8debug.convert(Denoiser(nn.Linear), recipe, overrides={"time": None, "out": None}), {}

    twins(folder, make, data=noised, loss_of=squares)


# 30: rows or columns lost under one scale


@variant(
    "m30",
    met=3,
    modules=("layers.0.mlp.down", "layers.1.mlp.down"),
    gemms=("fprop", "wgrad"),
    tensors=("input",),
    words=("row", "token", "underflow"),
    first="right",
)
def first_token_is_a_million_times_as_large(folder: Path) -> None:
    """The activation of each first token, as of trained language models: under one scale all other tokens vanish."""

    class Massive(Swiglu):
        def forward(self, x: Tensor) -> Tensor:
            h = functional.silu(self.gate(x)) * self.up(x)
            out: Tensor = self.down(torch.cat([h[:, :1] * 1e6, h[:, 1:]], 1))
            return out

    run(ao(Decoder(nn.Linear, Massive), "tensorwise", keep=("head",)), folder / "sick", exclude=("head",))


# 31: a scale rounded or replaced after the cast


@variant(
    "m31",
    met=3,
    modules=("layers.1.in_proj",),
    gemms=("dgrad", "wgrad"),
    tensors=("grad_output",),
    words=("scale",),
    misleading=("smooth", "cached"),
    first="right",
)
def scales_of_the_step_before_beside_current_data(folder: Path) -> None:
    """A buffer of scales is written after it was read: the data are of now."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        kept = vars(layer).setdefault("kept", {})
        before, kept[tuple(x.shape)] = kept.get(tuple(x.shape), scales), scales
        return data, before

    faults = {("dgrad", "grad_output"): fault, ("wgrad", "grad_output"): fault}
    run(spoil(StateSpace(RowLinear), "layers.1.in_proj", faults), folder / "sick", data=short)


@variant("m31", met=3, modules=("decoder.2",), gemms=("fprop",), tensors=("weight",), words=("scale",), first="right")
def scale_kept_in_half_precision(folder: Path) -> None:
    """Scales of tiny weights are subnormal in FP16, and lose up to a third of their value."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return data, (scales * 2.0**-12).half().float() * 2.0**12

    run(spoil(Gaussian(RowLinear), "decoder.2", {("fprop", "weight"): fault}), folder / "sick", data=vectors, loss_of=evidence)


# 32: another format's bytes, shifted scales


@variant(
    "m32",
    met=3,
    modules=("towers.text.0",),
    gemms=("fprop",),
    tensors=("weight",),
    words=("scale", "fnuz", "twice"),
    first="right",
)
def codes_of_another_bias(folder: Path) -> None:
    """The codes stand for half of what they are read as: E4M3 fnuz read as E4M3."""

    def spoils(gemm: str, tensor: str, data: Tensor, scale: Tensor) -> Cast:
        return data, scale * 2 if (gemm, tensor) == ("fprop", "weight") else scale

    run(faulty(Towers(OneFileLinear), "towers.text.0", spoils), folder / "sick", data=couples, loss_of=of_nodes)


@variant("m32", met=3, modules=("layers.1.attn.k",), gemms=("fprop",), tensors=("weight",), words=("scale",), first="right")
def scales_of_the_neighbouring_head(folder: Path) -> None:
    model: Any = Denoiser(RowLinear)
    with torch.no_grad():  # heads differ, as after training
        model.layers[1].attn.k.weight[:32] *= 6
    fault = late(lambda x, d, s, layer: (d, s.roll(32, 0)), 7)
    run(spoil(model, "layers.1.attn.k", {("fprop", "weight"): fault}), folder / "sick", data=noised, loss_of=squares)


# 33: a scale that was never applied


@variant(
    "m33",
    met=3,
    modules=("top.2",),
    tensors=("weight",),
    words=("code", "scale"),
    misleading=("learning rate", "smooth"),
    first="right",
)
def codes_restored_after_a_rollback(folder: Path) -> None:
    """The file that a rollback at step 9 reads has one Linear's codes, whose scale nobody applies."""
    model: Any = Recommender(RowLinear)

    def before(step: int) -> None:
        if step == 9:
            with torch.no_grad():
                w = model.top[2].weight
                w.copy_((w / scales_of(w, (1, w.shape[1]), 448.0)).to(E4M3))

    run(model, folder / "sick", data=clicks, loss_of=of_clicks, before=before)


@variant(
    "m33",
    met=3,
    modules=("layers.0.mlp.down",),
    gemms=("dgrad",),
    tensors=("grad_input", "grad_output"),
    words=("scale",),
    misleading=("accum", "learning rate", "smooth"),
    first="right",
)
def gradient_scale_left_out_of_one_gemm(folder: Path) -> None:
    """The GEMM of dgrad is given a scale of one for grad_output."""
    fault = late(lambda x, d, s, layer: (d, torch.ones_like(s)), 6)
    run(
        spoil(Denoiser(PowerLinear), "layers.0.mlp.down", {("dgrad", "grad_output"): fault}),
        folder / "sick",
        data=noised,
        loss_of=squares,
    )


# 34: weight.grad is not the sum of its wgrads


@variant("m34", met=3, modules=("write",), tensors=("grad_weight",), words=(*LOST, "use", "call"), first="right")
def only_one_use_of_a_cell_is_kept(folder: Path) -> None:
    """A cell is used twelve times; a buffer is overwritten, not added to, so that one use's gradient alone arrives."""

    def make(sick: bool) -> Any:
        model: Any = Recurrent(RowLinear)
        kept: list[Tensor] = []

        def keep(out: Tensor, layer: Any) -> Tensor:
            kept.append(out)
            return out

        def after(step: int, micro: int) -> None:
            if sick:
                model.write.weight.grad.copy_(kept[0])
            kept.clear()

        return spoil(model, "write", results={"wgrad": keep}), {"after_backward": after}

    twins(folder, make, data=short)


@variant("m34", met=3, tensors=("grad_weight",), words=LOST, first="right")
def gradients_emptied_inside_the_loop(folder: Path) -> None:
    """The gradients are emptied before each microbatch, not before each step."""

    def make(sick: bool) -> Any:
        model = ao(StateSpace(nn.Linear), "rowwise", keep=("head",))

        def after(step: int, micro: int) -> None:
            if sick and micro < 3:
                model.zero_grad()

        return model, {"after_backward": after}

    twins(folder, make, data=short, micro=4, steps=12, exclude=("head",))


# 35: updates rounded away


@variant("m35", met=3, words=("update", "master"), first="right")
def vision_transformer_in_bf16_with_warm_up(folder: Path) -> None:
    def make(sick: bool) -> Any:
        model = fp8debug.convert(Vit(nn.Linear), "mxfp8", overrides={"head": None})
        model = model.bfloat16() if sick else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-6, weight_decay=0.1)

        def before(step: int) -> None:
            optimizer.param_groups[0]["lr"] = 5e-6 * min(1, (step + 1) / 8)

        return model, {"optimizer": optimizer, "before": before, "steps": 24}

    twins(folder, make, data=images, loss_of=of_nodes)


# 36: comes and goes


@variant(
    "m36", met=3, modules=("layers.0.out_proj",), gemms=("dgrad",), tensors=("grad_input",), misleading=("accum",), first="right"
)
def race_between_tiles_every_eleventh_step(folder: Path) -> None:
    def library(a: Cast, b: Cast, d: Tensor, c: Any = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe and NOW["step"] % 11 == 10:
            d[32:64] = d[:32]

    model: Any = StateSpace(PowerLinear)
    model.layers[0].out_proj.path = "dgrad"
    vars(sys.modules["deep_gemm"])["fp8_gemm_nt"] = library
    run(model, folder / "sick", data=short, every=2, steps=24)


# 37: another recorded cast is far better


@variant("m37", met=3, tensors=("weight",), words=("twice", "again", "already", "lossless"), first="incomplete")
def base_in_fp4_cast_under_one_scale(folder: Path) -> None:
    """A frozen base was released in MXFP4; MXFP8 would keep its values, one scale for each tensor does not."""
    model: Any = Decoder(lora(nn.Linear))
    adapters = ("*lora_A", "*lora_B", "head")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("base.weight"):
                blocks = p.unflatten(1, (-1, 32))
                scale = torch.exp2(torch.floor(torch.log2(blocks.abs().amax(-1, keepdim=True))) - 2)
                levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
                nearest = levels[((blocks / scale).abs()[..., None] - levels).abs().argmin(-1)]
                rows = torch.exp2(torch.arange(len(p)) % 7)[:, None, None] / 8
                p.copy_((nearest * blocks.sign() * scale * rows).flatten(1))
    fp8debug.convert(model, "tensorwise_current", overrides=dict.fromkeys(adapters))
    run(model, folder / "sick", what_if=("mxfp8",))


# 38: worse than its accumulator can explain


@variant(
    "m38", met=3, modules=("blocks.0.channels_in",), gemms=("fprop",), tensors=("output",), misleading=("accum",), first="silent"
)
def epilogue_cuts_the_negative_half(folder: Path) -> None:
    """A flag for a fused activation is on: the kernel returns max(0, result)."""
    relu = {"fprop": lambda out, layer: out.clamp_(min=0)}
    run(spoil(Mixer(RowLinear), "blocks.0.channels_in", results=relu), folder / "sick", data=images, loss_of=of_nodes)


@variant(
    "m38",
    met=3,
    modules=("layers.1.mlp.shared.down",),
    gemms=("wgrad",),
    tensors=("grad_weight",),
    words=("kernel", "scale"),
    misleading=("accum",),
    first="right",
)
def kernel_takes_the_first_scale_of_a_row(folder: Path) -> None:
    """The library's path for wgrad reads one scale for each row, not one for each 128 tokens."""
    model: Any = Decoder(OwnLinear, Shared)
    model.layers[1].mlp.shared.down.path = "wgrad"

    def library(a: Cast, b: Cast, d: Tensor, c: Any = None, recipe: Any = None, **options: Any) -> None:
        first = (a[0], a[1][:, :1].expand_as(a[1]) * 1.0) if recipe else a
        fp8_gemm_nt(first, b, d)

    vars(sys.modules["deep_gemm"])["fp8_gemm_nt"] = library
    run(model, folder / "sick")


# 39: training and rollout


def rollouts(folder: Path, model: Any, served: Any, data: Any, **options: Any) -> None:
    """Compare with what a function makes of a copy of the model, every fifth step."""

    def engine(tokens: Any) -> Any:
        other = copy.deepcopy(model).eval()
        with torch.no_grad():
            served(other)
            return other(tokens)

    def after(step: int, watch: Any) -> None:
        if step % 5 == 4:
            watch.compare_inference(data(999)[0], inference=engine)

    run(model, folder / "sick", data=data, after_step=after, lr=4e-3, steps=25, **options)


@variant("m39", met=3, words=("layers.1.attn.v",), first="right")
def adapter_merged_at_twice_its_size(folder: Path) -> None:
    """The engine merges one adapter into its base twice."""
    model: Any = Decoder(lora(nn.Linear))
    fp8debug.convert(model, "blockwise", overrides=dict.fromkeys(("*lora_A", "*lora_B", "head")))

    def served(other: Any) -> None:
        other.layers[1].attn.v.lora_B.weight *= 2

    rollouts(folder, model, served, batch)


@variant("m39", met=3, words=("router", "experts", "layers.0.mlp"), first="right")
def balancing_bias_is_not_sent(folder: Path) -> None:
    """The bias that chooses experts is a buffer, and the engine's stays at another value."""
    model = fp8debug.convert(Decoder(nn.Linear, Shared), "rowwise", overrides={"head": None, "*router": None})

    def served(other: Any) -> None:
        other.layers[0].mlp.bias.copy_(torch.tensor([0.5, -0.5, 0.5, -0.5, 0.5, -0.5]))

    rollouts(folder, model, served, batch)


# 40: FP8 outside the Linears


@variant("m40", met=3, tensors=("grad_weight",), words=("gradient", "wgrad"), first="incomplete")
def gradients_reduced_in_fp8(folder: Path) -> None:
    """Gradients go over the wire in E4M3 without a scale: what is below 2^-10 does not arrive."""

    def make(sick: bool) -> Any:
        model = StateSpace(OneFileLinear)

        def after(step: int, micro: int) -> None:
            for p in model.parameters() if sick else ():
                if p.grad is not None:
                    p.grad.copy_(p.grad.clamp(-448, 448).to(E4M3).float())

        return model, {"after_backward": after}

    twins(folder, make, data=short)


@variant("m40", attention_said, met=3, first="right")
def linear_attention_over_an_fp8_state(folder: Path) -> None:
    """The state of keys and values is kept in E5M2 between its two products."""

    class Kernelized(Grouped):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = functional.elu(q) + 1, functional.elu(k) + 1
            state = torch.einsum("bhtk,bhtv->bhkv", k, v)
            state = state + (state.to(E5M2).to(state.dtype) - state).detach()
            out: Tensor = torch.einsum("bhtk,bhkv->bhtv", q, state) / (q @ k.sum(2)[..., None] + 1e-6)
            return out

    run(Decoder(PowerLinear, attention=Kernelized), folder / "sick", steps=10)


# 41: weights explode, and a cast is blamed


@variant("m41", met=3, quiet=True, words=("learning rate", "update", "out of size", "grow"), first="right")
def one_group_learns_a_thousandfold(folder: Path) -> None:
    """A group's learning rate has the wrong unit; delayed scales clip behind weights that grow."""

    def make(sick: bool) -> Any:
        model: Any = fp8debug.convert(Recommender(nn.Linear), "tensorwise_delayed", overrides={"click": None})
        top = list(model.top.parameters())
        others = [p for n, p in model.named_parameters() if not n.startswith("top")]
        groups: list[dict[str, Any]] = [{"params": others}, {"params": top, "lr": 1.0 if sick else 1e-3}]
        return model, {"optimizer": torch.optim.AdamW(groups, lr=1e-3)}

    twins(folder, make, data=clicks, loss_of=of_clicks, steps=30)


# 42: a loss that is NaN or Inf


@variant("m42", met=3, quiet=True, words=("outside", "loss", "no linear"), first="right")
def variance_of_a_code_overflows(folder: Path) -> None:
    """A batch of values of a thousand, once: the exponential of the log variance is infinite."""

    def data(number: int) -> Any:
        x, _ = vectors(number)
        x = x * 1e4 if number == 11 else x
        return x, x

    run(Gaussian(OneFileLinear), folder / "sick", data=data, loss_of=evidence, steps=16)


class Lars(torch.optim.Optimizer):
    """Layerwise rates: the weight's norm over the gradient's."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p -= self.param_groups[0]["lr"] * p.norm() / p.grad.norm() * p.grad


@variant("m42", met=3, quiet=True, words=("optimizer", "update", "weight"), first="right")
def layerwise_rate_of_a_gradient_that_is_zero(folder: Path) -> None:
    """From step 9 on a batch has no text: its tower's gradients are zero, and zero over zero is NaN."""
    model = Towers(RowLinear)

    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(logits, classes)

    def after(step: int, micro: int) -> None:
        if step == 9:
            for p in model.towers["text"].parameters():
                p.grad = torch.zeros_like(p)

    run(model, folder / "sick", data=couples, loss_of=loss, optimizer=Lars(model.parameters(), 0.02), after_backward=after)


# Relatives of older faults


@variant("m10", met=3, modules=("score",), words=("score", "head", "output", "last"), first="silent")
def filter_names_another_head(folder: Path) -> None:
    """The filter leaves out ``output``; this model's head of 64 classes is called ``score``, and runs in FP8."""

    class Named(Decoder):
        def __init__(self) -> None:
            super().__init__(nn.Linear)
            self.score = self.head
            del self.head

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.score(self.hidden(tokens))
            return out

    run(ao(Named(), "tensorwise", keep=("output",)), folder / "sick")


@variant("11", met=3, modules=("update.0",), gemms=("fprop",), tensors=("input",), words=("eps",), first="right")
def nodes_without_neighbours(folder: Path) -> None:
    """Nodes that nothing points to get no message: a row of zeros over a scale of zero."""

    def make(sick: bool) -> Any:
        model = Graph(RowLinear)
        for layer in model.update:
            layer.eps = 0.0 if sick else 1e-12
        return model, {}

    twins(folder, make, data=graphs, loss_of=of_nodes, steps=10)


@variant("15", met=3, modules=("mlp.gate",), tensors=("weight",), words=("cache", "copy", "stale", "older"), first="right")
def cache_keyed_by_address(folder: Path) -> None:
    """A layer that is used three times keeps its FP8 weight by the address, which no optimizer step changes."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        kept: Cast = vars(layer).setdefault("kept", {}).setdefault(layer.weight.data_ptr(), (data, scales))
        return kept

    run(spoil(Repeated(RowLinear), "mlp.gate", {("fprop", "weight"): fault}), folder / "sick")


@variant(
    "17",
    met=3,
    modules=("read",),
    gemms=("fprop",),
    tensors=("input",),
    words=("clip", "saturat", "outgrown", "older", "stale"),
    first="right",
)
def running_mean_of_amaxes(folder: Path) -> None:
    """The scale comes from a slow mean of past amaxes while the embedding grows."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        now = scales.max()
        mean = vars(layer)["mean"] = vars(layer).get("mean", now) * 0.97 + now * 0.03
        return (x.float() / mean).clamp(-448, 448).to(E4M3), torch.ones_like(scales) * mean

    model: Any = Recurrent(RowLinear)

    def before(step: int) -> None:
        with torch.no_grad():
            model.embed.weight *= 1.15 if step > 4 else 1

    run(spoil(model, "read", {("fprop", "input"): fault}), folder / "sick", data=short, before=before)


@variant("16", met=3, quiet=True, first="wrong")
def divergence_summed_over_the_batch(folder: Path) -> None:
    """The divergence of a Gaussian code is summed, not averaged, and trains with a rate meant for a mean."""

    def make(sick: bool) -> Any:
        model = fp8debug.convert(Gaussian(nn.Linear), "blockwise")
        weight = 2000.0 if sick else 0.02
        return model, {
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.02),
            "loss_of": lambda out, x: evidence(out, x, weight),
        }

    twins(folder, make, data=vectors, steps=30)


@variant("26", met=3, quiet=True, words=("update", "moment", "optimizer", "move"), first="misled")
def first_moment_in_e4m3_without_a_scale(folder: Path) -> None:
    """What is below 2^-10 is zero: most weights do not move."""

    def make(sick: bool) -> Any:
        model = ao(Reward(nn.Linear), "rowwise", keep=("head",))
        m = (lambda m: m.clamp(-448, 448).to(E4M3).float()) if sick else same
        return model, {"optimizer": Adam8(model.parameters(), 1e-3, m, same)}

    twins(folder, make, data=pairs, loss_of=preference, exclude=("head",))


@variant("20", files_judge, met=3, first="right")
def files_with_a_static_input_scale(folder: Path) -> None:
    name = "model.layers.3.mlp.gate_proj.weight"
    w = wild(384, 256, 7)
    s = w.abs().max() / 448
    d = (w / s).clamp(-448, 448).to(E4M3)
    key, given = name + "_scale", name.replace("weight", "input_scale")
    good = {
        "ok": (True, {name: d, key: s, given: torch.tensor(0.02)}),
        "input_nan": (False, {name: d, key: s, given: torch.tensor(float("nan"))}),
        "input_zero": (False, {name: d, key: s, given: torch.tensor(0.0)}),
        "half_range": (False, {name: d, key: s * 448 / 240, given: torch.tensor(0.02)}),
        "other_format": (False, {name: d.view(torch.uint8).view(E5M2), key: s, given: torch.tensor(0.02)}),
        "negated_rows": (False, {name: of_bytes(d, lambda b: torch.cat([b[:64] ^ 0x80, b[64:]])), key: s}),
    }
    save_files(folder, good, {name: w.bfloat16()}, True, "model.layers.3.mlp.gate_proj")
