# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The second stage of the reduction: partials ``[programs, 3 casts, 32]`` to the slots of ``fp8debug.metrics``.

Columns of a partial, FP64, in which counts below 2^53 are exact:

    sums     0 zeros  1 NaN  2 Inf  3 made nonfinite  4 nonzero codes  5 normal codes  6 saturated  7 zero blocks
             8 eps blocks  9 x  10 x^2  11 y^2  12 xy  13 err  14 err^2  15 log2 of scale_inv
    maxima  16 amax  17 abs err  18 scale_inv  19 scaled magnitude  20 block nmse  21 block amax / amin
    minima  24 amin  25 scale_inv

The tiles' padding counts as zeros; the host knows how much there is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.triton_histogram import BINS, THREADS

#: Slots of the results, in order: counts (int64), sums (FP64), maxima and minima (FP32).
COUNTS = (
    *("numel", "num_zero", "num_nan", "num_inf", "num_actual_nonfinite", "num_underflow", "num_subnormal", "num_saturated"),
    *("num_blocks", "num_zero_blocks", "num_eps_blocks"),
)
SUMS = ("sum_x", "sum_x2", "sum_y2", "sum_xy", "sum_err", "sum_err2", "scale_inv_sum_log2")
MAXIMA = ("amax", "max_abs_err", "scale_inv_max", "headroom", "worst_block_nmse", "max_block_range_log2")
MINIMA = ("amin", "scale_inv_min")


@triton.jit
def of_cast(cast, a, b, c):
    return tl.where(cast == 0, a, tl.where(cast == 1, b, c))


@triton.jit
def at_column(values, index: tl.constexpr):
    """Return ``values[index]`` as a scalar; the others are left out as minus infinity is of a maximum."""
    return tl.max(tl.where(tl.arange(0, 32) == index, values, float("-inf")))


@triton.jit
def reduce_kernel(
    partials, histograms, counts, sums, maxima, minima, log2_hist, num_programs, num_casts, numel, padding, inv_a, inv_b,
    inv_c, blocks_a, blocks_b, blocks_c, grid_a, grid_b, grid_c, eps_a, eps_b, eps_c, top_a, top_b, top_c,
    CHUNK: tl.constexpr, HIST: tl.constexpr,
):  # fmt: skip
    """Program c writes the slots of cast c; one more writes the histogram, without what is no exponent.

    ``grid``: blocks counted by the tiles, padding included; 0 for one scale of the whole tensor under current scaling, -1
    under any other. ``top``: the format's max.
    """
    cast = tl.program_id(0)
    if cast < num_casts:
        inv = of_cast(cast, tl.load(inv_a), tl.load(inv_b), tl.load(inv_c))
        num_blocks = of_cast(cast, blocks_a, blocks_b, blocks_c)
        grid = of_cast(cast, grid_a, grid_b, grid_c)
        eps = of_cast(cast, eps_a, eps_b, eps_c)
        top = of_cast(cast, top_a, top_b, top_c)
        reduce_cast(partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps,
                    top, CHUNK)  # fmt: skip
    elif HIST:
        reduce_histogram(partials, histograms, log2_hist, num_programs, CHUNK)


