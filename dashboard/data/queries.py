"""Questions to a run, asked in SQL and answered as records; nothing else in the dashboard reads a run.

Every query reduces to what a screen can show before it leaves the engine: at most ``MAX_CELLS`` columns of a heatmap and
``MAX_POINTS`` points of a line. Column names are checked against the schema before they enter a query; values are bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8debug.errors import UnknownNameError
from fp8debug.formats import FORMATS
from fp8debug.metrics import derived_columns, slots
from fp8debug.metrics.histogram import FIRST_LOG2

from . import health as healths
from .arrays import floats, grid_of, ints, known_floats, states
from .healthy_ranges import badness_sql
from .nonfinite import COUNTS, FINITE, INF, LOST_SQL, NAN, STATE_SQL, States, has_nonfinite, state_sql, value_sql
from .records import CastRange, ExponentHistogram, Floats, Heat, Ints, StepSeries
from .row_kinds import kind_sql
from .site_rows import Key, keys_of, worst_cells
from .step_ranges import cell_width_of, sites_within, step_condition, step_range, steps_read, width_of

if TYPE_CHECKING:
    from fp8debug import Run

    from .metric_cache import MetricCache

MAX_CELLS = 560
MAX_POINTS = 600
OPERANDS = ("input", "weight", "grad_output")
SERIES = ("loss", "grad_norm", "loss_scale", "lr")


def metrics() -> dict[str, tuple[str, str]]:
    """Return (unit, sentence) of every number that a figure can show: derived columns first, then stored slots."""
    found = {name: (d.unit, d.doc) for name, d in derived_columns().items()}
    found |= {name: (s.unit, s.doc) for name, s in slots().items() if s.size == 1}
    return found


def column(metric: str) -> str:
    """Return a column name that may enter a query.

    Raises:
        UnknownNameError: it is no column.
    """
    if metric not in metrics():
        raise UnknownNameError("metric", metric, metrics())
    return metric


def _rows(run: Run, query: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.sql(query, list(params)).to_pylist()
    return found


def training(run: Run, names: Sequence[str] = SERIES, most: int = MAX_POINTS) -> list[StepSeries]:
    """Return loss, grad norm, loss scale and lr over steps, those that were recorded; constant ones but the loss are left out.

    Args:
        run: the run.
        names: which of these.
        most: points of a line at most.
    """
    aggregates = ", ".join(f"avg({c}) AS {c}, min({c}) AS {c}_low, max({c}) AS {c}_high" for c in names)
    bounds = run.sql("SELECT min(step) AS first, max(step) AS last FROM steps").to_pylist()[0]
    if bounds["first"] is None:
        return []
    width = width_of(run, "raw_steps", bounds["first"], bounds["last"], most)
    table = run.sql(
        f"SELECT min(step) AS step, {aggregates} FROM steps"
        f" GROUP BY CAST(floor((step - {int(bounds['first'])}) / {width}) AS BIGINT) ORDER BY 1"
    )
    steps, traces = ints(table, "step"), []
    for name in names:
        values, known = known_floats(table, name)
        low, high = (_gaps(floats(table, name + suffix)) for suffix in ("_low", "_high"))
        is_finite = np.isfinite(values)
        is_constant = is_finite[known].all() and low[known].min(initial=np.inf) == high[known].max(initial=-np.inf)
        if not known.any() or (name != "loss" and is_constant):
            continue
        banded = width > 1
        found = np.where(is_finite, FINITE, np.where(np.isnan(values), NAN, INF)).astype(np.int8)
        traces.append(
            StepSeries(
                name=name,
                steps=steps[known],
                values=_gaps(values)[known],
                states=found[known] if not is_finite[known].all() else None,
                low=low[known] if banded else None,
                high=high[known] if banded else None,
            )
        )
    return traces


def _gaps(values: Floats) -> Floats:
    """Return values with NaN, which is drawn as a gap, for those that are infinite."""
    return np.where(np.isinf(values), np.float32(np.nan), values)


def loss_lost_at(run: Run) -> int | None:
    """Return the first step whose loss is NaN or infinite."""
    # As text: DuckDB answers isnan() and comparisons from Parquet's min and max, which leave NaN out.
    names = "('nan', '-nan', 'inf', '-inf', 'infinity', '-infinity')"
    query = f"SELECT min(step) AS step FROM steps WHERE lower(CAST(loss AS STRING)) IN {names}"
    step = _rows(run, query)[0]["step"]
    return None if step is None else int(step)


def last_loss(run: Run) -> float | None:
    """Return the loss of the last step that has one."""
    rows = run.sql("SELECT step, avg(loss) AS loss FROM steps WHERE loss IS NOT NULL GROUP BY step ORDER BY step DESC LIMIT 1")
    return float(rows.column("loss")[0].as_py()) if rows.num_rows else None


def recorded(run: Run) -> list[str]:
    """Return the metrics that the run has any value of, in the order of ``metrics()``."""
    return [name for name in metrics() if run.has(name)]


def recorded_lately(run: Run) -> list[str]:
    """Return the metrics with a value in the first, a middle or the last sampled step: at once, however long the run."""
    names, within = list(metrics()), _lately(run)
    if not within:
        return []
    there = [name for name in names if name in run.columns]
    counts = ", ".join(f"count({name}) AS {name}" for name in there)
    found = _rows(run, f"SELECT {counts} FROM stats WHERE {within}")[0]
    return [name for name in names if found.get(name)]


def _lately(run: Run) -> str:
    """Return the SQL condition that a step is the first, a middle or the last sampled one; "" for a run without any."""
    steps = [step for step in run.sampled_steps if step is not None]
    few = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    return f"step IN ({', '.join(map(str, few))})" if few else ""


def casts(run: Run, cache: MetricCache | None = None) -> list[tuple[str, bool]]:
    """Return (cast name, running) of every operand cast recorded, running ones first; a table in memory knows them."""
    if cache is not None:
        running: dict[str, bool] = {}
        for _, _, name, reference, actual in cache.keys:
            if reference == "operand":
                running[name] = running.get(name, False) or actual
        return sorted(running.items(), key=lambda cast: (not cast[1], cast[0]))
    table = run.distinct_sites(
        "SELECT cast_name, max(CASE WHEN actual THEN 1 ELSE 0 END) AS running FROM site_rows WHERE reference = 'operand'"
        " GROUP BY cast_name ORDER BY 2 DESC, 1"
    )
    return [(row["cast_name"], bool(row["running"])) for row in table.to_pylist()]


def where(site: str, cast: str) -> tuple[str, list[Any]]:
    """Return the SQL condition and its values for a choice of site and cast.

    Args:
        site: ``all``, ``operands`` or ``results`` for all of them (against the shadow), ``exact`` for results against the
            exact GEMM, or ``gemm.tensor`` for one.
        cast: ``running``, ``what-if`` for all that did not run, or the name of a cast.
    """
    conditions: list[str] = []
    values: list[Any] = []
    gemm, _, tensor = site.partition(".")
    if site == "all":
        conditions.append("reference IN ('operand', 'shadow', 'exact')")
    elif site in ("operands", "results", "exact"):
        conditions.append(
            {"operands": "reference = 'operand'", "results": "reference = 'shadow'"}.get(site, "reference = 'exact'")
        )
    else:
        conditions.append("gemm = ? AND tensor = ?")
        values += [gemm, tensor]
        conditions.append("reference = 'operand'" if tensor in OPERANDS else "reference = 'shadow'")
    if cast in ("running", "what-if"):
        conditions.append("actual" if cast == "running" else "NOT actual")
    else:
        conditions.append("cast_name = ?")
        values.append(cast)
    return " AND ".join(conditions), values


def _keys(cache: MetricCache, site: str, cast: str) -> list[Key]:
    """Return the sites of a table in memory that :func:`where` chooses."""
    gemm, _, tensor = site.partition(".")
    many = {"operands": "operand", "results": "shadow", "exact": "exact"}
    reference = many.get(site) or ("operand" if tensor in OPERANDS else "shadow")
    chosen = []
    for key in cache.keys:
        if site == "all":
            reference = key[3]
        is_cast = key[4] == (cast == "running") if cast in ("running", "what-if") else key[2] == cast
        if is_cast and key[3] == reference and (site == "all" or site in many or key[:2] == (gemm, tensor)):
            chosen.append(key)
    return chosen


def heat(
    run: Run,
    metric: str,
    site: str = "operands",
    cast: str = "running",
    steps: tuple[int | None, int | None] = (None, None),
    cache: MetricCache | None = None,
    is_thin: bool = False,
) -> Heat:
    """Return one metric over modules and steps; a cell of several steps or sites holds the worst of them.

    Args:
        run: the run.
        metric: column of ``sites``.
        site: see ``where``.
        cast: see ``where``.
        steps: first and last step to show; the cells get finer as the range gets shorter.
        cache: the run's table in memory, which answers if it has the metric.
        is_thin: else read some of many steps, see ``step_ranges.step_condition``.

    Raises:
        UnknownNameError: no such metric.
    """
    name, unit = column(metric), metrics()[metric][0]
    condition, values = where(site, cast)
    modules = [str(m["fqn"]) for m in run.modules]
    shown = step_range(run, *steps)
    nothing = np.zeros((0, 0), dtype=np.float32)
    if shown is None:
        return Heat(
            metric=metric, unit=unit, modules=(), steps=np.zeros(0, np.int32), values=nothing, kinds=nothing.astype(np.int32)
        )
    first, last = shown
    width = cell_width_of(run, first, last, MAX_CELLS)
    if cache is not None and name in cache.metrics:
        names, cells, grid, kinds, found = cache.heat(name, _keys(cache, site, cast), first, last, width)
        return Heat(
            metric=metric,
            unit=unit,
            modules=tuple(names),
            steps=cells,
            values=grid,
            kinds=kinds,
            states=found,
            steps_per_cell=width,
        )
    sites, apart = sites_within(run, first, last, is_thin)
    within, _ = step_condition(run, first, last, is_thin)
    table = run.sql(
        f"WITH picked AS (SELECT module, step, CAST({value_sql(run, name)} AS DOUBLE) AS v,"
        f" {kind_sql(run, name, within)} AS kind, {badness_sql(name, 'kind')} AS badness, {state_sql(run, name)} AS state"
        f" FROM {sites} AND {condition})"
        f" SELECT module, CAST(floor((step - {first}) / {width}) AS BIGINT) AS cell, min(step) AS step,"
        f" {WORST_SQL} FROM picked WHERE v IS NOT NULL OR state > 0"
        f" GROUP BY module, CAST(floor((step - {first}) / {width}) AS BIGINT)",
        values,
    )
    return replace(grid_of(table, metric, unit, modules, width), steps_apart=apart)


def health(
    run: Run,
    site: str = "all",
    cast: str = "running",
    steps: tuple[int | None, int | None] = (None, None),
    cache: MetricCache | None = None,
    is_thin: bool = False,
    part: int = 1,
) -> Heat:
    """Return the health of modules over steps; a cell of several steps or sites holds the worst of them, and which it is.

    The arguments are those of :func:`heat`, and ``part`` of ``step_ranges.step_condition``. ``values`` are severities,
    ``reasons`` the codes of ``health`` and ``sites`` what their last part means.
    """
    condition, values = where(site, cast)
    shown = step_range(run, *steps)
    none = np.zeros((0, 0), np.float32)
    heat = Heat(
        metric=healths.HEALTH, unit="1", modules=(), steps=np.zeros(0, np.int32), values=none, kinds=none.astype(np.int32)
    )
    if shown is None:
        return heat
    first, last = shown
    width, apart = cell_width_of(run, first, last, MAX_CELLS), 1
    if cache is not None and cache.health is not None:
        keys = _keys(cache, site, cast)
        names, cells, codes, found = cache.health_of(keys, first, last, width)
    else:
        within, _ = step_condition(run, first, last, is_thin, part)
        keys = keys_of(run, f"{condition} AND {within}", values)
        sites, apart = sites_within(run, first, last, is_thin, part)
        read = steps_read(run, first, last, is_thin, part)
        names, cells, codes, found = worst_cells(run, keys, read, first, width, f"{sites} AND {condition}", values)
    return replace(
        heat,
        modules=tuple(names),
        steps=cells,
        values=healths.severities_of(codes),
        kinds=np.zeros(codes.shape, np.int32),
        states=found,
        reasons=codes,
        sites=tuple(healths.sites_of(key[:4] for key in keys)),
        steps_per_cell=width,
        steps_apart=apart,
    )


#: The worst of several rows of (v, kind, badness, state): that of the finite ones, and the largest state.
WORST_SQL = (
    "max_by(v, (badness, kind)) FILTER (WHERE v IS NOT NULL) AS v,"
    " coalesce(max_by(kind, (badness, kind)) FILTER (WHERE v IS NOT NULL), max(kind)) AS kind, max(state) AS state"
)


def default_cast(run: Run) -> str:
    """Return ``running``, or ``what-if`` for a run in which nothing ran in FP8."""
    found = _rows(run, "SELECT 1 AS one FROM raw WHERE actual AND reference = 'operand' LIMIT 1")
    return "running" if found else "what-if"


#: Events that a page lists; kinds that are tables of numbers, not something that happened at a step, are left out.
MAX_EVENTS = 200


def events(run: Run, count: int = MAX_EVENTS) -> tuple[list[dict[str, Any]], int]:
    """Return what happened when, the same of several ranks once, and how many events there are.

    Each has step (None where it belongs to none), kind, module, message and ranks, how many saw it.
    """
    few = "kind IS NOT NULL AND kind NOT IN ('tokens', 'inference')"
    grouped = f"SELECT step, kind, module, message, count(DISTINCT rank) AS ranks FROM events WHERE {few} "
    grouped += " GROUP BY step, kind, module, message"
    rows = _rows(run, f"SELECT * FROM ({grouped}) AS told ORDER BY step NULLS FIRST, kind, module LIMIT {int(count)}")
    if len(rows) < count:
        return rows, len(rows)
    return rows, int(_rows(run, f"SELECT count(*) AS n FROM ({grouped}) AS told")[0]["n"])


def module_traces(run: Run, module: str, metric: str, site: tuple[str, str] | None = None) -> list[StepSeries]:
    """Return a metric of one module over steps: a line for every site, cast and reference.

    Args:
        run: the run.
        module: FQN.
        metric: column of ``sites``.
        site: (gemm, tensor) to keep; all nine by default.

    Raises:
        UnknownNameError: no such metric.
    """
    return [t for t in several_traces(run, module, [metric])[metric] if site is None or (t.gemm, t.tensor) == site]


def several_traces(
    run: Run, module: str, names: Sequence[str], cache: MetricCache | None = None, is_thin: bool = False
) -> dict[str, list[StepSeries]]:
    """Return several metrics of one module over steps in one pass over the run, as ``module_traces`` does.

    Args:
        run: the run.
        module: FQN.
        names: columns of ``sites``.
        cache: the run's table in memory, which answers if it has all of them.
        is_thin: else read some of many steps, see ``step_ranges.step_condition``.

    Raises:
        UnknownNameError: no such metric.
    """
    wanted, shown = [column(name) for name in dict.fromkeys(names)], step_range(run)
    if shown is None:
        return {name: [] for name in wanted}
    width = width_of(run, "raw", *shown, MAX_POINTS)
    if cache is not None and cache.metrics.issuperset(wanted):
        return {name: [_trace(*line, width > 1) for line in cache.lines(module, name, shown[0], width)] for name in wanted}
    columns = {n: value_sql(run, n) for n in wanted}
    values = ", ".join(f"avg({c}) AS {n}_avg, min({c}) AS {n}_min, max({c}) AS {n}_max" for n, c in columns.items())
    state = f"max({STATE_SQL})" if any(state_sql(run, n) == STATE_SQL for n in wanted) else str(FINITE)
    sites, apart = sites_within(run, *shown, is_thin)
    width = width if apart == 1 else 1  # each step is a point of its own
    table = run.sql(
        f"SELECT gemm, tensor, cast_name, reference, actual, min(step) AS step, {state} AS state, {values}"
        f" FROM {sites} AND module = ?"
        " GROUP BY gemm, tensor, cast_name, reference, actual, CAST(floor((step - {0}) / {1}) AS BIGINT)"
        " ORDER BY gemm, tensor, actual DESC, cast_name, reference, 6".format(shown[0], width),
        [module],
    )
    keys = ["gemm", "tensor", "cast_name", "reference", "actual", "step", "state"]
    is_lost = table.column("state").to_numpy() > FINITE
    found = {}
    for name in wanted:
        own = table.select([*keys, f"{name}_avg", f"{name}_min", f"{name}_max"]).rename_columns([*keys, "v", "low", "high"])
        shows = is_lost & _speaks_of(name, own)
        found[name] = _traces(own.filter(pa.array(own.column("v").is_valid().to_numpy() | shows)), name, banded=width > 1)
    return found


def _speaks_of(metric: str, table: pa.Table) -> NDArray[np.bool_]:
    """Return the rows that would have a value of a metric were their elements finite.

    Operands have some metrics that results have not: rows count whose reference has a value anywhere, or all where none has.
    """
    if metric in COUNTS or not table.num_rows:
        return np.zeros(table.num_rows, np.bool_)
    references = np.array(table.column("reference").to_pylist(), np.str_)
    known = np.unique(references[table.column("v").is_valid().to_numpy()])
    return np.isin(references, known) if len(known) else np.ones(table.num_rows, np.bool_)


def _traces(table: pa.Table, metric: str, banded: bool) -> list[StepSeries]:
    keys = ("gemm", "tensor", "cast_name", "reference", "actual")
    if not table.num_rows:
        return []
    columns = [table.column(key).to_pylist() for key in keys]
    steps, values, low, high = ints(table, "step"), floats(table, "v"), floats(table, "low"), floats(table, "high")
    found = states(table, "state") * (metric not in COUNTS)
    labels = list(zip(*columns, strict=True))
    starts = [i for i in range(len(labels)) if i == 0 or labels[i] != labels[i - 1]]
    traces = []
    for start, end in zip(starts, [*starts[1:], len(labels)], strict=True):
        part = slice(start, end)
        traces.append(_trace(labels[start], steps[part], values[part], low[part], high[part], found[part], banded))
    return traces


def _trace(key: Key, steps: Ints, values: Floats, low: Floats, high: Floats, found: States | None, banded: bool) -> StepSeries:
    gemm, tensor, cast_name, reference, actual = key
    return StepSeries(
        name=cast_name + ("" if actual else " (what-if)"),
        steps=steps,
        values=_gaps(values),
        states=found if found is not None and found.any() else None,
        low=low if banded else None,
        high=high if banded else None,
        gemm=gemm,
        tensor=tensor,
        cast_name=cast_name,
        reference=reference,
        actual=actual,
    )


def sampled_steps(run: Run, module: str, cache: MetricCache | None = None, is_thin: bool = False) -> list[int]:
    """Return the steps at which the module has statistics; those of the whole run where that would take too long to find."""
    if cache is not None:
        return cache.steps(module)
    if is_thin:
        return [step for step in run.sampled_steps if step is not None]
    found = _rows(run, "SELECT DISTINCT step FROM raw WHERE module = ? AND step IS NOT NULL ORDER BY step", [module])
    return [int(row["step"]) for row in found]


def rows_at(run: Run, module: str, step: int, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of all sites of a module at one step in one query, which costs as much as that of a single site.

    Of each site there is one row per cast (or reference, of a result), the running cast first. Each has its ``state``, and
    ``lost``: no element is finite, and a value of the finite ones says nothing.
    """
    ours = ("log2_hist", "scale_inv_min", "scale_inv_max", "scale_inv_mean_log2")
    names = ", ".join([*ours, *(column(name) for name in columns if name not in ours)])
    return _rows(
        run,
        "SELECT step, gemm, tensor, cast_name, reference, actual,"
        f" {kind_sql(run, within=None)} AS kind, {STATE_SQL} AS state, {LOST_SQL} AS lost, {names} FROM sites"
        " WHERE module = ? AND step = ? ORDER BY actual DESC, reference DESC, cast_name",
        [module, step],
    )


