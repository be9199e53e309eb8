"""The statistics of several casts of one tensor in as few reads as their blocks allow; for GEMMs that are not ours.

A 1x128 cast of whole tiles of BF16 takes one read together with casts of one scale and the exponent histogram
(``observe_counted``). Otherwise one launch reads the tensor once and fills all slots of up to three casts whose blocks fit one
tile: every 1x128, 128x1, 128x128 and tensorwise cast; 1x32 and 32x1 each take a launch of their own. A tensorwise or rowwise cast
under current scaling then needs one read more, for its amax. Importable only where Triton is.

One 1x128 cast, casts with one scale and the exponent histogram of a tensor from one read; importable only where Triton is.

The fast kernel describes the 1x128 cast and counts the tensor's values in the same pass; all else follows from the counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8debug.kernels.gpu.describe import value_counts_split as ts
from fp8debug.kernels.gpu.launcher import eager, launch
from fp8debug.kernels.gpu.quantize.fast_plan import FastPlan
from fp8debug.kernels.gpu.quantize.quantize import parse
from fp8debug.kernels.gpu.quantize.statistics import HISTOGRAM_WARPS
from fp8debug.kernels.gpu.quantize.tile_plan import fast_plan_of, run
from fp8debug.kernels.gpu.quantize.tiling import (
    MAX_CASTS,
    OPERAND,
    ROUNDINGS,
    Job,
    Statistics,
    contiguous_copies,
    empty_statistics,
    is_e5m2,
    tile_of,
    together,
)
from fp8debug.kernels.slot_rows import ROW_WORDS, SlotRow
from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.recipes import Cast


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory that ``split_kernel`` works on: a table, zero between launches, and parts."""

    table: Tensor
    parts: Tensor


_OF_STREAM: dict[tuple[torch.device, int], Memory] = {}


def plan_for(x: Tensor, jobs: list[Job], histogram: bool) -> tuple[FastPlan, int] | None:
    """Return how the tensor is read, and which job has blocks; None where that is not the way."""
    blocks = [i for i, job in enumerate(jobs) if job.cast.granularity != "tensorwise"]
    others = len(jobs) - len(blocks)
    if len(blocks) != 1 or others > ts.MAX_CASTS or not (others or histogram):
        return None
    if any(job.cast.scaling == "delayed" and job.scale_inv is None for job in jobs):
        return None  # its margin is the general way's
    plan = fast_plan_of(x, jobs[blocks[0]])
    return None if plan is None or plan.counting is None else (plan.counting, blocks[0])


def observe_counted(x: Tensor, jobs: list[Job], histogram: bool, plan: FastPlan, blocks: int) -> Statistics:
    """Return the statistics of all jobs; see :func:`plan_for`."""
    words = torch.empty(1 + ts.MAX_CASTS, ROW_WORDS, dtype=torch.int64, device=x.device)
    log2_hist = torch.empty(NUM_BINS, dtype=torch.int64, device=x.device)
    others = [job for i, job in enumerate(jobs) if i != blocks]
    given, epsilons, specs = [], [], []
    for job in others:
        scale = job.scale_inv
        if scale is None and job.cast.scaling == "static":
            scale = torch.full((1,), job.cast.scale_inv or 0.0, dtype=torch.float32, device=x.device)
        given.append(words if scale is None else scale.detach().to(x.device, torch.float32).reshape(1))
        epsilons.append(float(job.cast.amax_eps))
        source = ts.CURRENT if scale is None else ts.GIVEN
        specs.append((source.value, is_e5m2(job.cast), ROUNDINGS[job.cast.scale_rounding]))
    missing = ts.MAX_CASTS - len(others)
    memory = _memory(x.device)
    arguments = (
        memory.table, words, memory.parts, log2_hist, x.numel(), *given, *[words] * missing, *epsilons, *[0.0] * missing
    )  # fmt: skip
    try:
        plan(x, table=memory.table.data_ptr(), into=SlotRow(words, 0, words.data_ptr()))
        launch(ts.split_kernel, (ts.NUM_PROGRAMS,), arguments, (*specs, *[(ts.NONE.value, 0, 0)] * missing), num_warps=4)
    except BaseException:
        _OF_STREAM.clear()  # the table may hold counts
        raise
    rows = in_order(words, blocks, len(jobs))
    counts, sums, maxima, minima = (group.of(rows) for group in OPERAND.groups)
    return Statistics(counts, sums, maxima, minima, log2_hist if histogram else log2_hist[:0])


