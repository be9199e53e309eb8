# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The kernel around the fast pass: what it found as finished slots, the safe pass where it must, and the join of all programs."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.gpu.device import FLOAT32_MAX, INF, LOAD_TRANSPOSED, MAX_E4M3, MAX_E5M2, scale_of
from fp8debug.kernels.gpu.quantize.fast_blocks import block_tiles
from fp8debug.kernels.gpu.quantize.fast_tiles import fast_tiles
from fp8debug.kernels.gpu.quantize.statistics import finish_row, joined
from fp8debug.kernels.gpu.quantize.tile_cast import KIND_NONE, KIND_ROW, KIND_TILE, SAFE_ABOVE, SAFE_BELOW, one_of, summary
from fp8debug.kernels.gpu.quantize.tile_kernel import all_tiles

# Amaxes between these leave every quotient of the fast pass far from the ends of FP32's range.
NEAREST = tl.constexpr(2.0**-100)
FARTHEST = tl.constexpr(2.0**100)


@triton.jit
def scale_inv_for(amax, eps, SPEC: tl.constexpr):
    """The scale_inv of a block of that amax, which is above 0."""
    _, inv, _ = scale_of(amax, eps, 1.0, SPEC[2], SPEC[3])
    return inv


@triton.jit
def safe_part(c, s, m, elements, num_blocks, first, eps, SPEC: tl.constexpr):
    """The finished part ``[32]`` of what ``summary`` returns."""
    f64: tl.constexpr = tl.float64
    top: tl.constexpr = MAX_E5M2 if SPEC[2] else MAX_E4M3
    n = tl.arange(0, 32)
    zeros, codes, smallest, amax = one_of(c, 0), one_of(c, 4), (-one_of(m, 6)).to(tl.float32), one_of(m, 0).to(tl.float32)
    p = tl.where(n == 0, elements.to(f64), tl.where(n == 1, zeros, tl.where(n == 2, one_of(c, 1), 0.0)))
    p = tl.where(n == 3, one_of(c, 2), tl.where(n == 4, one_of(c, 3), tl.where(n == 5, elements.to(f64) - codes - zeros, p)))
    p = tl.where(n == 6, codes - one_of(c, 5), tl.where(n == 7, one_of(c, 6), tl.where(n == 8, num_blocks.to(f64), p)))
    p = tl.where(n == 9, one_of(c, 7), tl.where(n == 10, one_of(s, 0), tl.where(n == 11, first.to(f64), p)))
    p = tl.where(n == 12, one_of(s, 1), tl.where(n == 13, one_of(s, 2), tl.where(n == 14, one_of(s, 3), p)))
    p = tl.where(n == 15, one_of(s, 4), tl.where(n == 16, one_of(s, 5), tl.where(n == 17, one_of(s, 6), p)))
    p = tl.where(n == 18, one_of(s, 7), tl.where(n == 19, one_of(m, 2), p))
    none = smallest == INF
    inf = tl.full([], INF, tl.float32)
    inv_max = tl.where(none, -inf, scale_inv_for(tl.where(none, 1.0, amax), eps, SPEC))
    inv_min = tl.where(none, inf, scale_inv_for(tl.where(none, 1.0, smallest), eps, SPEC))
    head = tl.minimum(tl.div_rn(one_of(m, 3).to(tl.float32), tl.full([], top, tl.float32)), FLOAT32_MAX)
    p = tl.where(n == 20, amax.to(f64), tl.where(n == 21, one_of(m, 1), tl.where(n == 22, inv_max.to(f64), p)))
    p = tl.where(n == 23, tl.where(none, -inf, head).to(f64), tl.where(n == 24, tl.where(none, -inf.to(f64), one_of(m, 4)), p))
    return tl.where(n == 25, one_of(m, 5), tl.where(n == 26, one_of(m, 7), tl.where(n == 27, -inv_min.to(f64), p)))


@triton.jit
def is_beyond(found, STATISTICS: tl.constexpr):
    """Say whether the fast pass, of which ``all_found`` says this, left the range in which it is exact."""
    _, x2, y2, _, _, _, _, _, _, _, _, _, most, _, _, widest, _, smallest, amax = found
    if STATISTICS:
        bad = (amax < SAFE_ABOVE) == 0
        bad = bad | (most > SAFE_ABOVE) | ((most > 0.0) & (most < SAFE_BELOW * 0.0625)) | (smallest < SAFE_BELOW)
        return bad | (widest > FLOAT32_MAX) | (y2 < 0.25 * x2) | ((x2 == x2) == 0)
    else:
        return ((amax < FARTHEST) == 0) | (smallest < NEAREST)