@triton.jit
def reduce_cast(
    partials, counts, sums, maxima, minima, num_programs, numel, padding, cast, inv, num_blocks, grid, eps, top,
    CHUNK: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, 32)
    of = tl.expand_dims(column, 0)
    total = tl.zeros([CHUNK, 32], tl.float64)
    largest = total + float("-inf")
    least = total + float("inf")
    for start in range(0, num_programs, CHUNK):
        program = tl.expand_dims(start + tl.arange(0, CHUNK), 1)
        inside = program < num_programs
        found = tl.load(partials + program * 96 + cast * 32 + of, inside, 0.0)
        total += found
        largest = tl.maximum(largest, tl.where(inside, found, float("-inf")))
        least = tl.minimum(least, tl.where(inside, found, float("inf")))
    s = tl.sum(total, axis=0)
    big = tl.max(largest, axis=0)
    small = tl.min(least, axis=0)
    zeros = at_column(s, 0)
    sx2 = at_column(s, 10)
    se2 = at_column(s, 14)
    zero_blocks = at_column(s, 7) - (grid - num_blocks)
    eps_blocks = at_column(s, 8)
    sum_log2 = at_column(s, 15)
    amax = at_column(big, 16)
    amin = at_column(small, 24)
    inv_max = at_column(big, 18)
    head = at_column(big, 19)
    nmse = at_column(big, 20)
    ratio = at_column(big, 21)
    inv_min = at_column(small, 25)
    if grid <= 0:
        zero = amax == 0.0
        amax32 = amax.to(tl.float32)
        zero_blocks = zero.to(tl.float64)
        lifted = ((amax32 < eps) | (tl.div_rn(top, amax32) == float("inf"))) & (grid == 0)
        eps_blocks = tl.where(zero, 0.0, lifted.to(tl.float64))
        sum_log2 = tl.where(zero, 0.0, tl.math.log2(inv.to(tl.float64)))
        inv_max = tl.where(zero, float("-inf"), inv.to(tl.float64))
        inv_min = tl.where(zero, float("inf"), inv.to(tl.float64))
        head = tl.where(zero, float("-inf"), tl.div_rn(amax32, inv).to(tl.float64))
        nmse = tl.where(sx2 == 0.0, float("-inf"), se2 / tl.where(sx2 == 0.0, 1.0, sx2))
        ratio = tl.where(zero, 0.0, amax / amin)
    nonzero_codes = at_column(s, 4)
    n = tl.arange(0, 16)
    c = tl.where(n == 0, numel.to(tl.float64), 0.0)
    c = tl.where(n == 1, zeros - padding, c)
    c = tl.where(n == 2, at_column(s, 1), c)
    c = tl.where(n == 3, at_column(s, 2), c)
    c = tl.where(n == 4, at_column(s, 3), c)
    c = tl.where(n == 5, numel + padding - nonzero_codes - zeros, c)
    c = tl.where(n == 6, nonzero_codes - at_column(s, 5), c)
    c = tl.where(n == 7, at_column(s, 6), c)
    c = tl.where(n == 8, num_blocks, c)
    c = tl.where(n == 9, zero_blocks, c)
    c = tl.where(n == 10, eps_blocks, c)
    tl.store(counts + cast * 11 + n, c.to(tl.int64), n < 11)
    first_sum = (column >= 9) & (column < 15)
    tl.store(sums + cast * 7 + column - 9, s, first_sum)
    tl.store(sums + cast * 7 + 6, sum_log2)
    tl.store(maxima + cast * 6, amax.to(tl.float32))
    tl.store(maxima + cast * 6 + 1, at_column(big, 17).to(tl.float32))
    tl.store(maxima + cast * 6 + 2, inv_max.to(tl.float32))
    tl.store(maxima + cast * 6 + 3, tl.div_rn(head.to(tl.float32), top))
    tl.store(maxima + cast * 6 + 4, nmse.to(tl.float32))
    widest = tl.math.log2(tl.where(ratio > 0.0, ratio, 1.0))
    tl.store(maxima + cast * 6 + 5, tl.where(ratio > 0.0, widest, float("-inf")).to(tl.float32))
    tl.store(minima + cast * 2, amin.to(tl.float32))
    tl.store(minima + cast * 2 + 1, inv_min.to(tl.float32))


@triton.jit
def reduce_histogram(partials, histograms, log2_hist, num_programs, CHUNK: tl.constexpr):
    bin = tl.expand_dims(tl.arange(0, THREADS), 0)
    total = tl.zeros([CHUNK, THREADS], tl.int64)
    column = tl.expand_dims(tl.arange(0, 32), 0)
    strange = tl.zeros([CHUNK, 32], tl.float64)
    for start in range(0, num_programs, CHUNK):
        program = tl.expand_dims(start + tl.arange(0, CHUNK), 1)
        inside = program < num_programs
        total += tl.load(histograms + program * THREADS + bin, inside, 0).to(tl.int64)
        strange += tl.load(partials + program * 96 + column, inside, 0.0)
    counted = tl.sum(tl.reshape(tl.sum(total, axis=0), (THREADS // BINS, BINS)), axis=0)
    s = tl.sum(strange, axis=0)
    at = tl.arange(0, BINS)
    counted -= tl.where(at == 0, at_column(s, 0), 0.0).to(tl.int64)
    counted -= tl.where(at == BINS - 1, at_column(s, 1) + at_column(s, 2), 0.0).to(tl.int64)
    tl.store(log2_hist + at, counted)
