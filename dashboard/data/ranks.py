"""Questions about ranks: the same site on each of them, how far they lie apart, and which one lies apart from the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from .arrays import floats, grid_of, ints, states
from .healthy_ranges import badness_sql
from .nonfinite import States, state_sql, value_sql
from .queries import MAX_CELLS, MAX_POINTS, WORST_SQL, column, metrics
from .records import Heat, StepSeries
from .row_kinds import kind_sql
from .step_ranges import step_condition, step_range, width_of

if TYPE_CHECKING:
    from fp8debug import Run

#: Sites in the table of disagreement.
MAX_SITES = 40


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One site over steps on all ranks: the median with the band of all ranks, and the rank that is farthest from it."""

    median: StepSeries
    outlier: StepSeries
    rank: int


def _reference(tensor: str) -> str:
    return "operand" if tensor in ("input", "weight", "grad_output") else "shadow"


def by_rank(run: Run, module: str, site: tuple[str, str], metric: str, is_thin: bool = False) -> Heat:
    """Return a metric of one site, running cast, as ranks by steps; a cell of several steps holds the worst of them.

    ``is_thin``, here and below: read some of many steps, see ``step_ranges.step_condition``.

    Raises:
        UnknownNameError: no such metric.
    """
    name, unit = column(metric), metrics()[metric][0]
    first, last = step_range(run) or (0, 0)
    width = width_of(run, "raw", first, last, MAX_CELLS)
    within, apart = step_condition(run, first, last, is_thin)
    cell = f"CAST(floor((step - {first}) / {width}) AS BIGINT)"
    table = run.sql(
        f"WITH picked AS (SELECT rank, step, CAST({value_sql(run, name)} AS DOUBLE) AS v, {kind_sql(run, name, within)} AS kind,"
        f" {badness_sql(name, 'kind')} AS badness, {state_sql(run, name)} AS state"
        f" FROM stats WHERE module = ? AND gemm = ? AND tensor = ? AND reference = ? AND actual AND {within})"
        f" SELECT concat('rank ', CAST(rank AS STRING)) AS module, {cell} AS cell, min(step) AS step,"
        f" {WORST_SQL} FROM picked WHERE v IS NOT NULL OR state > 0"
        f" GROUP BY rank, {cell}",
        [module, *site, _reference(site[1])],
    )
    return replace(grid_of(table, metric, unit, [f"rank {rank}" for rank in run.ranks], width), steps_apart=apart)


def spread_over_steps(run: Run, module: str, site: tuple[str, str], metric: str, rank: int, is_thin: bool = False) -> Spread:
    """Return median and extremes over the ranks at each step, and the line of one rank.

    Raises:
        UnknownNameError: no such metric.
    """
    name = column(metric)
    first, last = step_range(run) or (0, 0)
    width = width_of(run, "raw", first, last, MAX_POINTS)
    within, _ = step_condition(run, first, last, is_thin)
    table = run.sql(
        f"WITH picked AS (SELECT rank, step, CAST({value_sql(run, name)} AS DOUBLE) AS v, {state_sql(run, name)} AS state"
        f" FROM stats WHERE module = ? AND gemm = ? AND tensor = ? AND reference = ? AND actual AND {within}), steps_of AS ("
        " SELECT step, percentile_cont(0.5) WITHIN GROUP (ORDER BY v) FILTER (WHERE isfinite(v)) AS v,"
        " min(v) FILTER (WHERE isfinite(v)) AS low, max(v) FILTER (WHERE isfinite(v)) AS high, max(state) AS state,"
        f" max(state) FILTER (WHERE rank = {int(rank)}) AS own_state,"
        f" max(v) FILTER (WHERE isfinite(v) AND rank = {int(rank)}) AS own"
        " FROM picked WHERE isfinite(v) OR state > 0 GROUP BY step)"
        " SELECT min(step) AS step, avg(v) AS v, min(low) AS low, max(high) AS high, avg(own) AS own, max(state) AS state,"
        " coalesce(max(own_state), 0) AS own_state FROM steps_of"
        f" GROUP BY CAST(floor((step - {first}) / {width}) AS BIGINT) ORDER BY 1",
        [module, *site, _reference(site[1])],
    )
    steps = ints(table, "step")
    all_ranks = StepSeries(
        name="median of all ranks",
        steps=steps,
        values=floats(table, "v"),
        states=_any(states(table, "state")),
        low=floats(table, "low"),
        high=floats(table, "high"),
    )
    own = StepSeries(name=f"rank {rank}", steps=steps, values=floats(table, "own"), states=_any(states(table, "own_state")))
    return Spread(median=all_ranks, outlier=own, rank=rank)


def _any(found: States) -> States | None:
    return found if found.any() else None


