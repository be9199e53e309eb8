# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""One read for two casts, along the rows of a tensor and along its columns, stored transposed: BF16, whole tiles of 128 x 128.

Both have one format and one way to round scales.

A program of 16 warps holds a tile in registers, row by row, and hands it on through shared memory, where it is read column by
column. Of the two barriers each is waited for only after other work: the tile is full when the rows are done, and read when the
columns are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu import ptx_exchange as exchange
from fp8debug.kernels.gpu.count_window import start_window, stop_window
from fp8debug.kernels.gpu.device import LOAD_BF16, LOAD_TRANSPOSED
from fp8debug.kernels.gpu.quantize.fast_elements import (
    SIXTEEN,
    all_found,
    cast_words,
    extremes_in,
    in_line,
    load_words,
    nothing_yet,
    with_noise,
)
from fp8debug.kernels.gpu.quantize.fast_kernel import fast_part, is_beyond, join_parts, safe_part
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_NONE, summary
from fp8debug.kernels.gpu.quantize.tile_kernel import all_tiles

START = tl.constexpr(exchange.start())
PUT = tl.constexpr(exchange.put())
TAKE = tl.constexpr(exchange.take())
IN_PUT = tl.constexpr("=r," + ",".join(["r"] * 18))
IN_TAKE = tl.constexpr(",".join(["=r"] * 16) + ",r,r")


@triton.jit
def put_at(r, t):
    """Offset in the tile, in bytes, where lane t of a warp stores eight words: row t % 8 of the transpose of words t / 8.

    That is column 8 (t / 2 % 4) + 2 (t / 8) + t % 2, of which r is one of the warp's rows.
    """
    return ((t >> 1 & 3) * 8 + (t >> 3) * 2 + (t & 1)) * 256 + (((r >> 3) ^ ((t & 1) << 2) ^ (t >> 1 & 3)) << 4)


@triton.jit
def take_at(column, lane):
    """Offset in the tile, in bytes, of a thread's first words of a column."""
    return column * 256 + ((lane ^ ((column & 1) << 2) ^ (column >> 3 & 3)) << 4)


