# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The statistics of an operand beside codes and scales that another library made, in FP64 with masks where the fast pass may not.

Nothing is assumed of a scale: it may be far from the block's own, zero, infinite or NaN. A *unit* is what a program does at once:
tiles ``[BR, NB, BW]`` of BR rows and NB times BW columns, one below or beside the other until their blocks are whole. A tensor
with one scale has no whole block in any program; the second stage has its totals.

Columns of a part, FP64, in which counts below 2^53 are exact; ``statistics.finish_row`` takes the same:

    sums     0..11 as in COUNTS, but for the last  12..19 as in SUMS
    maxima  20 amax  21 abs err  22 scale_inv  23 headroom  24 block nmse  25 block amax / amin
            26 minus amin  27 minus scale_inv  28 whether a block's scale_inv is NaN
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.describe.foreign_common import COLUMNS, added, load_pair, per_block, store_part
from fp8debug.kernels.gpu.describe.foreign_fast import fast_units
from fp8debug.kernels.gpu.device import (
    HALFWAY_E4M3,
    HALFWAY_E5M2,
    INF,
    LEAST_NORMAL_E4M3,
    LEAST_NORMAL_E5M2,
    MAX_E4M3,
    MAX_E5M2,
    bits_of,
    float_of,
)
from fp8debug.kernels.gpu.quantize.statistics import finish_row
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_COLUMN, KIND_ROW, KIND_TENSOR, KIND_TILE, is_finite, log2_parts

#: Parts that are joined at once.
CHUNK = tl.constexpr(64)
#: Neighbouring columns that are reduced to one first, inside a thread.
FOLD = tl.constexpr(8)


