"""The statistics of several casts of one tensor in as few reads as their blocks allow; for GEMMs that are not ours.

A 1x128 cast of whole tiles of BF16 takes one read together with casts of one scale and the exponent histogram
(``observe_counted``). Otherwise one launch reads the tensor once and fills all slots of up to three casts whose blocks fit one
tile: every 1x128, 128x1, 128x128 and tensorwise cast; 1x32 and 32x1 each take a launch of their own. A tensorwise or rowwise cast
under current scaling then needs one read more, for its amax. Importable only where Triton is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8debug.kernels.observe_counted import observe_counted, plan_for
from fp8debug.kernels.quantize import parse
from fp8debug.kernels.triton_execute import run
from fp8debug.kernels.triton_histogram import HISTOGRAM_WARPS
from fp8debug.kernels.triton_launch import MAX_CASTS, Job, Statistics, apart, empty_statistics, tile_of, together
from fp8debug.kernels.triton_run import eager
from fp8debug.recipes import Cast


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
    return apart(_observe_now(x, casts, scale_invs, histogram))


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
