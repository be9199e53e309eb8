"""The second set: operands, scales and results of single Linears."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.relatives import variant
from tests.bench.relatives.plain import (
    Decoder,
    Experts,
    Grouped,
    Reward,
    SavedLinear,
    Swiglu,
    Translator,
    Vit,
    fit,
    images,
    of_classes,
    pairs,
    preference,
    sentences,
    spoil,
)
from tests.bench.relatives.stack import (
    E4M3,
    E5M2,
    NOW,
    Cast,
    OwnLinear,
    RowLinear,
    late,
    pow2_up,
)
from tests.bench.situations.stack import LARGEST, fp8_gemm_nt, scales_of


def as_bytes(change: Any) -> Any:
    """Return a fault that changes the codes and keeps the scales."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return change(data.contiguous().view(torch.uint8).clone()).view(data.dtype), scales

    return fault


# 00: an operand that is plainly not its tensor


@variant("00", met=2, modules=("decoder.0.cross.k",), gemms=("fprop",), tensors=("input",), first="right")
def swizzled_columns_of_cross_keys(folder: Path) -> None:
    model = Translator(RowLinear)
    swapped = as_bytes(lambda b: b.unflatten(1, (-1, 2, 16)).flip(2).flatten(1))
    fit(spoil(model, "decoder.0.cross.k", {("fprop", "input"): swapped}), folder / "sick", data=sentences)


@variant("00", met=2, modules=("layers.1.mlp.experts.2.up",), gemms=("fprop", "dgrad"), tensors=("weight",), first="right")
def reversed_rows_of_one_expert_late(folder: Path) -> None:
    model = Decoder(SavedLinear, Experts)
    fault = late(as_bytes(lambda b: b.flip(0)), 10)
    fit(spoil(model, "layers.1.mlp.experts.2.up", {"weight": fault}), folder / "sick", every=3)


@variant("00", met=2, modules=("layers.0.attn.o",), gemms=("wgrad",), tensors=("input",), first="right")
def wgrad_reads_another_microbatch(folder: Path) -> None:
    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        before, layer.kept = getattr(layer, "kept", None), (data, scales)
        return before if before is not None and NOW["step"] >= 4 else (data, scales)

    model = spoil(Decoder(OwnLinear), "layers.0.attn.o", {("wgrad", "input"): fault})
    fit(model, folder / "sick", micro=2)


# 01 and 31: a scale that is not the one of the data


@variant("01", met=2, modules=("layers.1.mlp.gate",), gemms=("wgrad",), tensors=("grad_output",), words=("scale",), first="right")
def rounded_up_wgrad_third_step(folder: Path) -> None:
    fault = late(lambda x, d, s, layer: (d, pow2_up(s)), 0, 3)
    model = spoil(Vit(RowLinear), "layers.1.mlp.gate", {("wgrad", "grad_output"): fault})
    fit(model, folder / "sick", data=images, loss_of=of_classes, every=1)


@variant("01", met=2, modules=("layers.1.mlp.down",), tensors=("weight",), words=("scale",), first="right")
def smoothed_scale_beside_current_data(folder: Path) -> None:
    """Data under the current scale; what is stored is its running mean, 12 % off while the weight grows."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        layer.mean = scales * 0.8 if not hasattr(layer, "mean") else layer.mean * 0.95 + scales * 0.05
        return data, layer.mean

    fit(spoil(Decoder(SavedLinear), "layers.1.mlp.down", {"weight": fault}), folder / "sick")


# 03 and 38: a kernel that does not use what it is given


def with_kernel(change: Any) -> None:
    """Replace the library's GEMM on the path of one flag."""

    def library(a: Cast, b: Cast, d: Tensor, c: Any = None, recipe: Any = None, **options: Any) -> None:
        (change if recipe else fp8_gemm_nt)(a, b, d)

    vars(sys.modules["deep_gemm"])["fp8_gemm_nt"] = library


@variant("03", met=2, modules=("layers.0.mlp.down",), gemms=("fprop",), tensors=("output",), misleading=("accum",), first="right")
def kernel_shifts_row_scales(folder: Path) -> None:
    model: Any = Decoder(OwnLinear)
    model.layers[0].mlp.down.path = "fprop"
    with_kernel(lambda a, b, d: fp8_gemm_nt((a[0], a[1].roll(1, 0)), b, d))
    fit(model, folder / "sick", every=4)


