# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Functions of both passes over an operand beside foreign codes: numbers, what is reduced over a block, a program's part."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, MAX_E4M3, MAX_E5M2, decode, float_of
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_COLUMN, KIND_ROW, over

#: Columns of a part.
NUM_COLUMNS = 32
COLUMNS = tl.constexpr(NUM_COLUMNS)


@triton.jit
def per_block(v, KIND: tl.constexpr, OP: tl.constexpr):
    """Reduce what was gathered of a unit over each block, or over all of it where it has one; the dimensions stay."""
    if KIND != KIND_COLUMN:
        v = over(v, 2, OP)
    if KIND != KIND_ROW:
        v = over(over(v, 1, OP), 0, OP)
    return v


@triton.jit
def added(v, KIND: tl.constexpr, OP: tl.constexpr):
    """Reduce what blocks came to: over a unit's columns, of which one thread has many, where each has a block."""
    if KIND == KIND_COLUMN:
        return over(v, 2, OP)
    else:
        return v


@triton.jit
def decoded(code, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """Turn FP8 codes (int8) into FP32."""
    if NATIVE:
        return code.to(tl.float8e5 if E5M2 else tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return decode(code.to(tl.int32) & 0xFF, E5M2)


@triton.jit
def load_pair(x, codes, E5M2: tl.constexpr, NATIVE: tl.constexpr, inside=None):
    """Load numbers and their codes, as FP32; 0 outside.

    Nothing is added to the numbers, but what is made of them takes the codes' place in the threads: where one of them lies
    transposed, x moves, 16 bits wide, before anything else is done. Its load comes first for that.
    """
    x_bits = x.to(tl.pointer_type(tl.int32 if x.dtype.element_ty == tl.float32 else tl.int16))
    if inside is None:
        bits, code = tl.load(x_bits), tl.load(codes)
    else:
        bits, code = tl.load(x_bits, inside, 0), tl.load(codes, inside, 0)
    bits |= ((code.to(tl.uint8, bitcast=True) >> 7) & 2).to(bits.dtype)
    if x.dtype.element_ty == tl.float32:
        v = float_of(bits)
    elif x.dtype.element_ty == tl.bfloat16:  # by bits: the interpreter flushes BF16 subnormals
        v = float_of(bits.to(tl.int32) << 16)
    else:
        v = bits.to(tl.float16, bitcast=True).to(tl.float32)
    return v, decoded(code, E5M2, NATIVE)


@triton.jit
def store_part(
    parts, numel, num_blocks, zeros, nans, infs, made, underflow, subnormal, saturated, zero_blocks, lifted, sx, sx2, sy2, sxy,
    se, se2, logs, squares, strange, amax, emax, inv_max, head, worst, widest, amin, inv_min, E5M2: tl.constexpr,
):  # fmt: skip
    """Store this program's part ``[32]``: sums and counts in FP64; ``head`` is the largest scaled magnitude."""
    f64: tl.constexpr = tl.float64
    top: tl.constexpr = MAX_E5M2 if E5M2 else MAX_E4M3
    at = parts + tl.program_id(0) * COLUMNS
    once = tl.where(tl.program_id(0) == 0, 1.0, 0.0).to(f64)
    tl.store(at, once * numel)
    tl.store(at + 1, zeros)
    tl.store(at + 2, nans)
    tl.store(at + 3, infs)
    tl.store(at + 4, made)
    tl.store(at + 5, underflow)
    tl.store(at + 6, subnormal)
    tl.store(at + 7, saturated)
    tl.store(at + 8, once * num_blocks)
    tl.store(at + 9, zero_blocks)
    tl.store(at + 10, lifted)
    tl.store(at + 11, once)
    tl.store(at + 12, sx)
    tl.store(at + 13, sx2)
    tl.store(at + 14, sy2)
    tl.store(at + 15, sxy)
    tl.store(at + 16, se)
    tl.store(at + 17, se2)
    tl.store(at + 18, logs)
    tl.store(at + 19, squares)
    tl.store(at + 20, amax.to(f64))
    tl.store(at + 21, emax.to(f64))
    tl.store(at + 22, inv_max.to(f64))
    tl.store(at + 23, tl.minimum(tl.div_rn(head, tl.full([], top, tl.float32)), FLOAT32_MAX).to(f64))
    tl.store(at + 24, worst.to(f64))
    tl.store(at + 25, widest.to(f64))
    tl.store(at + 26, -amin.to(f64))
    tl.store(at + 27, -inv_min.to(f64))
    tl.store(at + 28, strange)
