"""Faults of the scale and of the cast: delayed scaling, rounding, zero tiles, a wrong factor, a wrong format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, FORWARD, INPUT, Fault, Ordinary, Target, distort, quantized, undo_all
from fp8debug.formats import FORMATS
from fp8debug.kernels.amax_history import AmaxHistory
from fp8debug.kernels.dispatch import Operand, finite_amax, quantize
from fp8debug.recipes import Cast
from fp8debug.types import Quantized, TensorRole


def _delayed_with(amax_factor: float) -> Callable[[Target], Callable[[], None]]:
    """Run the input under delayed scaling whose history holds ``amax_factor`` times the amax it should."""

    def plant(where: Target) -> Callable[[], None]:
        cast = Cast(scaling="delayed", history=int(where.options["history"]))
        frozen: list[Tensor] = []

        def change(x: Tensor, _: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
            if not frozen:
                frozen.append(finite_amax(x) * float(options["ratio"]) ** amax_factor)
            history = AmaxHistory(cast, x.device)
            history.fill(frozen[0])
            return quantize(x, cast, history.next_scale_inv(finite_amax(x))), cast

        return distort(where, change, INPUT, configured=True)

    return plant


def _zero_tile(where: Target) -> Callable[[], None]:
    cast = where.linear.recipe.casts[INPUT]
    rows = None if cast is None or cast.granularity == "tensorwise" else int(where.options["rows"])

    def blank(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if not where.active:
            return None
        x = args[0]
        keep = torch.ones(x.shape[:-1], device=x.device, dtype=x.dtype)
        keep.view(-1)[:rows] = 0
        return (x * keep.unsqueeze(-1), *args[1:])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        if cast.amax_eps:  # the cure: a scale of max / eps, and 0 * that is 0
            return q, cast
        data = q.data.float().masked_fill((x == 0).all(-1, keepdim=True), float("nan"))
        return Quantized(data.to(q.data.dtype), q.scale_inv), cast

    undistort = distort(where, change, INPUT)
    hook = where.module.register_forward_pre_hook(blank)
    return undo_all(hook.remove, undistort)


def _unwritten_padding(where: Target) -> Callable[[], None]:
    """Make rows of the input padding at all steps, whose codes stay what the buffer held from ``step`` on."""
    cast, rows, fill = where.linear.recipe.casts[INPUT], int(where.options["rows"]), int(where.options["fill"])
    if cast is None or cast.granularity == "tensorwise" or FORMATS[cast.format].bits != 8 or fill > 255:
        raise UsageError(f"unwritten_padding needs an 8-bit cast with several scales and fill from 0 to 255, got {cast}, {fill}")

    def pad(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        keep = torch.ones(args[0].shape[:-1], device=args[0].device, dtype=args[0].dtype)
        keep.view(-1)[:rows] = 0
        return (args[0] * keep.unsqueeze(-1), *args[1:])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        data = q.data.clone()
        data.view(torch.uint8)[(x == 0).all(-1)] = fill
        return Quantized(data, q.scale_inv), cast

    return undo_all(where.module.register_forward_pre_hook(pad).remove, distort(where, change, INPUT))


def _empty_history(where: Target) -> Callable[[], None]:
    """Scale the input by the largest amax of a history in which no call notes its own: by 0."""

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        cast = Cast(format=cast.format)
        history = torch.zeros(int(options["history"]), dtype=torch.float32, device=x.device)
        return quantize(x, cast, history.amax() / FORMATS[cast.format].max), cast

    return distort(where, change, INPUT, configured=True)


def _scale_floor(where: Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, scale_rounding="pow2_floor"))

    return distort(where, change, *FORWARD, configured=True)


def _wrong_scale(where: Target) -> Callable[[], None]:
    factor = float(where.options["factor"])
    role = TensorRole(where.options["tensor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        return Quantized(q.data, q.scale_inv * factor), cast

    return distort(where, change, *(key for key in where.linear.recipe.casts if key[1] is role))


def _wrong_format(where: Target) -> Callable[[], None]:
    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        return ordinary(x, replace(cast, format="e5m2"))

    return distort(where, change, *FORWARD, configured=True)


for _fault in (
    Fault(
        name="stale_scale",
        code="F101",
        description="delayed scale from before a growth of the input: it saturates (arXiv 2409.12517)",
        options={"ratio": 64.0, "history": 16},
        plant=_delayed_with(-1.0),
    ),
    Fault(
        name="stale_history",
        code="F102",
        description="delayed scale from a history that holds a spike: nearly all underflows (history 1024, max)",
        options={"ratio": 2.0**18, "history": 1024},
        plant=_delayed_with(1.0),
    ),
    Fault(
        name="zero_tile",
        code="F103",
        description="padding rows of zeros under a kernel without amax eps: 0/0 gives NaN (lmdeploy #3652)",
        options={"rows": 1},
        plant=_zero_tile,
    ),
    Fault(
        name="unwritten_padding",
        code="F103",
        description="the cast skips rows of padding: their codes are what lay in the buffer (TransformerEngine #2547's class)",
        options={"rows": 1, "fill": 127},
        plant=_unwritten_padding,
    ),
    Fault(
        name="empty_history",
        code="F113",
        description="a delayed scale from an amax history that is empty after a resume, and that nothing fills: it is 0",
        options={"history": 16},
        plant=_empty_history,
    ),
    Fault(
        name="e8m0_floor",
        code="F104",
        description="power-of-two scales rounded down: the top of each block clips (arXiv 2506.08027, ao #2035)",
        plant=_scale_floor,
    ),
    Fault(
        name="wrong_scale",
        code="F113",
        description="scale_inv off by a factor after reload, sync or packing (TransformerEngine #123, sglang #25733)",
        options={"factor": 2.0, "tensor": "weight"},
        plant=_wrong_scale,
    ),
    Fault(
        name="wrong_format",
        code="F120",
        description="E5M2 in the forward pass where E4M3 was meant (TransformerEngine #2754)",
        plant=_wrong_format,
    ),
):
    FAULTS.add(_fault.name, _fault)
