# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The statistics of a GEMM's result against the shadow and against the exact GEMM, in FP64 with masks throughout.

A program leaves what its elements add to every slot, and ``finish`` joins these parts later in their order: the same bits in
every run. The sample of the actual result is read where it lies; what it is compared with comes in parts of the contracted
dimension, as ``sampled_kernel`` leaves it.

Columns of a part, FP64, in which counts below 2^53 are exact; a row of ``slot_rows`` has the same order, in the slots' own types:

    sums     0..5 numel, zero, NaN, Inf, made nonfinite, tensors  6..9 rows, bad, good, nonfinite
             10..15 x, x^2, y^2, xy, err, err^2
    maxima  16 amax  17 abs err  18 nmse of the worst row  19 minus amin
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import INF, bits_of, decode, float_of, load_one
from fp8debug.kernels.gpu.gemm.sampled_kernel import shared_line
from fp8debug.kernels.gpu.quantize.tile_cast import is_finite
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

# Used: the columns that a kernel's programs leave.
WHOLE = tl.constexpr(0)
ROWS = tl.constexpr(1)  # those of the rows
SUMMED = tl.constexpr(2)  # 0, a count, and 10, a sum

#: Columns of a part, and parts that are joined at once.
NUM_COLUMNS = 24
COLUMNS = tl.constexpr(NUM_COLUMNS)
CHUNK = tl.constexpr(64)

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
def add_three(a0, a1, a2, b0, b1, b2):
    """Three sums at once: what a reduction costs is its exchange between warps, however many values it has."""
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def add_six(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    """Six sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@triton.jit
def add_eight(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    """Eight sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def extremes(a0, a1, a2, b0, b1, b2):
    """Two maxima and a minimum."""
    return tl.maximum(a0, b0), tl.maximum(a1, b1), tl.minimum(a2, b2)


@triton.jit
def summed(at, splits, stride, inside):
    """Add up FP32 parts in their order, four at a time."""
    x = load_one(at, inside)
    for split in range(1, splits, 4):
        a = load_one(at + split * stride, inside)
        b = load_one(at + (split + 1) * stride, inside & (split + 1 < splits))
        c = load_one(at + (split + 2) * stride, inside & (split + 2 < splits))
        d = load_one(at + (split + 3) * stride, inside & (split + 3 < splits))
        x += (a + b) + (c + d)
    return x


@triton.jit
def rounded(x):
    """Round to BF16, to nearest even; NaN stays NaN."""
    bits = bits_of(x)
    return tl.where(x == x, float_of((bits + (((bits >> 16) & 1) + 0x7FFF)) & -65536), x)


@triton.jit
def wide_error(
    actual, index, products, error, bias, splits, split_stride, rows, columns, stride_row, stride_column, INDEXED: tl.constexpr,
    BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store actual minus shadow of sampled rows in their whole width, 0 where a side is not finite."""
    across = tl.cdiv(columns, BLOCK)
    for block in range(tl.program_id(1), rows * across, tl.num_programs(1)):
        row = (block // across).to(tl.int64)
        column = (block % across) * BLOCK + tl.arange(0, BLOCK)
        inside = column < columns
        at = row * columns + column
        x = rounded(summed(products + at, splits, split_stride, inside))
        line = tl.load(index + row) if INDEXED else row
        y = load_one(actual + line * stride_row + column.to(tl.int64) * stride_column, inside)
        if BIASED:
            y -= load_one(bias + column, inside)
        e = tl.where(is_finite(x) & is_finite(y), y - x, 0.0)
        tl.store(error + at, e.to(error.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["shift"])
def compare_kernel(  # noqa: C901  # branches on compile-time constants
    actual, index, products, error, bias, parts, shift, splits, split_stride, shadow_rows, shadow_columns, exact_rows,
    exact_columns, exact_start, wide_start, num_far, product_stride_row, product_stride_column, stride_row, stride_column,
    ACTUAL: tl.constexpr, INDEXED: tl.constexpr, BIASED: tl.constexpr, SHARE: tl.constexpr, SIZE: tl.constexpr,
    TURNED: tl.constexpr, KEEP: tl.constexpr, WIDE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Pair 0 is actual against shadow, pair 1 against exact, of its first rows or columns; parts ``[pairs, programs, 24]``.

    ``TURNED``: rows are the share and columns the sampled lines, as of grad_weight. ``ACTUAL``: whether there is an actual
    result; else the exact GEMM stands for it, and pair 0 is all. ``KEEP``: store actual minus shadow of the rows that exact has,
    0 where a side is not finite, into ``error``; ``WIDE``: of these rows in their whole width, which is what pair 2 is for.
    ``BIASED``: ``bias``, one number a column, is in the actual result, and is taken off it in FP32.
    """
    pair = tl.program_id(0)
    rows = tl.where(pair == 0, shadow_rows, exact_rows)
    columns = tl.where(pair == 0, shadow_columns, exact_columns)
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
    first = products + tl.where(pair == 0, 0, exact_start)
    if WIDE:
        if pair == 2:
            wide_error(
                actual, index, products + wide_start, error, bias, splits, split_stride, exact_rows, num_far, stride_row,
                stride_column, INDEXED, BIASED, BR * BC,
            )  # fmt: skip
            return
    for block in range(tl.program_id(1), tl.cdiv(rows, BR), tl.num_programs(1)):
        r = block * BR + tl.arange(0, BR)
        row = r[:, None]
        signal, noise, strange = zero, zero, count
        for start in range(0, columns, BC):
            c = start + tl.arange(0, BC)
            column = c[None, :]
            inside = (row < rows) & (column < columns)
            place = row.to(tl.int64) * product_stride_row + column.to(tl.int64) * product_stride_column
            x = summed(first + place, splits, split_stride, inside)
            x = tl.where(pair == 1, x, rounded(x))
            if ACTUAL:
                y_row, y_column = r.to(tl.int64), c.to(tl.int64)
                if TURNED:
                    y_row = shared_line(r, num_far, shift, SHARE).to(tl.int64)
                    if INDEXED:
                        y_column = tl.load(index + c, c < columns, 0)
                        if SIZE > 1:
                            y_column = tl.max_contiguous(tl.multiple_of(y_column, SIZE), SIZE)
                else:
                    y_column = shared_line(c, num_far, shift, SHARE).to(tl.int64)
                    if INDEXED:
                        y_row = tl.load(index + r, r < rows, 0)
                y = load_one(actual + y_row[:, None] * stride_row + y_column[None, :] * stride_column, inside)
                if BIASED:
                    y = tl.where(inside, y - load_one(bias + y_column, c < columns)[None, :], 0.0)
            else:
                y = summed(products + exact_start + place, splits, split_stride, inside)
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
            if KEEP and not WIDE:
                if pair == 0:
                    at = row.to(tl.int64) * columns + column
                    tl.store(error + at, e64.to(tl.float32).to(error.dtype.element_ty), inside & (row < exact_rows))
        row_signal, row_noise, num_strange = tl.reduce((signal, noise, strange), 1, add_three, keep_dims=True)
        clean = num_strange == 0
        sx2 += row_signal
        se2 += row_noise
        judged = clean & (row_signal > 0.0)
        nmse = row_noise / tl.where(judged, row_signal, 1.0)
        seen += (row < rows).to(tl.int32)
        dirty += (clean == 0).to(tl.int32)
        bad += (judged & (nmse > BAD)).to(tl.int32)
        good += (judged & (nmse < GOOD)).to(tl.int32)
        worst = tl.maximum(worst, tl.where(judged, nmse, float("-inf")))
    # In two directions: the interpreter flattens only the first of several values.
    x1, y2, xy, e1, num_zero, num_nan, num_inf, num_made = tl.reduce(
        tl.reduce((sx, sy2, sxy, se, zeros, nans, infs, made), 1, add_eight), 0, add_eight
    )  # fmt: skip
    most, furthest, least = tl.reduce(tl.reduce((amax, emax, amin), 1, extremes), 0, extremes)
    x2, e2, num_rows, num_bad, num_good, num_dirty = tl.reduce(
        tl.reduce((sx2, se2, seen, bad, good, dirty), 1, add_six), 0, add_six
    )  # fmt: skip
    f64: tl.constexpr = tl.float64
    at = parts + (pair * tl.num_programs(1) + tl.program_id(1)) * COLUMNS
    tl.store(at, num_rows.to(f64) * columns)
    tl.store(at + 1, num_zero.to(f64))
    tl.store(at + 2, num_nan.to(f64))
    tl.store(at + 3, num_inf.to(f64))
    tl.store(at + 4, num_made.to(f64))
    tl.store(at + 5, (tl.program_id(1) == 0).to(f64))
    tl.store(at + 6, num_rows.to(f64))
    tl.store(at + 7, num_bad.to(f64))
    tl.store(at + 8, num_good.to(f64))
    tl.store(at + 9, num_dirty.to(f64))
    tl.store(at + 10, x1)
    tl.store(at + 11, x2)
    tl.store(at + 12, y2)
    tl.store(at + 13, xy)
    tl.store(at + 14, e1)
    tl.store(at + 15, e2)
    tl.store(at + 16, most.to(f64))
    tl.store(at + 17, furthest.to(f64))
    tl.store(at + 18, tl.max(tl.max(worst, axis=1), axis=0))
    tl.store(at + 19, -least.to(f64))


@triton.jit
def finish(parts, words, num_programs, used):
    """Join the parts ``[programs, 24]`` of a pair to a row of words; ``used``: which columns there are, see above."""
    n = tl.arange(0, 16)
    e = tl.arange(0, 8)
    row = tl.arange(0, CHUNK)[:, None]
    sums = tl.zeros([CHUNK, 16], tl.float64)
    most = tl.full([CHUNK, 8], float("-inf"), tl.float64)
    added = ((n < 16) & (used == WHOLE)) | ((n >= 6) & (n < 10) & (used == ROWS)) | (((n == 0) | (n == 10)) & (used == SUMMED))
    extreme = ((e < 4) & (used == WHOLE)) | ((e == 2) & (used == ROWS))
    for start in range(0, num_programs, CHUNK):
        inside = start + row < num_programs
        at = parts + (start + row) * COLUMNS
        sums += tl.load(at + n[None, :], inside & added[None, :], 0.0)
        most = tl.maximum(most, tl.load(at + 16 + e[None, :], inside & extreme[None, :], float("-inf")))
    s = tl.sum(sums, axis=0)
    tl.store(words + n, s.to(tl.int64), added & (n < 10))
    tl.store(words.to(tl.pointer_type(tl.float64)) + n, s, added & (n >= 10))
    m = tl.max(most, axis=0)
    m = tl.where(e == 3, -m, m).to(tl.float32)
    tl.store(words.to(tl.pointer_type(tl.float32)) + 32 + e, m, extreme)


@triton.jit
def rows_kernel(
    x, index, codes, scale, parts, columns, stride_row, stride_column, code_stride_row, code_stride_column,
    scale_stride_row, scale_stride_column, block_rows, block_columns, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row ``index[i]`` of an operand beside what a GEMM reads of it; program i leaves the slots of ``metrics/rows.py``."""
    program = tl.program_id(0)
    row = tl.load(index + program)
    signal = tl.zeros([BLOCK], tl.float64)
    noise = signal
    strange = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        a = load_one(x + row * stride_row + column.to(tl.int64) * stride_column, inside)
        at = codes + row * code_stride_row + column.to(tl.int64) * code_stride_column
        code = tl.load(at, inside, 0).to(tl.int32) & 0xFF
        at = scale + (row // block_rows) * scale_stride_row + (column // block_columns) * scale_stride_column
        b = decode(code, E5M2) * tl.load(at, inside, 0.0)
        valid = is_finite(a) & is_finite(b)
        a64 = tl.where(valid, a, 0.0).to(tl.float64)
        e64 = tl.where(valid, b, 0.0).to(tl.float64) - a64
        signal += a64 * a64
        noise += e64 * e64
        strange += (valid == 0).to(tl.int32)
    row_signal = tl.sum(signal, axis=0)
    clean = tl.sum(strange, axis=0) == 0
    judged = clean & (row_signal > 0.0)
    nmse = tl.sum(noise, axis=0) / tl.where(judged, row_signal, 1.0)
    at = parts + program * COLUMNS
    tl.store(at + 6, tl.full([], 1.0, tl.float64))
    tl.store(at + 7, (judged & (nmse > BAD)).to(tl.float64))
    tl.store(at + 8, (judged & (nmse < GOOD)).to(tl.float64))
    tl.store(at + 9, (clean == 0).to(tl.float64))
    tl.store(at + 18, tl.where(judged, nmse, float("-inf")))


@triton.jit
def damage_kernel(error, grad, index, parts, columns, stride_row, stride_column, INDEXED: tl.constexpr, BLOCK: tl.constexpr):
    """Square of the product of a row's error with the gradient of the same row; 0 where that is not finite."""
    row = tl.program_id(0)
    line = row.to(tl.int64)
    if INDEXED:
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
    tl.store(parts + row * COLUMNS, tl.full([], 1.0, tl.float64))
    tl.store(parts + row * COLUMNS + 10, found * found)
