# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""One cast of a tensor with its statistics in the same pass, and the pass before it where no tile knows enough.

A program takes the tiles p, p + P, p + 2P ... of TR rows by TC columns, whole blocks each. Sums are FP64 throughout, so there is
no second pass for what is not finite or too small. Parts of a program, FP64 ``[32]``, in which counts below 2^53 are exact:

    sums     0 zeros  1 NaN  2 Inf  3 made nonfinite  4 underflow  5 subnormal  6 saturated  7 between two values
             8 zero blocks  9 eps blocks  10 scales  11 x  12 x^2  13 y^2  14 xy  15 err  16 err^2
             17 log2 of scale_inv  18 its square  19 r  20 r^2  21 f (1 - f), as ``metrics.noise`` defines r and f
    maxima  22 amax  23 abs err  24 scale_inv  25 scaled magnitude  26 block nmse  27 block amax / amin
            28 minus amin  29 minus the smallest scale_inv
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, INF, SIGN_OFF, bits_of, float_of, load_one
from fp8debug.kernels.gpu.low_bit.elements import (
    INF_CODE,
    LIMIT,
    MAX,
    MIN_NORMAL,
    NAN_CODE,
    UNSIGNED_ZERO,
    bounded,
    code_of,
    per_block,
    per_element,
    power_of_2,
    random_numbers,
    round_to_format,
    spacing_exponent,
    within_float32,
)
from fp8debug.kernels.gpu.low_bit.scales import (
    FROM_AMAX,
    FROM_SCALE_INV,
    LINE,
    LINE_COLUMN,
    LINE_NONE,
    LINE_ROW,
    SOURCE,
    STORED,
    STORED_E4M3,
    STORED_FP32,
    is_lifted,
    scale_of,
    two_level_scales,
)
from fp8debug.kernels.gpu.quantize import statistics as of_fp8

#: Slots of the results, in order: counts (int64), sums (FP64), maxima and minima (FP32); those of FP8, and of random rounding.
COUNTS = (*of_fp8.COUNTS, "num_noise")
SUMS = (*of_fp8.SUMS, "noise_sum", "noise_sum2", "noise_variance", "noise_repeat", "noise_repeat_variance")
MAXIMA, MINIMA = of_fp8.MAXIMA, of_fp8.MINIMA
NUM_COUNTS, NUM_SUMS = tl.constexpr(len(COUNTS)), tl.constexpr(len(SUMS))
#: Numbers between two parts.
PARTS = tl.constexpr(32)
# Fields of a packed count: a tile has fewer elements than a field holds.
FIELD = tl.constexpr(16)


