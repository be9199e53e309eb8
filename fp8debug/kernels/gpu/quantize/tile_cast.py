# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""One cast of one tile held in registers: scales, FP8 codes, and what the tile adds to every slot of the cast.

A tile is ``[L, R, J, H, 2]`` quads: row ``r * J + j``, quad ``(h * L + l) * 2 + e`` of the tile. Triton gives the threads
of a program L and R, in this order, and lays the rest out inside a thread, so sums over J, H and the pair cost no exchange
between threads. Accumulators are ``[L, R]``, one number per thread, and are reduced once, when the program ends.

FAST and SAFE: the fast pass assumes finite values in a range whose squares FP32 can hold, and sums a thread's share of a
tile in FP32, tiles in FP64. What it sees tells whether that held; if not, the program does its tiles again in the safe
pass, which masks and sums in FP64 throughout. Both give the reference's counts and extremes exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import (
    FLOAT32_MAX,
    INF,
    LIMIT_E4M3,
    LIMIT_E5M2,
    SIGN_OFF,
    bits_of,
    float_of,
    join4,
    pack,
    scale_of,
    split4,
    unpack,
)

# KIND: which part of a tile shares a scale; the last three have one that no tile can know alone.
KIND_NONE = tl.constexpr(-1)
KIND_ROW = tl.constexpr(0)  # 1 x tile columns
KIND_COLUMN = tl.constexpr(1)  # tile rows x 1
KIND_TILE = tl.constexpr(2)
KIND_TENSOR = tl.constexpr(3)
KIND_ROWS = tl.constexpr(4)  # one per row of the tensor
KIND_COLUMNS = tl.constexpr(5)

# SOURCE of the scale.
FROM_TILE = tl.constexpr(0)  # the amax of the block in this tile
FROM_AMAX = tl.constexpr(1)  # an amax in memory
FROM_SCALE_INV = tl.constexpr(2)  # one scale_inv in memory, for the whole tensor

# Sums of squares in FP32 are exact enough while magnitudes stay between these; see the module's docstring.
SAFE_BELOW = tl.constexpr(5.551115123125783e-17)  # 2^-54
SAFE_ABOVE = tl.constexpr(1.152921504606847e18)  # 2^60


@triton.jit
def within(v, OP: tl.constexpr):
    """Reduce ``[L, R, J, H, 2]`` inside each thread to ``[L, R, J]``."""
    if OP == 0:
        return tl.sum(tl.sum(v, axis=4), axis=3)
    elif OP == 1:
        return tl.max(tl.max(v, axis=4), axis=3)
    else:
        return tl.min(tl.min(v, axis=4), axis=3)


@triton.jit
def over(v, axis: tl.constexpr, OP: tl.constexpr):
    """Reduce one dimension and keep it."""
    if OP == 0:
        return tl.sum(v, axis=axis, keep_dims=True)
    elif OP == 1:
        return tl.max(v, axis=axis, keep_dims=True)
    else:
        return tl.min(v, axis=axis, keep_dims=True)


@triton.jit
def per_block(v0, v1, v2, v3, KIND: tl.constexpr, OP: tl.constexpr):
    """Reduce four quads over each block; the result broadcasts against a quad (KIND_COLUMN: against a joined one)."""
    if KIND == KIND_COLUMN:
        return over(over(join4(v0, v1, v2, v3), 2, OP), 1, OP)
    else:
        v = over(over(over(join_by(v0, v1, v2, v3, OP), 4, OP), 3, OP), 0, OP)
        if KIND == KIND_TILE:
            v = over(over(v, 2, OP), 1, OP)
        return v


@triton.jit
def join_by(v0, v1, v2, v3, OP: tl.constexpr):
    """Reduce a quad to one tensor."""
    if OP == 0:
        return (v0 + v1) + (v2 + v3)
    elif OP == 1:
        return tl.maximum(tl.maximum(v0, v1), tl.maximum(v2, v3))
    else:
        return tl.minimum(tl.minimum(v0, v1), tl.minimum(v2, v3))


