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

#: Cosine that rounding leaves of values that are right but for one factor; numerics.md, 4 (warn below 0.999). Where a format
#: has fewer bits, what its largest relative error e leaves: sqrt(1 - e^2), 0.994 of E5M2.
_MIN_COSINE = 0.999
#: The same of codes whose scales are applied outside the GEMM: factors of rows part the directions, to 0.58 in a gradient whose
#: rows differ a hundredfold [measured]; and of codes far from their tensor in size, which chance does not give them.
_MIN_OUTSIDE_COSINE, _MIN_FAR_COSINE, _FAR_GAIN = 0.5, 0.1, 16.0
#: Cosine of a result and its product from which on the result is right but for noise, as in F128; and how many times its squared
#: error both operands have whose scales make up for each other. Closed form: an operand's error is found in the result at its own
#: size, and those of both add where they are independent, so that the smaller one is at most half the result's. 4 lies 9 dB above
#: that half; an error of both operands by one factor is the thing looked for, and has no upper limit.
_MIN_RESULT_COSINE, _COMPENSATED = 0.9, 4.0
#: Of rows that join several tensors: distance of norm ratio from 1, and of a cosine from a share in units of its own; tensors.
_MAX_DISTANCE, _MAX_JOINED = 0.1, 8

#: Columns of a row by which a scale that is applied elsewhere is recognized.
SCALE_COLUMNS = ("gain", "cosine", "num_tensors", "scale_inv_min", "scale_inv_max")


def has_fp8(run: Run) -> bool:
    """Return whether any operand ran in FP8; nearly always one did at the first sampled step."""
    query = f"SELECT 1 AS one FROM sites WHERE {RUNNING}"
    first = f"{query} AND step = {min(run.sampled_steps, default=0)} LIMIT 1"
    return run.memo("has fp8", lambda: any(run.sql(text).num_rows for text in (first, f"{query} LIMIT 1")))


def is_inference(run: Run) -> bool:
    """Return whether a run is of passes without gradients."""
    return run.manifest.get("inference") is True


def unrecorded_fp8(run: Run) -> list[str]:
    """Return the modules that ran in FP8 by the manifest, and of which nothing is recorded."""
    return [module["fqn"] for module in run.modules if module.get("fp8") and not module.get("observed")]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The bad rows of one site under one cast, in step order.

    Attributes:
        module: FQN.
        gemm: GEMM.
        tensor: operand.
        cast_name: running cast.
        rows: column -> value; all of them have ``step``, ``call_index`` and ``ranks``.
        sampled: every sampled step of the run; of the module, where compiled modules take turns.
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


def scaled_elsewhere(run: Run, found: Iterable[Trace], tolerance: float = 0.15) -> Callable[[Trace, dict[str, Any]], bool]:
    """Return the test whether a scale is applied outside the GEMM, or on the other operand's side.

    The first shows as a scale_inv of 1 in every block, of codes that are the tensor but for factors; within a factor of two of
    1, where a scale of the tensor's own may be, and where several tensors with factors of their own are joined, one operand of
    the GEMM has to be so at some step. The second is :func:`scaled_on_other_side`.

    Args:
        run: the run.
        found: traces with ``gain``, ``cosine``, ``num_tensors``, ``scale_inv_min`` and ``scale_inv_max``.
        tolerance: relative difference of the product of two factors from 1.
    """
    found = list(found)
    is_on_other_side = scaled_on_other_side(run, found, tolerance)
    outside = {(t.module, t.gemm) for t in found if any(_is_far_without_scale(row) for row in t.rows)}

    def holds(trace: Trace, row: dict[str, Any]) -> bool:
        gain, cosine = row["gain"], row["cosine"]
        if not gain or cosine is None or gain < 0:
            return False
        if _is_far_without_scale(row) or is_on_other_side(trace, row):
            return True
        if (trace.module, trace.gemm) not in outside:
            return False
        if (row["num_tensors"] or 1) > 1:
            return bool(cosine >= _MIN_OUTSIDE_COSINE)
        return bool(_has_no_scale(row) and abs(gain - 1) > _max_error(trace) and cosine >= _least_cosine(trace))

    return holds


def scaled_on_other_side(run: Run, found: Iterable[Trace], tolerance: float = 0.15) -> Callable[[Trace, dict[str, Any]], bool]:
    """Return the test whether the other operand of the GEMM holds the scale: both are off by factors that make 1 together.

    Of several tensors that a row joins each may have a factor of its own, so that neither gain is one. Where either row joins
    several, that both operands are off and the GEMM's result is none the less its product says the same of all of them.

    Args:
        run: the run.
        found: traces with ``gain``, ``cosine`` and ``num_tensors``.
        tolerance: relative difference of the product of two factors from 1, and of a result from its product.
    """
    found = list(found)

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
        if not partners:
            return False
        is_off = cosine >= _least_cosine(trace) and abs(gain - 1) > tolerance
        if is_off and all(abs(partner.gain * gain - 1) <= tolerance for partner in partners):
            return True
        if max(row["num_tensors"] or 1, *(partner.num_tensors for partner in partners)) == 1 or not results:
            return False
        if any(abs(result.gain - 1) > tolerance or result.cosine < _MIN_RESULT_COSINE for result in results):
            return False
        least = min(_error(gain, cosine), *(_error(partner.gain, partner.cosine) for partner in partners))
        return least > _COMPENSATED * max(_error(result.gain, result.cosine) for result in results)

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


def _least_cosine(trace: Trace) -> float:
    return min(_MIN_COSINE, math.sqrt(1 - _max_error(trace) ** 2))


def _has_no_scale(row: dict[str, Any]) -> bool:
    return bool(row["scale_inv_min"] == row["scale_inv_max"] == 1.0)


def _is_far_without_scale(row: dict[str, Any]) -> bool:
    """Return whether codes are their tensor but for factors that no scale_inv holds, beyond what a scale of 1 leaves."""
    gain, cosine = row["gain"], row["cosine"]
    if not gain or cosine is None or gain < 0 or not _has_no_scale(row):
        return False
    return bool(cosine >= (_MIN_FAR_COSINE if gain > _FAR_GAIN else _MIN_OUTSIDE_COSINE) and not 0.5 < gain < 2)


def above(column: str, limit: float) -> Callable[[dict[str, Any]], bool]:
    """Return the test whether a row's column lies above a limit."""
    return lambda row: bool(row[column] > limit)


def num_right(row: dict[str, Any]) -> int | None:
    """Return how many of the tensors that a row joins are right where the others have nothing in common with theirs.

    Of n tensors of one size j right ones and n - j unrelated ones have the cosine j / n together, at their own norm. Shares j / n
    lie 1 / n apart, and a tenth of that is allowed: unrelated tensors of e elements have a cosine of 1 / sqrt(e), so that
    shares of eight are told from 6,400 elements on. None for one tensor, for more than eight, and where cosine or norm say
    something else.

    Args:
        row: with ``cosine``, ``norm_ratio`` and ``num_tensors``, of all microbatches, calls and ranks.
    """
    cosine, norm_ratio, num = row["cosine"], row["norm_ratio"], row.get("num_tensors") or 1
    if cosine is None or norm_ratio is None or abs(norm_ratio - 1) > _MAX_DISTANCE or not 1 < num <= _MAX_JOINED:
        return None
    return next((right for right in range(1, num) if abs(cosine - right / num) < _MAX_DISTANCE / num), None)


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
