"""F143: no gradient reaches any Linear, at all or at some steps: grad_output is zero everywhere, and nothing is learned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_GRADIENTS = "tensor = 'grad_output' AND reference = 'operand' AND numel > 0"


@dataclass(frozen=True)
class NoGradient(Rule):
    """The gradient that reaches the Linears is zero: what lies between them and the loss lost it.

    What it detects
        grad_output before its cast is all zeros in every recorded module, at every sampled step from some step to the end. One
        module with a gradient is enough for silence: frozen parts, residual branches that begin at zero and experts without
        tokens have none, and that is healthy. Gradients that a cast makes zero are not counted here: they were there before it.
        no-gradient-at-steps: the same at single sampled steps, between others at which there are gradients, while the losses of
        these steps are as large as those of the others: there was something to learn. A batch that the program leaves out by a
        loss of zero is none.

    Why it matters
        The loss stands still, or only the parameters after the last Linear learn. Nothing is NaN, every cast is exact, and the
        gradient norm is 0 or small.

    Example
        grad_output is zero in all 12 modules at 8 sampled steps from step 0 on; head got it first.

    Cure
        At single steps, look at what the loss reads of its batch: a kernel that takes one token's weight for all, a mask.
        Else look at what computes the loss: a fused loss kernel that overwrites its gradient, a detach, a mask that leaves no
        token, a loss scale of 0. No cast changes it.

    Thresholds
        - min_steps 3: sampled steps, to the end of the run. No published basis: a batch without a token to learn from is one.
        - min_missing_steps 2, min_loss_share 0.1: of no-gradient-at-steps, sampled steps, and size of their losses over the
          median of the others'. No published basis: one step may have a batch of padding, whose loss is 0 or NaN.
        - Seen in Megatron-LM #1750 and Liger-Kernel #968.
    """

    code = "F143"
    name = "no-gradient"
    needs_training = True
    columns = ("num_zero", "numel")
    cure = (
        "look at what computes the loss and its gradient: a fused loss kernel, a detach, a mask without tokens, a loss scale of 0"
    )
    needs_fp8 = False
    is_harmful = False

    min_steps: int = 3
    min_missing_steps: int = 2
    min_loss_share: float = 0.1

    def needs(self, run: Run) -> str | None:
        """Ask for rows of grad_output."""
        query = f"SELECT 1 AS one FROM raw WHERE {_GRADIENTS} LIMIT 1"
        return None if run.sql(query).num_rows else "no gradient was recorded"

    def _steps(self, run: Run, first: int) -> list[dict[str, Any]]:
        """Return by sampled step, from a first one on, the modules with a gradient and those in which it is not zero."""
        query = (
            "SELECT step, count(DISTINCT module) AS modules,"
            " count(*) FILTER (WHERE num_zero < numel OR num_zero IS NULL) AS alive"
            f" FROM raw WHERE {_GRADIENTS} AND step >= ? GROUP BY step ORDER BY step"
        )
        return list(run.sql(query, [first]).to_pylist())

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding for the run."""
        rows = self._steps(run, run.sampled_steps[-2 * self.min_steps :][0])
        dead: Sequence[Mapping[str, Any]] = []
        if not rows or not rows[-1]["alive"]:
            rows = self._steps(run, run.sampled_steps[0])
            begins = max((place + 1 for place, row in enumerate(rows) if row["alive"]), default=0)
            dead = rows[begins:]
        if len(dead) >= self.min_steps:
            words = f"at {len(dead)} sampled steps from step {dead[0]['step']} on; "
            yield self._finding(run, dead, words, "was lost between the loss and there", self.min_steps)
        else:
            yield from self._at_steps(run)

    def _at_steps(self, run: Run) -> Iterable[Finding]:
        """Return the finding of single steps without a gradient whose losses are as those of other steps."""
        rows = self._steps(run, run.sampled_steps[0])
        query = "SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step"
        losses = {row["step"]: abs(row["loss"]) for row in run.sql(query).to_pylist() if math.isfinite(row["loss"])}
        others = [losses[row["step"]] for row in rows if row["alive"] and row["step"] in losses]
        dead = [row for row in rows if not row["alive"] and row["step"] in losses]
        usual = median(others) if others else 0.0
        if not usual or len(dead) < self.min_missing_steps:
            return
        large = [row for row in dead if losses[row["step"]] >= self.min_loss_share * usual]
        if len(large) < self.min_missing_steps:
            return
        step = large[0]["step"]
        words = (
            f"at {len(large)} of {len(rows)} sampled steps, first step {step}, whose losses are as large as others"
            f" ({losses[step]:.3g} there, {usual:.3g} in the median); "
        )
        cure = (
            "look at what the loss function does with the batches of these steps: a fused loss that takes the weight of one"
            " token, masked in them, for all, a mask or scale of 0; none if the program leaves them out on purpose"
        )
        why = "was lost between the loss and there, or multiplied by 0"
        yield replace(self._finding(run, large, words, why, self.min_missing_steps), name="no-gradient-at-steps", cure=cure)

    def _finding(self, run: Run, dead: Sequence[Mapping[str, Any]], words: str, why: str, least: int) -> Finding:
        """Return the finding of sampled steps at which no module has a gradient.

        Args:
            run: the run.
            dead: these steps, with the number of their modules.
            words: which steps they are.
            why: where the gradient went.
            least: as many steps were needed.
        """
        step, num = dead[0]["step"], dead[0]["modules"]
        query = f"SELECT module, call_index FROM raw WHERE {_GRADIENTS} AND step = ? ORDER BY call_index DESC, module LIMIT 1"
        (site,) = run.sql(query, [step]).to_pylist()
        got = f"{site['module']}, whose backward pass comes first, got it so"
        message = f"grad_output is zero in all {num} modules {words}{got}: it {why}"
        return Finding(code=self.code, name=self.name, severity=Severity.WARNING, module=site["module"], gemm="dgrad",
                       tensor="grad_output", steps=(step, dead[-1]["step"]), ranks=tuple(run.ranks), value=float(len(dead)),
                       threshold=float(least), message=message, cure=self.cure, call_index=site["call_index"] or 0,
                       origin="outside")  # fmt: skip


RULES.add(NoGradient.code, NoGradient())
