"""Disk space that a watch will need, by the modules that it found; printed at the start, and kept within a budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from fp8debug.adapters.watching.coverage import Candidate
from fp8debug.errors import UsageError
from fp8debug.observer.observer import Settings
from fp8debug.store.volume import DEFAULT_STEPS, Volume, plan_volume, rows_of_module


def planned_volume(
    candidates: Sequence[Candidate],
    settings: Settings,
    ranks: int,
    budget: int | str | None,
    total_steps: int | None,
    *,
    may_be_fewer: bool = False,
) -> Volume:
    """Return what all ranks will write, ``every`` chosen by the budget, and where that is not enough the number of ranks.

    Args:
        candidates: modules of the watch; those with a reason have no rows.
        settings: as wished.
        ranks: that record.
        budget: bytes, or a text such as ``50GB``; None is no limit.
        total_steps: of the run; None plans for ``DEFAULT_STEPS``.
        may_be_fewer: whether fewer ranks suffice, because these were not requested.

    Raises:
        UsageError: the budget does not hold all these ranks, or is no size.
    """
    steps = DEFAULT_STEPS if total_steps is None else total_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise UsageError(f"total_steps is a whole number of at least 1, got {total_steps!r}")
    rows = 0
    for candidate in candidates:
        if candidate.reason is None and candidate.adapter is not None:
            rows += rows_of_module(candidate.recipe() or settings.plain_recipe, settings.what_if)
    rows = -(-rows // settings.turns)  # on average
    volume = plan_volume(max(rows, 1), every=settings.every, ranks=ranks, steps=steps, budget=budget)
    if volume.ranks < ranks and not may_be_fewer:
        raise UsageError(
            f"the budget does not hold these {ranks} ranks; it holds this: {volume}; give more, fewer ranks, or leave out ranks="
        )
    return volume


def tell(volume: Volume) -> None:
    """Say at the start what will be written."""
    print(f"fp8debug: will record {volume}", file=sys.stderr)


def manifest_entry(volume: Volume) -> dict[str, Any]:
    """Return the plan for the manifest."""
    names = ("rows_per_step", "ranks", "steps", "budget", "bytes_per_sample", "bytes_in_all")
    return {name: getattr(volume, name) for name in names}
