"""Faults of the weight's gradient: its input quantized twice, its sum over microbatches kept in BF16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fp8debug.faults.base import FAULTS, INPUT, Fault, Ordinary, Target, distort, quantized
from fp8debug.kernels.dispatch import Operand, dequantize, quantize
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized, TensorRole


def _requantized(where: Target) -> Callable[[], None]:
    first_cast = where.linear.recipe.casts[INPUT]

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        if first_cast is None or first_cast.scaling != "current":
            return ordinary(x, cast)
        q, cast = quantized(ordinary(dequantize(quantize(x, first_cast), first_cast, x.dtype), cast))
        return Quantized(q.data, q.scale_inv), cast  # a value of its own: it is described against x

    return distort(where, change, (Gemm.WGRAD, TensorRole.INPUT))


def _bf16_sum(where: Target) -> Callable[[], None]:
    weight, num_parts = where.weight, int(where.options["num_parts"])

    def add(gradient: Tensor) -> Tensor:
        if not where.active:
            return gradient
        before = weight.grad
        if before is None:
            return gradient.bfloat16().to(gradient.dtype)
        total = before.bfloat16()
        for _ in range(num_parts):
            total = (total.float() + gradient.float() / num_parts).bfloat16()
        return total.to(gradient.dtype) - before

    return weight.register_hook(add).remove  # type: ignore[no-untyped-call,no-any-return]  # torch's


for _fault in (
    Fault(
        name="double_quantization",
        code="F107",
        description="wgrad's input is quantized from fprop's FP8 tile, not from the input (FP8-Flow-MoE)",
        plant=_requantized,
    ),
    Fault(
        name="bf16_gradient_sum",
        code="F123",
        description="weight.grad is summed in BF16, each microbatch but the first in num_parts parts (Nemotron report)",
        options={"num_parts": 64},
        plant=_bf16_sum,
    ),
):
    FAULTS.add(_fault.name, _fault)
