"""F143: no gradient reaches any Linear: grad_output is zero everywhere, and nothing is learned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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

    Why it matters
        The loss stands still, or only the parameters after the last Linear learn. Nothing is NaN, every cast is exact, and the
        gradient norm is 0 or small.

    Example
        grad_output is zero in all 12 modules at 8 sampled steps from step 0 on; head got it first.

    Cure
        Look at what computes the loss: a fused loss kernel that overwrites its gradient, a detach, a mask that leaves no token, a
        loss scale of 0. No cast changes it.

    Thresholds
        - min_steps 3: sampled steps, to the end of the run. No published basis: a batch without a token to learn from is one.
        - Seen in Megatron-LM #1750.
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
        if rows and rows[-1]["alive"]:
            return
        rows = self._steps(run, run.sampled_steps[0])
        begins = max((place + 1 for place, row in enumerate(rows) if row["alive"]), default=0)
        dead = rows[begins:]
        if len(dead) < self.min_steps:
            return
        step, num = dead[0]["step"], dead[0]["modules"]
        query = f"SELECT module, call_index FROM raw WHERE {_GRADIENTS} AND step = ? ORDER BY call_index DESC, module LIMIT 1"
        (site,) = run.sql(query, [step]).to_pylist()
        message = (
            f"grad_output is zero in all {num} modules at {len(dead)} sampled steps from step {step} on; {site['module']}, whose"
            " backward pass comes first, got it so: it was lost between the loss and there"
        )
        yield Finding(code=self.code, name=self.name, severity=Severity.WARNING, module=site["module"], gemm="dgrad",
                      tensor="grad_output", steps=(step, dead[-1]["step"]), ranks=tuple(run.ranks), value=float(len(dead)),
                      threshold=float(self.min_steps), message=message, cure=self.cure, call_index=site["call_index"] or 0,
                      origin="outside")  # fmt: skip


RULES.add(NoGradient.code, NoGradient())
