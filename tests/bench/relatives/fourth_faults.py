"""The fourth set: faults of scales, codes, sums, gradients and optimizers in models that the first three sets do not have."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.relatives import variant
from tests.bench.relatives.fourth_models import (
    WIDTH,
    Convolutions,
    Latents,
    LowRank,
    Regression,
    Separate,
    Several,
    Switch,
    TensorsOfE4M3,
    TiedHead,
    WithBalance,
    counted,
    pictures,
    several,
    table,
    with_balance,
)
from tests.bench.relatives.plain import Decoder, SavedLinear, Swiglu, spoil
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Cast,
    OwnLinear,
    RowLinear,
    TensorLinear,
    ao,
    codes_of,
    cross_entropy,
    late,
    same,
)
from tests.bench.relatives.third_faults import LOST, of_bytes
from tests.bench.relatives.third_models import OneFileLinear, PowerLinear, faulty, of_nodes, run, squares, twins
from tests.bench.situations.stack import LARGEST, expanded, fp8_gemm_nt, scales_of

CLIPPED = ("clip", "saturat", "outgrown", "older", "stale")
STALE = ("cache", "copy", "stale", "older", "old")

# Scales


@variant("m1", met=4, modules=("layers.1.attn.kv_up",), tensors=("grad_output",), words=CLIPPED, first="right")
def gradient_scale_kept_since_a_small_loss_weight(folder: Path) -> None:
    """The scale of a gradient was found in three steps; at step 8 the loss is multiplied by 64."""

    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        kept = vars(layer).setdefault("kept", [])
        if NOW["step"] < 3:
            kept.append(scale)
        used = torch.stack(kept).max()
        return (x.float() / used).clamp(-57344, 57344).to(E5M2), used

    model = spoil(Decoder(SavedLinear, attention=LowRank), "layers.1.attn.kv_up", {"grad_output": fault})
    run(model, folder / "sick", loss_of=lambda out, y: cross_entropy(out, y) * (64 if NOW["step"] > 7 else 1))


@variant(
    "m19",
    met=4,
    modules=("cross.wv",),
    gemms=("dgrad",),
    tensors=("weight",),
    words=("scale", "grid", "transpos"),
    first="incomplete",
)
def scales_of_the_rows_beside_the_transposed_codes(folder: Path) -> None:
    """The codes of a square weight are transposed with the scales of their columns; its scales are those of its rows."""
    model: Any = Latents(RowLinear)
    with torch.no_grad():  # input channels differ, as after training
        model.cross.wv.weight *= torch.exp2(torch.linspace(-2, 2, WIDTH))

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return data, scales_of(x.t().contiguous(), (1, x.shape[0]), 448.0)

    run(spoil(model, "cross.wv", {("dgrad", "weight"): late(fault, 5)}), folder / "sick", data=counted, loss_of=of_nodes)


@variant("m32", met=4, modules=("conv2",), gemms=("wgrad",), tensors=("grad_output",), words=("scale", "inverse"), first="right")
def inverse_scale_in_the_second_microbatch(folder: Path) -> None:
    """The graph of the second microbatch gives the scale, not its inverse, to the GEMM of a convolution's wgrad."""

    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        return data, 1 / scale if NOW["micro"] == 1 else scale

    model = spoil(Convolutions(TensorLinear), "conv2", {("wgrad", "grad_output"): fault})
    run(model, folder / "sick", data=pictures, loss_of=of_nodes, micro=3)


