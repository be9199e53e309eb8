"""F134: the gradient that the optimizer gets is not the sum of the gradients that wgrad gave."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Look, look
from fp8debug.rules.reading.gradient_sums import IS_FINITE_GRADIENT, IS_GRADIENT, far_from_sum, why_no_sum
from fp8debug.rules.reading.traces import traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: The cure where one factor comes in with every microbatch.
_SCALED = (
    "check what touches weight.grad between microbatches: a reduction over one rank that adds the buffer to itself, a hook or a"
    " scaler that multiplies it each time; no cast changes it"
)


@dataclass(frozen=True)
class GradientSumDiffers(Rule):
    """weight.grad is not the sum of the gradients of its microbatches: some of them are lost, or replaced.

    What it detects
        After two microbatches or more, a weight.grad farther from the FP32 sum of the very gradients that wgrad gave than any
        rounding of the sum explains, whatever its dtype, on sampled columns. After a single gradient the two agree, so
        that nothing else adds to weight.grad (a tied weight, an all-reduce, a hook), of which nothing is concluded. A sum
        that BF16 rounds is F123. gradient-scaled: after a single gradient weight.grad is the same multiple of it in half of the
        modules or more, which no other contribution gives: it is scaled, or added to itself, with every microbatch.

    Why it matters
        The run trains on a part of its batch, or on one microbatch alone: no NaN, clean casts, a loss that is worse. FP8 is
        suspected because the accumulation into main_grad is fused with its wgrad.

    Example
        blocks.0.up, wgrad grad_weight: weight.grad is 0.42 times the FP32 sum of its gradients at step 8 (4.7 dB), after one
        microbatch it is exact.

    Cure
        Check what gates the accumulation (a per-step flag, gradient_accumulation_fusion, overwrite instead of add, no_sync);
        no cast changes it.

    Thresholds
        - max_sqnr_db 35: accumulated gradient against its FP32 sum; numerics.md, 4 (act below 35). A microbatch that is lost
          of eight leaves 18 dB, of 56 35 dB; a sum in FP32 has over 100 dB.
        - max_bf16_sqnr_db 12: the same for a sum that BF16 holds exactly, of which F123 explains the rest: each addition in
          BF16 loses at most 2^-9, 128 of them a quarter (12 dB).
        - min_bf16_rate 0.99: share of nonzero elements that BF16 holds exactly, as in F123.
        - max_first_nmse 0.0001: of weight.grad after a single gradient: 40 dB, BF16's own rounding is 55 dB.
        - min_elements 256, min_steps 2: elements compared, and sampled steps that show it (all, in a shorter run).
        - max_spread 0.01, min_share 0.5: of gradient-scaled: relative spread of the squared difference over modules, and share of
          the modules. No published basis: contributions of other kinds differ from module to module.
        - Seen in Primus #1046, Megatron-LM #6660.
    """

    code = "F134"
    name = "gradient-sum-differs"
    needs_training = True
    columns = ("num_grad", "grad_sum_err2")
    cure = "check what gates the accumulation into weight.grad (a per-step flag, a fused add that overwrites); no cast changes it"

    max_sqnr_db: float = 35.0
    max_bf16_sqnr_db: float = 12.0
    min_bf16_rate: float = 0.99
    max_first_nmse: float = 1e-4
    min_elements: int = 256
    min_steps: int = 2
    max_spread: float = 0.01
    min_share: float = 0.5

    def needs(self, run: Run) -> str | None:
        """Return why the rule cannot judge: fewer than three microbatches."""
        return why_no_sum(run)

    @property
    def _look(self) -> Look:
        conditions = far_from_sum(self.max_sqnr_db, self.min_elements, self.max_first_nmse)
        columns = ["grad_sum_sqnr_db", "grad_sum_gain", "num_grad", "num_grad_bf16"]
        return look(conditions, columns, rows=IS_FINITE_GRADIENT, keys=IS_GRADIENT)

    def looks(self) -> Iterable[Look]:
        """Return the gradients far from their FP32 sum."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the gradients that lack a part of their sum."""
        for whole in traces(run, self._look):
            trace = whole.where(lambda row: row["grad_sum_sqnr_db"] < self._limit(row))
            if trace is None or not trace.lasting(min(self.min_steps, len(trace.sampled))):
                continue
            row = trace.least("grad_sum_sqnr_db")
            sqnr, gain = float(row["grad_sum_sqnr_db"]), row["grad_sum_gain"]
            message = (
                f"weight.grad is not the sum of its microbatches' gradients at step {row['step']}: {gain:.2g} times it and"
                f" {sqnr:.1f} dB from it, though after the first one it equals that one's"
            )
            yield trace.finding(self, Severity.ERROR, message, value=sqnr, threshold=self._limit(row), unit="dB")

        yield from self._scaled(run)

    def _scaled(self, run: Run) -> Iterable[Finding]:
        """Return the finding of gradients that are scaled by one factor between microbatches."""
        query = (
            "SELECT step, module, max(call_index) AS place, max(grad_first_nmse) AS first, max(grad_sum_gain) AS gain"
            f" FROM sites WHERE {IS_GRADIENT} AND num_grad >= {self.min_elements} AND grad_first_nmse >= {self.max_first_nmse}"
            " AND grad_sum_x2 > 0 GROUP BY step, module ORDER BY step, max(call_index), module"
        )
        steps: dict[int, list[dict[str, Any]]] = {}
        for row in run.sql(query).to_pylist():
            steps.setdefault(row["step"], []).append(row)
        if not steps:
            return
        query = f"SELECT count(DISTINCT module) AS num FROM sites WHERE {IS_GRADIENT} AND num_grad >= {self.min_elements}"
        (total,) = run.sql(query).to_pylist()
        found = []
        for rows in steps.values():
            middle = median(float(row["first"]) for row in rows)
            alike = [row for row in rows if abs(row["first"] - middle) <= self.max_spread * middle]
            if len(alike) >= max(2, self.min_share * total["num"]):
                found.append(alike)
        if len(found) < self.min_steps:
            return
        row = found[0][0]
        grows = row["gain"] > 1
        factor = 1 + math.sqrt(row["first"]) * (1 if grows else -1)
        message = (
            f"weight.grad is {factor:.3g} times its first microbatch's gradient at step {row['step']}, in {len(found[0])} of"
            f" {total['num']} modules alike, and {row['gain']:.2g} times the sum later on: it is scaled, or added to itself,"
            " between microbatches"
        )
        for one in found[0]:
            yield Finding(code=self.code, name="gradient-scaled", severity=Severity.ERROR, module=one["module"], gemm="wgrad",
                          tensor="grad_weight", steps=(row["step"], found[-1][0]["step"]), ranks=tuple(run.ranks),
                          value=factor, threshold=1.0, message=message, cure=_SCALED,
                          call_index=one["place"] or 0)  # fmt: skip

    def _limit(self, row: dict[str, Any]) -> float:
        """Return the SQNR below which no rounding of the sum explains a gradient."""
        may_be_bf16 = row["num_grad_bf16"] >= self.min_bf16_rate * row["num_grad"]
        return self.max_bf16_sqnr_db if may_be_bf16 else self.max_sqnr_db


RULES.add(GradientSumDiffers.code, GradientSumDiffers())
