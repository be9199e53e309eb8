# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""The first pass of a cast whose scale no tile can know alone: the largest magnitudes of a tensor, its rows or its columns."""

from __future__ import annotations

import triton
import triton.language as tl

from fp8debug.kernels.triton_cast import (
    KIND_COLUMN,
    KIND_COLUMNS,
    KIND_ROW,
    KIND_ROWS,
    KIND_TENSOR,
    magnitudes,
    per_block,
    within,
)
from fp8debug.kernels.triton_common import float_of, load_quad, split4


@triton.jit
def store_four(at, joined, quad, columns):
    """Store a joined quad of per-column values."""
    v0, v1, v2, v3 = split4(joined)
    tl.store(at, v0, quad * 4 < columns)
    tl.store(at + 1, v1, quad * 4 + 1 < columns)
    tl.store(at + 2, v2, quad * 4 + 2 < columns)
    tl.store(at + 3, v3, quad * 4 + 3 < columns)


@triton.jit
def amax_kernel(
    x_ptr, stride, rows, columns, num_tiles, tile_columns, out, KIND: tl.constexpr, J: tl.constexpr, H: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, LOAD: tl.constexpr, EVEN: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Largest finite magnitudes: KIND_TENSOR ``[programs]``, KIND_ROWS ``[column tiles, rows]``, KIND_COLUMNS the like."""
    j = tl.arange(0, J)[None, None, :, None, None]
    h = tl.arange(0, H)[None, None, None, :, None]
    r = tl.arange(0, R)[None, :, None, None, None]
    at = tl.arange(0, L)[:, None, None, None, None] * 2 + tl.arange(0, 2)[None, None, None, None, :]
    largest = tl.zeros([L, R], tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        tile_row = tile // tile_columns
        tile_column = tile % tile_columns
        row = tile_row * (J * R) + r * J + j
        quad = tile_column * (H * L * 2) + h * (L * 2) + at
        x0, x1, x2, x3, _, _ = load_quad(x_ptr, row, quad, stride, rows, columns, LOAD, EVEN, NATIVE)
        a0, a1, a2, a3 = magnitudes(x0, x1, x2, x3, True)
        if KIND == KIND_ROWS:
            tl.store(out + tile_column * rows + row, float_of(per_block(a0, a1, a2, a3, KIND_ROW, 1)), row < rows)
        elif KIND == KIND_COLUMNS:
            found = float_of(per_block(a0, a1, a2, a3, KIND_COLUMN, 1))
            store_four(out + tile_row * columns + quad * 4, found, quad, columns)
        else:
            found = tl.maximum(tl.maximum(a0, a1), tl.maximum(a2, a3))
            largest = tl.maximum(largest, tl.max(within(found, 1), axis=2))
    if KIND == KIND_TENSOR:
        tl.store(out + tl.program_id(0), float_of(tl.max(largest)))
