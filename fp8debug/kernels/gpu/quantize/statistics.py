# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The second stage of the reduction: partials ``[programs, 3 casts, 24]`` to the slots of ``fp8debug.metrics``.

Columns of a partial, FP64, in which counts below 2^53 are exact:

    sums     0 zeros  1 NaN  2 Inf  3 made nonfinite  4 nonzero codes  5 normal codes  6 saturated  7 zero blocks
             8 eps blocks  9 x  10 x^2  11 y^2  12 xy  13 err  14 err^2  15 log2 of scale_inv  18 its square
    maxima  16 amax  17 abs err  19 scaled magnitude  20 block nmse  21 block amax / amin
            22 minus the smallest block amax above 0  23 minus amin

The tiles' padding counts as zeros; the host knows how much there is. A finished part, of the fast kernel, ``[programs, 32]``,
holds slots instead: counts in 0 to 11 (num_scales follows from them), sums in 12 to 19, maxima in 20 to 25 (the block range as
amax / amin) and minima negated in 26 and 27.

The exponent histogram in the pass that reads the tensor: one private column of counters per thread in shared memory.

Bin b of a thread lies at ``b * 128 + lane * 4`` of its warp's 8 KiB, so the 32 lanes of a warp never meet in a bank, and
the exponent field of a BF16 word is already ``128 * exponent``. Counts are integers: the same in any order. Zeros are
counted in the first bin and NaN and Inf in the last; the reduction takes them out again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, bits_of, float_of
from fp8debug.kernels.gpu.quantize.tile_cast import one_of
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS

#: Programs that count have this many threads.
HISTOGRAM_WARPS = 4
THREADS = tl.constexpr(32 * HISTOGRAM_WARPS)
BINS = tl.constexpr(NUM_BINS)
FIRST = tl.constexpr(FIRST_LOG2 + 127)  # exponent field of the first bin

_START = tl.constexpr(
    ".shared .align 16 .b8 fp8debug_counts[32768];\n"
    "{ .reg .u32 a, t, n; .reg .pred p; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts; shl.b32 t, t, 2; add.u32 a, a, t;"
    " mov.u32 n, 0; FP8DEBUG_ZERO: st.shared.u32 [a], 0; add.u32 a, a, 512; add.u32 n, n, 1; setp.lt.u32 p, n, 64;"
    " @p bra FP8DEBUG_ZERO; bar.sync 0; mov.u32 $0, n; }"
)
_COUNT_ONE = (
    " shr.u32 e, ${0}, 16; and.b32 e, e, 32640; max.u32 e, e, {low}; min.u32 e, e, {high}; add.u32 e, e, a;"
    " red.shared.add.u32 [e+-{low}], 1;"
)
_COUNT = tl.constexpr(
    "{ .reg .u32 a, t, e; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts; shl.b32 e, t, 8; and.b32 e, e, 24576;"
    " and.b32 t, t, 31; shl.b32 t, t, 2; add.u32 a, a, t; add.u32 a, a, e;"
    + "".join(
        _COUNT_ONE.format(q, low=(FIRST_LOG2 + 127) * 128, high=(FIRST_LOG2 + 127 + NUM_BINS - 1) * 128) for q in (1, 2, 3, 4)
    )
    + " mov.u32 $0, 0; }"
)
# Thread t adds up bin t % 64 of two warps, starting at its own lane so that the warp's loads meet in no bank.
_STOP = tl.constexpr(
    "{ .reg .u32 a, t, n, s, v, w, c; .reg .pred p; bar.sync 0; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts;"
    " and.b32 v, t, 63; shl.b32 v, v, 7; add.u32 a, a, v; shr.u32 v, t, 6; shl.b32 v, v, 14; add.u32 a, a, v;"
    " mov.u32 n, 0; mov.u32 s, 0; FP8DEBUG_SUM: add.u32 v, n, t; and.b32 v, v, 31; shl.b32 v, v, 2; add.u32 v, v, a;"
    " ld.shared.u32 w, [v]; ld.shared.u32 c, [v+8192]; add.u32 s, s, w; add.u32 s, s, c; add.u32 n, n, 1;"
    " setp.lt.u32 p, n, 32; @p bra FP8DEBUG_SUM; mov.u32 $0, s; }"
)


