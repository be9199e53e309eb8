"""GEMMs and other kernels whose result is wrong though their operands are right."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    TOKENS,
    UP,
    Block,
    BlockLinear,
    Cast,
    FusedBlock,
    Model,
    OwnKernel,
    TwoExperts,
    _Product,
    copy_plain_run,
    cross_entropy,
    fp8_gemm_nt,
    quantized,
    scales_of,
    train,
    values,
    with_fault,
)


@situation(
    1, "huggingface/transformers#48205", "a backward GEMM leaves its last rows unwritten: NaN from recycled memory", "wrong",
    modules=DOWN, gemms=("dgrad",), codes=("F103",), words=("gemm",),
)  # fmt: skip
def gradient_rows_unwritten(folder: Path) -> None:
    now = [0]

    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "dgrad" and now[0] >= 1:
                out[-7:] = float("nan")
            return out

    train(with_fault(Fault), folder / "sick", steps=12, every=4, before=lambda step: now.__setitem__(0, step))


@situation(
    3, "marin-community/marin#7271",
    "the fused weight-gradient GEMM of one expert matrix returns NaN at the first backward pass; its operands are finite",
    first="misled", modules=DOWN, gemms=("wgrad",), tensors=("grad_weight",), codes=("F103", "F108", "F128"),
    words=("gemm", "kernel"), misleading=("amax_eps", "optimizer"),
)  # fmt: skip
def nan_of_a_fused_wgrad(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "wgrad":
                out[:, ::7] = float("nan")
            return out

    train(with_fault(Fault), folder / "sick", steps=6, every=2)


@situation(
    4, "IST-DASLab/FP-Quant#16",
    "the bias is added by the product and once more after it",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F128"), words=("bias",),
    misleading=("smooth", "optimizer"),
)  # fmt: skip
def bias_added_twice(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.bias is None else out + self.bias

    model = with_fault(Fault, bias=True)
    with torch.no_grad():
        bias = model.get_parameter("blocks.1.down.bias")
        bias.copy_(torch.linspace(-1, 1, len(bias)))
    train(model, folder / "sick")


@situation(
    5, "NVIDIA/TransformerEngine#3484",
    "the weight-gradient kernel contracts over the whole token buffer: what lies behind the tokens joins the sum",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F128"),
    words=("kernel", "pad"), misleading=("smooth", "optimizer", "fast accumulation", "eps"),
)  # fmt: skip
def padding_joins_wgrad(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe == "wgrad":
            behind = torch.Generator().manual_seed(3)
            left, right = (torch.randn(len(data), 64, generator=behind) * data.float().std() for data, _ in (a, b))
            d += (left * a[1].mean()) @ (right * b[1].mean()).t()

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    7, "pytorch/pytorch#188841",
    "a compiled kernel leaves every fourth column of the weight gradient at zero",
    first="incomplete", modules=DOWN, gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F128", "F149"),
    words=("never written", "zero", "columns"), misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def every_fourth_column_is_dead(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe == "wgrad":
            d[:, 3::4] = 0

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    7, "marin-community/marin#8339",
    "the grouped wgrad rounds a group's first row down to a multiple of 64: rows of the expert before it join its gradient",
    first="right", modules=("blocks.1.second.down", "blocks.1.second.up", "blocks.1.second.gate"), gemms=("wgrad",),
    tensors=("grad_weight",), codes=("F108", "F128"), words=("kernel", "rows", "other data"),
    misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def rows_of_the_group_before(folder: Path) -> None:
    before: dict[torch.Size, tuple[Tensor, Tensor]] = {}
    shift = TwoExperts.offset % 64

    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe != "wgrad":
            return
        first, second = values(a), values(b)
        if first.shape[1] == TwoExperts.offset:
            before[d.shape] = (first, second)
            return
        joined = [
            torch.cat([old[:, -shift:], new[:, :-shift]], 1) for old, new in zip(before[d.shape], (first, second), strict=True)
        ]
        d.copy_(joined[0] @ joined[1].t())

    train(Model(OwnKernel, block=TwoExperts), folder / "sick", kernel=kernel)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, writes_all: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.writes_all = writes_all
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        into_gate, into_up = grad * up * share * (1 + gate * (1 - share)), grad * gate * share
        if not ctx.writes_all:  # every row is stored at the first; the others hold what the memory held
            for into in (into_gate, into_up):
                into[0], into[1:] = into[-1].clone(), float("nan")
        return into_gate, into_up, None


class _GatedBlock(Block):
    writes_all = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(_SwiGLU.apply(self.gate(h), self.up(h), self.writes_all))
        return out


class _LastGatedBlock(_GatedBlock):
    writes_all = False


@situation(
    9, "ByteDance-Seed/Triton-distributed#180",
    "the backward kernel of SwiGLU stores the gradients of all rows in the first: the others were never written, and are NaN",
    first="misled", modules=(*UP, "blocks.1.gate"), gemms=("dgrad", "wgrad"), tensors=("grad_output",),
    codes=("F117", "F125"), words=("outside", "no linear"), misleading=("smooth", "eps", "learning rate", "loss scale"),
)  # fmt: skip
def rows_stored_in_the_first(folder: Path) -> None:
    for name, block in (("sick", _LastGatedBlock), ("clean", _GatedBlock)):
        model = Model(block=_GatedBlock)
        model.blocks[1].__class__ = block
        train(model, folder / name, steps=8, every=2)


@situation(
    10, "huggingface/kernels-community#1153",
    "the store of a tile has no mask for columns: what hangs over a row's end overwrites, at times, the next row's first ones",
    first="right", modules=("blocks.0.gate", "blocks.0.up"), gemms=("fprop",), tensors=("output",), codes=("F108", "F128"),
    words=("kernel", "overw", "rows"), misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def tile_hangs_over_the_row(folder: Path) -> None:
    random = torch.Generator().manual_seed(7)

    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        over = -d.shape[1] % 64
        if recipe == "fprop" and over:
            loses = torch.rand(len(d) - 1, generator=random) < 0.25
            d[1:, :over] = torch.where(loses[:, None], d[:-1, :over].clone(), d[1:, :over])

    train(Model(OwnKernel, hidden=416), folder / "sick", kernel=kernel)
    train(Model(OwnKernel, hidden=416), folder / "clean")


class _Experts(TwoExperts):
    """Two experts, the first of which has no tokens in every other step."""


@situation(
    10, "pytorch/pytorch#172439",
    "an expert without tokens gets a weight gradient: what the buffer held, as the kernel writes nothing for an empty group",
    first="silent", modules=tuple(f"blocks.{i}.first.{name}" for i in range(2) for name in ("gate", "up", "down")),
    gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F116", "F128", "F134", "F149"),
    words=("no token", "without token", "empty", "never written", "no rows"),
    misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def gradient_of_an_empty_group(folder: Path) -> None:
    held: dict[torch.Size, Tensor] = {}

    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe == "wgrad" and not a[0].shape[1]:
            d.copy_(held.get(d.shape, d))
        elif recipe == "wgrad":
            held[d.shape] = d.clone()

    def before(step: int) -> None:
        _Experts.offset = 100 if step % 2 else 0

    train(Model(OwnKernel, block=_Experts), folder / "sick", before=before, kernel=kernel)
    train(Model(OwnKernel, block=_Experts), folder / "clean", before=before)


@situation(
    12, "pytorch/ao#4846",
    "the wrapper of the weight takes over the Linear and passes its bias on to nobody: it is never added, and gets no gradient",
    first="silent", modules=("blocks.0.gate", "blocks.0.up", "blocks.0.down", "blocks.1.gate", *UP, *DOWN), words=("bias",),
    misleading=("smooth", "eps", "optimizer", "learning rate", "scale"),
)  # fmt: skip
def bias_never_added(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
            return out.reshape(*x.shape[:-1], -1)

    train(Model(Fault, bias=True), folder / "sick")
    train(Model(bias=True), folder / "clean")


@situation(
    14, "ROCm/TransformerEngine#580",
    "a backward GEMM leaves garbage in a band of columns of its result, in one call of forty",
    first="silent", gemms=("dgrad", "wgrad"), tensors=("grad_input", "grad_weight"), words=("kernel", "column"),
    misleading=("smooth", "eps", "scale_rounding", "learning rate", "loss scal", "optimizer"),
)  # fmt: skip
def garbage_columns_now_and_then(folder: Path) -> None:
    random = torch.Generator().manual_seed(14)

    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm != "fprop" and int(torch.randint(40, (), generator=random)) == 0:
                first = 16 * int(torch.randint(shape[1] // 16, (), generator=random))
                out[:, first : first + 16] = 2e3 * torch.randn(shape[0], 16, generator=random).to(out.dtype)
            return out

    train(Model(Fault), folder / "sick")
    copy_plain_run(folder / "clean")


class _Grouped(BlockLinear):
    """A Linear of a mixture's tokens in a padded buffer, tensorwise, whose kernel writes the rows of tokens alone.

    Attributes:
        leftover: what it finds in the other rows.
    """

    leftover: Callable[[], float] = staticmethod(lambda: 0.0)

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        x, block = x.contiguous(), (128, 128) if tensor == "weight" else (1, 128)
        scales = torch.full_like(scales_of(x, block, LARGEST[E4M3]), float(x.abs().max().clamp(min=1e-12)) / LARGEST[E4M3])
        return quantized(x, scales, block), scales

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        out = super().product(gemm, a, b, shape)
        if gemm != "wgrad":
            out[TOKENS:] = type(self).leftover()
        return out


class _PaddedExpert(Block):
    """An expert whose tokens lie in a buffer that is padded to a multiple of 128."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(functional.pad(x, (0, 0, 0, -len(x) % 128)))
        return out[: len(x)]


