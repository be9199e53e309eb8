"""Launches of the tile kernel and of the second stage of its statistics.

What one tensor and cast need but for pointers depends on the tensor's shape and layout alone: it is worked out once and kept,
so that the next such tensor costs the host a few allocations and two launches, or one where the second stage may wait.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8debug.formats import FORMATS, TRANSPOSED, block_shape
from fp8debug.kernels.gpu import device as common
from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, address, launch
from fp8debug.kernels.gpu.quantize import statistics as ts
from fp8debug.kernels.gpu.quantize import tile_cast as tc
from fp8debug.kernels.gpu.quantize import tile_kernel as tt
from fp8debug.kernels.gpu.quantize.amax import finish_lines
from fp8debug.kernels.gpu.quantize.fast_plan import FastPlan, fast_plan, forms_of, new_made
from fp8debug.kernels.gpu.quantize.statistics import HISTOGRAM_WARPS
from fp8debug.kernels.gpu.quantize.tiling import (
    ACROSS,
    DOWN,
    MAX_CASTS,
    OPERAND,
    REGISTERS,
    ROUNDINGS,
    Grid,
    Job,
    Statistics,
    cut,
    empty_statistics,
    is_e5m2,
    is_hopper,
    is_native,
    kind_of,
    new_outputs,
    scale_memory,
    tile_of,
)
from fp8debug.kernels.gpu.scratch import OPERANDS, pool
from fp8debug.kernels.slot_rows import SlotRow
from fp8debug.kernels.torch_state import is_of_cuda_graph
from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.recipes import Cast


class TilePlan:
    """Plan by which 2-D tensors of one shape and layout are quantized under a cast whose scales lie within tiles.

    Args:
        x: such a tensor.
        grid: its tiles.
        made: data and scale_inv that were made of it; None where nothing is.
        casts: eps and margin of the cast.
        constants: of the tile kernel.
        options: of the tile kernel.
        reduction: arguments of the second stage that are no tensors; None without statistics.
    """

    #: Unlike the fast kernel it never counts.
    counting = None

    def __init__(
        self,
        x: Tensor,
        grid: Grid,
        made: tuple[Tensor, Tensor] | None,
        casts: tuple[float, float],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        reduction: tuple[tuple[Any, ...], tuple[Any, ...]] | None,
    ) -> None:
        self._must_copy = x.stride(1) != 1 and x.shape[1] > 1
        self._made = None if made is None else forms_of(made)
        self._grid = grid.programs, 1, 1
        self._size = grid.programs * ts.COLUMNS_OF_PROGRAM.value
        self._numbers = grid.stride, grid.rows, grid.columns, grid.num_tiles, grid.tile_columns
        self._casts = casts
        # What a plan keeps lives longer than the memory of a CUDA graph in which it is made; kernels read nothing there.
        self._kept = None if is_of_cuda_graph() else x.new_empty(1, dtype=torch.float32)
        self._nothing: Any = 0 if self._kept is None else address(self._kept)
        nothing = self._nothing
        self._absent = (nothing, nothing, nothing, 0.0, 1.0) * 2
        f32, f64, device = torch.float32, torch.float64, x.device.index
        partials = f32 if reduction is None else f64
        one = f32, f32, f32, None, None
        types = x.dtype, *[None] * 5, partials, f32, f32 if made is None else made[0].dtype, *one[1:], *one, *one
        self._tile = Kernel(tt.tile_kernel, device, types, constants, **options)
        self._reduction = reduction
        self._item: tuple[int, ...] = ()
        if reduction is not None:
            self._item = _item(*reduction)
            rest = [None] * len(reduction[0]), [f32] * 3, [None] * len(reduction[1])
            types = f64, f32, torch.int64, f64, f32, f32, torch.int64, *(kind for kinds in rest for kind in kinds)
            chunk = 16 if common.INTERPRETED else 256
            self._second = Kernel(ts.reduce_kernel, device, types, (chunk, False), num_warps=8)

    def __call__(self, x: Tensor, deferred: bool = False) -> tuple[tuple[Tensor, Tensor] | None, SlotRow | None]:
        """Return (data, scale_inv) of a tensor, and its row of ``slot_rows`` as ``OPERAND`` says; ``deferred``: filled by a
        flush."""
        if self._must_copy:
            x = x.detach().contiguous()
        nothing = self._nothing
        made, to = None, (nothing, nothing)
        if self._made is not None:
            made = new_made(x, self._made)
            to = address(made[0]), address(made[1])
        at = address(x.detach() if common.INTERPRETED else x)
        if self._reduction is None:
            self._tile(self._grid, at, *self._numbers, nothing, nothing, *to, nothing, *self._casts, *self._absent)
            return made, None
        memory = pool(x.device)
        if deferred:
            parts, (row,) = memory.defer(OPERANDS, self._size, self._item)
        else:
            (parts, _), row = memory.space(self._size), memory.allocate()
        self._tile(self._grid, at, *self._numbers, parts, nothing, *to, nothing, *self._casts, *self._absent)
        if deferred:
            return made, row
        into = (
            [g.of(row.numbers) for g in OPERAND.groups]
            if common.INTERPRETED
            else [row.address + start for start in OPERAND.starts]
        )
        inverse, (before, after) = to[1], self._reduction
        self._second((1, 1, 1), parts, nothing, *into, into[0], *before, inverse, inverse, inverse, *after)
        return made, row


def _item(before: tuple[Any, ...], after: tuple[Any, ...]) -> tuple[int, ...]:
    """Return what the second stages of many casts are told of one, from the arguments of its own."""
    programs, _, numel, padding = before
    blocks, grid, eps, top, rounding, margin = after[::MAX_CASTS]
    bits = (struct.unpack("<i", struct.pack("<f", value))[0] for value in (top, eps, margin))
    return (programs, numel, padding, blocks, grid, rounding, *bits)


_PLANS: PlanCache[TilePlan | FastPlan] = PlanCache()
#: The same by the identity of the cast.
_BY_IDENTITY: PlanCache[TilePlan | FastPlan] = PlanCache()


def _fast(key: Any, x: Tensor, job: Job) -> FastPlan | None:
    """Return the fast kernel's plan for tensors like this one, and keep it; None where it takes none."""
    plan = fast_plan(x, job)
    if plan is not None:
        _PLANS.keep(key, plan)
    return plan


