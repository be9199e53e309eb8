"""Codes and decode factors of blocks of 16 and 32 elements, out of the layouts that their GEMMs read.

    MX (OCP MX 1.0)   E8M0 scales of 1x32 blocks
    NVFP4             E4M3 scales of 1x16 blocks under an FP32 scale of the whole tensor, or without it
    FP4 codes         two to a byte, the first element in the lower half

cuBLAS reads the scales of such blocks out of tiles of 128 rows by 4 blocks ("SWIZZLE_32_4_4"): tiles follow each other along a
row; in one, byte ``16 (r % 32) + 4 (r // 32) + c`` is row r, column c. Rows and columns are padded to whole tiles.

Nothing here reads a value on the host: a layout follows from shapes and dtypes alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8debug.adapters.base import same_cast
from fp8debug.adapters.interception.listener import GemmOperand
from fp8debug.formats import FORMATS, SWIZZLE, SWIZZLED_COLUMNS, SWIZZLED_ROWS, block_shape
from fp8debug.kernels.reference import FORMAT_OF
from fp8debug.recipes import Cast

#: The dtype of two FP4 codes in a byte; None where torch has none.
FP4 = getattr(torch, "float4_e2m1fn_x2", None)
#: The dtype of powers of two; None where torch has none.
E8M0 = getattr(torch, "float8_e8m0fnu", None)
#: torchao's ScaleCalculationMode as a rounding of the scale.
SCALE_MODES = {"floor": "pow2_floor", "rceil": "pow2_ceil", "ceil": "pow2_amax_ceil", "even": "pow2_even"}


def unpacked(data: Tensor) -> Tensor:
    """Return FP4 codes as values in E4M3's dtype, which has all of them.

    Args:
        data: bytes ``[rows, columns / 2]`` of two codes each.

    Returns:
        ``[rows, columns]``; another tensor, not on the program's memory.
    """
    packed = data.view(torch.uint8)
    codes = torch.stack((packed & 15, packed >> 4), -1).reshape(packed.shape[0], -1)
    magnitude = codes & 7
    # E4M3 has bias 7 and three bits of mantissa: 0, 0.5 (code 48), then 1, 1.5, 2, 3, 4, 6 four codes apart from 56 on.
    value = torch.where(magnitude < 2, magnitude * 48, magnitude * 4 + 48)
    return (value | (codes & 8) << 4).view(torch.float8_e4m3fn)


def unswizzled(scales: Tensor, rows: int, columns: int) -> Tensor:
    """Return a grid of scales out of the tiles that cuBLAS reads.

    Args:
        scales: one byte each, any shape; its memory is one piece in the order of the tiles.
        rows: of the grid.
        columns: of the grid.

    Raises:
        ValueError: it does not hold whole tiles of such a grid.
    """
    down, across = -(-rows // SWIZZLED_ROWS), -(-columns // SWIZZLED_COLUMNS)
    if scales.numel() != down * across * SWIZZLED_ROWS * SWIZZLED_COLUMNS:
        raise ValueError(f"{scales.numel()} swizzled scales are not those of {rows}x{columns} blocks, padded to tiles of 128x4")
    tiles = scales.as_strided((scales.numel(),), (1,)).view(torch.uint8).reshape(down, across, *SWIZZLE)
    grid = tiles.permute(0, 3, 2, 1, 4).reshape(down * SWIZZLED_ROWS, across * SWIZZLED_COLUMNS)
    return grid[:rows, :columns].view(scales.dtype)


def power_of_two(exponents: Tensor) -> Tensor:
    """Return E8M0 bytes as FP32: 2^(e - 127), and NaN for 255; from the bits, as an exponential may flush the smallest."""
    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, 1 << 22, bits)
    return torch.where(exponents == 255, 0x7FC00000, bits).view(torch.float32)


def block_cast(data: Tensor, scales: Tensor, *, has_tensor_scale: bool = False) -> Cast:
    """Return the cast of blocks along the rows, by the dtypes of data and scales.

    How a power of two was rounded cannot be seen: it is called rounded up, as torchao and cuBLAS's users do, and one that was
    rounded down shows as saturation.

    Raises:
        ValueError: no format of blocks has such dtypes.
    """
    is_packed = FP4 is not None and data.dtype is FP4
    name = "e2m1fn" if is_packed else FORMAT_OF.get(data.dtype)
    if name is not None and scales.dtype is E8M0:
        stored = "e8m0" if is_packed else "fp32"
        return same_cast(format=name, granularity="1x32", scale_rounding="pow2_ceil", scale_format=stored)
    if is_packed and scales.dtype is torch.float8_e4m3fn:
        second = "tensor" if has_tensor_scale else "none"
        return same_cast(format=name, granularity="1x16", scale_format="e4m3fn", tensor_scale=second)
    raise ValueError(f"data in {data.dtype} with block scales in {scales.dtype} are not read")


def side_of_blocks(data: Tensor, scales: Tensor, tensor_scale: Tensor | None = None, *, is_swizzled: bool) -> GemmOperand:
    """Return an operand ``[rows, K]`` in blocks along K.

    Args:
        data: ``[rows, K]`` in FP8, or ``[rows, K / 2]`` in packed FP4.
        scales: E8M0 of 1x32 blocks or E4M3 of 1x16 blocks, ``[rows, blocks]``, transposed, or flat.
        tensor_scale: FP32 ``[]``, the decode factor of the second level.
        is_swizzled: whether they lie in tiles of 128x4.

    Raises:
        ValueError: data and scales do not belong together.
    """
    cast = block_cast(data, scales, has_tensor_scale=tensor_scale is not None)
    values = unpacked(data) if FORMATS[cast.format].bits == 4 else data
    rows, blocks = values.shape[0], -(-values.shape[1] // block_shape(cast.granularity, *values.shape)[1])
    if is_swizzled:
        grid = unswizzled(scales, rows, blocks)
    elif scales.shape == (rows, blocks):
        grid = scales
    elif scales.shape == (blocks, rows):
        grid = scales.t()
    elif scales.numel() == rows * blocks and scales.is_contiguous():
        grid = scales.reshape(rows, blocks)
    else:
        raise ValueError(f"scales {list(scales.shape)} of data {list(values.shape)} in {cast.granularity} blocks are not read")
    decoded = power_of_two(grid.view(torch.uint8)) if scales.dtype is E8M0 else grid.float()
    if tensor_scale is not None:
        decoded = decoded * tensor_scale.reshape(1, 1).float()
    return GemmOperand(values, decoded, cast.granularity, cast=cast)
