"""F127: the loss rises from the first steps on, everywhere at once: software, learning rate or warm-up, not a layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.loss_spikes import noise_of
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.losses import OTHER_LOSS, falls_on, has_other_loss, read_losses
from fp8debug.rules.reading.optimizer_steps import OUT_OF_SIZE, LargeUpdates, UpdateLimits, large_updates
from fp8debug.rules.reading.traces import sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_BESIDE_ANOTHER = "none if it is meant: judge the training by its task (the return, samples), or beside the same steps in BF16"


@dataclass(frozen=True)
class DivergesAtStart(Rule):
    """The loss rises from the first steps on, or updates are as large as the weights, while no single layer is at fault.

    What it detects
        A loss that lies above its first value in the later half of the first steps, and at the end; or that rose beyond its
        noise and is no longer finite within them, when most modules had moved by then: a NaN that comes to tensors of usual
        size has an origin of its own (F103, F125). The message says how many modules' inputs and weights moved at once. It
        stands only when no other rule found a harmful fault that is local, in less than half of the modules, when the loss
        began to rise. Where the weights of most modules grew by then, which no cast can do, clipping and underflow are what
        the divergence leaves behind; so they are where the optimizer's moments made it.
        It is information where another model of the process trains by a loss of its own, as a critic beside an actor or a
        discriminator beside a generator: what the loss is of changes with the other model. That is known where two optimizers
        without a common parameter step by turns, each with gradients that came after the other's step, or losses give
        gradients to one model or the other by turns, or one loss is a sum of terms that reach no common parameter; two
        optimizers that step after one backward pass (Muon and AdamW), copies of one model, teachers and averages of weights are
        no such models. A loss that becomes NaN or Inf, and updates out of size, count all the same.
        updates-out-of-size: at any step, an optimizer step changed weights by as much as they are large. The message says
        whether the optimizer's second moments are 0 under gradients that are not (kept in too few bits, they underflow, and
        m / (0 + eps) explodes), or Adam moves an element by more than gradients can (a checkpoint that kept the second moment
        in FP16 restores zeros), the learning rate is too high for the weights, or the gradient was that large. Clipping and
        underflow that begin with it or after it are its consequences. What a cast does cannot enlarge an update of Adam,
        which divides by the size of the gradients; an update that the gradient explains yields to a fault of a cast before it.
        Where few weights have such updates and the loss falls on after the last of them, this is information: a gate that
        starts near zero and has a learning rate of its own. So it is where the first step of the run alone has them, by its
        learning rate, and the loss ends below the one before it, as of Adagrad.

    Why it matters
        Training that fails at once fails everywhere: a wrong flag, a broken kernel or library, a learning rate or a
        missing warm-up. Searching a layer to take out of FP8 costs days; the same start in BF16 tells in minutes.

    Example
        The loss rises from 5.55 to 31.2 in the first 20 steps; the amax of 42 of 42 modules more than doubled by step 10.

    Cure
        The same steps in BF16: if they diverge too, lower the learning rate or lengthen the warm-up, and look at data and
        initialisation. If they do not, check versions, flags and the FP8 library before any layer (fp8debug coverage RUN).

    Thresholds
        - window 20: first steps that are judged; numerics.md, 5 ("all sites at once from step 0").
        - min_history 8: losses needed. No published basis.
        - min_rise 0.1: median loss of the window's later half over the first loss, relative. No published basis: a start
          without warm-up jumps and comes back below its first value within ten steps.
        - min_noise 3: the same rise in standard deviations of those losses' noise, as a first batch may be an easy one; from
          max_noisy 2 times the first loss on it counts all the same. No published basis.
        - min_growth 2: growth of an amax that counts as moved. No published basis: in 12 runs with a learning rate that was
          too high all weights grew more than that by the second sampled step, in healthy ones none [measured].
        - max_update_ratio 0.5: RMS of an update over that of its weight, or over ordinary_rms 0.5 times 1 / sqrt(columns), half
          of an initial weight's, where it is smaller, as one that starts from 0 is. No published basis: at most 0.034 in 39 clean
          runs of twelve
          architectures [measured, tests/bench/clean.py]; Adam at a learning rate of 0.02 without warm-up, which trains well,
          moves weights of RMS 0.07 by 0.28.
        - max_local 0.5: share of the modules below which another rule's finding is local, and the cause; that must have
          moved before a loss that is NaN counts as a divergence; and below which updates out of size are information where
          the loss falls on.
        - max_adam 2: an element's update over (1 - beta1) / sqrt((1 - beta2) (1 - beta1^2 / beta2)) times the learning rate, 7.3
          for betas of 0.9 and 0.999, beyond which Adam's moments are not of the same gradients. Closed form (Cauchy-Schwarz);
          2 is for the weight decay that is part of an update.
        - max_normalized 10: an element's update over the learning rate, beyond which second moments that are 0 explain it, and up
          to which an optimizer of unknown betas divides by the gradients' size: Adam's is 7.3, and 10 for betas of 0 and 0.99.
        - torchtitan #742 (8-bit Adam), COAT #3 (FP8 states) and ultralytics #24085 (states in FP16) are updates out of size.
        - The case "divergence at the start" of the NVIDIA talk that this tool follows; KempnerForge's guide.
    """

    code = "F127"
    name = "diverges-at-start"
    needs_training = True
    columns = ()
    cure = "run the same steps in BF16: lower the learning rate or warm up if they diverge too, else check versions and flags"
    needs_fp8 = False

    window: int = 20
    min_history: int = 8
    min_rise: float = 0.1
    min_noise: float = 3.0
    max_noisy: float = 2.0
    min_growth: float = 2.0
    max_update_ratio: float = 0.5
    max_adam: float = 2.0
    max_normalized: float = 10.0
    ordinary_rms: float = 0.5
    max_local: float = 0.5

    @property
    def _update_limits(self) -> UpdateLimits:
        return UpdateLimits(self.max_update_ratio, self.max_normalized, self.max_adam, self.ordinary_rms)

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the divergence, if there is one; else the updates that are out of size."""
        large = large_updates(run, self._update_limits)
        diverged = list(self._diverged(run))
        if large is None:
            yield from diverged
        elif diverged and diverged[0].severity is Severity.ERROR and large.steps[0] <= diverged[0].steps[1]:
            yield replace(diverged[0], message=f"{diverged[0].message}; {large.words}", cure=large.cure)
        else:
            yield from [*diverged, self._out_of_size(run, large)]

    def needs(self, run: Run) -> str | None:
        """Return why nothing can be judged: neither a loss nor an optimizer step was recorded."""
        has_any = run.has("loss") or run.sql("SELECT step FROM raw_updates LIMIT 1").num_rows
        return None if has_any else "not recorded: loss"

    def _out_of_size(self, run: Run, large: LargeUpdates) -> Finding:
        is_everywhere = len(large.modules) >= self.max_local * large.num_modules
        num = f"; {len(large.modules)} of {large.num_modules} weights have such updates by step {large.steps[-1]}"
        finding = Finding(code=self.code, name=OUT_OF_SIZE, severity=Severity.WARNING, steps=(large.steps[0], large.steps[-1]),
                          ranks=tuple(run.ranks), value=large.ratio, threshold=self.max_update_ratio,
                          message=f"{large.words}{num}", cure=large.cure)  # fmt: skip
        if not is_everywhere and falls_on(run, large.steps[-1], max_rise=self.min_rise, min_history=self.min_history):
            words = f"{large.size}{num}; the loss falls on, as with a learning rate that is meant for a gate or a scale"
            return replace(finding, severity=Severity.INFO, message=words, cure=f"none if it is meant, else {large.cure}")
        if not is_everywhere and self._is_of_first_step(run, large):
            words = f"{large.size}{num}, in its first step alone, and the loss ends below the one before it"
            return replace(finding, severity=Severity.INFO, message=words, cure=f"none needed, else {large.cure}")
        return replace(finding, severity=Severity.ERROR) if is_everywhere or len(large.steps) > 1 else finding

    def _is_of_first_step(self, run: Run, large: LargeUpdates) -> bool:
        """Return whether the run's first step alone is that large, by the learning rate, and the loss came back.

        An optimizer that divides by the sum of all squares so far (Adagrad) moves each element by the learning rate then, and by
        less from there on.
        """
        first = min(run.steps_range)
        is_first = large.steps == (first,) and large.cause == "learning-rate"
        return is_first and falls_on(run, first, max_rise=math.inf, min_history=self.min_history)

    def _diverged(self, run: Run) -> Iterable[Finding]:
        steps, losses = read_losses(run)
        early = losses[: self.window + 1]
        sick = next((place for place, loss in enumerate(early) if not math.isfinite(loss)), None)
        finite = early[:sick]
        if not finite or finite[0] <= 0:
            return
        limit = finite[0] * (1 + self.min_rise)
        if sick is not None:
            is_diverged = len(finite) > 1 and self._ends_high(finite, limit) and self._is_everywhere(run, steps[sick])
        else:
            is_diverged = len(finite) >= self.min_history and self._rises(finite[len(finite) // 2 :], finite[0], limit)
            is_diverged = is_diverged and not self._comes_back(losses, finite[0])
        if is_diverged:
            yield self._finding(run, steps, finite, sick, limit)

    def _rises(self, later: Sequence[float], first: float, limit: float) -> bool:
        level = median(later)
        return level > self.max_noisy * first or level > max(limit, first + self.min_noise * noise_of(later))

    def _ends_high(self, finite: Sequence[float], limit: float) -> bool:
        """Return whether the last finite loss lies above the first one, beyond the noise."""
        first, last = finite[0], finite[-1]
        is_beyond = last > self.max_noisy * first or last > first + self.min_noise * noise_of(finite)
        return last > limit and is_beyond

    def _is_everywhere(self, run: Run, last: int) -> bool:
        """Return whether most modules moved before the loss was NaN; True where too little was recorded to tell."""
        moved, num = self._growing(run, last, ("input", "weight"))
        return not num or moved >= self.max_local * num

    def _comes_back(self, losses: Sequence[float], first: float) -> bool:
        return median(losses[-self.min_history :]) <= first

    def _finding(self, run: Run, steps: Sequence[int], finite: Sequence[float], sick: int | None, limit: float) -> Finding:
        last = steps[len(finite) - 1] if sick is None else steps[sick]
        highest = max(finite)
        to = f"{highest:.4g}" if sick is None else f"{highest:.4g}, then to NaN or Inf"
        message = f"the loss rises from {finite[0]:.4g} to {to} within steps {steps[0]} to {last}{self._moved(run, last)}"
        found = Finding(code=self.code, name=self.name, severity=Severity.ERROR, steps=(steps[0], last), ranks=tuple(run.ranks),
                        value=highest, threshold=limit, message=message, cure=self.cure)  # fmt: skip
        if sick is None and has_other_loss(run):
            return replace(found, severity=Severity.INFO, message=f"{message}; {OTHER_LOSS}", cure=_BESIDE_ANOTHER)
        return found

    def _moved(self, run: Run, last: int) -> str:
        """Return in words how many modules' operands moved from the first sampled step on."""
        moved, num = self._growing(run, last, ("input", "weight"))
        return f"; the amax of {moved} of {num} modules changed more than {self.min_growth:g} times by then" if num else ""

    def _growing(self, run: Run, last: int, tensors: Sequence[str]) -> tuple[int, int]:
        """Return of how many modules such an operand of fprop changed up to a step, and how many there are."""
        query = (
            "SELECT module, tensor, max(amax) AS highest, min(amax) FILTER (WHERE amax > 0) AS lowest,"
            " count(DISTINCT step) AS num"
            f" FROM sites WHERE reference = 'operand' AND gemm = 'fprop' AND amax IS NOT NULL AND step <= {int(last)}"
            " GROUP BY module, tensor"
        )
        found = run.sql(query).to_pylist()
        rows = [row for row in found if row["num"] > 1 and row["lowest"] and row["tensor"] in tensors]
        moved = {row["module"] for row in rows if row["highest"] > self.min_growth * row["lowest"]}
        return len(moved), len({row["module"] for row in rows})

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand only when no harmful finding of a few modules began up to the first sampled step after the rise.

        Updates out of size stand whatever casts do, unless the gradient explains them and a cast was at fault before; so does
        a divergence of updates that only the optimizer's moments can make.
        """
        large = large_updates(run, self._update_limits)
        if large is not None and (finding.name == OUT_OF_SIZE or (large.is_of_moments and large.steps[0] <= finding.steps[1])):
            return large.is_own or not any(
                RULES.get(f.code).is_harmful and f.module and f.severity > Severity.INFO and f.steps[0] <= finding.steps[0]
                for f in others
            )
        num = max(1, sum(module.get("call_index") is not None for module in run.modules))
        rise = next((s for s, loss in zip(*read_losses(run), strict=True) if not loss <= (finding.threshold or 0.0)), 0)
        until = min((s for s in sampled_steps(run) if s >= rise), default=finding.steps[1])
        grown, known = self._growing(run, until, ("weight",))
        is_everywhere = known > 0 and grown >= self.max_local * known
        return not any(
            RULES.get(f.code).is_harmful
            and not (is_everywhere and RULES.get(f.code).follows)
            and f.module is not None
            and f.severity > Severity.INFO
            and f.steps[0] <= until
            and len(f.also) + 1 < self.max_local * num
            for f in others
        )


RULES.add(DivergesAtStart.code, DivergesAtStart())
