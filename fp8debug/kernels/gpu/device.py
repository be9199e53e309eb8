# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Functions that all Triton kernels share: loads four columns wide, exact FP8 rounding, scales from amaxes.

A *quad* is four neighbouring columns of one row, held as four FP32 tensors x0..x3; its FP8 codes are one 32-bit word.
Conversion is one helper with two paths: the hardware's (cvt, where ``NATIVE``), and integer arithmetic for the
interpreter, whose own cast is wrong, and for cards without FP8 conversion. No multiplication is contracted: the kernels
are launched with ``enable_fp_fusion=False`` and write ``tl.fma`` where one is meant.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

from fp8debug.formats import FORMATS

#: True when kernels run on the CPU by Triton's interpreter; fixed when a kernel is decorated.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# How a quad is loaded.
LOAD_BF16 = tl.constexpr(0)
LOAD_FP16 = tl.constexpr(1)
LOAD_FP32 = tl.constexpr(2)
LOAD_SCATTERED = tl.constexpr(3)  # any dtype, stride and width: four masked loads
LOAD_TRANSPOSED = tl.constexpr(4)  # the same of the transposed tensor: a quad is four rows of one column

ROUND_NONE = tl.constexpr(0)
ROUND_POW2_CEIL = tl.constexpr(1)
ROUND_POW2_FLOOR = tl.constexpr(2)

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
INF = tl.constexpr(float("inf"))
SIGN_OFF = tl.constexpr(0x7FFFFFFF)

_E4M3, _E5M2 = FORMATS["e4m3fn"], FORMATS["e5m2"]
#: Largest values, and the smallest ones with full precision.
MAX_E4M3, MAX_E5M2 = tl.constexpr(_E4M3.max), tl.constexpr(_E5M2.max)
LEAST_NORMAL_E4M3, LEAST_NORMAL_E5M2 = tl.constexpr(_E4M3.min_normal), tl.constexpr(_E5M2.min_normal)
#: max * (1 + 2^-20), numbers of FP32: a quotient above it that has the largest code is saturated.
LIMIT_E4M3, LIMIT_E5M2 = (tl.constexpr(fmt.max * (1 + 2.0**-20)) for fmt in (_E4M3, _E5M2))
#: Halfway from there to the next number of FP32, which has 24 bits.
HALFWAY_E4M3, HALFWAY_E5M2 = (tl.constexpr(fmt.max * (1 + 2.0**-20) + 2.0 ** (fmt.emax - 24)) for fmt in (_E4M3, _E5M2))

