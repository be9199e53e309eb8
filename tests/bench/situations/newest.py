"""Twelve more reports, two of them of correct programs; what is right was written before the trial."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    BlockLinear,
    Cast,
    InInputType,
    Model,
    OwnKernel,
    altered,
    batch,
    cross_entropy,
    fp8_gemm_nt,
    train,
    with_fault,
)


@situation(
    "mlc-ai/pith-train#74",
    "transposing an FP8 tile inside the kernel puts a quarter of the bytes of dgrad's weight in other places",
    first="incomplete", modules=DOWN, gemms=("dgrad",), tensors=("weight",), codes=("F119", "F121", "F128"),
    words=("place", "permut", "transpos", "layout"), misleading=("refresh", "cache", "smooth", "eps", "optimizer"),
)  # fmt: skip
def transposed_in_pieces(folder: Path) -> None:
    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.view(torch.uint8).clone()
        codes[0::4, ::2], codes[1::4, ::2] = codes[1::4, ::2].clone(), codes[0::4, ::2].clone()
        return codes.view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "NVIDIA/TransformerEngine#3484",
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
    "modelscope/mcore-bridge#125",
    "loading quantized weights fills the copy of fprop alone: dgrad reads a transposed copy of zeros",
    first="right", gemms=("dgrad",), tensors=("weight",), codes=("F112", "F121", "F128"), words=("zero",),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def transposed_copy_of_zeros(folder: Path) -> None:
    @altered("dgrad", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return torch.zeros_like(data.view(torch.uint8)).view(E4M3), torch.ones_like(scales)

    train(Model(fault), folder / "sick")
    train(Model(), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#530",
    "shards of the transposed input are gathered along the wrong dimension: wgrad reads its tokens in another order",
    first="incomplete", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("place", "permut", "order", "transpos"), misleading=("smooth", "eps", "cache", "optimizer"),
)  # fmt: skip
def tokens_in_another_order(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.view(torch.uint8)
        return torch.cat(codes.chunk(2, 1), 0).reshape(codes.shape).view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "deepspeedai/DeepSpeed#8588",
    "gradients are divided by the loss scale that has just grown, not by the one of their backward pass: half of them is lost",
    first="silent", codes=("F126", "F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "bf16"),
)  # fmt: skip
def halved_when_the_scale_grows(folder: Path) -> None:
    model, scale = Model(), 4.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    with fp8debug.watch(model, folder / "sick", every=1) as watch:
        for step in range(32):
            tokens, classes = batch(step)
            loss = cross_entropy(model(tokens), classes)
            (loss * scale).backward()
            scale *= 2.0 if step % 4 == 3 else 1.0
            for p in model.parameters():
                assert p.grad is not None
                p.grad.div_(scale)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss, loss_scale=scale)


@situation(
    "Azure/MS-AMP#112",
    "the optimizer leaves weights that are kept as scaled tensors as they are",
    first="silent", codes=("F135", "F149"), words=("move", "stand", "update"),
    misleading=("eps", "smooth", "master", "stochastic", "bf16"),
)  # fmt: skip
def weights_left_as_they_are(folder: Path) -> None:
    class LeavesOut(torch.optim.Optimizer):
        """Sign descent with momentum, which writes the update of a scaled tensor into a copy."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                    moment.lerp_(p.grad, 0.1)
                    target = p.clone() if any(p is one for one in scaled) else p
                    target.sub_(group["lr"] * moment.sign())

    model = Model()
    scaled = [p for module in model.modules() if isinstance(module, BlockLinear) for p in module.parameters()]
    train(model, folder / "sick", optimizer=LeavesOut(model.parameters(), lr=2e-3))
    train(Model(), folder / "clean")


