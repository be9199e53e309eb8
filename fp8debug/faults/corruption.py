"""Faults without a signature of their own: operands and gradients that are not what they stand for, whatever the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.faults.base import FAULTS, Fault, Ordinary, Target, distort, quantized, undo_all
from fp8debug.kernels.dispatch import Operand, dequantize, quantize
from fp8debug.recipes import Cast
from fp8debug.types import Gemm, Quantized, TensorRole


def _sites(where: Target) -> list[tuple[Gemm, TensorRole]]:
    role = TensorRole(where.options["tensor"])
    return [key for key in where.linear.recipe.casts if key[1] is role]


def _unwritten(where: Target) -> Callable[[], None]:
    """Leave every other row of an operand's codes zero, as a kernel that skips a tile does."""

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        data = q.data.clone()
        data.view(torch.uint8)[::2] = 0
        return Quantized(data, q.scale_inv), cast

    return distort(where, change, *_sites(where))


def _signs(where: Target) -> Callable[[], None]:
    """Turn the signs of the first half of an operand's columns."""

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        data = q.data.clone()
        data.view(torch.uint8)[:, : data.shape[1] // 2].bitwise_xor_(0x80)
        return Quantized(data, q.scale_inv), cast

    return distort(where, change, *_sites(where))


def _lost(where: Target) -> Callable[[], None]:
    """Drop what each microbatch after a step's first adds to weight.grad."""
    weight = where.linear.weight

    def drop(gradient: Tensor) -> Tensor:
        return torch.zeros_like(gradient) if where.active and weight.grad is not None else gradient

    return weight.register_hook(drop).remove  # type: ignore[no-untyped-call,no-any-return]  # torch's


def _codes(where: Target) -> Callable[[], None]:
    """Load the weight's codes in place of the weight, once."""
    weight = where.linear.weight
    cast = Cast(granularity="128x128")
    loaded: list[Tensor] = []

    def load(_: nn.Module, args: object) -> None:
        if where.active and not loaded:
            loaded.append(weight.detach().clone())
            with torch.no_grad():
                weight.copy_(quantize(weight.detach(), cast).data.to(weight.dtype))

    def restore() -> None:
        if loaded:
            with torch.no_grad():
                weight.copy_(loaded.pop())

    return undo_all(where.module.register_forward_pre_hook(load).remove, restore)


def _on_grid(where: Target) -> Callable[[], None]:
    """Hold the weight on the grid of an FP8 checkpoint with FP32 scales of 128x128 blocks."""
    weight = where.linear.weight
    cast = Cast(granularity="128x128")

    def hold(_: nn.Module, args: object) -> None:
        if where.active:
            with torch.no_grad():
                weight.copy_(dequantize(quantize(weight.detach(), cast), cast, weight.dtype))

    return where.module.register_forward_pre_hook(hold).remove


for _fault in (
    Fault(
        name="unwritten_rows",
        code="F128",
        description="every other row of an operand's FP8 data is never written and stays zero (sglang #28418)",
        options={"tensor": "input"},
        plant=_unwritten,
    ),
    Fault(
        name="wrong_signs",
        code="F128",
        description="half of an operand's columns have the wrong sign bit (a class of bug)",
        options={"tensor": "input"},
        plant=_signs,
    ),
    Fault(
        name="lost_microbatches",
        code="F134",
        description="weight.grad keeps the first microbatch of a step alone (Primus #1046)",
        plant=_lost,
    ),
    Fault(
        name="raw_codes",
        code="F133",
        description="the weight is loaded as FP8 codes without their scales (unsloth #6978, vllm #45835)",
        plant=_codes,
    ),
    Fault(
        name="rounded_weights",
        code="F137",
        description="the weight comes from an FP8 checkpoint and is cast again under other scales (vllm #38083)",
        plant=_on_grid,
    ),
):
    FAULTS.add(_fault.name, _fault)
