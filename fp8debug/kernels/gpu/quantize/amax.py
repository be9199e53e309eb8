# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The first pass of a cast whose scale no tile can know alone: the largest magnitudes of a tensor, its rows or its columns.

The slots of blocks where each row or column of a tensor is one, from what its tiles added to each (``store_parts``).

Two small launches in place of some thirty torch ops: parts FP64 ``[programs, 16]``, then the slots, which overwrite what the
second stage left there. Sums run in one order whatever the device does.

    0 zero blocks  1 eps blocks  2 log2 of scale_inv  3 largest scale_inv  4 minus the smallest
    5 largest scaled magnitude  6 largest block nmse  7 largest block amax / amin  8 square of log2 of scale_inv
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fp8debug.kernels.gpu.device import INF, float_of, load_quad, split4
from fp8debug.kernels.gpu.launcher import launch
from fp8debug.kernels.gpu.quantize.tile_cast import (
    KIND_COLUMN,
    KIND_COLUMNS,
    KIND_ROW,
    KIND_ROWS,
    KIND_TENSOR,
    magnitudes,
    one_of,
    per_block,
    within,
)


@triton.jit
def store_four(at, joined, quad, columns):
    """Store a joined quad of per-column values."""
    v0, v1, v2, v3 = split4(joined)
    tl.store(at, v0, quad * 4 < columns)
    tl.store(at + 1, v1, quad * 4 + 1 < columns)
    tl.store(at + 2, v2, quad * 4 + 2 < columns)
    tl.store(at + 3, v3, quad * 4 + 3 < columns)