@variant(
    "03", met=2, modules=("layers.1.mlp.up",), gemms=("dgrad",), tensors=("grad_input",), misleading=("accum",), first="right"
)
def kernel_drops_last_columns_of_k_fifth_step(folder: Path) -> None:
    def change(a: Cast, b: Cast, d: Tensor) -> None:
        if NOW["step"] % 5 == 4:
            a = as_bytes(lambda c: torch.cat([c[:, :-32], c[:, -32:] * 0], 1))(None, *a, None)
        fp8_gemm_nt(a, b, d)

    model: Any = Decoder(OwnLinear)
    model.layers[1].mlp.up.path = "dgrad"
    with_kernel(change)
    fit(model, folder / "sick", every=1)


@variant(
    "m38",
    met=2,
    modules=("layers.0.mlp.gate",),
    gemms=("fprop",),
    tensors=("output",),
    misleading=("use_fast_accum",),
    first="right",
)
def split_k_adds_in_fp8(folder: Path) -> None:
    """The halves of a split K are kept in E5M2 between them: 25 dB at K = 128, of which no accumulator is the cause."""

    def change(a: Cast, b: Cast, d: Tensor) -> None:
        halves = []
        for part in (slice(0, 64), slice(64, 128)):
            keep = torch.zeros(a[0].shape[1], dtype=torch.uint8)
            keep[part] = 255
            half = torch.empty_like(d, dtype=torch.float32)
            fp8_gemm_nt((as_bytes(lambda c, keep=keep: c & keep)(None, *a, None)[0], a[1]), b, half)
            halves.append(half.to(E5M2).float())
        d.copy_(halves[0] + halves[1])

    model: Any = Decoder(OwnLinear)
    model.layers[0].mlp.gate.path = "fprop"
    with_kernel(change)
    fit(model, folder / "sick")


# 08: a gradient's cast that loses values


@variant(
    "08",
    met=2,
    modules=("layers.1.mlp.experts.0.down",),
    gemms=("dgrad", "wgrad"),
    tensors=("grad_output",),
    words=("zero", "underflow"),
    first="right",
)
def zero_gradient_of_one_expert(folder: Path) -> None:
    model = Decoder(SavedLinear, Experts)
    fault = as_bytes(torch.zeros_like)
    fit(spoil(model, "layers.1.mlp.experts.0.down", {"grad_output": fault}), folder / "sick")