@variant(
    "m4",
    met=4,
    modules=("future.1",),
    gemms=("dgrad",),
    tensors=("grad_output",),
    words=("clip", "saturat", "rounded", "power"),
    misleading=("delayed", "history"),
    first="right",
)
def exponent_of_a_gradient_rounded_to_nearest(folder: Path) -> None:
    """Scales of a projection's gradient are the nearest power of two: those rounded down clip up to 1.41 times."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        nearest = torch.exp2(torch.round(torch.log2(scales)))
        return (x.float() / nearest).clamp(-448, 448).to(E4M3), nearest

    run(spoil(Several(OwnLinear), "future.1", {("dgrad", "grad_output"): fault}), folder / "sick", loss_of=several)


@variant(
    "m30",
    met=4,
    modules=tuple(f"layers.0.mlp.down.{n}" for n in (0, 1, 2, 3, 4, 6, 7)),
    gemms=("fprop", "dgrad"),
    tensors=("weight",),
    words=("underflow", "scale", "zero", "below"),
    first="right",
)
def one_scale_for_all_experts(folder: Path) -> None:
    """A stack of experts shares the scale of its largest value; seven experts begin a millionth as large as the fifth."""
    model: Any = WithBalance(TensorLinear, Switch)
    down = model.layers[0].mlp.down
    with torch.no_grad():
        for number, layer in enumerate(down):
            layer.weight *= 1.0 if number == 5 else 1e-6

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        shared = torch.stack([other.weight.detach().abs().max() for other in down]).max().reshape(1, 1) / 448
        return (x.float() / shared).clamp(-448, 448).to(E4M3), shared

    for layer in down:
        layer.cast_faults = {("fprop", "weight"): fault, ("dgrad", "weight"): fault}
    run(model, folder / "sick", loss_of=with_balance, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))


@variant("m14", met=4, modules=("layers.0.attn.wo",), gemms=("dgrad",), tensors=("weight",), words=("scale",), first="right")
def scale_of_the_first_slice_beside_all(folder: Path) -> None:
    """Each half of a gathered weight was cast with its own scale; the scale of the first half is stored for both."""
    model: Any = Decoder(TensorLinear, attention=Separate)
    with torch.no_grad():
        model.layers[0].attn.wo.weight[:, 64:] *= 1.8

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        first, second = x.float().chunk(2)
        own = [half.abs().max() / 448 for half in (first, second)]
        codes = torch.cat([half / scale for half, scale in zip((first, second), own, strict=True)])
        return codes.clamp(-448, 448).to(E4M3), own[0].reshape(1, 1)

    run(spoil(model, "layers.0.attn.wo", {("dgrad", "weight"): fault}), folder / "sick")


@variant("m13", met=4, modules=("fc2",), gemms=("fprop",), tensors=("weight",), words=("scale", "gain", "factor"), first="right")
def codes_for_464_scale_for_448(folder: Path) -> None:
    """The cast takes 464 for the largest value, the scale 448: 3.6 percent too large, between warn and act."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return (x.float() / (scales * 448 / 464)).clamp(-448, 448).to(E4M3), scales

    run(spoil(Regression(RowLinear), "fc2", {("fprop", "weight"): fault}), folder / "sick", data=table, loss_of=squares)


# Codes


@variant(
    "m28",
    met=4,
    modules=("layers.1.mlp.up",),
    gemms=("fprop",),
    tensors=("input",),
    words=("row", "token", "old", "earlier", "another"),
    misleading=("smooth",),
    first="right",
)
def rows_beyond_the_last_whole_block_are_of_the_step_before(folder: Path) -> None:
    """A buffer of codes is reused, and the cast writes 256 of its 320 rows."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        before = vars(layer).get("buffer", data)
        vars(layer)["buffer"] = data
        return torch.cat([data.view(torch.uint8)[:256], before.view(torch.uint8)[256:]]).view(E4M3), scales

    run(spoil(Decoder(RowLinear), "layers.1.mlp.up", {("fprop", "input"): fault}), folder / "sick")


@variant(
    "m28",
    met=4,
    modules=("cross.wk",),
    gemms=("wgrad",),
    tensors=("input",),
    words=("zero",),
    misleading=("smooth",),
    first="right",
)
def columns_of_the_last_tile_are_zero(folder: Path) -> None:
    """The last 16 of 128 channels of a cross-attention's keys are not written, in every third step: 9 dB."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        def cut(b: Tensor) -> Tensor:
            b[112:] = 0
            return b

        return of_bytes(data, cut), scales

    model = spoil(Latents(OwnLinear), "cross.wk", {("wgrad", "input"): late(fault, 0, 3)})
    run(model, folder / "sick", data=counted, loss_of=of_nodes)


