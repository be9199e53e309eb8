# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""One persistent kernel for the three GEMMs: c ``[M, N]`` = a ``[M, K]`` @ b ``[N, K]``.T, both contracted last.

FP8 products are summed on the tensor core over ``BK`` = 128 elements of K, about 14 significant bits, then multiplied by
both scales and added to FP32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). ``FAST`` leaves the sum in the tensor
core over all of K, which only operands with one scale per row allow.
"""

from __future__ import annotations

import triton
import triton.language as tl

# How an operand is scaled: per row and 128 of K, per 128 rows and 128 of K, per row over all of K, or by one scale, which the
# kernel takes for that of every row.
SCALE_TILES = tl.constexpr(0)
SCALE_BLOCKS = tl.constexpr(1)
SCALE_ROWS = tl.constexpr(2)
SCALE_TENSOR = tl.constexpr(3)


@triton.jit
def scale_column(scale, rows, k, limit, stride_row, stride_k, KIND: tl.constexpr):
    """Return the decode factors of some rows for the k-th 128 of K."""
    if KIND == SCALE_BLOCKS:
        return tl.load(scale + (rows // 128) * stride_row + k * stride_k, rows < limit, 0.0)
    else:
        return tl.load(scale + rows * stride_row + k * stride_k, rows < limit, 0.0)


@triton.jit
def gemm_kernel(
    a_desc, b_desc, c, a_scale, b_scale, M, N, K, stride_c, a_stride_row, a_stride_k, b_stride_row, b_stride_k,
    A_KIND: tl.constexpr, B_KIND: tl.constexpr, FAST: tl.constexpr, ACCUMULATE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles are walked in groups of ``GROUP`` tile rows, so that operands stay in the L2."""
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        group = tile // (GROUP * tiles_n)
        height = tl.minimum(tiles_m - group * GROUP, GROUP)
        inside = tile % (GROUP * tiles_n)
        start_m = (group * GROUP + inside % height) * BM
        start_n = (inside // height) * BN
        rows = start_m + tl.arange(0, BM)
        columns = start_n + tl.arange(0, BN)
        total = tl.zeros([BM, BN], tl.float32)
        for k in range(steps):
            a = a_desc.load([start_m, k * BK])
            b = b_desc.load([start_n, k * BK])
            if FAST:
                total = tl.dot(a, b.T, total)
            else:
                part = tl.dot(a, b.T)
                if A_KIND == SCALE_ROWS:
                    total += part
                else:
                    left = scale_column(a_scale, rows, k, M, a_stride_row, a_stride_k, A_KIND)
                    if B_KIND == SCALE_BLOCKS and BN <= 128:
                        left = left * tl.load(b_scale + (start_n // 128) * b_stride_row + k * b_stride_k)
                        total += part * left[:, None]
                    else:
                        right = scale_column(b_scale, columns, k, N, b_stride_row, b_stride_k, B_KIND)
                        total += part * left[:, None] * right[None, :]
        if A_KIND == SCALE_ROWS:
            left = scale_column(a_scale, rows, 0, M, a_stride_row, a_stride_k, A_KIND)
            right = scale_column(b_scale, columns, 0, N, b_stride_row, b_stride_k, B_KIND)
            total = total * left[:, None] * right[None, :]
        at = c + rows[:, None].to(tl.int64) * stride_c + columns[None, :]
        mask = (rows[:, None] < M) & (columns[None, :] < N)
        if ACCUMULATE:
            total += tl.load(at, mask, 0.0)
        tl.store(at, total.to(c.dtype.element_ty), mask)
