"""Reading of a run by rules: the rows of running casts that look bad, gathered per site in step order.

A row whose reference holds a NaN or Inf is left out: its tensor came in sick, so nothing it shows is its own fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8debug.errors import UsageError
from fp8debug.formats import FORMATS
from fp8debug.recipes import Cast
from fp8debug.rules.base import Finding, Rule, Severity, finite, round_stable
from fp8debug.rules.reading.conditions import IS_DELAYED as IS_DELAYED
from fp8debug.rules.reading.conditions import RUNNING as RUNNING
from fp8debug.rules.reading.conditions import Look
from fp8debug.rules.reading.prefilter import bad_rows
from fp8debug.types import OPERANDS, RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Columns of a row by which a scale that is applied elsewhere is recognized.
SCALE_COLUMNS = ("gain", "cosine", "num_tensors", "scale_inv_min", "scale_inv_max")


@dataclass(frozen=True)
class ElsewhereLimits:
    """Thresholds of rules for a scale that is applied elsewhere; the manual page of F113 says where each comes from.

    Attributes:
        max_unit_gain: gain of codes over their tensor (or its inverse) beyond which a scale_inv of 1 is not the tensor's own.
        min_pair_cosine: cosine that rounding leaves of values that are right but for one factor, in formats of 8 bits.
        max_pair_error: relative difference of the product of two factors from 1, and of a result from its product.
        min_outside_cosine: cosine of codes whose scales are applied outside the GEMM.
        min_far_cosine: the same of codes that are ``far_gain`` times their tensor.
        far_gain: gain beyond which chance does not give codes their size.
        min_result_cosine: cosine of a result and its product from which on the result is right but for noise.
        min_compensated: squared error of both operands over the result's, where their scales make up for each other.
    """

    max_unit_gain: float = 2.0
    min_pair_cosine: float = 0.999
    max_pair_error: float = 0.15
    min_outside_cosine: float = 0.5
    min_far_cosine: float = 0.1
    far_gain: float = 16.0
    min_result_cosine: float = 0.9
    min_compensated: float = 4.0


@dataclass(frozen=True)
class JoinedLimits:
    """Thresholds of rules for rows that join several tensors, of which some are right; F119 says where each comes from.

    Attributes:
        max_joined_error: distance of the norm ratio from 1, and of the cosine from a share, over the share of one tensor.
        max_joined: tensors.
    """

    max_joined_error: float = 0.1
    max_joined: int = 8


def has_fp8(run: Run) -> bool:
    """Return whether any operand ran in FP8; nearly always one did at the first sampled step."""
    query = f"SELECT 1 AS one FROM sites WHERE {RUNNING}"
    first = f"{query} AND step = {min(run.sampled_steps, default=0)} LIMIT 1"
    return run.memo("has fp8", lambda: any(run.sql(text).num_rows for text in (first, f"{query} LIMIT 1")))


def is_inference(run: Run) -> bool:
    """Return whether a run is of passes without gradients."""
    return run.manifest.get("inference") is True


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The bad rows of one site under one cast, in step order.

    Attributes:
        module: FQN.
        gemm: GEMM.
        tensor: operand.
        cast_name: running cast.
        rows: column -> value; all of them have ``step``, ``call_index`` and ``ranks``.
        sampled: every sampled step of the run; of the module, where modules take turns.
    """

    module: str
    gemm: str
    tensor: str
    cast_name: str
    rows: tuple[dict[str, Any], ...]
    sampled: tuple[int, ...]

    @property
    def start(self) -> int:
        """First sampled step of the run."""
        return self.sampled[0]

    @property
    def cast(self) -> Cast | None:
        """The running cast; None for a GEMM's result and for a name that another version wrote."""
        try:
            return Cast.parse(self.cast_name)
        except UsageError:
            return None

    def worst(self, column: str) -> dict[str, Any]:
        """Return the row with the largest value, the first of those that are equal but for the last bits."""
        return max(self.rows, key=lambda row: float("-inf") if row[column] is None else round_stable(float(row[column])))

    def least(self, column: str) -> dict[str, Any]:
        """Return the row with the smallest value, the first of those that are equal but for the last bits."""
        return min(self.rows, key=lambda row: round_stable(float(row[column])))

    def where(self, holds: Callable[[dict[str, Any]], bool]) -> Trace | None:
        """Return the trace of the rows for which ``holds`` is true; None when there are none."""
        rows = tuple(row for row in self.rows if holds(row))
        return replace(self, rows=rows) if rows else None

    def lasting(self, min_steps: int, warmup: int = 0) -> bool:
        """Return whether it is bad at ``min_steps`` sampled steps after the warm-up and at half since the first one."""
        settled: int = sum(row["step"] >= self.start + warmup for row in self.rows)
        since = sum(step >= self.rows[0]["step"] for step in self.sampled)
        return settled >= min_steps and 2 * len(self.rows) >= since

    def finding(
        self, rule: Rule, severity: Severity, message: str, *, value: float | None, threshold: float, unit: str = "1"
    ) -> Finding:
        """Return the finding of a rule at this site."""
        return Finding(
            code=rule.code,
            name=rule.name,
            severity=severity,
            module=self.module,
            gemm=self.gemm,
            tensor=self.tensor,
            cast=self.cast_name,
            steps=(self.rows[0]["step"], self.rows[-1]["step"]),
            ranks=tuple(sorted({rank for row in self.rows for rank in row["ranks"]})),
            value=finite(value),
            threshold=threshold,
            unit=unit,
            message=message,
            cure=rule.cure,
            call_index=min(row["call_index"] or 0 for row in self.rows),
        )


