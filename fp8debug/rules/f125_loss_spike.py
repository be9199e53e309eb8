"""F125: the loss jumps or becomes NaN, and no cast moved before it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.losses import OTHER_LOSS, Nonfinite, first_nonfinite, has_other_loss, nonfinite, read_losses, spikes
from fp8debug.rules.reading.movements import movements_before
from fp8debug.rules.reading.nonfinite import MAX_RESULT, NonfiniteOrigin, cure_of_gradient, first_poison, largest_product
from fp8debug.rules.reading.optimizer_steps import nonfinite_update
from fp8debug.rules.reading.traces import sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Of a spike that a movement of a cast's statistics came before, or too little was recorded to tell.
UNDECIDED = "loss-spike-undecided"
_BACKWARD = ("dgrad", "wgrad")
#: Cures of a first NaN or Inf by where it was seen.
OUTSIDE = "look at what lies before it: the batch, the embedding, a norm, attention or softmax"
AFTER = "look at the loss function (log of 0, division by 0, a sum that overflows), attention masks and the batch of that step"
WEIGHT = "look at the optimizer step before: learning rate, gradient norm and clipping, optimizer state; or at the checkpoint"


@dataclass(frozen=True)
class LossSpikeNotFp8(Rule, CourseLimits):
    """The loss spikes or becomes NaN while no cast showed a fault before it: look at the data and the optimizer.

    What it detects
        A loss far above the median of the steps before it, measured in their own noise (the median absolute deviation
        of step-to-step differences, so that the initial descent and earlier spikes do not count) and beyond what noisy
        batches did before; or one that is no longer finite. The message says which statistics moved in the sampled
        steps up to it. It stands only when no other rule found a harmful fault up to the first sampled step after it.
        loss-spike-undecided: a cast's statistics moved before the spike, or too little was recorded before it.
        Where another model of the process trains by a loss of its own (F127), the message says that the loss need not fall.
        A loss that is NaN or Inf is an error, whatever the other rules find, and names the first tensor that held one.
        nonfinite-from-outside: it came to a Linear from outside the Linears (data, embedding, norm, attention, loss
        function), and no cast or GEMM made it; a gradient that was finite in the Linear before it in the backward pass
        was made between the two. The backward pass answers to the loss: where that of the step is not finite and the
        forward pass is, the loss made it, whatever GEMM of that backward pass has the first NaN. nonfinite-weight: a
        weight held it when the step began, and the step before was recorded and finite; where the optimizer's update
        was NaN or Inf there and its gradient was not, it says so. nonfinite-loss-unseen: it came between two sampled
        steps, which blames nobody and clears nobody. nonfinite-overflow: the operands of a GEMM are so large that its
        result overflows in every format.
        nonfinite-loss: a GEMM made it in a module that does not run in FP8.

    Why it matters
        The first question to a spike is whether FP8 did it. Leaving FP8 for a bad batch, a learning rate or a data
        loader costs the speed and cures nothing.

    Example
        The loss spikes at step 118: 4.71, up from 2.81 (23x the normal variation); 11 sampled steps up to step 110 show
        no fault of a cast, nor does step 120 after it.

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
        - recent_steps 2, past_steps 16, min_past_steps 3: of a statistic that moved, the sampled steps up to the spike, and those
          before them, at most and at least, that are its past. min_moved_log2 1, min_moved_db 3, min_moved_underflow 0.01,
          min_moved_overflow 0.001, min_moved_gain 0.02: how far beyond the range of its past it lies: an amax in binades, SQNR in
          dB, underflow, clipping and gain; numerics.md, 4 (warn). min_moved_noise 6: and from their median, in standard
          deviations. No published basis for the others.
        - What follows decides no finding, but the class of the run (docs/triage.md).
        - level_steps 10, min_level_rise 0.15, min_level_noise 8, min_level_ratio 1.5: of a rise for good, losses of which a level
          is the median, and rise of the last above the lowest: relative, in noise, and over the largest rise that came back.
          No published basis: a new data mix moves a loss by some percent, a learning rate that comes in cycles moves it
          every time. max_level_noise 3: noise down to which a rise is followed back; one Gaussian step in 740 is beyond.
        - near_steps 5: sampled steps before the loss leaves its course within which a change or a warning may be the cause.
          min_changed_share 0.5: of the modules whose casts change together before it is the run's configuration and not one
          module's. min_lr_jump 4: factor by which a learning rate jumps up from one step to the next; a warm-up from zero
          doubles at its second step. No published basis.
        - at_once_steps 20, min_everywhere_share 0.5: of a divergence, steps from the first within which it is at once, and
          share of the modules with a fault from which on it is everywhere. No published basis.
        - max_fp8_noise 0.1, gradient_steps 4: FP8's share of the gradients' noise, at most, up to which BF16 would have left its
          course too, and the sampled steps just before whose gradients count. No published basis.
        - gap_steps 20, min_gap_errors 4, min_gap_share 0.01: of a baseline, common steps by whose median the losses are compared,
          so that one batch does not decide, and the gap in standard errors and relative to the baseline's loss. No published
          basis: a good FP8 run lies within 0.25 % of BF16's in DeepSeek-V3 (appendix B.1), and small runs are noisier.
          apart_steps 3, min_apart_noise 8, min_apart_share 0.1: last steps that lie apart before half of these do, each by so
          many standard deviations of the differences and this share of the loss. No published basis.
        - The first of the three classes that docs/triage.md explains, a loss spike that is or is not FP8's doing, is
          that of the NVIDIA talk which fp8debug follows; pytorch #150859 is such a spike, dion #24 such an update.
    """

    code = "F125"
    name = "loss-spike-not-fp8"
    needs_training = True
    columns = ("loss",)
    cure = "look at the batch, the learning rate and the gradient norm of that step; record around it with every=1"
    needs_fp8 = False
    is_harmful = False

    def check(self, run: Run) -> Iterable[Finding]:
        """Return one finding per spike; the first loss that is not finite ends the search."""
        steps, losses = read_losses(run)
        sampled = sampled_steps(run)
        sick = first_nonfinite(losses)
        for spike in spikes(steps[:sick], losses[:sick], self):
            message = f"the loss spikes at step {spike.step}: {spike.size}{_checked(sampled, spike.step)}"
            moved = movements_before(run, spike.step, self)
            message += f"; {moved.words}" if moved.found or not moved.steps else ""
            message += f"; {OTHER_LOSS}" if has_other_loss(run) else ""
            found = self._finding(run, Severity.INFO, spike.step, message, spike.loss, spike.limit)
            yield replace(found, name=UNDECIDED) if moved.found or not moved.steps else found
        lost = nonfinite(steps, losses)
        if lost is not None:
            yield self._nonfinite(run, sampled, lost)

    def _finding(
        self, run: Run, severity: Severity, step: int, message: str, value: float | None, threshold: float | None
    ) -> Finding:
        return Finding(code=self.code, name=self.name, severity=severity, steps=(step, step), ranks=tuple(run.ranks),
                       value=value, threshold=threshold, message=message, cure=self.cure)  # fmt: skip

    def _nonfinite(self, run: Run, sampled: Sequence[int], lost: Nonfinite) -> Finding:
        """Return the finding of a loss that is not finite, named by how much is known of its origin."""
        step = lost.step
        origin = first_poison(run)
        finding = self._finding(run, Severity.ERROR, step, lost.what, None, None)
        start = max((s for s in sampled if s < step), default=0)
        is_every = step - 1 in sampled or not sampled or step <= min(sampled)
        again = f"train again from step {start} or before with every=1: the first NaN then names its layer"
        if origin is None or origin.step > step:
            return self._not_seen(finding, run, sampled, lost, origin, again)
        if origin.follows_loss and origin.kind in ("cast", "gemm"):
            message = (
                f"{lost.what}; {_no_linear(run)}: what was read of the forward pass of that step is finite, so the loss function,"
                f" or what lies between the last Linear and the loss, made it; the {_tensor(origin.row)} of"
                f" {origin.row['module']}, the first NaN/Inf of the tensors, came after it, in the backward pass"
            )
            return replace(finding, name="nonfinite-from-outside", message=message, cure=AFTER, origin="outside")
        finding = self._at(finding, origin)
        row, count = origin.row, _elements(origin)
        some = tuple(row["ranks"]) if len(row["ranks"]) < len(run.ranks) else ()
        where = f" on rank{'' if len(some) == 1 else 's'} {', '.join(map(str, some))} of {len(run.ranks)}" if some else ""
        first = f"first NaN/Inf: the {_tensor(row)} of {row['module']} at step {origin.step}{where}{count}"
        if origin.kind == "weight":
            began = f"{lost.what}; {first}, which held it when the step began"
            if (made := nonfinite_update(run, row["module"], start)) is not None:
                message = f"{began}; {_no_linear(run)}: in step {start} {made.words}"
                return replace(finding, name="nonfinite-weight", message=message, cure=made.cure)
            if not is_every:
                cause = f"what made it in the step before was not recorded: the last sampled step before is {start}"
                name = "nonfinite-loss-unseen"
                return replace(finding, name=name, message=f"{began}; {cause}", cure=again, origin=None)
            cause = f"{_no_linear(run)}: it came with the initial weights or a checkpoint"
            if step - 1 in sampled:
                cause = f"{_no_linear(run)}: step {step - 1} was recorded too, and all tensors of Linears read there are finite"
            return replace(finding, name="nonfinite-weight", message=f"{began}; {cause}", cure=WEIGHT)
        if origin.kind == "outside":
            kind = "recorded Linear" if _unrecorded(run) else "Linear"
            before = f", and no {kind} is computed before it"
            if row["gemm"] != "fprop":
                before = f": the forward pass is finite, and no {kind}'s backward pass comes before"
            before = f"; {origin.before}, computed before it, was finite" if origin.before else before
            message = f"{first}; {_no_linear(run)}{before}; {lost.what}"
            cure = cure_of_gradient(origin) if row["gemm"] != "fprop" else OUTSIDE
            more = "" if origin.step in sampled else "; record around it with every=1"
            return replace(finding, name="nonfinite-from-outside", message=message, cure=f"{cure}{more}")
        if largest_product(run, row) > MAX_RESULT:
            sizes = "its operands are finite, and so large that their product overflows in every format"
            return replace(finding, name="nonfinite-overflow", message=f"{first}: {sizes}; {lost.what}", cure=WEIGHT)
        message = f"{first}, of finite operands; {lost.what}"
        return replace(finding, name="nonfinite-loss", message=message, cure="check this GEMM's kernel and its output's type")

    def _not_seen(
        self, finding: Finding, run: Run, sampled: Sequence[int], lost: Nonfinite, origin: NonfiniteOrigin | None, again: str
    ) -> Finding:
        """Return the finding of a loss in whose step, or before, no tensor of a Linear is known to hold a NaN or Inf."""
        step, later = lost.step, ""
        if origin is not None:
            row = origin.row
            later = f"; the first one recorded: the {_tensor(row)} of {row['module']} at step {origin.step}{_elements(origin)}"
        is_counted = all(run.has(column) for column in ("num_nan", "num_inf"))
        if step in sampled and is_counted:
            message = (
                f"{lost.what}; {_no_linear(run)}: all tensors of Linears read at that step are finite, so the loss"
                f" function, or what lies between the last Linear and the loss, made it{later}"
            )
            return replace(finding, name="nonfinite-from-outside", message=message, cure=AFTER, origin="outside")
        if origin is not None and origin.count is None:  # what searches the forward pass of each step has passed this one
            message = f"{lost.what}; {_no_linear(run)}: the forward pass of that step was searched and is finite{later}"
            return replace(finding, name="nonfinite-from-outside", message=message, cure=AFTER, origin="outside")
        why = "which was not sampled" if step not in sampled else "at which NaN and Inf were not counted"
        message = f"{lost.what}, {why}: whether a cast did it was not recorded{later}"
        return replace(finding, name="nonfinite-loss-unseen", message=message, cure=again, origin=None)

    def _at(self, finding: Finding, origin: NonfiniteOrigin) -> Finding:
        """Return the finding with the site of the first tensor that held a NaN or Inf."""
        row = origin.row
        site = {key: row[key] for key in ("module", "gemm", "tensor")}
        made = origin.kind if origin.kind in ("cast", "gemm") else "outside"
        victims = tuple(name for name in origin.poisoned if name != row["module"])
        return replace(finding, **site, cast=row["cast_name"], ranks=tuple(row["ranks"]), call_index=row["call_index"] or 0,
                       victims=victims, origin=made)  # fmt: skip

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Stand when no harmful finding began up to the first sampled step after the spike, its own backward pass apart.

        A loss that is not finite stands beside all but an error that may have made it.
        """
        until = _next_sampled(sampled_steps(run), finding.steps[0])
        earlier = [
            f
            for f in others
            if RULES.get(f.code).is_harmful
            and (f.module or f.code == "F127")
            and f.severity > Severity.INFO
            and f.steps[0] <= until
            and not (f.steps[0] == finding.steps[0] and all(part.gemm in _BACKWARD for part in f.sites))
        ]
        if finding.severity is not Severity.ERROR:
            return not earlier
        makers = ("F103", "F127") if finding.origin == "outside" else tuple(RULES.names())
        return not any(f.severity is Severity.ERROR and f.code in makers for f in earlier)


