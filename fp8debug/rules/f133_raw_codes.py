"""F133: a weight's values are raw FP8 codes: the scales that belong to them were dropped when they were loaded."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import traces
from fp8debug.rules.reading.weights import spans_binades

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: The largest values of the formats in use.
_MAXIMA = tuple(sorted({f.max for f in FORMATS.values() if not f.scale_only}))


@dataclass(frozen=True)
class RawCodes(Rule):
    """A weight holds the codes of an FP8 checkpoint without their scales: the values are hundreds of times too large.

    What it detects
        A high-precision weight whose amax is the largest value of an FP8 format (448, 240 or 57344), and that FP8 holds without
        any error at its first sampled step, or that is far larger than the other weights of the run and than it was at the
        sampled step before: codes come at once, where they are loaded, and a weight that grows may pass by any value. A trained
        weight has an amax near 0.1 to 10, and only values that lie on the format's grid are cast without error.

    Why it matters
        weight_scale_inv is a tensor of its own in a checkpoint; a loader that does not know its name drops it. The first loss
        is at or above ln(vocabulary), and training goes on. Learning rate and warm-up are suspected.

    Example
        blocks.1.gate, fprop weight: amax 448 (E4M3's maximum), cast without error; the other weights have an amax of 0.11.

    Cure
        Load the scales with the codes and dequantize (weight = codes * weight_scale_inv by block); fp8debug measure or the
        checkpoint's index shows which tensor lacks one. No cast cures it.

    Thresholds
        - max_amax_error 0.02: relative distance of the amax from the format's maximum; an optimizer step moves it by less. No
          published basis.
        - min_amax_ratio 16: amax over the median amax of the run's other weights, where the cast has an error, and over the
          weight's own at the sampled step before. No published basis: weights of one model lie
          within a factor of 8 [measured on the bench's clean runs].
        - min_binades 4: occupied bins of the exponent histogram: a constant weight is cast without error as well.
        - min_elements 256: elements; a small tensor says little.
        - Seen in unsloth #6978, LTX-2 #172, mcore-bridge #183, vllm #45835.
    """

    code = "F133"
    name = "raw-codes"
    columns = ("amax", "sum_err2", "sum_x2")
    cure = "load the weight's scales (weight_scale_inv) with its codes and dequantize it; no cast cures it"

    max_amax_error: float = 0.02
    min_amax_ratio: float = 16.0
    min_binades: int = 4
    min_elements: int = 256

    @property
    def _look(self) -> Look:
        near = " OR ".join(f"abs(amax / {value} - 1) <= {self.max_amax_error}" for value in _MAXIMA)
        least = min(_MAXIMA) * (1 - self.max_amax_error)
        conditions: Conditions = [
            Condition("amax", ">=", least),
            Keys("tensor = 'weight'"),
            f"numel >= {self.min_elements}",
            near,
        ]
        return look(conditions, ["amax", "sum_err2", "sum_x2", "log2_hist", "range_log2"])

    def looks(self) -> Iterable[Look]:
        """Return the weights as large as a format's maximum."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the weights that are codes."""
        found = traces(run, self._look)
        if not found:
            return
        query = "SELECT step, module, amax FROM sites WHERE tensor = 'weight' AND reference = 'operand' AND amax > 0 AND step IN "
        steps = ", ".join(str(step) for step in {trace.rows[0]["step"] for trace in found})
        accused = {trace.module for trace in found}
        others: dict[int, list[float]] = {}
        for row in run.sql(f"{query}({steps})").to_pylist():
            if row["module"] not in accused:
                others.setdefault(row["step"], []).append(row["amax"])
        for trace in found:
            row = trace.rows[0]
            usual = median(others.get(row["step"], [math.inf]))
            before = _before(run, trace.module, row["step"])
            if row["amax"] < self.min_amax_ratio * before:
                continue
            is_exact = row["step"] == trace.start and row["sum_err2"] == 0 and spans_binades(row, self.min_binades)
            if not is_exact and not row["amax"] >= self.min_amax_ratio * usual:
                continue
            maximum = min(_MAXIMA, key=lambda value, amax=row["amax"]: abs(amax / value - 1))  # type: ignore[misc]  # bound now
            beside = f"; the other weights have an amax near {usual:.2g}" if usual < math.inf else ""
            exact = ", and the cast has no error" if is_exact else ""
            message = (
                f"the weight has an amax of {row['amax']:.4g} at step {row['step']}, the largest value of an FP8 format"
                f" ({maximum:g}){exact}{beside}: its values are codes whose scales were not applied"
            )
            yield trace.finding(
                self, Severity.ERROR, message, value=row["amax"], threshold=self.min_amax_ratio * min(usual, maximum)
            )


def _before(run: Run, module: str, step: int) -> float:
    """Return the amax of a module's weight at the sampled step before one; 0 where there is none."""
    query = (
        "SELECT step, module, amax FROM sites WHERE tensor = 'weight' AND reference = 'operand' AND amax > 0"
        f" AND step < {step} ORDER BY step DESC"
    )
    return next((float(row["amax"]) for row in run.sql(query).to_pylist() if row["module"] == module), 0.0)


RULES.add(RawCodes.code, RawCodes())