def fast_plan_of(x: Tensor, job: Job) -> FastPlan | None:
    """Return how the fast kernel does a job on tensors like this one; None where it does not."""
    if job.scale_inv is not None:
        return None
    key = _key(x, job)
    plan = _PLANS.get(key) or _fast(key, x, job)
    return plan if isinstance(plan, FastPlan) else None


def _key(x: Tensor, job: Job) -> Any:
    return (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16, job.cast, job.out, job.statistics)


def plan_of(x: Tensor, cast: Cast, out: str, statistics: bool) -> TilePlan | FastPlan | None:
    """Return how a tensor is quantized, once :func:`run` has quantized one like it; None before, and where there is no plan."""
    key = id(cast), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, out, statistics
    plan = _BY_IDENTITY.get(key)
    if plan is None and (plan := _PLANS.get(_key(x, Job(cast, out, statistics)))) is not None:
        _BY_IDENTITY.keep(key, plan, cast)
    return plan


def run(x: Tensor, jobs: list[Job], histogram: bool = False) -> tuple[list[tuple[Tensor, Tensor]], Statistics | None]:
    """Quantize or describe a tensor under up to three casts in one read (two for casts that need an amax first).

    Returns:
        (data, scale_inv) of every job with an ``out``, and the statistics if any job asks for them.
    """
    assert 0 < len(jobs) <= MAX_CASTS
    statistics = any(job.statistics for job in jobs)
    if not x.numel():
        outputs = {i: new_outputs(x, job.cast, job.out) for i, job in enumerate(jobs) if job.out}
        for _, scale_inv in outputs.values():
            scale_inv.fill_(1.0)
        return list(outputs.values()), empty_statistics(x, len(jobs), histogram) if statistics else None
    plannable = len(jobs) == 1 and jobs[0].scale_inv is None and not histogram and x.dim() > 0
    key = _key(x, jobs[0]) if plannable else None
    if plannable and (plan := _PLANS.get(key) or _fast(key, x, jobs[0])) is not None:
        made, row = plan(x)
        return ([made] if made else []), None if row is None else _of_row(row.numbers)
    outputs = {i: new_outputs(x, job.cast, job.out) for i, job in enumerate(jobs) if job.out}
    transposed = all(job.cast.granularity in DOWN and job.out != "rows" for job in jobs)
    if transposed:
        jobs = [replace(j, cast=_turned(j.cast), out="rows" if j.out else "") for j in jobs]
    grid = cut(x, tile_of(jobs), transposed, sum(job.statistics for job in jobs))
    t, device = grid.tile, grid.x.device
    rows, columns = grid.rows, grid.columns
    assert not histogram or (statistics and t.warps == HISTOGRAM_WARPS)
    nothing = grid.x.new_empty(1, dtype=torch.float32)
    arguments, specs, memories = _arguments_of_casts(jobs, outputs, grid, nothing)
    native = is_native(device)
    partials = nothing if not statistics else grid.x.new_empty(grid.programs, ts.COLUMNS_OF_PROGRAM.value, dtype=torch.float64)
    counted = nothing
    if histogram:
        new = torch.empty if native else torch.zeros
        counted = new(grid.programs, 32 * HISTOGRAM_WARPS, dtype=torch.int32, device=device)
    words = rows % 4 == 0 if any(job.out == "columns" for job in jobs) else True
    plain_kinds = (tc.KIND_NONE.value, tc.KIND_ROW.value, tc.KIND_TENSOR.value)
    packed = is_hopper(device) and t == ACROSS and grid.load == common.LOAD_BF16.value and all(s[0] in plain_kinds for s in specs)
    even_words = words and columns % 4 == 0
    constants = (*specs, t.j, t.h, t.r, t.lanes, grid.load, grid.even, even_words, statistics, histogram, native, packed)
    options = {"num_warps": t.warps, "enable_fp_fusion": False, "maxnreg": _registers(t.warps, specs)}
    start = grid.x, grid.stride, rows, columns, grid.num_tiles, grid.tile_columns, partials, counted
    launch(tt.tile_kernel, (grid.programs,), (*start, *arguments), constants, **options)
    found = reduction = None
    if statistics:
        alone = len(jobs) == 1 and not histogram
        found = _of_row(pool(device).allocate().numbers) if alone else _new_statistics(x, len(jobs), histogram)
        reduction = _reduce(found, grid, jobs, specs, arguments, memories, partials, counted, histogram)
    if plannable and specs[0][0] < tc.KIND_TENSOR.value and specs[0][1] == tc.FROM_TILE.value:
        if x.dim() == 2:
            casts = float(arguments[3]), float(arguments[4])
            _PLANS.keep(key, TilePlan(x, grid, outputs.get(0), casts, constants, options, reduction))
    return list(outputs.values()), found