@triton.jit
def spread4(v, KIND: tl.constexpr):
    """Give each quad its block's value."""
    if KIND == KIND_COLUMN or KIND == KIND_COLUMNS:
        return split4(v)
    else:
        return v, v, v, v


@triton.jit
def magnitudes(x0, x1, x2, x3, SAFE: tl.constexpr):
    """Return bits of abs x, and of amin's sort key: 2 * bits - 1 unsigned, in which zero is the largest."""
    a0, a1 = bits_of(x0) & SIGN_OFF, bits_of(x1) & SIGN_OFF
    a2, a3 = bits_of(x2) & SIGN_OFF, bits_of(x3) & SIGN_OFF
    if SAFE:
        a0, a1 = tl.where(a0 < 0x7F800000, a0, 0), tl.where(a1 < 0x7F800000, a1, 0)
        a2, a3 = tl.where(a2 < 0x7F800000, a2, 0), tl.where(a3 < 0x7F800000, a3, 0)
    return a0, a1, a2, a3


@triton.jit
def amin_key(a):
    """Return the sort key 2 * bits - 1, unsigned: zero comes last."""
    return ((a << 1) - 1).to(tl.uint32, bitcast=True)


@triton.jit
def saturation_limit(scale_inv, E5M2: tl.constexpr, SEARCH: tl.constexpr):
    """Return the largest FP32 t with fl(t / scale_inv) <= max * (1 + 2^-20); saturated is what exceeds it."""
    limit: tl.constexpr = LIMIT_E5M2 if E5M2 else LIMIT_E4M3
    t = scale_inv * limit
    if SEARCH:  # a scale_inv that is no power of two: the product may be a few ulps off
        start = bits_of(t) - 3
        t = float_of(start)
        for k in tl.static_range(1, 6):
            candidate = float_of(start + k)
            t = tl.where(tl.div_rn(candidate, scale_inv) <= limit, candidate, t)
    return t


@triton.jit
def is_finite(v):
    """Say which FP32 values are finite."""
    return (bits_of(v) & SIGN_OFF) < 0x7F800000


@triton.jit
def observed(x, d, v, SAFE: tl.constexpr):
    """Return (x, y, y - x, nonfinite y): what sums run over, FP32 in the fast pass, masked FP64 in the safe one."""
    y = d * v
    if SAFE:
        valid = is_finite(x) & is_finite(y)
        made = (is_finite(x) & (is_finite(y) == 0)).to(tl.int32)
        x64 = tl.where(valid, x, 0.0).to(tl.float64)
        y64 = tl.where(valid, y, 0.0).to(tl.float64)
        return x64, y64, y64 - x64, made
    else:
        return x, y, y - x, bits_of(x) * 0


@triton.jit
def dot4(a0, a1, a2, a3, b0, b1, b2, b3):
    """Return a quad's share of a sum of products."""
    return tl.fma(a0, b0, tl.fma(a1, b1, tl.fma(a2, b2, a3 * b3)))


@triton.jit
def log2_parts(scale_inv):
    """Return log2 of FP32 as its exponent, exact, and its mantissa's logarithm."""
    tiny = scale_inv < 1.1754943508222875e-38
    bits = bits_of(tl.where(tiny, scale_inv * 16777216.0, scale_inv))
    exponent = (bits >> 23) - tl.where(tiny, 151, 127)
    return exponent, tl.log2(float_of((bits & 0x7FFFFF) | 0x3F800000))


@triton.jit
def empty_cast(R: tl.constexpr, L: tl.constexpr):
    """Accumulators of one cast before the first tile, one number per thread each."""
    lane = tl.zeros([L, R], tl.int32)
    wide = tl.zeros([L, R], tl.float64)
    real = tl.zeros([L, R], tl.float32)
    return (
        wide, wide, wide, wide, wide, wide,  # x, x^2, y^2, xy, err, err^2
        real, lane, lane, lane, lane,  # max err, nonzero codes, normal codes, saturated, made
        lane, lane, wide, wide,  # zero blocks, eps blocks, log2 of scale_inv and its square
        real - INF, real - INF, wide, real + INF,  # scaled magnitude, nmse, amax / amin, smallest amax > 0
    )  # fmt: skip


