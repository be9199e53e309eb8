"""Tensors and casts that the fast kernel takes, and its launches; what does not change between two of them is kept in a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fp8debug.kernels.gpu import device as common
from fp8debug.kernels.gpu.launcher import Kernel
from fp8debug.kernels.gpu.quantize.fast_kernel import fast_kernel
from fp8debug.kernels.gpu.quantize.statistics import FINISHED
from fp8debug.kernels.gpu.quantize.tile_cast import FROM_TILE, KIND_ROW, KIND_TILE
from fp8debug.kernels.gpu.quantize.tile_kernel import OUT_NONE, OUT_ROWS
from fp8debug.kernels.gpu.quantize.tiling import ROUNDINGS, Job, is_e5m2, is_hopper, kind_of, new_outputs, num_sms
from fp8debug.kernels.gpu.scratch import OPERANDS, pool
from fp8debug.kernels.gpu.tickets import NUM_TICKETS, tickets
from fp8debug.kernels.slot_rows import SlotRow

#: Blocks and layouts; of these, what is worked on as its transpose.
_TAKEN = (("1x128", "rows"), ("1x128", ""), ("128x1", "columns"), ("128x1", ""), ("128x128", "rows"), ("128x128", ""))
_TURNED = (("128x1", "columns"), ("128x1", ""), ("128x128", "columns"))
_MAX_EPS = 1e15
#: Programs whose parts are joined first, and of a launch at most: as many groups are joined then.
GROUP = 32
MAX_PROGRAMS = GROUP * (NUM_TICKETS - 1)
#: Rows of a thread of a program with statistics: it counts the zeros among 32 elements of each in 15 bits.
MAX_TILES = 0x7FFF // 32


#: Size, stride and dtype of data, size and stride of scale_inv.
Forms = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype], tuple[tuple[int, ...], tuple[int, ...]]]


class Shape(NamedTuple):
    """Tile sizes of the fast kernel for one kind of cast; measured on an H200, see docs/lab/performance.md.

    Attributes:
        rows: of a tile.
        halves: rows of a thread, whose four to a row are the threads of a program.
        per_sm: programs of a multiprocessor, each of which takes every n-th tile.
        registers: of a thread.
    """

    rows: int
    halves: int
    per_sm: int
    registers: int


#: By (block is a whole tile, transposed, statistics).
SHAPES = {
    (False, False, False): Shape(32, 1, 8, 64),
    (False, False, True): Shape(32, 1, 4, 128),
    (False, True, False): Shape(64, 1, 4, 64),
    (False, True, True): Shape(32, 1, 4, 128),
    (True, False, False): Shape(128, 1, 2, 64),
    (True, False, True): Shape(128, 1, 1, 128),
    (True, True, False): Shape(128, 1, 2, 64),
    (True, True, True): Shape(128, 2, 2, 128),
}
#: With every value counted too, by whether a block is a whole tile: fewer programs have fewer windows to add to the table.
COUNTING = {False: Shape(64, 1, 2, 128), True: Shape(128, 1, 1, 128)}


def fast_plan(x: Tensor, job: Job, counting: bool = False) -> FastPlan | None:
    """Return how the fast kernel does a job on tensors like this one, and counts every value; None where it does not."""
    cast, layout = job.cast, (job.cast.granularity, job.out)
    if not is_fast(x, job):
        return None
    tile, turned = kind_of(cast) == KIND_TILE.value, layout in _TURNED
    if counting and (turned or not job.statistics):
        return None
    shape = COUNTING[tile] if counting else SHAPES[tile, turned, job.statistics]
    rows, columns = x.shape[::-1] if turned else x.shape
    if rows % shape.rows or columns % 128:
        return None
    num_tiles = rows // shape.rows * (columns // 128)
    programs = min(num_tiles, num_sms(x.device) * shape.per_sm, MAX_PROGRAMS)
    if job.statistics and -(-num_tiles // programs) * shape.halves > MAX_TILES:
        return None
    return FastPlan(x, job, shape, tile, turned, counting, programs)


def is_fast(x: Tensor, job: Job) -> bool:
    """Return whether a fast kernel does a job on such a tensor, as far as its size does not matter."""
    cast = job.cast
    plain = (
        cast.scaling == "current" and job.scale_inv is None and ROUNDINGS[cast.scale_rounding] < 2 and cast.amax_eps <= _MAX_EPS
    )
    layout = (cast.granularity, job.out) in (*_TAKEN, *_TURNED)
    if not plain or not layout or x.dim() != 2 or x.dtype != torch.bfloat16 or not is_hopper(x.device):
        return False
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 and 0 < x.numel() < 2**31


class FastPlan:
    """Plan by which 2-D tensors of one shape and layout are quantized or described under one cast.

    Args:
        x: such a tensor.
        job: what is done with it.
        shape: of the launch.
        tile: whether a block is a whole tile.
        turned: whether the kernel works on the transpose.
        counting: whether it counts every value in a table.
        programs: of the launch.
    """

    def __init__(self, x: Tensor, job: Job, shape: Shape, tile: bool, turned: bool, counting: bool, programs: int) -> None:
        cast = job.cast
        rows, columns = x.shape[::-1] if turned else x.shape
        tile_columns = columns // 128
        num_tiles = rows // shape.rows * tile_columns
        data, scale_inv = new_outputs(x, cast, job.out or "rows")
        self._made = None if not job.out else forms_of((data, scale_inv))
        self._grid = programs, 1, 1
        stride = x.stride(0) if turned else x.stride(0) // 4
        self._numbers = stride, rows, columns, num_tiles, tile_columns
        self._eps = float(cast.amax_eps)
        self._statistics = job.statistics
        self._size = (programs + GROUP) * 32
        e5m2, rounding = is_e5m2(cast), ROUNDINGS[cast.scale_rounding]
        out = OUT_ROWS if job.out else OUT_NONE
        kind = KIND_TILE if tile else KIND_ROW
        spec = kind.value, FROM_TILE.value, e5m2, rounding, out.value, int(job.statistics), 0
        load = common.LOAD_TRANSPOSED if turned else common.LOAD_BF16
        f32, f64 = torch.float32, torch.float64
        types = x.dtype, *[None] * 5, f64, data.dtype, f32, None, torch.int64, torch.int32, torch.int32
        self._kernel = Kernel(
            fast_kernel, x.device.index, types, (spec, shape.rows // shape.halves, shape.halves, load.value, counting),
            num_warps=shape.rows // shape.halves // 8,
            enable_fp_fusion=False, maxnreg=shape.registers,
        )  # fmt: skip
        self._item = programs, x.numel(), 0, 0, FINISHED.value, 0, 0, 0, 0
        #: How the same is done and every value counted; None where it is not.
        self.counting = None if counting else fast_plan(x, job, True)

    def __call__(
        self, x: Tensor, deferred: bool = False, table: int = 0, into: SlotRow | None = None
    ) -> tuple[tuple[Tensor, Tensor] | None, SlotRow | None]:
        """Quantize or describe a tensor.

        Args:
            x: the tensor.
            deferred: its row is filled by a flush of the pool.
            table: where the values are counted, of a plan that counts: the address of int32 ``[65536]``
            (``value_counts_kernel``).
            into: the row that is filled; a new one otherwise.

        Returns:
            (data, scale_inv) of a tensor, and its row of ``slot_rows`` as ``OPERAND`` says.
        """
        made: tuple[Tensor, Tensor] | None = None
        to = 0, 0
        if self._made is not None:
            made = new_made(x, self._made)
            to = made[0].data_ptr(), made[1].data_ptr()
        if not self._statistics:
            self._kernel(self._grid, x.data_ptr(), *self._numbers, 0, *to, self._eps, 0, 0, 0)
            return made, None
        memory = pool(x.device)
        if deferred:
            parts, (row,) = memory.defer(OPERANDS, self._size, self._item)
            words = done = 0
        else:
            parts, _ = memory.space(self._size)
            row = memory.allocate() if into is None else into
            words, done = row.address, tickets(x.device)
        self._kernel(self._grid, x.data_ptr(), *self._numbers, parts, *to, self._eps, words, done, table)
        return made, row


def forms_of(made: tuple[Tensor, Tensor]) -> Forms:
    """Return how data and scale_inv lie, for :func:`new_made`."""
    data, scale_inv = made
    return (data.shape, data.stride(), data.dtype), (scale_inv.shape, scale_inv.stride())


def new_made(x: Tensor, forms: Forms) -> tuple[Tensor, Tensor]:
    """Return new data and scale_inv that lie so, where x does."""
    (size, stride, dtype), (blocks, block_stride) = forms
    return (
        x.new_empty_strided(size, stride, dtype=dtype),
        x.new_empty_strided(blocks, block_stride, dtype=torch.float32),
    )