def _arguments_of_casts(
    jobs: list[Job], outputs: dict[int, tuple[Tensor, Tensor]], grid: Grid, nothing: Tensor
) -> tuple[list[Any], list[tuple[int, ...]], list[Tensor]]:
    """Return what the tile kernel takes of up to ``MAX_CASTS`` casts.

    Returns:
        five arguments of each cast, the constants of each, and the memory from which each reads its scales; ``nothing``
        stands where there is none.
    """
    arguments: list[Any] = []
    specs: list[tuple[int, ...]] = []
    memories: list[Tensor] = []
    for i in range(MAX_CASTS):
        if i >= len(jobs):
            arguments += [nothing, nothing, nothing, 0.0, 1.0]
            specs.append((tc.KIND_NONE.value, 0, 0, 0, 0, 0, 0))
            memories.append(nothing)
            continue
        job, cast = jobs[i], jobs[i].cast
        kind = kind_of(cast)
        memory, source = scale_memory(job, grid, kind)
        data, scale_inv = outputs.get(i, (nothing, nothing))
        if not job.out and kind >= tc.KIND_TENSOR.value:
            scale_inv = grid.x.new_empty(memory.numel(), dtype=torch.float32)  # [1], or [n] and more
        margin = 2.0**-cast.margin if cast.scaling == "delayed" else 1.0
        arguments += [data, scale_inv, memory, float(cast.amax_eps), margin]
        clips = source == tc.FROM_SCALE_INV.value or cast.scale_rounding == "pow2_floor" or margin > 1.0
        out = {"": 0, "rows": 1, "columns": 2}[job.out]
        e5m2 = is_e5m2(cast)
        specs.append((kind, source, e5m2, ROUNDINGS[cast.scale_rounding], out, int(job.statistics), int(clips)))
        memories.append(memory)
    return arguments, specs, memories