@variant("m12", met=4, modules=("fc3",), gemms=("dgrad",), tensors=("weight",), words=STALE, first="right")
def transposed_codes_of_every_second_step(folder: Path) -> None:
    """The transposed copy is made in even steps alone; a small learning rate keeps it between warn and act."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        if NOW["step"] % 2 == 0:
            vars(layer)["kept"] = data, scales
        kept: Cast = vars(layer)["kept"]
        return kept

    model = spoil(Regression(PowerLinear), "fc3", {("dgrad", "weight"): fault})
    run(model, folder / "sick", data=table, loss_of=squares, lr=1e-3)


@variant(
    "m28",
    met=4,
    modules=("conv1",),
    gemms=("wgrad",),
    tensors=("grad_output",),
    words=("sign",),
    misleading=("smooth",),
    first="right",
)
def sign_of_some_channels_every_fourth_step(folder: Path) -> None:
    """A quarter of the channels has the other sign, in E5M2."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return of_bytes(data, lambda b: torch.cat([b[:16] ^ 0x80, b[16:]])), scales

    model = spoil(Convolutions(RowLinear), "conv1", {("wgrad", "grad_output"): late(fault, 0, 4)})
    run(model, folder / "sick", data=pictures, loss_of=of_nodes, every=2, steps=24)


@variant(
    "m28",
    met=4,
    modules=("layers.0.attn.wk", "layers.0.attn.wq"),
    gemms=("fprop",),
    tensors=("weight",),
    words=("another", "other", "not this", "unlike", "wrong"),
    misleading=("smooth", "eps"),
    first="incomplete",
)
def codes_of_queries_for_keys(folder: Path) -> None:
    """From step 6 on a list of cast weights is one place off: the keys get the queries' codes and scale."""
    model: Any = Decoder(TensorLinear, attention=Separate)
    attention = model.layers[0].attn

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        other: Cast = attention.wq.cast("fprop", "weight", attention.wq.weight)
        return other

    run(spoil(model, "layers.0.attn.wk", {("fprop", "weight"): late(fault, 6)}), folder / "sick")


@variant(
    "m28",
    met=4,
    modules=("layers.1.attn.o",),
    gemms=("wgrad",),
    tensors=("grad_weight", "output"),
    misleading=("accum", "smooth", "eps"),
    first="silent",
)
def weight_gradient_transposed(folder: Path) -> None:
    """The operands of wgrad are swapped: the gradient of a square weight is stored transposed."""
    turned = {"wgrad": lambda out, layer: out.t().contiguous()}
    run(spoil(Decoder(OwnLinear), "layers.1.attn.o", results=turned), folder / "sick")


# Sums


@variant(
    "m38",
    met=4,
    modules=("layer.mlp.down",),
    gemms=("wgrad",),
    tensors=("grad_weight", "output"),
    words=("kernel", "part", "sum", "split"),
    misleading=("smooth", "eps"),
    first="right",
)
def last_split_of_the_sum_is_not_added(folder: Path) -> None:
    """A library's path for wgrad sums the tokens in splits of 128 and leaves out the last."""

    def library(a: Cast, b: Cast, d: Tensor, c: Any = None, recipe: Any = None, **options: Any) -> None:
        if recipe:
            last = (a[0].shape[1] - 1) // 128
            a = a[0][:, : 128 * last].contiguous(), a[1][:, :last].contiguous()
            b = b[0][:, : 128 * last].contiguous(), b[1][:, :last].contiguous()
        fp8_gemm_nt(a, b, d)

    model: Any = Latents(PowerLinear)
    model.layer.mlp.down.path = "wgrad"
    vars(sys.modules["deep_gemm"])["fp8_gemm_nt"] = library
    run(model, folder / "sick", data=counted, loss_of=of_nodes)


@variant("m34", met=4, modules=("fc1",), tensors=("grad_weight",), words=LOST, first="right")
def main_gradient_is_overwritten_in_one_layer(folder: Path) -> None:
    """The fused sum of the first layer writes, and does not add, from step 7 on; SGD with momentum."""

    def make(sick: bool) -> Any:
        model: Any = ao(Regression(nn.Linear), "rowwise_with_gw_hp", keep=("out",))
        sums: list[Tensor] = []

        def after(step: int, micro: int) -> None:
            grad = model.fc1.weight.grad
            if sick and step >= 7 and micro:
                grad -= sums[-1]
            sums.append(grad.clone())

        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return model, {"after_backward": after, "optimizer": optimizer}

    twins(folder, make, data=table, loss_of=squares, micro=4, exclude=("out",))


