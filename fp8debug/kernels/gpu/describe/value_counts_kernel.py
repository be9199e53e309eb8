# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Casts with one scale for the whole tensor, from counts of its BF16 values, on which alone depends what they do to an element.

``count_kernel`` reads a tensor once and counts each of the 65536 bit patterns. ``finish_kernel`` takes the counts of many tensors
and works out, for each tensor and cast, the amax, the scale (of this tensor, or of an amax history) and every slot in FP64;
``exponents_kernel`` the exponent histogram. Counts are integers: the same in any order, and exact.

On the GPU a program counts in shared memory (``count_window``). A table is ``[32768 magnitudes, 2 signs]``, int32; how many
zeros there are follows from the number of elements, so that who counts may leave them out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.count_window import look_and_count, start_window, stop_window
from fp8debug.kernels.gpu.device import (
    FLOAT32_MAX,
    INF,
    LIMIT_E4M3,
    LIMIT_E5M2,
    MAX_E4M3,
    MAX_E5M2,
    bits_of,
    decode,
    encode,
    float_of,
)
from fp8debug.kernels.gpu.quantize.statistics import MAXIMA_AT, NUM_COUNTS
from fp8debug.kernels.gpu.quantize.tile_cast import is_finite
from fp8debug.kernels.slot_rows import ROW_WORDS
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS

#: Of a program that counts, of which a multiprocessor has two.
COUNT_WARPS, COUNT_PER_SM = 16, 2
WORDS = tl.constexpr(ROW_WORDS)
TABLE = tl.constexpr(65536)
MAGNITUDES = tl.constexpr(32768)
CLEARED = tl.constexpr(4096)  # counters that a program clears at once
NONFINITE = tl.constexpr(0x7F80)  # the magnitude of Inf; NaN lie above
BINS = tl.constexpr(NUM_BINS)
FIRST = tl.constexpr(FIRST_LOG2 + 127)  # exponent field of the first bin

# Columns of a cast's parameters: int64 and FP32.
NUM_INTS, NUM_REALS = 7, 3
INTS = tl.constexpr(NUM_INTS)
REALS = tl.constexpr(NUM_REALS)
# SCALING: where a cast's scale comes from.
SCALING_CURRENT = tl.constexpr(0)
SCALING_MAX = tl.constexpr(1)  # the largest amax of a history
SCALING_RECENT = tl.constexpr(2)  # its latest
SCALING_STATIC = tl.constexpr(3)


@triton.jit
def words_at(x_ptr, at, num_words, EVEN: tl.constexpr):
    """16 words of each thread; zeros behind the last."""
    if EVEN:
        return (
            tl.load(x_ptr + at), tl.load(x_ptr + at + 512), tl.load(x_ptr + at + 1024), tl.load(x_ptr + at + 1536),
            tl.load(x_ptr + at + 2048), tl.load(x_ptr + at + 2560), tl.load(x_ptr + at + 3072), tl.load(x_ptr + at + 3584),
            tl.load(x_ptr + at + 4096), tl.load(x_ptr + at + 4608), tl.load(x_ptr + at + 5120), tl.load(x_ptr + at + 5632),
            tl.load(x_ptr + at + 6144), tl.load(x_ptr + at + 6656), tl.load(x_ptr + at + 7168), tl.load(x_ptr + at + 7680),
        )  # fmt: skip
    else:
        return (
            word_at(x_ptr, at, num_words), word_at(x_ptr, at + 512, num_words), word_at(x_ptr, at + 1024, num_words),
            word_at(x_ptr, at + 1536, num_words), word_at(x_ptr, at + 2048, num_words), word_at(x_ptr, at + 2560, num_words),
            word_at(x_ptr, at + 3072, num_words), word_at(x_ptr, at + 3584, num_words), word_at(x_ptr, at + 4096, num_words),
            word_at(x_ptr, at + 4608, num_words), word_at(x_ptr, at + 5120, num_words), word_at(x_ptr, at + 5632, num_words),
            word_at(x_ptr, at + 6144, num_words), word_at(x_ptr, at + 6656, num_words), word_at(x_ptr, at + 7168, num_words),
            word_at(x_ptr, at + 7680, num_words),
        )  # fmt: skip


@triton.jit
def word_at(x_ptr, at, num_words):
    """A word, 0 behind the last."""
    return tl.load(x_ptr + at, at < num_words, 0)