@variant(
    "08",
    met=2,
    modules=("layers.0.mlp.up",),
    gemms=("wgrad",),
    tensors=("grad_output",),
    words=("zero", "underflow"),
    first="silent",
)
def small_values_zero_in_wgrad(folder: Path) -> None:
    """Values below a sixteenth of the row's largest become zero."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        keep = data.float().abs() >= LARGEST[data.dtype] / 16
        return (data.float() * keep).to(data.dtype), scales

    model = spoil(Vit(RowLinear), "layers.0.mlp.up", {("wgrad", "grad_output"): fault})
    fit(model, folder / "sick", data=images, loss_of=of_classes)


# 10: rows of a result that nobody wrote


@variant(
    "10",
    met=2,
    modules=("layers.0.mlp.experts.1.down",),
    gemms=("fprop",),
    tensors=("output",),
    misleading=("accum",),
    first="silent",
)
def expert_tail_keeps_old_rows(folder: Path) -> None:
    """The kernel writes whole tiles of 32 rows; what is behind them is of an earlier tensor."""

    def change(out: Tensor) -> Tensor:
        tail = len(out) % 32
        out[len(out) - tail :] = torch.randn(tail, out.shape[1], generator=torch.Generator().manual_seed(tail))
        return out

    model = Decoder(SavedLinear, Experts)
    fit(spoil(model, "layers.0.mlp.experts.1.down", results={"fprop": change}), folder / "sick")


@variant(
    "10", met=2, modules=("layers.1.attn.q",), gemms=("dgrad",), tensors=("grad_input",), misleading=("eps",), first="silent"
)
def dgrad_tail_huge_sixth_step(folder: Path) -> None:
    def change(out: Tensor, layer: Any) -> Tensor:
        if NOW["step"] % 6 == 3:
            out[-3:] = 1e3
        return out

    model = spoil(Vit(OwnLinear), "layers.1.attn.q", results={"dgrad": change})
    fit(model, folder / "sick", data=images, loss_of=of_classes)


# 11 and 12: zero rows under a scale without a lower bound


@variant("11", met=2, modules=("patch",), gemms=("fprop", "wgrad"), tensors=("input",), words=("eps",), first="incomplete")
def black_patches(folder: Path) -> None:
    def data(number: int) -> tuple[Tensor, Tensor]:
        x, y = images(number)
        return x * (torch.arange(16) < (12 if NOW["step"] >= 5 else 16))[:, None], y

    for name, eps in (("sick", 0.0), ("clean", 1e-12)):
        model: Any = Vit(RowLinear)
        model.patch.eps = eps
        fit(model, folder / name, data=data, loss_of=of_classes, steps=14)


@variant(
    "11",
    met=2,
    modules=tuple(f"decoder.{n}.cross.{p}" for n in (0,) for p in "kv"),
    gemms=("fprop",),
    tensors=("input",),
    words=("eps",),
    first="right",
)
def masked_memory(folder: Path) -> None:
    for name, eps in (("sick", 0.0), ("clean", 1e-12)):
        model: Any = Translator(OwnLinear)
        model.mask = lambda memory: memory * (torch.arange(40) < 33)[:, None]
        for layer in model.modules():
            if isinstance(layer, OwnLinear):
                layer.eps = eps
        fit(model, folder / name, data=sentences, steps=10)


@variant(
    "12",
    met=2,
    modules=("layers.1.mlp.down", "layers.1.attn.q", "layers.1.attn.o"),
    gemms=("dgrad", "wgrad"),
    tensors=("grad_output",),
    words=("eps",),
    first="right",
)
def gradient_of_last_tokens_alone(folder: Path) -> None:
    """Of a reward model only the last tokens have a gradient in the last layer: all other rows are zero."""
    for name, eps in (("sick", 0.0), ("clean", 1e-12)):
        model = Reward(RowLinear)
        for layer in model.modules():
            if isinstance(layer, OwnLinear):
                layer.eps = eps
        fit(model, folder / name, data=pairs, loss_of=preference, steps=10)


# 15: a copy of the weight that is out of step


@variant("15", met=2, modules=("layers.1.attn.o",), tensors=("weight",), words=("cache", "copy", "stale", "older"), first="right")
def cached_at_first_use(folder: Path) -> None:
    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        kept: Cast = vars(layer).setdefault("kept", (data, scale))
        return kept

    fit(spoil(Decoder(SavedLinear), "layers.1.attn.o", {"weight": fault}), folder / "sick", lr=4e-3)


@variant("15", met=2, modules=("layers.0.mlp.up",), tensors=("weight",), words=("cache", "copy", "stale", "older"), first="right")
def cache_renewed_every_eighth_step(folder: Path) -> None:
    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        if NOW["step"] % 8 == 0:
            layer.kept = data, scales
        kept: Cast = layer.kept
        return kept

    model = spoil(Vit(RowLinear), "layers.0.mlp.up", {("fprop", "weight"): fault})
    fit(model, folder / "sick", data=images, loss_of=of_classes, lr=4e-3, steps=26)


# 17: clipped by an older scale, or by a margin that is none


@variant(
    "17",
    met=2,
    modules=("encoder.0.mlp.gate", "encoder.0.mlp.up"),
    gemms=("fprop", "wgrad"),
    tensors=("input",),
    words=("histor", "older", "stale", "outgrown"),
    first="right",
)
def history_of_sixteen_steps_ago(folder: Path) -> None:
    """An index of the ring buffer is wrong: the scale is that of 12 steps ago, while the input grows 8 % a step."""

    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        past = vars(layer).setdefault("scales", [])
        past.append(scale)
        old = past[max(0, len(past) - 13)]
        return (x.float() / old).clamp(-448, 448).to(E4M3), old

    model: Any = Translator(SavedLinear)
    model.encoder[0].norm2.register_forward_hook(lambda module, args, out: out * 1.08 ** NOW["step"])
    for name in ("gate", "up"):
        spoil(model, f"encoder.0.mlp.{name}", {"input": fault})
    fit(model, folder / "sick", data=sentences, steps=30)


@variant("17", met=2, modules=("layers.1.attn.v",), tensors=("weight",), words=("clip", "saturat"), first="incomplete")
def margin_of_the_wrong_sign(folder: Path) -> None:
    """A margin of -1: the scale is half of what the largest weight needs."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        half = scales / 2
        return (x.float() / half).clamp(-448, 448).to(E4M3), half

    fit(spoil(Decoder(RowLinear), "layers.1.attn.v", {("fprop", "weight"): fault}), folder / "sick")