@situation(
    15, "AMD-AGI/Primus-Turbo#397",
    "a grouped GEMM never writes the rows of padding of its output: NaN of earlier tensors there, and in the next amax",
    first="right", modules=("blocks.0.up",), gemms=("fprop",), tensors=("output",), codes=("F103", "F117", "F128"),
    words=("gemm", "kernel", "never written", "unwritten", "uninitialized"),
    misleading=("smooth", "amax_eps", "learning rate", "optimizer", "loss scal"),
)  # fmt: skip
def output_rows_unwritten(folder: Path) -> None:
    calls = [0]

    def memory() -> float:
        calls[0] += 1
        return math.nan if calls[0] % 16 == 2 else 0.5  # the allocator's memory holds NaN now and then

    class Fault(_Grouped):
        leftover = staticmethod(memory)

    train(Model(Fault, block=_PaddedExpert), folder / "sick", steps=8, every=2)
    train(Model(_Grouped, block=_PaddedExpert), folder / "clean", steps=8, every=2)


@situation(
    16, "linkedin/Liger-Kernel#1413",
    "the fused backward kernel sums the products of gate and up into one accumulator, and the compiler drops those of up",
    first="right", modules=("blocks.0.gate_up", "blocks.1.gate_up"), gemms=("dgrad",), tensors=("grad_input",),
    codes=("F108", "F117", "F121", "F128"), words=("gemm", "kernel", "contract"),
    misleading=("smooth", "amax_eps", "learning rate", "optimizer", "loss scal", "scale_rounding"),
)  # fmt: skip
def dgrad_drops_the_up_half(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        first, second = values(a), values(b)
        if recipe == "dgrad" and first.shape[1] == 2 * 384:
            first, second = first[:, :384], second[:, :384]
        d.copy_(first @ second.t())

    train(Model(OwnKernel, block=FusedBlock), folder / "sick", kernel=kernel)
    train(Model(OwnKernel, block=FusedBlock), folder / "clean")


class _HalfResults(BlockLinear):
    """A Linear whose GEMMs write FP16."""

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        out = torch.empty(tuple(shape), dtype=torch.float16)
        sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out)
        return out


@situation(
    17, "huggingface/transformers#5651",
    "the result of the MLP's second Linear passes 65504 in training, FP16's largest: Inf there, and the loss is NaN",
    first="false alarm", modules=("blocks.0.down",), gemms=("fprop",), tensors=("output",),
    codes=("F103", "F108", "F125", "F128"), words=("fp16", "65504", "overflow", "range"),
    misleading=("smooth", "amax_eps", "learning rate", "optimizer", "scale_rounding", "unwritten"),
)  # fmt: skip
def result_beyond_fp16(folder: Path) -> None:
    for name, linear in (("sick", _HalfResults), ("clean", BlockLinear)):
        model = Model(linear)
        with torch.no_grad():  # the residual stream has grown, as a long training leaves it
            model.blocks[0].down.weight.mul_(1e5)

        def unscale(step: int, number: int, model: Model = model) -> None:
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(2.0**16)

        train(
            model, folder / name, every=2, after_backward=unscale,
            loss_of=lambda out, classes: cross_entropy(out, classes) * 2.0**16,
        )  # fmt: skip
