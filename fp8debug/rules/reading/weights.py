"""Weights whose FP8 values are not the cast of the weight they stand for, and which of two causes each of them shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import Finding, Rule
from fp8debug.rules.reading.bounds import OF_ANOTHER_FORMAT, SCALES_ARE_ROUNDED, deficit_sql
from fp8debug.rules.reading.conditions import Condition, Keys, Look, look
from fp8debug.rules.reading.optimizer_steps import largest_updates
from fp8debug.rules.reading.traces import IS_DELAYED, RUNNING, SCALE_COLUMNS, ElsewhereLimits, Trace, scaled_elsewhere, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: SQNR of E5M2 on Gaussian data, closed form (numerics.md, 4).
_E5M2_DB = 25.55
#: SQL predicate: no element grew, and some clip: x.y >= y.y holds where every y lies between 0 and its x, and for no rows of
#: another place, which are across x.
HAS_SHRUNK = "(num_saturated > 0 AND norm_ratio < 1 AND sum_xy >= sum_y2)"


@dataclass(frozen=True)
class WeightLimits(ElsewhereLimits):
    """Thresholds for a wrong weight, and for rows of two kinds; the rules' manual pages say where each comes from.

    An older weight a of its own, w = a + d with updates d across a: <w, a> = <a, a>, so that cosine / norm_ratio, the
    coefficient of w on a, is 1 (weight decay d to 1 - d), above 1 where the weight grew in its own direction. Under permuted
    scales a = r w keeps its length, norm_ratio is about 1 and the coefficient the cosine. Such an older weight has
    (1 - gain) = nmse, values in other places half of that, and noise across w none, at a length beyond w's. A weight that decays
    while its copy does not looks like noise, so that noise has to be so from the first step on.
    """

    max_sqnr_db: float = 27.0
    max_own_scale_sqnr_db: float = 30.0
    max_own_scale_cosine: float = 0.9995
    max_own_headroom_error: float = 0.002
    max_cosine: float = 0.999
    max_headroom: float = 1.25
    min_elements: int = 256
    min_mixed_rows: float = 0.03
    max_foreign_sqnr_db: float = 15.0
    min_steps: int = 2
    warmup: int = 8
    delayed_sqnr_db: float = 23.5
    delayed_cosine: float = 0.998
    min_coefficient: float = 0.9
    max_block_growth: float = 4.0
    max_noise_db: float = 20.0
    max_noise_share: float = 0.25
    max_noise_range_db: float = 2.0
    max_e5m2_error_db: float = 0.6
    max_e5m2_headroom: float = 1.002
    max_flushed_rate: float = 0.05
    min_own_cosine: float = 0.9
    max_unrelated: float = 0.3
    max_size_error: float = 0.5
    max_steps_worth: float = 4.0
    min_judged_rows: float = 0.8


@dataclass(frozen=True)
class OffWeightRule(Rule, WeightLimits):
    """Base of the rules over weights whose FP8 values are not their cast; :class:`WeightLimits` has its thresholds."""

    columns = ("sum_err2", "sum_xy", "sum_x2", "sum_y2")

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to codes of another format, and to scales made for one."""
        misread = {(part.module, part.tensor) for f in others if f.name in OF_ANOTHER_FORMAT for part in f.sites}
        return any((part.module, part.tensor) not in misread for part in finding.sites)


def has_outgrown(min_coefficient: float, max_block_growth: float, max_flushed_rate: float) -> str:
    """Return the SQL predicate that values are those of an older weight, whose scales this one has outgrown.

    Args:
        min_coefficient: of the weight on the older one.
        max_block_growth: growth of a block's amax over growth of the weight's norm.
        max_flushed_rate: share of the nonzero elements that are zero: beyond it the scale is at fault.
    """
    return (
        f"(norm_ratio < 1 AND cosine > {min_coefficient} * norm_ratio AND headroom * norm_ratio < {max_block_growth}"
        f" AND coalesce(underflow_nonzero_rate, 0) < {max_flushed_rate})"
    )


def is_clipped(rounded_db: float) -> str:
    """Return the SQL predicate that all that is wrong clips: the data are those of the tensor, the scales are not.

    Where x lies beyond the range L of its scale, y = L, up to h times L (the headroom), and the largest x is A. Beyond rounding,

        sum of (x - y)^2 <= (h - 1) sum of y (x - y)    and    sum of (x - y)^2 <= (A - A / h)^2 num_saturated

    Neither holds of an older copy: x - y lies across y, or along it in all elements, few of which lie beyond the copy's scales.
    Measured four steps later, in blocks and rows: the right sides are 1.7 and 4.3 times the left ones or more with old scales,
    1.1 and 0.1 times at most with old copies.

    Args:
        rounded_db: SQNR of values that are rounded and nothing else, of E4M3.
    """
    error = f"(sum_err2 - sum_x2 * pow(10, -({rounded_db} - {deficit_sql()}) / 10))"
    return (
        f"(headroom > 1 AND num_saturated > 0 AND norm_ratio < 1 AND {error} > 0"
        f" AND {error} <= (headroom - 1) * (sum_xy - sum_y2)"
        f" AND {error} <= pow(amax * (1 - 1 / headroom), 2) * num_saturated)"
    )


