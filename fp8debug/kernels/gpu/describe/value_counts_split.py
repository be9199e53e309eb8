# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Casts with one scale for the whole tensor from counts of its BF16 values, as ``value_counts_kernel``, for one tensor by many
programs.

There a program does a cast of a tensor, and many tensors wait for it; here 32 programs share the magnitudes of one that is wanted
at once, and the last of them adds up what they found.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.describe.value_counts_kernel import (
    BINS,
    FIRST,
    NONFINITE,
    TABLE,
    WORDS,
    counts_at,
    effects,
    scale_now,
    store_counts,
    store_reals,
)
from fp8debug.kernels.gpu.device import FLOAT32_MAX, INTERPRETED
from fp8debug.kernels.gpu.quantize.statistics import MAXIMA_AT, NUM_COUNTS, NUM_MAXIMA

#: Programs; each has as many binades, of one sign of the exponent's 256, as its share.
NUM_PROGRAMS = 32
PROGRAMS = tl.constexpr(NUM_PROGRAMS)
CHUNK = tl.constexpr(32768 // NUM_PROGRAMS)
BINADES = tl.constexpr(256 // NUM_PROGRAMS)
#: Casts at most, and FP64 numbers of a program's part of one: 10 sums, a maximum, and from 16 on the counts of its binades.
MAX_CASTS = 3
CASTS = tl.constexpr(MAX_CASTS)
PART = tl.constexpr(32)
PARTS_SIZE = NUM_PROGRAMS * MAX_CASTS * 32
#: Counters of a table: of bit patterns, and of programs that are done.
TABLE_SIZE = TABLE.value + 1
#: Where a scale comes from: no cast, the tensor's amax, a given scale_inv.
NONE, CURRENT, GIVEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)

#: Sums are reduced at once, which the interpreter does an element at a time.
TOGETHER = tl.constexpr(not INTERPRETED)


@triton.jit
def nth(values, n, i: tl.constexpr):
    """A number of a vector whose positions are n."""
    return tl.sum(tl.where(n == i, values, 0.0), axis=0)


@triton.jit
def sums_and_most(a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10):
    """Ten sums and a maximum at once."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8, a9 + b9, tl.maximum(a10, b10)


@triton.jit
def scale_for(amax, given, eps, SPEC: tl.constexpr):
    """Return scale, scale_inv and whether eps lifted it."""
    scale, inv, lifted = scale_now(amax, eps, 1.0, SPEC[1] != 0, SPEC[2])
    if SPEC[0] == GIVEN:
        inv = tl.load(given)
        scale = tl.minimum(tl.div_rn(inv * 0.0 + 1.0, inv), FLOAT32_MAX)
        lifted = lifted & False
    return scale, inv, lifted


@triton.jit
def leave_part(part, magnitude, positive, negative, amax, given, eps, SPEC: tl.constexpr):
    """Leave what a cast does to this program's magnitudes."""
    scale, inv, _ = scale_for(amax, given, eps, SPEC)
    found = effects(magnitude, positive, negative, scale, inv, SPEC[1] != 0)
    n = tl.arange(0, 16)
    if TOGETHER:
        found = tl.reduce(found, 0, sums_and_most)
    else:
        found = (
            tl.sum(found[0]), tl.sum(found[1]), tl.sum(found[2]), tl.sum(found[3]), tl.sum(found[4]), tl.sum(found[5]),
            tl.sum(found[6]), tl.sum(found[7]), tl.sum(found[8]), tl.sum(found[9]), tl.max(found[10]),
        )  # fmt: skip
    p = tl.where(n == 0, found[0], tl.where(n == 1, found[1], tl.where(n == 2, found[2], tl.where(n == 3, found[3], 0.0))))
    p = tl.where(n == 4, found[4], tl.where(n == 5, found[5], tl.where(n == 6, found[6], tl.where(n == 7, found[7], p))))
    p = tl.where(n == 8, found[8], tl.where(n == 9, found[9], tl.where(n == 10, found[10], p)))
    tl.store(part + n, p)


@triton.jit
def join_cast(parts, first, at, numel, amax, amin, given, eps, SPEC: tl.constexpr):
    """Fill a cast's row of words from all programs' parts."""
    _, inv, lifted = scale_for(amax, given, eps, SPEC)
    n = tl.arange(0, 16)
    values = tl.load(parts + tl.arange(0, PROGRAMS)[:, None] * (CASTS * PART) + n[None, :])
    total, most = tl.sum(values, axis=0), tl.max(values, axis=0)
    i64: tl.constexpr = tl.int64
    zeros, nans, infs = tl.load(first + 1), tl.load(first + 2), tl.load(first + 3)
    made, under, subnormal, saturated = nth(total, n, 0), nth(total, n, 1), nth(total, n, 2), nth(total, n, 3)
    store_counts(
        at, numel.to(i64), zeros, nans, infs, made.to(i64), under.to(i64), subnormal.to(i64), saturated.to(i64), amax == 0.0,
        lifted,
    )  # fmt: skip
    tl.store(at.to(tl.pointer_type(tl.float64)) + NUM_COUNTS + n - 4, total, (n > 3) & (n < 10))
    store_reals(at, amax, amin, inv, nth(most, n, 10), nth(total, n, 5), nth(total, n, 9), SPEC[1] != 0)


@triton.jit
def split_kernel(
    table, words, parts, log2_hist, numel, given_a, given_b, given_c, eps_a, eps_b, eps_c, A: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Fill rows 1, 2 and 3 of ``words [4, ROW_WORDS]`` and ``log2_hist [64]``.

    Row 0 has another cast of the tensor, filled already. ``table``, of counts and one counter of the programs that are done,
    is zero again afterwards. ``A``, ``B``, ``C``: (where the
    scale comes from, e5m2, rounding).
    """
    first = words
    reals = words.to(tl.pointer_type(tl.float32)) + MAXIMA_AT
    amax, amin = tl.load(reals), tl.load(reals + NUM_MAXIMA)
    program = tl.program_id(0)
    magnitude = program * CHUNK + tl.arange(0, CHUNK)
    positive, negative = counts_at(table, magnitude)
    tl.store(table + magnitude * 2, tl.zeros([CHUNK], tl.int32))
    tl.store(table + magnitude * 2 + 1, tl.zeros([CHUNK], tl.int32))
    part = parts + program * (CASTS * PART)
    if A[0] != NONE:
        leave_part(part, magnitude, positive, negative, amax, given_a, eps_a, A)
    if B[0] != NONE:
        leave_part(part + PART, magnitude, positive, negative, amax, given_b, eps_b, B)
    if C[0] != NONE:
        leave_part(part + 2 * PART, magnitude, positive, negative, amax, given_c, eps_c, C)
    there = tl.where((magnitude > 0) & (magnitude < NONFINITE), positive + negative, 0.0)
    tl.store(part + 16 + tl.arange(0, BINADES), tl.sum(tl.reshape(there, [BINADES, CHUNK // BINADES]), axis=1))
    tl.debug_barrier()
    if tl.atomic_add(table + TABLE, 1, sem="acq_rel") == PROGRAMS - 1:
        tl.store(table + TABLE, 0)
        if A[0] != NONE:
            join_cast(parts, first, words + WORDS, numel, amax, amin, given_a, eps_a, A)
        if B[0] != NONE:
            join_cast(parts + PART, first, words + 2 * WORDS, numel, amax, amin, given_b, eps_b, B)
        if C[0] != NONE:
            join_cast(parts + 2 * PART, first, words + 3 * WORDS, numel, amax, amin, given_c, eps_c, C)
        field = tl.arange(0, 256)
        counted = tl.load(parts + field // BINADES * (CASTS * PART) + 16 + field % BINADES)
        low = tl.sum(tl.where(field <= FIRST, counted, 0.0), axis=0)
        high = tl.sum(tl.where(field >= FIRST + BINS - 1, counted, 0.0), axis=0)
        bin = tl.arange(0, BINS)
        inner = (bin > 0) & (bin < BINS - 1)
        field = tl.where(inner, bin + FIRST, 0)
        here = tl.load(parts + field // BINADES * (CASTS * PART) + 16 + field % BINADES)
        tl.store(log2_hist + bin, tl.where(inner, here, tl.where(bin == 0, low, high)).to(tl.int64))
