"""Rows of ``sites`` with places in lists for their strings, judged in numpy: the health of some steps, and the table in memory.

To compare strings in SQL costs as much as to read the metrics. As a place in a list each word of a dictionary is looked up once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from . import health as healths
from .arrays import doubles, ints
from .healthy_ranges import kind_of
from .nonfinite import FINITE, LOST_SQL, MISSING, STATE_SQL, States, has_nonfinite
from .records import Ints
from .row_kinds import bits_sql, needs_histogram_sql

if TYPE_CHECKING:
    from fp8debug import Run

#: (gemm, tensor, cast name, reference, running) of a site, and the columns of these.
Key = tuple[str, str, str, str, bool]
COLUMNS = ("gemm", "tensor", "cast_name", "reference", "actual")
#: Rows that are read at a time.
ROWS_AT_ONCE = 1_000_000


def keys_of(run: Run, condition: str | None = None, values: Sequence[object] = ()) -> list[Key]:
    """Return the sites of the rows under a condition over ``raw``, or of all rows."""
    known = " AND ".join(f"{name} IS NOT NULL" for name in ("module", "step", *COLUMNS))
    asked = f"SELECT DISTINCT {', '.join(COLUMNS)} FROM {{}} WHERE {known}"
    if condition is None:
        table = run.distinct_sites(asked.format("site_rows"))
    else:
        table = run.sql(f"{asked.format('raw')} AND {condition}", list(values))
    return sorted((row["gemm"], row["tensor"], row["cast_name"], row["reference"], row["actual"]) for row in table.to_pylist())


def read_rows(
    run: Run,
    modules: Sequence[str],
    keys: Sequence[Key],
    metrics: Sequence[str],
    steps: Ints,
    sites: str = "sites WHERE TRUE",
    values: Sequence[object] = (),
) -> Iterator[pa.Table]:
    """Yield rows of m, step, c, the metrics, bits and, in a run with NaN or Inf, state and lost, some steps at a time.

    Args:
        run: the run.
        modules: m is the place of a row's module among them.
        keys: c is the place of a row's site among them; rows of no other are returned.
        metrics: columns; those of the health in float64, others in float32.
        steps: the steps whose rows are read, ascending.
        sites: SQL text of ``sites`` under a condition, to which more can be added.
        values: for its question marks.
    """
    if not keys or not modules:
        return
    lists = [list(dict.fromkeys(_word(key[i]) for key in keys)) for i in range(len(COLUMNS))]
    code, of_key = "0", [0] * len(keys)
    for i, (name, known) in enumerate(zip(COLUMNS, lists, strict=True)):
        code = f"({code} * {len(known)} + {_place(name, known)})"
        of_key = [n * len(known) + known.index(_word(key[i])) for n, key in zip(of_key, keys, strict=True)]
    cases = " ".join(f"WHEN {n} THEN {c}" for c, n in enumerate(of_key))
    chosen = "".join(f", TRY_CAST({name} AS {'DOUBLE' if name in healths.METRICS else 'FLOAT'}) AS {name}" for name in metrics)
    if has_nonfinite(run):
        chosen += f", {STATE_SQL} AS state, CAST({LOST_SQL} AS INTEGER) AS lost"
    text = f"SELECT {_place('module', modules)} AS m, step, CASE {code} {cases} END AS c{chosen}"
    at_once = max(1, ROWS_AT_ONCE * len(run.sampled_steps) // max(1, run.num_rows))
    for begin in range(0, len(steps), at_once):
        part = steps[begin : begin + at_once]
        within = f"{sites} AND step BETWEEN {part[0]} AND {part[-1]}"

        def read(with_histograms: bool, within: str = within) -> pa.Table:
            asked = "" if with_histograms else f", CAST(coalesce({needs_histogram_sql(run)}, FALSE) AS INTEGER) AS needs"
            coded = f"{text}, {bits_sql(run, with_histograms=with_histograms)} AS bits{asked} FROM {within}"
            return run.sql(f"SELECT * FROM ({coded}) AS coded WHERE m + c IS NOT NULL", list(values))

        table = read(False)
        # Histograms take as long to read as all else: only where a row needs them.
        yield read(True) if ints(table, "needs").any() else table


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _place(column: str, values: Sequence[str]) -> str:
    """Return SQL for the place of a string column's value in a list: an enumeration looks up each word of a dictionary once."""
    words = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    return f"CAST(enum_code(TRY_CAST(CAST({column} AS VARCHAR) AS ENUM({words}))) AS INTEGER)"