def _of_row(row: Tensor) -> Statistics:
    counts, sums, maxima, minima = (group.of(row)[None] for group in OPERAND.groups)
    return Statistics(counts, sums, maxima, minima, row.new_empty(0))


def _registers(warps: int, specs: list[tuple[int, ...]]) -> int:
    """Registers of a thread: the safe pass, which runs rarely, may spill for the fast one's occupancy."""
    busy = sum(spec[5] for spec in specs)
    return 65536 // (32 * warps) if warps > 4 else REGISTERS[busy]


def _turned(cast: Cast) -> Cast:
    return replace(cast, granularity=TRANSPOSED[cast.granularity])


def _new_statistics(x: Tensor, n: int, histogram: bool) -> Statistics:
    return Statistics(
        x.new_empty(n, len(ts.COUNTS), dtype=torch.int64),
        x.new_empty(n, len(ts.SUMS), dtype=torch.float64),
        x.new_empty(n, len(ts.MAXIMA), dtype=torch.float32),
        x.new_empty(n, len(ts.MINIMA), dtype=torch.float32),
        x.new_empty(NUM_BINS if histogram else 0, dtype=torch.int64),
    )


def _reduce(
    found: Statistics,
    grid: Grid,
    jobs: list[Job],
    specs: list[tuple[int, ...]],
    arguments: list[Any],
    memories: list[Tensor],
    partials: Tensor,
    counted: Tensor,
    histogram: bool,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Launch the second stage; return its arguments that are no tensors, before and after scale_inv."""
    rows, columns = grid.rows, grid.columns
    t, n = grid.tile, len(jobs)
    blocks, grids, epsilons, tops, roundings, margins = [], [], [], [], [], []
    for job, spec in zip(jobs, specs, strict=False):
        block = block_shape(job.cast.granularity, rows, columns)
        blocks.append(-(-rows // block[0]) * -(-columns // block[1]))
        counted_blocks = grid.num_tiles * (t.rows // block[0]) * (t.columns // block[1])
        whole = 0 if job.cast.scaling == "current" else -1
        grids.append(counted_blocks if spec[0] < tc.KIND_TENSOR.value else whole)
        epsilons.append(float(job.cast.amax_eps))
        tops.append(FORMATS[job.cast.format].max)
        roundings.append(-1 if spec[1] == tc.FROM_SCALE_INV.value else spec[3])
        margins.append(2.0**-job.cast.margin if job.cast.scaling == "delayed" else 1.0)
    pad = MAX_CASTS - n
    inverses = [arguments[5 * min(i, n - 1) + 1] for i in range(MAX_CASTS)]
    for i, spec in enumerate(specs):
        if spec[1] == tc.FROM_SCALE_INV.value:
            inverses[i] = memories[i]
    padding = grid.num_tiles * t.rows * t.columns - rows * columns
    before = grid.programs, n, rows * columns, padding
    after = (
        *blocks, *[1] * pad, *grids, *[1] * pad, *epsilons, *[0.0] * pad, *tops, *[1.0] * pad, *roundings, *[0] * pad, *margins,
        *[1.0] * pad,
    )  # fmt: skip
    launch(
        ts.reduce_kernel,
        (n + 8 * histogram,),
        (partials, counted, *found, *before, *inverses, *after),
        (16 if common.INTERPRETED else 256, histogram),
        num_warps=8,
    )
    for i, (job, spec) in enumerate(zip(jobs, specs, strict=False)):
        if spec[0] > tc.KIND_TENSOR.value:
            lines = rows if spec[0] == tc.KIND_ROWS.value else columns
            slots = found.counts[i], found.sums[i], found.maxima[i], found.minima[i]
            finish_lines(memories[i], inverses[i], lines, float(job.cast.amax_eps), FORMATS[job.cast.format].max, slots)
    return before, after
