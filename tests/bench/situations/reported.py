"""Ten more reports of 2025 and 2026, of FP4 rounding, compiled kernels, offloading and a resume; what is right came first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.faults.base import Clock, Target, distort
from fp8debug.faults.base import quantized as known
from fp8debug.formats import FORMATS, block_shape
from fp8debug.kernels.reference import as_cast_reads, round_to_format
from fp8debug.metrics import Source
from fp8debug.metrics.base import spread
from fp8debug.types import Gemm, Quantized, TensorRole
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    Block,
    BlockLinear,
    Cast,
    Model,
    OwnKernel,
    TwoExperts,
    altered,
    fp8_gemm_nt,
    quantized,
    scales_of,
    train,
    values,
    with_fault,
)


def _rounded_at_random(recipe: str, rounding: Callable[[Tensor, Any], Tensor]) -> Model:
    """Return the model in a recipe of few bits whose gradients are rounded by another function of the scaled values."""
    model = Model(nn.Linear)
    fp8debug.convert(model, recipe, overrides={"head": None})

    def corrupt(x: Tensor, cast: Any, ordinary: Any, options: dict[str, Any]) -> Any:
        q, cast = known(ordinary(x, cast))
        if cast.rounding != "stochastic":
            return q, cast
        scaled = as_cast_reads(Source(x), cast).value / spread(q.scale_inv, *block_shape(cast.granularity, *x.shape), *x.shape)
        return Quantized(rounding(scaled, FORMATS[cast.format]).reshape(q.data.shape), q.scale_inv), cast

    clock = Clock(model)
    for name, module in model.named_modules():
        if isinstance(module, fp8debug.Fp8Linear) and not module.recipe.is_high_precision:
            keys = ((Gemm("dgrad"), TensorRole("grad_output")), (Gemm("wgrad"), TensorRole("grad_output")))
            distort(Target(model, module, name, 0, {}, clock), corrupt, *keys)
    return model


@situation(
    "axolotl-ai-cloud/axolotl#3767",
    "the fallback of stochastic rounding dithers with twice the distance of two FP4 values: too much noise, and a bias",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F145",), words=("round",),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def dither_of_twice_the_step(folder: Path) -> None:
    random = torch.Generator().manual_seed(11)

    def rounding(scaled: Tensor, fmt: Any) -> Tensor:
        exponent = torch.frexp(scaled.abs().clamp(min=fmt.min_normal))[1] - 1
        step = torch.exp2(exponent.float())  # of FP4 the distance is half of that
        dithered = scaled + (torch.rand(scaled.shape, generator=random) - 0.5) * step
        return round_to_format(dithered, fmt)

    train(_rounded_at_random("nvfp4", rounding), folder / "sick")
    model = Model(nn.Linear)
    train(fp8debug.convert(model, "nvfp4", overrides={"head": None}), folder / "clean")


@situation(
    "AMD-AGI/Primus-Turbo#365",
    "the seed of stochastic rounding is zero in every launch: an element meets the same random number in each step",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F145",),
    words=("come back", "seed", "generator"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def zero_seed_in_every_launch(folder: Path) -> None:
    def rounding(scaled: Tensor, fmt: Any) -> Tensor:
        noise = torch.rand(scaled.shape, generator=torch.Generator().manual_seed(0))
        return round_to_format(scaled, fmt, noise=noise)

    train(_rounded_at_random("mxfp4", rounding), folder / "sick")


@situation(
    "pytorch/pytorch#188841",
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
    "marin-community/marin#8339",
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


class _Masked(Block):
    """A gated MLP of which some tokens switch a third of the hidden units off."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        hidden = nn.functional.silu(self.gate(h)) * self.up(h)
        kept = torch.ones_like(hidden)
        kept[::5, 128:256] = 0
        out: Tensor = x + self.down(hidden * kept)
        return out