def side_by_side(rows: Sequence[dict[str, Any]], site: tuple[str, str]) -> list[dict[str, Any]]:
    """Return those of :func:`rows_at` that are of one site."""
    return [row for row in rows if (row["gemm"], row["tensor"]) == site]


def last_sampled(run: Run) -> int | None:
    """Return the last step with statistics."""
    step = _rows(run, "SELECT max(step) AS step FROM raw")[0]["step"]
    return None if step is None else int(step)


def first_not_finite(run: Run, module: str) -> int | None:
    """Return the first sampled step at which a tensor of a module holds NaN or Inf."""
    if not has_nonfinite(run):
        return None
    step = _rows(run, f"SELECT min(step) AS step FROM raw WHERE module = ? AND {STATE_SQL} > 0", [module])[0]["step"]
    return None if step is None else int(step)


def first_not_finite_site(run: Run, module: str) -> str | None:
    """Return the site, as ``gemm.tensor``, at which a module first holds NaN or Inf; of one step operands before results."""
    if not has_nonfinite(run):
        return None
    rows = _rows(
        run,
        f"SELECT gemm, tensor FROM raw WHERE module = ? AND {STATE_SQL} > 0 ORDER BY step,"
        " CASE WHEN reference = 'operand' THEN 0 ELSE 1 END, CASE gemm WHEN 'fprop' THEN 0 WHEN 'dgrad' THEN 1 ELSE 2 END,"
        " tensor LIMIT 1",
        [module],
    )
    return f"{rows[0]['gemm']}.{rows[0]['tensor']}" if rows else None


