"""F123: the gradient of a weight is summed over microbatches in BF16, which drops what is small beside the sum."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity, accuses_other_modules
from fp8debug.rules.reading.conditions import Conditions, Look, look
from fp8debug.rules.reading.gradient_sums import IS_FINITE_GRADIENT, IS_GRADIENT, far_from_sum, why_no_sum
from fp8debug.rules.reading.traces import traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class Bf16GradientSum(Rule):
    """Gradients of a weight are accumulated over microbatches in BF16: the sum stalls as it grows.

    What it detects
        A weight.grad that holds BF16 values and lies far from the FP32 sum of the very gradients that wgrad gave, on sampled
        columns. After one gradient the two must agree: where something else adds to weight.grad (a tied weight, an
        all-reduce, a hook) nothing is concluded. More than BF16 can lose over that many microbatches is F134. Information where
        the sum has been rounded more than a few times and is still above the limit: it says with how many microbatches it
        will be below.

    Why it matters
        BF16 keeps 8 bits: a gradient below 1/512 of the sum changes nothing. With many microbatches or data-parallel partial sums
        the late ones are lost, always towards a smaller gradient. It is blamed on FP8 because FP8 recipes come with
        BF16 gradients.

    Example
        blocks.1.mlp.up, wgrad grad_weight: the accumulated gradient is 24.1 dB from its FP32 sum at step 40, gain 0.97.

    Cure
        Accumulate in FP32 (main_grad, gradient_accumulation_fusion, accumulate_allreduce_grads_in_fp32); no cast changes it.

    Thresholds
        - warn_sqnr_db 45, max_sqnr_db 35: accumulated gradient against its FP32 sum; numerics.md, 4 (BF16 rounding leaves 55 dB;
          warn below 45, act below 35).
        - info_sqnr_db 47: below it is information. A sum that is rounded once, when it is complete, has 55.6 dB; n microbatches
          that are added in BF16 have 55.6 - 10 log10(n / 2) dB if their gradients are independent, n / 3 if they agree: 47 dB
          at 15 to 22, 45 dB at 23 to 34, 35 dB at 230 to 340. Ten or so are not reported.
        - max_first_nmse 0.0001: of weight.grad after a single gradient: 40 dB, BF16's own rounding is 55 dB.
        - min_bf16_rate 0.99: share of the nonzero elements that BF16 holds exactly; an FP32 sum has 1/65536.
        - min_elements 256, min_steps 2: elements compared, and sampled steps that show it (all, in a shorter run).
        - Seen in a report on Nemotron, second-hand, numerics.md, 5; DeepSpeed #1800.
    """

    code = "F123"
    name = "bf16-gradient-sum"
    needs_training = True
    columns = ("num_grad", "grad_sum_err2")
    cure = "accumulate weight gradients in FP32 (main_grad, accumulate_allreduce_grads_in_fp32)"

    info_sqnr_db: float = 47.0
    warn_sqnr_db: float = 45.0
    max_sqnr_db: float = 35.0
    max_first_nmse: float = 1e-4
    min_bf16_rate: float = 0.99
    min_elements: int = 256
    min_steps: int = 2

    def needs(self, run: Run) -> str | None:
        """Return why not: fewer than three microbatches."""
        return why_no_sum(run)

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            *far_from_sum(max(self.info_sqnr_db, self.warn_sqnr_db), self.min_elements, self.max_first_nmse),
            f"num_grad_bf16 >= {self.min_bf16_rate} * num_grad",
        ]
        columns = ["grad_sum_sqnr_db", "grad_sum_gain", "num_tensors"]
        return look(conditions, columns, rows=IS_FINITE_GRADIENT, keys=IS_GRADIENT)

    def looks(self) -> Iterable[Look]:
        """Return the gradients far from their FP32 sum."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the gradients whose sum is short of its parts."""
        for trace in traces(run, self._look):
            if trace.lasting(min(self.min_steps, len(trace.sampled))):
                row = trace.least("grad_sum_sqnr_db")
                sqnr = float(row["grad_sum_sqnr_db"])
                message = (
                    f"weight.grad is {sqnr:.1f} dB from the FP32 sum of its gradients at step {row['step']} (gain"
                    f" {row['grad_sum_gain']:.3f}) and holds BF16 values: it is accumulated in BF16"
                )
                severity, limit = Severity.WARNING, self.warn_sqnr_db
                if sqnr < self.max_sqnr_db:
                    severity, limit = Severity.ERROR, self.max_sqnr_db
                elif sqnr >= self.warn_sqnr_db:
                    severity = Severity.INFO
                    num = max(1, row["num_tensors"] // max(1, len(row["ranks"])))
                    more = math.ceil(num * 10 ** ((sqnr - self.warn_sqnr_db) / 10))
                    message += f" over {num} microbatches, which costs little; with {more} it has {self.warn_sqnr_db:.0f} dB"
                yield trace.finding(self, severity, message, value=sqnr, threshold=limit, unit="dB")

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a sum that lacks more than BF16 can lose."""
        return accuses_other_modules(finding, others, "F134")


RULES.add(Bf16GradientSum.code, Bf16GradientSum())