@dataclass(frozen=True, kw_only=True)
class OffWeight:
    """A weight that is not what it should be.

    Attributes:
        trace: where and when.
        foreign: why it is taken for another weight's; empty for a stale one.
        is_transposed_alone: dgrad reads it so, and fprop's copy is right.
        is_unrelated: it has the weight's size and no direction in common with it, and no update can have parted them.
        since_right: clause for people where it is farther away than updates can have moved it since it was right; else empty.
    """

    trace: Trace
    foreign: str
    is_transposed_alone: bool
    is_unrelated: bool
    since_right: str


def look_for_weights(limits: WeightLimits) -> Look:
    """Return the rows that ``off_weights`` asks for."""
    # The last two are for the comparison between ranks.
    columns = ["sqnr_db", "cosine", "headroom", "bad_row_rate", "good_row_rate", "sum_err2", "sum_x2", "numel"]
    columns += ["nmse", "norm_ratio", *(name for name in SCALE_COLUMNS if name not in columns)]
    columns += [
        f"{has_outgrown(limits.min_coefficient, limits.max_block_growth, limits.max_flushed_rate)} AS has_outgrown",
        f"{HAS_SHRUNK} AS has_shrunk",
        f"{is_clipped(limits.max_own_scale_sqnr_db)} AS is_clipped",
    ]
    highest = Condition("sqnr_db", "<", max(limits.max_sqnr_db, limits.max_own_scale_sqnr_db))  # the deficit is never negative
    return look([highest, Keys("tensor = 'weight'"), _bad(limits)], columns)


def _bad(limits: WeightLimits) -> str:
    sqnr = f"(sqnr_db + {deficit_sql()})"
    own_scale = (
        f"NOT {IS_DELAYED} AND NOT {SCALES_ARE_ROUNDED} AND cast_name NOT LIKE '%pow2%'"
        f" AND abs(headroom - 1) > {limits.max_own_headroom_error}"
    )
    return (
        f"numel >= {limits.min_elements} AND coalesce(underflow_nonzero_rate, 0) < {limits.max_flushed_rate}"
        f" AND ({sqnr} < {limits.max_sqnr_db} AND cosine < {limits.max_cosine}"
        f" AND (NOT {IS_DELAYED} OR {sqnr} < {limits.delayed_sqnr_db} AND cosine < {limits.delayed_cosine})"
        f" OR {own_scale} AND {sqnr} < {limits.max_own_scale_sqnr_db} AND cosine < {limits.max_own_scale_cosine})"
    )


def off_weights(run: Run, limits: WeightLimits) -> list[OffWeight]:
    """Return the weights whose FP8 values differ from the weight by more than any cast in range explains.

    The shape must be wrong (a low cosine): one factor for all is F113, equal values in one code F118, E5M2's noise F120, scales
    of other blocks F119, values that clip under older scales F113. A scale applied outside the GEMM is none of it.
    """
    seen = traces(run, look_for_weights(limits))
    is_elsewhere = scaled_elsewhere(run, seen, limits)
    of_gemm = [whole.where(lambda row, site=whole: not is_elsewhere(site, row)) for whole in seen]  # type: ignore[misc]  # bound now
    off = [trace for trace in of_gemm if trace is not None]
    starts = _starts(run, off[0].start) if off else frozenset()
    off = [t for t in off if not are_scales_of_others(t.rows[0], starts, limits.max_headroom, limits.min_own_cosine)]
    scales = {
        t.module
        for t in off
        if has_small_scales(t.rows[0], limits.max_headroom, limits.min_mixed_rows, limits.min_judged_rows)
        or all(row["is_clipped"] for row in t.rows)
    }
    found = [
        trace
        for trace in off
        if trace.module not in scales
        and _lasts(trace, limits)
        and not _has_noise_of_e5m2(trace, limits)
        and _is_of_weight(trace, limits)
    ]
    found = [trace for trace in found if not _is_noise(trace, starts, limits)]
    wrong_in_fprop = {trace.module for trace in off if trace.gemm == "fprop"}
    alone = _have_fprop(run, {trace.module for trace in found} - wrong_in_fprop)
    paces = largest_updates(run) if found else {}
    found = [trace for trace in found if not _is_no_version(trace, starts, paces, trace.module in alone, limits)]
    reasons: dict[str, str] = {}
    for trace in found:
        reasons[trace.module] = reasons.get(trace.module) or _foreign(trace, starts, paces, trace.module in alone, limits)
    return [
        OffWeight(
            trace=trace,
            foreign=reasons[trace.module],
            is_transposed_alone=trace.gemm == "dgrad" and trace.module in alone,
            is_unrelated=_is_unrelated(trace.rows[0], limits)
            and (trace.rows[0]["step"] in starts or bool(_beyond_updates(trace, paces, limits))),
            since_right=_since_right(trace, paces, limits),
        )
        for trace in found
    ]


