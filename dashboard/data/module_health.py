"""Health of each module over the steps, one level for all metrics: the worst that any of them says at any of its sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8debug.store.columns import numbers_of

from . import queries
from .arrays import floats, ints
from .health import METRICS
from .healthy_ranges import badness_sql, envelope, severities
from .nonfinite import FINITE, state_sql, value_sql
from .records import Floats, Ints
from .row_kinds import kind_sql
from .step_ranges import MOST_ROWS, cell_width_of, sites_within, step_condition, step_range

if TYPE_CHECKING:
    from fp8debug import Run

#: Levels of a cell: below half of the way to a warning, below a warning, a warning, a reason to act; NaN or Inf; no data.
HEALTHY, NEAR, WARNING, ERROR, NONFINITE, NO_DATA = range(6)
#: In words, for legends and hover texts.
NAMES = ("healthy", "near a limit", "warning", "error", "NaN or Inf", "not recorded")
#: Columns of cells, and fewer for many modules, so that all their cells fit into a page.
MAX_COLUMNS, MIN_COLUMNS, MAX_CELLS = 60, 10, 20_000

Levels = NDArray[np.int8]


@dataclass(frozen=True, kw_only=True)
class ModuleHealth:
    """Levels of modules over steps.

    Attributes:
        modules: names in execution order.
        steps: first step of each column, int32 ``[columns]``.
        last: the last recorded step.
        levels: int8 ``[modules, columns]``. Of a metric without a healthy range: the quartile of the value, 0 to 3.
        metrics: the metrics that the levels come from.
        causes: place in ``metrics`` of the worst, int8 ``[modules, columns]``.
        values: its value, float32 ``[modules, columns]``; NaN where there is none.
        is_judged: whether a metric has a healthy range; else the levels only order the values.
        steps_apart: above 1 each so many-th sampled step was read.
    """

    modules: tuple[str, ...]
    steps: Ints
    last: int
    levels: Levels
    metrics: tuple[str, ...]
    causes: NDArray[np.int8]
    values: Floats
    is_judged: bool = True
    steps_apart: int = 1


def module_health(run: Run, metrics: Sequence[str] = METRICS, site: str | None = None) -> ModuleHealth:
    """Return the worst level of each module at each step.

    Args:
        run: the run.
        metrics: columns of ``sites``; those that were not recorded are passed over.
        site: ``gemm.tensor``, or another choice of ``queries.where``; all of them by default.

    Raises:
        UnknownNameError: no such metric.
    """
    recorded = tuple(name for name in map(queries.column, metrics) if run.has(name))
    modules = tuple(dict.fromkeys(str(m["fqn"]) for m in run.modules))
    shown, cast = step_range(run), queries.default_cast(run)
    if shown is None or not recorded:
        nothing = np.zeros((0, 0), np.int8)
        return ModuleHealth(
            modules=(),
            steps=np.zeros(0, np.int32),
            last=run.steps_range[1],
            levels=nothing,
            metrics=recorded,
            causes=nothing,
            values=nothing.astype(np.float32),
        )
    most = int(np.clip(MAX_CELLS // max(1, len(modules)), MIN_COLUMNS, MAX_COLUMNS))
    width = cell_width_of(run, *shown, most)
    width = width if width > 1 or shown[1] - shown[0] < most else _interval(run)
    is_thin = run.num_rows > MOST_ROWS
    within, _ = step_condition(run, *shown, is_thin)
    sites, apart = sites_within(run, *shown, is_thin)
    conditions = [queries.where(name, cast) for name in ([site] if site else ["operands", "results", "exact"])]
    chosen = " OR ".join(f"({condition})" for condition, _ in conditions)
    picked = ", ".join(f"CAST({value_sql(run, m)} AS DOUBLE) AS {m}, {badness_sql(m, 'kind')} AS bad_{m}" for m in recorded)
    worst = ", ".join(f"max_by({m}, bad_{m}) FILTER (WHERE {m} IS NOT NULL) AS {m}" for m in recorded)
    state = f"max(CASE WHEN {' OR '.join(f'({state_sql(run, m)}) > {FINITE}' for m in recorded)} THEN 1 ELSE 0 END)"
    table = run.sql(
        f"WITH picked AS (SELECT module, CAST(floor((step - {shown[0]}) / {width}) AS BIGINT) AS cell, step,"
        f" {kind_sql(run, within=within)} AS kind, num_nan, num_inf, num_actual_nonfinite, {picked} FROM {sites} AND ({chosen}))"
        f" SELECT module, cell, kind, min(step) AS step, {state} AS lost, {worst} FROM picked GROUP BY module, cell, kind"
        " ORDER BY module, cell, kind",
        [value for _, values in conditions for value in values],
    )
    return _grid(table, recorded, modules, run.steps_range[1], apart)


def _interval(run: Run) -> int:
    """Return how many steps lie between two sampled ones."""
    steps = [step for step in run.sampled_steps if step is not None]
    return min((b - a for a, b in pairwise(steps)), default=1)


def _grid(table: pa.Table, metrics: tuple[str, ...], order: tuple[str, ...], last: int, apart: int) -> ModuleHealth:
    """Return rows of (module, cell, kind, step, lost, metrics) as levels of modules by cells."""
    coded = table.column("module").cast(pa.string()).combine_chunks().dictionary_encode()
    named = coded.dictionary.to_pylist()
    modules = [name for name in dict.fromkeys([*order, *named]) if name in set(named)]
    place = {name: i for i, name in enumerate(modules)}
    rows = np.array([place[name] for name in named], dtype=np.int64)[numbers_of(coded.indices, np.int32)]
    cells, columns = np.unique(ints(table, "cell"), return_inverse=True)
    steps = np.full(len(cells), np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(steps, columns, ints(table, "step"))
    is_judged = any(envelope(name) is not None for name in metrics)
    kinds, lost = ints(table, "kind"), ints(table, "lost") > 0
    shape = (len(modules), len(cells))
    worst, levels = np.full(shape, -np.inf, np.float32), np.full(shape, NO_DATA, np.int8)
    causes, values = np.zeros(shape, np.int8), np.full(shape, np.nan, np.float32)
    for cause, name in enumerate(metrics):
        own = floats(table, name)
        ranked = _ranks(name, own, kinds) if is_judged else own
        ranked = np.where(np.isnan(ranked) & lost, np.float32(0), ranked) + np.where(lost, np.float32(8), np.float32(0))
        # The worst comes last, and the last assignment to a cell is the one that stays.
        chosen = np.argsort(ranked, kind="stable")[: int((~np.isnan(ranked)).sum())]
        best = np.full(shape, -1, np.int64)
        best[rows[chosen], columns[chosen]] = chosen
        there = np.where(best >= 0, ranked[best], np.float32(-np.inf))
        wins = there > worst
        worst[wins], causes[wins], values[wins] = there[wins], cause, own[best[wins]]
        levels[wins] = np.where(lost[best[wins]], NONFINITE, levels[wins])
    known = worst > -np.inf
    is_lost = levels == NONFINITE
    if is_judged:
        found = np.select([worst < 0.5, worst < 1, worst < 2], [HEALTHY, NEAR, WARNING], ERROR)
    else:
        finite = values[known & ~is_lost & np.isfinite(values)]
        found = np.searchsorted(np.quantile(finite, [0.25, 0.5, 0.75]), values, side="right") if finite.size else levels
    levels = np.where(known & ~is_lost, found, levels).astype(np.int8)
    return ModuleHealth(
        modules=tuple(modules),
        steps=steps,
        last=last,
        levels=levels,
        metrics=metrics,
        causes=causes,
        values=values,
        is_judged=is_judged,
        steps_apart=apart,
    )


def _ranks(metric: str, values: Floats, kinds: Ints) -> Floats:
    """Return the severity of values, 0 for what is better than healthy; NaN where there is no value or no healthy range."""
    found = severities(metric, values, kinds)
    return np.full(values.shape, np.nan, np.float32) if found is None else np.maximum(found, 0)
