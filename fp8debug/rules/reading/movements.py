"""Movements before the loss: statistics of running casts that left their own past in the sampled steps up to a step.

Only what ran before the loss counts: the forward pass of that step and everything before it. The backward pass of the
step answers to the loss, and so do all later steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.traces import sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Standard deviation of a Gaussian over its median absolute deviation, the inverse of its quantile of 0.75.
_DEVIATIONS = 1.4826
WORDS = {"underflow_nonzero_rate": "underflow", "overflow_rate": "clipping", "sqnr_db": "SQNR"}


@dataclass(frozen=True, kw_only=True)
class Movement:
    """A statistic of a site that left its past.

    Attributes:
        module: FQN.
        gemm: GEMM.
        tensor: operand.
        column: the statistic.
        step: sampled step at which it first lay outside.
        before: median of its past.
        now: value there.
    """

    module: str
    gemm: str
    tensor: str
    column: str
    step: int
    before: float
    now: float

    def __str__(self) -> str:
        word = WORDS.get(self.column, self.column)
        return f"{self.module} {self.gemm} {self.tensor}: {word} {self.before:.3g} -> {self.now:.3g} at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Movements:
    """Statistics that were examined, and those that moved.

    Attributes:
        steps: the sampled steps just before, the last one included; empty where there was no past to compare with.
        found: what moved, in order of step and execution.
        num_needed: sampled steps without which there is no past.
    """

    steps: tuple[int, ...]
    found: tuple[Movement, ...]
    num_needed: int

    @property
    def words(self) -> str:
        """One clause for people."""
        if not self.steps:
            return f"fewer than {self.num_needed} steps were sampled by then, so what moved before it was not recorded"
        at = " and ".join(map(str, self.steps))
        if not self.found:
            return f"nothing moved before it: no cast's statistics left their past at the sampled steps {at}"
        more = len(self.found) - 3
        shown = "; ".join(map(str, self.found[:3])) + (f"; and {more} more" if more > 0 else "")
        return f"before it moved: {shown}"


def movements_before(run: Run, step: int, limits: CourseLimits) -> Movements:
    """Return what of the operands of running casts moved up to the forward pass of a step."""
    return run.memo(f"movements {step} {limits}", lambda: _movements_before(run, step, limits))


def _movements_before(run: Run, step: int, limits: CourseLimits) -> Movements:
    num_recent, num_past, least = limits.recent_steps, limits.past_steps, limits.min_past_steps
    sampled = [s for s in sampled_steps(run) if s <= step]
    recent, past = sampled[-num_recent:], sampled[-num_recent - num_past : -num_recent]
    if len(past) < least:
        recent, past = sampled[-1:], sampled[-1 - num_past : -1]
    if len(past) < least:
        return Movements(steps=(), found=(), num_needed=least + 1)
    columns = [column for column in limits.moved_floors if run.has(column)]
    query = (
        f"SELECT step, module, gemm, tensor, min(call_index) AS call_index, {', '.join(f'max({c}) AS {c}' for c in columns)}"
        " FROM sites WHERE actual AND reference = 'operand' AND numel > 0"
        f" AND step >= {past[0]} AND step <= {step} AND (gemm = 'fprop' OR step < {step})"
        " GROUP BY step, module, gemm, tensor"
        " ORDER BY step, call_index, module, CASE gemm WHEN 'fprop' THEN 0 WHEN 'dgrad' THEN 1 ELSE 2 END, tensor"
    )
    series: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in run.sql(query).to_pylist():
        series.setdefault((row["module"], row["gemm"], row["tensor"]), []).append(row)
    found = [
        (row["step"], row["call_index"] or 0, movement)
        for site, rows in series.items()
        for row in [row for row in rows if row["step"] in recent]
        if (movement := _movement(site, columns, [r for r in rows if r["step"] in past], row, limits)) is not None
    ]
    first: dict[tuple[str, str, str], Movement] = {}
    for _, _, movement in sorted(found, key=lambda entry: entry[:2]):
        first.setdefault((movement.module, movement.gemm, movement.tensor), movement)
    return Movements(steps=tuple(recent), found=tuple(first.values()), num_needed=least + 1)


def _movement(
    site: tuple[str, str, str],
    columns: Sequence[str],
    past: Sequence[dict[str, Any]],
    row: dict[str, Any],
    limits: CourseLimits,
) -> Movement | None:
    """Return the first statistic of a row that left its past, the causes of an error before the error."""
    for column in sorted(columns, key=lambda name: name == "sqnr_db"):
        known = [value for r in past if (value := _scaled(column, r[column])) is not None]
        now = _scaled(column, row[column])
        if len(known) < limits.min_past_steps or now is None:
            continue
        if max(min(known) - now, now - max(known)) <= limits.moved_floors[column]:
            continue
        usual = median(known)
        noise = _DEVIATIONS * median(abs(value - usual) for value in known)
        if abs(now - usual) > limits.min_moved_noise * noise:
            module, gemm, tensor = site
            before, value = (2.0**usual, 2.0**now) if column == "amax" else (usual, now)
            return Movement(module=module, gemm=gemm, tensor=tensor, column=column, step=row["step"], before=before, now=value)
    return None


def _scaled(column: str, value: float | None) -> float | None:
    """Return a value on the scale on which it moves: an amax in binades; None where it says nothing."""
    if value is None or not math.isfinite(value) or (column == "amax" and value <= 0):
        return None
    return math.log2(value) if column == "amax" else value