_PACK_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
)
_PACK_E5M2 = tl.constexpr(
    "{ .reg .b16 l, h; cvt.rn.satfinite.e5m2x2.f32 l, $2, $1; cvt.rn.satfinite.e5m2x2.f32 h, $4, $3; mov.b32 $0, {l, h}; }"
)
_UNPACK_E4M3 = tl.constexpr(
    "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)
_UNPACK_E5M2 = tl.constexpr(
    "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; mov.b32 {l, h}, $4;"
    " cvt.rn.f16x2.e5m2x2 p, l; cvt.rn.f16x2.e5m2x2 q, h; mov.b32 {a, b}, p; mov.b32 {c, d}, q;"
    " cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }"
)


def _extremes(words: int) -> str:
    """PTX for the extremes of BF16 words: doubling a word drops its signs, then maxima, minima and zeros go two at a time."""
    lines = ["{ .reg .b32 t, u, m, n, z, a, b, one, ones; mov.u32 one, 0x00010001; mov.u32 ones, 0xFFFFFFFF;"]
    lines.append(" mov.u32 m, 0; mov.u32 n, ones; mov.u32 z, 0;")
    for i in range(words):
        lines.append(f" add.u16x2 t, ${3 + i}, ${3 + i}; max.u16x2 m, m, t; add.u16x2 u, t, ones; min.u16x2 n, n, u;")
        lines.append(" min.u16x2 t, t, one; add.u32 z, z, t;")
    lines.append(" and.b32 a, m, 0xFFFF; shr.u32 b, m, 16; max.u32 a, a, b; shl.b32 $0, a, 15;")  # bits of amax
    lines.append(" and.b32 a, n, 0xFFFF; shr.u32 b, n, 16; min.u32 a, a, b; add.u32 a, a, 1; shl.b32 a, a, 16;")
    lines.append(" sub.u32 $1, a, 1;")  # amin's key
    lines.append(f" and.b32 a, z, 0xFFFF; shr.u32 b, z, 16; add.u32 a, a, b; sub.u32 $2, {2 * words}, a; }}")  # zeros
    return "".join(lines)


_EXTREMES = tl.constexpr(_extremes(16))


@triton.jit
def split8(v, L: tl.constexpr, R: tl.constexpr, J: tl.constexpr):
    """``[L, R, J, 4, 2]`` -> eight ``[L, R, J]``."""
    a, b = tl.split(v)
    a0, a1 = tl.split(tl.reshape(a, (L, R, J, 2, 2)))
    b0, b1 = tl.split(tl.reshape(b, (L, R, J, 2, 2)))
    a00, a01 = tl.split(a0)
    a10, a11 = tl.split(a1)
    b00, b01 = tl.split(b0)
    b10, b11 = tl.split(b1)
    return a00, a01, a10, a11, b00, b01, b10, b11


@triton.jit
def packed_extremes(low, high, L: tl.constexpr, R: tl.constexpr, J: tl.constexpr):
    """Return (bits of amax, amin's key, number of zeros) of each thread's 32 BF16 values, ``[L, R, J]``."""
    w0, w1, w2, w3, w4, w5, w6, w7 = split8(low, L, R, J)
    v0, v1, v2, v3, v4, v5, v6, v7 = split8(high, L, R, J)
    return tl.inline_asm_elementwise(
        _EXTREMES,
        "=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r,r",
        [w0, w1, w2, w3, w4, w5, w6, w7, v0, v1, v2, v3, v4, v5, v6, v7],
        dtype=(tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def bits_of(x):
    """FP32 to its bits."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """Bits to FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def hidden(v):
    """The same integers, of which Triton knows nothing; on the GPU only."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def load_quad(ptr, row, quad, stride, rows, columns, LOAD: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Load quads (row, quad) as four FP32 tensors, 0 outside the tensor.

    ``stride`` is the row's: in 8-byte words, in elements for LOAD_SCATTERED. Also returns the raw words of a 16-bit quad.
    """
    if LOAD == LOAD_SCATTERED or LOAD == LOAD_TRANSPOSED:
        inside = row < rows
        if LOAD == LOAD_TRANSPOSED:
            # Hidden, or Triton would give each thread eight columns, and each column's scale to all threads.
            at = ptr + (hidden(row) if NATIVE else row) + (quad * 4).to(tl.int64) * stride
            step = stride
        else:
            at = ptr + row.to(tl.int64) * stride + quad * 4
            step = 1
        x0 = load_one(at, inside & (quad * 4 < columns))
        x1 = load_one(at + step, inside & (quad * 4 + 1 < columns))
        x2 = load_one(at + 2 * step, inside & (quad * 4 + 2 < columns))
        x3 = load_one(at + 3 * step, inside & (quad * 4 + 3 < columns))
        low, high = bits_of(x0), bits_of(x1)  # not used
    else:
        width: tl.constexpr = 2 if LOAD == LOAD_FP32 else 1
        at = ptr.to(tl.pointer_type(tl.int64)) + row.to(tl.int64) * stride + quad * width
        if EVEN:
            a = tl.load(at)
            b = tl.load(at + 1) if LOAD == LOAD_FP32 else a
        else:
            inside = (row < rows) & (quad * 4 < columns)
            a = tl.load(at, inside, 0)
            b = tl.load(at + 1, inside, 0) if LOAD == LOAD_FP32 else a
        low = a.to(tl.int32)
        high = (a >> 32).to(tl.int32)
        if LOAD == LOAD_FP32:
            x0, x1, x2, x3 = float_of(low), float_of(high), float_of(b.to(tl.int32)), float_of((b >> 32).to(tl.int32))
        elif LOAD == LOAD_BF16:
            x0, x1, x2, x3 = float_of(low << 16), float_of(low & -65536), float_of(high << 16), float_of(high & -65536)
        else:
            x0, x1 = half_of(low), half_of(low >> 16)
            x2, x3 = half_of(high), half_of(high >> 16)
    return x0, x1, x2, x3, low, high


@triton.jit
def load_one(at, inside):
    """Load one column of a quad."""
    if at.dtype.element_ty == tl.bfloat16:  # by bits: the interpreter flushes BF16 subnormals
        return float_of(tl.load(at.to(tl.pointer_type(tl.int16)), inside, 0).to(tl.int32) << 16)
    else:
        return tl.load(at, inside, 0.0).to(tl.float32)


@triton.jit
def half_of(bits):
    """The low half of a word, as FP16, to FP32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def encode(scaled, E5M2: tl.constexpr):
    """Round FP32 to FP8 codes in int32, nearest even, clamped; Inf becomes Inf (E5M2) or NaN with its sign (E4M3)."""
    bits = bits_of(scaled)
    sign = (bits >> 24) & 0x80
    magnitude = bits & SIGN_OFF
    shift: tl.constexpr = 21 if E5M2 else 20
    least = magnitude & ((1 << shift) - 1)
    carry = (least + ((magnitude >> shift) & 1) > (1 << (shift - 1))).to(tl.int32)  # magnitude + carry could overflow on NaN
    normal = (magnitude >> shift) + carry - ((112 << 2) if E5M2 else (120 << 3))
    # Adding 2^(23 - 9) or 2^(23 - 16) leaves the multiple of the smallest subnormal in the last bits.
    magic: tl.constexpr = 128.0 if E5M2 else 16384.0
    below = bits_of(float_of(magnitude) + magic) - (0x43000000 if E5M2 else 0x46800000)
    code = tl.where(magnitude < ((113 << 23) if E5M2 else (121 << 23)), below, normal)
    code = sign | tl.minimum(code, 0x7B if E5M2 else 0x7E)
    code = tl.where(magnitude == 0x7F800000, sign | (0x7C if E5M2 else 0x7F), code)
    return tl.where(magnitude > 0x7F800000, 0x7F, code)


@triton.jit
def decode(code, E5M2: tl.constexpr):
    """Turn FP8 codes (int32, 0..255) into FP32."""
    magnitude = code & 0x7F
    # An FP8 exponent in FP32's field is 2^-120 (E4M3) or 2^-112 (E5M2) too small, subnormals included.
    value = float_of(magnitude << (21 if E5M2 else 20)) * (5.192296858534828e33 if E5M2 else 1.329227995784916e36)
    if E5M2:
        value = tl.where(magnitude > 0x7C, float("nan"), tl.where(magnitude == 0x7C, INF, value))
    else:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def pack(x0, x1, x2, x3, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Round four FP32 tensors to one int32 of FP8 codes, x0 lowest. Native: for finite values, the clamp included."""
    if NATIVE:
        asm: tl.constexpr = _PACK_E5M2 if E5M2 else _PACK_E4M3
        return tl.inline_asm_elementwise(asm, "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = encode(x0, E5M2) | (encode(x1, E5M2) << 8)
        return low | (encode(x2, E5M2) << 16) | (encode(x3, E5M2) << 24)


@triton.jit
def unpack(word, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Turn an int32 of four FP8 codes into four FP32 tensors."""
    if NATIVE:
        asm: tl.constexpr = _UNPACK_E5M2 if E5M2 else _UNPACK_E4M3
        return tl.inline_asm_elementwise(
            asm,
            "=f,=f,=f,=f,r",
            [word],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        d0, d1 = decode(word & 0xFF, E5M2), decode((word >> 8) & 0xFF, E5M2)
        return d0, d1, decode((word >> 16) & 0xFF, E5M2), decode((word >> 24) & 0xFF, E5M2)


@triton.jit
def scale_of(amax, eps, margin, E5M2: tl.constexpr, ROUNDING: tl.constexpr):
    """Return (scale, scale_inv, lifted) for blocks of that amax, as ``reference.scale_of`` does.

    ``lifted``: the scale came from eps or from the largest finite FP32. ``margin`` is the factor 2^-margin.
    """
    top: tl.constexpr = MAX_E5M2 if E5M2 else MAX_E4M3
    zero = amax == 0.0
    a = tl.where(zero, 1.0, tl.maximum(amax, eps))
    scale = tl.div_rn(a * 0.0 + top, a)
    lifted = ((amax < eps) | (scale == INF)) & (amax > 0.0)
    scale = tl.minimum(scale, FLOAT32_MAX)
    if ROUNDING == ROUND_POW2_CEIL:
        scale = float_of(bits_of(scale) & 0x7F800000)
    elif ROUNDING == ROUND_POW2_FLOOR:
        # A subnormal amax has exponent field 0, which the clamp takes in; see reference.scale_of.
        exponent = tl.minimum((15 if E5M2 else 8) + 127 - (bits_of(a) >> 23), 127)
        scale = float_of((exponent + 127) << 23)
    least = float_of(bits_of(scale) * 0 + 0x400000)  # 2^-127; Triton takes the number itself for FP64
    scale = tl.maximum(tl.minimum(scale * margin, FLOAT32_MAX), least)
    scale = tl.where(zero, 1.0, scale)
    return scale, tl.div_rn(scale * 0.0 + 1.0, scale), lifted


@triton.jit
def join4(a, b, c, d):
    """Four tensors -> one with two more dimensions of 2; no data moves between threads."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def split4(joined):
    """The inverse of join4."""
    ac, bd = tl.split(joined)
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d
