"""Faults of gradients: an input of wgrad quantized twice, a sum kept in BF16, emptied, overwritten, lost; a bias without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import UsageError
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


def _emptied(where: Target) -> Callable[[], None]:
    """Empty weight.grad at each forward pass, as a zero_grad in the loop over microbatches does."""

    def empty(_: nn.Module, args: object) -> None:
        if where.active and torch.is_grad_enabled():
            where.weight.grad = None

    return where.module.register_forward_pre_hook(empty).remove


def _overwritten(where: Target) -> Callable[[], None]:
    """Write each pass's gradient over those before it."""
    weight = where.weight

    def overwrite(gradient: Tensor) -> Tensor:
        return gradient if not where.active or weight.grad is None else gradient - weight.grad

    return weight.register_hook(overwrite).remove  # type: ignore[no-untyped-call,no-any-return]  # torch's


def _elsewhere(where: Target) -> Callable[[], None]:
    """Empty weight.grad after each backward pass: its gradient went into a scratch buffer."""

    def empty(weight: Tensor) -> None:
        if where.active and weight.grad is not None:
            weight.grad.zero_()

    return where.weight.register_post_accumulate_grad_hook(empty).remove  # type: ignore[no-untyped-call,no-any-return]  # torch's


def _unwritten_bias(where: Target) -> Callable[[], None]:
    """Empty bias.grad after each backward pass: no kernel writes it."""
    bias = getattr(where.module, "bias", None)
    if not isinstance(bias, nn.Parameter):
        raise UsageError(f"{where.name} has no bias of its own; plant this fault in a Linear with one")

    def empty(bias: Tensor) -> None:
        if where.active and bias.grad is not None:
            bias.grad.zero_()

    return bias.register_post_accumulate_grad_hook(empty).remove  # type: ignore[no-untyped-call,no-any-return]  # torch's


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
    Fault(
        name="emptied_gradient",
        code="F149",
        description="weight.grad is emptied before each microbatch of a step, so that the last one alone counts (a class of bug)",
        plant=_emptied,
    ),
    Fault(
        name="overwritten_gradient",
        code="F149",
        description="each microbatch's weight gradient overwrites those before it (TransformerEngine #2769's class)",
        plant=_overwritten,
    ),
    Fault(
        name="gradient_elsewhere",
        code="F149",
        description="wgrad writes into a buffer that the optimizer does not read; weight.grad stays 0 (TransformerEngine #2769)",
        plant=_elsewhere,
    ),
    Fault(
        name="unwritten_bias_gradient",
        code="F151",
        description="the gradient of a bias is never written: bias.grad stays 0, and the bias stands (ao #4846)",
        plant=_unwritten_bias,
    ),
):
    FAULTS.add(_fault.name, _fault)
