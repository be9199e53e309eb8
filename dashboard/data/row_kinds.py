"""Bits of a row's kind beside those of its site: what no rule takes for a fault, by the rules' own limits.

``CLIPS_LITTLE`` clips, and F104 (under delayed and static scales F101) leaves it: its headroom is that of values that were
rounded before the scale was made, or that of growth. ``NO_CAUSE`` has zeros that F102, F105, F106 and F128 leave: there is no
outlier above them, the scale is not too old, no tokens of unequal size share it, and the SQNR says what they cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.metrics.histogram import FIRST_LOG2

from .healthy_ranges import CLIPS_LITTLE, KIND_SQL, NO_CAUSE, ROW_BITS

if TYPE_CHECKING:
    from fp8debug import Run

_IS_DELAYED = "(cast_name LIKE '%delayed%' OR cast_name LIKE '%static%')"
_IS_BELOW_8_BITS = "(" + " OR ".join(f"cast_name LIKE '{f.name} %'" for f in FORMATS.values() if f.bits < 8) + ")"


def kind_sql(run: Run, metric: str = "", within: str | None = "TRUE") -> str:
    """Return SQL over ``sites`` for the kind of a row as a metric needs it, or all metrics; see :func:`bits_sql`."""
    bits = bits_sql(run, metric, within)
    return KIND_SQL if bits == "0" else f"({KIND_SQL} + {bits})"


def bits_sql(run: Run, metric: str = "", within: str | None = "TRUE", has_zeros: bool | None = None) -> str:
    """Return SQL over ``sites`` for the bits of a row that a metric needs, or all metrics; 0 where there are none.

    Args:
        run: the run.
        metric: a column of ``ROW_BITS``; of another none is needed. All of them by default.
        within: SQL condition on the steps of the rows that it will be asked of; None where they are few, so that their
            histograms may be read without a look for inputs that need them.
        has_zeros: whether :func:`inputs_with_zeros_sql` is true of any of them, where that is known.
    """
    wanted = {ROW_BITS.get(metric, 0)} if metric else set(ROW_BITS.values())
    found = []
    if CLIPS_LITTLE in wanted and "overflow_rate" in run.columns:
        found.append(f"CASE WHEN coalesce({_clips_little(run)}, FALSE) THEN {CLIPS_LITTLE} ELSE 0 END")
    if NO_CAUSE in wanted and _zero_rates(run):
        has_cause = _has_cause(run, within, has_zeros)
        found.append(f"CASE WHEN {_zeros_of(run)} > {limits.WARN_UNDERFLOW} AND NOT {has_cause} THEN {NO_CAUSE} ELSE 0 END")
    return f"({' + '.join(found)})" if found else "0"


def _column(run: Run, name: str) -> str:
    """Return a column, or null where a run has none of that name."""
    return name if name in run.columns else "CAST(NULL AS DOUBLE)"


def _clips_little(run: Run) -> str:
    headroom = _column(run, "headroom")
    least = f"CASE WHEN {_IS_DELAYED} THEN {limits.MIN_CLIPPED_HEADROOM_DELAYED} ELSE {limits.MIN_CLIPPED_HEADROOM} END"
    few = f"{_column(run, 'num_saturated')} < {limits.MIN_CLIPPED_ELEMENTS}"
    return f"overflow_rate > 0 AND cast_name NOT LIKE '%pow2_floor%' AND ({headroom} <= {least} OR {few})"


def _zero_rates(run: Run) -> list[str]:
    return [name for name in ("underflow_nonzero_rate", "underflow_rate") if name in run.columns]


def _zeros_of(run: Run) -> str:
    return f"coalesce({', '.join(_zero_rates(run))})"


def _has_enough(run: Run) -> str:
    return f"coalesce({_column(run, 'num_underflow')}, {limits.MIN_UNDERFLOW_ELEMENTS}) >= {limits.MIN_UNDERFLOW_ELEMENTS}"


def inputs_with_zeros_sql(run: Run) -> str:
    """Return SQL over ``sites`` or ``stats`` of whether a row is an input with zeros: its histogram may tell of an outlier."""
    if not _zero_rates(run):
        return "FALSE"
    return f"(gemm = 'fprop' AND tensor = 'input' AND {_has_enough(run)} AND {_zeros_of(run)} > {limits.WARN_UNDERFLOW})"


def _has_cause(run: Run, within: str | None, has_zeros: bool | None) -> str:
    """Return SQL of whether a rule may name the cause of a row's zeros, never null."""
    zeros, headroom, sqnr = _zeros_of(run), _column(run, "headroom"), _column(run, "sqnr_db")
    enough = _has_enough(run)
    is_fresh = f"coalesce({headroom}, 1) >= {limits.MAX_STALE_HEADROOM}"
    is_much = f"NOT ({_IS_BELOW_8_BITS} AND {zeros} < {limits.MAX_UNDERFLOW_LOW_BITS})"
    outlier = f"gemm = 'fprop' AND tensor = 'input' AND {is_fresh} AND {is_much}"
    asked = f"SELECT 1 AS one FROM stats WHERE {within} AND {inputs_with_zeros_sql(run)} LIMIT 1"
    if has_zeros is None:
        has_zeros = within is None or run.memo(f"inputs with zeros {within}", lambda: bool(run.sql(asked).num_rows))
    # Histograms take as long to read as all else: only where an input has zeros.
    if has_zeros:
        outlier += f" AND {_has_outlier(run)}"
    stale = f"{_IS_DELAYED} AND {headroom} < {limits.MAX_STALE_HEADROOM} AND {sqnr} < {limits.MAX_STALE_SQNR_DB}"
    unequal = "gemm = 'dgrad' AND tensor = 'grad_output' AND cast_name LIKE '% 128x128 current%'"
    unmeasured = f"{sqnr} IS NULL AND {zeros} > {limits.MAX_UNDERFLOW_UNMEASURED}"
    return f"coalesce({enough} AND (({outlier}) OR ({stale}) OR ({unequal})) OR ({unmeasured}), FALSE)"


def _has_outlier(run: Run) -> str:
    """Return SQL of F105's outlier: half of the elements lie so many binades below the amax, or the crest is so high."""
    crest = f"{_column(run, 'amax')} >= {limits.MIN_CREST} * {_column(run, 'rms')}"
    if "log2_hist" not in run.columns or "amax" not in run.columns:
        return f"({crest})"
    # Bin p holds the median, FIRST_LOG2 + p + 1/2, where it is the first up to which half of the elements are counted.
    last = f"CAST(floor(log2(amax) - {limits.MIN_SPREAD_LOG2 + FIRST_LOG2 + 0.5}) AS INTEGER)"
    below = f"list_sum(list_slice(log2_hist, 1, {last} + 1))"
    is_far = f"amax > 0 AND {last} >= 0 AND 2 * {below} >= list_sum(log2_hist)"
    return f"CASE WHEN coalesce(list_sum(log2_hist), 0) > 0 THEN {is_far} ELSE {crest} END"