@triton.jit
def start_histogram(HIST: tl.constexpr, NATIVE: tl.constexpr):
    """Clear the counters."""
    if HIST and NATIVE:
        lane = tl.arange(0, THREADS)
        tl.inline_asm_elementwise(_START, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_exponents(out, x0, x1, x2, x3, NATIVE: tl.constexpr):
    """Count four values per element; without native FP8 into ``out``, this program's ``[THREADS]`` of device memory."""
    if NATIVE:
        b0, b1, b2, b3 = bits_of(x0), bits_of(x1), bits_of(x2), bits_of(x3)
        tl.inline_asm_elementwise(_COUNT, "=r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.int32, is_pure=False, pack=1)
    else:
        count_plain(out, x0)
        count_plain(out, x1)
        count_plain(out, x2)
        count_plain(out, x3)


@triton.jit
def count_plain(out, x):
    """Count in device memory."""
    field = (bits_of(x) >> 23) & 0xFF
    tl.atomic_add(out + tl.minimum(tl.maximum(field - FIRST, 0), BINS - 1), tl.full(x.shape, 1, tl.int32))


@triton.jit
def store_histogram(out, NATIVE: tl.constexpr):
    """Write this program's ``[THREADS]`` sums."""
    if NATIVE:
        lane = tl.arange(0, THREADS)
        tl.store(out + lane, tl.inline_asm_elementwise(_STOP, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1))


pass

#: Parts are finished: ``grid`` of such a cast.
FINISHED = tl.constexpr(-2)
#: Columns of a cast's part, and of the parts of a program.
COLUMNS_OF_PARTIALS = tl.constexpr(24)
COLUMNS_OF_PROGRAM = tl.constexpr(3 * 24)
#: Slots of the results, in order: counts (int64), sums (FP64), maxima and minima (FP32).
COUNTS = (
    *("numel", "num_zero", "num_nan", "num_inf", "num_actual_nonfinite", "num_underflow", "num_subnormal", "num_saturated"),
    *("num_blocks", "num_zero_blocks", "num_eps_blocks", "num_tensors", "num_scales"),
)
SUMS = ("sum_x", "sum_x2", "sum_y2", "sum_xy", "sum_err", "sum_err2", "scale_inv_sum_log2", "scale_inv_sum2_log2")
MAXIMA = ("amax", "max_abs_err", "scale_inv_max", "headroom", "worst_block_nmse", "max_block_range_log2")
MINIMA = ("amin", "scale_inv_min")
NUM_COUNTS, NUM_SUMS = tl.constexpr(len(COUNTS)), tl.constexpr(len(SUMS))
NUM_MAXIMA, NUM_MINIMA = tl.constexpr(len(MAXIMA)), tl.constexpr(len(MINIMA))
#: Where a row of words has its first maximum, in FP32 numbers, and the first minimum; sums follow on the counts.
MAXIMA_AT = tl.constexpr(2 * (len(COUNTS) + len(SUMS)))
MINIMA_AT = tl.constexpr(2 * (len(COUNTS) + len(SUMS)) + len(MAXIMA))


@triton.jit
def of_cast(cast, a, b, c):
    """Return the value for this cast."""
    return tl.where(cast == 0, a, tl.where(cast == 1, b, c))


@triton.jit
def reduce_kernel(
    partials, histograms, counts, sums, maxima, minima, log2_hist, num_programs, num_casts, numel, padding, inv_a, inv_b,
    inv_c, blocks_a, blocks_b, blocks_c, grid_a, grid_b, grid_c, eps_a, eps_b, eps_c, top_a, top_b, top_c, rounding_a,
    rounding_b, rounding_c, margin_a, margin_b, margin_c, CHUNK: tl.constexpr, HIST: tl.constexpr,
):  # fmt: skip
    """Program c writes the slots of cast c; eight more write the histogram, without what is no exponent.

    ``rounding``: of the scale, or -1 where a scale_inv is given. ``grid``: blocks counted by the tiles, padding included;
    0 for one scale of the whole tensor under current scaling, -1 under any other, FINISHED for finished parts. ``top``: the
    format's max.
    """
    cast = tl.program_id(0)
    if cast < num_casts:
        inv = of_cast(cast, tl.load(inv_a), tl.load(inv_b), tl.load(inv_c))
        num_blocks = of_cast(cast, blocks_a, blocks_b, blocks_c)
        grid = of_cast(cast, grid_a, grid_b, grid_c)
        eps = of_cast(cast, eps_a, eps_b, eps_c)
        top = of_cast(cast, top_a, top_b, top_c)
        rounding = of_cast(cast, rounding_a, rounding_b, rounding_c)
        margin = of_cast(cast, margin_a, margin_b, margin_c)
        reduce_cast(partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps,
                    top, rounding, margin, CHUNK)  # fmt: skip
    elif HIST:
        reduce_histogram(partials, histograms, log2_hist, num_programs, (cast - num_casts) * 8, CHUNK)


@triton.jit
def scale_inv_of(amax, inv, eps, top, rounding, margin):
    """Return the scale_inv of a block of that amax; ``scale_of`` with everything known at run time only.

    ``inv`` is uninitialized memory where the rounding is not negative, and must not enter into any arithmetic.
    """
    a = tl.maximum(amax, eps)
    scale = tl.minimum(tl.div_rn(top, a), FLOAT32_MAX)
    ceil = float_of(bits_of(scale) & 0x7F800000)
    exponent = tl.minimum(tl.where(top > 1000.0, 15, 8) + 127 - (bits_of(a) >> 23), 127)
    scale = tl.where(rounding == 2, float_of((exponent + 127) << 23), tl.where(rounding == 1, ceil, scale))
    return tl.where(rounding < 0, inv, tl.div_rn(scale * 0.0 + 1.0, scale * margin))


@triton.jit
def joined(partials, first, count, CHUNK: tl.constexpr):
    """Sums and maxima of the finished parts ``first`` to ``first + count - 1``, ``[32]`` each."""
    n = tl.expand_dims(tl.arange(0, 32), 0)
    total = tl.zeros([CHUNK, 32], tl.float64)
    most = tl.full([CHUNK, 32], float("-inf"), tl.float64)
    for start in range(0, count, CHUNK):
        part = tl.expand_dims(start + tl.arange(0, CHUNK), 1)
        values = tl.load(partials + (first + part) * 32 + n, (part < count) & (n < 28), 0.0)
        total += tl.where(n < 20, values, 0.0)
        most = tl.maximum(most, tl.where(part < count, values, float("-inf")))
    return tl.sum(total, axis=0), tl.max(most, axis=0)


@triton.jit
def finish_slots(counts, sums, maxima, minima, total, most):
    """Write the slots of a cast from what ``joined`` returns for all of its parts."""
    n = tl.arange(0, 32)
    tl.store(counts + n, total.to(tl.int64), n < 12)
    num_scales = tl.sum(tl.where(n == 8, total, tl.where(n == 9, -total, 0.0)), axis=0)
    tl.store(counts + 12, num_scales.to(tl.int64))
    tl.store(sums + n - 12, total, (n > 11) & (n < 20))
    span = tl.where((n == 25) & (most > 0.0), most, 1.0)
    widest = tl.where(most > 0.0, tl.math.log2(span), float("-inf"))
    most = tl.where(n == 25, widest, most)
    tl.store(maxima + n - 20, most.to(tl.float32), (n > 19) & (n < 26))
    tl.store(minima + n - 26, -most.to(tl.float32), (n > 25) & (n < 28))


@triton.jit
def finish_row(words, total, most):
    """Write a row of ``slot_rows`` from what ``joined`` returns for all parts."""
    sums, reals = words.to(tl.pointer_type(tl.float64)) + NUM_COUNTS, words.to(tl.pointer_type(tl.float32))
    finish_slots(words, sums, reals + MAXIMA_AT, reals + MINIMA_AT, total, most)


@triton.jit
def reduce_cast(
    partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps, top, rounding,
    margin, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce and finish the slots of one cast."""
    if grid == FINISHED:
        total, greatest = joined(partials, 0, num_programs, CHUNK)
        finish_slots(counts, sums, maxima, minima, total, greatest)
    else:
        reduce_parts(partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps,
                     top, rounding, margin, CHUNK)  # fmt: skip


@triton.jit
def reduce_parts(
    partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps, top, rounding,
    margin, CHUNK: tl.constexpr,
):  # fmt: skip
    """Reduce and finish the slots of one cast whose parts hold accumulators."""
    n8 = tl.expand_dims(tl.arange(0, 8), 0)
    counted = tl.zeros([CHUNK, 8], tl.float64)
    summed = tl.zeros([CHUNK, 8], tl.float64)
    squared = tl.zeros([CHUNK, 8], tl.float64)
    most = tl.full([CHUNK, 8], float("-inf"), tl.float64)
    for start in range(0, num_programs, CHUNK):
        program = tl.expand_dims(start + tl.arange(0, CHUNK), 1)
        inside = program < num_programs
        at = partials + program * COLUMNS_OF_PROGRAM + cast * COLUMNS_OF_PARTIALS + n8
        counted += tl.load(at, inside, 0.0)
        summed += tl.load(at + 8, inside, 0.0)
        found = tl.load(at + 16, inside, float("-inf"))
        squared += tl.where(inside & (n8 == 2), found, 0.0)
        most = tl.maximum(most, found)
    s = tl.sum(counted, axis=0)
    t = tl.sum(summed, axis=0)
    big = tl.max(most, axis=0)
    zeros = one_of(s, 0)
    sx2 = one_of(t, 2)
    se2 = one_of(t, 6)
    zero_blocks = one_of(s, 7) - (grid - num_blocks)
    eps_blocks = one_of(t, 0)
    sum_log2 = one_of(t, 7)
    sum2_log2 = one_of(tl.sum(squared, axis=0), 2)
    amax = one_of(big, 0)
    amin = -one_of(big, 7)
    head = one_of(big, 3)
    nmse = one_of(big, 4)
    ratio = one_of(big, 5)
    smallest = (-one_of(big, 6)).to(tl.float32)
    none = smallest == float("inf")
    inv_min = scale_inv_of(tl.where(none, 1.0, smallest), inv, eps, top, rounding, margin).to(tl.float64)
    inv_max = scale_inv_of(tl.where(none, 1.0, amax).to(tl.float32), inv, eps, top, rounding, margin).to(tl.float64)
    inv_min = tl.where(none, float("inf"), inv_min)
    inv_max = tl.where(none, float("-inf"), inv_max)
    head = tl.where(none, float("-inf"), head)
    nmse = tl.where(none, float("-inf"), nmse)
    if grid <= 0:
        zero = amax == 0.0
        amax32 = amax.to(tl.float32)
        zero_blocks = zero.to(tl.float64)
        lifted = ((amax32 < eps) | (tl.div_rn(top, amax32) == float("inf"))) & (grid == 0)
        eps_blocks = tl.where(zero, 0.0, lifted.to(tl.float64))
        sum_log2 = tl.where(zero, 0.0, tl.math.log2(inv.to(tl.float64)))
        sum2_log2 = sum_log2 * sum_log2
        inv_max = tl.where(zero, float("-inf"), inv.to(tl.float64))
        inv_min = tl.where(zero, float("inf"), inv.to(tl.float64))
        head = tl.where(zero, float("-inf"), tl.div_rn(amax32, inv).to(tl.float64))
        nmse = tl.where(sx2 == 0.0, float("-inf"), se2 / tl.where(sx2 == 0.0, 1.0, sx2))
        ratio = tl.where(zero, 0.0, amax / tl.where(zero, 1.0, amin))
    nonzero_codes = one_of(s, 4)
    n = tl.arange(0, 16)
    c = tl.where(n == 0, numel.to(tl.float64), 0.0)
    c = tl.where(n == 1, zeros - padding, c)
    c = tl.where(n == 2, one_of(s, 1), c)
    c = tl.where(n == 3, one_of(s, 2), c)
    c = tl.where(n == 4, one_of(s, 3), c)
    c = tl.where(n == 5, numel + padding - nonzero_codes - zeros, c)
    c = tl.where(n == 6, nonzero_codes - one_of(s, 5), c)
    c = tl.where(n == 7, one_of(s, 6), c)
    c = tl.where(n == 8, num_blocks, c)
    c = tl.where(n == 9, zero_blocks, c)
    c = tl.where(n == 10, eps_blocks, c)
    c = tl.where(n == 11, 1.0, c)
    c = tl.where(n == 12, num_blocks - zero_blocks, c)
    tl.store(counts + cast * NUM_COUNTS + n, c.to(tl.int64), n < 13)
    of = tl.arange(0, 8)
    sums += cast * NUM_SUMS
    tl.store(sums + of - 1, t, (of > 0) & (of < 7))
    tl.store(sums + 6, sum_log2)
    tl.store(sums + 7, sum2_log2)
    maxima += cast * NUM_MAXIMA
    minima += cast * NUM_MINIMA
    tl.store(maxima, amax.to(tl.float32))
    tl.store(maxima + 1, one_of(big, 1).to(tl.float32))
    tl.store(maxima + 2, inv_max.to(tl.float32))
    tl.store(maxima + 3, tl.minimum(tl.div_rn(head.to(tl.float32), top), FLOAT32_MAX))
    tl.store(maxima + 4, nmse.to(tl.float32))
    widest = tl.math.log2(tl.where(ratio > 0.0, ratio, 1.0))
    tl.store(maxima + 5, tl.where(ratio > 0.0, widest, float("-inf")).to(tl.float32))
    tl.store(minima, amin.to(tl.float32))
    tl.store(minima + 1, inv_min.to(tl.float32))


@triton.jit
def reduce_histogram(partials, histograms, log2_hist, num_programs, first, CHUNK: tl.constexpr):
    """Add up bins ``first`` to ``first + 7``, whose counts lie twice in a program's ``[THREADS]``."""
    bin = first + tl.arange(0, 8)
    n8 = tl.expand_dims(tl.arange(0, 8), 0)
    total = tl.zeros([CHUNK, 8], tl.int64)
    strange = tl.zeros([CHUNK, 8], tl.float64)
    for start in range(0, num_programs, CHUNK):
        program = tl.expand_dims(start + tl.arange(0, CHUNK), 1)
        inside = program < num_programs
        at = histograms + program * THREADS + first + n8
        total += tl.load(at, inside, 0).to(tl.int64) + tl.load(at + BINS, inside, 0).to(tl.int64)
        strange += tl.load(partials + program * COLUMNS_OF_PROGRAM + n8, inside, 0.0)
    counted = tl.sum(total, axis=0)
    s = tl.sum(strange, axis=0)
    counted -= tl.where(bin == 0, one_of(s, 0), 0.0).to(tl.int64)
    counted -= tl.where(bin == BINS - 1, one_of(s, 1) + one_of(s, 2), 0.0).to(tl.int64)
    tl.store(log2_hist + bin, counted)
