# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Scaled GEMMs on the GPU from two quantized operands; importable only where Triton is.

The twin of ``reference.gemm`` for operands in FP8. Both operands must be contracted along their contiguous dimension, as
``quantize(layout=...)`` stores them: input, grad_output and fprop's weight by rows, the other three by columns.

    backend "triton"   own kernel: promotion to FP32 every 128 of K, any M and N, K padded to 16
    backend "cublas"   torch's ``F.scaled_mm`` on Hopper: blockwise, per row or per tensor, sizes divisible as ``fastest`` asks

One persistent kernel for the three GEMMs: c ``[M, N]`` = a ``[M, K]`` @ b ``[N, K]``.T, both contracted last.

FP8 products are summed on the tensor core over ``BK`` = 128 elements of K, about 14 significant bits, then multiplied by
both scales and added to FP32 registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). ``FAST`` leaves the sum in the tensor
core over all of K, which only operands with one scale per row allow.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fp8debug.errors import UsageError
from fp8debug.formats import TRANSPOSED
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.launcher import PlanCache, eager
from fp8debug.kernels.gpu.quantize.quantize import parse
from fp8debug.kernels.gpu.quantize.tiling import is_e5m2, num_sms
from fp8debug.recipes import Cast
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, Quantized

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


BLOCK_K = 128
#: Results that cuBLAS's GEMMs of two FP8 operands have.
CUBLAS_DTYPES = (torch.bfloat16, torch.float32)
#: Tile, warps, stages, programs per multiprocessor, tile rows of a group and registers of a thread of the own kernel.
BLOCK_M, BLOCK_N, WARPS, STAGES, PER_SM, GROUP, REGISTERS = 64, 128, 4, 3, 3, 8, 168
#: M * N * K below which the own kernel is faster than cuBLAS's with scales per row; see docs/lab/performance.md.
ROWWISE_PRODUCTS = 2**32
#: Scale kinds of a whole row or tensor; the kernel reads a tensor's one scale as every row's.
_LINES = (SCALE_ROWS.value, SCALE_TENSOR.value)
#: Scale kinds by granularity, of an operand that is contracted last.
_KINDS: dict[str, int] = {
    "1x128": SCALE_TILES.value,
    "128x128": SCALE_BLOCKS.value,
    "rowwise": SCALE_ROWS.value,
    "tensorwise": SCALE_TENSOR.value,
}


def _turned(q: Quantized, cast: Cast, rows_contract: bool) -> tuple[Tensor, Tensor, int]:
    """Return (data, scale_inv, scale kind) turned so that the contracted dimension is last.

    Raises:
        UsageError: a granularity whose blocks this GEMM cannot promote with.
    """
    data, scale_inv = q
    if rows_contract:
        data, scale_inv = data.t(), scale_inv.t()
    granularity = TRANSPOSED[cast.granularity] if rows_contract else cast.granularity
    if granularity not in _KINDS:
        raise UsageError(
            f"no FP8 GEMM for an operand quantized {cast}: scales must be per row, or per 128 of the contracted dimension"
        )
    return data, scale_inv, _KINDS[granularity]


