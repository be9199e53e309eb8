# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Scales of blocks from their amaxes, as ``reference.block_scales`` makes them: in one level or two, rounded to a scale's format.

A cast's way is a constexpr tuple (source, rounding, whether the scale has a mantissa, levels, line, four over six, current).
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.formats import FORMATS
from fp8debug.kernels.gpu.device import INF, MAX_E4M3, bits_of, float_of
from fp8debug.kernels.gpu.low_bit.elements import (
    MANTISSA,
    MAX,
    bounded,
    per_block,
    per_element,
    power_of_2,
    round_to_format,
    within_float32,
)

# Facts of a cast's scales by their place in the tuple.
SOURCE = tl.constexpr(0)
ROUNDING = tl.constexpr(1)
STORED = tl.constexpr(2)
LINE = tl.constexpr(3)
FOUR_OVER_SIX = tl.constexpr(4)
IS_CURRENT = tl.constexpr(5)
EMAX = tl.constexpr(6)

# SOURCE of the scale.
FROM_BLOCK = tl.constexpr(0)  # the amax of the block
FROM_AMAX = tl.constexpr(1)  # the amax of the tensor, which is one block
FROM_SCALE_INV = tl.constexpr(2)  # one scale_inv in memory

# ROUNDING of a scale in one level: none, up, or a power of two from the amax's exponent, one more where its mantissa's bits
# reach the number.
ROUND_NONE = tl.constexpr(-2)
ROUND_UP = tl.constexpr(-1)

# STORED: what a scale is stored in.
STORED_FP32 = tl.constexpr(0)
STORED_POWER = tl.constexpr(1)
STORED_E4M3 = tl.constexpr(2)

# LINE: the second level is none, of the tensor, of a row or of a column.
LINE_NONE = tl.constexpr(-2)
LINE_TENSOR = tl.constexpr(-1)
LINE_ROW = tl.constexpr(1)
LINE_COLUMN = tl.constexpr(0)

# Facts of E4M3 that rounding to it reads.
E4M3 = tl.constexpr((FORMATS["e4m3fn"].mantissa_bits, FORMATS["e4m3fn"].bias))
# Largest scale of a block, 1.5 times which E4M3 has, under "Four Over Six" (``reference.block_scales``).
FOUR_OVER_SIX_MAX = tl.constexpr(256.0)


@triton.jit
def scale_of(amax, eps, margin, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """Return (scale, scale_inv) in one level, as ``reference.scale_of`` does; ``margin`` is the factor 2^-margin."""
    zero = amax == 0.0
    a = tl.where(zero, 1.0, tl.maximum(amax, eps))
    if SCALE[ROUNDING] >= 0:
        bits = bits_of(a)  # a subnormal amax has the exponent field 0, which the bound takes in
        exponent = (bits >> 23) - 126 + ((bits & MANTISSA) >= SCALE[ROUNDING]).to(tl.int32)
        scale = power_of_2(tl.minimum(SCALE[EMAX] + 1 - exponent, 127))
    else:
        scale = within_float32(tl.div_rn(a * 0.0 + FORMAT[MAX], a))
        if SCALE[ROUNDING] == ROUND_UP:
            scale = float_of(bits_of(scale) & 0x7F800000)
    least = float_of(bits_of(scale) * 0 + 0x400000)  # 2^-127; Triton takes the number itself for FP64
    scale = tl.maximum(within_float32(scale * margin), least)
    scale = tl.where(zero, 1.0, scale)
    return scale, tl.div_rn(scale * 0.0 + 1.0, scale)


@triton.jit
def stored_scale(decode, encode, zero):
    """Return (scale, scale_inv) of blocks whose decode factor is rounded to E4M3."""
    rounded = round_to_format(bounded(decode, MAX_E4M3), decode, E4M3, False)
    inverse = rounded * tl.div_rn(encode * 0.0 + 1.0, encode)
    inverse = tl.where(zero, 1.0, inverse)
    return within_float32(tl.div_rn(inverse * 0.0 + 1.0, inverse)), inverse


@triton.jit
def absolute_error(magnitude, finite, scale, inverse, BR: tl.constexpr, BC: tl.constexpr, FORMAT: tl.constexpr):
    """Return the sum of absolute errors of each block under these scales, rounded to nearest, FP64."""
    scaled = bounded(magnitude * per_element(scale, BR, BC), FORMAT[MAX])
    y = round_to_format(scaled, scaled, FORMAT, False).to(tl.float64) * per_element(inverse, BR, BC).to(tl.float64)
    return per_block(tl.where(finite, tl.abs(y - magnitude.to(tl.float64)), 0.0), BR, BC, 0)


@triton.jit
def two_level_scales(
    magnitude, finite, amax, top, eps, BR: tl.constexpr, BC: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr
):
    """Return (scale, scale_inv) in E4M3 and, where there is a second level, FP32.

    ``top``: the amaxes of the second level, which broadcast to the blocks.
    """
    zero = amax == 0.0
    a = tl.maximum(amax, eps)
    largest: tl.constexpr = (FOUR_OVER_SIX_MAX if SCALE[FOUR_OVER_SIX] else MAX_E4M3) * FORMAT[MAX]
    if SCALE[LINE] == LINE_NONE:
        encode = amax * 0.0 + 1.0
    else:
        none = top == 0.0
        encode = within_float32(tl.div_rn(top * 0.0 + largest, tl.where(none, 1.0, top)))
        encode = tl.where(none, 1.0, encode) + amax * 0.0
    if SCALE[FOUR_OVER_SIX]:
        base = tl.div_rn(a, a * 0.0 + FORMAT[MAX]) * encode
        scale, inverse = stored_scale(base, encode, zero)
        scale4, inverse4 = stored_scale(base * 1.5, encode, zero)
        error = absolute_error(magnitude, finite, scale, inverse, BR, BC, FORMAT)
        take4 = absolute_error(magnitude, finite, scale4, inverse4, BR, BC, FORMAT) < error
        return tl.where(take4, scale4, scale), tl.where(take4, inverse4, inverse)
    else:
        part = tl.div_rn(encode * 0.0 + 1.0, encode * 0.0 + FORMAT[MAX])
        return stored_scale(a * (encode * part), encode, zero)


@triton.jit
def is_lifted(amax, inverse, eps, FORMAT: tl.constexpr, SCALE: tl.constexpr):
    """Say of which nonzero blocks the scale came from eps, from FP32's largest, or underflows; and of which it underflows."""
    nonzero = amax > 0.0
    if SCALE[STORED] == STORED_E4M3:
        lost = nonzero & (inverse == 0.0)
    else:
        lost = amax < 0.0
    if SCALE[IS_CURRENT]:
        filled = tl.where(nonzero, amax, 1.0)
        lifted = nonzero & ((amax < eps) | (tl.div_rn(filled * 0.0 + FORMAT[MAX], filled) == INF) | lost)
    else:
        lifted = amax < 0.0
    return lifted, lost
