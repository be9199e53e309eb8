# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Rows of words, as kernels left them, join the table's rows by the slots' own merge rules: all of a step in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

#: Numbers of a row that a layout may name, of each kind: as many as the exponent histogram has bins.
NUM_LANES = 64
LANES = tl.constexpr(NUM_LANES)
#: Columns of an item: address of the words, row of the table, number of the layout.
ITEM = tl.constexpr(3)


@triton.jit
def join_kernel(
    items, maps, counts, sums, maxima, minima, counts_width, sums_width, maxima_width, minima_width
):  # fmt: skip
    """Program i joins item i. ``maps [layouts, 4, 64]``: the table's column for each number of a row of words, or -1."""
    at = items + tl.program_id(0) * ITEM
    words = tl.load(at).to(tl.pointer_type(tl.int64))
    row = tl.load(at + 1)
    n = tl.arange(0, LANES)
    columns = maps + tl.load(at + 2) * (4 * LANES) + n

    column = tl.load(columns)
    to = counts + row * counts_width + column
    tl.store(to, tl.load(to, column >= 0, 0) + tl.load(words + n, column >= 0, 0), column >= 0)

    column = tl.load(columns + LANES)
    to = sums + row * sums_width + column
    found = tl.load(words.to(tl.pointer_type(tl.float64)) + n, column >= 0, 0.0)
    tl.store(to, tl.load(to, column >= 0, 0.0) + found, column >= 0)

    reals = words.to(tl.pointer_type(tl.float32)) + n
    column = tl.load(columns + 2 * LANES)
    to = maxima + row * maxima_width + column
    tl.store(to, tl.maximum(tl.load(to, column >= 0, 0.0), tl.load(reals, column >= 0, 0.0)), column >= 0)

    column = tl.load(columns + 3 * LANES)
    to = minima + row * minima_width + column
    tl.store(to, tl.minimum(tl.load(to, column >= 0, 0.0), tl.load(reals, column >= 0, 0.0)), column >= 0)
