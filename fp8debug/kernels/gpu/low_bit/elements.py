# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Elements of a tile ``[rows, columns]`` and its blocks ``[block rows, block columns]``: rounding, codes, random numbers.

A format is a constexpr tuple (mantissa bits, bias, max, limit of saturation, min normal, mantissa bits and bias of the codes,
code of NaN, code of Inf, whether the codes have a zero without sign), which ``plan.facts_of`` makes of its table. Everything is
integer and FP32 arithmetic, the same on every GPU and in the interpreter.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, bits_of, float_of

# Facts of a format by their place in the tuple.
MANTISSA_BITS = tl.constexpr(0)
BIAS = tl.constexpr(1)
MAX = tl.constexpr(2)
LIMIT = tl.constexpr(3)
MIN_NORMAL = tl.constexpr(4)
CODE_MANTISSA_BITS = tl.constexpr(5)
CODE_BIAS = tl.constexpr(6)
NAN_CODE = tl.constexpr(7)
INF_CODE = tl.constexpr(8)
UNSIGNED_ZERO = tl.constexpr(9)

MANTISSA = tl.constexpr(0x7FFFFF)
# 2^23: the sum with a number below it is rounded to a whole number, to nearest even.
WHOLE_NUMBERS = tl.constexpr(8388608.0)


@triton.jit
def per_block(v, BR: tl.constexpr, BC: tl.constexpr, OP: tl.constexpr):
    """Reduce a tile to its blocks: the sum (0), the maximum (1) or the minimum (2) of each."""
    split = tl.reshape(v, (v.shape[0] // BR, BR, v.shape[1] // BC, BC))
    if OP == 0:
        return tl.sum(tl.sum(split, axis=3), axis=1)
    elif OP == 1:
        return tl.max(tl.max(split, axis=3), axis=1)
    else:
        return tl.min(tl.min(split, axis=3), axis=1)


@triton.jit
def per_element(v, BR: tl.constexpr, BC: tl.constexpr):
    """Give each element of a tile the number of its block."""
    wide = tl.broadcast_to(v[:, None, :, None], (v.shape[0], BR, v.shape[1], BC))
    return tl.reshape(wide, (v.shape[0] * BR, v.shape[1] * BC))


@triton.jit
def power_of_2(exponent):
    """Return 2^exponent, of whole numbers within FP32's normal range."""
    return float_of((exponent + 127) << 23)


@triton.jit
def spacing_exponent(magnitude, FORMAT: tl.constexpr):
    """Return the exponent of the distance between the values of a format around a magnitude within its max."""
    return tl.maximum((bits_of(magnitude) >> 23) - 127, 1 - FORMAT[BIAS]) - FORMAT[MANTISSA_BITS]


@triton.jit
def round_to_format(magnitude, noise, FORMAT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Round magnitudes within the format's max to its values, to nearest even, or up where they lie further up than the noise."""
    exponent = spacing_exponent(magnitude, FORMAT)
    units = magnitude * power_of_2(-exponent)
    if STOCHASTIC:
        below = units.to(tl.int32).to(tl.float32)
        units = below + (units - below > noise).to(tl.float32)
    else:
        units = (units + WHOLE_NUMBERS) - WHOLE_NUMBERS
    return units * power_of_2(exponent)


@triton.jit
def code_of(value, FORMAT: tl.constexpr):
    """Return the code of a magnitude that is a value of the format, without its sign."""
    mantissa_bits: tl.constexpr = FORMAT[CODE_MANTISSA_BITS]
    bias: tl.constexpr = FORMAT[CODE_BIAS]
    normal = (bits_of(value) >> (23 - mantissa_bits)) - ((127 - bias) << mantissa_bits)
    is_subnormal = value < 2.0 ** (1 - bias)
    subnormal = (tl.where(is_subnormal, value, 0.0) * (2.0 ** (bias - 1 + mantissa_bits))).to(tl.int32)
    return tl.where(is_subnormal, subnormal, normal)


@triton.jit
def bounded(v, most):
    """Return the smaller of both; NaN stays NaN."""
    return tl.where(v > most, most, v)


@triton.jit
def within_float32(v):
    """Return a positive number, FP32's largest in place of Inf; NaN stays NaN."""
    return bounded(v, FLOAT32_MAX)


@triton.jit
def random_numbers(key, row, column, columns, QUADS: tl.constexpr):
    """Return a random number in [0, 1) for each element, from Philox4x32-10 as ``reference.uniform`` draws them.

    ``QUADS``: rows have whole groups of four elements, which share a counter. ``row`` is ``[rows, 1]``, ``column``
    ``[1, columns]`` of the tile.
    """
    if QUADS:
        quad = tl.reshape(column, (column.shape[1] // 4, 4))
        first = tl.min(quad, axis=1)[None, :]
        counter = (row.to(tl.int64) * columns + first) >> 2
        w0, w1, w2, w3 = philox(key, counter)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (row.shape[0], column.shape[1]))
    else:
        place = row.to(tl.int64) * columns + column
        w0, w1, w2, w3 = philox(key, place >> 2)
        which = (place & 3).to(tl.int32)
        words = tl.where(which == 0, w0, tl.where(which == 1, w1, tl.where(which == 2, w2, w3)))
    return ((words >> 8) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def philox(key, counter):
    """Return four random words of each counter, int32."""
    low = counter.to(tl.int32)
    high = (counter >> 32).to(tl.int32)
    w0, w1, w2, w3 = tl.philox(key, low, high, low * 0, low * 0, 10)
    return (
        w0.to(tl.int32, bitcast=True),
        w1.to(tl.int32, bitcast=True),
        w2.to(tl.int32, bitcast=True),
        w3.to(tl.int32, bitcast=True),
    )