@situation(
    "NVIDIA/TransformerEngine#2589",
    "the inverse scale of an empty block has mantissa bits, which spill into its neighbour's exponent as four scales are packed",
    first="right", modules=("blocks.0.down",), gemms=("fprop",), tensors=("output", "input"),
    codes=("F103", "F108", "F113", "F125"), words=("kernel", "scale", "gemm"),
    misleading=("smooth", "optimizer", "learning rate", "fast accumulation"),
)  # fmt: skip
def empty_block_spills_over(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = a
        if recipe == "fprop" and scales.shape[1] > 1:
            spills = torch.zeros_like(scales, dtype=torch.bool)
            spills[:, :-1] = scales[:, 1:] < 2.0**-120
            exponent = (scales.contiguous().view(torch.int32) >> 23) | (spills.int() << 7)
            a = (data, (exponent << 23).view(torch.float32))
        fp8_gemm_nt(a, b, d)

    class Rounded(OwnKernel):
        """Block scales that are powers of two, of an empty block the smallest."""

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            x, block = x.contiguous(), (128, 128) if tensor == "weight" else (1, 128)
            scales = torch.exp2(scales_of(x, block, 448.0, eps=1e-30).log2().ceil())
            scales = torch.where(scales < 2.0**-100, 2.0**-126, scales)
            return quantized(x, scales, block), scales

    train(Model(Rounded, block=_Masked), folder / "sick", kernel=kernel)


@situation(
    "pytorch/ao#1516",
    "the mask of a transposing cast has rows and columns exchanged: most of dgrad's weight is never written",
    first="misled", modules=DOWN, gemms=("dgrad",), tensors=("weight",), codes=("F103", "F113", "F125", "F128"),
    words=("never written", "the cast", "uninitialized"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def mask_of_the_other_shape(folder: Path) -> None:
    random = torch.Generator().manual_seed(5)

    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        behind = torch.randn(rows, columns, generator=random).bfloat16().view(torch.uint8)[:, :columns].clone()
        behind[:columns] = data.view(torch.uint8)[:columns]  # in bounds of the other shape
        return behind.view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "NVIDIA/Megatron-LM#2272",
    "FP8 parameters are made from a buffer that the gradients share: from the second step on the weights are gradients",
    first="incomplete", gemms=("fprop",), tensors=("weight",), codes=("F112", "F119", "F121", "F128"),
    words=("another tensor", "older", "not the weight"), misleading=("smooth", "eps", "learning rate"),
)  # fmt: skip
def weights_from_the_gradient_buffer(folder: Path) -> None:
    class Fault(BlockLinear):
        buffer: Tensor | None = None

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor == "weight" and self.buffer is not None:
                x = self.buffer.t() if gemm == "dgrad" else self.buffer
            return super().cast(gemm, tensor, x)

    model = Model(Fault)

    def share(step: int, number: int) -> None:
        for layer in model.modules():
            if isinstance(layer, Fault):
                layer.buffer = layer.weight.grad.clone()  # type: ignore[union-attr]  # after a backward pass

    train(model, folder / "sick", after_backward=share)


@situation(
    "NVIDIA/Megatron-LM#6920",
    "after a checkpoint is loaded the ranks' parameters are not gathered: until the next step most of the model is its start",
    first="silent", codes=("F125", "F144", "F150"), words=("resume", "checkpoint", "loaded"),
    misleading=("smooth", "eps", "learning rate", "scale_rounding"),
)  # fmt: skip
def not_gathered_after_loading(folder: Path) -> None:
    class Masters:
        """Adam over FP32 copies, which are written to the parameters after each step."""

        def __init__(self, model: nn.Module) -> None:
            self.parameters = list(model.parameters())
            self.copies = [p.detach().float().clone() for p in self.parameters]
            self.inner = torch.optim.AdamW(self.copies, lr=2e-3)

        def step(self) -> None:
            for copy, p in zip(self.copies, self.parameters, strict=True):
                copy.grad = p.grad.float()  # type: ignore[union-attr]  # after a backward pass
            self.inner.step()
            with torch.no_grad():
                for copy, p in zip(self.copies, self.parameters, strict=True):
                    p.copy_(copy)

        def zero_grad(self) -> None:
            for p in self.parameters:
                p.grad = None

    model = Model()
    optimizer: Any = Masters(model)
    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer)
    saved = [copy.clone() for copy in optimizer.copies]
    again = Model()
    other: Any = Masters(again)
    with torch.no_grad():
        for copy, old in zip(other.copies, saved, strict=True):
            copy.copy_(old)
        for name, p in again.named_parameters():
            if name.startswith(("embed", "blocks.0")):  # what this rank owns
                p.copy_(model.get_parameter(name))
    train(again, folder / "sick", steps=24, every=2, optimizer=other, resume_from=24)


@situation(
    "NVIDIA/Megatron-LM#7398",
    "in the first iteration an offloaded input is read back before it has arrived: wgrad gets that of the microbatch before",
    first="incomplete", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F112", "F115", "F121", "F128"),
    words=("another tensor", "older", "stale"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def offloaded_input_read_too_early(folder: Path) -> None:
    class Fault(BlockLinear):
        staging: Tensor | None = None
        num = 0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) == ("wgrad", "input"):
                self.num += 1
                if self.num == 2 and self.staging is not None:
                    return super().cast(gemm, tensor, self.staging)
                self.staging = x.clone()
            return super().cast(gemm, tensor, x)

    train(with_fault(Fault), folder / "sick", micro=2)


@situation(
    "modelscope/ms-swift#10157",
    "offloading takes a square activation and its transpose for one tensor: wgrad reads the input untransposed",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("transpos", "place", "order", "layout"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def transpose_taken_for_its_tensor(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, x.t() if (gemm, tensor) == ("wgrad", "input") else x)

    train(with_fault(Fault, hidden=320), folder / "sick")
