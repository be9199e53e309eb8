# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The shadow and the exact GEMM of a sample of a result, in one launch.

The shadow multiplies the operands before their cast, in BF16. The exact GEMM multiplies FP8 codes as 16-bit numbers, which hold
them exactly. E4M3 and E5M2 codes are FP16 numbers. Products of two are exact in FP32, where the tensor core adds them; after
every 128 (or 32) of the contracted dimension both scales are applied and the sum goes to FP32 registers. So what is lost is
FP32's rounding alone, and the ~14 bits that an FP8 product keeps of a sum (or all of K, without promotion) stay visible
against it.

Both are sampled in two ways: lines of one operand, whose numbers are given, and of the other a share: a group of ``GROUP`` in
every ``BLOCK`` neighbouring lines, another group from block to block and step to step.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import decode, float_of, load_one
from fp8debug.kernels.sampling import SHARE_BLOCK, SHARE_GROUP

# FORM: what an operand's data are.
FORM_E4M3 = tl.constexpr(0)
FORM_E5M2 = tl.constexpr(1)
FORM_BF16 = tl.constexpr(2)

# SCALED: how the decode factors of an operand ``[rows, K]`` lie.
SCALED_NOT = tl.constexpr(0)
SCALED_ROWS = tl.constexpr(1)  # one per row, over all of K
SCALED_TILES = tl.constexpr(2)  # one per row and step of K
SCALED_BLOCKS = tl.constexpr(3)  # one per 128 rows and step of K


BLOCK = tl.constexpr(SHARE_BLOCK)
GROUP = tl.constexpr(SHARE_GROUP)


