# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Work of the fast passes on the 32 elements of a thread, on the GPU: BF16, blocks of four threads or of a program.

What is done with the elements is PTX (``ptx``), what is done once a block is written here. A program is ``[R, 4]``
threads; thread (r, l) holds elements ``32 h + 8 l`` and the next 7 of line r, h = 0..3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu import ptx
from fp8debug.kernels.gpu.count_window import WINDOW, count_words
from fp8debug.kernels.gpu.device import (
    INF,
    LEAST_NORMAL_E4M3,
    LEAST_NORMAL_E5M2,
    LOAD_TRANSPOSED,
    ROUND_POW2_CEIL,
    bits_of,
    float_of,
)
from fp8debug.kernels.gpu.quantize.tile_kernel import OUT_NONE

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
#: By e5m2; with statistics by e5m2, twice whether codes are stored, and four times whether x is summed.
CODES = tl.constexpr({k: ptx.element_pass(bool(k), True, False) for k in (0, 1)})
SEEN = tl.constexpr({k: ptx.element_pass(bool(k & 1), bool(k & 2), True, bool(k & 4)) for k in range(8)})
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
def add_all(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11):
    """Twelve sums at once."""
    low = a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5
    return low[0], low[1], low[2], low[3], low[4], low[5], a6 + b6, a7 + b7, a8 + b8, a9 + b9, a10 + b10, a11 + b11


@triton.jit
def extremes_of(a0, a1, a2, a3, a4, a5, a6, b0, b1, b2, b3, b4, b5, b6):
    """Maxima, but minima of the fifth and sixth."""
    most = tl.maximum(a0, b0), tl.maximum(a1, b1), tl.maximum(a2, b2), tl.maximum(a3, b3)
    return most[0], most[1], most[2], most[3], tl.minimum(a4, b4), tl.minimum(a5, b5), tl.maximum(a6, b6)


@triton.jit
def smaller_and_larger(a0, a1, b0, b1):
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
        CODES[E5M2], IN_CODES,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15], scale, at],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def described(v, scale, at, inv, few, rest, E5M2: tl.constexpr, STORE: tl.constexpr, SUM: tl.constexpr):
    """The same where ``STORE``, and what these words add to the statistics; see ``ptx.element_pass``."""
    return tl.inline_asm_elementwise(
        SEEN[E5M2 + 2 * STORE + 4 * SUM], IN_ALL,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15],
         scale, at, inv, few, rest],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.int32, tl.int32, tl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def nothing_yet(R: tl.constexpr):
    """Statistics of a cast in one thread before its first elements."""
    none = tl.zeros([R, 4], tl.int32)
    real = none.to(tl.float32)
    wide = none.to(tl.float64)
    return (
        wide, wide, wide, wide, wide,  # x, x^2, y^2, err, err^2
        real, real, wide, real - INF, real,  # max err, scaled magnitude, log2 of scale_inv, nmse, amax / amin
        real + INF, none + 0x7F0000,  # amin, BF16 bits of the largest amax and, above them, 0x7FFF minus the smallest's
        none, none, none, wide,  # zeros | codes of zero, small codes, zero | eps blocks, square of log2 of scale_inv
    )  # fmt: skip


