# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The statistics of a GEMM's result against the shadow and against the exact GEMM, in FP64 with masks throughout.

A program leaves what its elements add to every slot; these parts are joined later by the slots' own merge rules, with those of
all other rows of the step at once. The sampled rows or columns of the actual result are read where they lie.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.triton_cast import is_finite
from fp8debug.kernels.triton_common import INF, load_one
from fp8debug.metrics.rows import BAD_NMSE, GOOD_NMSE

#: Slots in the order in which programs store them: counts (int64), sums (FP64), maxima and minima (FP32).
ROW_COUNTS = ("num_rows", "num_bad_rows", "num_good_rows", "num_nonfinite_rows")
ROW_MAXIMA = ("worst_row_nmse",)
COUNTS = ("numel", "num_zero", "num_nan", "num_inf", "num_actual_nonfinite", "num_tensors", *ROW_COUNTS)
SUMS = ("sum_x", "sum_x2", "sum_y2", "sum_xy", "sum_err", "sum_err2")
MAXIMA = ("amax", "max_abs_err", *ROW_MAXIMA)
MINIMA = ("amin",)
#: Slots that the rows of fprop's output get in the backward pass.
DAMAGE_COUNTS = ("num_damage_rows",)
DAMAGE_SUMS = ("damage",)

# LINES: which part of the actual result is sampled.
LINES_ALL = tl.constexpr(0)
LINES_ROWS = tl.constexpr(1)

BAD = tl.constexpr(BAD_NMSE)
GOOD = tl.constexpr(GOOD_NMSE)