@triton.jit
def shared_line(position, count, shift, SHARE: tl.constexpr):
    """Return which of ``count`` lines is the one at a position of the share; all after the last whole block are in it."""
    if SHARE:
        blocks = count // BLOCK
        block = position // GROUP
        start = block * BLOCK + (block + shift) % (BLOCK // GROUP) * GROUP
        line = tl.where(block < blocks, start + position % GROUP, position + blocks * (BLOCK - GROUP))
        return tl.max_contiguous(tl.multiple_of(line, GROUP), GROUP)
    else:
        return position


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
def columns_kernel(
    x, index, out, rows, samples, stride_row, stride_column, SIZE: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """Columns ``index`` of x ``[rows, columns]``, bits of any 16 or 32, to out ``[rows, samples]``; ``SIZE``: see ``Sample``."""
    row = tl.program_id(0) * BR + tl.arange(0, BR)[:, None]
    sample = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (row < rows) & (sample < samples)[None, :]
    column = tl.load(index + sample, sample < samples, 0)
    if SIZE > 1:  # so many lie next to each other from a multiple of it on
        column = tl.max_contiguous(tl.multiple_of(column, SIZE), SIZE)
    bits = tl.load(x + row.to(tl.int64) * stride_row + column[None, :] * stride_column, inside, 0)
    tl.store(out + row.to(tl.int64) * samples + sample[None, :], bits, inside)


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
def near_bf16(at, inside, EVEN: tl.constexpr, NATIVE: tl.constexpr):
    """Load numbers and round them to BF16; FP32 that are BF16's numbers in the interpreter."""
    if NATIVE:
        if EVEN:
            return tl.load(at).to(tl.bfloat16)
        else:
            return tl.load(at, inside, 0.0).to(tl.bfloat16)
    else:
        bits = load_one(at, inside).to(tl.int32, bitcast=True)
        bits += ((bits >> 16) & 1) + 0x7FFF  # to nearest, ties to even
        return float_of(bits & -65536)


@triton.jit
def shadow_part(
    near, far, index, out, tile, line, kept, start, end, length, num_shadow, near_stride_row, near_stride_k, far_stride_row,
    far_stride_k, out_stride_few, INDEXED: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr, BW: tl.constexpr,
    BS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[w, f] = sum over k from start to end of far[w, k] * near[f, k]."""
    f = tile * BS + tl.arange(0, BS)
    few = tl.where(f < num_shadow, f, 0)
    if INDEXED:
        few = tl.load(index + few)
    else:  # wide loads need rows at 16 bytes, of which all or none of a group is beyond the last line
        few = tl.max_contiguous(tl.multiple_of(few, 8), 8).to(tl.int64)
    k = tl.arange(0, BK)
    at_far = far + line[:, None] * far_stride_row + (start + k).to(tl.int64)[None, :] * far_stride_k
    at_near = near + few[:, None] * near_stride_row + (start + k).to(tl.int64)[None, :] * near_stride_k
    total = tl.zeros([BW, BS], tl.float32)
    for step in range(start, end, BK):
        inside = (step + k)[None, :] < length
        left = near_bf16(at_far, inside, EVEN, NATIVE)
        right = near_bf16(at_near, inside, EVEN, NATIVE)
        if NATIVE:
            total = tl.dot(left, right.T, total)
        else:
            total = tl.dot(left, right.T, total, input_precision="ieee")
        at_far += BK * far_stride_k
        at_near += BK * near_stride_k
    tl.store(out + f.to(tl.int64)[None, :] * out_stride_few, total, kept[:, None] & (f < num_shadow)[None, :])


@triton.jit
def scales_of(at, step, stride_k, SCALED: tl.constexpr):
    """Load the scales of a step along the contracted dimension; anything where there are none."""
    if SCALED == SCALED_TILES or SCALED == SCALED_BLOCKS:
        return tl.load(at + step * stride_k)
    else:
        return tl.zeros(at.shape, tl.float32)


@triton.jit
def code_lines(
    codes, scale, index, f, num, start, k, stride_row, stride_k, scale_stride_row, INDEXED: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """Return where the codes of sampled lines, and their scales, begin."""
    few = tl.where(f < num, f, 0).to(tl.int64)
    if INDEXED:
        few = tl.load(index + few)
    at = codes + few[:, None] * stride_row + (start + k).to(tl.int64)[None, :] * stride_k
    return at, scale + (few // 128 if SCALED == SCALED_BLOCKS else few) * scale_stride_row


@triton.jit
def multiplied(bits, left, FORM: tl.constexpr, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """Return the product of codes with numbers."""
    right = values_of(bits, FORM, HALF, NATIVE)
    if NATIVE:
        return tl.dot(right, left)
    else:
        return tl.dot(right, left, input_precision="ieee")


@triton.jit
def exact_part(
    codes, other, index, out, codes_scale, other_scale, tile, line, kept, start, end, length, num_exact, codes_stride_row,
    codes_stride_k, other_stride_row, other_stride_k, codes_scale_stride_row, codes_scale_stride_k, other_scale_stride_row,
    other_scale_stride_k, out_stride_few, INDEXED: tl.constexpr, CODES: tl.constexpr, CODES_SCALED: tl.constexpr,
    OTHER: tl.constexpr, OTHER_SCALED: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    BW: tl.constexpr, BE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """out[f, w] = sum over k from start to end of codes[f, k] * other[w, k], for two times ``BE`` sampled lines.

    A product with ``BE`` lines is too low for the tensor cores' newer instruction, whose operands must lie in shared memory:
    codes would be turned to FP16 there, behind a barrier that waits for every load of the program.
    """
    f = tile * (2 * BE) + tl.arange(0, BE)
    k = tl.arange(0, STEP)
    at_other = other + line[:, None] * other_stride_row + (start + k).to(tl.int64)[None, :] * other_stride_k
    at_codes, at_codes_scale = code_lines(
        codes, codes_scale, index, f, num_exact, start, k, codes_stride_row, codes_stride_k, codes_scale_stride_row, INDEXED,
        CODES_SCALED,
    )  # fmt: skip
    at_more, at_more_scale = code_lines(
        codes, codes_scale, index, f + BE, num_exact, start, k, codes_stride_row, codes_stride_k, codes_scale_stride_row, INDEXED,
        CODES_SCALED,
    )  # fmt: skip
    at_other_scale = other_scale + (line // 128 if OTHER_SCALED == SCALED_BLOCKS else line) * other_scale_stride_row
    factor = scales_of(at_codes_scale, start // STEP, codes_scale_stride_k, CODES_SCALED)
    more_factor = scales_of(at_more_scale, start // STEP, codes_scale_stride_k, CODES_SCALED)
    far_factor = scales_of(at_other_scale, start // STEP, other_scale_stride_k, OTHER_SCALED)
    total = tl.zeros([BE, BW], tl.float32)
    more_total = tl.zeros([BE, BW], tl.float32)
    for step in range(start, end, STEP):
        if EVEN:
            left_bits = tl.load(at_other)
            right_bits = tl.load(at_codes)
            more_bits = tl.load(at_more)
        else:
            inside = (step + k)[None, :] < length
            left_bits = tl.load(at_other, inside, 0)
            right_bits = tl.load(at_codes, inside, 0)
            more_bits = tl.load(at_more, inside, 0)
        left = values_of(left_bits, OTHER, HALF, NATIVE).T
        part = multiplied(right_bits, left, CODES, HALF, NATIVE)
        more_part = multiplied(more_bits, left, CODES, HALF, NATIVE)
        at_other += STEP * other_stride_k
        at_codes += STEP * codes_stride_k
        at_more += STEP * codes_stride_k
        if CODES_SCALED == SCALED_TILES or CODES_SCALED == SCALED_BLOCKS:
            part = part * factor[:, None]
            more_part = more_part * more_factor[:, None]
        if OTHER_SCALED == SCALED_TILES or OTHER_SCALED == SCALED_BLOCKS:
            part = part * far_factor[None, :]
            more_part = more_part * far_factor[None, :]
        total += part
        more_total += more_part
        # the next step's scales are on their way while its codes are
        after = tl.minimum(step + STEP, end - 1) // STEP
        factor = scales_of(at_codes_scale, after, codes_scale_stride_k, CODES_SCALED)
        more_factor = scales_of(at_more_scale, after, codes_scale_stride_k, CODES_SCALED)
        far_factor = scales_of(at_other_scale, after, other_scale_stride_k, OTHER_SCALED)
    if CODES_SCALED == SCALED_ROWS:
        total = total * tl.load(at_codes_scale)[:, None]
        more_total = more_total * tl.load(at_more_scale)[:, None]
    if OTHER_SCALED == SCALED_ROWS:
        total = total * tl.load(at_other_scale)[None, :]
        more_total = more_total * tl.load(at_other_scale)[None, :]
    at = out + f.to(tl.int64)[:, None] * out_stride_few
    tl.store(at, total, (f < num_exact)[:, None] & kept[None, :])
    tl.store(at + BE * out_stride_few, more_total, (f + BE < num_exact)[:, None] & kept[None, :])


@triton.jit(do_not_specialize=["shift"])
def sample_kernel(
    near, far, codes, other, index, out, codes_scale, other_scale, shift, length, chunk, num_shadow, num_exact, num_shared,
    num_far, num_wide, wide_start, near_stride_row, near_stride_k, far_stride_row, far_stride_k, codes_stride_row,
    codes_stride_k, other_stride_row, other_stride_k, codes_scale_stride_row, codes_scale_stride_k, other_scale_stride_row,
    other_scale_stride_k, out_stride_split, out_stride_few, out_stride_shared, NEAR_INDEXED: tl.constexpr,
    INDEXED: tl.constexpr, SHARE: tl.constexpr, WIDE: tl.constexpr, CODES: tl.constexpr, CODES_SCALED: tl.constexpr,
    OTHER: tl.constexpr, OTHER_SCALED: tl.constexpr, HALF: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
    BW: tl.constexpr, BS: tl.constexpr, BE: tl.constexpr, BX: tl.constexpr, BK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Parts of the sums over k of far[w, k] * near[f, k] and of other[w, k] * codes[f, k], ``out [splits, ...]``.

    w runs over the share of ``num_far`` lines, f over sampled lines: ``num_shadow`` of near, then the first ``num_exact`` of them
    of codes. A program has ``chunk`` of the contracted dimension. ``WIDE``: from ``wide_start`` on, the first sum for the first
    ``num_wide`` lines of near and all of far.
    """
    shadow_tiles = tl.cdiv(num_shadow, BS)
    tiles = shadow_tiles + tl.cdiv(num_exact, 2 * BE)
    start = tl.program_id(1) * chunk
    end = tl.minimum(start + chunk, length)
    own = tl.num_programs(0)
    if WIDE:
        wide_tiles = tl.cdiv(num_wide, BX)
        own -= wide_tiles * tl.cdiv(num_far, BW)
        if tl.program_id(0) >= own:
            place = tl.program_id(0) - own
            far_line = (place // wide_tiles) * BW + tl.arange(0, BW)
            inside = far_line < num_far
            wide = out + wide_start + tl.program_id(1).to(tl.int64) * out_stride_split + far_line.to(tl.int64)[:, None]
            shadow_part(
                near, far, index, wide, place % wide_tiles, tl.where(inside, far_line, 0).to(tl.int64), inside, start, end,
                length, num_wide, near_stride_row, near_stride_k, far_stride_row, far_stride_k, num_far, NEAR_INDEXED, EVEN,
                NATIVE, BW, BX, BK,
            )  # fmt: skip
            return
    tile = tl.program_id(0) % tiles
    w = (tl.program_id(0) // tiles) * BW + tl.arange(0, BW)
    kept = w < num_shared  # what lies beyond is worked out and not stored
    line = shared_line(tl.where(kept, w, 0), num_far, shift, SHARE).to(tl.int64)
    to = out + tl.program_id(1).to(tl.int64) * out_stride_split
    across = w.to(tl.int64) * out_stride_shared
    if tile < shadow_tiles:
        shadow_part(
            near, far, index, to + across[:, None], tile, line, kept, start, end, length, num_shadow, near_stride_row,
            near_stride_k, far_stride_row, far_stride_k, out_stride_few, NEAR_INDEXED, EVEN, NATIVE, BW, BS, BK,
        )  # fmt: skip
    else:
        exact_start = tl.full([], num_shadow, tl.int64) * out_stride_few
        exact_part(
            codes, other, index, to + exact_start + across[None, :], codes_scale, other_scale, tile - shadow_tiles, line, kept,
            start, end, length, num_exact, codes_stride_row, codes_stride_k, other_stride_row, other_stride_k,
            codes_scale_stride_row, codes_scale_stride_k, other_scale_stride_row, other_scale_stride_k, out_stride_few, INDEXED,
            CODES, CODES_SCALED, OTHER, OTHER_SCALED, HALF, EVEN, NATIVE, BW, BE, STEP,
        )  # fmt: skip
