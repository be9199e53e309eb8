"""F125: the loss jumps or becomes NaN, and no cast moved before it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.evidence import sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.run import Run


@dataclass(frozen=True)
class LossSpikeNotFp8(Rule):
    """The loss spikes or becomes NaN while no cast showed a fault before it: look at the data and the optimizer.

    What it detects
        A loss far above the median of the steps before it, measured in their own noise (the median absolute deviation
        of step-to-step differences, so that the initial descent and earlier spikes do not count), or one that is no
        longer finite. A loss that became NaN between two sampled steps is reported as nonfinite-loss-unseen: it blames
        nobody and clears nobody. It stands only when no other rule found a harmful fault up to the first sampled step after it.

    Why it matters
        The first question to a spike is whether FP8 did it. Leaving FP8 for a bad batch, a learning rate or a data
        loader costs the speed and cures nothing.

    Example
        Loss 4.71 at step 118, 1.9 above the 2.81 of the steps before it (23 times their noise); the 11 sampled steps
        up to step 120 show no fault of a cast.

    Cure
        Look at the batch of that step, the learning rate and the gradient norm; skip the batch or clip the gradient.
        If it remains suspect, record every step around it (every=1).

    Thresholds
        - min_noise 8: distance from the median in standard deviations of the noise. No published basis: a Gaussian
          never gets there, and heavy-tailed batches hardly.
        - min_rise 0.1: distance relative to the median. No published basis.
        - window 16: steps of which the noise is taken; the median is of their later half.
        - min_history 10: finite losses before the first that is judged.
        - The talk's first class of cases; pytorch #150859.
    """

    code = "F125"
    name = "loss-spike-not-fp8"
    columns = ("loss",)
    cure = "look at the batch, the learning rate and the gradient norm of that step; record around it with every=1"
    needs_fp8 = False
    is_harmful = False

    min_noise: float = 8.0
    min_rise: float = 0.1
    window: int = 16
    min_history: int = 10

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per spike; the first loss that is not finite ends the search."""
        rows = run.sql("SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step").to_pylist()
        steps, losses = [row["step"] for row in rows], [row["loss"] for row in rows]
        sampled = sampled_steps(run)
        last_spike = -self.window
        for place, loss in enumerate(losses):
            if not math.isfinite(loss):
                message = f"the loss is {loss} from step {steps[place]} on{self._checked(sampled, steps[place])}"
                finding = self._finding(run, Severity.WARNING, steps[place], message, None, None)
                yield finding if steps[place] in sampled else self._unseen(finding, loss, sampled)
                return
            before = losses[max(0, place - self.window) : place]
            if len(before) < self.min_history:
                continue
            usual, noise = self._usual(before)
            limit = usual + max(self.min_noise * noise, self.min_rise * abs(usual))
            if loss > limit and loss > max(before) and place - last_spike > self.window // 2:
                last_spike = place
                ratio = f" ({(loss - usual) / noise:.0f} times their noise)" if noise else ""
                message = (
                    f"loss {loss:.4g} at step {steps[place]}, {loss - usual:.2g} above the {usual:.4g} of the steps"
                    f" before it{ratio}{self._checked(sampled, steps[place])}"
                )
                yield self._finding(run, Severity.INFO, steps[place], message, loss, limit)

    def _usual(self, before: Sequence[float]) -> tuple[float, float]:
        differences = [b - a for a, b in pairwise(before)]
        drift = median(differences)
        noise = 1.4826 * median(abs(d - drift) for d in differences) / math.sqrt(2)
        return median(before[-(self.window // 2) :]), noise

    def _checked(self, sampled: Sequence[int], step: int) -> str:
        until = _next_sampled(sampled, step)
        num = sum(s <= until for s in sampled)
        if not num:
            return "; no step was sampled by then, so no cast was looked at"
        looked = f"{num} sampled steps up to step {until} show" if num > 1 else f"the sampled step {until} shows"
        return f"; {looked} no fault of a cast"

    def _finding(
        self, run: Run, severity: Severity, step: int, message: str, value: float | None, threshold: float | None
    ) -> Finding:
        ranks = tuple(run.ranks)
        return Finding(code=self.code, name=self.name, severity=severity, steps=(step, step), ranks=ranks, value=value,
                       threshold=threshold, message=message, cure=self.cure)  # fmt: skip

    def _unseen(self, finding: Finding, loss: float, sampled: Sequence[int]) -> Finding:
        """Return the finding of a loss that became NaN between two sampled steps: nobody saw where, nobody is cleared."""
        step = finding.steps[0]
        start = max((s for s in sampled if s < step), default=0)
        message = (
            f"the loss is {loss} from step {step} on, which was not sampled: whether a cast did it was not recorded, and"
            " later everything is NaN"
        )
        cure = f"train again from step {start} or before with every=1: the first NaN then names its layer"
        return replace(finding, name="nonfinite-loss-unseen", message=message, cure=cure)

    def stands(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand only when no harmful finding began up to the first sampled step after the spike."""
        until = _next_sampled(sampled_steps(run), finding.steps[0])
        return not any(RULES.get(f.code).is_harmful and f.module and f.steps[0] <= until for f in others)


def _next_sampled(sampled: Sequence[int], step: int) -> int:
    """Return the first sampled step at or after ``step``; the last one, or -1, when there is none."""
    return min((s for s in sampled if s >= step), default=max(sampled, default=-1))


RULES.add(LossSpikeNotFp8.code, LossSpikeNotFp8())
