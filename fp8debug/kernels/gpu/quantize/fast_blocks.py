# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The fast pass of a cast whose blocks are 128 x 128, with statistics, on the GPU: BF16, whole tiles, rows as they lie.

A block's scale is known once all 16 warps have seen their rows. They tell one another of the next tile before they work on this
one, so that none waits: a thread holds this tile's words, the next one's and those of the one after, which are being loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu import ptx_exchange as exchange
from fp8debug.kernels.gpu.count_window import start_window, stop_window
from fp8debug.kernels.gpu.device import LOAD_BF16
from fp8debug.kernels.gpu.quantize.fast_elements import all_found, cast_words, extremes_in, load_words, nothing_yet, with_noise

START = tl.constexpr(exchange.start_sharing())
TELL_ENDS = tl.constexpr(exchange.send_ends())
HEAR_ENDS = tl.constexpr(exchange.receive_ends())
TELL_SUMS = tl.constexpr(exchange.send_sums())
HEAR_SUMS = tl.constexpr(exchange.receive_sums())


@triton.jit
def send_ends(v, number):
    """Tell the other warps of the extremes of a tile's words."""
    tl.inline_asm_elementwise(TELL_ENDS, "=r,r,r", [extremes_in(v), number], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def with_noise_of(found, number):
    """Running statistics of a thread, with the sums of a tile whose number may be negative: then with none."""
    signal, noise = tl.inline_asm_elementwise(
        HEAR_SUMS, "=f,=f,r", [number], dtype=(tl.float32, tl.float32), is_pure=False, pack=1
    )  # fmt: skip
    return with_noise(found, signal, noise)


@triton.jit
def moved(row, column, step, tile_columns):
    """A tile's row and column, ``step`` tiles on."""
    column += step % tile_columns
    over = (column >= tile_columns).to(tl.int32)
    return row + step // tile_columns + over, column - over * tile_columns


@triton.jit
def block_tiles(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, eps, table, SPEC: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Do every tile of this program; see ``fast_tiles``."""
    r = tl.arange(0, 128)[:, None] + tl.zeros([128, 4], tl.int32)
    lane = tl.arange(0, 4)[None, :] + tl.zeros([128, 4], tl.int32)
    none = tl.zeros([128, 4], tl.int32)
    tl.inline_asm_elementwise(START, "=r,r", [none], dtype=tl.int32, is_pure=False, pack=1)
    first = x_ptr.to(tl.int64) + r.to(tl.int64) * stride * 8 + lane * 16
    down = stride.to(tl.int64) * 1024
    pitch = none.to(tl.int64)
    found = nothing_yet(128)
    step = tl.num_programs(0)
    here_row = tl.program_id(0) // tile_columns
    here_column = tl.program_id(0) % tile_columns
    ahead = load_words(first + (here_row * down + here_column * 256), pitch, LOAD_BF16)
    send_ends(ahead, none)
    later = ahead
    row, column = moved(here_row, here_column, step, tile_columns)
    if tl.program_id(0) + step < num_tiles:
        later = load_words(first + (row * down + column * 256), pitch, LOAD_BF16)
    window = 0
    if COUNTED:
        window = start_window(x_ptr, stride, rows, columns, r * 4 + lane, 512)
    number = none
    for tile in range(tl.program_id(0), num_tiles, step):
        ends = tl.inline_asm_elementwise(HEAR_ENDS, "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1)
        found = with_noise_of(found, number - 2)
        v = ahead
        ahead = later
        if tile + step < num_tiles:
            send_ends(ahead, number + 1)
        row, column = moved(row, column, step, tile_columns)
        if tile + 2 * step < num_tiles:
            later = load_words(first + (row * down + column * 256), pitch, LOAD_BF16)
        at = data.to(tl.int64) + ((here_row * 128 + r) * columns + here_column * 128 + lane * 8)
        found, x2, e2 = cast_words(
            found, ends, v, v, r * 4 + lane, at, 0, inv_out.to(tl.int64) + none + tile * 4, eps, window, table, SPEC, True, 1,
            COUNTED, True,
        )  # fmt: skip
        tl.inline_asm_elementwise(TELL_SUMS, "=r,f,f,r", [x2, e2, number], dtype=tl.int32, is_pure=False, pack=1)
        here_row, here_column = moved(here_row, here_column, step, tile_columns)
        number += 1
    tl.debug_barrier()
    for back in tl.static_range(1, 3):
        found = with_noise_of(found, number - back)
    if COUNTED:
        stop_window(window + none, table.to(tl.int64) + none, 512)
    num_done = (num_tiles - tl.program_id(0) + step - 1) // step
    return num_done, all_found(found, SPEC, 512)
