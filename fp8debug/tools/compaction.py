"""Thinning a recorded run: old statistics go, every verdict stays, because it is asked before and after.

Kept are: every k-th sampled step; the first and last ones; those around each step that a finding or an event names; all rows of
the modules that a finding names; and all from ``before`` on. Then the thinned copy is judged by every rule. Where anything that
triage says differs, half the k is tried; where none will do, the run stays as it is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fp8debug.errors import RecordError, UsageError
from fp8debug.rules import Finding, Findings, triage
from fp8debug.rules.engine.selection import Thresholds
from fp8debug.store.locations import is_remote, place_of
from fp8debug.store.read.run import Run
from fp8debug.store.write.rewrite import check_is_over, discard, finish, hold, stage, swap


@dataclass(frozen=True, kw_only=True)
class Keep:
    """Statistics of a run that are kept.

    Attributes:
        every: one sampled step in so many.
        around: sampled steps on either side of a step that a finding or an event names, and at both ends of the run.
        before: steps from here on are all kept; None thins the whole run.

    Raises:
        UsageError: a number out of range.
    """

    every: int = 10
    around: int = 5
    before: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or self.around < 0 or (self.before is not None and self.before < 0):
            raise UsageError(f"keep every >= 1, around >= 0 and before >= 0, got {self.every}, {self.around}, {self.before}")


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """Result of thinning, done or planned.

    Attributes:
        every: one sampled step in so many was kept; 1 when nothing could go without changing what triage says.
        num_steps: sampled steps before and after; of some that went, single modules stayed.
        num_rows: rows of ``stats`` before and after.
        num_bytes: their bytes before and after.
        verdict: of the run, before and after.
    """

    every: int
    num_steps: tuple[int, int]
    num_rows: tuple[int, int] = (0, 0)
    num_bytes: tuple[int, int] = (0, 0)
    verdict: str


def compact_run(
    path: str | Path,
    keep: Keep | None = None,
    *,
    dry_run: bool = False,
    baselines: Sequence[str | Path] = (),
    thresholds: Thresholds | None = None,
) -> Compaction:
    """Thin a run's statistics without changing a verdict.

    Args:
        path: the run's folder; nobody may be writing it.
        keep: what stays.
        dry_run: judge the thinned copy, and take it away again.
        baselines: runs; the comparison with each must stay the same, too.
        thresholds: as for ``triage``, if others than the rules' own are in use.

    Raises:
        RecordError: the run is being written, or cannot be, as in object storage.
        RunError: there is no run.
    """
    if is_remote(path):
        raise RecordError(f"{place_of(path)} is in object storage, which is only read; thin a local copy, and copy that there")
    run, keep = Path(path), keep or Keep()
    check_is_over(run)
    lock = hold(run)
    try:
        finish(run)
        return _compacted(run, keep, dry_run, [None, *baselines], thresholds)
    finally:
        discard(run)
        lock.release()


def _compacted(
    run: Path, keep: Keep, dry_run: bool, baselines: Sequence[str | Path | None], thresholds: Thresholds | None
) -> Compaction:
    opened = Run(run)
    before = [triage(opened, baseline, thresholds=thresholds) for baseline in baselines]
    steps = opened.sql("SELECT DISTINCT step FROM raw WHERE step IS NOT NULL ORDER BY step").to_pydict()["step"]
    telling = "SELECT DISTINCT step FROM events WHERE step IS NOT NULL AND kind NOT IN ('skipped', 'tokens')"
    told = opened.sql(telling).to_pydict()["step"]
    modules = sorted({name for finding in before[0] for name in _modules(finding)})
    near = {step for finding in before[0] for one in (finding, *finding.parts) for step in one.steps} | set(told)
    every = keep.every
    while every > 1:
        kept = kept_steps(steps, near, Keep(every=every, around=keep.around, before=keep.before))
        if len(kept) == len(steps):
            break
        staged = stage(run, partial(_wanted, kept=kept, modules=modules))
        if staged.num_rows[0] == staged.num_rows[1]:
            break
        thinned = Run(staged.path)
        if [conclusions(triage(thinned, baseline, thresholds=thresholds)) for baseline in baselines] == [
            conclusions(one) for one in before
        ]:
            found = Compaction(
                every=every,
                num_steps=(len(steps), len(kept)),
                num_rows=staged.num_rows,
                num_bytes=staged.num_bytes,
                verdict=before[0].verdict,
            )
            if not dry_run:
                now = datetime.now(timezone.utc).isoformat(timespec="seconds")
                swap(run, staged, {"time": now, "every": every, "steps": list(found.num_steps), "rows": list(found.num_rows)})
            return found
        every //= 2
    return Compaction(every=1, num_steps=(len(steps), len(steps)), verdict=before[0].verdict)


def kept_steps(steps: Sequence[int], near: Iterable[int], keep: Keep) -> list[int]:
    """Return which sampled steps, in rising order, stay whole."""
    kept = {step for place, step in enumerate(steps) if place % keep.every == 0}
    kept.update(steps[: keep.around], steps[len(steps) - keep.around :])
    if keep.before is not None:
        kept.update(step for step in steps if step >= keep.before)
    for step in near:
        at = bisect_left(steps, step)
        kept.update(steps[max(0, at - keep.around) : at + keep.around + 1])
    return sorted(kept)


def conclusions(findings: Findings) -> dict[str, Any]:
    """Return everything that triage says of a run, but for its name and for sentences, which may count sampled steps."""
    document: dict[str, Any] = _without_sentences(findings.to_dict())
    return document


def _without_sentences(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _without_sentences(inner) for name, inner in value.items() if name not in ("run", "message", "reason", "what")
        }
    return [_without_sentences(inner) for inner in value] if isinstance(value, list) else value


def _modules(finding: Finding) -> set[str]:
    named = {finding.module, *finding.also, *(part.module for part in finding.parts)}
    return {name for name in named if name is not None}


def _wanted(rows: pa.Table, kept: list[int], modules: list[str]) -> pa.Array:
    in_step = pc.is_in(rows["step"], value_set=pa.array(kept, rows.schema.field("step").type))
    return pc.or_(in_step, pc.is_in(rows["module"].cast(pa.string()), value_set=pa.array(modules, pa.string())))