@triton.jit
def folded(v, OP: tl.constexpr):
    """Reduce four neighbouring columns, which one thread holds, to one: sum, maximum or minimum."""
    v = tl.reshape(v, (v.shape[0], v.shape[1] // 4, 4))
    if OP == 0:
        return tl.sum(v, axis=2)
    elif OP == 1:
        return tl.max(v, axis=2)
    else:
        return tl.min(v, axis=2)


@triton.jit
def compare_kernel(
    actual, index, shadow, exact, error, counts, sums, maxima, minima, rows, columns, stride_row, stride_column,
    LINES: tl.constexpr, KEEP: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pair 0 is actual against shadow ``[rows, columns]``, pair 1 against exact; parts ``[pairs, programs, slots]``.

    ``KEEP``: store actual minus shadow, 0 where a side is not finite, into ``error [rows, columns]``.
    """
    pair = tl.program_id(0)
    zero = tl.zeros([BR, BC // 4], tl.float64)
    sx, sy2, sxy, se = zero, zero, zero, zero
    real = tl.zeros([BR, BC // 4], tl.float32)
    amax, amin, emax = real, real + INF, real
    count = tl.zeros([BR, BC // 4], tl.int32)
    zeros, nans, infs, made = count, count, count, count
    lines = tl.zeros([BR, 1], tl.int32)
    seen, bad, good, dirty = lines, lines, lines, lines
    sx2 = tl.zeros([BR, 1], tl.float64)
    se2, worst = sx2, sx2 + float("-inf")
    for block in range(tl.program_id(1), tl.cdiv(rows, BR), tl.num_programs(1)):
        row = (block * BR + tl.arange(0, BR))[:, None]
        signal, noise, strange = zero, zero, count
        for start in range(0, columns, BC):
            column = (start + tl.arange(0, BC))[None, :]
            inside = (row < rows) & (column < columns)
            at = row.to(tl.int64) * columns + column
            if pair == 0:
                x = load_one(shadow + at, inside)
            else:
                x = load_one(exact + at, inside)
            if LINES == LINES_ROWS:
                line = tl.load(index + row, row < rows, 0)
                y = load_one(actual + line * stride_row + column.to(tl.int64) * stride_column, inside)
            else:
                y = load_one(actual + row.to(tl.int64) * stride_row + column.to(tl.int64) * stride_column, inside)
            x_ok, y_ok = is_finite(x), is_finite(y)
            valid = x_ok & y_ok
            magnitude = tl.where(x_ok, tl.abs(x), 0.0)
            zeros += folded((inside & (x == 0.0)).to(tl.int32), 0)
            nans += folded((x != x).to(tl.int32), 0)
            infs += folded((tl.abs(x) == INF).to(tl.int32), 0)
            made += folded((x_ok & (y_ok == 0)).to(tl.int32), 0)
            amax = tl.maximum(amax, folded(magnitude, 1))
            amin = tl.minimum(amin, folded(tl.where(magnitude > 0.0, magnitude, INF), 2))
            x64 = tl.where(valid, x, 0.0).to(tl.float64)
            y64 = tl.where(valid, y, 0.0).to(tl.float64)
            e64 = y64 - x64
            sx += folded(x64, 0)
            sy2 += folded(y64 * y64, 0)
            sxy += folded(x64 * y64, 0)
            se += folded(e64, 0)
            emax = tl.maximum(emax, folded(tl.abs(e64), 1).to(tl.float32))
            signal += folded(x64 * x64, 0)
            noise += folded(e64 * e64, 0)
            strange += folded((valid == 0).to(tl.int32), 0)
            if KEEP:
                if pair == 0:
                    tl.store(error + at, e64.to(tl.float32).to(error.dtype.element_ty), inside)
        row_signal = tl.sum(signal, axis=1, keep_dims=True)
        row_noise = tl.sum(noise, axis=1, keep_dims=True)
        clean = tl.sum(strange, axis=1, keep_dims=True) == 0
        sx2 += row_signal
        se2 += row_noise
        judged = clean & (row_signal > 0.0)
        nmse = row_noise / tl.where(judged, row_signal, 1.0)
        seen += (row < rows).to(tl.int32)
        dirty += (clean == 0).to(tl.int32)
        bad += (judged & (nmse > BAD)).to(tl.int32)
        good += (judged & (nmse < GOOD)).to(tl.int32)
        worst = tl.maximum(worst, tl.where(judged, nmse, float("-inf")))
    part = pair * tl.num_programs(1) + tl.program_id(1)
    at = counts + part * 10
    tl.store(at, total(seen) * columns)
    tl.store(at + 1, total(zeros))
    tl.store(at + 2, total(nans))
    tl.store(at + 3, total(infs))
    tl.store(at + 4, total(made))
    tl.store(at + 5, (tl.program_id(1) == 0).to(tl.int64))
    tl.store(at + 6, total(seen))
    tl.store(at + 7, total(bad))
    tl.store(at + 8, total(good))
    tl.store(at + 9, total(dirty))
    at = sums + part * 6
    tl.store(at, tl.sum(tl.sum(sx, axis=1), axis=0))
    tl.store(at + 1, tl.sum(tl.sum(sx2, axis=1), axis=0))
    tl.store(at + 2, tl.sum(tl.sum(sy2, axis=1), axis=0))
    tl.store(at + 3, tl.sum(tl.sum(sxy, axis=1), axis=0))
    tl.store(at + 4, tl.sum(tl.sum(se, axis=1), axis=0))
    tl.store(at + 5, tl.sum(tl.sum(se2, axis=1), axis=0))
    tl.store(maxima + part * 3, tl.max(tl.max(amax, axis=1), axis=0))
    tl.store(maxima + part * 3 + 1, tl.max(tl.max(emax, axis=1), axis=0))
    tl.store(maxima + part * 3 + 2, tl.max(tl.max(worst, axis=1), axis=0).to(tl.float32))
    tl.store(minima + part, tl.min(tl.min(amin, axis=1), axis=0))


@triton.jit
def total(v):
    """Add up counts as int64."""
    return tl.sum(tl.sum(v.to(tl.int64), axis=1), axis=0)


@triton.jit
def damage_kernel(error, grad, index, counts, sums, columns, stride_row, stride_column, LINES: tl.constexpr, BLOCK: tl.constexpr):
    """Square of the product of a row's error with the gradient of the same row; 0 where that is not finite."""
    row = tl.program_id(0)
    line = row.to(tl.int64)
    if LINES == LINES_ROWS:
        line = tl.load(index + row)
    product = tl.zeros([BLOCK], tl.float64)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        e = load_one(error + row.to(tl.int64) * columns + column, inside)
        g = load_one(grad + line * stride_row + column.to(tl.int64) * stride_column, inside)
        product += e.to(tl.float64) * g.to(tl.float64)
    found = tl.sum(product, axis=0)
    finite = tl.abs(found) < float("inf")
    found = tl.where(finite, found, 0.0)
    tl.store(counts + row, tl.full([], 1, tl.int64))
    tl.store(sums + row, found * found)