@triton.jit
def fast_part(found, elements, num_blocks, first, eps, SPEC: tl.constexpr, COPIES: tl.constexpr):
    """The finished part ``[32]`` of what ``all_found`` says of a cast; see statistics.

    ``COPIES``: threads in which a block counts.
    """
    f64: tl.constexpr = tl.float64
    top: tl.constexpr = MAX_E5M2 if SPEC[2] else MAX_E4M3
    (x1, x2, y2, e1, e2, log2, square, num_zero, zero_codes, below, no_amax, lifted, most, headroom, worst, widest, least,
     smallest, amax) = found  # fmt: skip
    n = tl.arange(0, 32)
    counts = tl.where(n == 0, elements, tl.where(n == 1, num_zero, tl.where(n == 5, zero_codes - num_zero, 0)))
    counts = tl.where(n == 6, below - zero_codes, tl.where(n == 8, num_blocks, tl.where(n == 11, first.to(tl.int32), counts)))
    p = counts.to(f64)
    share: tl.constexpr = 1.0 / COPIES
    p = tl.where(n == 9, no_amax.to(f64) * share, tl.where(n == 10, lifted.to(f64) * share, p))
    p = tl.where(n == 12, x1, tl.where(n == 13, x2, tl.where(n == 14, y2, p)))
    p = tl.where(n == 15, (x2 + y2 - e2) * 0.5, tl.where(n == 16, e1, tl.where(n == 17, e2, tl.where(n == 18, log2, p))))
    p = tl.where(n == 19, square, p)
    inf = tl.full([], INF, tl.float32)
    none = smallest == INF
    inv_max, inv_min = tl.where(none, -inf, scale_inv_for(amax, eps, SPEC)), scale_inv_for(smallest, eps, SPEC)
    extreme = tl.where(n == 20, amax, tl.where(n == 21, most, tl.where(n == 22, inv_max, -inf)))
    extreme = tl.where(n == 23, tl.where(none, -inf, tl.div_rn(headroom, tl.full([], top, tl.float32))), extreme)
    extreme = tl.where(n == 24, tl.where(none, -inf, worst), tl.where(n == 25, widest, extreme))
    extreme = tl.where(n == 26, -least, tl.where(n == 27, tl.where(none, -inf, -inv_min), extreme))
    return tl.where(n < 20, p, extreme.to(f64))


@triton.jit
def join_parts(partials, words, tickets, behind, words_b, BOTH: tl.constexpr):
    """Join 32 parts in the last of their programs, and what these come to in the last of all: the same bits in every run.

    ``BOTH``: those of a second cast too, ``behind`` numbers on.
    """
    n = tl.arange(0, 32)
    num_groups = (tl.num_programs(0) + 31) // 32
    group = tl.program_id(0) // 32
    size = tl.minimum(32, tl.num_programs(0) - group * 32)
    casts = tl.minimum(tl.num_programs(0), 1) * (1 + BOTH)
    tl.debug_barrier()
    if tl.atomic_add(tickets + 1 + group, 1, sem="acq_rel") == size - 1:
        tl.store(tickets + 1 + group, 0)
        for i in range(0, casts):
            total, most = joined(partials + i * behind, group * 32, size, 32)
            tl.store(partials + i * behind + (tl.num_programs(0) + group) * 32 + n, tl.where(n < 20, total, most))
        tl.debug_barrier()
        if tl.atomic_add(tickets, 1, sem="acq_rel") == num_groups - 1:
            tl.store(tickets, 0)
            for i in range(0, casts):
                total, most = joined(partials + i * behind, tl.num_programs(0), num_groups, 32)
                finish_row(tl.where(i == 0, words.to(tl.int64), words_b.to(tl.int64)).to(words.dtype), total, most)


@triton.jit
def fast_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, partials, data, inv_out, eps, words, tickets, table,
    SPEC: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, LOAD: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """x ``[rows, columns]`` of whole tiles -> data, scale_inv, and with statistics finished parts ``[programs, 32]``.

    The last programs join the parts to a row of ``slot_rows``, unless that is no address: then somebody else does. ``tickets``
    are zero between launches.
    """
    nothing: tl.constexpr = (KIND_NONE, 0, 0, 0, 0, 0, 0)
    statistics: tl.constexpr = SPEC[5]
    if SPEC[0] == KIND_TILE and statistics and LOAD != LOAD_TRANSPOSED:
        num_done, found = block_tiles(
            x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, eps, table, SPEC, COUNTED
        )  # fmt: skip
    else:
        num_done, found = fast_tiles(
            x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, eps, table, SPEC, R, HALVES, LOAD, COUNTED
        )  # fmt: skip
    bad = is_beyond(found, statistics)
    if not statistics:
        if bad:
            tl.debug_barrier()  # the safe pass writes the same addresses
            all_tiles(
                x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, inv_out, eps, 1.0, data, inv_out, inv_out,
                0.0, 1.0, data, inv_out, inv_out, 0.0, 1.0, partials, SPEC, nothing, nothing, HALVES, 4, R, 4, LOAD, True, True,
                False, False, True, True, False, False,
            )  # fmt: skip
    else:
        elements = num_done * (R * HALVES * 128)
        num_blocks = num_done * (R if SPEC[0] == KIND_ROW else 1)
        first = tl.program_id(0) == 0
        p = fast_part(found, elements, num_blocks, first, eps, SPEC, 4 if SPEC[0] == KIND_ROW else 4 * R)
        if bad:
            tl.debug_barrier()
            amaxes, amins, zeros, nans, infs, acc, _, _ = all_tiles(
                x_ptr, stride, rows, columns, num_tiles, tile_columns, data, inv_out, inv_out, eps, 1.0, data, inv_out, inv_out,
                0.0, 1.0, data, inv_out, inv_out, 0.0, 1.0, partials, SPEC, nothing, nothing, HALVES, 4, R, 4, LOAD, True, True,
                True, False, True, True, False, False,
            )  # fmt: skip
            c, s, m = summary(amaxes, amins, zeros, nans, infs, acc, SPEC[0])
            p = safe_part(c, s, m, elements, num_blocks, first, eps, SPEC)
        tl.store(partials + tl.program_id(0) * 32 + tl.arange(0, 32), p)
        if words.to(tl.int64) != 0:
            join_parts(partials, words, tickets, 0, words, False)