@triton.jit
def folded(v, OP: tl.constexpr):
    """Reduce FOLD neighbouring columns to one: sum, maximum or minimum."""
    v = tl.reshape(v, (v.shape[0], v.shape[1], v.shape[2] // FOLD, FOLD))
    if OP == 0:
        return tl.sum(v, axis=3)
    elif OP == 1:
        return tl.max(v, axis=3)
    else:
        return tl.min(v, axis=3)


@triton.jit
def counted(condition):
    """Count neighbouring columns."""
    return folded(condition.to(tl.int32), 0)


@triton.jit
def gathered(v, KIND: tl.constexpr, OP: tl.constexpr):
    """Reduce what a block's sums are made of, in a tile: nothing where each column has a block of its own."""
    if KIND == KIND_COLUMN:
        return v
    else:
        return folded(v, OP)


@triton.jit
def saturated_above(inv, E5M2: tl.constexpr):
    """Return the largest FP32 t with fl(t / inv) <= max * (1 + 2^-20), without a division.

    That limit is an even number of FP32: a quotient halfway to the next is rounded to it. Its product in FP64 is exact.
    """
    halfway = tl.full([], HALFWAY_E5M2 if E5M2 else HALFWAY_E4M3, tl.float64)
    most = tl.where(inv < 0.0, float("inf"), inv.to(tl.float64) * halfway)
    t = most.to(tl.float32)
    return tl.where(t.to(tl.float64) > most, float_of(bits_of(t) - 1), t)


@triton.jit
def log2_of(inv):
    """Return log2 of FP32 in FP64, to 2^-22; -Inf of 0, NaN of what is negative."""
    exponent, mantissa = log2_parts(inv)
    found = exponent.to(tl.float64) + mantissa.to(tl.float64)
    found = tl.where(inv < INF, found, inv.to(tl.float64))
    return tl.where(inv > 0.0, found, tl.where(inv == 0.0, float("-inf"), float("nan")))


@triton.jit
def exact_units(
    x, codes, scale, parts, rows, columns, num_units, across, height, steps, x_row, x_column, code_row, code_column, scale_row,
    scale_column, numel, num_blocks, lift_below, KIND: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr,
    BW: tl.constexpr, NATIVE: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Store this program's part, in FP64 with masks throughout; see :func:`foreign_cast_kernel`."""
    f64: tl.constexpr = tl.float64
    top: tl.constexpr = MAX_E5M2 if E5M2 else MAX_E4M3
    least_normal: tl.constexpr = LEAST_NORMAL_E5M2 if E5M2 else LEAST_NORMAL_E4M3
    r = tl.arange(0, BR)[:, None, None]
    b = tl.arange(0, NB)[None, :, None]
    w = tl.arange(0, BW)[None, None, :]
    none = tl.zeros([BR, NB, BW // FOLD], tl.int32)
    wide, real = none.to(f64), none.to(tl.float32)
    one = tl.zeros([BR if KIND == KIND_ROW else 1, NB if KIND == KIND_ROW else 1, 1], tl.int32)
    zeros, nans, infs, made, small, underflow, saturated = none, none, none, none, none, none, none
    sx, sx2, sy2, sxy, se, se2 = wide, wide, wide, wide, wide, wide
    amax, amin, emax = real, real + INF, real
    zero_blocks, lifted, strange = one, one, one
    logs, squares, worst, widest = one.to(f64), one.to(f64), one.to(f64) + float("-inf"), one.to(f64)
    head, inv_max, inv_min = one.to(tl.float32) - INF, one.to(tl.float32) - INF, one.to(tl.float32) + INF
    num_done = (num_units - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0)
    for share in range(num_done * SHARES):
        unit = tl.program_id(0) + share // SHARES * tl.num_programs(0)
        unit_row = unit // across
        unit_column = unit % across
        first_row = unit_row * height + share % SHARES * BR
        first_block = unit_column * NB
        if KIND == KIND_ROW:
            scale_at, block = first_row + r, first_block + b
            is_block = (scale_at < rows) & (block * BW < columns)
        elif KIND == KIND_COLUMN:
            scale_at, block = unit_row, first_block * BW + w
            is_block = block < columns
        elif KIND == KIND_TILE:
            scale_at, block = unit_row, unit_column + one
            is_block = one == 0
        else:
            scale_at, block = unit_row * 0, one
            is_block = one == 0
        inv = tl.load(scale + scale_at.to(tl.int64) * scale_row + block.to(tl.int64) * scale_column, is_block, 1.0)
        inv_of_all = tl.broadcast_to(inv, (BR, NB, BW))
        most_of_all = tl.broadcast_to(saturated_above(inv, E5M2), (BR, NB, BW))
        signal = gathered(tl.zeros([BR, NB, BW], f64), KIND, 0)
        noise, most = signal, signal.to(tl.float32)
        least = most + INF
        for step in range(steps):
            row, column = first_row + r, (first_block + b) * BW + w
            if KIND == KIND_ROW:
                column += step * (NB * BW)
            else:
                row += step * BR
            inside = (row < rows) & (column < columns)
            row, column = row.to(tl.int64), column.to(tl.int64)
            at = codes + row * code_row + column * code_column
            v, d = load_pair(x + row * x_row + column * x_column, at, E5M2, NATIVE, inside)
            y = d * inv_of_all
            x_ok, y_ok = is_finite(v), is_finite(y)
            valid = x_ok & y_ok
            a = tl.where(x_ok, tl.abs(v), 0.0)
            size = tl.abs(d)
            below = (a > 0.0) & (size < least_normal)
            zeros += counted(inside & (v == 0.0))
            nans += counted(v != v)
            infs += counted(tl.abs(v) == INF)
            made += counted(inside & x_ok & (y_ok == 0))
            small += counted(below)
            underflow += counted(below & (size == 0.0))
            saturated += counted((a > most_of_all) & (size == top))
            most = tl.maximum(most, gathered(a, KIND, 1))
            least = tl.minimum(least, gathered(tl.where(a > 0.0, a, INF), KIND, 2))
            v = tl.where(valid, v, 0.0)
            y = tl.where(valid, y, 0.0)
            emax = tl.maximum(emax, folded(tl.abs(y - v), 1))  # rounded once, which is as FP64 would round it
            x64, y64 = v.to(f64), y.to(f64)
            e64 = y64 - x64
            sx += folded(x64, 0)
            sy2 += folded(y64 * y64, 0)
            sxy += folded(x64 * y64, 0)
            se += folded(e64, 0)
            signal += gathered(x64 * x64, KIND, 0)
            noise += gathered(e64 * e64, KIND, 0)
        if KIND == KIND_COLUMN:
            sx2 += folded(signal, 0)
            se2 += folded(noise, 0)
            amax = tl.maximum(amax, folded(most, 1))
            amin = tl.minimum(amin, folded(least, 2))
        else:
            sx2 += signal
            se2 += noise
            amax = tl.maximum(amax, most)
            amin = tl.minimum(amin, least)
        high = per_block(most, KIND, 1)
        something = high > 0.0
        known = something & (inv == inv)
        strange += added((something & (inv != inv)).to(tl.int32), KIND, 0)
        inv_max = tl.maximum(inv_max, added(tl.where(known, inv, -INF), KIND, 1))
        inv_min = tl.minimum(inv_min, added(tl.where(known, inv, INF), KIND, 2))
        head = tl.maximum(head, added(tl.where(known, tl.div_rn(high, inv), -INF), KIND, 1))
        if KIND != KIND_TENSOR:
            zero_blocks += added((is_block & (high == 0.0)).to(tl.int32), KIND, 0)
            lifted += added((something & (high < lift_below)).to(tl.int32), KIND, 0)
            log2 = tl.where(something, log2_of(inv), 0.0)
            logs += added(log2, KIND, 0)
            squares += added(log2 * log2, KIND, 0)
            block_signal, block_noise = per_block(signal, KIND, 0), per_block(noise, KIND, 0)
            nmse = block_noise / tl.where(block_signal > 0.0, block_signal, 1.0)
            worst = tl.maximum(worst, added(tl.where(block_signal > 0.0, nmse, float("-inf")), KIND, 1))
            low = tl.where(something, per_block(least, KIND, 2), 1.0)
            widest = tl.maximum(widest, added(high.to(f64) / low.to(f64), KIND, 1))
    store_part(
        parts, numel, num_blocks, tl.sum(zeros).to(f64), tl.sum(nans).to(f64), tl.sum(infs).to(f64), tl.sum(made).to(f64),
        tl.sum(underflow).to(f64), tl.sum(small - underflow).to(f64), tl.sum(saturated).to(f64), tl.sum(zero_blocks).to(f64),
        tl.sum(lifted).to(f64), tl.sum(sx), tl.sum(sx2), tl.sum(sy2), tl.sum(sxy), tl.sum(se), tl.sum(se2), tl.sum(logs),
        tl.sum(squares), tl.max(strange).to(f64), tl.max(amax), tl.max(emax), tl.max(inv_max), tl.max(head), tl.max(worst),
        tl.max(widest), tl.min(amin), tl.min(inv_min), E5M2,
    )  # fmt: skip


@triton.jit
def foreign_cast_kernel(
    x, codes, scale, parts, rows, columns, num_units, across, height, steps, x_row, x_column, code_row, code_column, scale_row,
    scale_column, numel, num_blocks, lift_below, KIND: tl.constexpr, E5M2: tl.constexpr, BR: tl.constexpr, NB: tl.constexpr,
    BW: tl.constexpr, NATIVE: tl.constexpr, PIECES: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Program p leaves part p ``[32]`` of what its units add to every slot.

    Args:
        x: ``[rows, columns]``.
        codes: FP8 as int8, of the same shape.
        scale: FP32, one for each block.
        parts: ``[programs, 32]``.
        num_units: of them ``across`` lie side by side, of ``height`` rows each.
        steps: tiles of a unit: beside each other for KIND_ROW, else below.
        lift_below: a nonzero block of a smaller amax counts in ``num_eps_blocks``.
        PIECES: tiles, or of KIND_ROW parts of a tile, that the fast pass takes at once; 0 where not all tiles are whole, and
            there is none.
        SHARES: of a tile's rows, which the exact pass takes one after the other.
    """
    again = True
    if PIECES:
        again = fast_units(
            x, codes, scale, parts, num_units, across, height, steps, x_row, x_column, code_row, code_column, scale_row,
            scale_column, numel, num_blocks, lift_below, KIND, E5M2, BR, NB, BW, NATIVE, PIECES,
        )  # fmt: skip
    if again:
        exact_units(
            x, codes, scale, parts, rows, columns, num_units, across, height, steps, x_row, x_column, code_row, code_column,
            scale_row, scale_column, numel, num_blocks, lift_below, KIND, E5M2, BR // SHARES, NB, BW, NATIVE, SHARES,
        )  # fmt: skip


@triton.jit
def one_of(values, index: tl.constexpr):
    """Return ``values[index]`` of 32, as ``[1]``."""
    return tl.sum(tl.where(tl.arange(0, 32) == index, values, 0.0), axis=0, keep_dims=True)


@triton.jit
def finish(parts, words, num_programs, is_whole, lift_below):
    """Join parts ``[programs, 32]`` to ``OPERAND`` of a row of words; ``is_whole``: the tensor is one block."""
    n = tl.arange(0, 32)
    row = tl.arange(0, CHUNK)[:, None]
    sums = tl.zeros([CHUNK, 32], tl.float64)
    most = tl.full([CHUNK, 32], float("-inf"), tl.float64)
    for start in range(0, num_programs, CHUNK):
        inside = (start + row < num_programs) & (n < 29)[None, :]
        values = tl.load(parts + (start + row) * COLUMNS + n[None, :], inside, 0.0)
        sums += tl.where((n < 20)[None, :], values, 0.0)
        most = tl.maximum(most, tl.where(inside & (n > 19)[None, :], values, float("-inf")))
    total = tl.sum(sums, axis=0)
    greatest = tl.max(most, axis=0)
    amax, signal, inv = one_of(greatest, 20), one_of(total, 13), one_of(greatest, 22)
    is_strange = one_of(greatest, 28) > 0.0
    something = amax > 0.0
    of_whole = (n >= 0) & (is_whole != 0)
    total = tl.where(of_whole & (n == 9), tl.where(something, 0.0, 1.0), total)
    total = tl.where(of_whole & (n == 10), tl.where(something & (amax < lift_below), 1.0, 0.0), total)
    log2 = tl.where(is_strange, float("nan"), tl.math.log2(tl.where(something & (is_strange == 0), inv, 1.0)))
    total = tl.where(of_whole & (n == 18), log2, tl.where(of_whole & (n == 19), log2 * log2, total))
    nmse = one_of(total, 17) / tl.where(signal == 0.0, 1.0, signal)
    greatest = tl.where(of_whole & (n == 24), tl.where(signal == 0.0, float("-inf"), nmse), greatest)
    span = amax / tl.where(something, -one_of(greatest, 26), 1.0)
    greatest = tl.where(of_whole & (n == 25), span, greatest)
    of_scale = (n == 22) | (n == 23) | (n == 27)
    greatest = tl.where(of_scale & is_strange, float("nan"), greatest)
    finish_row(words, total, greatest)
