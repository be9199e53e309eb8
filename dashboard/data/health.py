"""Health of a site: its worst severity over all metrics that have a healthy range, and which metric that is.

A row's severities are joined in SQL into one whole number, so that the worst of many rows is a plain maximum. ``headroom`` and
``scale_log2_ratio`` take no part: under a delayed scale a single clipped element moves them, and ``overflow_rate`` says how many
are clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .healthy_ranges import KIND_SQL, ROW_BITS, HealthyRange, envelope, kind_of
from .nonfinite import value_sql
from .records import Floats, Ints
from .row_kinds import bits_sql

if TYPE_CHECKING:
    from fp8debug import Run

#: Name of the health in the list of metrics, and its sentence there.
HEALTH = "health"
DOC = "worst severity over all metrics that have a healthy range: 0 healthy, 1 the warn threshold, 2 the act threshold, 3 lost"
#: The metrics, those that name a fault best first: of equally severe ones the first counts.
METRICS = ("sqnr_db", "overflow_rate", "underflow_rate", "underflow_nonzero_rate", "gain", "norm_ratio", "cosine")
#: Steps of severity between two whole ones, and room for metrics and for sites in a number.
FINE, ROOM = 1000, 16

#: (gemm, tensor, reference) of a site.
Site = tuple[str, str, str]


class Reason(NamedTuple):
    """Metric and site that a severity comes from."""

    metric: str
    gemm: str
    tensor: str
    reference: str

    def __str__(self) -> str:
        """Return "sqnr_db at fprop.input"; a result's error by accumulation says so."""
        return f"{self.metric} at {self.gemm}.{self.tensor}" + (", accumulation" if self.reference == "exact" else "")


def severity_sql(run: Run, keys: Iterable[tuple[str, str, str, str]]) -> str:
    """Return SQL over ``sites`` with the columns of :func:`kinds_sql`: severity and the place of its metric in one number.

    It is severity in ``FINE`` steps times ``ROOM``, plus the place, and null where a row has none of the metrics. Healthy, and
    better than healthy, is severity 0.

    Args:
        run: the run.
        keys: (gemm, tensor, cast name, reference) of the sites that it will be asked of.
    """
    kinds = sorted({kind_of(*key) for key in keys})
    found = []
    for place, metric in enumerate(METRICS):
        value = f"CAST({value_sql(run, metric)} AS DOUBLE)"
        grouped: dict[tuple[int, HealthyRange], list[int]] = {}
        for kind in kinds:
            for bit in {ROW_BITS.get(metric, 0): None, 0: None}:  # the rows with the bit first
                ranges = envelope(metric, kind | bit)
                if ranges is not None:
                    grouped.setdefault((bit, ranges), []).append(kind)
        if metric not in run.columns or not grouped:
            continue
        cases = [
            f"WHEN {f'bits & {bit} > 0 AND ' if bit else ''}kind IN ({', '.join(map(str, of))}) THEN {_line_sql(value, ranges)}"
            for (bit, ranges), of in sorted(grouped.items(), key=lambda item: -item[0][0])
        ]
        better = len(METRICS) - 1 - place
        found.append(f"CAST(round({FINE} * CASE {' '.join(cases)} END) AS INTEGER) * {ROOM} + {better}")
    if not found:
        return "CAST(NULL AS INTEGER)"
    return f"greatest({', '.join(found)})" if len(found) > 1 else found[0]


def severity_numbers(metric: str, values: NDArray[np.float64], kinds: Ints) -> Ints:
    """Return what :func:`severity_sql` says of one metric's values, -1 for NaN and where nothing says what is healthy.

    Args:
        metric: one of ``METRICS``.
        values: of rows.
        kinds: of ``row_kinds.kind_sql``, one for each value.
    """
    found, better = np.full(values.shape, -1, np.int32), len(METRICS) - 1 - METRICS.index(metric)
    kinds = kinds & ~(sum(set(ROW_BITS.values())) & ~ROW_BITS.get(metric, 0))
    for kind in np.flatnonzero(np.bincount(kinds)).tolist():
        ranges = envelope(metric, kind)
        if ranges is None:
            continue
        rows = np.flatnonzero((kinds == kind) & ~np.isnan(values))
        severity = np.interp(values[rows], ranges.values, np.maximum(ranges.severities, 0.0))
        found[rows] = np.floor(FINE * severity + 0.5).astype(np.int32) * ROOM + better
    return found