@variant("m34", met=4, modules=("future.2",), tensors=("grad_weight",), words=("twice", "double", "2.0", "times"), first="silent")
def gradient_of_one_head_added_twice(folder: Path) -> None:
    """From step 8 on, a hook and autograd both add the gradient of the third head."""

    def make(sick: bool) -> Any:
        model: Any = fp8debug.convert(Several(nn.Linear), "rowwise", overrides={"head": None})

        def after(step: int, micro: int) -> None:
            if sick and step >= 8:
                model.future[2].weight.grad *= 2

        return model, {"after_backward": after}

    twins(folder, make, loss_of=several)


# Gradients


@variant("26", met=4, quiet=True, words=("scale", "learning rate", "update", "gradient"), first="right")
def loss_scale_is_never_divided_out(folder: Path) -> None:
    """The loss is multiplied by 1024 for the backward pass, and SGD steps by gradients that are as much too large."""

    def make(sick: bool) -> Any:
        model = ao(Latents(nn.Linear), "rowwise", keep=("head",))

        def after(step: int, micro: int) -> None:
            for p in model.parameters() if not sick else ():
                p.grad /= 1024

        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return model, {"after_backward": after, "optimizer": optimizer, "loss_of": lambda out, y: of_nodes(out, y) * 1024}

    twins(folder, make, data=counted, exclude=("head",))