def traces(run: Run, look: Look, within: Collection[tuple[str, int]] = ()) -> list[Trace]:
    """Return the sites with bad rows, in order of their first one and of execution.

    Args:
        run: where to look.
        look: for which rows.
        within: modules and steps to which they belong, where they are known.
    """
    found: dict[tuple[str, str, str, str], list[dict[str, Any]]] = {}
    for row in bad_rows(run, look, within):
        found.setdefault((row["module"], row["gemm"], row["tensor"], row["cast_name"]), []).append(row)
    return [
        Trace(
            module=module,
            gemm=gemm,
            tensor=tensor,
            cast_name=cast_name,
            rows=tuple(rows),
            sampled=tuple(run.sampled_steps_of(module)),
        )
        for (module, gemm, tensor, cast_name), rows in found.items()
    ]


def scaled_elsewhere(run: Run, found: Iterable[Trace], limits: ElsewhereLimits) -> Callable[[Trace, dict[str, Any]], bool]:
    """Return the test whether a scale is applied outside the GEMM, or on the other operand's side.

    The first shows as a scale_inv of 1 in every block, of codes that are the tensor but for factors; within a factor of two of
    1, where a scale of the tensor's own may be, and where several tensors with factors of their own are joined, one operand of
    the GEMM has to be so at some step. The second is :func:`scaled_on_other_side`.

    Args:
        run: the run.
        found: traces with ``gain``, ``cosine``, ``num_tensors``, ``scale_inv_min`` and ``scale_inv_max``.
        limits: thresholds.
    """
    found = list(found)
    is_on_other_side = scaled_on_other_side(run, found, limits)
    outside = {(t.module, t.gemm) for t in found if any(_is_far_without_scale(row, limits) for row in t.rows)}

    def holds(trace: Trace, row: dict[str, Any]) -> bool:
        gain, cosine = row["gain"], row["cosine"]
        if not gain or cosine is None or gain < 0:
            return False
        if _is_far_without_scale(row, limits) or is_on_other_side(trace, row):
            return True
        if (trace.module, trace.gemm) not in outside:
            return False
        if (row["num_tensors"] or 1) > 1:
            return bool(cosine >= limits.min_outside_cosine)
        return bool(_has_no_scale(row) and abs(gain - 1) > _max_error(trace) and cosine >= _least_cosine(trace, limits))

    return holds


def scaled_on_other_side(run: Run, found: Iterable[Trace], limits: ElsewhereLimits) -> Callable[[Trace, dict[str, Any]], bool]:
    """Return the test whether the other operand of the GEMM holds the scale: both are off by factors that make 1 together.

    Of several tensors that a row joins each may have a factor of its own, so that neither gain is one. Where either row joins
    several, that both operands are off and the GEMM's result is none the less its product says the same of all of them: an
    operand's error is found in the result at its own size, and independent ones add, so that the smaller is at most half of it.
    Where the other operand was not recorded, a right result of an operand that is a factor off tells that the other makes up for
    it.

    Args:
        run: the run.
        found: traces with ``gain``, ``cosine`` and ``num_tensors``.
        limits: thresholds.
    """
    found, tolerance = list(found), limits.max_pair_error

    @cache
    def sizes() -> dict[tuple[str, str, int, str], list[_Size]]:
        return _sizes(run, found)

    def holds(trace: Trace, row: dict[str, Any]) -> bool:
        gain, cosine = row["gain"], row["cosine"]
        if not gain or not cosine or gain < 0:
            return False
        place, gemm = (trace.module, trace.gemm, row["step"]), Gemm(trace.gemm)
        other = next((t.value for t in OPERANDS[gemm] if t.value != trace.tensor), "")
        partners, results = sizes().get((*place, other), []), sizes().get((*place, RESULTS[gemm].value), [])
        is_off = cosine >= _least_cosine(trace, limits) and abs(gain - 1) > tolerance
        is_right = all(abs(one.gain - 1) <= tolerance and one.cosine >= limits.min_result_cosine for one in results)
        if not partners:
            return is_off and bool(results) and is_right
        if is_off and all(abs(partner.gain * gain - 1) <= tolerance for partner in partners):
            return True
        if max(row["num_tensors"] or 1, *(partner.num_tensors for partner in partners)) == 1 or not results:
            return False
        if not is_right:
            return False
        least = min(_error(gain, cosine), *(_error(partner.gain, partner.cosine) for partner in partners))
        return least > limits.min_compensated * max(_error(result.gain, result.cosine) for result in results)

    return holds