@triton.jit
def folded(v, KIND: tl.constexpr, OP: tl.constexpr):
    """Fold what a cast keeps per block to ``[L, R]`` or what broadcasts to it.

    A block that several threads hold counts in each of them: sums are divided by that number at the end.
    """
    if KIND == KIND_COLUMN:
        v = over(over(v, 6, OP), 5, OP)
        v = tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2], v.shape[3], v.shape[4]))
    v = within(v, OP)
    if OP == 0:
        return tl.sum(v, axis=2)
    elif OP == 1:
        return tl.max(v, axis=2)
    else:
        return tl.min(v, axis=2)


@triton.jit
def scales(amax, memory, eps, margin, SOURCE: tl.constexpr, SPEC: tl.constexpr):
    """Return (scale, scale_inv, lifted) shaped to broadcast; ``memory`` holds what SOURCE says."""
    e5m2: tl.constexpr = SPEC[2]
    rounding: tl.constexpr = SPEC[3]
    if SOURCE != FROM_SCALE_INV:
        return scale_of(amax, eps, margin, e5m2, rounding)
    else:
        inv = tl.load(memory) + amax * 0.0
        return tl.minimum(tl.div_rn(inv * 0.0 + 1.0, inv), FLOAT32_MAX), inv, inv < 0.0


@triton.jit
def codes(x0, x1, x2, x3, s0, s1, s2, s3, E5M2: tl.constexpr, NATIVE: tl.constexpr, SAFE: tl.constexpr):
    """Return the FP8 codes of a quad as one word."""
    if NATIVE and not SAFE:
        return pack(x0 * s0, x1 * s1, x2 * s2, x3 * s3, E5M2, NATIVE)
    else:
        return pack(scaled(x0, s0), scaled(x1, s1), scaled(x2, s2), scaled(x3, s3), E5M2, False)


@triton.jit
def scaled(x, s):
    """x * s, Inf only where x is: a finite x that overflows saturates."""
    v = x * s
    return tl.where(is_finite(x), tl.maximum(tl.minimum(v, FLOAT32_MAX), -FLOAT32_MAX), v)


@triton.jit
def saturated4(x0, x1, x2, x3, word, v0, v1, v2, v3, t0, t1, t2, t3, E5M2: tl.constexpr, SAFE: tl.constexpr):
    """Count finite elements whose scaled magnitude exceeds max * (1 + 2^-20) and whose code is max."""
    if not SAFE:
        count = (tl.abs(x0) > t0).to(tl.int32) + (tl.abs(x1) > t1).to(tl.int32)
        return count + (tl.abs(x2) > t2).to(tl.int32) + (tl.abs(x3) > t3).to(tl.int32)
    else:
        limit: tl.constexpr = LIMIT_E5M2 if E5M2 else LIMIT_E4M3
        top: tl.constexpr = 0x7B if E5M2 else 0x7E
        c0 = is_finite(x0) & (tl.div_rn(tl.abs(x0), v0 + x0 * 0.0) > limit) & ((word & 0x7F) == top)
        c1 = is_finite(x1) & (tl.div_rn(tl.abs(x1), v1 + x1 * 0.0) > limit) & (((word >> 8) & 0x7F) == top)
        c2 = is_finite(x2) & (tl.div_rn(tl.abs(x2), v2 + x2 * 0.0) > limit) & (((word >> 16) & 0x7F) == top)
        c3 = is_finite(x3) & (tl.div_rn(tl.abs(x3), v3 + x3 * 0.0) > limit) & (((word >> 24) & 0x7F) == top)
        return c0.to(tl.int32) + c1.to(tl.int32) + c2.to(tl.int32) + c3.to(tl.int32)


