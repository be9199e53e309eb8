"""Health of a site: its worst severity over all metrics that have a healthy range, and which metric that is.

A row's severities are joined into one whole number, and times ``ROOM`` plus the place of its site (``sites_of``) into a code, so
that the worst of many rows is a plain maximum. ``headroom`` and
``scale_log2_ratio`` take no part: under a delayed scale a single clipped element moves them, and ``overflow_rate`` says how many
are clipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .healthy_ranges import ROW_BITS, envelope
from .records import Floats, Ints

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


def severity_numbers(metric: str, values: NDArray[np.float64], kinds: Ints) -> Ints:
    """Return severity and place of one metric's values in one number each, -1 for NaN and where nothing says what is healthy.

    It is the severity in ``FINE`` steps times ``ROOM``, plus the place. Healthy, and better than healthy, is severity 0.

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
    """Return the severities in codes, NaN for a negative one."""
    found = codes // (ROOM * ROOM) / np.float32(FINE)
    return np.where(codes >= 0, found, np.nan).astype(np.float32)


def reason_of(code: int, sites: Sequence[Site]) -> Reason:
    """Return the metric and the site in a code."""
    metric, site = METRICS[len(METRICS) - 1 - code // ROOM % ROOM], code % ROOM
    return Reason(metric, *(sites[site] if site < len(sites) else ("", "", "")))