@triton.jit
def cast_words(
    found, ends, v, u, lane, at, lower, line, eps, window, table, SPEC: tl.constexpr, LINES: tl.constexpr, HALVES: tl.constexpr,
    COUNTED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Quantize a thread's words, and add to what it has found; return this, and sums of x^2 and err^2.

    Args:
        found: see ``nothing_yet``.
        ends: of the words' block, as ``extremes_in`` returns them.
        v: words.
        u: more words of the same block, whose codes lie ``lower`` bytes on, where ``HALVES`` is 2.
        lane: of the threads that share a scale.
        at: where the codes go.
        lower: see ``u``.
        line: where scale_inv goes.
        eps: of the cast.
        window: see ``count_window``; with ``COUNTED`` alone.
        table: likewise.
        SPEC: the cast; see ``tile_kernel``.
        LINES: a thread has its own ``ends`` and ``line``; else they are the program's.
        HALVES: see ``u``.
        COUNTED: count every bit pattern.
        OWN: also what is the tensor's own, whatever the cast: sums of x and x^2, amin.
    """
    e5m2: tl.constexpr = SPEC[2]
    store: tl.constexpr = SPEC[4] != OUT_NONE
    statistics: tl.constexpr = SPEC[5]
    least_normal: tl.constexpr = LEAST_NORMAL_E5M2 if e5m2 else LEAST_NORMAL_E4M3
    f64: tl.constexpr = tl.float64
    (sx, sx2, sy2, se, se2, emax, head, logs, nmse, span, amin, seen, zeros, subnormal, blocks, squares) = found
    none = lane * 0
    real = none.to(tl.float32)
    amax = float_of(ends << 16)
    zero = amax == 0.0
    a = tl.where(zero, 1.0, tl.maximum(amax, eps))
    scale = constant_over(a, OF_E5M2 if e5m2 else OF_E4M3)
    if SPEC[3] == ROUND_POW2_CEIL:
        scale = float_of(bits_of(scale) & 0x7F800000)
    scale = tl.where(zero, 1.0, scale)
    inv = constant_over(scale, INVERSE)
    if store:
        if LINES:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.eq.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,f,r",
                [line, inv, lane],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.store(line, inv)
    if LINES:
        scale_of_all = scale
        inv_of_all = inv
    else:
        scale_of_all = scale + real
        inv_of_all = inv + real
    top = ends & 0xFFFF
    both = tl.where(zero, 0x7F0000, 0x7FFF0000 - top * 0xFFFF) + none
    if statistics:
        least = 0x7FFF - (ends >> 16)
        few = float_of(least << 16) * scale < least_normal
        rest = tl.where(zero, 0x7F80, top)
        x1, x2, y2, e1, e2, most, counts, below, nonzero_least = described(
            v, scale_of_all, at, inv_of_all, few.to(tl.int32) + none, rest + none, e5m2, store, OWN
        )  # fmt: skip
        if HALVES == 2:
            a1, a2, b2, c1, c2, other_most, other_counts, other_below, other_least = described(
                u, scale_of_all, at + lower, inv_of_all, few.to(tl.int32) + none, rest + none, e5m2, store, OWN
            )  # fmt: skip
            x1, x2, y2, e1, e2 = x1 + a1, x2 + a2, y2 + b2, e1 + c1, e2 + c2
            most = tl.maximum(most, other_most)
            counts += other_counts
            below += other_below
            nonzero_least = tl.minimum(nonzero_least, other_least)
        smallest_here = tl.where(few, nonzero_least, least + none)
        low = float_of(smallest_here << 16)
        if OWN:
            sx += x1.to(f64)
            sx2 += x2.to(f64)
            amin = tl.minimum(amin, low)
        seen = larger_halves(seen, both)
        sy2 += y2.to(f64)
        se += e1.to(f64)
        se2 += e2.to(f64)
        emax = tl.maximum(emax, most)
        zeros += counts
        subnormal += below
        if COUNTED:
            outside = ((smallest_here < window) | (top >= window + WINDOW)) & (zero == 0)
            count_words(v, window + none, outside.to(tl.int32), table.to(tl.int64) + none)
        span = tl.maximum(span, quotient(amax + real, low))
        head = tl.maximum(head, quotient(amax, inv))
        blocks += tl.where(zero, 1, tl.where(amax < eps, 65536, 0))
        bits = bits_of(inv)
        mantissa = float_of((bits & 0x7FFFFF) | 0x3F800000)
        log2m = tl.inline_asm_elementwise(LOG2, "=f,f", [mantissa], dtype=tl.float32, is_pure=True, pack=1)
        # In FP64, or the rounding of a sum would be a spread of equal scales.
        log2 = ((bits >> 23) - 127).to(f64) + log2m.to(f64)
        logs += log2
        squares += log2 * log2
    else:
        encoded(v, scale_of_all, at, e5m2)
        if HALVES == 2:
            encoded(u, scale_of_all, at + lower, e5m2)
        seen = larger_halves(seen, both)
        x2, e2 = real, real
    found = sx, sx2, sy2, se, se2, emax, head, logs, nmse, span, amin, seen, zeros, subnormal, blocks, squares
    return found, x2, e2


@triton.jit
def with_noise(found, signal, noise):
    """Running statistics of a thread, with sums of x^2 and err^2 of a block."""
    (sx, sx2, sy2, se, se2, emax, head, logs, nmse, span, amin, seen, zeros, subnormal, blocks, squares) = found
    nmse = tl.maximum(nmse, about(noise, tl.maximum(signal, 1.0e-37)))
    return sx, sx2, sy2, se, se2, emax, head, logs, nmse, span, amin, seen, zeros, subnormal, blocks, squares


@triton.jit
def in_line(v):
    """Sums over the four threads of a line."""
    return tl.sum(v, axis=1, keep_dims=True)


@triton.jit
def all_found(found, SPEC: tl.constexpr, COPIES: tl.constexpr):
    """Statistics of a cast in one program, of ``COPIES`` threads a block: counts, sums and maxima as ``summary`` does."""
    (sx, sx2, sy2, se, se2, emax, head, logs, nmse, span, amin, seen, zeros, subnormal, blocks, squares) = found
    real = (zeros * 0).to(tl.float32)
    small, seen = float_of((0x7FFF - (seen >> 16)) << 16), seen & 0xFFFF
    if SPEC[5]:
        x1, x2, y2, e1, e2, log2, square, num_zero, zero_codes, below, no_amax, lifted = tl.reduce(
            (sx, sx2, sy2, se, se2, logs, squares, zeros & 0xFFFF, zeros >> 16, subnormal, blocks & 0xFFFF, blocks >> 16),
            None, add_all,
        )  # fmt: skip
        log2 = log2 * (1.0 / COPIES)
        square = square * (1.0 / COPIES)
        most, headroom, worst, widest, least, smallest, greatest = tl.reduce(
            (emax, head, nmse, span, amin, small + real, seen + real.to(tl.int32)), None, extremes_of
        )  # fmt: skip
    else:
        x1, x2, y2, e1, e2, log2, square = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        num_zero, zero_codes, below, no_amax, lifted = 0, 0, 0, 0, 0
        most, headroom, worst, widest, least = 0.0, 0.0, 0.0, 0.0, 0.0
        smallest, greatest = tl.reduce((small + real, seen + real.to(tl.int32)), None, smaller_and_larger)
    top_seen = tl.where(greatest >= 0x7F80, INF, float_of(greatest << 16))
    return (x1, x2, y2, e1, e2, log2, square, num_zero, zero_codes, below, no_amax, lifted, most, headroom, worst, widest, least,
            smallest, top_seen)  # fmt: skip
