"""Faults of what surrounds the cast: outliers in the input, a module that was missed, FP8 that is not on, bad data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Ordinary, Target, distort, quantized
from fp8debug.kernels.dispatch import Operand
from fp8debug.linear import Fp8Linear
from fp8debug.recipes import Cast
from fp8debug.types import Quantized


def _outlier(where: Target) -> Callable[[], None]:
    linear, weight = where.linear, where.weight
    factor = 2.0 ** float(where.options["log2_factor"])
    channels = slice(0, linear.in_features, max(1, int(where.options["spacing"])))
    pinned: list[Tensor] = []

    def scale(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not where.active:
            return None
        with torch.no_grad():
            if not pinned:
                pinned.append(weight[:, channels] / factor)
            weight[:, channels] = pinned[0]  # an optimizer's step would be ``factor`` times too long here
        gains = torch.ones(linear.in_features, device=args[0].device, dtype=args[0].dtype)
        gains[channels] = factor
        return (args[0] * gains, *args[1:])

    def still(grad: Tensor) -> Tensor:
        """Keep the pinned columns' gradient, ``factor`` times too large, out of the gradient norm."""
        return grad.index_fill(1, columns.to(grad.device), 0.0) if where.active else grad

    hook = linear.register_forward_pre_hook(scale)
    columns = torch.arange(linear.in_features, dtype=torch.int64, device="cpu")[channels]
    weight_hook = weight.register_hook(still)  # type: ignore[no-untyped-call]  # torch's

    def undo() -> None:
        hook.remove()
        weight_hook.remove()
        if pinned:
            with torch.no_grad():
                weight[:, channels] = pinned.pop() * factor

    return undo


def _unconverted(where: Target) -> Callable[[], None]:
    linear, recipe = where.linear, where.linear.recipe
    request = getattr(linear, "fp8debug_request", None)
    linear.__class__ = nn.Linear  # type: ignore[assignment]  # what a filter that missed it would have left
    if request is not None:
        del linear.fp8debug_request

    def undo() -> None:
        Fp8Linear.adopt(linear, recipe)
        if request is not None:
            linear.fp8debug_request = request

    return undo


def _silent_bf16(where: Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        scale_inv = quantized(ordinary(x, cast))[0].scale_inv
        return Quantized(x.bfloat16(), torch.ones_like(scale_inv)), cast

    return distort(where, change, *where.linear.recipe.casts)


def _data_spike(where: Target) -> Callable[[], None]:
    length = int(where.options["length"])

    def mislabel(_: nn.Module, args: object, output: Any) -> Any:
        if not (where.step <= where.clock.step < where.step + length and torch.is_grad_enabled()):
            return None
        if not isinstance(output, Tensor) or output.dim() < 2:
            raise UsageError(f"data_spike needs a model that returns [..., classes], not {type(output).__name__}")
        return -float(where.options["factor"]) * output  # as if every label of the batch were wrong

    return where.model.register_forward_hook(mislabel).remove


for _fault in (
    Fault(
        name="swiglu_outlier",
        code="F105",
        description="outlier channels in the input, the weight scaled inversely: the rest underflows (arXiv 2409.12517)",
        options={"log2_factor": 16.0, "spacing": 128},
        plant=_outlier,
    ),
    Fault(
        name="unconverted",
        code="F110",
        description="a Linear that a filter missed stays in BF16 without a message (torchtitan #4008); acts at once",
        plant=_unconverted,
    ),
    Fault(
        name="silent_bf16",
        code="F111",
        description="the FP8 path hands BF16 data through (TransformerEngine #1422)",
        plant=_silent_bf16,
    ),
    Fault(
        name="data_spike",
        code="F125",
        description="a bad batch: for some steps the labels are what the model holds least likely (pytorch #150859)",
        options={"length": 1, "factor": 8.0},
        needs_module=False,
        plant=_data_spike,
    ),
):
    FAULTS.add(_fault.name, _fault)