def _checked(sampled: Sequence[int], step: int) -> str:
    """Return what the sampled steps up to a step show, and the next one, in words."""
    before = [s for s in sampled if s <= step]
    after = next((s for s in sampled if s > step), None) if step not in sampled else None
    if not before and after is None:
        return "; no step was sampled by then, so no cast was recorded"
    looked = f"{len(before)} sampled steps up to step {before[-1]} show" if len(before) > 1 else ""
    looked = looked or (f"the sampled step {before[0]} shows" if before else "no step was sampled by then; step")
    if not before:
        return f"; no step was sampled by then; the sampled step {after} after it shows no fault of a cast"
    return f"; {looked} no fault of a cast" + (f", nor does step {after} after it" if after is not None else "")


def _tensor(row: Mapping[str, Any]) -> str:
    """Return what an operand or result is called, for people."""
    names = {("fprop", "input"): "forward input", ("fprop", "weight"): "weight", ("fprop", "output"): "forward output"}
    return names.get((row["gemm"], row["tensor"]), f"{row['gemm']} {row['tensor']}")


def _unrecorded(run: Run) -> list[str]:
    """Return the Linears of which no tensor was recorded: a NaN may be theirs."""
    return [module["fqn"] for module in run.modules if not module.get("observed", True)]


def _no_linear(run: Run) -> str:
    """Return that no Linear produced a NaN or Inf, as far as Linears were recorded."""
    names = _unrecorded(run)
    if not names:
        return "no Linear produced it"
    more = f" and {len(names) - 1} more are not)" if len(names) > 1 else " is not)"
    return f"no recorded Linear produced it ({names[0]}{more}"


def _elements(origin: NonfiniteOrigin) -> str:
    """Return how many elements are not finite, in brackets; nothing where nobody counted."""
    return "" if origin.count is None else f" ({origin.count} element{'' if origin.count == 1 else 's'})"


def _next_sampled(sampled: Sequence[int], step: int) -> int:
    """Return the first sampled step at or after ``step``; the last one, or -1, when there is none."""
    return min((s for s in sampled if s >= step), default=max(sampled, default=-1))


RULES.add(LossSpikeNotFp8.code, LossSpikeNotFp8())
