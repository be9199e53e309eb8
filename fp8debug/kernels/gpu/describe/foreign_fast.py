# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The fast pass over an operand beside given codes: whole tiles, no masks, FP32 sums of up to 64 numbers that join in FP64.

It says so where its numbers might not be those of the exact pass: where something is not finite, far from 1 or saturated, where
most of the energy is lost, or where errors are so small that their squares may be no normal numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.describe.foreign_common import added, load_pair, per_block, store_part
from fp8debug.kernels.gpu.device import INF, LEAST_NORMAL_E4M3, LEAST_NORMAL_E5M2, MAX_E4M3, MAX_E5M2, bits_of, float_of
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_COLUMN, KIND_ROW, KIND_TENSOR

#: Between these a block's amax and scale_inv leave squares, errors and quotients far from the ends of FP32's range; blocks below
#: SMALL are to have an error that is no rounding of FP32 alone.
LEAST = tl.constexpr(2.0**-50)
MOST = tl.constexpr(2.0**60)
SMALL = tl.constexpr(2.0**-30)
SMALL_NOISE = tl.constexpr(2.0**-16)
FAR = tl.constexpr(2.0**100)
#: A quotient above max times this may count as saturated; the limit is max * (1 + 2^-20).
ALMOST = tl.constexpr(1.0 + 2.0**-21)
#: Three counts of a step in one integer: zeros, codes below the smallest normal that are none, and such of zero.
SMALL_CODE = tl.constexpr(1 << 10)
UNDERFLOW = tl.constexpr(1 << 20)


@triton.jit
def halves(v):
    """``[R, B, W]`` -> two ``[R, B, W / 2]``: each pair of neighbouring columns apart."""
    return tl.split(tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2] // 2, 2)))


@triton.jit
def eighths(v):
    """``[R, B, W]`` -> eight ``[R, B, W / 8]`` of neighbouring columns, which one thread has."""
    a, b = halves(v)
    a0, a1 = halves(a)
    b0, b1 = halves(b)
    v0, v4 = halves(a0)
    v2, v6 = halves(a1)
    v1, v5 = halves(b0)
    v3, v7 = halves(b1)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def plus(total, v):
    """Add what eight neighbours come to."""
    v0, v1, v2, v3, v4, v5, v6, v7 = eighths(v)
    return total + (((v0 + v1) + (v2 + v3)) + ((v4 + v5) + (v6 + v7)))


@triton.jit
def plus_squares(total, v):
    """Add the squares of eight neighbours."""
    v0, v1, v2, v3, v4, v5, v6, v7 = eighths(v)
    total = tl.fma(v3, v3, tl.fma(v2, v2, tl.fma(v1, v1, tl.fma(v0, v0, total))))
    return tl.fma(v7, v7, tl.fma(v6, v6, tl.fma(v5, v5, tl.fma(v4, v4, total))))


@triton.jit
def largest(most, v):
    """The largest of eight neighbours."""
    v0, v1, v2, v3, v4, v5, v6, v7 = eighths(v)
    low, high = tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3)), tl.maximum(tl.maximum(v4, v5), tl.maximum(v6, v7))
    return tl.maximum(most, tl.maximum(low, high))


@triton.jit
def smallest(least, v):
    """The smallest of eight neighbours."""
    v0, v1, v2, v3, v4, v5, v6, v7 = eighths(v)
    low, high = tl.minimum(tl.minimum(v0, v1), tl.minimum(v2, v3)), tl.minimum(tl.minimum(v4, v5), tl.minimum(v6, v7))
    return tl.minimum(least, tl.minimum(low, high))