@triton.jit
def amax_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, out, KIND: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, LOAD: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Largest finite magnitudes: KIND_TENSOR ``[programs]``, KIND_ROWS ``[column tiles, rows]``, KIND_COLUMNS the like."""
    j = tl.arange(0, J)[None, None, :, None, None]
    h = tl.arange(0, H)[None, None, None, :, None]
    r = tl.arange(0, R)[None, :, None, None, None]
    at = tl.arange(0, L)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    largest = tl.zeros([L, R], tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_row = tile // tile_columns
        tile_column = tile % tile_columns
        row = tile_row * (J * R) + r * J + j
        quad = tile_column * (H * L * 2) + h * (L * 2) + at
        x0, x1, x2, x3, _, _ = load_quad(x_ptr, row, quad, stride, rows, columns, LOAD, EVEN, NATIVE)
        a0, a1, a2, a3 = magnitudes(x0, x1, x2, x3, True)
        if KIND == KIND_ROWS:
            tl.store(out + tile_column * rows + row, float_of(per_block(a0, a1, a2, a3, KIND_ROW, 1)), row < rows)
        elif KIND == KIND_COLUMNS:
            found = float_of(per_block(a0, a1, a2, a3, KIND_COLUMN, 1))
            store_four(out + tile_row * columns + quad * 4, found, quad, columns)
        else:
            found = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
            largest = tl.maximum(largest, tl.max(within(found, 1), axis=2))
    if KIND == KIND_TENSOR:
        tl.store(out + tl.program_id(0), float_of(tl.max(largest)))


#: Tiles of a line that are loaded at once, and lines of a program.
TILES, LINES = 32, 32
#: Numbers of a program's part.
PARTS = tl.constexpr(16)


@triton.jit
def blocks_kernel(memory, scale_inv, parts, n, tiles, eps, top, TILES: tl.constexpr, LINES: tl.constexpr):
    """``memory``: FP32 amaxes ``[n]``, then sum x^2, sum err^2 and amin ``[tiles, 3, n]``; see ``tile_kernel.store_parts``."""
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = line < n
    signal = tl.zeros([LINES], tl.float64)
    noise = tl.zeros([LINES], tl.float64)
    amin = tl.full([LINES], INF, tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + tl.arange(0, TILES)[:, None]
        here = (tile < tiles) & inside[None, :]
        at = memory + n + tile.to(tl.int64) * 3 * n + line[None, :]
        signal += tl.sum(tl.load(at, here, 0.0).to(tl.float64), axis=0)
        noise += tl.sum(tl.load(at + n, here, 0.0).to(tl.float64), axis=0)
        amin = tl.minimum(amin, tl.min(tl.load(at + 2 * n, here, INF), axis=0))
    amax = tl.load(memory + line, inside, 0.0)
    inv = tl.load(scale_inv + line, inside, 1.0)
    zero = inside & (amax == 0.0)
    filled = inside & (amax > 0.0)
    largest = tl.where(filled, amax, 1.0)
    lifted = filled & ((amax < eps) | (tl.div_rn(top + amax * 0.0, largest) == INF))
    usable = inside & (signal != 0.0)
    ratio = tl.where(usable, noise / tl.where(usable, signal, 1.0), -INF)
    wide = tl.where(filled, largest.to(tl.float64) / tl.where(filled, amin, 1.0).to(tl.float64), 0.0)
    to = parts + tl.program_id(0) * PARTS
    log2 = tl.math.log2(tl.where(filled, inv, 1.0).to(tl.float64))
    tl.store(to, tl.sum(zero.to(tl.float64), axis=0))
    tl.store(to + 1, tl.sum(lifted.to(tl.float64), axis=0))
    tl.store(to + 2, tl.sum(log2, axis=0))
    tl.store(to + 3, tl.max(tl.where(filled, inv, -INF), axis=0).to(tl.float64))
    tl.store(to + 4, tl.max(tl.where(filled, -inv, -INF), axis=0).to(tl.float64))
    tl.store(to + 5, tl.max(tl.where(filled, tl.div_rn(largest, inv), -INF), axis=0).to(tl.float64))
    tl.store(to + 6, tl.max(ratio, axis=0))
    tl.store(to + 7, tl.max(wide, axis=0))
    tl.store(to + 8, tl.sum(log2 * log2, axis=0))


@triton.jit
def finish_blocks_kernel(parts, counts, sums, maxima, minima, num_blocks, num_programs, top, CHUNK: tl.constexpr):
    """Write the slots of one cast."""
    n = tl.arange(0, PARTS)
    summed = tl.zeros([CHUNK, PARTS], tl.float64)
    most = tl.full([CHUNK, PARTS], -INF, tl.float64)
    for start in range(0, num_programs, CHUNK):
        program = start + tl.arange(0, CHUNK)[:, None]
        inside = (program < num_programs) & (n < 9)[None, :]
        values = tl.load(parts + program * PARTS + n[None, :], inside, 0.0)
        summed += values
        most = tl.maximum(most, tl.where(inside, values, -INF))
    total = tl.sum(summed, axis=0)
    greatest = tl.max(most, axis=0)
    tl.store(counts + 9 + n, total.to(tl.int64), n < 2)
    tl.store(counts + 12, num_blocks - one_of(total, 0).to(tl.int64))
    tl.store(sums + 6, one_of(total, 2))
    tl.store(sums + 7, one_of(total, 8))
    tl.store(maxima + 2, one_of(greatest, 3).to(tl.float32))
    tl.store(maxima + 3, tl.div_rn(one_of(greatest, 5).to(tl.float32), top))
    tl.store(maxima + 4, one_of(greatest, 6).to(tl.float32))
    wide = one_of(greatest, 7)
    widest = tl.where(wide > 0.0, tl.math.log2(tl.where(wide > 0.0, wide, 1.0)), -INF)
    tl.store(maxima + 5, widest.to(tl.float32))
    tl.store(minima + 1, -one_of(greatest, 4).to(tl.float32))


def finish_lines(
    memory: Tensor, scale_inv: Tensor, n: int, eps: float, top: float, slots: tuple[Tensor, Tensor, Tensor, Tensor]
) -> None:
    """Fill the slots of blocks.

    Args:
        memory: FP32 ``[n * (1 + 3 * tiles)]``, filled by the tile kernel.
        scale_inv: FP32, of every line.
        n: rows or columns of the tensor.
        eps: smallest amax of the cast.
        top: max of its format.
        slots: counts, sums, maxima and minima of the cast, as ``statistics`` orders them.
    """
    programs = -(-n // LINES)
    parts = memory.new_empty(programs * PARTS.value, dtype=slots[1].dtype)
    tiles = (memory.numel() // n - 1) // 3
    launch(blocks_kernel, (programs,), (memory, scale_inv, parts, n, tiles, eps, top), (TILES, LINES), num_warps=4)
    launch(finish_blocks_kernel, (1,), (parts, *slots, n, programs, top), (64,), num_warps=4)
