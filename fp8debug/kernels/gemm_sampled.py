"""The exact GEMM of sampled rows or columns on the GPU, straight from FP8 codes; importable only where Triton is.

The twin of ``reference.gemm`` on the dequantized operands, for rows of the first operand (fprop, dgrad) or columns of the second
(wgrad). No operand is dequantized: the sampled rows' codes are gathered, the other operand is read as it lies.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import TRANSPOSED
from fp8debug.kernels import triton_sampled as ts
from fp8debug.kernels.reference import Operand
from fp8debug.kernels.triton_common import INTERPRETED
from fp8debug.kernels.triton_launch import is_native
from fp8debug.kernels.triton_run import launch
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm

#: (rows of the whole operand, sampled rows, warps, stages) of a program.
CONFIG = (64, 128, 4, 3)
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


def _bits(data: Tensor) -> Tensor:
    return data.view(torch.int16 if data.element_size() == 2 else torch.int8)


def exact_gemm(which: Gemm, first: Operand, second: Operand, index: Tensor) -> Tensor | None:
    """One GEMM of sampled rows of the first operand, or for wgrad of sampled columns of the second.

    Args:
        which: fprop takes (input, weight), dgrad (grad_output, weight), wgrad (grad_output, input), each 2-D.
        first: left operand: quantized, or in BF16.
        second: right operand, likewise.
        index: int64 ``[samples]``.

    Returns:
        FP32 output ``[samples, N]``, grad_input ``[samples, K]`` or grad_weight ``[N, samples]``; None where operands have
        scales, or a dtype, that no kernel takes.
    """
    roles = OPERANDS[which]
    sides = [_side(o, (which, r) in CONTRACTS_ROWS) for o, r in zip((first, second), roles, strict=True)]
    few, whole = sides if which is not Gemm.WGRAD else sides[::-1]
    if few is None or whole is None or (few.block and whole.block and few.block != whole.block):
        return None
    (num_whole, length), samples = whole.data.shape, index.numel()
    step = few.block or whole.block or 128
    native = is_native(index.device)
    half = ts.FORM_BF16.value not in (few.form, whole.form)
    shape = (samples, num_whole) if which is not Gemm.WGRAD else (num_whole, samples)
    out = index.new_empty(shape, dtype=torch.float32)
    if not (out.numel() and length):
        return out.zero_()
    steps = -(-length // step) if few.block else 1
    dtype = (torch.float16 if half else torch.bfloat16) if native else torch.float32
    rows = index.new_empty((samples, length), dtype=dtype)
    scales = index.new_empty((steps, samples), dtype=torch.float32) if few.scaled else rows
    block = 64 if INTERPRETED else 1024
    launch(
        ts.gather_kernel, (samples, -(-length // block)),
        (_bits(few.data), index, rows, few.scale, scales, length, steps, samples, *few.data.stride(), few.stride_row,
         few.stride_k, 128 if few.scaled == ts.SCALED_BLOCKS.value else 1),
        (few.form, few.scaled, half, block, native), num_warps=4,
    )  # fmt: skip
    wide, narrow, warps, stages = CONFIG
    strides = (1, num_whole) if which is not Gemm.WGRAD else (samples, 1)
    launch(
        ts.product_kernel, (-(-num_whole // wide) * -(-samples // narrow),),
        (_bits(whole.data), rows, out, whole.scale, scales, num_whole, samples, length, *whole.data.stride(), whole.stride_row,
         whole.stride_k, *strides),
        (whole.form, whole.scaled, few.scaled, half, length % step == 0, native, wide, narrow, step),
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
