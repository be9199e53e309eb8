# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The exponent histogram in the pass that reads the tensor: one private column of counters per thread in shared memory.

Bin b of a thread lies at ``b * 128 + lane * 4`` of its warp's 8 KiB, so the 32 lanes of a warp never meet in a bank, and
the exponent field of a BF16 word is already ``128 * exponent``. Counts are integers: the same in any order. Zeros are
counted in the first bin and NaN and Inf in the last; the reduction takes them out again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.triton_common import bits_of
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS

#: Programs that count have this many threads.
HISTOGRAM_WARPS = 4
THREADS = tl.constexpr(32 * HISTOGRAM_WARPS)
BINS = tl.constexpr(NUM_BINS)
FIRST = tl.constexpr(FIRST_LOG2 + 127)  # exponent field of the first bin

_START = tl.constexpr(
    ".shared .align 16 .b8 fp8debug_counts[32768];\n"
    "{ .reg .u32 a, t, n; .reg .pred p; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts; shl.b32 t, t, 2; add.u32 a, a, t;"
    " mov.u32 n, 0; FP8DEBUG_ZERO: st.shared.u32 [a], 0; add.u32 a, a, 512; add.u32 n, n, 1; setp.lt.u32 p, n, 64;"
    " @p bra FP8DEBUG_ZERO; bar.sync 0; mov.u32 $0, n; }"
)
_COUNT_ONE = (
    " shr.u32 e, ${0}, 16; and.b32 e, e, 32640; max.u32 e, e, {low}; min.u32 e, e, {high}; add.u32 e, e, a;"
    " red.shared.add.u32 [e+-{low}], 1;"
)
_COUNT = tl.constexpr(
    "{ .reg .u32 a, t, e; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts; shl.b32 e, t, 8; and.b32 e, e, 24576;"
    " and.b32 t, t, 31; shl.b32 t, t, 2; add.u32 a, a, t; add.u32 a, a, e;"
    + "".join(
        _COUNT_ONE.format(q, low=(FIRST_LOG2 + 127) * 128, high=(FIRST_LOG2 + 127 + NUM_BINS - 1) * 128) for q in (1, 2, 3, 4)
    )
    + " mov.u32 $0, 0; }"
)
# Thread t adds up bin t % 64 of two warps, starting at its own lane so that the warp's loads meet in no bank.
_STOP = tl.constexpr(
    "{ .reg .u32 a, t, n, s, v, w, c; .reg .pred p; bar.sync 0; mov.u32 t, %tid.x; mov.u32 a, fp8debug_counts;"
    " and.b32 v, t, 63; shl.b32 v, v, 7; add.u32 a, a, v; shr.u32 v, t, 6; shl.b32 v, v, 14; add.u32 a, a, v;"
    " mov.u32 n, 0; mov.u32 s, 0; FP8DEBUG_SUM: add.u32 v, n, t; and.b32 v, v, 31; shl.b32 v, v, 2; add.u32 v, v, a;"
    " ld.shared.u32 w, [v]; ld.shared.u32 c, [v+8192]; add.u32 s, s, w; add.u32 s, s, c; add.u32 n, n, 1;"
    " setp.lt.u32 p, n, 32; @p bra FP8DEBUG_SUM; mov.u32 $0, s; }"
)


@triton.jit
def start_histogram(HIST: tl.constexpr, NATIVE: tl.constexpr):
    """Clear the counters."""
    if HIST and NATIVE:
        lane = tl.arange(0, THREADS)
        tl.inline_asm_elementwise(_START, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_exponents(out, x0, x1, x2, x3, NATIVE: tl.constexpr):
    """Count four values per element; without native FP8 into ``out``, this program's ``[THREADS]`` of device memory."""
    if NATIVE:
        b0, b1, b2, b3 = bits_of(x0), bits_of(x1), bits_of(x2), bits_of(x3)
        tl.inline_asm_elementwise(_COUNT, "=r,r,r,r,r", [b0, b1, b2, b3], dtype=tl.int32, is_pure=False, pack=1)
    else:
        count_plain(out, x0)
        count_plain(out, x1)
        count_plain(out, x2)
        count_plain(out, x3)


@triton.jit
def count_plain(out, x):
    """Count in device memory."""
    field = (bits_of(x) >> 23) & 0xFF
    tl.atomic_add(out + tl.minimum(tl.maximum(field - FIRST, 0), BINS - 1), tl.full(x.shape, 1, tl.int32))


@triton.jit
def store_histogram(out, NATIVE: tl.constexpr):
    """Write this program's ``[THREADS]`` sums."""
    if NATIVE:
        lane = tl.arange(0, THREADS)
        tl.store(out + lane, tl.inline_asm_elementwise(_STOP, "=r,r", [lane], dtype=tl.int32, is_pure=False, pack=1))
