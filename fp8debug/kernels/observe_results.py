"""What is recorded of a GEMM's result on the GPU, in one launch; importable only where Triton is.

The twin of ``reference.statistics`` for results, for the slots named in ``triton_results``, which lie in a row of ``words``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.kernels import triton_results as tr
from fp8debug.kernels.gemm_sampled import columns_of
from fp8debug.kernels.triton_common import INTERPRETED
from fp8debug.kernels.triton_run import Kernel, address
from fp8debug.kernels.words import Group, Layout, Pool, pool

#: Slots that :func:`compare` and :func:`damage` fill.
FILLED = frozenset((*tr.COUNTS, *tr.SUMS, *tr.MAXIMA, *tr.MINIMA, *tr.DAMAGE_COUNTS, *tr.DAMAGE_SUMS))
RESULT = Layout(
    Group(tr.COUNTS, torch.int64, 0),
    Group(tr.SUMS, torch.float64, 80),
    Group(tr.MAXIMA, torch.float32, 128, "max"),
    Group(tr.MINIMA, torch.float32, 140, "min"),
)
LINES = Layout(Group(tr.ROW_COUNTS, torch.int64, 48), Group(tr.ROW_MAXIMA, torch.float32, 136, "max"))
DAMAGE = Layout(Group(tr.DAMAGE_COUNTS, torch.int64, 0), Group(tr.DAMAGE_SUMS, torch.float64, 80))
#: Parts of a result's statistics: two programs a multiprocessor of an H200.
MAX_PARTS = 264
#: Warps of a program.
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Plans kept; a program that makes more starts over.
MAX_PLANS = 4096
Found = dict[Layout, Tensor]


class _Plan(NamedTuple):
    """A kernel for tensors of one shape, its programs, and the size of their parts."""

    kernel: Kernel
    grid: tuple[int, int, int]
    parts: tuple[int, int]


_PLANS: dict[Any, _Plan] = {}


def _keep(key: Any, plan: _Plan) -> _Plan:
    if len(_PLANS) == MAX_PLANS:
        _PLANS.clear()
    _PLANS[key] = plan
    return plan


def _row(memory: Pool) -> tuple[Tensor, Any]:
    row, at = memory.take()
    return row, (row if INTERPRETED else at)


def compare(
    actual: Tensor, shadow: Tensor, exact: Tensor | None, index: Tensor | None = None, *, dim: int = 0, keep: bool = False
) -> tuple[list[Found], Tensor | None]:
    """Describe a result against the shadow and the exact GEMM.

    Args:
        actual: the result, whole.
        shadow: ``[rows, columns]`` of the sampled part.
        exact: likewise, or the first of these rows (``dim`` 0) or columns (1); None where it is the actual result.
        index: int64, which rows (``dim`` 0) or columns (1) of actual are sampled; None is all.
        dim: see ``index``.
        keep: return actual minus shadow too, for :func:`damage`.

    Returns:
        slots against the shadow and, where it is given, against exact; and actual minus shadow, of the rows that exact has, 0
        where a side is not finite, in BF16 if actual is (exact but for results far from their shadow), else in FP32.
    """
    if index is not None and dim:  # one scattered read, not one a pair
        actual, index = columns_of(actual, index), None
    shadow, exact = shadow.contiguous(), None if exact is None else exact.contiguous()
    key = (
        "compare", shadow.shape, actual.stride(), actual.dtype, shadow.dtype, actual.data_ptr() & 15, shadow.data_ptr() & 15,
        None if exact is None else (exact.shape, exact.dtype, exact.data_ptr() & 15), index is None or index.data_ptr() & 15,
        keep, actual.device,
    )  # fmt: skip
    plan = _PLANS.get(key) or _keep(key, _compare_plan(actual, shadow, exact, index, keep))
    memory = pool(actual.device)
    parts = actual.new_empty(plan.parts, dtype=torch.float64)
    error = None
    if keep:
        kept = (shadow if exact is None else exact).shape[0], shadow.shape[1]
        error = actual.new_empty(kept, dtype=torch.bfloat16 if actual.dtype is torch.bfloat16 else torch.float32)
    (first, at), second, more = _row(memory), None, None
    if exact is not None:
        second, more = _row(memory)
    near = address(shadow)
    plan.kernel(
        plan.grid, address(actual), near if index is None else address(index), near, near if exact is None else address(exact),
        near if error is None else address(error), address(parts), memory.tickets_address, at, at if more is None else more,
        *shadow.shape, *(shadow if exact is None else exact).shape, *actual.stride(),
    )  # fmt: skip
    return [{RESULT: first}, *([] if second is None else [{RESULT: second}])], error


def _compare_plan(actual: Tensor, shadow: Tensor, exact: Tensor | None, index: Tensor | None, keep: bool) -> _Plan:
    (rows, columns), pairs = shadow.shape, 1 if exact is None else 2
    lanes = 64 if INTERPRETED else 1024
    across = max(4, min(lanes, 1 << max(columns - 1, 1).bit_length()))
    down = max(1, (lanes if across > 256 else 2 * lanes) // across)
    programs = max(1, min(-(-rows // down), 3 if INTERPRETED else MAX_PARTS))
    kept = torch.bfloat16 if actual.dtype is torch.bfloat16 else torch.float32
    types = (
        actual.dtype, shadow.dtype if index is None else index.dtype, shadow.dtype,
        shadow.dtype if exact is None else exact.dtype, kept if keep else shadow.dtype, torch.float64, torch.int32, torch.int64,
        torch.int64, *[None] * 6,
    )  # fmt: skip
    constants = (tr.LINES_ALL if index is None else tr.LINES_ROWS).value, keep, down, across
    registers = 64 if down == 1 else 128
    kernel = Kernel(tr.compare_kernel, actual.device.index, types, constants, num_warps=WARPS, maxnreg=registers)
    return _Plan(kernel, (pairs, programs, 1), (pairs * programs, tr.NUM_COLUMNS))


def row_slots(x: Tensor, data: Tensor, scale_inv: Tensor, block: tuple[int, int], index: Tensor) -> Found:
    """Return the slots of ``metrics/rows.py`` of sampled rows of an operand.

    Args:
        x: ``[rows, columns]``, high precision.
        data: FP8 of that shape, laid out in any way.
        scale_inv: FP32, one for each block.
        block: shape of a block.
        index: int64 ``[samples]``, which rows.
    """
    key = (
        "rows", x.shape, x.stride(), data.stride(), scale_inv.stride(), x.dtype, data.dtype, block, index.numel(),
        x.data_ptr() & 15, data.data_ptr() & 15, scale_inv.data_ptr() & 15, index.data_ptr() & 15, x.device,
    )  # fmt: skip
    plan, samples = _PLANS.get(key), index.numel()
    if plan is None:
        types = x.dtype, torch.int64, torch.int8, torch.float32, torch.float64, torch.int32, torch.int64, *[None] * 9
        constants = data.dtype is torch.float8_e5m2, 64 if INTERPRETED else 1024
        kernel = Kernel(tr.rows_kernel, x.device.index, types, constants, num_warps=4)
        plan = _keep(key, _Plan(kernel, (samples, 1, 1), (samples, tr.NUM_COLUMNS)))
    memory = pool(x.device)
    row, at = _row(memory)
    parts = x.new_empty(plan.parts, dtype=torch.float64)
    codes = data.view(torch.int8) if INTERPRETED else data.data_ptr()
    plan.kernel(
        plan.grid, address(x), address(index), codes, address(scale_inv), address(parts), memory.tickets_address, at,
        x.shape[1], *x.stride(), *data.stride(), *scale_inv.stride(), *block,
    )  # fmt: skip
    return {LINES: row}


def damage(error: Tensor, grad: Tensor, index: Tensor | None = None) -> Found:
    """Return the damage of sampled rows of fprop's output.

    Args:
        error: ``[rows, N]`` from :func:`compare`.
        grad: grad_output ``[M, N]``.
        index: int64 ``[rows]``, which rows of grad they are; None is all.
    """
    key = (
        "damage", error.shape, grad.stride(), error.dtype, grad.dtype, error.data_ptr() & 15, grad.data_ptr() & 15,
        index is None or index.data_ptr() & 15, error.device,
    )  # fmt: skip
    plan, rows = _PLANS.get(key), error.shape[0]
    if plan is None:
        types = error.dtype, grad.dtype, error.dtype if index is None else torch.int64, torch.float64, torch.int32, torch.int64
        constants = (tr.LINES_ALL if index is None else tr.LINES_ROWS).value, 64 if INTERPRETED else 1024
        kernel = Kernel(tr.damage_kernel, error.device.index, (*types, None, None, None), constants, num_warps=4)
        plan = _keep(key, _Plan(kernel, (rows, 1, 1), (rows, tr.NUM_COLUMNS)))
    memory = pool(error.device)
    row, at = _row(memory)
    parts = error.new_empty(plan.parts, dtype=torch.float64)
    plan.kernel(
        plan.grid, address(error), address(grad.detach()), address(error if index is None else index), address(parts),
        memory.tickets_address, at, error.shape[1], *grad.stride(),
    )  # fmt: skip
    return {DAMAGE: row}
