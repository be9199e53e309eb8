"""Describes an operand beside codes and scales of another library from one read of all; importable only where Triton is.

The twin of ``reference.statistics`` for an operand whose codes and scales are given, equal in counts and extremes. Sums agree to
1e-6 of the sum of magnitudes, that of logarithms to 1e-6 a block; a slot of a scale is NaN where the reference's is. The row is
filled by the next ``scratch.flush``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fp8debug.formats import FORMATS, GRANULARITIES, TRANSPOSED, block_shape
from fp8debug.kernels.gpu.describe import foreign_kernel as tg
from fp8debug.kernels.gpu.describe.foreign_common import NUM_COLUMNS
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.launcher import Kernel, PlanCache
from fp8debug.kernels.gpu.quantize import tile_cast as tc
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, is_e5m2, is_native, num_sms
from fp8debug.kernels.gpu.scratch import FOREIGN, pool
from fp8debug.kernels.slot_rows import Slots
from fp8debug.metrics.base import Source
from fp8debug.recipes import Cast
from fp8debug.types import Quantized

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Elements of a tile: eight a thread.
TILE = 2048
#: The same where each column has a block of its own, all of whose sums a thread keeps.
SMALL_TILE = 1024
#: Warps of a multiprocessor by the registers that a thread has of it; each program takes every n-th unit, so that parts stay few.
WARPS = {128: 16, 168: 12}


class _ForeignPlan(NamedTuple):
    """A kernel for tensors of one shape and layout, its programs and sizes, and the end of its item in the second stage."""

    kernel: Kernel
    programs: int
    numbers: tuple[int | float, ...]
    item: tuple[int, ...]


_PLANS: PlanCache[_ForeignPlan | None] = PlanCache()
_PLAIN = Tensor, nn.Parameter


def describe(source: Source, cast: Cast, q: Quantized) -> Slots | None:
    """Return the slots of an operand beside its FP8 twin as they lie in a row of ``slot_rows``.

    Args:
        source: the tensor, not empty, on the device that is current.
        cast: the cast that made the codes, as far as its library tells.
        q: FP8 data and FP32 scale_inv, each with any strides; read by what is started here, and not kept.

    Returns:
        None where the kernel does not take them.
    """
    x, data, scale_inv = source.x, q.data, q.scale_inv
    if type(x) not in _PLAIN or type(data) not in _PLAIN or type(scale_inv) not in _PLAIN:
        return None
    shape = x.shape
    if data.shape != shape:
        if data.numel() != x.numel():
            return None
        data = data.reshape(shape)
    x_at, data_at, scale_at = x.data_ptr(), data.data_ptr(), scale_inv.data_ptr()
    key = (
        id(cast), shape, x.stride(), data.stride(), scale_inv.shape, scale_inv.stride(), x.dtype, data.dtype, scale_inv.dtype,
        x_at & 15, data_at & 15, scale_at & 15, x.get_device(), data.get_device(), scale_inv.get_device(),
    )  # fmt: skip
    plan = _PLANS.get(key)
    if plan is None:
        if key not in _PLANS:
            plan = _PLANS.keep(key, _plan(x, data, scale_inv, cast), cast)
        if plan is None:
            return None
    parts, (row,) = pool(x.device).defer(FOREIGN, plan.programs * NUM_COLUMNS, plan.item)
    at = (x, data.view(torch.int8), scale_inv) if INTERPRETED else (x_at, data_at, scale_at)
    plan.kernel((plan.programs, 1, 1), *at, parts, *plan.numbers)
    return {OPERAND: row}


class _Cut(NamedTuple):
    """Tiling of a tensor: tiles of ``rows`` and ``blocks`` times ``width`` columns; see ``foreign_kernel``, for pieces too."""

    kind: int
    rows: int
    blocks: int
    width: int
    height: int
    steps: int
    across: int
    units: int
    pieces: int = 0
    shares: int = 1


def _plan(x: Tensor, data: Tensor, scale_inv: Tensor, cast: Cast) -> _ForeignPlan | None:
    block = block_shape(cast.granularity, *x.shape)
    grid = tuple(-(-size // length) for size, length in zip(x.shape, block, strict=True))
    devices, dtypes = {x.device, data.device, scale_inv.device}, (data.dtype, scale_inv.dtype)
    known = getattr(torch, FORMATS[cast.format].torch_dtype), torch.float32
    if x.dtype not in DTYPES or dtypes != known or scale_inv.shape != grid or len(devices) > 1:
        return None
    turn = slice(None, None, -1 if data.stride(0) == 1 and data.stride(1) != 1 else 1)  # neighbouring codes lie in a row
    granularity = TRANSPOSED[cast.granularity] if turn.step == -1 else cast.granularity
    rows, columns = x.shape[turn]
    cut = _cut(rows, columns, granularity, num_sms(x.device))
    cut = _whole(cut, rows, columns, 64 if x.stride()[turn][0] == 1 else 32)
    warps = cut.rows // cut.shares * cut.blocks * cut.width // 256
    registers = 168 if cut.kind == tc.KIND_COLUMN.value else 128
    programs = min(cut.units, num_sms(x.device) * (WARPS[registers] // warps))
    lift_below = _lift_below(cast)
    strides = (*x.stride()[turn], *data.stride()[turn], *scale_inv.stride()[turn])
    sizes = rows, columns, cut.units, cut.across, cut.height, cut.steps
    numbers = *sizes, *strides, x.numel(), grid[0] * grid[1], lift_below
    constants = cut.kind, bool(is_e5m2(cast)), cut.rows, cut.blocks, cut.width, is_native(x.device), cut.pieces, cut.shares
    types = x.dtype, torch.int8, torch.float32, torch.float64, *[None] * len(numbers)
    kernel = Kernel(
        tg.foreign_cast_kernel, x.device.index, types, constants, num_warps=warps, maxnreg=registers, enable_fp_fusion=False
    )
    bits = int(np.float32(lift_below).view(np.int32))
    return _ForeignPlan(kernel, programs, numbers, (programs, int(cut.kind == tc.KIND_TENSOR.value), bits))


def _cut(rows: int, columns: int, granularity: str, sms: int) -> _Cut:
    """Return units that hold their blocks whole, and where these are long, as many units as keep every multiprocessor busy."""
    block_rows, block_columns = GRANULARITIES[granularity]
    if block_rows is None and block_columns is None:
        down, across = -(-rows // 16), -(-columns // 128)
        return _Cut(tc.KIND_TENSOR.value, 16, 1, 128, 16, 1, across, down * across)
    if block_columns is None:
        height = 16 if rows >= 16 * sms else 4
        width = TILE // height
        return _Cut(tc.KIND_ROW.value, height, 1, width, height, -(-columns // width), 1, -(-rows // height))
    if block_rows is None:
        width = 32 if columns >= 32 * sms else 16
        height, across = SMALL_TILE // width, -(-columns // width)
        return _Cut(tc.KIND_COLUMN.value, height, 1, width, rows, -(-rows // height), across, across)
    if block_rows == 1:
        down, across = -(-rows // 16), -(-columns // 128)
        return _Cut(tc.KIND_ROW.value, 16, 128 // block_columns, block_columns, 16, 1, across, down * across)
    kind, height, width = tc.KIND_TILE.value, 16, 128
    if block_columns == 1:  # in a wide tile a block is one thread's
        width = max(32, min(SMALL_TILE, 1 << (columns - 1).bit_length()))
        kind, height = tc.KIND_COLUMN.value, SMALL_TILE // width
    down, across = -(-rows // block_rows), -(-columns // width)
    return _Cut(kind, height, 1, width, block_rows, -(-min(block_rows, rows) // height), across, down * across)


def _whole(cut: _Cut, rows: int, columns: int, piece: int) -> _Cut:
    """Return the cut with what the fast pass takes at once, or as it is where not all tiles are whole.

    ``piece``: columns of a row's block that it takes at once.
    """
    if columns % (cut.blocks * cut.width) or rows % cut.height or cut.height % cut.rows:
        return cut
    if cut.kind == tc.KIND_ROW.value:
        if cut.steps > 1 or rows % (2 * cut.rows):
            return cut._replace(pieces=1)
        whole = cut._replace(pieces=max(1, cut.width // piece), shares=4)
        return whole._replace(rows=2 * cut.rows, height=2 * cut.height, units=cut.units // 2)
    if cut.kind == tc.KIND_TENSOR.value and rows % 64 == 0:
        cut = cut._replace(height=64, steps=4, units=cut.units // 4)
    return cut._replace(pieces=2 - cut.steps % 2)


def _lift_below(cast: Cast) -> float:
    """Return what the amax of a nonzero block lies below where its scale came from amax eps or from the largest finite FP32.

    max / amax is Inf in FP32 up to amax = max / 2^128.
    """
    if cast.scaling != "current":
        return 0.0
    largest = np.float32(FORMATS[cast.format].max * 2.0**-128)
    return float(max(np.nextafter(largest, np.float32(np.inf)), np.float32(cast.amax_eps)))
