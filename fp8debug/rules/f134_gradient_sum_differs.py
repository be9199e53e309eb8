"""F134: the gradient that the optimizer gets is not the sum of the gradients that wgrad gave."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.evidence import traces
from fp8debug.rules.looks import Look, below_db, look

if TYPE_CHECKING:
    from fp8debug.store.run import Run

_GRADIENT = "actual AND tensor = 'grad_weight' AND reference = 'shadow'"


@dataclass(frozen=True)
class GradientSumDiffers(Rule):
    """weight.grad is not the sum of the gradients of its microbatches: some of them are lost, or replaced.

    What it detects
        After two microbatches or more, a weight.grad farther from the FP32 sum of the very gradients that wgrad gave than any
        rounding of the sum explains, whatever its dtype, on sampled columns. After a single gradient the two agree, so
        that nothing else adds to weight.grad (a tied weight, an all-reduce, a hook), of which nothing is concluded. A sum
        that BF16 rounds is F123.

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
        - Seen in Primus #1046.
    """

    code = "F134"
    name = "gradient-sum-differs"
    columns = ("num_grad", "grad_sum_err2")
    cure = "check what gates the accumulation into weight.grad (a per-step flag, a fused add that overwrites); no cast changes it"

    max_sqnr_db: float = 35.0
    max_bf16_sqnr_db: float = 12.0
    min_bf16_rate: float = 0.99
    max_first_nmse: float = 1e-4
    min_elements: int = 256
    min_steps: int = 2

    def needs(self, run: Run) -> str | None:
        """Return why the rule cannot judge: fewer than three microbatches."""
        query = "SELECT 1 AS one FROM raw WHERE num_grad > 0 LIMIT 1"
        return None if run.sql(query).num_rows else "no step has three microbatches or more, or weight.grad is kept elsewhere"

    @property
    def _look(self) -> Look:
        bad = (
            f"num_grad >= {self.min_elements} AND grad_sum_sqnr_db < {self.max_sqnr_db}"
            f" AND grad_first_nmse < {self.max_first_nmse}"
        )
        hint = below_db(self.max_sqnr_db, "grad_sum_err2", "grad_sum_x2")
        columns = ["grad_sum_sqnr_db", "grad_sum_gain", "num_grad", "num_grad_bf16"]
        return look(bad, columns, hint, rows=f"{_GRADIENT} AND num_nan + num_inf = 0", keys=_GRADIENT)

    def looks(self) -> Iterable[Look]:
        """Return the gradients far from their FP32 sum."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the gradients that lack a part of their sum."""
        for whole in traces(run, self._look):
            trace = whole.where(lambda row: row["grad_sum_sqnr_db"] < self._limit(row))
            if trace is None or not trace.lasting(min(self.min_steps, len(trace.sampled))):
                continue
            row = min(trace.rows, key=lambda row: float(row["grad_sum_sqnr_db"]))
            sqnr, gain = float(row["grad_sum_sqnr_db"]), row["grad_sum_gain"]
            message = (
                f"weight.grad is not the sum of its microbatches' gradients at step {row['step']}: {gain:.2g} times it and"
                f" {sqnr:.1f} dB from it, where it equals the first one"
            )
            yield trace.finding(self, Severity.ERROR, message, value=sqnr, threshold=self._limit(row), unit="dB")

    def _limit(self, row: dict[str, Any]) -> float:
        """Return the SQNR below which no rounding of the sum explains a gradient."""
        may_be_bf16 = row["num_grad_bf16"] >= self.min_bf16_rate * row["num_grad"]
        return self.max_bf16_sqnr_db if may_be_bf16 else self.max_sqnr_db


RULES.add(GradientSumDiffers.code, GradientSumDiffers())