@triton.jit
def fast_units(  # noqa: C901  # branches on compile-time constants
    x, codes, scale, parts, num_units, across, height, steps, x_row, x_column, code_row, code_column, scale_row, scale_column,
    numel, num_blocks, lift_below, KIND: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr, BW: tl.constexpr,
    NATIVE: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Store this program's part; return whether it is to be made again. See ``foreign_kernel.foreign_cast_kernel``.

    PIECES are tiles below each other, but of KIND_ROW parts of a tile's block, side by side.
    """
    f64: tl.constexpr = tl.float64
    top: tl.constexpr = MAX_E5M2 if E5M2 else MAX_E4M3
    least_normal: tl.constexpr = LEAST_NORMAL_E5M2 if E5M2 else LEAST_NORMAL_E4M3
    W: tl.constexpr = BW // PIECES if KIND == KIND_ROW else BW
    r = tl.arange(0, BR)[:, None, None]
    b = tl.arange(0, NB)[None, :, None]
    w = tl.arange(0, W)[None, None, :]
    none = tl.zeros([BR, NB, W // 8], tl.int32)
    real, wide = none.to(tl.float32), none.to(f64)
    one = tl.zeros([BR if KIND == KIND_ROW else 1, NB if KIND == KIND_ROW else 1, 1], tl.int32)
    zeros, small, underflow = none, none, none
    sx, sx2, sy2, se, se2 = wide, wide, wide, wide, wide
    amax, amin, emax = real, real + INF, real
    zero_blocks, lifted, strange = one, one, one
    logs, squares, worst, widest = one.to(f64), one.to(f64), one.to(tl.float32) - INF, one.to(tl.float32)
    head, inv_max, inv_min = one.to(tl.float32) - INF, one.to(tl.float32) - INF, one.to(tl.float32) + INF
    for unit in range(tl.program_id(0), num_units, tl.num_programs(0)):
        unit_row = unit // across
        unit_column = unit % across
        first_row = unit_row * height
        first_block = unit_column * NB
        if KIND == KIND_ROW:
            scale_at, block = first_row + r, first_block + b
        elif KIND == KIND_COLUMN:
            scale_at, block = unit_row, first_block * BW + w
        elif KIND == KIND_TENSOR:
            scale_at, block = unit_row * 0, one
        else:
            scale_at, block = unit_row, unit_column + one
        inv = tl.load(scale + scale_at.to(tl.int64) * scale_row + block.to(tl.int64) * scale_column)
        inv_of_all = tl.broadcast_to(inv, (BR, NB, W))
        if KIND == KIND_COLUMN:
            most = tl.zeros([BR, NB, W], tl.float32)
        else:
            most = real
        least = most + INF
        signal, noise = most, most
        for step in range(steps if KIND == KIND_ROW else steps // PIECES):
            x1, y2, e1, x2, e2 = real, real, real, real, real
            seen = none
            for piece in tl.static_range(PIECES):
                row, column = first_row + r, (first_block + b) * BW + w
                if KIND == KIND_ROW:
                    column += step * (NB * BW) + piece * W
                else:
                    row += (step * PIECES + piece) * BR
                row, column = row.to(tl.int64), column.to(tl.int64)
                v, d = load_pair(x + row * x_row + column * x_column, codes + row * code_row + column * code_column, E5M2, NATIVE)
                y = d * inv_of_all
                e = y - v
                a = tl.abs(v)
                size = tl.abs(d)
                is_zero = a == 0.0
                below = tl.where(size < least_normal, tl.where(size == 0.0, UNDERFLOW + SMALL_CODE, SMALL_CODE), 0)
                seen = plus(seen, tl.where(is_zero, 1, below))
                emax = largest(emax, tl.abs(e))
                positive = tl.where(is_zero, INF, a)
                x1 = plus(x1, v)
                y2 = plus_squares(y2, y)
                e1 = plus(e1, e)
                if KIND == KIND_COLUMN:
                    most = tl.maximum(most, a)
                    least = tl.minimum(least, positive)
                    signal = tl.fma(v, v, signal)
                    noise = tl.fma(e, e, noise)
                else:
                    most = largest(most, a)
                    least = smallest(least, positive)
                    x2 = plus_squares(x2, v)
                    e2 = plus_squares(e2, e)
            zeros += seen & (SMALL_CODE - 1)
            small += (seen // SMALL_CODE) & (SMALL_CODE - 1)
            underflow += seen // UNDERFLOW
            sx += x1.to(f64)
            sy2 += y2.to(f64)
            se += e1.to(f64)
            if KIND != KIND_COLUMN:
                sx2 += x2.to(f64)
                se2 += e2.to(f64)
                signal += x2
                noise += e2
        if KIND == KIND_COLUMN:
            sx2 = plus(sx2, signal.to(f64))
            se2 = plus(se2, noise.to(f64))
            amax = largest(amax, most)
            amin = smallest(amin, least)
        else:
            amax = tl.maximum(amax, most)
            amin = tl.minimum(amin, least)
        high = per_block(most, KIND, 1)
        something = high > 0.0
        quotient = tl.div_rn(high, inv)
        bad = (inv > FAR) | ((inv >= 1.0 / FAR) == 0) | (high < LEAST) | (quotient > top * ALMOST)
        inv_max = tl.maximum(inv_max, added(tl.where(something, inv, -INF), KIND, 1))
        inv_min = tl.minimum(inv_min, added(tl.where(something, inv, INF), KIND, 2))
        head = tl.maximum(head, added(tl.where(something, quotient, -INF), KIND, 1))
        block_signal, block_noise = per_block(signal, KIND, 0), per_block(noise, KIND, 0)
        bad = bad | ((high < SMALL) & (block_noise < block_signal * SMALL_NOISE))
        if KIND != KIND_TENSOR:
            zero_blocks += added((something == 0).to(tl.int32), KIND, 0)
            lifted += added((something & (high < lift_below)).to(tl.int32), KIND, 0)
            bits = bits_of(inv)
            mantissa = tl.log2(float_of((bits & 0x7FFFFF) | 0x3F800000))
            log2 = tl.where(something, ((bits >> 23) - 127).to(f64) + mantissa.to(f64), 0.0)
            logs += added(log2, KIND, 0)
            squares += added(log2 * log2, KIND, 0)
            nmse = block_noise / tl.where(something, block_signal, 1.0)
            worst = tl.maximum(worst, added(tl.where(something, nmse, -INF), KIND, 1))
            low = tl.where(something, per_block(least, KIND, 2), 1.0)
            widest = tl.maximum(widest, added(tl.div_rn(high, low), KIND, 1))
        strange |= added((something & bad).to(tl.int32), KIND, 1)
    signal, power, noise, high = tl.sum(sx2), tl.sum(sy2), tl.sum(se2), tl.max(amax)
    none_of_all = tl.zeros([], f64)
    store_part(
        parts, numel, num_blocks, tl.sum(zeros).to(f64), none_of_all, none_of_all, none_of_all, tl.sum(underflow).to(f64),
        tl.sum(small - underflow).to(f64), none_of_all, tl.sum(zero_blocks).to(f64), tl.sum(lifted).to(f64), tl.sum(sx), signal,
        power, (signal + power - noise) * 0.5, tl.sum(se), noise, tl.sum(logs), tl.sum(squares),
        none_of_all, high, tl.max(emax), tl.max(inv_max), tl.max(head), tl.max(worst), tl.max(widest), tl.min(amin),
        tl.min(inv_min), E5M2,
    )  # fmt: skip
    far = (high > MOST) | ((power < MOST * MOST) == 0) | ((signal == signal) == 0)
    return far | (noise > 0.25 * signal) | (tl.max(strange) > 0)
