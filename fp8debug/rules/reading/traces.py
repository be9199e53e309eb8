"""Reading of a run by rules: the rows of running casts that look bad, gathered per site in step order.

A row whose reference holds a NaN or Inf is left out: its tensor came in sick, so nothing it shows is its own fault.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.errors import UsageError
from fp8debug.recipes import Cast
from fp8debug.rules.base import Finding, Rule, Severity, finite, round_stable
from fp8debug.rules.reading.conditions import IS_DELAYED as IS_DELAYED
from fp8debug.rules.reading.conditions import RUNNING as RUNNING
from fp8debug.rules.reading.conditions import Look
from fp8debug.rules.reading.prefilter import bad_rows
from fp8debug.types import OPERANDS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Cosine that rounding leaves of values that are right but for one factor; numerics.md, 4 (warn below 0.999).
_MIN_COSINE = 0.999
#: The same of codes whose scales are applied outside the GEMM: factors of rows part the directions, to 0.58 in a gradient whose
#: rows differ a hundredfold [measured]; and of codes far from their tensor in size, which chance does not give them.
_MIN_OUTSIDE_COSINE, _MIN_FAR_COSINE, _FAR_GAIN = 0.5, 0.1, 16.0
#: Of rows that join several tensors: distance of norm ratio from 1, and of a cosine from a share in units of its own; tensors.
_MAX_DISTANCE, _MAX_JOINED = 0.1, 8


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


def scaled_elsewhere(found: Iterable[Trace], tolerance: float = 0.15) -> Callable[[Trace, dict[str, Any]], bool]:
    """Return the test whether a scale is applied outside the GEMM, or on the other operand's side.

    The first shows as a scale_inv of 1 in every block, of codes that are the tensor but for factors; the second as two
    operands of one GEMM whose factors make 1 together.

    Args:
        found: traces with ``gain``, ``cosine``, ``scale_inv_min`` and ``scale_inv_max``.
        tolerance: relative difference of the product of two factors from 1.
    """
    gains = {(t.module, t.gemm, row["step"], t.tensor): row["gain"] for t in found for row in t.rows}

    def holds(trace: Trace, row: dict[str, Any]) -> bool:
        gain, cosine = row["gain"], row["cosine"]
        if not gain or cosine is None or gain < 0:
            return False
        least = _MIN_FAR_COSINE if gain > _FAR_GAIN else _MIN_OUTSIDE_COSINE
        if row["scale_inv_min"] == row["scale_inv_max"] == 1.0 and cosine >= least and not 0.5 < gain < 2:
            return True
        other = next((t.value for t in OPERANDS[Gemm(trace.gemm)] if t.value != trace.tensor), None)
        partner = gains.get((trace.module, trace.gemm, row["step"], str(other)))
        return bool(cosine >= _MIN_COSINE and partner and abs(partner * gain - 1) <= tolerance)

    return holds


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
