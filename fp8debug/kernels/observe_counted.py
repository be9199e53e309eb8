"""One 1x128 cast, casts with one scale and the exponent histogram of a tensor from one read; importable only where Triton is.

The fast kernel describes the 1x128 cast and counts the tensor's values in the same pass; all else follows from the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fp8debug.kernels import triton_spread as ts
from fp8debug.kernels.triton_execute import fast_plan_of
from fp8debug.kernels.triton_fast_plan import FastPlan
from fp8debug.kernels.triton_launch import OPERAND, ROUNDINGS, Job, Statistics
from fp8debug.kernels.triton_run import launch
from fp8debug.kernels.words import WORDS, Row
from fp8debug.metrics.histogram import NUM_BINS


@dataclass(frozen=True, eq=False)
class Memory:
    """What ``spread_kernel`` works on: a table, zero between launches, and parts."""

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
    words = torch.empty(1 + ts.MAX_CASTS, WORDS, dtype=torch.int64, device=x.device)
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
        specs.append((source.value, int(job.cast.format == "e5m2"), ROUNDINGS[job.cast.scale_rounding]))
    missing = ts.MAX_CASTS - len(others)
    memory = _memory(x.device)
    arguments = (
        memory.table, words, memory.parts, log2_hist, x.numel(), *given, *[words] * missing, *epsilons, *[0.0] * missing
    )  # fmt: skip
    try:
        plan(x, table=memory.table.data_ptr(), into=Row(words, 0, words.data_ptr()))
        launch(ts.spread_kernel, (ts.NUM_PROGRAMS,), arguments, (*specs, *[(ts.NONE.value, 0, 0)] * missing), num_warps=4)
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