@variant("16", met=4, quiet=True, words=("auxil", "balanc", "term"), first="silent")
def balancing_loss_summed_over_tokens(folder: Path) -> None:
    """The router's squares are summed over 320 tokens, not averaged: their part of the loss is a hundred times the rest."""

    def make(sick: bool) -> Any:
        model: Any = fp8debug.convert(
            WithBalance(nn.Linear, lambda linear: Switch(linear, weight=3.2 if sick else 0.01)),
            "blockwise",
            overrides={"head": None, "*router": None},
        )
        return model, {"optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3)}

    twins(folder, make, loss_of=with_balance, steps=24)


@variant("m42", met=4, modules=("layers.0.attn.wv",), words=("gradient",), first="silent")
def values_are_detached(folder: Path) -> None:
    """A cache for values is filled from a tensor that was detached: the projection of the values never learns."""

    def make(sick: bool) -> Any:
        model: Any = ao(Decoder(nn.Linear, attention=Separate), "tensorwise", keep=("head",))
        model.layers[0].attn.values = (lambda v: v.detach()) if sick else same
        return model, {}

    twins(folder, make, exclude=("head",))


@variant("m35", met=4, modules=("future.0",), words=("update", "optimizer", "not move", "no parameter"), first="right")
def head_replaced_after_the_optimizer_was_made(folder: Path) -> None:
    """A projection is made anew when the optimizer exists: its gradient comes, and nobody steps it."""

    def make(sick: bool) -> Any:
        model: Any = Several(RowLinear)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        if sick:
            model.future[0] = RowLinear(WIDTH, WIDTH, bias=False)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        return model, {"optimizer": optimizer}

    twins(folder, make, loss_of=several)


# Optimizers


class HalfMoments(torch.optim.Optimizer):
    """Adam whose second moment is kept in FP16."""

    def __init__(self, parameters: Any, lr: float, kind: torch.dtype) -> None:
        super().__init__(parameters, {"lr": lr})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights."""
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            m, v = state.get("exp_avg", torch.zeros_like(p)), state.get("exp_avg_sq", torch.zeros_like(p)).float()
            state["exp_avg"] = m = m.lerp(p.grad, 0.1)
            state["exp_avg_sq"] = v.lerp(p.grad**2, 0.01).to(self.kind)
            count = state["step"] = state.get("step", 0) + 1
            root = (state["exp_avg_sq"].float() / (1 - 0.99**count)).sqrt()
            p -= self.param_groups[0]["lr"] * m / (1 - 0.9**count) / (root + 1e-8)


@variant("26", met=4, quiet=True, words=("moment", "optimizer", "update", "learning rate"), first="right")
def second_moment_in_half_precision(folder: Path) -> None:
    """Squares of gradients below 2e-4 are zero in FP16: their updates are divided by eps."""

    def make(sick: bool) -> Any:
        model = fp8debug.convert(Convolutions(nn.Linear), "rowwise", overrides={"head": None})
        optimizer = HalfMoments(model.parameters(), 1e-3, torch.float16 if sick else torch.float32)
        return model, {"optimizer": optimizer, "loss_of": lambda out, y: of_nodes(out, y) / 10}

    twins(folder, make, data=pictures)


@variant("m35", met=4, words=("update", "fp8", "grid", "written", "master", "codes"), first="silent")
def experts_written_back_in_fp8_every_fourth_step(folder: Path) -> None:
    """Every fourth step the experts are stored and loaded as E4M3 with a scale for each 1x128."""

    def make(sick: bool) -> Any:
        model: Any = WithBalance(OwnLinear, Switch)

        def after(step: int, watch: Any) -> None:
            if sick and step % 4 == 3:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        if ".up." in name or ".down." in name:
                            p.copy_(codes_of(p, (1, 128)) * scales_of(p, (1, 128), LARGEST[E4M3]))

        return model, {"after_step": after, "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-4)}

    twins(folder, make, loss_of=with_balance, steps=24)


@variant("m21", met=4, quiet=True, words=("weight", "master", "optimizer"), first="silent")
def masters_stay_at_the_old_checkpoint(folder: Path) -> None:
    """At step 12 weights are loaded; the optimizer's masters are those of before training, and its next step writes them."""

    def make(sick: bool) -> Any:
        model: Any = ao(Decoder(nn.Linear, attention=LowRank), "tensorwise", keep=("head",))
        begun_at = copy.deepcopy(model.state_dict())

        def after(step: int, watch: Any) -> None:
            if sick and step == 12:
                model.load_state_dict(begun_at)

        return model, {"after_step": after, "lr": 4e-3}

    twins(folder, make, steps=24, exclude=("head",))


# Not FP8's


@variant("25", met=4, quiet=True, words=("input", "data", "batch", "outside"), first="misled")
def samples_of_another_range_in_one_microbatch(folder: Path) -> None:
    """One microbatch of step 13 has values from 0 to 255 where the others are standardised."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        x, y = table(number)
        return (x * 60 + 128 if number == 27 else x), y

    run(Regression(PowerLinear), folder / "sick", data=data, loss_of=squares, micro=2, every=1)


class Lion(torch.optim.Optimizer):
    """The sign of an average of gradients."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move all weights."""
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                m = self.state[p].get("exp_avg", torch.zeros_like(p))
                p -= self.param_groups[0]["lr"] * m.lerp(p.grad, 0.1).sign()
                self.state[p]["exp_avg"] = m.lerp(p.grad, 0.01)


@variant("27", met=4, quiet=True, words=("learning rate", "update", "grow"), first="right")
def lion_with_the_rate_of_sgd(folder: Path) -> None:
    """A rate of 0.1 moves every weight by the size of one."""

    def make(sick: bool) -> Any:
        model: Any = fp8debug.convert(TiedHead(nn.Linear), "tensorwise_current", overrides={"head": None})
        return model, {"optimizer": Lion(model.parameters(), 0.1 if sick else 3e-4)}

    twins(folder, make, steps=24)


# Checkpoints and delayed scales


@variant("m20", met=4, tensors=("input",), gemms=("fprop",), words=("e5m2", "format"), first="right")
def resumed_with_another_format(folder: Path) -> None:
    """The flags of a resume at step 10 lack the format: inputs of the forward pass are in E5M2."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        scales = scales * 448 / 57344
        return (x.float() / expanded(scales, x.shape, (1, 128))).clamp(-57344, 57344).to(E5M2), scales

    model: Any = Decoder(OwnLinear, attention=Separate)
    for layer in model.modules():
        if isinstance(layer, OwnLinear):
            layer.cast_faults = {("fprop", "input"): late(fault, 10)}
    run(model, folder / "sick")


@variant("m1", met=4, modules=("layers.0.mlp.gate", "layers.0.mlp.up"), tensors=("input",), words=CLIPPED, first="right")
def history_moves_in_the_first_microbatch_alone(folder: Path) -> None:
    """The flag for a new step stays set: a second microbatch whose tokens are five times as large is not in the history."""
    model: Any = Decoder(SavedLinear)

    class Own(SavedLinear):
        def amax(self, tensor: str, x: Tensor) -> Tensor:
            now = x.detach().float().abs().max().reshape(())
            past = vars(self).setdefault("past", {}).setdefault(tensor, [])
            used = torch.stack(past[-4:]).max() if past else now
            if NOW["micro"] == 0:
                past.append(now)
            return used

    model.layers[0].mlp.gate.__class__ = model.layers[0].mlp.up.__class__ = Own
    norm = model.layers[0].norm2.forward
    vars(model.layers[0].norm2)["forward"] = lambda x: norm(x) * (5 if NOW["micro"] else 1)
    run(model, folder / "sick", micro=2)


@variant(
    "m2",
    met=4,
    modules=("fc1",),
    gemms=("fprop",),
    tensors=("input",),
    words=("history", "older", "stale", "spike", "longer"),
    first="right",
)
def history_of_a_thousand_after_one_bad_sample(folder: Path) -> None:
    """A sample of step 4 holds a value of a million: the amax history of 1024 steps keeps it."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        x, y = table(number)
        if number == 4:
            x[7, 60] = 1e6
        return x, y

    class Own(SavedLinear):
        history = 1024

    model: Any = Regression(Own)
    run(model, folder / "sick", data=data, loss_of=functional.huber_loss, every=2)


@variant("m9", met=4, modules=("head",), words=("head", "embed", "tied"), first="silent")
def head_that_is_the_embedding_in_fp8(folder: Path) -> None:
    """A filter leaves out ``embed``; the head has the same weight under another name, and is cast under one scale."""
    run(ao(TiedHead(nn.Linear), "tensorwise", keep=("embed",)), folder / "sick")


@variant(
    "m30",
    met=4,
    modules=("layer.attn.wo",),
    gemms=("dgrad",),
    tensors=("grad_output",),
    words=("row", "token", "underflow", "scale"),
    first="silent",
)
def one_sample_weighs_most_in_e4m3(folder: Path) -> None:
    """Importance weights of a batch span six orders: under one scale in E4M3 a fifth of the gradient vanishes."""

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        weights = torch.logspace(0, -6, len(classes))
        return (functional.cross_entropy(out.float(), classes, reduction="none") * weights).sum() / weights.sum()

    model: Any = Latents(RowLinear)
    model.layer.attn.wo.__class__ = TensorsOfE4M3
    run(model, folder / "sick", data=counted, loss_of=loss)


@variant("m7", met=4, modules=("layers.0.mlp.up",), gemms=("wgrad",), tensors=("input", "grad_output"), first="right")
def columns_cast_again_from_the_rows(folder: Path) -> None:
    """The operand of wgrad comes from the codes of fprop, under FP32 scales of other blocks: 3 dB, and no more."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        rows = x.t().contiguous()
        once = codes_of(rows, (1, 128)) * scales_of(rows, (1, 128), 448.0)
        again = once.t().contiguous()
        own = scales_of(again, (1, again.shape[1]), 448.0)
        return (again / own).clamp(-448, 448).to(E4M3), own

    model: Any = Decoder(RowLinear, Swiglu)
    run(spoil(model, "layers.0.mlp.up", {("wgrad", "input"): fault}), folder / "sick")


@variant(
    "m33",
    met=4,
    modules=("layers.1.attn.wo",),
    gemms=("fprop",),
    tensors=("output", "input", "weight"),
    words=("scale",),
    first="right",
)
def input_scale_is_not_applied_in_one_file(folder: Path) -> None:
    """From step 5 on the input's scale argument is one."""

    def spoils(gemm: str, tensor: str, data: Tensor, scale: Tensor) -> Cast:
        is_here = (gemm, tensor) == ("fprop", "input") and NOW["step"] >= 5
        return data, torch.ones_like(scale) if is_here else scale

    run(faulty(Decoder(OneFileLinear, attention=Separate), "layers.1.attn.wo", spoils), folder / "sick")