def in_order(words: Tensor, blocks: int, count: int) -> Tensor:
    """Return the rows of ``count`` jobs, the first of ``words`` at ``blocks``; a list of indices would make the host wait."""
    if not blocks:
        return words[:count]
    return torch.cat([words[1 : 1 + blocks], words[:1], words[1 + blocks : count]])


def _memory(device: torch.device) -> Memory:
    """Return the memory of the current stream; a launch that is captured has its own, of the graph."""
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    found = None if torch.cuda.is_current_stream_capturing() else _OF_STREAM.get(key)
    if found is None:
        table = torch.zeros(ts.TABLE_SIZE, dtype=torch.int32, device=device)
        found = Memory(table, torch.empty(ts.PARTS_SIZE, dtype=torch.float64, device=device))
        if not torch.cuda.is_current_stream_capturing():
            _OF_STREAM[key] = found
    return found


pass


def _observe_now(x: Tensor, casts: str, scale_invs: list[Tensor | None], histogram: bool) -> list[Tensor]:
    names = casts.split("; ")
    jobs = [Job(parse(name), "", True, scale) for name, scale in zip(names, scale_invs, strict=True)]
    plan = plan_for(x, jobs, histogram) if x.numel() else None
    if plan is not None:
        return list(observe_counted(x, jobs, histogram, *plan))
    groups = _groups(jobs)
    if len(groups) == 1 and x.numel() and (not histogram or tile_of(jobs).warps == HISTOGRAM_WARPS):
        return list(run(x, jobs, histogram)[1] or ())
    merged = empty_statistics(x, len(jobs), histogram)
    if not x.numel():
        return list(merged)
    counted = not histogram
    for group in groups:
        members = [jobs[i] for i in group]
        count = not counted and tile_of(members).warps == HISTOGRAM_WARPS
        found = run(x, members, count)[1]
        assert found is not None
        for into, values in zip(merged[:4], found[:4], strict=True):
            into[group] = values
        if count:
            merged.log2_hist.copy_(found.log2_hist)
            counted = True
    if not counted:
        found = run(x, [Job(Cast(granularity="1x128"), "", True)], True)[1]
        assert found is not None
        merged.log2_hist.copy_(found.log2_hist)
    return list(merged)


@torch.library.custom_op("fp8debug::observe", mutates_args=())
def _observe(x: Tensor, casts: str, scale_invs: list[Tensor | None], histogram: bool) -> list[Tensor]:
    return contiguous_copies(_observe_now(x, casts, scale_invs, histogram))


@_observe.register_fake
def _(x: Tensor, casts: str, scale_invs: list[Tensor | None], histogram: bool) -> list[Tensor]:
    return list(empty_statistics(x, len(scale_invs), histogram))


def _groups(jobs: list[Job]) -> list[list[int]]:
    """Return the indices of jobs by launch."""
    groups: list[list[int]] = []
    for i, job in enumerate(jobs):
        for group in groups:
            fits = all(together(jobs[k].cast.granularity, job.cast.granularity) for k in group)
            if fits and len(group) < MAX_CASTS:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def observe(
    x: Tensor, casts: Sequence[Cast], scale_invs: Sequence[Tensor | None] | None = None, *, histogram: bool = False
) -> Statistics:
    """Fill every slot of every cast without quantizing anything to memory.

    Args:
        x: bf16, fp16 or fp32 of any shape.
        casts: what the tensor is described under.
        scale_invs: for each cast a given decode factor (FP32, one element), as delayed scaling has, or None.
        histogram: the exponent histogram too.

    Returns:
        statistics, row c for cast c.
    """
    scales = list(scale_invs or [None] * len(casts))
    run_it = _observe_now if eager(x) else _observe
    return Statistics(*run_it(x, "; ".join(map(str, casts)), scales, histogram))