@triton.jit
def add_tile(
    acc, x0, x1, x2, x3, word, v0, v1, v2, v3, amax, amin, scale_inv, lifted, SPEC: tl.constexpr,
    NATIVE: tl.constexpr, SAFE: tl.constexpr,
):  # fmt: skip
    """Add one tile's share to the accumulators of a cast."""
    kind: tl.constexpr = SPEC[0]
    e5m2: tl.constexpr = SPEC[2]
    (sx, sx2, sy2, sxy, se, se2, emax, num_codes, num_normal, num_sat, num_made, zero_blocks, eps_blocks,
     logs, squares, head, nmse, wide, small) = acc  # fmt: skip
    d0, d1, d2, d3 = unpack(word, e5m2, NATIVE and not SAFE)
    a0, y0, e0, m0 = observed(x0, d0, v0, SAFE)
    a1, y1, e1, m1 = observed(x1, d1, v1, SAFE)
    a2, y2, e2, m2 = observed(x2, d2, v2, SAFE)
    a3, y3, e3, m3 = observed(x3, d3, v3, SAFE)
    sx += tl.sum(within((a0 + a1) + (a2 + a3), 0), axis=2).to(tl.float64)
    signal = within(dot4(a0, a1, a2, a3, a0, a1, a2, a3), 0)
    noise = within(dot4(e0, e1, e2, e3, e0, e1, e2, e3), 0)
    sx2 += tl.sum(signal, axis=2).to(tl.float64)
    se2 += tl.sum(noise, axis=2).to(tl.float64)
    sy2 += tl.sum(within(dot4(y0, y1, y2, y3, y0, y1, y2, y3), 0), axis=2).to(tl.float64)
    if SAFE or SPEC[1] == FROM_SCALE_INV:  # elsewhere y is close to x, and xy = (x^2 + y^2 - err^2) / 2 loses nothing
        sxy += tl.sum(within(dot4(a0, a1, a2, a3, y0, y1, y2, y3), 0), axis=2).to(tl.float64)
    se += tl.sum(within((e0 + e1) + (e2 + e3), 0), axis=2).to(tl.float64)
    largest = tl.maximum(tl.maximum(tl.abs(e0), tl.abs(e1)), tl.maximum(tl.abs(e2), tl.abs(e3)))
    emax = tl.maximum(emax, tl.max(within(largest, 1), axis=2).to(tl.float32))
    if SAFE:
        num_made += tl.sum(within(m0 + m1 + m2 + m3, 0), axis=2)
    # Counts on four codes at once: bit 7 of (code + 0x7f) says nonzero, of (code + 0x78 or 0x7c) says normal.
    m = word & 0x7F7F7F7F
    nonzero = ((m + 0x7F7F7F7F) >> 7) & 0x01010101
    normal = ((m + (0x7C7C7C7C if e5m2 else 0x78787878)) >> 3) & 0x10101010
    nibbles = within(nonzero | normal, 0)  # at most 8 words: a nibble counts to 15
    num_codes += tl.sum(((nibbles & 0x0F0F0F0F) * 0x01010101) >> 24, axis=2)
    num_normal += tl.sum((((nibbles >> 4) & 0x0F0F0F0F) * 0x01010101) >> 24, axis=2)
    if SPEC[6]:
        t0, t1, t2, t3 = spread4(saturation_limit(scale_inv, e5m2, SPEC[1] == FROM_SCALE_INV), kind)
        over_limit = saturated4(x0, x1, x2, x3, word, v0, v1, v2, v3, t0, t1, t2, t3, e5m2, SAFE)
        num_sat += tl.sum(within(over_limit, 0), axis=2)
    if kind < KIND_TENSOR:
        if kind == KIND_ROW:
            block_signal = tl.sum(signal, axis=0, keep_dims=True)[:, :, :, None, None]
            block_noise = tl.sum(noise, axis=0, keep_dims=True)[:, :, :, None, None]
        else:
            block_signal = per_block(a0 * a0, a1 * a1, a2 * a2, a3 * a3, kind, 0)
            block_noise = per_block(e0 * e0, e1 * e1, e2 * e2, e3 * e3, kind, 0)
        something = amax > 0.0
        zero_blocks += folded((amax == 0.0).to(tl.int32), kind, 0)
        eps_blocks += folded(lifted.to(tl.int32), kind, 0)
        # A zero block adds nothing: its scale_inv is 1 (else it is masked), its other values are 0.
        exponent, mantissa = log2_parts(scale_inv)
        log2 = exponent.to(tl.float64) + mantissa.to(tl.float64)
        if SPEC[1] == FROM_SCALE_INV:
            log2 = tl.where(something, log2, 0.0)
        logs += folded(log2, kind, 0)
        squares += folded(log2 * log2, kind, 0)
        head = tl.maximum(head, folded(tl.div_rn(amax, scale_inv), kind, 1))
        span = tl.div_rn(amax, tl.where(something, amin, 1.0)).to(tl.float64)
        if SAFE:
            span = amax.to(tl.float64) / tl.where(something, amin, 1.0).to(tl.float64)
            ratio = (block_noise / tl.where(block_signal == 0.0, 1.0, block_signal)).to(tl.float32)
            ratio = tl.where(block_signal == 0.0, -INF, ratio)
        else:
            ratio = block_noise / tl.maximum(block_signal, 1.0e-37)
        nmse = tl.maximum(nmse, folded(ratio, kind, 1))
        wide = tl.maximum(wide, folded(span, kind, 1))
        small = tl.minimum(small, folded(tl.where(something, amax, INF), kind, 2))
    return (sx, sx2, sy2, sxy, se, se2, emax, num_codes, num_normal, num_sat, num_made, zero_blocks, eps_blocks,
     logs, squares, head, nmse, wide, small)  # fmt: skip


