# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Counting bit patterns of BF16 values beside other work, on the GPU: in shared memory those of a window of 40 binades.

The PTX is in ``ptx_counters``; the table is that of ``value_counts_kernel``, to which a program adds its window when it is done.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu import ptx_counters as counters
from fp8debug.kernels.gpu.ptx import WORDS

START = tl.constexpr({threads: counters.start(threads) for threads in (256, 512)})
STOP = tl.constexpr({threads: counters.stop(threads) for threads in (256, 512)})
COUNT = tl.constexpr(counters.count(True))
LOOK = tl.constexpr(counters.count(False))
IN_LOOK = tl.constexpr("=r," + ",".join(["r"] * (WORDS + 1)) + ",l")
IN_COUNT = tl.constexpr(IN_LOOK.value + ",r")
SAMPLE = tl.constexpr(counters.sample())
WINDOW = tl.constexpr(counters.WINDOW)
#: Binades of the window above the largest magnitude of the sample.
ABOVE = tl.constexpr(6)
#: Where a sample's next column is, in eights: far from the last, and prime.
STRIDE = tl.constexpr(0x9E3779B1)


@triton.jit
def larger_of(a, b):
    """The larger."""
    return tl.maximum(a, b)


@triton.jit
def start_window(x_ptr, stride, rows, columns, thread, THREADS: tl.constexpr):
    """Clear the window; return its first magnitude, above 0, by a sample of 8 values a thread from all over x.

    ``stride``: of a row, in fours; ``columns``: a multiple of 8.
    """
    tl.inline_asm_elementwise(START[THREADS], "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1)
    at = thread.to(tl.int64)
    place = x_ptr.to(tl.int64) + at * rows // THREADS * (stride * 8) + at * STRIDE % (columns // 8) * 16
    found = tl.inline_asm_elementwise(SAMPLE, "=r,l", [place], dtype=tl.int32, is_pure=False, pack=1)
    top = tl.reduce(found, None, larger_of)
    top = tl.where(top == 0, 127 << 7, top)
    return tl.maximum((((top >> 7) + ABOVE) << 7) - WINDOW, 1)


@triton.jit
def count_words(v, first, outside, table):
    """Count a thread's 16 words; ``outside``: whether some values that are not zero may lie outside the window."""
    tl.inline_asm_elementwise(
        COUNT, IN_COUNT,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15],
         first, table, outside],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def look_and_count(v, first, table):
    """Count a thread's 16 words, of which nothing is known."""
    tl.inline_asm_elementwise(
        LOOK, IN_LOOK,
        [v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7], v[8], v[9], v[10], v[11], v[12], v[13], v[14], v[15], first, table],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def stop_window(first, table, THREADS: tl.constexpr):
    """Add the window to the table."""
    tl.inline_asm_elementwise(STOP[THREADS], "=r,r,l", [first, table], dtype=tl.int32, is_pure=False, pack=1)
