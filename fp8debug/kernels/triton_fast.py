# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The fast pass of a cast whose blocks are rows of a tile or the tile, on the GPU: BF16, whole tiles, one cast.

What is done with the elements is PTX (``triton_ptx``), what is done once a block is written here. A tile is ``[R, 4]`` threads;
thread (r, l) holds 32 elements of row r.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels import triton_ptx as ptx
from fp8debug.kernels.triton_cast import KIND_ROW, KIND_TILE
from fp8debug.kernels.triton_common import INF, LOAD_TRANSPOSED, ROUND_POW2_CEIL, bits_of, float_of
from fp8debug.kernels.triton_tile import OUT_NONE
from fp8debug.kernels.triton_window import WINDOW, count_words, start_window, stop_window

LOAD_ROWS_OF = tl.constexpr(ptx.load_rows())
LOAD_COLUMNS_OF = tl.constexpr(ptx.load_columns())
TURN = tl.constexpr({r: ptx.turn(r == 128) for r in (32, 64, 128)})
EXTREMES = tl.constexpr(ptx.extremes())
QUOTIENT = tl.constexpr(ptx.QUOTIENT)
INVERSE = tl.constexpr(ptx.INVERSE)
OF_E4M3 = tl.constexpr(ptx.OF_E4M3)
OF_E5M2 = tl.constexpr(ptx.OF_E5M2)
ABOUT = tl.constexpr(ptx.ABOUT)
LOG2 = tl.constexpr(ptx.LOG2)
E4_CODES = tl.constexpr(ptx.element_pass(False, True, False))
E5_CODES = tl.constexpr(ptx.element_pass(True, True, False))
E4_SEEN = tl.constexpr(ptx.element_pass(False, False, True))
E5_SEEN = tl.constexpr(ptx.element_pass(True, False, True))
E4_BOTH = tl.constexpr(ptx.element_pass(False, True, True))
E5_BOTH = tl.constexpr(ptx.element_pass(True, True, True))
START = tl.constexpr({r: ptx.start_turning(r) for r in (32, 64, 128)})
_REST = ",".join(["r"] * 16)
IN_ROWS = tl.constexpr(",".join(["=r"] * 16) + ",l")
IN_COLUMNS = tl.constexpr(",".join(["=r"] * 16) + ",l,l")
IN_TURN = tl.constexpr(",".join(["=r"] * 16) + "," + ",".join(["r"] * 18))
IN_EXTREMES = tl.constexpr("=r," + _REST)
IN_CODES = tl.constexpr("=r," + _REST + ",f,l")
IN_ALL = tl.constexpr("=f,=f,=f,=f,=f,=f,=r,=r,=r," + _REST + ",f,l,f,r,r")
SIXTEEN = tl.constexpr((tl.int32,) * ptx.WORDS)


