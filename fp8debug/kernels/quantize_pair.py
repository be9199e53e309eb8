"""One tensor quantized for two GEMMs, of which one contracts its columns and one its rows, from one read where a kernel can."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

from torch import Tensor

from fp8debug.kernels.dispatch import Slots, may_plan, on_device, twin
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

#: A quantized tensor with the slots of its cast, where they were asked for.
CastWithSlots = tuple[Quantized, Slots | None]


def quantize_pair(
    x: Tensor, across: Cast, down: Cast, *, observed: bool = False, value_counts: Any = None, casts: Collection[Cast] = ()
) -> tuple[CastWithSlots, CastWithSlots] | None:
    """Quantize a tensor as ``dispatch.quantize`` does it twice, to the last bit.

    Args:
        x: BF16 ``[rows, columns]``.
        across: how, for the GEMM that contracts the columns.
        down: how, for the one that contracts the rows; stored transposed.
        observed: the slots of both casts too, filled as late as when they are joined to a table.
        value_counts: from ``dispatch.new_value_counts``, which is to count the tensor in the same pass.
        casts: what will be wanted of the counts.

    Returns:
        x for the first GEMM and for the second, or None where no kernel makes both at once.
    """
    takes = across.is_plain and down.is_plain and may_plan(x)
    plan = twin("quantize.two_way_plan").two_way_plan_of(x, across, down, observed) if takes else None
    if plan is None:
        return None
    with on_device(x):
        found = value_counts.count_alongside(x, casts, partial(plan.counting, x, observed)) if casts and plan.counting else None
        (first, second), rows = found or plan(x, observed)
    if rows is None:
        return (Quantized(*first), None), (Quantized(*second), None)
    layout = twin("quantize.tiling").OPERAND
    return (Quantized(*first), {layout: rows[0]}), (Quantized(*second), {layout: rows[1]})