def _line_sql(value: str, ranges: HealthyRange) -> str:
    """Return SQL for the severity of a value, null for null and for NaN."""
    points = list(zip(ranges.values, (max(0.0, s) for s in ranges.severities), strict=True))
    cases = [f"WHEN {value} IS NULL OR isnan({value}) THEN NULL", f"WHEN {value} <= {points[0][0]!r} THEN {points[0][1]!r}"]
    for (low, begin), (high, end) in pairwise(points):
        rest = "" if begin == end else f" + ({value} - {low!r}) * {(end - begin) / (high - low)!r}"
        cases.append(f"WHEN {value} <= {high!r} THEN {begin!r}{rest}")
    return f"CASE {' '.join(cases)} ELSE {points[-1][1]!r} END"


def code_sql(run: Run, keys: Sequence[tuple[str, str, str, str]]) -> str:
    """Return SQL for severity, metric and site in one number, of which the largest is the worst; see :func:`severities_of`."""
    places = {site: place for place, site in enumerate(sites_of(keys))}
    cases = " ".join(
        f"WHEN gemm = '{gemm}' AND tensor = '{tensor}' AND reference = '{reference}' THEN {place}"
        for (gemm, tensor, reference), place in places.items()
    )
    return f"({severity_sql(run, keys)}) * {ROOM} + CASE {cases} ELSE {ROOM - 1} END" if cases else "CAST(NULL AS INTEGER)"


def sites_of(keys: Iterable[tuple[str, str, str, str]]) -> list[Site]:
    """Return the sites of keys in the order of their places in a number; those beyond the room for them share the last.

    Of equally severe ones the last counts: operands before results, fprop before the others.
    """
    gemms, references = ("wgrad", "dgrad", "fprop"), ("exact", "shadow", "operand")

    def place(site: Site) -> tuple[int, int, Site]:
        gemm, _, reference = site
        return (
            references.index(reference) if reference in references else -1,
            gemms.index(gemm) if gemm in gemms else -1,
            site,
        )

    return sorted({(gemm, tensor, reference) for gemm, tensor, _, reference in keys}, key=place)[: ROOM - 1]


def severities_of(codes: Ints) -> Floats:
    """Return the severities in numbers of :func:`code_sql`, NaN for a negative one."""
    found = codes // (ROOM * ROOM) / np.float32(FINE)
    return np.where(codes >= 0, found, np.nan).astype(np.float32)


def reason_of(code: int, sites: Sequence[Site]) -> Reason:
    """Return the metric and the site in a number of :func:`code_sql`."""
    metric, site = METRICS[len(METRICS) - 1 - code // ROOM % ROOM], code % ROOM
    return Reason(metric, *(sites[site] if site < len(sites) else ("", "", "")))


def keys_of(run: Run, condition: str = "TRUE", values: Sequence[object] = ()) -> list[tuple[str, str, str, str]]:
    """Return (gemm, tensor, cast name, reference) of the rows under a condition over ``raw``."""
    columns = ("gemm", "tensor", "cast_name", "reference")
    known = " AND ".join(f"{name} IS NOT NULL" for name in columns)
    table = run.sql(f"SELECT DISTINCT {', '.join(columns)} FROM raw WHERE {known} AND {condition}", list(values))
    return sorted((row["gemm"], row["tensor"], row["cast_name"], row["reference"]) for row in table.to_pylist())


def kinds_sql(run: Run, within: str = "TRUE") -> str:
    """Return the columns that a query needs beside the number, of rows under a condition on their steps."""
    return f"{KIND_SQL} AS kind, {bits_sql(run, within=within)} AS bits"