@triton.jit
def count_kernel(x_ptr, table, num_words, num_tiles, BLOCK: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Count the values of ``x [num_words]``, two to a word; ``table [65536]`` was zero.

    On the GPU a thread of 512 has 16 words of a tile, and asks for those of the next before it counts these. The number of zeros
    is of no use: a tile's padding may count as zeros.
    """
    step = tl.num_programs(0)
    if NATIVE:
        thread = tl.arange(0, 512)
        window = start_window(x_ptr, 0, 1, num_words // 4 * 8, thread, 512) + tl.zeros([512], tl.int32)
        to = tl.zeros([512], tl.int64) + table.to(tl.int64)
        at = tl.program_id(0) * BLOCK + thread
        w = words_at(x_ptr, at, num_words, EVEN)
        for tile in range(tl.program_id(0), num_tiles, step):
            v = w
            at += step * BLOCK
            if tile + step < num_tiles:
                w = words_at(x_ptr, at, num_words, EVEN)
            look_and_count(v, window, to)
        stop_window(window, to, 512)
    else:
        lane = tl.arange(0, BLOCK)
        for tile in range(tl.program_id(0), num_tiles, step):
            at = tile * BLOCK + lane
            word = tl.load(x_ptr + at, at < num_words, 0)
            one = tl.full([BLOCK], 1, tl.int32)
            tl.atomic_add(table + (word & 0x7FFF) * 2 + ((word >> 15) & 1), one)
            tl.atomic_add(table + ((word >> 16) & 0x7FFF) * 2 + ((word >> 31) & 1), one)


@triton.jit
def scale_now(amax, eps, margin, e5m2, rounding):
    """``device.scale_of`` for a format and a rounding known at run time only."""
    top = tl.where(e5m2, MAX_E5M2, MAX_E4M3)
    zero = amax == 0.0
    a = tl.where(zero, 1.0, tl.maximum(amax, eps))
    scale = tl.div_rn(a * 0.0 + top, a)
    lifted = ((amax < eps) | (scale == INF)) & (amax > 0.0)
    scale = tl.minimum(scale, FLOAT32_MAX)
    exponent = tl.minimum(tl.where(e5m2, 15, 8) + 127 - (bits_of(a) >> 23), 127)
    floor = float_of((exponent + 127) << 23)
    scale = tl.where(rounding == 1, float_of(bits_of(scale) & 0x7F800000), tl.where(rounding == 2, floor, scale))
    least = float_of(bits_of(scale) * 0 + 0x400000)  # 2^-127
    scale = tl.maximum(tl.minimum(scale * margin, FLOAT32_MAX), least)
    scale = tl.where(zero, 1.0, scale)
    return scale, tl.div_rn(scale * 0.0 + 1.0, scale), lifted


@triton.jit
def counts_at(table, magnitude):
    """Return the counts of a magnitude with both signs, as FP64."""
    positive = tl.load(table + magnitude * 2).to(tl.float64)
    negative = tl.load(table + magnitude * 2 + 1).to(tl.float64)
    return positive, negative


@triton.jit
def effects(magnitude, positive, negative, scale, inv, e5m2):
    """Effect of a cast on magnitudes, FP64 of their shape; ``positive`` and ``negative`` are the counts of each.

    Counts made nonfinite, of underflow, of subnormal codes, saturated; sums x, x^2, y^2, xy, err, err^2; the largest abs err.
    """
    both = positive + negative
    top = tl.where(e5m2, LIMIT_E5M2, LIMIT_E4M3)  # what rounds to the largest code, or above
    x = float_of(magnitude << 16)
    finite = magnitude < NONFINITE
    v = tl.where(finite, tl.minimum(x * scale, FLOAT32_MAX), x)
    code = tl.where(e5m2, encode(v, True), encode(v, False))
    d = tl.where(e5m2, decode(code, True), decode(code, False))
    y = d * inv
    y_ok = is_finite(y)
    made = tl.where(finite & (y_ok == 0), both, 0.0)
    under = tl.where((magnitude > 0) & (code == 0), both, 0.0)
    subnormal = tl.where(finite & (code > 0) & (code < tl.where(e5m2, 4, 8)), both, 0.0)
    clipped = finite & (tl.div_rn(x, inv + x * 0.0) > top) & (code == tl.where(e5m2, 0x7B, 0x7E))
    saturated = tl.where(clipped, both, 0.0)
    valid = finite & y_ok
    x64 = tl.where(valid, x, 0.0).to(tl.float64)
    y64 = tl.where(valid, y, 0.0).to(tl.float64)
    e64 = y64 - x64
    signs = positive - negative
    worst = tl.where(both > 0.0, tl.abs(e64), 0.0)
    return (made, under, subnormal, saturated, signs * x64, both * (x64 * x64), both * (y64 * y64), both * (x64 * y64),
            signs * e64, both * (e64 * e64), worst)  # fmt: skip


@triton.jit
def store_counts(at, numel, zeros, nans, infs, made, under, subnormal, saturated, empty, lifted):
    """Store the counts of a cast with one scale at ``words`` of its row."""
    n = tl.arange(0, 16)
    c = tl.where(n == 0, numel, tl.where(n == 1, zeros, tl.where(n == 2, nans, tl.where(n == 3, infs, 0))))
    c = tl.where(n == 4, made, tl.where(n == 5, under, tl.where(n == 6, subnormal, tl.where(n == 7, saturated, c))))
    c = tl.where((n == 8) | (n == 11), 1, tl.where(n == 9, empty.to(tl.int64), tl.where(n == 10, lifted.to(tl.int64), c)))
    c = tl.where(n == 12, 1 - empty.to(tl.int64), c)
    tl.store(at + n, c, n < 13)


@triton.jit
def store_reals(at, amax, amin, inv, worst, sum_x2, sum_err2, e5m2):
    """Store the maxima and minima of such a cast, and the logarithm of its scale_inv; ``amin`` is Inf where there is none."""
    empty = amax == 0.0
    log2 = tl.where(empty, 0.0, tl.math.log2(inv.to(tl.float64)))
    sums = at.to(tl.pointer_type(tl.float64)) + NUM_COUNTS
    tl.store(sums + 6, log2)
    tl.store(sums + 7, log2 * log2)
    at = at.to(tl.pointer_type(tl.float32)) + MAXIMA_AT
    tl.store(at, amax)
    tl.store(at + 1, worst.to(tl.float32))
    tl.store(at + 2, tl.where(empty, -INF, inv))
    top = tl.where(e5m2, MAX_E5M2, MAX_E4M3)
    head = tl.minimum(tl.div_rn(tl.div_rn(amax, inv), top + amax * 0.0), FLOAT32_MAX)
    tl.store(at + 3, tl.where(empty, -INF, head))
    nmse = sum_err2 / tl.where(sum_x2 == 0.0, 1.0, sum_x2)
    tl.store(at + 4, tl.where(sum_x2 == 0.0, float("-inf"), nmse).to(tl.float32))
    span = amax.to(tl.float64) / tl.where(empty, 1.0, amin).to(tl.float64)
    tl.store(at + 5, tl.where(empty, float("-inf"), tl.math.log2(tl.where(empty, 1.0, span))).to(tl.float32))
    tl.store(at + 6, amin)
    tl.store(at + 7, tl.where(empty, INF, inv))


@triton.jit
def finish_kernel(
    tables, histories, ints, reals, words, CHUNK: tl.constexpr, LENGTH: tl.constexpr
):  # fmt: skip
    """One program per tensor and cast, which fills a row of ``words [programs, ROW_WORDS]`` as ``tiling.OPERAND`` says.

    ``ints``: table, elements, e5m2, rounding, scaling, history, its length. ``reals``: eps, margin, static scale_inv.
    ``histories [n, 2 + LENGTH]``: scale_inv, amaxes so far less whole rounds of the ring after the first, amaxes by position.
    """
    item = tl.program_id(0)
    table = tables + tl.load(ints + item * INTS) * TABLE
    numel = tl.load(ints + item * INTS + 1)
    e5m2 = tl.load(ints + item * INTS + 2) != 0
    rounding = tl.load(ints + item * INTS + 3)
    scaling = tl.load(ints + item * INTS + 4)
    eps = tl.load(reals + item * REALS)
    margin = tl.load(reals + item * REALS + 1)
    n = tl.arange(0, CHUNK)
    wide = tl.zeros([CHUNK], tl.float64)
    nonzero, nans, infs = wide, wide, wide
    largest = tl.zeros([CHUNK], tl.int32)
    smallest = tl.full([CHUNK], NONFINITE, tl.int32)
    for start in range(0, MAGNITUDES, CHUNK):
        magnitude = start + n
        positive, negative = counts_at(table, magnitude)
        both = tl.where(magnitude > 0, positive + negative, 0.0)
        nonzero += both
        infs += tl.where(magnitude == NONFINITE, both, 0.0)
        nans += tl.where(magnitude > NONFINITE, both, 0.0)
        there = (both > 0.0) & (magnitude < NONFINITE)
        largest = tl.maximum(largest, tl.where(there, magnitude, 0))
        smallest = tl.minimum(smallest, tl.where(there, magnitude, NONFINITE))
    last, first = tl.max(largest, axis=0), tl.min(smallest, axis=0)
    amax = float_of(last << 16)
    amin = float_of(first << 16)  # Inf where there is none

    scale, inv, lifted = scale_now(amax, eps, margin, e5m2, rounding)
    if scaling == SCALING_MAX or scaling == SCALING_RECENT:
        history = histories + tl.load(ints + item * INTS + 5) * (2 + LENGTH)
        length = tl.load(ints + item * INTS + 6)
        calls = tl.load(history + 1).to(tl.int32)
        slot = tl.arange(0, LENGTH)
        ring = tl.load(history + 2 + slot, slot < length, 0.0)
        latest = tl.max(tl.where(slot == (calls + length - 1) % length, ring, 0.0), axis=0)
        known = tl.where(calls == 0, amax, tl.where(scaling == SCALING_MAX, tl.max(ring, axis=0), latest))
        _, inverse, _ = scale_now(known, eps, margin, e5m2, rounding)
        inv = tl.where((known > 0.0) & (known < INF), inverse, tl.load(history))
        tl.debug_barrier()  # every thread has read
        tl.store(history, inv)
        following = tl.where(calls + 1 >= 2 * length, length, calls + 1)
        tl.store(history + 1, following.to(tl.float32))
        tl.store(history + 2 + calls % length, amax)
    elif scaling == SCALING_STATIC:
        inv = tl.load(reals + item * REALS + 2)
    if scaling != SCALING_CURRENT:
        scale = tl.minimum(tl.div_rn(inv * 0.0 + 1.0, inv), FLOAT32_MAX)
        lifted = lifted & False

    made, under, subnormal, saturated = wide, wide, wide, wide
    sx, sx2, sy2, sxy, se, se2, emax = wide, wide, wide, wide, wide, wide, wide
    for start in range(first // CHUNK * CHUNK, last + 1, CHUNK):  # the others hold nothing, or zeros and what is not finite
        magnitude = start + n
        positive, negative = counts_at(table, magnitude)
        here = effects(magnitude, positive, negative, scale, inv, e5m2)
        made += here[0]
        under += here[1]
        subnormal += here[2]
        saturated += here[3]
        sx += here[4]
        sx2 += here[5]
        sy2 += here[6]
        sxy += here[7]
        se += here[8]
        se2 += here[9]
        emax = tl.maximum(emax, here[10])
    sum_x2, sum_err2 = tl.sum(sx2, axis=0), tl.sum(se2, axis=0)
    at = words + item * WORDS
    i64: tl.constexpr = tl.int64
    store_counts(
        at, numel, numel - tl.sum(nonzero, axis=0).to(i64), tl.sum(nans, axis=0).to(i64), tl.sum(infs, axis=0).to(i64),
        tl.sum(made, axis=0).to(i64), tl.sum(under, axis=0).to(i64), tl.sum(subnormal, axis=0).to(i64),
        tl.sum(saturated, axis=0).to(i64), amax == 0.0, lifted,
    )  # fmt: skip
    sums = at.to(tl.pointer_type(tl.float64)) + NUM_COUNTS
    tl.store(sums, tl.sum(sx, axis=0))
    tl.store(sums + 1, sum_x2)
    tl.store(sums + 2, tl.sum(sy2, axis=0))
    tl.store(sums + 3, tl.sum(sxy, axis=0))
    tl.store(sums + 4, tl.sum(se, axis=0))
    tl.store(sums + 5, sum_err2)
    store_reals(at, amax, amin, inv, tl.max(emax, axis=0), sum_x2, sum_err2, e5m2)


@triton.jit
def exponents_kernel(tables, log2_hist):
    """The exponent histogram of every table, ``[tables, 64]``: nonzero finite values by exponent. The table is zeros then."""
    table = tables + tl.program_id(0).to(tl.int64) * TABLE
    out = log2_hist + tl.program_id(0) * BINS
    pattern = tl.arange(0, 256)  # of one binade, with signs
    bin = tl.arange(0, BINS)
    inner = (bin > 0) & (bin < BINS - 1)
    at = tl.expand_dims((bin + FIRST) * 256, 1) + tl.expand_dims(pattern, 0)
    found = tl.load(table + at, tl.expand_dims(inner, 1), 0)
    counted = tl.sum(found.to(tl.int64), axis=1)
    low = tl.zeros([256], tl.int64)
    for field in range(0, FIRST + 1):
        low += tl.load(table + field * 256 + pattern, (pattern > 1) | (field > 0), 0).to(tl.int64)
    high = tl.zeros([256], tl.int64)
    for field in range(FIRST + BINS - 1, 255):
        high += tl.load(table + field * 256 + pattern).to(tl.int64)
    counted = tl.where(bin == 0, tl.sum(low, axis=0), tl.where(bin == BINS - 1, tl.sum(high, axis=0), counted))
    tl.store(out + bin, counted)
    tl.debug_barrier()  # every warp has read what others clear
    for first in range(0, TABLE, CLEARED):
        tl.store(table + first + tl.arange(0, CLEARED), tl.zeros([CLEARED], tl.int32))