# 23 and 7: rounded twice


@variant(
    "23",
    met=2,
    modules=("layers.1.mlp.down",),
    gemms=("wgrad",),
    tensors=("input",),
    words=("twice", "again", "already"),
    first="right",
)
def wgrad_from_the_codes_of_fprop(folder: Path) -> None:
    """Input of wgrad: the rows' codes of fprop, decoded and cast again by columns."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        rows = scales_of(x.t(), (1, x.shape[0]), 448.0)
        once = ((x.t() / rows).to(E4M3).float() * rows).t()
        return (once / scales).clamp(-448, 448).to(E4M3), scales

    fit(spoil(Decoder(RowLinear), "layers.1.mlp.down", {("wgrad", "input"): fault}), folder / "sick")


@variant("23", met=2, tensors=("weight",), words=("twice", "again", "already"), first="right")
def frozen_base_cast_again_under_adapters(folder: Path) -> None:
    """A frozen base of a checkpoint in rows of E4M3 is cast again with one scale; only adapters train."""

    class Adapted(nn.Module):
        def __init__(self, i: int, o: int, bias: bool = False) -> None:
            super().__init__()
            self.base = SavedLinear(i, o, bias=False)
            self.down, self.up = nn.Linear(i, 8, bias=False), nn.Linear(8, o, bias=False)
            with torch.no_grad():
                w, self.up.weight[:] = self.base.weight * torch.exp2(torch.linspace(-2, 2, o))[:, None], 0
                rows = scales_of(w, (1, i), 448.0)
                w.copy_((w / rows).to(E4M3).float() * rows)
                self.base.weight.copy_(w)
            self.base.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.up(self.down(x))
            return out

    fit(Decoder(Adapted), folder / "sick", what_if=("rowwise",))


# 24 and 32: the scale of something else


@variant("24", met=2, modules=("layers.0.attn.q",), gemms=("dgrad",), tensors=("weight",), words=("scale",), first="right")
def scales_of_fprop_in_dgrad(folder: Path) -> None:
    """A square weight: the transposed codes come with the scales of the rows that they were."""

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return data, scales_of(x.t(), (1, x.shape[0]), 448.0)

    model: Any = Decoder(RowLinear)
    with torch.no_grad():
        model.layers[0].attn.q.weight *= torch.exp2(torch.linspace(-1.5, 1.5, 128))[:, None]
    fit(spoil(model, "layers.0.attn.q", {("dgrad", "weight"): fault}), folder / "sick")


@variant("24", met=2, modules=("layers.1.mlp.up",), gemms=("fprop", "wgrad"), tensors=("input",), words=("scale",), first="right")
def scale_for_the_other_format(folder: Path) -> None:
    """The scale is made for E5M2's largest value, the data are E4M3: nearly all of them clip."""

    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        wrong = x.abs().max() / 57344
        return (x.float() / wrong).clamp(-448, 448).to(E4M3), wrong.float()

    fit(spoil(Decoder(SavedLinear), "layers.1.mlp.up", {"input": fault}), folder / "sick", steps=14)


# 25: a scale that is no number, or zero


@variant(
    "25",
    met=2,
    modules=("layers.1.mlp.experts.3.gate",),
    tensors=("weight",),
    words=("scale",),
    misleading=("eps",),
    first="misled",
)
def scale_of_one_expert_lost_at_a_sync(folder: Path) -> None:
    fault = late(lambda x, d, s, layer: (d, torch.full_like(s, float("nan"))), 7)
    model = spoil(Decoder(RowLinear, Experts), "layers.1.mlp.experts.3.gate", {("fprop", "weight"): fault})
    fit(model, folder / "sick", steps=12, every=4)


