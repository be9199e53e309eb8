# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The exact GEMM of sampled rows: FP8 codes multiplied as 16-bit numbers, which hold them exactly, scales in FP32.

E4M3 and E5M2 codes are FP16 numbers. Products of two are exact in FP32, where the tensor core adds them; after every 128 (or
32) of the contracted dimension both scales are applied and the sum goes to FP32 registers. So what is lost is FP32's rounding
alone, and the ~14 bits that an FP8 product keeps of a sum (or all of K, without promotion) stay visible against it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.triton_common import decode, float_of

# FORM: what an operand's data are.
FORM_E4M3 = tl.constexpr(0)
FORM_E5M2 = tl.constexpr(1)
FORM_BF16 = tl.constexpr(2)

# SCALED: how the decode factors of an operand ``[rows, K]`` lie.
SCALED_NOT = tl.constexpr(0)
SCALED_ROWS = tl.constexpr(1)  # one per row, over all of K
SCALED_TILES = tl.constexpr(2)  # one per row and step of K
SCALED_BLOCKS = tl.constexpr(3)  # one per 128 rows and step of K


@triton.jit
def values_of(data, FORM: tl.constexpr, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """Turn stored bits (int8 or int16) into what is multiplied: FP16 where ``HALF``, else BF16; FP32 in the interpreter."""
    if NATIVE:
        if FORM == FORM_E4M3:
            values = data.to(tl.float8e4nv, bitcast=True)
        elif FORM == FORM_E5M2:
            values = data.to(tl.float8e5, bitcast=True)
        else:
            values = data.to(tl.bfloat16, bitcast=True)
        return values.to(tl.float16 if HALF else tl.bfloat16)
    else:
        if FORM == FORM_BF16:
            return float_of(data.to(tl.int32) << 16)
        else:
            return decode(data.to(tl.int32) & 0xFF, FORM == FORM_E5M2)


@triton.jit
def gather_kernel(
    data, index, out, scale, scale_out, length, steps, num_rows, stride_row, stride_k, scale_stride_row, scale_stride_k,
    block_rows, FORM: tl.constexpr, SCALED: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows ``index[s]`` of data ``[rows, length]`` to 16 bits, ``out [num_rows, length]``; scales to ``[steps, num_rows]``."""
    s = tl.program_id(0)
    row = tl.load(index + s)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < length
    bits = tl.load(data + row * stride_row + column.to(tl.int64) * stride_k, inside, 0)
    tl.store(out + s.to(tl.int64) * length + column, values_of(bits, FORM, HALF, NATIVE), inside)
    if SCALED != SCALED_NOT and tl.program_id(1) == 0:
        for start in range(0, steps, BLOCK):
            step = start + tl.arange(0, BLOCK)
            inverse = tl.load(scale + (row // block_rows) * scale_stride_row + step * scale_stride_k, step < steps, 0.0)
            tl.store(scale_out + step * num_rows + s, inverse, step < steps)


@triton.jit
def columns_kernel(x, index, out, rows, samples, stride_row, stride_column, BR: tl.constexpr, BC: tl.constexpr):
    """Columns ``index`` of x ``[rows, columns]``, bits of any 16 or 32, to out ``[rows, samples]``."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    sample = tl.program_id(1) * BC + tl.arange(0, BC)[None, :]
    inside = (row < rows) & (sample < samples)
    column = tl.load(index + sample, sample < samples, 0)
    bits = tl.load(x + row.to(tl.int64) * stride_row + column * stride_column, inside, 0)
    tl.store(out + row.to(tl.int64) * samples + sample, bits, inside)


@triton.jit
def lines_kernel(
    data, index, out, scale, length, stride_line, stride_along, scale_stride_line, scale_stride_along, out_stride_line,
    out_stride_along, block_line, block_along, E5M2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows or columns ``index[s]`` of FP8 data, dequantized."""
    s = tl.program_id(0)
    line = tl.load(index + s)
    along = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = along < length
    code = tl.load(data + line * stride_line + along.to(tl.int64) * stride_along, inside, 0).to(tl.int32) & 0xFF
    inv = tl.load(scale + (line // block_line) * scale_stride_line + (along // block_along) * scale_stride_along, inside, 0.0)
    tl.store(out + s.to(tl.int64) * out_stride_line + along * out_stride_along, decode(code, E5M2) * inv, inside)


@triton.jit
def product_kernel(
    whole, few, out, whole_scale, few_scale, num_whole, num_few, length, stride_row, stride_k, scale_stride_row,
    scale_stride_k, out_stride_whole, out_stride_few, FORM: tl.constexpr, WHOLE: tl.constexpr,
    FEW: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, BW: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """out[w, f] = sum over k of whole[w, k] * few[f, k], where ``few [num_few, length]`` was gathered."""
    tiles = tl.cdiv(num_few, BF)
    w = (tl.program_id(0) // tiles) * BW + tl.arange(0, BW)
    f = (tl.program_id(0) % tiles) * BF + tl.arange(0, BF)
    row = tl.where(w < num_whole, w, 0)  # what lies beyond is worked out and not stored
    other = tl.where(f < num_few, f, 0)
    k = tl.arange(0, BK)
    at_whole = whole + row.to(tl.int64)[:, None] * stride_row + k[None, :] * stride_k
    at_few = few + other.to(tl.int64)[:, None] * length + k[None, :]
    total = tl.zeros([BW, BF], tl.float32)
    for step in range(tl.cdiv(length, BK)):
        if EVEN:
            bits = tl.load(at_whole)
            right = tl.load(at_few)
        else:
            inside = (step * BK + k)[None, :] < length
            bits = tl.load(at_whole, inside, 0)
            right = tl.load(at_few, inside, 0.0)
        left = values_of(bits, FORM, HALF, NATIVE)
        if NATIVE:
            part = tl.dot(left, right.T)
        else:
            part = tl.dot(left, right.T, input_precision="ieee")
        at_whole += BK * stride_k
        at_few += BK
        if FEW == SCALED_TILES or FEW == SCALED_BLOCKS:
            factor = tl.load(few_scale + step * num_few + other)
            if WHOLE == SCALED_BLOCKS and BW <= 128:
                block = ((tl.program_id(0) // tiles) * BW) // 128
                factor = factor * tl.load(whole_scale + block * scale_stride_row + step * scale_stride_k)
            part = part * factor[None, :]
        if WHOLE == SCALED_TILES or (WHOLE == SCALED_BLOCKS and (FEW == SCALED_NOT or FEW == SCALED_ROWS)):
            line = row // 128 if WHOLE == SCALED_BLOCKS else row
            part = part * tl.load(whole_scale + line * scale_stride_row + step * scale_stride_k)[:, None]
        total += part
    if FEW == SCALED_ROWS:
        total = total * tl.load(few_scale + other)[None, :]
    if WHOLE == SCALED_ROWS:
        total = total * tl.load(whole_scale + row * scale_stride_row)[:, None]
    at = out + w.to(tl.int64)[:, None] * out_stride_whole + f.to(tl.int64)[None, :] * out_stride_few
    tl.store(at, total, (w < num_whole)[:, None] & (f < num_few)[None, :])