def _have_fprop(run: Run, modules: set[str]) -> set[str]:
    """Return those of the modules whose weight fprop reads in FP8."""
    if not modules:
        return set()
    query = f"SELECT DISTINCT module FROM sites WHERE {RUNNING} AND gemm = 'fprop' AND tensor = 'weight'"
    return modules & set(run.sql(query)["module"].to_pylist())


def _is_noise(trace: Trace, starts: frozenset[int], limits: WeightLimits) -> bool:
    """Return whether noise was added to the right values, as much at every step from the first on."""
    known = [float(row["sqnr_db"]) for row in trace.rows]
    return (
        trace.rows[0]["step"] in starts
        and max(known) < limits.max_noise_db
        and max(known) - min(known) < limits.max_noise_range_db
        and all(row["norm_ratio"] > 1 and abs(1 - row["gain"]) < limits.max_noise_share * row["nmse"] for row in trace.rows)
    )


def _lasts(trace: Trace, limits: WeightLimits) -> bool:
    is_delayed = trace.cast is not None and trace.cast.scaling == "delayed"
    return trace.lasting(min(limits.min_steps, len(trace.sampled)), limits.warmup if is_delayed else 0)


def _is_of_weight(trace: Trace, limits: WeightLimits) -> bool:
    """Return whether the values are at fault, not the scales.

    Scales of a stale weight are outgrown later than its values are wrong, or as the weight grows; scales of other blocks keep
    its length or make it longer.
    """
    first = trace.rows[0]
    return (first["headroom"] or 1) <= limits.max_headroom or first["has_outgrown"] or _are_mixed(first, limits)


def has_small_scales(row: dict[str, Any], max_headroom: float, min_mixed_rows: float, min_judged_rows: float) -> bool:
    """Return whether some rows are right and the others too small, beyond the scales of their blocks: the scales are at fault."""
    return bool(
        row["has_shrunk"] and (row["headroom"] or 1) > max_headroom and _share_is_mixed(row, min_mixed_rows, min_judged_rows)
    )


def starts_of(run: Run) -> frozenset[int]:
    """Return the sampled steps at which the run, or a resumed part of it, began."""
    return _starts(run, min(run.sampled_steps, default=0))


def are_scales_of_others(row: dict[str, Any], starts: frozenset[int], max_headroom: float, min_cosine: float) -> bool:
    """Return whether a weight at the start of a run has the right values under scales of other blocks.

    Nothing has grown yet, so that a block's values lie beyond its scale only if it is not the block's own; and values of
    another weight have no direction in common with this one's.
    """
    return bool(
        row["step"] in starts and (row["headroom"] or 1) > max_headroom and row["cosine"] >= min_cosine and not row["has_shrunk"]
    )


def _are_mixed(row: dict[str, Any], limits: WeightLimits) -> bool:
    """Return whether some rows are right and the others of another place."""
    return _share_is_mixed(row, limits.min_mixed_rows, limits.min_judged_rows)


def _share_is_mixed(row: dict[str, Any], min_rows: float, min_judged: float) -> bool:
    bad, good = row["bad_row_rate"], row["good_row_rate"]
    return bad is not None and min(bad, good) >= min_rows and bad + good >= min_judged


def _has_noise_of_e5m2(trace: Trace, limits: WeightLimits) -> bool:
    """Return whether it is E5M2 that is measured: the same SQNR at every step under the tensor's own scale."""
    return all(
        abs(row["sqnr_db"] - _E5M2_DB) < limits.max_e5m2_error_db and (row["headroom"] or 1) <= limits.max_e5m2_headroom
        for row in trace.rows
    )


def _starts(run: Run, first: int) -> frozenset[int]:
    """Return the sampled steps at which the run, or a resumed part of it, began."""
    sampled = run.sampled_steps
    resumed = run.sql("SELECT DISTINCT step FROM events WHERE kind = 'resume' AND step IS NOT NULL")["step"].to_pylist()
    return frozenset([first, *(step for at in resumed for step in [s for s in sampled if s >= at][:1])])