def disagreement(run: Run, metric: str, is_thin: bool = False) -> list[dict[str, Any]]:
    """Return the sites at which ranks differ most in a metric of the running cast, the largest spread first.

    Before all others come those that hold NaN or Inf on some ranks and not on the rest, in the order of steps and execution.

    Each row has module, gemm, tensor, reference, step (of the largest spread, or the first at which ranks differ in NaN or Inf),
    spread, median, scale_spread (largest difference of scale_inv between ranks, in powers of two), outlier (rank farthest from
    the median) and its value, state (of the outlier, see ``nonfinite``; 0 where its ranks are all finite, or all not) and
    num_lost, the ranks with NaN or Inf at that step. Spread, median and value are None where state is not 0.

    Raises:
        UnknownNameError: no such metric.
    """
    name = column(metric)
    within, _ = step_condition(run, *(step_range(run) or (0, 0)), is_thin)
    site = "module, gemm, tensor, reference"
    found: list[dict[str, Any]] = run.sql(
        f"WITH picked AS (SELECT step, rank, {site}, CASE WHEN isfinite({name}) THEN CAST({value_sql(run, name)} AS DOUBLE) END"
        f" AS v, {state_sql(run, name)} AS state, scale_inv_mean_log2 AS s, call_index FROM stats"
        f" WHERE actual AND reference <> 'exact' AND {within}), of_step AS (SELECT step, {site}, min(call_index) AS place,"
        " max(v) - min(v) AS spread, percentile_cont(0.5) WITHIN GROUP (ORDER BY v) AS median, max(s) - min(s) AS scale_spread,"
        " count(DISTINCT rank) FILTER (WHERE state > 0) AS num_lost, count(DISTINCT rank) AS num FROM picked"
        f" WHERE v IS NOT NULL OR state > 0 GROUP BY step, {site} HAVING count(DISTINCT rank) > 1), judged AS ("
        " SELECT *, CASE WHEN num_lost BETWEEN 1 AND num - 1 THEN 1 ELSE 0 END AS lost FROM of_step), worst AS ("
        f" SELECT {site}, max(lost) AS lost, min(place) AS place, max(spread) AS spread,"
        " max_by(step, (lost, CASE WHEN lost = 1 THEN -step ELSE spread END)) AS step,"
        " max_by(num_lost, (lost, CASE WHEN lost = 1 THEN -step ELSE spread END)) AS num_lost,"
        " max_by(median, (lost, CASE WHEN lost = 1 THEN -step ELSE spread END)) AS median, max(scale_spread) AS scale_spread"
        f" FROM judged WHERE lost = 1 OR spread IS NOT NULL GROUP BY {site}), listed AS (SELECT * FROM worst"
        " ORDER BY lost DESC, CASE WHEN lost = 1 THEN step END, CASE WHEN lost = 1 THEN place END,"
        f" CASE WHEN lost = 1 THEN 0 ELSE spread END DESC, {site} LIMIT {MAX_SITES})"
        " SELECT w.module, w.gemm, w.tensor, w.reference, w.step, w.scale_spread, w.lost, w.place, w.num_lost,"
        " CASE WHEN w.lost = 0 THEN w.spread END AS spread, CASE WHEN w.lost = 0 THEN w.median END AS median,"
        " max_by(p.rank, (w.lost * p.state, abs(coalesce(p.v, w.median) - w.median), -p.rank)) AS outlier,"
        " CASE WHEN w.lost = 0 THEN max_by(p.v, abs(p.v - w.median)) END AS value, w.lost * max(p.state) AS state"
        " FROM listed w JOIN picked p"
        " ON p.module = w.module AND p.gemm = w.gemm AND p.tensor = w.tensor AND p.reference = w.reference AND p.step = w.step"
        " GROUP BY w.module, w.gemm, w.tensor, w.reference, w.step, w.spread, w.median, w.scale_spread, w.lost, w.place,"
        " w.num_lost"
    ).to_pylist()

    def order(row: dict[str, Any]) -> tuple[Any, ...]:
        lost, gemms = row.pop("lost"), ("fprop", "dgrad", "wgrad")
        place, gemm = row.pop("place"), gemms.index(row["gemm"]) if row["gemm"] in gemms else len(gemms)
        if lost:  # operands before the result
            return 0, row["step"], place if place is not None else 1 << 31, gemm, row["reference"] != "operand", row["tensor"]
        return 1, -row["spread"], row["module"], row["gemm"], row["tensor"]

    return sorted(found, key=order)


def rank_rows(run: Run) -> list[dict[str, Any]]:
    """Return (rank, last step, rows) of every rank that has rows."""
    found: list[dict[str, Any]] = run.sql(
        "SELECT rank, max(step) AS last, count(*) AS n FROM raw GROUP BY rank ORDER BY rank"
    ).to_pylist()
    return found