@triton.jit
def totals_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, amaxes, checksums, TR: tl.constexpr, TC: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """x ``[rows, columns]`` -> each program's largest finite magnitude, and its share of ``reference.uniform``'s checksum."""
    amax = tl.zeros([TR, TC], tl.int32)
    checksum = tl.zeros([TR, TC], tl.int64)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        row = (tile // tile_columns) * TR + tl.arange(0, TR)[:, None]
        column = (tile % tile_columns) * TC + tl.arange(0, TC)[None, :]
        x = load_one(x_ptr + row.to(tl.int64) * stride + column, (row < rows) & (column < columns))
        bits = bits_of(x)
        magnitude = bits & SIGN_OFF
        amax = tl.maximum(amax, tl.where(magnitude < 0x7F800000, magnitude, 0))
        if SUM:
            bits = tl.where(magnitude > 0x7F800000, 0x7FC00000, bits)
            checksum += bits.to(tl.int64) * ((row.to(tl.int64) * columns + column) * 2 + 1)
    tl.store(amaxes + tl.program_id(0), float_of(tl.max(tl.max(amax, axis=1), axis=0)))
    if SUM:
        tl.store(checksums + tl.program_id(0), tl.sum(tl.sum(checksum, axis=1), axis=0))


@triton.jit
def total(v):
    """Sum a tile or its blocks."""
    return tl.sum(tl.sum(v, axis=1), axis=0)


@triton.jit
def largest(v):
    """Return the maximum of a tile or its blocks."""
    return tl.max(tl.max(v, axis=1), axis=0)


@triton.jit
def smallest(v):
    """Return the minimum of a tile or its blocks."""
    return tl.min(tl.min(v, axis=1), axis=0)


@triton.jit
def packed(a, b, c, d):
    """Count four conditions at once: four fields of a word."""
    low = a.to(tl.int64) | (b.to(tl.int64) << FIELD)
    return total(low | (c.to(tl.int64) << (2 * FIELD)) | (d.to(tl.int64) << (3 * FIELD)))


@triton.jit
def field(word, which: tl.constexpr):
    """Return one count of ``packed``."""
    return ((word >> (which * FIELD)) & 0xFFFF).to(tl.int32)


@triton.jit
def low_bit_kernel(  # noqa: C901  # branches on compile-time constants
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data, scale_invs, given, key, partials, eps, margin,
    TR: tl.constexpr, TC: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, WHOLE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE: tl.constexpr, STOCHASTIC: tl.constexpr, QUADS: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """x ``[rows, columns]`` -> data, scale_inv and, with STATS, partials ``[programs, 32]`` (FP64).

    ``given``: FP32, the amaxes of the second level, the tensor's amax or one scale_inv, as SCALE says. ``key``: int64, of the
    random numbers. WHOLE: the tensor is one block.
    """
    n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, n10 = 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
    zero64 = tl.zeros([1], tl.float64)
    s0, s1, s2, s3, s4, s5, log2, square = zero64, zero64, zero64, zero64, zero64, zero64, zero64, zero64
    r1, r2, variance = zero64, zero64, zero64
    none = tl.full([1], float("-inf"), tl.float32)
    top_amax, top_err, top_inv, top_head, top_nmse, low_amin, low_inv = none, none, none, none, none, none, none
    top_range = zero64
    block_columns = (columns + BC - 1) // BC
    block_rows = (rows + BR - 1) // BR
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_row = tile // tile_columns
        tile_column = tile % tile_columns
        row = tile_row * TR + tl.arange(0, TR)[:, None]
        column = tile_column * TC + tl.arange(0, TC)[None, :]
        inside = (row < rows) & (column < columns)
        x = load_one(x_ptr + row.to(tl.int64) * stride + column, inside)
        absolute = float_of(bits_of(x) & SIGN_OFF)
        finite = absolute < INF
        magnitude = tl.where(finite, absolute, 0.0)
        block_row = tile_row * (TR // BR) + tl.arange(0, TR // BR)[:, None]
        block_column = tile_column * (TC // BC) + tl.arange(0, TC // BC)[None, :]
        if WHOLE:
            block_row = block_row * 0
            block_column = block_column * 0
        block_inside = (block_row < block_rows) & (block_column < block_columns)
        if WHOLE and SCALE[SOURCE] == FROM_AMAX:
            amax = tl.load(given) + tl.zeros([TR // BR, TC // BC], tl.float32)
        else:
            amax = per_block(magnitude, BR, BC, 1)
        if SCALE[SOURCE] == FROM_SCALE_INV:
            inverse = tl.load(given) + amax * 0.0
            scale = within_float32(tl.div_rn(inverse * 0.0 + 1.0, inverse))
        elif SCALE[STORED] == STORED_E4M3:
            if WHOLE:
                top = amax
            elif SCALE[LINE] == LINE_NONE:
                top = amax
            elif SCALE[LINE] == LINE_ROW:
                top = tl.load(given + block_row, block_row < block_rows, 0.0)
            elif SCALE[LINE] == LINE_COLUMN:
                top = tl.load(given + block_column, block_column < block_columns, 0.0)
            else:
                top = tl.load(given) + tl.zeros([1, 1], tl.float32)
            scale, inverse = two_level_scales(magnitude, finite, amax, top, eps, BR, BC, FORMAT, SCALE)
        else:
            scale, inverse = scale_of(amax, eps, margin, FORMAT, SCALE)
        v = per_element(inverse, BR, BC)
        noise = absolute
        if STOCHASTIC:
            noise = random_numbers(tl.load(key), row, column, columns, QUADS)
        product = absolute * per_element(scale, BR, BC)
        unknown = product != product
        inexact = tl.where(finite & (unknown == 0), bounded(product, FORMAT[MAX]), 0.0)
        value = round_to_format(inexact, noise, FORMAT, STOCHASTIC)
        code = code_of(value, FORMAT)
        sign = (bits_of(x) >> 24) & 0x80
        if FORMAT[UNSIGNED_ZERO]:
            sign = tl.where(code == 0, 0, sign)
        code = code | sign
        if FORMAT[UNSIGNED_ZERO]:
            code = tl.where(absolute == INF, FORMAT[INF_CODE], code)
        else:
            code = tl.where(absolute == INF, FORMAT[INF_CODE] | sign, code)
        is_nan = (absolute != absolute) | (finite & unknown)
        code = tl.where(is_nan, FORMAT[NAN_CODE], code)
        tl.store(data + row.to(tl.int64) * columns + column, code.to(tl.int8), inside)
        at = block_row.to(tl.int64) * block_columns + block_column
        tl.store(scale_invs + at, inverse, block_inside)
        if STATS:
            # Elements.
            magnitude_y = value * v
            reads = finite & (is_nan == 0) & (magnitude_y < INF)
            made = inside & finite & (reads == 0)
            nonzero = magnitude > 0.0
            word = packed(inside & (absolute == 0.0), absolute != absolute, absolute == INF, made)
            n0 += field(word, 0)
            n1 += field(word, 1)
            n2 += field(word, 2)
            n3 += field(word, 3)
            d = value
            if SCALE[STORED] != STORED_FP32:
                d = tl.where(v == 0.0, 0.0, d)  # a block whose stored scale underflows is 0, whatever its codes
            scaled = tl.div_rn(magnitude, v)
            below = (d < FORMAT[MIN_NORMAL]) & nonzero & (is_nan == 0)
            saturated = (scaled > FORMAT[LIMIT]) & (d == FORMAT[MAX])
            between = inside & (inside == 0)
            if STOCHASTIC:
                known = finite & (is_nan == 0) & (scaled >= 0.0)
                place = tl.where(known, bounded(scaled, FORMAT[MAX]), 0.0)
                units_of = power_of_2(-spacing_exponent(place, FORMAT))
                units = place * units_of
                floor = units.to(tl.int32).to(tl.float32)
                f = units - floor
                between = f > 0.0
                r = tl.where(between, (value * units_of - floor) - f, 0.0).to(tl.float64)
                f64 = f.to(tl.float64)
                r1 += total(r)
                r2 += total(r * r)
                variance += total(f64 * (1.0 - f64))
            word = packed(below & (d == 0.0), below & (d > 0.0), saturated, between)
            n4 += field(word, 0)
            n5 += field(word, 1)
            n6 += field(word, 2)
            n7 += field(word, 3)
            y = tl.where(bits_of(x) < 0, -magnitude_y, magnitude_y)
            x64 = tl.where(reads, x, 0.0).to(tl.float64)
            y64 = tl.where(reads, y, 0.0).to(tl.float64)
            error = y64 - x64
            signal = x64 * x64
            noise64 = error * error
            s0 += total(x64)
            s1 += total(signal)
            s2 += total(y64 * y64)
            s3 += total(x64 * y64)
            s4 += total(error)
            s5 += total(noise64)
            top_amax = tl.maximum(top_amax, largest(magnitude))
            top_err = tl.maximum(top_err, largest(tl.abs(error).to(tl.float32)))
            nearest0 = tl.where(nonzero, magnitude, INF)
            low_amin = tl.maximum(low_amin, -smallest(nearest0))
            # Blocks; a tensor that is one is finished from its sums.
            if WHOLE == 0:
                lifted, lost = is_lifted(amax, inverse, eps, FORMAT, SCALE)
                filled = amax > 0.0
                counts = filled & (lost == 0)
                word = packed(block_inside & (amax == 0.0), lifted, counts, lifted & (lifted == 0))
                n8 += field(word, 0)
                n9 += field(word, 1)
                n10 += field(word, 2)
                logarithm = tl.math.log2(tl.where(counts, inverse, 1.0).to(tl.float64))
                log2 += total(logarithm)
                square += total(logarithm * logarithm)
                top_inv = tl.maximum(top_inv, largest(tl.where(filled, inverse, float("-inf"))))
                low_inv = tl.maximum(low_inv, largest(tl.where(filled, -inverse, float("-inf"))))
                head = tl.div_rn(amax, tl.where(filled, inverse, 1.0))
                top_head = tl.maximum(top_head, largest(tl.where(filled & (lost == 0), head, float("-inf"))))
                block_signal = per_block(signal, BR, BC, 0)
                some = block_signal > 0.0
                nmse = (per_block(noise64, BR, BC, 0) / tl.where(some, block_signal, 1.0)).to(tl.float32)
                top_nmse = tl.maximum(top_nmse, largest(tl.where(some, nmse, float("-inf"))))
                amin = per_block(nearest0, BR, BC, 2)
                span = amax.to(tl.float64) / tl.where(filled, amin, 1.0).to(tl.float64)
                top_range = tl.maximum(top_range, largest(span))
    if STATS:
        to = partials + tl.program_id(0) * PARTS + tl.zeros([1], tl.int32)
        tl.store(to, (zero64 + n0))
        tl.store(to + 1, (zero64 + n1))
        tl.store(to + 2, (zero64 + n2))
        tl.store(to + 3, (zero64 + n3))
        tl.store(to + 4, (zero64 + n4))
        tl.store(to + 5, (zero64 + n5))
        tl.store(to + 6, (zero64 + n6))
        tl.store(to + 7, (zero64 + n7))
        tl.store(to + 8, (zero64 + n8))
        tl.store(to + 9, (zero64 + n9))
        tl.store(to + 10, (zero64 + n10))
        tl.store(to + 11, s0)
        tl.store(to + 12, s1)
        tl.store(to + 13, s2)
        tl.store(to + 14, s3)
        tl.store(to + 15, s4)
        tl.store(to + 16, s5)
        tl.store(to + 17, log2)
        tl.store(to + 18, square)
        tl.store(to + 19, r1)
        tl.store(to + 20, r2)
        tl.store(to + 21, variance)
        tl.store(to + 22, top_amax.to(tl.float64))
        tl.store(to + 23, top_err.to(tl.float64))
        tl.store(to + 24, top_inv.to(tl.float64))
        tl.store(to + 25, top_head.to(tl.float64))
        tl.store(to + 26, top_nmse.to(tl.float64))
        tl.store(to + 27, top_range)
        tl.store(to + 28, low_amin.to(tl.float64))
        tl.store(to + 29, low_inv.to(tl.float64))


@triton.jit
def one_of32(values, index: tl.constexpr):
    """Return ``values[index]`` of 32 as a scalar."""
    return tl.max(tl.where(tl.arange(0, 32) == index, values, float("-inf")), axis=0)


@triton.jit
def finish_low_bit_kernel(
    partials, words, scale_invs, num_programs, numel, num_blocks, eps, WHOLE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Partials ``[programs, 32]`` -> the slots of ``COUNTS``, ``SUMS`` (FP64), ``MAXIMA`` and ``MINIMA`` (FP32)."""
    n = tl.arange(0, 32)
    summed = tl.zeros([CHUNK, 32], tl.float64)
    most = tl.full([CHUNK, 32], float("-inf"), tl.float64)
    for start in range(0, num_programs, CHUNK):
        program = start + tl.arange(0, CHUNK)[:, None]
        inside = (program < num_programs) & (n[None, :] < 30)
        values = tl.load(partials + program * PARTS + n[None, :], inside, 0.0)
        summed += values
        most = tl.maximum(most, tl.where(inside, values, float("-inf")))
    s = tl.sum(summed, axis=0)
    big = tl.max(most, axis=0)
    zero_blocks, eps_blocks, scales = one_of32(s, 8), one_of32(s, 9), one_of32(s, 10)
    log2, square = one_of32(s, 17), one_of32(s, 18)
    amax, head, nmse, span = one_of32(big, 22), one_of32(big, 25), one_of32(big, 26), one_of32(big, 27)
    amin = -one_of32(big, 28)
    inv_max, inv_min = one_of32(big, 24), -one_of32(big, 29)
    if WHOLE:
        amax32 = amax.to(tl.float32) + tl.zeros([1], tl.float32)
        inverse = tl.load(scale_invs) + tl.zeros([1], tl.float32)
        filled = amax32 > 0.0
        lifted, lost = is_lifted(amax32, inverse, eps, FORMAT, SCALE)
        counts = filled & (lost == 0)
        one = tl.full([1], 1.0, tl.float64)
        zero_blocks = tl.sum(tl.where(filled, 0.0, one), axis=0)
        eps_blocks = tl.sum(tl.where(lifted, one, 0.0), axis=0)
        scales = tl.sum(tl.where(counts, one, 0.0), axis=0)
        logarithm = tl.math.log2(tl.where(counts, inverse, 1.0).to(tl.float64))
        log2 = tl.sum(logarithm, axis=0)
        square = tl.sum(logarithm * logarithm, axis=0)
        inv_max = tl.sum(tl.where(filled, inverse, float("-inf")).to(tl.float64), axis=0)
        inv_min = tl.sum(tl.where(filled, inverse, float("inf")).to(tl.float64), axis=0)
        scaled = tl.div_rn(amax32, tl.where(filled, inverse, 1.0))
        head = tl.sum(tl.where(filled & (lost == 0), scaled, float("-inf")).to(tl.float64), axis=0)
        signal = one_of32(s, 12)
        nmse = tl.where(signal > 0.0, one_of32(s, 16) / tl.where(signal > 0.0, signal, 1.0), float("-inf"))
        span = tl.where(amax > 0.0, amax / tl.where(amax > 0.0, amin, 1.0), 0.0)
    c = s * 0.0
    c = tl.where(n == 0, c + numel, c)
    c = tl.where(n == 1, one_of32(s, 0), c)
    c = tl.where(n == 2, one_of32(s, 1), c)
    c = tl.where(n == 3, one_of32(s, 2), c)
    c = tl.where(n == 4, one_of32(s, 3), c)
    c = tl.where(n == 5, one_of32(s, 4), c)
    c = tl.where(n == 6, one_of32(s, 5), c)
    c = tl.where(n == 7, one_of32(s, 6), c)
    c = tl.where(n == 8, c * 0.0 + num_blocks, c)
    c = tl.where(n == 9, zero_blocks, c)
    c = tl.where(n == 10, eps_blocks, c)
    c = tl.where(n == 11, 1.0, c)
    c = tl.where(n == 12, scales, c)
    c = tl.where(n == 13, one_of32(s, 7), c)
    tl.store(words + n, c.to(tl.int64), n < 14)
    sums = (words + NUM_COUNTS).to(tl.pointer_type(tl.float64))
    tl.store(sums + n - 11, s, (n >= 11) & (n < 17))
    tl.store(sums + 6, log2)
    tl.store(sums + 7, square)
    tl.store(sums + n - 11, s, (n >= 19) & (n < 22))
    tl.store(sums + n, s * 0.0, (n >= 11) & (n < 13))  # repeats, which are the observer's
    extremes = (words + NUM_COUNTS + NUM_SUMS).to(tl.pointer_type(tl.float32))
    tl.store(extremes, amax.to(tl.float32))
    tl.store(extremes + 1, one_of32(big, 23).to(tl.float32))
    tl.store(extremes + 2, inv_max.to(tl.float32))
    tl.store(extremes + 3, tl.minimum(tl.div_rn(head.to(tl.float32), FORMAT[MAX]), FLOAT32_MAX))
    tl.store(extremes + 4, nmse.to(tl.float32))
    widest = tl.where(span > 0.0, tl.math.log2(tl.where(span > 0.0, span, 1.0)), float("-inf"))
    tl.store(extremes + 5, widest.to(tl.float32))
    tl.store(extremes + 6, amin.to(tl.float32))
    tl.store(extremes + 7, inv_min.to(tl.float32))
