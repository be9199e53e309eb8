"""The exact GEMM of sampled rows or columns on the GPU, straight from FP8 codes; importable only where Triton is.

The twin of ``reference.gemm`` on the dequantized operands, for rows of the first operand (fprop, dgrad) or columns of the second
(wgrad). No operand is dequantized: the sampled rows' codes are gathered, the other operand is read as it lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import TRANSPOSED
from fp8debug.kernels import triton_sampled as ts
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.triton_common import INTERPRETED
from fp8debug.kernels.triton_launch import is_native
from fp8debug.kernels.triton_run import Kernel, address, launch
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm

#: (rows of the whole operand, sampled rows, warps, stages) of a program.
CONFIG = (64, 128, 4, 3)
#: The same for at most 64 sampled rows, and for so few rows of the whole operand that programs would be short.
FEW, FEW_OF_FEW = (64, 64, 4, 3), (16, 64, 4, 5)
#: Plans kept; a program that makes more starts over.
MAX_PLANS = 4096
_FORMS = {
    torch.float8_e4m3fn: ts.FORM_E4M3.value,
    torch.float8_e5m2: ts.FORM_E5M2.value,
    torch.bfloat16: ts.FORM_BF16.value,
}
_SCALED = {
    "tensorwise": ts.SCALED_ROWS.value,
    "rowwise": ts.SCALED_ROWS.value,
    "1x128": ts.SCALED_TILES.value,
    "1x32": ts.SCALED_TILES.value,
    "128x128": ts.SCALED_BLOCKS.value,
}


class _Side(NamedTuple):
    """An operand ``[rows, K]`` with the contracted dimension last; block is the length of K that shares a scale, 0 for all."""

    data: Tensor
    scale: Tensor
    stride_row: int
    stride_k: int
    form: int
    scaled: int
    block: int


def _side(operand: Operand, rows_contract: bool) -> _Side | None:
    """Return an operand as the kernels read it; None where they cannot."""
    if isinstance(operand, Tensor):
        data = operand.detach()
        data = data.t() if rows_contract else data
        scaled = ts.SCALED_NOT.value
        return _Side(data, data, 0, 0, _FORMS[data.dtype], scaled, 0) if data.dtype is torch.bfloat16 else None
    (data, scale), cast = operand
    name = TRANSPOSED[cast.granularity] if rows_contract else cast.granularity
    if rows_contract:
        data, scale = data.t(), scale.t()
    if name not in _SCALED or data.dtype not in _FORMS:
        return None
    stride_row, stride_k = scale.stride()
    if name == "tensorwise":
        stride_row = 0
    block = 0 if _SCALED[name] == ts.SCALED_ROWS.value else 32 if name == "1x32" else 128
    return _Side(data, scale, stride_row, stride_k, _FORMS[data.dtype], _SCALED[name], block)


def dequantize_lines(data: Tensor, scale_inv: Tensor, block: tuple[int, int], dim: int, index: Tensor) -> Tensor:
    """Return rows (``dim`` 0) or columns (1) of FP8 data, dequantized to FP32.

    Args:
        data: FP8 ``[rows, columns]``.
        scale_inv: FP32, one for each block.
        block: shape of a block.
        dim: see above.
        index: int64, which.
    """
    length, lines = data.shape[1 - dim], index.numel()
    out = index.new_empty((lines, length) if dim == 0 else (length, lines), dtype=torch.float32)
    if out.numel():
        size = 64 if INTERPRETED else 1024
        order = (dim, 1 - dim)
        strides = (t.stride(d) for t in (data, scale_inv, out) for d in order)
        launch(
            ts.lines_kernel, (lines, -(-length // size)),
            (_bits(data), index, out, scale_inv, length, *strides, *(block[d] for d in order)),
            (data.dtype is torch.float8_e5m2, size), num_warps=4,
        )  # fmt: skip
    return out


def columns_of(x: Tensor, index: Tensor) -> Tensor:
    """Return sampled columns ``[rows, samples]`` of x in BF16, FP16 or FP32, at less cost to the host than ``index_select``."""
    out = x.new_empty((x.shape[0], index.numel()))
    if not out.numel():
        return out
    key = "columns", x.shape, x.stride(), x.dtype, index.numel(), x.data_ptr() & 15, index.data_ptr() & 15, x.device
    kernel = _GATHERS.get(key)
    if kernel is None:
        if len(_GATHERS) == MAX_PLANS:
            _GATHERS.clear()
        bits = _BITS[x.element_size()]
        types = bits, torch.int64, bits, None, None, None, None
        kernel = _GATHERS[key] = Kernel(ts.columns_kernel, x.device.index, types, _COLUMNS_BLOCK, num_warps=4)
    down, across = _COLUMNS_BLOCK
    rows, samples = out.shape
    at = (
        (x.detach().view(_BITS[x.element_size()]), index, out.view(_BITS[x.element_size()]))
        if INTERPRETED
        else (x.data_ptr(), index.data_ptr(), out.data_ptr())
    )
    kernel((-(-rows // down), -(-samples // across), 1), *at, rows, samples, *x.stride())
    return out


def _bits(data: Tensor) -> Tensor:
    return data.view(torch.int16 if data.element_size() == 2 else torch.int8)


def exact_gemm(which: Gemm, first: Operand, second: Operand, index: Tensor, num: int | None = None) -> Tensor | None:
    """One GEMM of sampled rows of the first operand, or for wgrad of sampled columns of the second.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand: quantized, or in BF16.
        second: right operand, likewise.
        index: int64 ``[samples]``.
        num: how many of them, the first ones; None is all.

    Returns:
        FP32 output ``[samples, N]``, grad_input ``[samples, K]`` or grad_weight ``[N, samples]``; None where operands have
        scales, or a dtype, that no kernel takes.
    """
    data, scale = first[0] if isinstance(first, tuple) else (first, first)
    other, other_scale = second[0] if isinstance(second, tuple) else (second, second)
    num = index.numel() if num is None else num
    key = (
        which, data.shape, data.stride(), scale.stride(), other.shape, other.stride(), other_scale.stride(), data.dtype,
        other.dtype, num, data.data_ptr() & 15, other.data_ptr() & 15, scale.data_ptr() & 15,
        other_scale.data_ptr() & 15, index.data_ptr() & 15, index.device,
        first[1].granularity if isinstance(first, tuple) else "", second[1].granularity if isinstance(second, tuple) else "",
    )  # fmt: skip
    if key in _PLANS:
        plan = _PLANS[key]
    else:
        if len(_PLANS) == MAX_PLANS:
            _PLANS.clear()
        plan = _PLANS[key] = _plan(which, first, second, index.device, num)
    return None if plan is None else _run(plan, which, (data, scale), (other, other_scale), index)


class _Plan(NamedTuple):
    """How one GEMM of a sample runs: kernels, what they are given beside addresses, and the sizes of what they write."""

    gather: Kernel
    product: Kernel
    gather_grid: tuple[int, int, int]
    product_grid: tuple[int, int, int]
    gather_numbers: tuple[int, ...]
    product_numbers: tuple[int, ...]
    shape: tuple[int, int]
    rows: tuple[int, int]
    steps: int
    dtype: torch.dtype
    few_is_scaled: bool
    is_empty: bool


_PLANS: dict[Any, _Plan | None] = {}
_GATHERS: dict[Any, Kernel] = {}
_BITS = {2: torch.int16, 4: torch.int32}
#: Rows and samples of a program that gathers columns.
_COLUMNS_BLOCK = (8, 32) if INTERPRETED else (8, 256)


def _plan(which: Gemm, first: Operand, second: Operand, device: torch.device, samples: int) -> _Plan | None:
    roles = OPERANDS[which]
    sides = [_side(o, (which, r) in CONTRACTS_ROWS) for o, r in zip((first, second), roles, strict=True)]
    few, whole = sides if which is not Gemm.WGRAD else sides[::-1]
    if few is None or whole is None or (few.block and whole.block and few.block != whole.block):
        return None
    num_whole, length = whole.data.shape
    step = few.block or whole.block or 128
    native = is_native(device)
    half = ts.FORM_BF16.value not in (few.form, whole.form)
    shape = (samples, num_whole) if which is not Gemm.WGRAD else (num_whole, samples)
    steps = -(-length // step) if few.block else 1
    dtype = (torch.float16 if half else torch.bfloat16) if native else torch.float32
    block = 64 if INTERPRETED else 1024
    few_type, whole_type = (torch.int16 if side.form == ts.FORM_BF16.value else torch.int8 for side in (few, whole))
    gather = Kernel(
        ts.gather_kernel, device.index,
        (few_type, torch.int64, dtype, few.scale.dtype, torch.float32 if few.scaled else dtype, *[None] * 8),
        (few.form, few.scaled, half, block, native), num_warps=4,
    )  # fmt: skip
    wide, narrow, warps, stages = CONFIG if samples > 64 else FEW if num_whole > 8192 else FEW_OF_FEW
    product = Kernel(
        ts.product_kernel, device.index,
        (whole_type, dtype, torch.float32, whole.scale.dtype, torch.float32 if few.scaled else dtype, *[None] * 9),
        (whole.form, whole.scaled, few.scaled, half, length % step == 0, native, wide, narrow, step),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    strides = (1, num_whole) if which is not Gemm.WGRAD else (samples, 1)
    blocks = 128 if few.scaled == ts.SCALED_BLOCKS.value else 1
    return _Plan(
        gather,
        product,
        (samples, -(-length // block), 1),
        (-(-num_whole // wide) * -(-samples // narrow), 1, 1),
        (length, steps, samples, *few.data.stride(), few.stride_row, few.stride_k, blocks),
        (num_whole, samples, length, *whole.data.stride(), whole.stride_row, whole.stride_k, *strides),
        shape,
        (samples, length),
        steps,
        dtype,
        bool(few.scaled),
        not (samples and num_whole and length),
    )


def _run(plan: _Plan, which: Gemm, first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], index: Tensor) -> Tensor:
    out = index.new_empty(plan.shape, dtype=torch.float32)
    if plan.is_empty:
        return out.zero_()
    few, whole = (first, second) if which is not Gemm.WGRAD else (second, first)
    rows = index.new_empty(plan.rows, dtype=plan.dtype)
    scales = index.new_empty((plan.steps, plan.rows[0]), dtype=torch.float32) if plan.few_is_scaled else rows
    near = address(rows), address(scales)
    plan.gather(plan.gather_grid, _at(few[0]), address(index), near[0], _scale_at(few), near[1], *plan.gather_numbers)
    plan.product(plan.product_grid, _at(whole[0]), near[0], address(out), _scale_at(whole), near[1], *plan.product_numbers)
    return out


def _at(data: Tensor) -> Any:
    return _bits(data.detach()) if INTERPRETED else data.data_ptr()


def _scale_at(side: tuple[Tensor, Tensor]) -> Any:
    return side[1].detach() if INTERPRETED else side[1].data_ptr()