def severities_of_rows(table: pa.Table, metrics: Sequence[str], keys: Sequence[Key]) -> Ints:
    """Return ``health.severity_numbers`` of the worst of some metrics of each row of :func:`read_rows`, -1 for none."""
    worst = np.full(table.num_rows, -1, np.int32)
    kinds = np.array([kind_of(*key[:4]) for key in keys], np.int32)[ints(table, "c")] + ints(table, "bits")
    lost = ints(table, "lost") > 0 if "lost" in table.column_names else None
    for name in metrics:
        own = doubles(table, name)
        if lost is not None:
            own[lost] = np.nan
        np.maximum(worst, healths.severity_numbers(name, own, kinds), out=worst)
    return worst


def worst_cells(
    run: Run,
    keys: Sequence[Key],
    steps: Ints,
    first: int,
    width: int,
    sites: str,
    values: Sequence[object],
) -> tuple[list[str], Ints, Ints, States]:
    """Return the worst health of each module and ``width`` steps from the files, as ``MetricCache.health_of`` does from memory.

    Args:
        run: the run.
        keys: the sites.
        steps: that are read, ascending.
        first: first step of the first cell.
        width: steps of a cell.
        sites: SQL text as of :func:`read_rows`.
        values: for its question marks.
    """
    modules = list(dict.fromkeys(str(m["fqn"]) for m in run.modules))
    metrics = [name for name in healths.METRICS if name in run.columns]
    cells = np.unique((steps - first) // width)
    shape = len(cells), len(modules)
    codes, states = np.full(shape, -1, np.int32), np.full(shape, -1, np.int8)
    begun = np.full(len(cells), np.iinfo(np.int32).max, np.int32)
    places = healths.sites_of(key[:4] for key in keys)
    place = np.array([places.index(s) if (s := (k[0], k[1], k[3])) in places else healths.ROOM - 1 for k in keys], np.int32)
    for table in read_rows(run, modules, keys, metrics, steps, sites, values):
        worst, at = severities_of_rows(table, metrics, keys), ints(table, "step")
        found = np.where(worst >= 0, worst * healths.ROOM + place[ints(table, "c")], -1)
        state = ints(table, "state") if "state" in table.column_names else np.full(len(found), FINITE, np.int32)
        counts = (found >= 0) | (state > FINITE)
        cell, m = np.searchsorted(cells, (at[counts] - first) // width), ints(table, "m")[counts]
        np.maximum.at(codes, (cell, m), found[counts])
        np.maximum.at(states, (cell, m), state[counts].astype(np.int8))
        np.minimum.at(begun, cell, at[counts])
    return known_cells(modules, begun, codes, states)


def known_cells(modules: Sequence[str], begun: Ints, codes: Ints, states: States) -> tuple[list[str], Ints, Ints, States]:
    """Return the modules and the cells that have a value, and their codes and states ``[modules, cells]``.

    Args:
        modules: names.
        begun: first step of each cell.
        codes: numbers of the health, ``[cells, modules]``.
        states: the same, -1 where there is nothing.
    """
    there = states >= FINITE
    rows, cells = np.flatnonzero(there.any(axis=0)), np.flatnonzero(there.any(axis=1))
    chosen = np.ix_(cells, rows)
    shown = np.where(there, states, np.int8(MISSING))
    return [modules[m] for m in rows.tolist()], begun[cells].astype(np.int32), codes[chosen].T.copy(), shown[chosen].T.copy()