def _is_unrelated(row: dict[str, Any], limits: WeightLimits) -> bool:
    """Return whether values have the weight's size and no direction in common with it."""
    return bool(abs(row["norm_ratio"] - 1) < limits.max_size_error and abs(row["cosine"]) < limits.max_unrelated)


def _foreign(
    trace: Trace, starts: frozenset[int], paces: Mapping[str, float], is_transposed_alone: bool, limits: WeightLimits
) -> str:
    """Return why these are values of another weight or shard, not older ones of this; empty where nothing says so."""
    row: dict[str, Any] = trace.rows[0]
    if _are_mixed(row, limits):
        bad, good = row["bad_row_rate"], row["good_row_rate"]
        return f"{bad:.0%} of its rows are other values and {good:.0%} are right, so that a part is of another place"
    if row["step"] in starts and row["sqnr_db"] < limits.max_foreign_sqnr_db:
        where = "it is so from the first step on, before any update could part them"
        if _is_unrelated(row, limits):
            where += (
                f"; cosine {row['cosine']:.3f} at norm ratio {row['norm_ratio']:.3g}: another weight's values (another expert's,"
                " layer's or shard's), or its own in other places"
            )
        return where
    has_direction = abs(row["cosine"]) >= limits.max_unrelated
    beyond = "" if has_direction and not is_transposed_alone else _beyond_updates(trace, paces, limits)
    if not beyond or has_direction:
        return beyond
    return f"{beyond}; another weight's (another expert's, layer's or shard's), or its own in other places"


def _is_no_version(
    trace: Trace, starts: frozenset[int], paces: Mapping[str, float], is_transposed_alone: bool, limits: WeightLimits
) -> bool:
    """Return whether values in the weight's direction are none that it had: F128 says what they can be.

    They are so at the first step of a training, before there was another version, or farther away than its updates reach.
    """
    row: dict[str, Any] = trace.rows[0]
    if _are_mixed(row, limits) or abs(row["cosine"]) < limits.max_unrelated:
        return False
    if row["step"] in starts:
        return bool(row["step"] == 0 and row["sqnr_db"] >= limits.max_foreign_sqnr_db)
    return not is_transposed_alone and bool(_beyond_updates(trace, paces, limits))


def _beyond_updates(trace: Trace, paces: Mapping[str, float], limits: WeightLimits) -> str:
    """Return why the values are no older ones of the weight; empty where nothing says so.

    All of the optimizer's steps since the training began move a weight by the sum of their updates at most.

    Args:
        trace: a weight that is off.
        paces: RMS of the largest update of each module's weight that was recorded.
        limits: their ``max_steps_worth`` is for the updates that were not.
    """
    row, pace = trace.rows[0], paces.get(trace.module)
    num_steps, distance = row["step"] + 1, _distance(row)
    if pace is None or distance <= limits.max_steps_worth * pace * num_steps:
        return ""
    return (
        f"cosine {row['cosine']:.3f} at norm ratio {row['norm_ratio']:.3g}, RMS {distance:.3g} away, and {num_steps} optimizer"
        f" steps of {pace:.2g} at most move it by {num_steps * pace:.2g}, so that these are no older values of it unless it was"
        " loaded anew"
    )


def _since_right(trace: Trace, paces: Mapping[str, float], limits: WeightLimits) -> str:
    """Return why it is no copy that the last steps left behind; empty where nothing says so."""
    row, pace = trace.rows[0], paces.get(trace.module)
    right = max((step for step in trace.sampled if step < row["step"]), default=None)
    if right is None or pace is None:
        return ""
    num_steps, distance = row["step"] - right, _distance(row)
    if distance <= limits.max_steps_worth * pace * num_steps:
        return ""
    return (
        f"it was right at step {right}, lies {distance:.2g} (RMS) away, and {num_steps} optimizer steps of {pace:.2g} at most"
        f" move it by {num_steps * pace:.2g}: values of before step {right}, or other codes, signs or places"
    )


def _distance(row: Mapping[str, Any]) -> float:
    """Return the RMS of what the FP8 values differ by from the weight."""
    return math.sqrt(row["sum_err2"] / row["numel"])


def spans_binades(row: Mapping[str, Any], least: int) -> bool:
    """Return whether the magnitudes of a row's tensor lie in so many binades, by its histogram, or by its range without one."""
    histogram = row["log2_hist"]
    if histogram is None:
        return row["range_log2"] is not None and bool(row["range_log2"] >= least)
    return sum(1 for count in histogram if count) >= least
