"""Bits of a row's kind beside those of its site: what rules take for a fault and what not, by their own limits.

``CLIPS_LITTLE`` clips, and F104 (under delayed and static scales F101) leaves it: its headroom is that of values that were
rounded before the scale was made, or that of growth. ``NO_CAUSE`` has zeros that F102, F105, F106 and F128 leave: there is no
outlier above them, the scale is not too old, no tokens of unequal size share it, and the SQNR says what they cost.
``BELOW_FLOOR`` is an operand of less than 8 bits that F128 names: its magnitudes say how far from its tensor the cast can put it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.metrics.histogram import FIRST_LOG2
from fp8debug.recipes import Cast

from .healthy_ranges import BELOW_FLOOR, CLIPS_LITTLE, KIND_SQL, NO_CAUSE, ROW_BITS

if TYPE_CHECKING:
    from fp8debug import Run

_IS_DELAYED = "(cast_name LIKE '%delayed%' OR cast_name LIKE '%static%')"
_BELOW_8_BITS = sorted(f.name for f in FORMATS.values() if f.bits < 8)
_IS_BELOW_8_BITS = "(" + " OR ".join(f"cast_name LIKE '{name} %'" for name in _BELOW_8_BITS) + ")"


def kind_sql(run: Run, metric: str = "", within: str | None = "TRUE") -> str:
    """Return SQL over ``sites`` for the kind of a row as a metric needs it, or all metrics; see :func:`bits_sql`."""
    bits = bits_sql(run, metric, within)
    return KIND_SQL if bits == "0" else f"({KIND_SQL} + {bits})"


def bits_sql(run: Run, metric: str = "", within: str | None = "TRUE", with_histograms: bool | None = None) -> str:
    """Return SQL over ``sites`` for the bits of a row that a metric needs, or all metrics; 0 where there are none.

    Args:
        run: the run.
        metric: a column of ``ROW_BITS``; of another none is needed. All of them by default.
        within: SQL condition on the steps of the rows that it will be asked of; None where they are few, so that their
            histograms may be read without a look for inputs that need them.
        with_histograms: whether :func:`needs_histogram_sql` is true of any of them, where that is known.
    """
    wanted = {ROW_BITS.get(metric, 0)} if metric else set(ROW_BITS.values())
    found = []
    casts = _casts_below_8_bits(run) if "sqnr_db" in run.columns else {}
    if with_histograms is None:
        asked = f"SELECT 1 AS one FROM stats WHERE {within} AND {needs_histogram_sql(run)} LIMIT 1"
        needs = (NO_CAUSE in wanted and bool(_zero_rates(run))) or (BELOW_FLOOR in wanted and bool(casts))
        with_histograms = needs and (within is None or run.memo(f"histograms {within}", lambda: bool(run.sql(asked).num_rows)))
    if BELOW_FLOOR in wanted and casts:
        found.append(f"CASE WHEN {_is_below_floor(run, casts, with_histograms)} THEN {BELOW_FLOOR} ELSE 0 END")
    if CLIPS_LITTLE in wanted and "overflow_rate" in run.columns:
        found.append(f"CASE WHEN coalesce({_clips_little(run)}, FALSE) THEN {CLIPS_LITTLE} ELSE 0 END")
    if NO_CAUSE in wanted and _zero_rates(run):
        has_cause = _has_cause(run, with_histograms)
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


def needs_histogram_sql(run: Run) -> str:
    """Return SQL over ``sites`` or ``stats`` of whether a row's bits depend on its histogram.

    It may tell of an outlier above the zeros of an input, and how far an operand of less than 8 bits can be from its tensor.
    """
    found = []
    if _zero_rates(run):
        found.append(f"gemm = 'fprop' AND tensor = 'input' AND {_has_enough(run)} AND {_zeros_of(run)} > {limits.WARN_UNDERFLOW}")
    casts = _casts_below_8_bits(run) if "sqnr_db" in run.columns else {}
    highest = [(name, limits.highest_floor_db(cast)) for name, cast in casts.items() if limits.judges_magnitudes(cast)]
    if highest:
        found.append(f"reference = 'operand' AND sqnr_db < CASE cast_name {_cases(highest)} END")
    return f"({' OR '.join(f'({one})' for one in found)})" if found else "FALSE"


def _casts_below_8_bits(run: Run) -> dict[str, Cast]:
    """Return the casts of operands to formats of less than 8 bits by name; footers tell at once that a run has none."""
    first, last = _BELOW_8_BITS[0], _BELOW_8_BITS[-1]
    named = f"cast_name >= '{first} ' AND cast_name < '{last}!'"
    query = f"SELECT DISTINCT cast_name FROM site_rows WHERE {named} AND reference = 'operand'"

    def read() -> dict[str, Cast]:
        found = {}
        for name in sorted(run.distinct_sites(query)["cast_name"].to_pylist()):
            with suppress(UsageError):  # of another version
                found[name] = Cast.parse(name)
        return {name: cast for name, cast in found.items() if cast.format in _BELOW_8_BITS}

    casts: dict[str, Cast] = run.memo("casts below 8 bits", read)
    return casts


def _cases(values: Iterable[tuple[str, object]]) -> str:
    return " ".join(f"WHEN '{name}' THEN {value}" for name, value in values)


def _is_below_floor(run: Run, casts: Mapping[str, Cast], with_histograms: bool) -> str:
    """Return SQL of whether F128 names an operand of less than 8 bits."""
    least = f"sqnr_db < CASE cast_name {_cases((name, limits.operand_floor_db(cast)) for name, cast in casts.items())} END"
    conditions = [f"({least})"]
    if with_histograms and {"log2_hist", "amax", "scale_inv_max", "sum_x2"} <= set(run.columns):
        alike: dict[str, list[tuple[str, Cast]]] = {}
        for name, cast in casts.items():
            if limits.judges_magnitudes(cast):
                alike.setdefault(limits.below_tensor_floor_sql(cast), []).append((name, cast))
        for is_below, of in alike.items():
            highest = _cases((name, limits.highest_floor_db(cast)) for name, cast in of)
            conditions.append(f"(CASE WHEN sqnr_db < CASE cast_name {highest} END THEN {is_below} END)")
    return f"coalesce(reference = 'operand' AND ({' OR '.join(conditions)}), FALSE)"


def site_bits(metric: str, gemm: str, tensor: str, cast_name: str) -> int:
    """Return the bits of a metric that all rows of a site have, whatever their values: no rule judges it there."""
    is_zeros = ROW_BITS.get(metric, 0) == NO_CAUSE
    is_delayed = "delayed" in cast_name or "static" in cast_name
    may_have = (gemm, tensor) == ("fprop", "input") or is_delayed
    may_have = may_have or ((gemm, tensor) == ("dgrad", "grad_output") and " 128x128 current" in cast_name)
    return NO_CAUSE if is_zeros and not may_have else 0


def _has_cause(run: Run, with_histograms: bool) -> str:
    """Return SQL of whether a rule may name the cause of a row's zeros, never null."""
    zeros, headroom, sqnr = _zeros_of(run), _column(run, "headroom"), _column(run, "sqnr_db")
    enough = _has_enough(run)
    is_fresh = f"coalesce({headroom}, 1) >= {limits.MAX_STALE_HEADROOM}"
    is_much = f"NOT ({_IS_BELOW_8_BITS} AND {zeros} < {limits.MAX_UNDERFLOW_LOW_BITS})"
    outlier = f"gemm = 'fprop' AND tensor = 'input' AND {is_fresh} AND {is_much}"
    # Histograms take as long to read as all else: only where a row needs them.
    if with_histograms:
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