@variant(
    "25",
    met=2,
    modules=("layers.0.mlp.gate",),
    gemms=("fprop",),
    tensors=("weight",),
    words=("scale",),
    misleading=("eps",),
    first="right",
)
def scales_of_some_rows_zero(folder: Path) -> None:
    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return data, scales * (torch.arange(len(scales)) >= 12)[:, None]

    fit(spoil(Decoder(RowLinear), "layers.0.mlp.gate", {("fprop", "weight"): fault}), folder / "sick")


# 29 and 30: a floor above the tensor, rows lost under one scale


@variant(
    "m29",
    met=2,
    modules=("layers.0.mlp.down",),
    gemms=("dgrad", "wgrad"),
    tensors=("grad_output",),
    words=("eps", "floor"),
    first="right",
)
def floor_above_the_gradient(folder: Path) -> None:
    """The casts of one layer keep amax at 64 at least; its input may be that large, its gradients are 1e-3."""
    model: Any = Decoder(OwnLinear)
    model.layers[0].mlp.down.eps = 64.0
    fit(model, folder / "sick")


@variant(
    "m30", met=2, modules=("layers.1.attn.qkv",), gemms=("fprop", "dgrad"), tensors=("weight",), words=("row",), first="silent"
)
def fused_projection_of_two_sizes(folder: Path) -> None:
    """Queries, keys and values in one weight with one scale; the values' rows are 2^17 times smaller, then multiplied."""

    class Fused(nn.Module):
        def __init__(self, linear: Any, is_causal: bool) -> None:
            super().__init__()
            self.qkv, self.o = linear(128, 384, bias=False), linear(128, 128, bias=False)
            with torch.no_grad():
                self.qkv.weight[256:] *= 2.0**-17

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            out = functional.scaled_dot_product_attention(q, k, v * 2.0**17, is_causal=True)
            said: Tensor = self.o(out.transpose(1, 2).flatten(2))
            return said

    number = iter(range(2))
    model = Decoder(
        SavedLinear,
        depth=2,
        attention=lambda linear, is_causal: (Fused if next(number) else Grouped)(linear, is_causal=is_causal),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    fit(model, folder / "sick", optimizer=optimizer)


# 28 and 36: small, or now and then


@variant("m36", met=2, modules=("layers.0.attn.k",), tensors=("input", "output"), gemms=("fprop",), first="right")
def one_block_of_tokens_of_another_tensor_ninth_step(folder: Path) -> None:
    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        if NOW["step"] % 9 == 8:
            data = as_bytes(lambda b: torch.cat([b[:192], b[:128].flip(1)]))(x, data, scales, layer)[0]
        return data, scales

    model = spoil(Decoder(OwnLinear), "layers.0.attn.k", {("fprop", "input"): fault})
    fit(model, folder / "sick", every=1, steps=30)


@variant("m28", met=2, modules=("layers.1.mlp.up",), tensors=("grad_output",), gemms=("dgrad", "wgrad"), first="silent")
def gradient_truncated_to_two_bits(folder: Path) -> None:
    """A cast that cuts instead of rounding: E5M2 data 6 dB below their format, all of them too small."""

    def fault(x: Tensor, data: Tensor, scale: Tensor, layer: Any) -> Cast:
        scaled = (x.float() / scale).clamp(-57344, 57344)
        cut = (scaled.view(torch.int32) & ~((1 << 21) - 1)).view(torch.float32)
        return cut.to(E5M2), scale

    fit(spoil(Decoder(SavedLinear), "layers.1.mlp.up", {"grad_output": fault}), folder / "sick")


@variant("m32", met=2, modules=("layers.0.mlp.down",), gemms=("fprop",), tensors=("weight",), words=("scale",), first="right")
def grid_of_scales_transposed(folder: Path) -> None:
    model: Any = Decoder(OwnLinear, lambda linear: Swiglu(linear, 512))
    with torch.no_grad():
        model.layers[0].mlp.down.weight[:, :256] *= 6

    def fault(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        return data, scales.flip(1)

    fit(spoil(model, "layers.0.mlp.down", {("fprop", "weight"): fault}), folder / "sick")


def _wide(linear: Any) -> nn.Module:
    from tests.bench.relatives.plain import Swiglu

    return Swiglu(linear, 512)
