"""Modules by severity: how ill each is, by which metric, since when, and that metric over steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .arrays import floats, ints, states
from .health import Reason, reason_of
from .healthy_ranges import badness_sql
from .heat_rows import scores
from .nonfinite import FINITE, MISSING, state_sql, value_sql
from .queries import where
from .records import Heat, StepSeries
from .step_ranges import sites_within, step_range, width_of

if TYPE_CHECKING:
    from fp8debug import Run

#: Points of a sparkline, and modules that are listed.
MAX_POINTS, MAX_MODULES = 60, 10
#: The severity from which a module is listed: the warn threshold.
LISTED = 1.0


@dataclass(frozen=True, kw_only=True)
class WorstModule:
    """Worst of a module over all steps.

    Attributes:
        module: its name.
        severity: 0 to 3, or NaN where nothing finite was recorded.
        state: of ``nonfinite``, the largest of any step.
        reason: metric and site of the severity, or None where nothing finite was recorded.
        since: the first step at the warn threshold or beyond it, or not finite; None where there is none.
        series: the metric over steps, None until it is read.
    """

    module: str
    severity: float
    state: int = FINITE
    reason: Reason | None = None
    since: int | None = None
    series: StepSeries | None = None


def worst_modules(heat: Heat, named: Sequence[str] = (), count: int = MAX_MODULES) -> tuple[list[WorstModule], int]:
    """Return the modules at the warn threshold or beyond it, worst first, and how many there are.

    Args:
        heat: a health.
        named: modules that come first whatever their health: those of the findings, the culprit first.
        count: how many are returned at most.
    """
    bad = scores(heat)
    worst = bad.max(axis=1, initial=-np.inf)
    place = {name: i for i, name in enumerate(heat.modules)}
    first = [place[name] for name in dict.fromkeys(named) if name in place]
    rest = [int(i) for i in np.argsort(-worst, kind="stable") if worst[i] >= LISTED]
    chosen = list(dict.fromkeys([*first, *rest]))
    return [_of(heat, i) for i in chosen[:count]], len(chosen)


def every_module(heat: Heat) -> list[WorstModule]:
    """Return the worst of each module of a health, in execution order."""
    return [_of(heat, i) for i in range(len(heat.modules))]


def _of(heat: Heat, i: int) -> WorstModule:
    values = heat.values[i]
    found = np.zeros(len(values), np.int8) if heat.states is None else heat.states[i]
    lost = (found > FINITE) & (found < MISSING)
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(lost | (values >= LISTED))
    code = int(heat.reasons[i].max(initial=-1)) if heat.reasons is not None else -1
    return WorstModule(
        module=heat.modules[i],
        severity=float(np.fmax.reduce(values, initial=np.float32(np.nan))),
        state=int(found[lost].max(initial=FINITE)),
        reason=reason_of(code, heat.sites) if code >= 0 else None,
        since=int(heat.steps[bad[0]]) if len(bad) else None,
    )


def with_series(run: Run, modules: Sequence[WorstModule], cast: str, is_thin: bool = False) -> list[WorstModule]:
    """Return modules with the metric of each over steps, all in one pass; a point of several steps is the worst of them."""
    shown, known = step_range(run), [one for one in modules if one.reason is not None]
    if shown is None or not known:
        return list(modules)
    first, last = shown
    width = width_of(run, "raw", first, last, MAX_POINTS)
    sites, _ = sites_within(run, first, last, is_thin)
    condition, values = where("all", cast)
    cases, bads, params = [], [], []
    for i, one in enumerate(known):
        assert one.reason is not None
        cases.append(f"WHEN n = {i} THEN CAST({value_sql(run, one.reason.metric)} AS DOUBLE)")
        bads.append(f"WHEN n = {i} THEN {badness_sql(one.reason.metric)}")
        params += [one.module, one.reason.gemm, one.reason.tensor, one.reason.reference]
    number = " ".join(f"WHEN module = ? AND gemm = ? AND tensor = ? AND reference = ? THEN {i}" for i in range(len(known)))
    names = ", ".join("?" for _ in known)
    cell = f"CAST(floor((step - {first}) / {width}) AS BIGINT)"
    table = run.sql(
        f"WITH numbered AS (SELECT *, CASE {number} END AS n FROM {sites} AND module IN ({names}) AND {condition}), picked AS ("
        f"SELECT n, step, CASE {' '.join(cases)} END AS v, CASE {' '.join(bads)} END AS badness,"
        f" {state_sql(run, 'sqnr_db')} AS state FROM numbered WHERE n IS NOT NULL)"
        " SELECT n, min(step) AS step, max_by(v, badness) FILTER (WHERE v IS NOT NULL) AS v, max(state) AS state FROM picked"
        f" WHERE v IS NOT NULL OR state > 0 GROUP BY n, {cell} ORDER BY n, 2",
        [*params, *(one.module for one in known), *values],
    )
    numbers, steps, points, found = ints(table, "n"), ints(table, "step"), floats(table, "v"), states(table, "state")
    series = {}
    for i, one in enumerate(known):
        own = numbers == i
        series[one.module] = StepSeries(name=str(one.reason), steps=steps[own], values=points[own], states=found[own])
    return [replace(one, series=series.get(one.module)) for one in modules]