@triton.jit
def quotient(a, b):
    """a / b to nearest for numbers far from the ends of FP32's range."""
    return tl.inline_asm_elementwise(QUOTIENT, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def constant_over(a, ASM: tl.constexpr):
    """A constant over a, to nearest, within the same limits."""
    return tl.inline_asm_elementwise(ASM, "=f,f", [a], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def about(a, b):
    """a / b to about two ulps."""
    return tl.inline_asm_elementwise(ABOUT, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def larger_halves(a, b):
    """The larger of both halves of a word."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def add_two(a, b, c, d):
    """Two sums at once."""
    return a + c, b + d


@triton.jit
def add_all(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10):
    """Eleven sums at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10


@triton.jit
def extremes_of(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    """Maxima, but minima of the fifth and sixth."""
    most = tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2), tl.maximum(a3, b3)
    return most[0], most[1], most[2], most[3], tl.minimum(a4, b4), tl.minimum(a5, b5), tl.maximum(a6, b6)


@triton.jit
def both_ends(a0, a1, b0, b1):
    """A minimum and a maximum."""
    return tl.minimum(a0, b0), tl.maximum(a1, b1)


@triton.jit
def load_words(at, pitch, LOAD: tl.constexpr):
    """16 words of a thread: of its row, or of four rows that are still to be turned."""
    if LOAD == LOAD_TRANSPOSED:
        return tl.inline_asm_elementwise(LOAD_COLUMNS_OF, IN_COLUMNS, [at, pitch], dtype=SIXTEEN, is_pure=False, pack=1)
    else:
        return tl.inline_asm_elementwise(LOAD_ROWS_OF, IN_ROWS, [at], dtype=SIXTEEN, is_pure=False, pack=1)


@triton.jit
def turned(w, put, take, R: tl.constexpr):
    """Words of a row of the turned tile."""
    return tl.inline_asm_elementwise(
        TURN[R], IN_TURN,
        [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15], put, take],
        dtype=SIXTEEN, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def extremes_in(v):
    """The largest magnitude of four threads' words and, above it, 0x7FFF minus the smallest."""
    return tl.inline_asm_elementwise(
        EXTREMES, IN_EXTREMES,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15]],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def encoded(v, scale, at, E5M2: tl.constexpr):
    """Store the codes of a thread's words."""
    tl.inline_asm_elementwise(
        E5_CODES if E5M2 else E4_CODES, IN_CODES,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15], scale, at],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def described(v, scale, at, inv, few, rest, E5M2: tl.constexpr, STORE: tl.constexpr):
    """The same, and what these words add to the statistics; see ``triton_ptx.element_pass``."""
    full: tl.constexpr = (E5_BOTH if E5M2 else E4_BOTH) if STORE else (E5_SEEN if E5M2 else E4_SEEN)
    return tl.inline_asm_elementwise(
        full, IN_ALL,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15],
         scale, at, inv, few, rest],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def fast_tiles(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, eps, table, SPEC: tl.constexpr, R: tl.constexpr,
    HALVES: tl.constexpr, LOAD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Do every tile of this program; return counts, sums and maxima as ``triton_cast.summary`` does.

    ``COUNTED``: every bit pattern too, but for zeros, in the table of ``triton_bins``; of blocks that are rows, with HALVES 1.
    """
    kind: tl.constexpr = SPEC[0]
    e5m2: tl.constexpr = SPEC[2]
    store: tl.constexpr = SPEC[4] != OUT_NONE
    statistics: tl.constexpr = SPEC[5]
    least_normal: tl.constexpr = 6.103515625e-05 if e5m2 else 0.015625
    f64: tl.constexpr = tl.float64
    r = tl.arange(0, R)[:, None] + tl.zeros([R, 4], tl.int32)
    lane = tl.arange(0, 4)[None, :] + tl.zeros([R, 4], tl.int32)
    none = tl.zeros([R, 4], tl.int32)
    real = none.to(tl.float32)
    wide = none.to(f64)
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
    sx, sx2, sy2, se, se2 = wide, wide, wide, wide, wide
    seen = none  # largest magnitude, and 0x7FFF minus the smallest
    emax, head, log2m, nmse, span = real, real, real, real - INF, real
    amin, small = real + INF, real + INF
    zeros, subnormal, blocks, log2e = none, none, none, none  # two counts below 2^16 in the first and the third
    step = tl.num_programs(0)
    step_row = step // tile_columns
    step_column = step % tile_columns
    tile_row = tl.program_id(0) // tile_columns
    tile_column = tl.program_id(0) % tile_columns
    if HALVES == 1:
        w = load_words(first + (tile_row * down + tile_column * across), pitch, LOAD)
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
        found = extremes_in(v)
        if HALVES == 2:
            found = larger_halves(found, extremes_in(u))
        if kind == KIND_TILE:
            found = tl.reduce(found, None, larger_halves)
        amax = float_of(found << 16)
        zero = amax == 0.0
        a = tl.where(zero, 1.0, tl.maximum(amax, eps))
        scale = constant_over(a, OF_E5M2 if e5m2 else OF_E4M3)
        if SPEC[3] == ROUND_POW2_CEIL:
            scale = float_of(bits_of(scale) & 0x7F800000)
        scale = tl.where(zero, 1.0, scale)
        inv = constant_over(scale, INVERSE)
        at = to + (here_row.to(tl.int64) * (R * HALVES) * columns + here_column * 128)
        if store:
            if kind == KIND_ROW:
                row = here_row * R + r
                lines = inv_out.to(tl.int64) + (here_column.to(tl.int64) * rows + row) * 4
                tl.inline_asm_elementwise(
                    "{ .reg .pred p; setp.eq.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,f,r",
                    [lines, inv, lane],
                    dtype=tl.int32, is_pure=False, pack=1,
                )  # fmt: skip
            elif LOAD == LOAD_TRANSPOSED:
                tl.store(inv_out + here_column.to(tl.int64) * (num_tiles // tile_columns) + here_row, inv)
            else:
                tl.store(inv_out + here_row.to(tl.int64) * tile_columns + here_column, inv)
        if kind == KIND_TILE:
            scale_of_all = scale + real
            inv_of_all = inv + real
        else:
            scale_of_all = scale
            inv_of_all = inv
        if not statistics:
            encoded(v, scale_of_all, at, e5m2)
            if HALVES == 2:
                encoded(u, scale_of_all, at + R * columns, e5m2)
            small = tl.minimum(small, tl.where(zero, INF, amax))
            seen = tl.maximum(seen, found & 0xFFFF)
        else:
            least = 0x7FFF - (found >> 16)
            few = float_of(least << 16) * scale < least_normal
            rest = tl.where(zero, 0x7F80, found & 0xFFFF)
            x1, x2, y2, e1, e2, most, counts, below, nonzero_least = described(
                v, scale_of_all, at, inv_of_all, few.to(tl.int32) + none, rest + none, e5m2, store
            )  # fmt: skip
            if HALVES == 2:
                a1, a2, b2, c1, c2, other_most, other_counts, other_below, other_least = described(
                    u, scale_of_all, at + R * columns, inv_of_all, few.to(tl.int32) + none, rest + none, e5m2, store
                )  # fmt: skip
                x1, x2, y2, e1, e2 = x1 + a1, x2 + a2, y2 + b2, e1 + c1, e2 + c2
                most = tl.maximum(most, other_most)
                counts += other_counts
                below += other_below
                nonzero_least = tl.minimum(nonzero_least, other_least)
            sx += x1.to(f64)
            sx2 += x2.to(f64)
            sy2 += y2.to(f64)
            se += e1.to(f64)
            se2 += e2.to(f64)
            emax = tl.maximum(emax, most)
            zeros += counts
            subnormal += below
            smallest_here = tl.where(few, nonzero_least, least + none)
            if COUNTED:
                outside = ((smallest_here < window) | ((found & 0xFFFF) >= window + WINDOW)) & (zero == 0)
                count_words(v, window + none, outside.to(tl.int32), table.to(tl.int64) + none)
            low = float_of(smallest_here << 16)
            amin = tl.minimum(amin, low)
            span = tl.maximum(span, quotient(amax + real, low))
            seen = tl.maximum(seen, found & 0xFFFF)
            if kind == KIND_ROW:
                signal = tl.sum(x2, axis=1, keep_dims=True)
                noise = tl.sum(e2, axis=1, keep_dims=True)
            else:
                signal, noise = tl.reduce((x2, e2), None, add_two)
            nmse = tl.maximum(nmse, about(noise, tl.maximum(signal, 1.0e-37)))
            head = tl.maximum(head, quotient(amax, inv))
            small = tl.minimum(small, tl.where(zero, INF, amax))
            blocks += tl.where(zero, 1, tl.where(amax < eps, 65536, 0))
            bits = bits_of(inv)
            log2e += (bits >> 23) - 127
            mantissa = float_of((bits & 0x7FFFFF) | 0x3F800000)
            log2m += tl.inline_asm_elementwise(LOG2, "=f,f", [mantissa], dtype=tl.float32, is_pure=True, pack=1)
    if COUNTED:
        stop_window(window + none, table.to(tl.int64) + none, 4 * R)
    part: tl.constexpr = 0.25 if kind == KIND_ROW else 0.25 / R  # a block counts in each of its threads
    num_done = (num_tiles - tl.program_id(0) + step - 1) // step
    if statistics:
        x1, x2, y2, e1, e2, logs, num_zero, zero_codes, below, no_amax, lifted = tl.reduce(
            (sx, sx2, sy2, se, se2, log2e.to(f64) + log2m.to(f64), zeros & 0xFFFF, zeros >> 16, subnormal, blocks & 0xFFFF,
             blocks >> 16),
            None, add_all,
        )  # fmt: skip
        logs = logs * part
        most, headroom, worst, widest, least, smallest, greatest = tl.reduce(
            (emax, head, nmse, span, amin, small + real, seen + none), None, extremes_of
        )  # fmt: skip
    else:
        x1, x2, y2, e1, e2, logs = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        num_zero, zero_codes, below, no_amax, lifted = 0, 0, 0, 0, 0
        most, headroom, worst, widest, least = 0.0, 0.0, 0.0, 0.0, 0.0
        smallest, greatest = tl.reduce((small + real, seen + none), None, both_ends)
    top_seen = tl.where(greatest >= 0x7F80, INF, float_of(greatest << 16))
    return (num_done, x1, x2, y2, e1, e2, logs, num_zero, zero_codes, below, no_amax, lifted, most, headroom, worst, widest,
            least, smallest, top_seen)  # fmt: skip
