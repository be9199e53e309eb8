"""Quantize on the GPU, with the statistics of the cast in the same pass; importable only where Triton is.

Twins of ``reference.quantize`` and ``reference.statistics``, equal bit for bit in data, scale_inv, counts and extremes (the
code of a NaN is always 0x7f: its sign is lost, as on the hardware); sums agree to 1e-6 of the sum of magnitudes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fp8debug.kernels.gpu.launcher import eager
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_TENSOR
from fp8debug.kernels.gpu.quantize.tile_plan import run
from fp8debug.kernels.gpu.quantize.tiling import (
    ACROSS,
    DOWN,
    OPERAND,
    Job,
    Statistics,
    contiguous_copies,
    cut,
    empty_statistics,
    new_outputs,
    scale_memory,
    separate,
)
from fp8debug.kernels.gpu.quantize.two_way_plan import TwoWayPlan, two_way_plan_of
from fp8debug.kernels.slot_rows import ROW_WORDS, SlotRow
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

parse = lru_cache(maxsize=None)(Cast.parse)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def supports(x: Tensor, cast: Cast, scale_inv: Tensor | None = None) -> bool:
    """Return whether the kernels take this tensor and cast; else ``reference.quantize`` does."""
    given = scale_inv is not None or cast.scaling == "static"
    return x.dtype in DTYPES and not (given and cast.granularity in ("rowwise", "columnwise"))


def _quantize_now(
    x: Tensor, row_cast: str, column_cast: str, scale_inv: Tensor | None, statistics: bool, histogram: bool
) -> list[Tensor]:
    casts = [(parse(name), out) for name, out in ((row_cast, "rows"), (column_cast, "columns")) if name]
    jobs = [Job(cast, out, statistics, scale_inv) for cast, out in casts]
    if len(jobs) == 2 and scale_inv is None and not histogram:
        plan = two_way_plan_of(x, jobs[0].cast, jobs[1].cast, statistics)
        if plan is not None:
            return _quantize_two_way(x, plan, statistics)
    if len(jobs) == 1 or not separate(jobs):
        outputs, found = run(x, jobs, histogram)
        return [tensor for pair in outputs for tensor in pair] + list(found or ())
    parts = [run(x, [job], histogram and i == 0) for i, job in enumerate(jobs)]
    tensors = [tensor for made, _ in parts for pair in made for tensor in pair]
    if not statistics:
        return tensors
    first, second = (found or empty_statistics(x, 1, False) for _, found in parts)
    return [*tensors, *(torch.cat(pair) for pair in zip(first[:4], second[:4], strict=True)), first.log2_hist]


def _quantize_two_way(x: Tensor, plan: TwoWayPlan, statistics: bool) -> list[Tensor]:
    words = x.new_empty(2 * statistics, ROW_WORDS, dtype=torch.int64)
    rows = SlotRow(words, 0, words.data_ptr()), SlotRow(words, 1, words.data_ptr() + 8 * ROW_WORDS)
    made, _ = plan(x, into=rows)
    tensors = [tensor for pair in made for tensor in pair]
    return tensors + [group.of(words) for group in OPERAND.groups] + [words[:0, 0]] if statistics else tensors


@torch.library.custom_op("fp8debug::quantize", mutates_args=())
def _quantize(
    x: Tensor, row_cast: str, column_cast: str, scale_inv: Tensor | None, statistics: bool, histogram: bool
) -> list[Tensor]:
    found = _quantize_now(x, row_cast, column_cast, scale_inv, statistics, histogram)
    return [*found[:-5], *contiguous_copies(found[-5:])] if statistics else found


@_quantize.register_fake
def _(x: Tensor, row_cast: str, column_cast: str, scale_inv: Tensor | None, statistics: bool, histogram: bool) -> list[Tensor]:
    casts = [(parse(name), out) for name, out in ((row_cast, "rows"), (column_cast, "columns")) if name]
    outputs = [tensor for cast, out in casts for tensor in new_outputs(x, cast, out)]
    return outputs + (list(empty_statistics(x, len(casts), histogram)) if statistics else [])


def quantize(
    x: Tensor,
    cast: Cast,
    scale_inv: Tensor | None = None,
    *,
    layout: str = "rows",
    statistics: bool = False,
    histogram: bool = False,
) -> tuple[Quantized, Statistics | None]:
    """Quantize a tensor.

    Args:
        x: bf16, fp16 or fp32 of any shape; blocks lie on the view ``[rows, last dimension]``.
        cast: how.
        scale_inv: FP32 of one element, to use in place of the tensor's own, for delayed scaling.
        layout: "rows", or "columns" to store the data transposed, as a GEMM that contracts the rows reads it; the result has
            x's shape either way.
        statistics: fill the slots of the cast in the same pass.
        histogram: the exponent histogram too.

    Returns:
        the quantized tensor as ``reference.quantize`` gives it, and the statistics or None.
    """
    if layout == "columns" and not _can_turn(x, cast):
        q, slots = quantize(x, cast, scale_inv, statistics=statistics, histogram=histogram)
        return Quantized(_turned(q.data), q.scale_inv), slots
    names = (str(cast), "") if layout == "rows" else ("", str(cast))
    run_it = _quantize_now if eager(x) else _quantize
    data, inverse, *found = run_it(x, *names, scale_inv, statistics, histogram)
    return Quantized(data, inverse), Statistics(*found) if statistics else None


def quantize_two_way(
    x: Tensor, row_cast: Cast, column_cast: Cast, *, statistics: bool = False, histogram: bool = False
) -> tuple[Quantized, Quantized, Statistics | None]:
    """Quantize a tensor for two GEMMs: along its rows, and along its columns stored transposed.

    From one read where it is BF16 in whole tiles of 128 x 128, the casts are 1x128 and 128x1 of one format and rounding under
    current scaling, and the GPU is a Hopper or later (``two_way_plan_of``); from two otherwise, but for blocks that share a tile.

    Args:
        x: bf16, fp16 or fp32 of any shape.
        row_cast: for the GEMM that contracts x's columns, such as 1x128.
        column_cast: for the GEMM that contracts x's rows, such as 128x1.
        statistics: fill the slots of both casts (rows 0 and 1).
        histogram: the exponent histogram too.

    Returns:
        row-wise data, column-wise data of the same shape but stored transposed, and the statistics or None.
    """
    if not _can_turn(x, column_cast):
        q, slots = quantize(x, row_cast, statistics=statistics, histogram=histogram)
        t, more = quantize(x, column_cast, layout="columns", statistics=statistics)
        if slots is None or more is None:
            return q, t, None
        counts, sums, maxima, minima = (torch.cat(pair) for pair in zip(slots[:4], more[:4], strict=True))
        return q, t, Statistics(counts, sums, maxima, minima, slots.log2_hist)
    run_it = _quantize_now if eager(x) else _quantize
    found = run_it(x, str(row_cast), str(column_cast), None, statistics, histogram)
    both = Quantized(found[0], found[1]), Quantized(found[2], found[3])
    return (*both, Statistics(*found[4:]) if statistics else None)


def _can_turn(x: Tensor, cast: Cast) -> bool:
    """Return whether the kernel stores these data transposed: it writes words of four rows.

    Its byte by byte variant, which ragged rows took, loses every second byte of some columns in Triton 3.6's code.
    """
    rows = x.numel() // max(x.shape[-1], 1) if x.dim() else 1
    return cast.granularity in DOWN or rows % 4 == 0


def _turned(data: Tensor) -> Tensor:
    """Return 2-D data stored transposed, of the same shape; others, which no GEMM reads, as they are."""
    return data if data.dim() != 2 else data.view(torch.uint8).t().contiguous().view(data.dtype).t()


def largest(x: Tensor) -> Tensor:
    """Return the largest finite magnitude of a non-empty tensor in one read, FP32 ``[]``."""
    return scale_memory(Job(Cast()), cut(x, ACROSS, False, 0), KIND_TENSOR.value)[0].reshape(())