def lost_at(rows: Sequence[dict[str, Any]], site: tuple[str, str]) -> int:
    """Return the state of a site without any finite element among :func:`rows_at`, or 0."""
    return max((int(row["state"]) for row in side_by_side(rows, site) if row["lost"]), default=0)


def histogram(rows: Sequence[dict[str, Any]], site: tuple[str, str], cast: str | None = None) -> ExponentHistogram | None:
    """Return the exponents of a site among :func:`rows_at`, with the range of a cast (the running one by default)."""
    rows = [row for row in side_by_side(rows, site) if row["reference"] == "operand"]
    counts = next((row["log2_hist"] for row in rows if row["log2_hist"]), None)
    if counts is None:
        return None
    chosen = next((row for row in rows if row["cast_name"] == cast), rows[0])
    bins: NDArray[np.int64] = np.array(counts, dtype=np.int64)
    return ExponentHistogram(first_log2=FIRST_LOG2, counts=bins, step=int(chosen["step"]), cast=_range(chosen))


def _range(row: dict[str, Any]) -> CastRange | None:
    name = str(row["cast_name"]).split(" ")[0]
    low, high, mean = row["scale_inv_min"], row["scale_inv_max"], row["scale_inv_mean_log2"]
    if name not in FORMATS or not low or not high or mean is None:
        return None
    logs = (float(np.log2(low)), float(mean), float(np.log2(high)))
    return CastRange(name=row["cast_name"], actual=bool(row["actual"]), scale_inv_log2=logs, format=name)