@triton.jit
def put_words(v, at, number):
    """Hand on the words of a thread."""
    tl.inline_asm_elementwise(
        PUT, IN_PUT,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15], at, number],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def two_way_tiles(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, data_t, inv_t, eps, eps_t, table, A: tl.constexpr,
    B: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Do every tile of this program; return the number of tiles, and what a thread has found about the casts A and B.

    ``COUNTED``: see ``fast_tiles``.
    """
    r = tl.arange(0, 128)[:, None] + tl.zeros([128, 4], tl.int32)
    lane = tl.arange(0, 4)[None, :] + tl.zeros([128, 4], tl.int32)
    none = tl.zeros([128, 4], tl.int32)
    tl.inline_asm_elementwise(START, "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1)
    put = put_at(r, (r * 4 + lane) % 32)
    take = take_at(r, lane)
    first = x_ptr.to(tl.int64) + r.to(tl.int64) * stride * 8 + lane * 16
    down = stride.to(tl.int64) * 1024
    pitch = none.to(tl.int64)
    found = nothing_yet(128)
    found_t = nothing_yet(128)
    step = tl.num_programs(0)
    step_row = step // tile_columns
    step_column = step % tile_columns
    tile_row = tl.program_id(0) // tile_columns
    tile_column = tl.program_id(0) % tile_columns
    w = load_words(first + (tile_row * down + tile_column * 256), pitch, LOAD_BF16)
    number = none
    window = 0
    if COUNTED:
        window = start_window(x_ptr, stride, rows, columns, r * 4 + lane, 512)
    for tile in range(tl.program_id(0), num_tiles, step):
        v = w
        put_words(v, put, number)
        here_row = tile_row * 128
        here_column = tile_column * 128
        tile_column += step_column
        tile_row += step_row
        if tile_column >= tile_columns:
            tile_column -= tile_columns
            tile_row += 1
        if tile + step < num_tiles:
            w = load_words(first + (tile_row * down + tile_column * 256), pitch, LOAD_BF16)
        at = data.to(tl.int64) + ((here_row + r) * columns + here_column + lane * 8)
        line = inv_out.to(tl.int64) + (here_column // 128 * rows + here_row + r).to(tl.int64) * 4
        found, x2, e2 = cast_words(
            found, extremes_in(v), v, v, lane, at, 0, line, eps, window, table, A, True, 1, COUNTED, True
        )  # fmt: skip
        if A[5]:
            found = with_noise(found, in_line(x2), in_line(e2))
        u = tl.inline_asm_elementwise(TAKE, IN_TAKE, [take, number], dtype=SIXTEEN, is_pure=False, pack=1)
        at = data_t.to(tl.int64) + ((here_column + r) * rows + here_row + lane * 8)
        line = inv_t.to(tl.int64) + (here_row // 128 * columns + here_column + r).to(tl.int64) * 4
        found_t, x2, e2 = cast_words(found_t, extremes_in(u), u, u, lane, at, 0, line, eps_t, 0, 0, B, True, 1, False, False)
        if B[5]:
            found_t = with_noise(found_t, in_line(x2), in_line(e2))
        number += 1
    if COUNTED:
        stop_window(window + none, table.to(tl.int64) + none, 512)
    num_done = (num_tiles - tl.program_id(0) + step - 1) // step
    return num_done, found, found_t


@triton.jit
def either(first, a, b):
    """Running statistics of one of two casts in a thread, as ``nothing_yet`` orders it; the tensor's own are the first's."""
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15 = a
    _, _, b2, b3, b4, b5, b6, b7, b8, b9, _, b11, b12, b13, b14, b15 = b
    return (
        a0, a1, tl.where(first, a2, b2), tl.where(first, a3, b3), tl.where(first, a4, b4), tl.where(first, a5, b5),
        tl.where(first, a6, b6), tl.where(first, a7, b7), tl.where(first, a8, b8), tl.where(first, a9, b9), a10,
        tl.where(first, a11, b11), tl.where(first, a12, b12), tl.where(first, a13, b13), tl.where(first, a14, b14),
        tl.where(first, a15, b15),
    )  # fmt: skip


@triton.jit
def two_way_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, partials, data, inv_out, eps, data_t, inv_t, eps_t, words, words_t,
    tickets, table, A: tl.constexpr, B: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """x ``[rows, columns]`` -> data and scale_inv of A, those of B of its transpose, and with statistics finished parts of both.

    Parts ``[programs, 32]`` of A, space for a part of each 32 programs, and the same of B; see ``fast_kernel``.

    Where two casts would have the same code twice there is a loop whose bound the compiler does not know: each reduction takes
    one of 16 registers for diverging threads, and with too few left ptxas 12.8 has the slow path of a division save one of its
    caller's, which goes wrong (an illegal address, where blocks are subnormal; docs/lab/log.md, 2026-11-24).
    """
    nothing: tl.constexpr = (KIND_NONE, 0, 0, 0, 0, 0, 0)
    statistics: tl.constexpr = A[5]
    num_done, found, found_t = two_way_tiles(
        x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, data_t, inv_t, eps, eps_t, table, A, B, COUNTED
    )  # fmt: skip
    n = tl.arange(0, 32)
    elements = num_done * 16384
    num_blocks = num_done * 128
    first = tl.program_id(0) == 0
    part = partials + tl.program_id(0) * 32 + n
    behind = (tl.num_programs(0) + 32) * 32  # from a part of A to that of B
    bad = num_tiles < 0
    for i in range(0, 1 + tl.minimum(num_tiles, 1)):
        one = all_found(either(i == 0, found, found_t), A, 4)
        bad = bad | is_beyond(one, statistics)
        if statistics:
            tl.store(part + i * behind, fast_part(one, elements, num_blocks, first, tl.where(i == 0, eps, eps_t), A, 4))
    if bad:
        tl.debug_barrier()  # the safe passes write the same addresses
        amaxes, amins, zeros, nans, infs, acc, _, _ = all_tiles(
            x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, inv_out, eps, 1.0, data, inv_out, inv_out,
            0.0, 1.0, data, inv_out, inv_out, 0.0, 1.0, partials, A, nothing, nothing, 1, 4, 128, 4, LOAD_BF16, True, True,
            statistics, False, True, True, False, False,
        )  # fmt: skip
        if statistics:
            c, s, m = summary(amaxes, amins, zeros, nans, infs, acc, A[0])
            tl.store(part, safe_part(c, s, m, elements, num_blocks, first, eps, A))
        amaxes, amins, zeros, nans, infs, acc, _, _ = all_tiles(
            x_ptr, stride * 4, columns, rows, num_tiles, tile_columns, data_t, inv_t, inv_t, eps_t, 1.0, data_t, inv_t, inv_t,
            0.0, 1.0, data_t, inv_t, inv_t, 0.0, 1.0, partials, B, nothing, nothing, 1, 4, 128, 4, LOAD_TRANSPOSED, True, True,
            statistics, False, True, True, False, True,
        )  # fmt: skip
        if statistics:
            c, s, m = summary(amaxes, amins, zeros, nans, infs, acc, B[0])
            tl.store(part + behind, safe_part(c, s, m, elements, num_blocks, first, eps_t, B))
    if statistics:
        if words.to(tl.int64) != 0:
            join_parts(partials, words, tickets, behind, words_t, True)
