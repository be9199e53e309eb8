"""From tensors and casts to launches of the tile kernel: tile shapes, sources of scales, output buffers, statistics.

Nothing here reads a value back from the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.formats import FORMATS, GRANULARITIES, block_shape
from fp8debug.kernels.gpu import device as common
from fp8debug.kernels.gpu.launcher import launch
from fp8debug.kernels.gpu.quantize import amax as ta
from fp8debug.kernels.gpu.quantize import statistics as ts
from fp8debug.kernels.gpu.quantize import tile_cast as tc
from fp8debug.kernels.slot_rows import RowLayout, SlotGroup
from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.recipes import Cast

#: Programs of four warps per multiprocessor, and registers of a thread, by the number of casts with statistics; each program
#: takes every n-th tile, so that partials stay few. Measured on an H200, see docs/lab/performance.md.
PROGRAMS_PER_SM = (12, 4, 3, 2)
REGISTERS = (64, 128, 168, 255)
MAX_CASTS = 3
ROUNDINGS = {"none": 0, "pow2_ceil": 1, "pow2_floor": 2}
_LOADS = {torch.bfloat16: common.LOAD_BF16.value, torch.float16: common.LOAD_FP16.value, torch.float32: common.LOAD_FP32.value}
#: How the statistics of one cast lie in a row of ``slot_rows``.
OPERAND = RowLayout(
    SlotGroup(ts.COUNTS, torch.int64, 0),
    SlotGroup(ts.SUMS, torch.float64, 8 * len(ts.COUNTS)),
    SlotGroup(ts.MAXIMA, torch.float32, 4 * ts.MAXIMA_AT.value, "max"),
    SlotGroup(ts.MINIMA, torch.float32, 4 * ts.MINIMA_AT.value, "min"),
)


class Statistics(NamedTuple):
    """Statistics of some casts of one tensor, on its device; row c is cast c.

    Attributes:
        counts: int64 ``[casts, len(COUNTS)]``.
        sums: FP64 ``[casts, len(SUMS)]``.
        maxima: FP32 ``[casts, len(MAXIMA)]``.
        minima: FP32 ``[casts, len(MINIMA)]``.
        log2_hist: int64 ``[64]``, or ``[0]`` when not asked for.
    """

    counts: Tensor
    sums: Tensor
    maxima: Tensor
    minima: Tensor
    log2_hist: Tensor

    def slots(self, cast: int = 0) -> dict[str, Tensor]:
        """Return one cast's slots by name, as views: what ``reference.statistics`` returns for an operand."""
        groups = (
            (ts.COUNTS, self.counts),
            (ts.SUMS, self.sums),
            (ts.MAXIMA, self.maxima),
            (ts.MINIMA, self.minima),
        )
        found = {name: values[cast, i] for names, values in groups for i, name in enumerate(names)}
        if self.log2_hist.numel():
            found["log2_hist"] = self.log2_hist
        return found


@dataclass
class Job:
    """One cast of a launch.

    Attributes:
        cast: how.
        out: "" for statistics only, "rows", or "columns" for data stored transposed.
        statistics: whether its slots are filled.
        scale_inv: given decode factor, FP32 of one element.
    """

    cast: Cast
    out: str = ""
    statistics: bool = False
    scale_inv: Tensor | None = None


class Tile(NamedTuple):
    """Shape of a tile and its warps; see ``tile_cast``."""

    j: int
    h: int
    r: int
    lanes: int
    warps: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.j * self.r

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.h * self.lanes * 8


ACROSS = Tile(1, 4, 32, 4, 4)
WHOLE = Tile(4, 1, 32, 16, 16)
NARROW = Tile(4, 1, 32, 4, 4)
FLAT = Tile(4, 1, 8, 16, 4)


#: Granularities whose blocks run down; alone they are worked on as their transposed twins of the transposed tensor.
DOWN = ("128x1", "32x1", "columnwise")


def tile_of(jobs: list[Job]) -> Tile:
    """Return the tile that holds every block of the jobs whole."""
    names = {job.cast.granularity for job in jobs}
    if "1x32" in names:
        return NARROW
    if "32x1" in names:
        return FLAT
    if names & {"128x1", "128x128", "columnwise"} or any(job.out == "columns" for job in jobs):
        return WHOLE
    return ACROSS


def together(first: str, second: str) -> bool:
    """Return whether casts of these granularities can share one tile, and so one launch."""
    small = {"1x32", "32x1"}
    if (first in DOWN) != (second in DOWN):
        return False
    whole = {"tensorwise", "rowwise", "columnwise"}
    return first == second or second in whole or first in whole or not ({first, second} & small)


@cache
def is_native(device: torch.device) -> bool:
    """Return whether the device converts FP8 in hardware and kernels run on it."""
    return not common.INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether the device has what PTX of the fast kernels and counters asks for, such as ``min.u16x2``: sm_90 on."""
    return is_native(device) and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def num_sms(device: torch.device) -> int:
    """Return the multiprocessors of a device; 2 stand for the interpreter's, so that programs take several tiles."""
    return 2 if common.INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


class Grid(NamedTuple):
    """Tiling and loading of a tensor ``[rows, columns]``."""

    x: Tensor
    rows: int
    columns: int
    stride: int
    tile: Tile
    num_tiles: int
    tile_rows: int
    tile_columns: int
    programs: int
    load: int
    even: bool


