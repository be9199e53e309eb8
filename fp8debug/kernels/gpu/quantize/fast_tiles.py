# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The fast pass of a cast whose blocks are rows of a tile or the tile, on the GPU: BF16, whole tiles, one cast.

A tile is ``[R, 4]`` threads (``fast_elements``); thread (r, l) holds 32 elements of row r.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu import ptx
from fp8debug.kernels.gpu.count_window import start_window, stop_window
from fp8debug.kernels.gpu.device import LOAD_TRANSPOSED
from fp8debug.kernels.gpu.quantize.fast_elements import (
    add_two,
    all_found,
    cast_words,
    extremes_in,
    in_line,
    larger_halves,
    load_words,
    nothing_yet,
    turned,
    with_noise,
)
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_ROW

START = tl.constexpr({r: ptx.start_turning(r) for r in (32, 64, 128)})


@triton.jit
def fast_tiles(  # noqa: C901  # branches on compile-time constants
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, eps, table, SPEC: tl.constexpr, R: tl.constexpr,
    HALVES: tl.constexpr, LOAD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Do every tile of this program; return counts, sums and maxima as ``tile_cast.summary`` does.

    ``COUNTED``: every bit pattern too, but for zeros, in the table of ``value_counts_kernel``; of blocks that are rows, with
    HALVES 1.
    """
    kind: tl.constexpr = SPEC[0]
    r = tl.arange(0, R)[:, None] + tl.zeros([R, 4], tl.int32)
    lane = tl.arange(0, 4)[None, :] + tl.zeros([R, 4], tl.int32)
    none = tl.zeros([R, 4], tl.int32)
    if LOAD == LOAD_TRANSPOSED:
        tl.inline_asm_elementwise(START[R], "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1)
        # Thread t loads rows 4 g .. 4 g + 3 of columns 8 c .. 8 c + 7, of R / 8 groups of columns.
        t = r * 4 + lane
        c = t % (R // 8)
        g = t // (R // 8)
        first = x_ptr.to(tl.int64) + g.to(tl.int64) * 4 * stride * 2 + c * 16
        shift: tl.constexpr = 1 if R == 32 else 0  # chunks of 16 bytes are permuted by the column: no access meets in a bank
        put = c * 2048 + (((g * 2) ^ ((c & (7 >> shift)) << (2 + shift))) << 2)
        take = r * 256 + ((lane ^ (((r >> 3) & (7 >> shift)) << shift) ^ ((r & 1) << 2)) << 4)
        pitch = none.to(tl.int64) + stride * 2
        across = stride.to(tl.int64) * 256  # bytes from a tile to the one beside it in turned order
        lower = tl.full([], R * 2, tl.int64)
        buffer = 0
    else:
        first = x_ptr.to(tl.int64) + r.to(tl.int64) * stride * 8 + lane * 16
        pitch = none.to(tl.int64)
        across = tl.full([], 256, tl.int64)
        lower = stride.to(tl.int64) * (R * 8)  # bytes to the second half of a tile
    down = lower * HALVES
    to = data.to(tl.int64) + r.to(tl.int64) * columns + lane * 8
    found = nothing_yet(R)
    step = tl.num_programs(0)
    step_row = step // tile_columns
    step_column = step % tile_columns
    tile_row = tl.program_id(0) // tile_columns
    tile_column = tl.program_id(0) % tile_columns
    if HALVES == 1:
        w = load_words(first + (tile_row * down + tile_column * across), pitch, LOAD)
    window = 0
    if COUNTED:
        window = start_window(x_ptr, stride, rows, columns, r * 4 + lane, 4 * R)
    for tile in range(tl.program_id(0), num_tiles, step):
        if HALVES == 2:  # enough programs wait for each other's loads
            here = first + (tile_row * down + tile_column * across)
            w = load_words(here, pitch, LOAD)
            u = load_words(here + lower, pitch, LOAD)
        if LOAD == LOAD_TRANSPOSED:
            v = turned(w, put + buffer, take + buffer, R)
            if R < 128:
                buffer = buffer ^ (256 * R)
            if HALVES == 2:
                u = turned(u, put + buffer, take + buffer, R)
                buffer = buffer ^ (256 * R)
        else:
            v = w
        if HALVES == 1:
            u = v
        here_row = tile_row
        here_column = tile_column
        tile_column += step_column
        tile_row += step_row
        if tile_column >= tile_columns:
            tile_column -= tile_columns
            tile_row += 1
        if HALVES == 1:
            if tile + step < num_tiles:  # ahead of what is done with this tile
                w = load_words(first + (tile_row * down + tile_column * across), pitch, LOAD)
        at = to + (here_row.to(tl.int64) * (R * HALVES) * columns + here_column * 128)
        if kind == KIND_ROW:
            line = inv_out.to(tl.int64) + (here_column.to(tl.int64) * rows + here_row * R + r) * 4
        else:
            line = inv_out + here_row.to(tl.int64) * tile_columns + here_column
        ends = extremes_in(v)
        if HALVES == 2:
            ends = larger_halves(ends, extremes_in(u))
        if kind != KIND_ROW:
            ends = tl.reduce(ends, None, larger_halves)
        found, x2, e2 = cast_words(
            found, ends, v, u, lane, at, R * columns, line, eps, window, table, SPEC, kind == KIND_ROW, HALVES, COUNTED, True
        )  # fmt: skip
        if SPEC[5]:
            if kind == KIND_ROW:
                signal, noise = in_line(x2), in_line(e2)
            else:
                signal, noise = tl.reduce((x2, e2), None, add_two)
            found = with_noise(found, signal, noise)
    if COUNTED:
        stop_window(window + none, table.to(tl.int64) + none, 4 * R)
    num_done = (num_tiles - tl.program_id(0) + step - 1) // step
    return num_done, all_found(found, SPEC, 4 if kind == KIND_ROW else 4 * R)