@situation(
    "ROCm/aiter#2900",
    "scales are written with one row stride and read with a padded one: all rows behind the first 32 get scales of others",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("scale", "layout", "kernel"), misleading=("smooth", "optimizer", "fast accumulation", "eps"),
)  # fmt: skip
def scales_with_another_stride(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = a
        if recipe == "fprop":
            rows, columns = scales.shape
            places = torch.arange(rows)[:, None] // 32 * 32 * (columns + 1) + torch.arange(rows)[:, None] % 32 * columns
            scales = scales.reshape(-1)[(places + torch.arange(columns)) % scales.numel()]
        fp8_gemm_nt((data, scales), b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    "pytorch/pytorch#190979",
    "the scale of an FP8 result is dropped on the way to the GEMM: the module divides by a scale that was never applied",
    first="misled", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F128"),
    words=("factor", "scale", "times"), misleading=("smooth", "optimizer", "eps", "fast_accum"),
)  # fmt: skip
def scale_of_the_result_dropped(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            if gemm != "fprop":
                return super().product(gemm, a, b, shape)
            out, scale_result = torch.empty(tuple(shape), dtype=E4M3), 64.0
            sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out)
            return (out.float() / scale_result).bfloat16()

    train(with_fault(Fault), folder / "sick")


@situation(
    "deepspeedai/DeepSpeed#1800",
    "gradients of many microbatches are accumulated in BF16",
    first="silent", gemms=("wgrad",), tensors=("grad_weight",), codes=("F123",), words=("bf16",),
    misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def accumulated_in_bf16(folder: Path) -> None:
    train(Model(InInputType).bfloat16(), folder / "sick", steps=4, every=1, micro=32, lr=1e-3)


@situation(
    "unslothai/unsloth-zoo#1261",
    "the clipping factor is cast to FP16 before it is used: it rounds to zero, and so do the gradients of FP16 weights",
    first="right", codes=("F134", "F143", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale_rounding"),
)  # fmt: skip
def clipping_factor_rounds_to_zero(folder: Path) -> None:
    model = Model()
    narrow = [p for module in model.modules() if isinstance(module, BlockLinear) for p in module.parameters()]

    def clip(step: int, number: int) -> None:
        given = [p.grad for p in model.parameters() if p.grad is not None]
        factor = 1.0 / torch.stack([g.norm() for g in given]).norm()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.mul_(factor.half().float() if any(p is one for one in narrow) else factor)

    train(model, folder / "sick", after_backward=clip, loss_of=lambda out, classes: cross_entropy(out, classes) * 2.0**32)


def _columnwise(x: Tensor, kind: torch.dtype = E4M3) -> Cast:
    """Return data and scale_inv of rows ``[rows, 1]``."""
    scales = x.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / LARGEST[kind]
    return (x.float() / scales).to(kind), scales


class _ScaledAfter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        (a, scale_a), (b, scale_b), one = _columnwise(x), _columnwise(weight), torch.ones(())
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32).mul_(scale_b.t()).mul_(scale_a)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (a, scale_a), (b, scale_b), one = _columnwise(grad), _columnwise(weight.t()), torch.ones(())
        dgrad = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32).mul_(scale_b.t()).mul_(scale_a)
        return dgrad, grad.t() @ x


class ScaledAfter(nn.Linear):
    """A Linear whose scales are applied to the result of its GEMM."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        out: Tensor = _ScaledAfter.apply(x, self.weight)
        return out


@situation(
    "Nerogar/OneTrainer#1108", "a correct program: the GEMM gets scales of one, and its result is multiplied by the scales",
    first="false alarm", clean=True,
)  # fmt: skip
def clean_scaled_after(folder: Path) -> None:
    train(Model(ScaledAfter), folder / "sick", steps=60)


class _CastOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = (_tensorwise(one, E4M3) for one in (x, weight))
        ctx.save_for_backward(a, scale_a, b, scale_b)
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, scale_a, b, scale_b = ctx.saved_tensors
        g, scale_g = _tensorwise(grad, E5M2)
        dgrad = torch._scaled_mm(g, b.t().contiguous().t(), scale_g, scale_b, out_dtype=torch.bfloat16)
        wgrad = torch._scaled_mm(g.t().contiguous(), a.t().contiguous().t(), scale_g, scale_a, out_dtype=torch.bfloat16)
        return dgrad.float(), wgrad.float()


def _tensorwise(x: Tensor, kind: torch.dtype) -> Cast:
    scale = x.float().abs().amax().clamp(min=1e-12) / LARGEST[kind]
    return (x.float() / scale).to(kind), scale


class CastOnce(nn.Linear):
    """A Linear that casts each tensor once, and reads the bytes again in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, out_features]``."""
        out: Tensor = _CastOnce.apply(x, self.weight)
        return out.float()


@situation(
    "karpathy/nanochat#531", "a correct program: the bytes of the forward pass and one cast of the gradient serve both GEMMs",
    first="right", clean=True,
)  # fmt: skip
def clean_cast_once(folder: Path) -> None:
    train(Model(CastOnce), folder / "sick", steps=60)
