"""F125: the loss jumps or becomes NaN, and no cast moved before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.evidence import sampled_steps
from fp8debug.rules.losses import first_nonfinite, read_losses, spikes
from fp8debug.rules.movements import movements_before
from fp8debug.rules.nonfinite import Origin, first_poison
from fp8debug.spikes import SpikeDetector

if TYPE_CHECKING:
    from fp8debug.store.run import Run

OUTSIDE = "look at what lies before it: the batch, the embedding, a norm, attention or softmax; record around it with every=1"


@dataclass(frozen=True)
class LossSpikeNotFp8(Rule):
    """The loss spikes or becomes NaN while no cast showed a fault before it: look at the data and the optimizer.

    What it detects
        A loss far above the median of the steps before it, measured in their own noise (the median absolute deviation
        of step-to-step differences, so that the initial descent and earlier spikes do not count) and beyond what noisy
        batches did before; or one that is no longer finite. The message says which statistics moved in the sampled
        steps up to it. It stands only when no other rule found a harmful fault up to the first sampled step after it.
        Two losses that are no longer finite have names of their own. nonfinite-from-outside: the first NaN or Inf came
        to a Linear from outside the Linears (data, embedding, norm, attention), or with its weight, and no cast or GEMM
        made it. nonfinite-loss-unseen: it came between two sampled steps, which blames nobody and clears nobody.

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
        - min_ratio 2: distance relative to the largest of the last memory 128 steps, so that a batch which is worse
          than others is no spike where such batches come. No published basis: of 40 clean runs of 1000 steps each,
          with Gaussian noise of 5 to 40 %, it silences all; without it 6 to 9 have a spike (computed).
        - window 16: steps of which the noise is taken, and twice as many; the median is of its later half.
        - min_history 10: finite losses before the first that is judged.
        - The first of the three classes that docs/triage.md explains, a loss spike that is or is not FP8's doing, is
          that of the NVIDIA talk which fp8debug follows; pytorch #150859 is such a spike.
    """

    code = "F125"
    name = "loss-spike-not-fp8"
    columns = ("loss",)
    cure = "look at the batch, the learning rate and the gradient norm of that step; record around it with every=1"
    needs_fp8 = False
    is_harmful = False

    min_noise: float = SpikeDetector.min_noise
    min_rise: float = SpikeDetector.min_rise
    min_ratio: float = SpikeDetector.min_ratio
    window: int = SpikeDetector.window
    memory: int = SpikeDetector.memory
    min_history: int = SpikeDetector.min_history

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per spike; the first loss that is not finite ends the search."""
        steps, losses = read_losses(run)
        sampled = sampled_steps(run)
        sick = first_nonfinite(losses)
        for spike in spikes(steps[:sick], losses[:sick], **self.thresholds):
            message = f"loss {spike.loss:.4g} at step {spike.step}, {spike.size}{self._checked(sampled, spike.step)}"
            moved = movements_before(run, spike.step)
            message += f"; {moved.words}" if moved.found else ""
            yield self._finding(run, Severity.INFO, spike.step, message, spike.loss, spike.limit)
        if sick is not None:
            yield self._nonfinite(run, sampled, steps[sick], losses[sick])

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
        return Finding(code=self.code, name=self.name, severity=severity, steps=(step, step), ranks=tuple(run.ranks),
                       value=value, threshold=threshold, message=message, cure=self.cure)  # fmt: skip

    def _nonfinite(self, run: Run, sampled: Sequence[int], step: int, loss: float) -> Finding:
        """Return the finding of a loss that is not finite, named by how much is known of its origin."""
        message = f"the loss is {loss} from step {step} on{self._checked(sampled, step)}"
        finding = self._finding(run, Severity.WARNING, step, message, None, None)
        origin = first_poison(run)
        start = max((s for s in sampled if s < step), default=0)
        again = f"train again from step {start} or before with every=1: the first NaN then names its layer"
        if origin is not None and origin.step <= step and origin.kind == "outside":
            return replace(finding, name="nonfinite-from-outside", message=f"{self._path(origin)}; the loss is {loss} from"
                           f" step {step} on", cure=OUTSIDE, victims=origin.poisoned)  # fmt: skip
        if origin is not None and origin.step <= step and origin.kind == "weight":
            message = f"the loss is {loss} from step {step} on, as that step began with NaN or Inf in weights, first"
            message += f" {origin.row['module']}'s: what made them in the step before was not recorded"
            return replace(finding, name="nonfinite-loss-unseen", message=message, cure=again, victims=origin.poisoned)
        if step in sampled:
            return finding
        message = (
            f"the loss is {loss} from step {step} on, which was not sampled: whether a cast did it was not recorded, and"
            " later everything is NaN"
        )
        return replace(finding, name="nonfinite-loss-unseen", message=message, cure=again)

    def _path(self, origin: Origin) -> str:
        row = origin.row
        elements = "" if origin.count is None else f" ({origin.count} elements)"
        last = f"{origin.before}, computed before it, was finite" if origin.before else "no Linear is computed before it"
        return (
            f"the first NaN or Inf came to the {row['gemm']} {row['tensor']} of {row['module']} at step {origin.step} from"
            f" outside the Linears{elements}: {last}"
        )

    def stands(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand when no harmful finding began up to the first sampled step after the spike, its own backward pass apart."""
        until = _next_sampled(sampled_steps(run), finding.steps[0])
        return not any(
            RULES.get(f.code).is_harmful
            and (f.module or f.code == "F127")
            and f.severity > Severity.INFO
            and f.steps[0] <= until
            and not (f.steps[0] == finding.steps[0] and all(part.tensor == "grad_output" for part in f.sites))
            for f in others
        )


def _next_sampled(sampled: Sequence[int], step: int) -> int:
    """Return the first sampled step at or after ``step``; the last one, or -1, when there is none."""
    return min((s for s in sampled if s >= step), default=max(sampled, default=-1))


RULES.add(LossSpikeNotFp8.code, LossSpikeNotFp8())