def _aligned(data: Tensor) -> Tensor:
    """Return data as the tensor memory accelerator reads it: contiguous along the last dimension, rows at 16 bytes."""
    if data.shape[1] % 16:
        padded = data.new_empty(data.shape[0], -(-data.shape[1] // 16) * 16)
        padded.view(torch.uint8)[:, data.shape[1] :] = 0
        padded[:, : data.shape[1]] = data
        return padded
    if data.stride(1) != 1 or data.stride(0) % 16 or data.data_ptr() % 16:
        return data.contiguous()
    return data


def _scaled_mm_now(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_kind: int, b_kind: int, dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[0], dtype=dtype)
    _launch(out, a, b, a_scale, b_scale, a_kind, b_kind, fast_accum, False)
    return out


_scaled_mm = torch.library.custom_op("fp8debug::scaled_mm", _scaled_mm_now, mutates_args=())


@_scaled_mm.register_fake
def _(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_kind: int, b_kind: int, dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


@torch.library.custom_op("fp8debug::scaled_mm_add", mutates_args=("out",))
def _scaled_mm_add(
    out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, a_kind: int, b_kind: int, fast_accum: bool
) -> None:
    _launch(out, a, b, a_scale, b_scale, a_kind, b_kind, fast_accum, True)


def _launch(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_kind: int,
    b_kind: int,
    fast_accum: bool,
    accumulate: bool,
) -> None:
    m, n, k = a.shape[0], b.shape[0], a.shape[1]
    if not (m and n):
        return
    if not k:
        if not accumulate:
            out.zero_()
        return
    a, b = _aligned(a), _aligned(b)
    block_m, block_n = (32, 32) if INTERPRETED else (BLOCK_M, BLOCK_N)
    a_kind, a_strides = _rows_of(a_scale, a_kind)
    b_kind, b_strides = _rows_of(b_scale, b_kind)
    tiles = -(-m // block_m) * -(-n // block_n)
    gemm_kernel[(min(tiles, num_sms(a.device) * PER_SM),)](
        TensorDescriptor.from_tensor(a, [block_m, BLOCK_K]),
        TensorDescriptor.from_tensor(b, [block_n, BLOCK_K]),
        out, a_scale, b_scale, m, n, k, out.stride(0), *a_strides, *b_strides, a_kind, b_kind, fast_accum,
        accumulate, block_m, block_n, BLOCK_K, GROUP, num_warps=WARPS, num_stages=STAGES, maxnreg=REGISTERS,
    )  # fmt: skip


def _rows_of(scale: Tensor, kind: int) -> tuple[int, tuple[int, ...]]:
    """Return the kernel's scale kind and strides: a tensor's one scale is that of every row."""
    return (SCALE_ROWS.value, (0, 0)) if kind == SCALE_TENSOR.value else (kind, scale.stride())


def gemm(
    which: Gemm,
    first: tuple[Quantized, Cast],
    second: tuple[Quantized, Cast],
    *,
    dtype: torch.dtype = torch.bfloat16,
    fast_accum: bool = False,
    out: Tensor | None = None,
    backend: str = "triton",
) -> Tensor:
    """One GEMM of a Linear from quantized operands.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand and its cast.
        second: right operand and its cast.
        dtype: of the result, BF16, FP16 or FP32.
        fast_accum: leave sums in the tensor core over all of K; needs one scale per row or tensor.
        out: FP32 gradient to add to, in place; ``dtype`` is then its own.
        backend: "triton" or "cublas".

    Returns:
        output ``[M, N]``, grad_input ``[M, K]`` or grad_weight ``[N, K]``; ``out`` if given.

    Raises:
        UsageError: scales or shapes that the backend cannot take.
    """
    roles = OPERANDS[which]
    a, a_scale, a_kind = _turned(*first, (which, roles[0]) in CONTRACTS_ROWS)
    b, b_scale, b_kind = _turned(*second, (which, roles[1]) in CONTRACTS_ROWS)
    if (a_kind in _LINES) != (b_kind in _LINES) or (fast_accum and a_kind not in _LINES):
        raise UsageError(
            f"no FP8 GEMM of {first[1]} by {second[1]}{' with fast_accum' if fast_accum else ''}:"
            " both operands need scales per 128 of the contracted dimension, or both per row or tensor"
        )
    if backend == "cublas":
        product = _cublas(a, a_scale, a_kind, b, b_scale, b_kind, dtype if out is None else out.dtype, fast_accum)
        return product if out is None else out.add_(product)
    if out is None:
        run_it = _scaled_mm_now if eager(a) else _scaled_mm
        found: Tensor = run_it(a, b, a_scale, b_scale, a_kind, b_kind, dtype, fast_accum)
        return found
    _scaled_mm_add(out, a, b, a_scale, b_scale, a_kind, b_kind, fast_accum)
    return out


@cache
def _recipes() -> dict[int, list[int]]:
    from torch.nn.functional import ScalingType

    return {
        SCALE_TILES.value: [ScalingType.BlockWise1x128.value],
        SCALE_BLOCKS.value: [ScalingType.BlockWise128x128.value],
        SCALE_ROWS.value: [ScalingType.RowWise.value],
        SCALE_TENSOR.value: [ScalingType.TensorWise.value],
    }


def _outer_major(scale: Tensor, kind: int) -> Tensor:
    """Return scales as cuBLAS wants them: 1x128 with the rows contiguous, 128x128 with blocks of K padded to 4.

    Those of rows, and the one of a tensor, are a column with strides of 1, for which ``contiguous`` alone does not care.
    """
    if kind == SCALE_TILES.value:
        return scale if scale.stride(0) == 1 else scale.t().contiguous().t()
    if kind == SCALE_BLOCKS.value and scale.shape[1] % 4 == 0:
        return (scale if scale.is_contiguous() else scale.contiguous()).t()
    if kind == SCALE_BLOCKS.value:
        padded = scale.new_zeros(scale.shape[0], -(-scale.shape[1] // 4) * 4)
        padded[:, : scale.shape[1]] = scale
        return padded.t()
    return scale.reshape(-1).contiguous().unsqueeze(1)


def _cublas(
    a: Tensor, a_scale: Tensor, a_kind: int, b: Tensor, b_scale: Tensor, b_kind: int, dtype: torch.dtype, fast_accum: bool
) -> Tensor:
    scales, recipes = (_outer_major(a_scale, a_kind), _outer_major(b_scale, b_kind)), _recipes()
    return _multiply(_aligned(a), _aligned(b).t(), *scales, recipes[a_kind], recipes[b_kind], dtype, fast_accum)


def _multiply(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    a_recipe: list[int],
    b_recipe: list[int],
    dtype: torch.dtype,
    fast_accum: bool = False,
) -> Tensor:
    """Return what ``nn.functional.scaled_mm`` would, which prepares the same lists at every call."""
    product: Tensor = torch._scaled_mm_v2(a, b, [a_scale], a_recipe, [], [b_scale], b_recipe, [], None, dtype, (), fast_accum)
    return product


class PreparedGemm:
    """A GEMM by cuBLAS for operands of one layout, for which nothing has to be asked any more."""

    def __init__(self, which: Gemm, first: tuple[Quantized, Cast], second: tuple[Quantized, Cast], dtype: torch.dtype) -> None:
        self._turned = [(which, role) in CONTRACTS_ROWS for role in OPERANDS[which]]
        self._kinds = [_turned(*o, t)[2] for o, t in zip((first, second), self._turned, strict=True)]
        self._recipes = [_recipes()[kind] for kind in self._kinds]
        self._dtype = dtype

    def __call__(self, first: Quantized, second: Quantized) -> Tensor:
        """Return the product."""
        (a, a_scale), (b, b_scale) = first, second
        if self._turned[0]:
            a, a_scale = a.t(), a_scale.t()
        if self._turned[1]:
            b_scale = b_scale.t()
        else:
            b = b.t()
        a_scale, b_scale = _outer_major(a_scale, self._kinds[0]), _outer_major(b_scale, self._kinds[1])
        a_recipe, b_recipe = self._recipes
        return _multiply(a, b, a_scale, b_scale, a_recipe, b_recipe, self._dtype)


_PREPARED: PlanCache[PreparedGemm] = PlanCache()


def _layout_of(which: Gemm, first: tuple[Quantized, Cast], second: tuple[Quantized, Cast], dtype: torch.dtype) -> Any:
    (a, _), (b, _) = first[0], second[0]
    aligned = (a.data_ptr() | b.data_ptr()) % 16 == 0
    casts = id(first[1]), id(second[1])
    return (which, casts, a.shape, a.stride(), b.shape, b.stride(), a.dtype, b.dtype, a.device, dtype, aligned)


def prepared(
    which: Gemm, first: tuple[Quantized, Cast], second: tuple[Quantized, Cast], dtype: torch.dtype
) -> PreparedGemm | None:
    """Return what :func:`prepare` made for operands like these."""
    return _PREPARED.get(_layout_of(which, first, second, dtype))


def prepare(which: Gemm, first: tuple[Quantized, Cast], second: tuple[Quantized, Cast], dtype: torch.dtype, backend: str) -> None:
    """Keep how operands like these are multiplied with promotion, where cuBLAS takes them as they lie."""
    a, b = ((q.data.t() if (which, role) in CONTRACTS_ROWS else q.data)
            for (q, _), role in zip((first, second), OPERANDS[which], strict=True))  # fmt: skip
    if backend == "cublas" and all(_aligned(data) is data for data in (a, b)):
        plan = PreparedGemm(which, first, second, dtype)
        _PREPARED.keep(_layout_of(which, first, second, dtype), plan, first[1], second[1])


def supports(a: Cast | str, b: Cast | str) -> bool:
    """Return whether the own kernel takes operands of these casts, whichever the GEMM; else ``reference.gemm`` does."""
    names = [(parse(c) if isinstance(c, str) else c).granularity for c in (a, b)]
    lines = {"tensorwise", "rowwise", "columnwise"}
    blocks = {"1x128", "128x1", "128x128"}
    return set(names) <= lines or set(names) <= blocks


def fastest(
    which: Gemm, first: tuple[Quantized, Cast], second: tuple[Quantized, Cast], dtype: torch.dtype, fast_accum: bool = False
) -> str:
    """Return the backend that is faster among those that take these operands, and correct; see docs/lab/performance.md.

    cuBLAS has blockwise GEMMs on Hopper alone, of whole blocks, and none of two E5M2 operands; with one scale a row or tensor
    it takes sizes divisible by 16, and for few products the own kernel is faster where rows have scales. ``fast_accum`` is
    one sum over all of the contracted dimension, which cuBLAS splits where a result has few tiles.
    """
    device = first[0].data.device
    if fast_accum or not hasattr(torch.nn.functional, "scaled_mm") or torch.cuda.get_device_capability(device) != (9, 0):
        return "triton"
    roles = OPERANDS[which]
    a, _, a_kind = _turned(*first, (which, roles[0]) in CONTRACTS_ROWS)
    b, _, b_kind = _turned(*second, (which, roles[1]) in CONTRACTS_ROWS)
    if (is_e5m2(first[1]) and is_e5m2(second[1])) or dtype not in CUBLAS_DTYPES or not (a.numel() and b.numel()):
        return "triton"
    if a_kind == b_kind and a_kind in _LINES:
        takes = not any(size % 16 for size in (*a.shape, *b.shape))
        pays = a_kind == SCALE_TENSOR.value or a.shape[0] * b.numel() >= ROWWISE_PRODUCTS
        return "cublas" if takes and pays else "triton"
    blockwise = a_kind == SCALE_TILES.value and b_kind in (SCALE_TILES.value, SCALE_BLOCKS.value)
    return "cublas" if blockwise and not any(size % 128 for size in (*a.shape, *b.shape)) else "triton"