@triton.jit
def stack8(v0, v1, v2, v3, v4, v5, v6, v7):
    """Eight ``[L, R]`` -> ``[L * R, 8]``."""
    even = tl.join(tl.join(v0, v4), tl.join(v2, v6))
    odd = tl.join(tl.join(v1, v5), tl.join(v3, v7))
    return tl.reshape(tl.join(even, odd), (v0.shape[0] * v0.shape[1], 8))


@triton.jit
def summary(amax, amin, zeros, nans, infs, acc, KIND: tl.constexpr):
    """Reduce a program's accumulators: FP64 sums ``[8]`` twice, then maxima ``[8]`` (minima negated), whose third is a sum."""
    (sx, sx2, sy2, sxy, se, se2, emax, num_codes, num_normal, num_sat, num_made, zero_blocks, eps_blocks,
     logs, squares, head, nmse, wide, small) = acc  # fmt: skip
    f64: tl.constexpr = tl.float64
    threads: tl.constexpr = amax.shape[0] * amax.shape[1]
    copies: tl.constexpr = amax.shape[0] if KIND == KIND_ROW else amax.shape[1] if KIND == KIND_COLUMN else threads
    part: tl.constexpr = 1.0 / copies  # a power of two
    counts = stack8(zeros.to(f64), nans.to(f64), infs.to(f64), num_made.to(f64), num_codes.to(f64), num_normal.to(f64),
                    num_sat.to(f64), zero_blocks.to(f64) * part)  # fmt: skip
    sums = stack8(eps_blocks.to(f64) * part, sx, sx2, sy2, sxy, se, se2, logs * part)
    bits = ((amin + 1) >> 1).to(tl.int32, bitcast=True)
    least = tl.where(bits == 0, INF, float_of(bits)).to(f64)
    top = tl.where(amax >= 0x7F800000, INF, float_of(amax)).to(f64)  # a maximum would lose a NaN
    most = stack8(top, emax.to(f64), top, head.to(f64), nmse.to(f64), wide, -small.to(f64), -least)
    most = tl.where(tl.arange(0, 8) == 2, tl.sum(squares) * part, tl.max(most, axis=0))
    return tl.sum(counts, axis=0), tl.sum(sums, axis=0), most


@triton.jit
def one_of(values, index: tl.constexpr):
    """Return ``values[index]`` as a scalar; NaN becomes Inf."""
    values = tl.where(values == values, values, float("inf"))
    return tl.max(tl.where(tl.arange(0, values.shape[0]) == index, values, float("-inf")), axis=0)