def cut(x: Tensor, tile: Tile, transposed: bool, busy: int) -> Grid:
    """Cut a tensor of any shape, or its transpose, into tiles."""
    x = x.detach()
    x = x.reshape(-1, x.shape[-1] if x.dim() else 1)
    if x.stride(1) != 1 and x.shape[1] > 1:
        x = x.contiguous()
    rows, columns = x.shape
    stride = x.stride(0) if rows > 1 else columns
    aligned = columns % 4 == 0 and stride % 4 == 0 and x.data_ptr() % 16 == 0
    load = _LOADS[x.dtype] if aligned else common.LOAD_SCATTERED.value
    if aligned:
        stride //= 2 if x.dtype == torch.float32 else 4
    if transposed:
        rows, columns, stride, load = columns, rows, x.stride(0), common.LOAD_TRANSPOSED.value
    tile_rows, tile_columns = -(-rows // tile.rows), -(-columns // tile.columns)
    num_tiles = tile_rows * tile_columns
    per_sm = max(1, PROGRAMS_PER_SM[busy] * 4 // tile.warps)
    programs = max(1, min(num_tiles, num_sms(x.device) * per_sm))
    even = rows % tile.rows == 0 and columns % tile.columns == 0
    return Grid(x, rows, columns, stride, tile, num_tiles, tile_rows, tile_columns, programs, load, even)


def is_e5m2(cast: Cast) -> int:
    """Return 1 for the data format of two mantissa bits, 0 for E4M3: the kernels know these two."""
    return int(FORMATS[cast.format].mantissa_bits == 2)


def kind_of(cast: Cast) -> int:
    """Return which part of a tile shares a scale under a cast."""
    across, down = GRANULARITIES[cast.granularity][::-1]
    if across is None:
        return int((tc.KIND_TENSOR if down is None else tc.KIND_ROWS).value)
    if down is None:
        return int(tc.KIND_COLUMNS.value)
    return int((tc.KIND_ROW if down == 1 else tc.KIND_COLUMN if across == 1 else tc.KIND_TILE).value)


def scale_memory(job: Job, grid: Grid, kind: int) -> tuple[Tensor, int]:
    """Return what the kernel reads a scale from, and SOURCE; amaxes of a tensor, its rows or columns are taken here."""
    x = grid.x
    rows, columns = grid.rows, grid.columns
    scale_inv = job.scale_inv
    if scale_inv is None and job.cast.scaling == "static":
        scale_inv = torch.full((1,), job.cast.scale_inv or 0.0, dtype=torch.float32, device=x.device)
    if scale_inv is not None:
        # A granularity with a row of scales keeps its blocks, but every one has this scale.
        return scale_inv.detach().to(x.device, torch.float32).reshape(1), tc.FROM_SCALE_INV.value
    if kind < tc.KIND_TENSOR.value:
        return x.new_empty(0, dtype=torch.float32), tc.FROM_TILE.value
    shape = {tc.KIND_TENSOR.value: (grid.programs,), tc.KIND_ROWS.value: (grid.tile_columns, rows)}
    found = x.new_empty(shape.get(kind, (grid.tile_rows, columns)), dtype=torch.float32)
    t = grid.tile
    launch(
        ta.amax_kernel, (grid.programs,), (x, grid.stride, rows, columns, grid.num_tiles, grid.tile_columns, found),
        (kind, t.j, t.h, t.r, t.lanes, grid.load, grid.even, is_native(x.device)), num_warps=t.warps,
    )  # fmt: skip
    if kind == tc.KIND_TENSOR.value:
        return found.amax().reshape(1), tc.FROM_AMAX.value
    tiles, n = (grid.tile_columns, rows) if kind == tc.KIND_ROWS.value else (grid.tile_rows, columns)
    memory = x.new_empty(n * (1 + 3 * tiles), dtype=torch.float32)
    torch.amax(found, 0, out=memory[:n])
    return memory, tc.FROM_AMAX.value


def new_outputs(x: Tensor, cast: Cast, out: str) -> tuple[Tensor, Tensor]:
    """Return (data, scale_inv) to be written: shaped as the tensor and its grid of blocks, laid out as ``out`` says.

    The data of "columns" are stored transposed, ``[columns, rows]``, and the scale_inv of their square blocks likewise; the
    scale_inv of 1 x n blocks is stored ``[blocks, rows]`` either way. So GEMMs read them as they lie.
    """
    columns = x.shape[-1] if x.dim() else 1
    rows = x.numel() // max(columns, 1)
    dtype = getattr(torch, FORMATS[cast.format].data_dtype)
    block = block_shape(cast.granularity, rows, columns)
    grid = (-(-rows // block[0]), -(-columns // block[1]))
    if out == "columns":
        data = x.new_empty(columns, rows, dtype=dtype).t()
        data = data if x.dim() == 2 else data.view(x.shape) if x.dim() < 2 else data.view(*x.shape[:-1], columns)
    else:
        data = x.new_empty(x.shape, dtype=dtype)
    if (block[0] == 1 and columns > block[1]) or (out == "columns" and cast.granularity == "128x128"):
        return data, x.new_empty(grid[::-1], dtype=torch.float32).t()
    return data, x.new_empty(grid, dtype=torch.float32)


def contiguous_copies(found: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of statistics, which may be parts of one tensor: an op of torch.library must not return such."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in found]


def empty_statistics(x: Tensor, num_casts: int, histogram: bool) -> Statistics:
    """Return the neutral statistics of an empty tensor."""
    inf = float("inf")
    return Statistics(
        torch.zeros(num_casts, len(ts.COUNTS), dtype=torch.int64, device=x.device),
        torch.zeros(num_casts, len(ts.SUMS), dtype=torch.float64, device=x.device),
        torch.full((num_casts, len(ts.MAXIMA)), -inf, dtype=torch.float32, device=x.device),
        torch.full((num_casts, len(ts.MINIMA)), inf, dtype=torch.float32, device=x.device),
        torch.zeros(NUM_BINS if histogram else 0, dtype=torch.int64, device=x.device),
    )
