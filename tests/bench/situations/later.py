"""Five more reports, met by rules that had been finished: what is right was written before the tool was tried on any of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    BlockLinear,
    Cast,
    Model,
    quantized,
    scales_of,
    train,
    with_fault,
)


@situation(
    "AI-Hypercomputer/maxtext#5021",
    "the FP8 state of a step is overwritten with what it was before: delayed scales stay at their initial 1",
    first="incomplete", tensors=("grad_output",), codes=("F102", "F113", "F128", "F129"), words=("scale",),
    misleading=("eps", "smooth"),
)  # fmt: skip
def scales_never_updated(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            block = (128, 128) if tensor == "weight" else (1, 128)
            scales = torch.ones(-(-x.shape[0] // block[0]), -(-x.shape[1] // 128))
            return quantized(x.contiguous(), scales, block), scales

    train(Model(Fault), folder / "sick")
    train(Model(), folder / "clean")


@situation(
    "NVIDIA-NeMo/Megatron-Bridge#638",
    "the MX recipe casts gradients to E5M2, as the hybrid one of delayed scaling does",
    first="silent", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F120",), words=("e4m3",), misleading=("smooth",),
)  # fmt: skip
def gradients_in_e5m2(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "grad_output":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), LARGEST[E5M2])
            return quantized(x.contiguous(), scales, (1, 128), E5M2), scales

    train(Model(Fault), folder / "sick")


@situation(
    "flashinfer-ai/flashinfer#3882",
    "an operand is quantized along its rows, and its scales are read along the contracted dimension",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"), words=("scale",),
    misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def blocks_along_the_wrong_dimension(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "weight"):
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scales = scales_of(x, (128, 1), LARGEST[E4M3])  # [1, K]
            data = quantized(x, scales, (128, 1))
            read = scales.reshape(-1)[: len(x) * -(-x.shape[1] // 128)].reshape(len(x), -1)
            return data, read

    with_columns = with_fault(Fault)
    with torch.no_grad():  # columns of a trained weight differ in size
        weight = with_columns.get_parameter("blocks.1.down.weight")
        weight.mul_(torch.linspace(-2, 2, weight.shape[1]).exp2())
    train(with_columns, folder / "sick")


@situation(
    "NVIDIA/TransformerEngine#2769",
    "the fused backward writes the weight gradient into a scratch buffer, and main_grad is never updated",
    first="silent", modules=DOWN, codes=("F134", "F143", "F128", "F149"), words=("gradient",),
    misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def gradient_in_a_scratch_buffer(folder: Path) -> None:
    model = Model()

    def lose(step: int, number: int) -> None:
        weight = model.get_parameter("blocks.1.down.weight")
        assert weight.grad is not None
        weight.grad.zero_()

    train(model, folder / "sick", after_backward=lose, micro=2)
    train(Model(), folder / "clean", micro=2)


@situation(
    "marin-community/marin#7271",
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
