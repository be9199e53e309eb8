"""What is recorded of a GEMM's result on the GPU, in one launch; importable only where Triton is.

The twin of ``reference.statistics`` for results, for the slots named in ``triton_results``. A slot's contributions come in parts,
``[parts, slots]``, which the table joins by the slots' merge rules.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8debug.kernels import triton_results as tr
from fp8debug.kernels.triton_common import INTERPRETED
from fp8debug.kernels.triton_run import launch

#: Slots that :func:`compare` and :func:`damage` fill.
FILLED = frozenset((*tr.COUNTS, *tr.SUMS, *tr.MAXIMA, *tr.MINIMA, *tr.DAMAGE_COUNTS, *tr.DAMAGE_SUMS))
#: Parts of a result's statistics: two programs a multiprocessor of an H200.
MAX_PARTS = 264
#: Warps of a program.
WARPS = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Parts = dict[tuple[str, ...], Tensor]


def compare(
    actual: Tensor, shadow: Tensor, exact: Tensor | None, index: Tensor | None = None, *, dim: int = 0, keep: bool = False
) -> tuple[list[Parts], Tensor | None]:
    """Describe a result against the shadow and the exact GEMM.

    Args:
        actual: the result, whole.
        shadow: ``[rows, columns]`` of the sampled part.
        exact: likewise; None where the exact GEMM is the actual result.
        index: int64, which rows (``dim`` 0) or columns (1) of actual are sampled; None is all.
        dim: see ``index``.
        keep: return actual minus shadow too, for :func:`damage`.

    Returns:
        slots against the shadow and, where it is given, against exact; and actual minus shadow, 0 where a side is not finite,
        in BF16 if actual is (in which it is exact but for results far from their shadow), else in FP32.
    """
    if index is not None and dim:  # one scattered read, not one a pair
        actual, index = actual.detach().index_select(1, index), None
    (rows, columns), pairs = shadow.shape, 1 if exact is None else 2
    lanes = 64 if INTERPRETED else 1024
    across = max(4, min(lanes, 1 << max(columns - 1, 1).bit_length()))
    down = max(1, (lanes if across > 256 else 2 * lanes) // across)
    programs = max(1, min(-(-rows // down), 3 if INTERPRETED else MAX_PARTS))
    new = actual.new_empty
    parts = (
        new((pairs, programs, len(tr.COUNTS)), dtype=torch.int64),
        new((pairs, programs, len(tr.SUMS)), dtype=torch.float64),
        new((pairs, programs, len(tr.MAXIMA)), dtype=torch.float32),
        new((pairs, programs, len(tr.MINIMA)), dtype=torch.float32),
    )
    kept = torch.bfloat16 if actual.dtype is torch.bfloat16 else torch.float32
    error = new((rows, columns), dtype=kept) if keep else None
    lines = tr.LINES_ALL if index is None else tr.LINES_ROWS
    arguments = (
        actual.detach(), shadow if index is None else index, shadow.contiguous(), shadow if exact is None else exact.contiguous(),
        actual if error is None else error, *parts, rows, columns, *actual.stride(),
    )  # fmt: skip
    launch(
        tr.compare_kernel,
        (pairs, programs),
        arguments,
        (lines.value, keep, down, across),
        num_warps=WARPS,
        maxnreg=64 if down == 1 else 128,
    )
    names = (tr.COUNTS, tr.SUMS, tr.MAXIMA, tr.MINIMA)
    return [{n: values[i] for n, values in zip(names, parts, strict=True)} for i in range(pairs)], error


def row_slots(actual: Tensor, reference: Tensor) -> Parts:
    """Return the slots of ``metrics/rows.py`` alone, of whole tensors of one shape."""
    found = compare(actual, reference, None)[0][0]
    return {tr.ROW_COUNTS: found[tr.COUNTS][:, -len(tr.ROW_COUNTS) :], tr.ROW_MAXIMA: found[tr.MAXIMA][:, -len(tr.ROW_MAXIMA) :]}


def damage(error: Tensor, grad: Tensor, index: Tensor | None = None) -> Parts:
    """Return the damage of sampled rows of fprop's output.

    Args:
        error: ``[rows, N]`` from :func:`compare`.
        grad: grad_output ``[M, N]``.
        index: int64 ``[rows]``, which rows of grad they are; None is all.
    """
    rows, columns = error.shape
    counts = error.new_empty((rows, 1), dtype=torch.int64)
    sums = error.new_empty((rows, 1), dtype=torch.float64)
    lines = tr.LINES_ALL if index is None else tr.LINES_ROWS
    arguments = error, grad.detach(), error if index is None else index, counts, sums, columns, *grad.stride()
    launch(tr.damage_kernel, (rows,), arguments, (lines.value, 64 if INTERPRETED else 1024), num_warps=4)
    return {tr.DAMAGE_COUNTS: counts, tr.DAMAGE_SUMS: sums}