class _Size(NamedTuple):
    """Row of an operand or result, beside its reference."""

    gain: float
    cosine: float
    num_tensors: int


def _sizes(run: Run, found: Sequence[Trace]) -> dict[tuple[str, str, int, str], list[_Size]]:
    """Return rows of operands and results by module, GEMM, step and tensor, where traces have rows.

    An input has several, one for each rank, and any tensor that runs in several casts.
    """
    modules, steps = sorted({t.module for t in found}), sorted({row["step"] for t in found for row in t.rows})
    if not steps:
        return {}
    return run.memo(f"sizes {modules} {steps}", lambda: _read_sizes(run, modules, steps))


def _read_sizes(run: Run, modules: Sequence[str], steps: Sequence[int]) -> dict[tuple[str, str, int, str], list[_Size]]:
    query = (
        "SELECT module, gemm, step, tensor, gain, cosine, num_tensors FROM sites WHERE actual"
        f" AND reference IN ('operand', 'shadow') AND module IN ({', '.join('?' for _ in modules)})"
        f" AND step IN ({', '.join(map(str, steps))}) AND gain > 0 AND cosine > 0"
    )
    sizes: dict[tuple[str, str, int, str], list[_Size]] = {}
    for r in run.sql(query, modules).to_pylist():
        size = _Size(r["gain"], r["cosine"], r["num_tensors"] or 1)
        sizes.setdefault((r["module"], r["gemm"], r["step"], r["tensor"]), []).append(size)
    return sizes


def _error(gain: float, cosine: float) -> float:
    """Return the squared error over the energy of the reference: 1 - 2 g + (g / c)^2."""
    return 1 - 2 * gain + (gain / cosine) ** 2


def _max_error(trace: Trace) -> float:
    return 0.0 if trace.cast is None else FORMATS[trace.cast.format].max_relative_error


def _least_cosine(trace: Trace, limits: ElsewhereLimits) -> float:
    """Return the cosine that rounding leaves; of an error e of every element sqrt(1 - e^2), where a format has fewer bits."""
    return min(limits.min_pair_cosine, math.sqrt(1 - _max_error(trace) ** 2))


def _has_no_scale(row: dict[str, Any]) -> bool:
    return bool(row["scale_inv_min"] == row["scale_inv_max"] == 1.0)


def _is_far_without_scale(row: dict[str, Any], limits: ElsewhereLimits) -> bool:
    """Return whether codes are their tensor but for factors that no scale_inv holds, beyond what a scale of 1 leaves."""
    gain, cosine = row["gain"], row["cosine"]
    if not gain or cosine is None or gain < 0 or not _has_no_scale(row):
        return False
    least = limits.min_far_cosine if gain > limits.far_gain else limits.min_outside_cosine
    return bool(cosine >= least and not 1 / limits.max_unit_gain < gain < limits.max_unit_gain)


def above(column: str, limit: float) -> Callable[[dict[str, Any]], bool]:
    """Return the test whether a row's column lies above a limit."""
    return lambda row: bool(row[column] > limit)


def num_right(row: dict[str, Any], limits: JoinedLimits) -> int | None:
    """Return how many of the tensors that a row joins are right where the others have nothing in common with theirs.

    Of n tensors of one size j right ones and n - j unrelated ones have the cosine j / n together, at their own norm. Shares j / n
    lie 1 / n apart, and a part of that is allowed. None for one tensor, for too many, and where cosine or norm say something
    else.

    Args:
        row: with ``cosine``, ``norm_ratio`` and ``num_tensors``, of all microbatches, calls and ranks.
        limits: thresholds.
    """
    cosine, norm_ratio, num = row["cosine"], row["norm_ratio"], row.get("num_tensors") or 1
    most = limits.max_joined_error
    if cosine is None or norm_ratio is None or abs(norm_ratio - 1) > most or not 1 < num <= limits.max_joined:
        return None
    return next((right for right in range(1, num) if abs(cosine - right / num) < most / num), None)


def sampled_steps(run: Run) -> list[int]:
    """Return the steps with statistics, in order."""
    return run.sampled_steps


def percent(rate: float) -> str:
    """Write a rate for people: two significant digits below 10 %."""
    if rate >= 0.995:
        return "all" if rate >= 0.9995 else "over 99 %"
    return f"{rate * 100:.0f} %" if rate >= 0.1 else f"{rate * 100:.2g} %"


def times(factor: float) -> str:
    """Write a factor for people: ``3.1``, ``47``, ``2.1e+06``."""
    return f"{factor:.2g}" if factor < 10 else f"{factor:.0f}" if factor < 1e5 else f"{factor:.1e}"
