"""Pairs of casts that are made from one read of a tensor, and the launches that make them."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, can_share
from fp8debug.kernels.gpu.ptx_exchange import SHARED
from fp8debug.kernels.gpu.quantize.fast_plan import GROUP, MAX_PROGRAMS, MAX_TILES, forms_of, is_fast, new_made
from fp8debug.kernels.gpu.quantize.statistics import FINISHED
from fp8debug.kernels.gpu.quantize.tile_cast import FROM_TILE, KIND_ROW
from fp8debug.kernels.gpu.quantize.tile_kernel import OUT_ROWS
from fp8debug.kernels.gpu.quantize.tiling import ROUNDINGS, Job, is_e5m2, new_outputs, num_sms
from fp8debug.kernels.gpu.quantize.two_way_kernel import two_way_kernel
from fp8debug.kernels.gpu.scratch import OPERANDS, pool
from fp8debug.kernels.gpu.tickets import tickets
from fp8debug.kernels.slot_rows import SlotRow
from fp8debug.recipes import Cast

#: Rows and columns of a tile, whose threads, four to a row, are those of a program.
SIDE = 128
WARPS = SIDE * 4 // 32
#: Registers of a thread, and programs of a multiprocessor, by statistics; measured on an H200 (docs/lab/log.md, 2026-11-24).
REGISTERS = {False: 64, True: 128}
PER_SM = 1
#: Percent of a multiprocessor's 228 KiB that are shared memory, by whether values are counted; loads on their way need the rest.
CARVEOUT = {False: 20, True: 38}

#: What is made of a tensor: data and scale_inv along its rows, and along its columns, stored transposed.
Pair = tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]

_PLANS: PlanCache[TwoWayPlan | None] = PlanCache()
#: The same by the identity of the casts.
_BY_IDENTITY: PlanCache[TwoWayPlan | None] = PlanCache()


def two_way_plan_of(x: Tensor, rows: Cast, columns: Cast, statistics: bool) -> TwoWayPlan | None:
    """Return how 2-D tensors like this one are quantized along their rows and columns at once; None where they are not.

    Args:
        x: such a tensor.
        rows: how it is quantized as it lies.
        columns: how it is quantized to be stored transposed.
        statistics: whether the slots of both casts are filled.
    """
    key = id(rows), id(columns), x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, statistics
    plan = _BY_IDENTITY.get(key)
    if plan is None and key not in _BY_IDENTITY:
        same = rows, columns, *key[2:]
        plan = _PLANS[same] if same in _PLANS else _PLANS.keep(same, _two_way_plan(x, rows, columns, statistics))
        _BY_IDENTITY.keep(key, plan, rows, columns)
    return plan


def _two_way_plan(x: Tensor, rows: Cast, columns: Cast, statistics: bool) -> TwoWayPlan | None:
    jobs = Job(rows, "rows", statistics), Job(columns, "columns", statistics)
    blocks = rows.granularity, columns.granularity
    alike = (rows.format, rows.scale_rounding) == (columns.format, columns.scale_rounding)
    if blocks != ("1x128", "128x1") or not alike or not all(is_fast(x, job) for job in jobs):
        return None
    if x.shape[0] % SIDE or x.shape[1] % SIDE or not can_share():
        return None
    num_tiles = x.numel() // SIDE**2
    programs = min(num_tiles, num_sms(x.device) * PER_SM, MAX_PROGRAMS)
    if statistics and -(-num_tiles // programs) > MAX_TILES:
        return None
    return TwoWayPlan(x, jobs, programs)


class TwoWayPlan:
    """Plan by which 2-D tensors of one shape and layout are quantized along rows and columns from one read.

    Args:
        x: such a tensor.
        jobs: what is done along its rows, and along its columns; with statistics of both or of neither.
        programs: of the launch.
        counting: whether it counts every value in a table.
    """

    def __init__(self, x: Tensor, jobs: tuple[Job, Job], programs: int, counting: bool = False) -> None:
        rows, columns = x.shape
        made = [new_outputs(x, job.cast, job.out) for job in jobs]
        self._forms = [forms_of(pair) for pair in made]
        self._grid = programs, 1, 1
        self._numbers = x.stride(0) // 4, rows, columns, x.numel() // SIDE**2, columns // SIDE
        self._epsilons = [float(job.cast.amax_eps) for job in jobs]
        self._statistics = statistics = jobs[0].statistics
        self._size = (programs + GROUP) * 32
        specs = [
            (KIND_ROW.value, FROM_TILE.value, is_e5m2(job.cast), ROUNDINGS[job.cast.scale_rounding], OUT_ROWS.value,
             int(statistics), 0)
            for job in jobs
        ]  # fmt: skip
        f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
        outputs = [kind for data, _ in made for kind in (data.dtype, f32, None)]
        types = x.dtype, *[None] * 5, f64, *outputs, i64, i64, i32, i32
        self._kernel = Kernel(
            two_way_kernel, x.device.index, types, (*specs, counting), num_warps=WARPS, enable_fp_fusion=False,
            maxnreg=REGISTERS[statistics], shared=(SHARED, CARVEOUT[counting]),
        )  # fmt: skip
        self._item = programs, x.numel(), 0, 0, FINISHED.value, 0, 0, 0, 0
        #: How the same is done and every value counted; None where it is not.
        self.counting = TwoWayPlan(x, jobs, programs, True) if statistics and not counting else None

    def __call__(self, x: Tensor, deferred: bool = False, table: int = 0) -> tuple[Pair, tuple[SlotRow, SlotRow] | None]:
        """Quantize a tensor.

        Args:
            x: the tensor.
            deferred: its rows are filled by a flush of the pool.
            table: where the values are counted, of a plan that counts: the address of int32 ``[65536]``
            (``value_counts_kernel``).

        Returns:
            (data, scale_inv) of both casts, and with statistics their rows of ``slot_rows`` as ``OPERAND`` says.
        """
        forms, (eps, eps_t) = self._forms, self._epsilons
        pair = (data, inverse), (data_t, inverse_t) = new_made(x, forms[0]), new_made(x, forms[1])
        to = data.data_ptr(), inverse.data_ptr(), eps, data_t.data_ptr(), inverse_t.data_ptr(), eps_t
        if not self._statistics:
            self._kernel(self._grid, x.data_ptr(), *self._numbers, 0, *to, 0, 0, 0, 0)
            return pair, None
        memory = pool(x.device)
        addresses, done = (0, 0), 0
        if deferred:
            parts, rows = memory.defer(OPERANDS, self._size, self._item, 2)
        else:
            parts, _ = memory.space(2 * self._size)
            rows = [memory.allocate(), memory.allocate()]
            addresses, done = (rows[0].address, rows[1].address), tickets(x.device)
        self._kernel(self._grid, x.data_ptr(), *self._numbers, parts, *to, *addresses, done, table)
        return pair, (rows[0], rows[1])
