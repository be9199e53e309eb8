"""F126: the loss scale falls again and again, is too small for FP16 gradients, or is taken out with another step's value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Look, look
from fp8debug.rules.reading.loss_scales import (
    ClippingLimits,
    TwiceLimits,
    UnscalingLimits,
    clipped_while_scaled,
    has_gradients,
    late_unscaling,
    stepped_while_scaled,
    unscaled_twice,
)
from fp8debug.rules.reading.losses import loss_format
from fp8debug.rules.reading.nonfinite import cure_of_gradient, gradients_from_outside
from fp8debug.rules.reading.prefilter import may_have
from fp8debug.rules.reading.traces import percent, times

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: FP16's least positive value, and its least normal one.
_SMALLEST, _NORMAL = 2.0**-24, 2.0**-14
#: The cure of gradients that are unscaled late.
_UNSCALE = (
    "divide the gradients by the scale that their loss was multiplied with, and update the scale after the optimizer's step"
    " (scaler.step(), then scaler.update()); no cast changes it"
)
#: The cure of gradients that vanish before any cast.
_SCALE = (
    "multiply the loss by a loss scale and divide the gradients by it before they are clipped (torch.amp.GradScaler), or run the"
    " autocast in BF16, which needs none; FP8 gets the zeros that FP16 made, and no scale of a cast brings them back"
)
#: The cure of gradients that are clipped while they are scaled.
_CLIP = (
    "divide the gradients by the loss scale before they are clipped (scaler.unscale_(optimizer), then clip_grad_norm_); no cast"
    " changes it"
)
#: The cure of gradients that are divided twice.
_ONCE = (
    "divide the gradients by the loss scale once: where the optimizer's step divides them itself (scaler.step(), an optimizer of"
    " mixed precision), nothing before it may; no cast changes it"
)
#: The cure of gradients that are scaled when the optimizer steps.
_STEP = (
    "let the scaler take the optimizer's step (scaler.step(optimizer)), which divides the gradients by the loss scale first, with"
    " no optimizer.step() beside it; no cast changes it"
)

#: The cure of losses in a format of 16 bits.
_UPCAST = (
    "compute the loss in FP32 (logits.float() before the cross entropy, or autocast around it); none if only the number that was"
    " recorded is rounded; no cast changes it"
)


@dataclass(frozen=True)
class LossScaleLoop(Rule):
    """The loss scale overflows in a loop, leaves the gradients below FP16's range, or is taken out of them a step too late.

    What it detects
        Reductions of the loss scale that come faster than a scaler's growth explains, counted after its first descent from the
        initial value has ended; or a scale that has sunk below 1. Where gradients bring the first NaN or Inf of a step into the
        Linears, and still do when the scale is a small part of what it was, it is not at fault: half of it halves an overflow,
        and no scale makes 0 / 0 finite; the Linear is named. gradients-vanish: gradients of most modules lie on the grid of
        FP16's subnormals and are zero in part before any cast, whether a loss scale was recorded or not. clipped-while-scaled: at
        every sampled step the gradients that the optimizer gets are clipped hard, and to a norm so small that it is the usual one
        over the loss scale: they were clipped before they were divided by it. unscaled-twice: at every sampled step they are
        wgrad's over the square of the loss scale, and far smaller than gradients are. stepped-while-scaled: at every sampled step
        the optimizer gets the gradients as wgrad gave them, under a loss scale that should have been divided out, and its first
        moment (the update of an optimizer without one) is of them. unscaled-late: at the steps at which the loss scale grows, the
        gradient norm (of every step, where watch.step(grad_norm=...) has it before clipping; else the gradients that the
        optimizer gets at sampled steps) is short of the steps before and after by just that growth: it was divided by the new
        scale. Where no loss scale is recorded, it is what the gradients are over those of wgrad. No layer is to blame.
        loss-rounded, information: all losses are values of BF16 or of FP16, so that the loss function most likely computes in it.

    Why it matters
        A step whose gradients overflow is skipped: a loop trains on a fraction of its steps and then at a scale where
        small gradients vanish. FP8 with current scaling needs no loss scale; FP16 gradients and static scales do. A gradient
        that is unscaled late is a part of itself at every growth: a smaller step, and other moments of
        Adam. One that is clipped while it is scaled is thousands of times too small: SGD stands still, and Adam divides by eps.
        One that is not divided at all is as many times too large: SGD diverges, Adam's moments hold no other gradient any more,
        and an overflow that the scaler would skip reaches the weights.

    Example
        The loss scale was reduced 7 times within 20 steps from step 340 on, from 3.3e+04 to 256.

    Cure
        Find the Inf (a batch, a learning rate, a mask of -65504 in FP16): the gradient norm of the skipped steps names the
        moment. Where one Linear is named, look at what lies behind it: a root or logarithm whose eps is zero in FP16 (below
        2^-25), a division by a norm. BF16 in place of FP16 needs no loss scale; raise the initial scale where gradients vanish.
        Divide gradients by the scale that their loss was multiplied with, before they are clipped, and update the scale after
        the optimizer's step.

    Thresholds
        - window 20: steps in which reductions are counted.
        - max_reductions 3: reductions within it that are no loop. No published basis: a scaler that grows every 2000 steps
          (torch.amp's default) is reduced once in so many, and one that grows every 10 at most twice in 20.
        - max_reductions too: halvings between two sampled steps whose first NaN or Inf came with a gradient, beyond which the
          scale is not at fault. Closed form: gradients are proportional to it, and so many leave an eighth of an overflow. Seen
          in wespeaker #133.
        - min_scale 1: a scale below it makes the gradients smaller than they are. No published basis.
        - max_zero_rate 0.2: share of zeros in a grad_output on the grid of FP16's subnormals. No published basis.
        - min_modules 0.5: share of the modules that show it.
        - min_growths 2: of unscaled-late, steps at which the scale grows; max_deviation 0.25: of the shortfall from the growth,
          as a share, both as log2; min_noises 6: of the shortfall, in standard errors of the norm's own variation;
          max_growth_error 0.1: of a growth from a power of two, as log2, since a multiple that is known from samples is
          inexact. The shortfall follows from the fault (rules/reading/loss_scales.py); no published basis for the limits.
        - max_clip_factor 0.01, max_clipped_norm 1e-3, least_limit 0.01, greatest_limit 100, min_clipped_steps 3: of
          clipped-while-scaled, factor that clipping multiplied the gradients by, and their norm over the watched weights
          afterwards, at every sampled step; that norm times the loss scale, which is the limit that the program has clipped to;
          sampled steps. Closed form: a limit of c leaves a norm of c / S, and the factor is c / (S |g|). Gradients of a sum over
          tokens that are divided by their number have a small factor too, and an ordinary norm. No published basis for the
          range of limits, which are 0.1 to 10 in public recipes.
        - max_twice_error 0.1, min_twice_range 1.25, max_clipped_norm, min_clipped_steps: of unscaled-twice, distance of the
          multiple of wgrad's gradients from the inverse of the scale's square, as log2, at every sampled step; and the largest
          norm times the loss scale over the smallest. Closed form: the distance is 0, and both are known from samples to some
          percent; a norm that was clipped to is the same at every step; and gradients that are divided by the number of their
          tokens too keep an ordinary norm. No published basis for the limits. Seen in slime #1842.
        - min_divided_scale 1024, min_clipped_steps: of stepped-while-scaled, least loss scale that is judged, and sampled steps.
          A gradient that was divided by a scale S is 1 / S of wgrad's, one that was not as large as it; the limit is
          1 / sqrt(S), 1/32 at least, so that a sum over up to 32 ranks passes. Of the gradient Adam's first moment
          is 0.1 at its first step at beta1 0.9 and 0.23 in the RMS of independent ones, sqrt((1 - beta1) / (1 + beta1)), both
          closed forms; one that a fused kernel divides by S is 1 / S of it. No published basis for 1024.
        - min_losses 16, min_full_share 0.25: of loss-rounded, different losses needed, and share of them that need all bits of
          the format. Closed form: an FP32 loss is a BF16 value with a probability of 2^-16, an FP16 value with 2^-13; half of the
          values of a format need all its bits on average, and losses that are whole numbers do not.
        - Common guides to FP16 and FP8 training; numerics.md, 5. unscaled-late: seen in DeepSpeed #8588. clipped-while-scaled: in
          allennlp #5426; gradients-vanish: in Open-Rig3R #35. loss-rounded: in modalities #464.
    """

    code = "F126"
    name = "loss-scale-loop"
    needs_training = True
    columns = ()
    cure = "find the overflowing gradient (batch, learning rate, FP16 mask); BF16 needs no loss scale"
    needs_fp8 = False

    window: int = 20
    max_reductions: int = 3
    min_scale: float = 1.0
    max_zero_rate: float = 0.2
    min_modules: float = 0.5
    min_growths: int = 2
    max_deviation: float = 0.25
    min_noises: float = 6.0
    max_growth_error: float = 0.1
    max_clip_factor: float = 0.01
    max_clipped_norm: float = 1e-3
    least_limit: float = 0.01
    greatest_limit: float = 100.0
    min_clipped_steps: int = 3
    max_twice_error: float = 0.1
    min_twice_range: float = 1.25
    min_divided_scale: float = 1024.0
    min_losses: int = 16
    min_full_share: float = 0.25

    def needs(self, run: Run) -> str | None:
        """Return why not: neither a loss scale was recorded, nor gradients, nor an optimizer step."""
        has_any = run.has("loss_scale") or self._has_operands(run) or has_gradients(run)
        return None if has_any else "not recorded: loss_scale"

    @staticmethod
    def _has_operands(run: Run) -> bool:
        return run.has("zero_rate") and run.has("amin")

    @property
    def _look(self) -> Look:
        gradients = "tensor = 'grad_output' AND reference = 'operand'"
        return look(self._low, [], rows=f"{gradients} AND numel > 0", keys=gradients)

    @property
    def _low(self) -> list[Condition]:
        return [
            Condition("zero_rate", ">", self.max_zero_rate),
            Condition("amin", ">=", _SMALLEST),
            Condition("amax", "<", _NORMAL),
        ]

    def looks(self) -> Iterable[Look]:
        """Return the gradients among FP16's subnormals."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the loop, and the gradients that vanish."""
        query = "SELECT step, loss_scale FROM steps WHERE loss_scale IS NOT NULL AND loss_scale > 0 ORDER BY step"
        trace = [(row["step"], row["loss_scale"]) for row in run.sql(query).to_pylist()]
        yield from self._loop(run, trace)
        yield from self._vanishing(run)
        yield from self._late(run)
        yield from list(self._twice(run)) or self._clipped(run)
        yield from self._stepped(run)
        yield from self._rounded(run)

    def _rounded(self, run: Run) -> Iterable[Finding]:
        query = "SELECT step, loss FROM raw_steps WHERE loss IS NOT NULL ORDER BY step"
        rows = run.sql(query).to_pylist()
        found = loss_format([row["loss"] for row in rows], self.min_losses, self.min_full_share)
        if found is not None:
            message = (
                f"all {len(rows)} losses are {found[0]} values, two of which lie {found[1]:.2g} apart there: the loss is computed"
                f" in {found[0]}, which rounds what its backward pass reads, or it was rounded to be recorded"
            )
            finding = self._finding(run, Severity.INFO, (rows[0]["step"], rows[-1]["step"]), message, found[1], None)
            yield replace(finding, name="loss-rounded", cure=_UPCAST)

    def _stepped(self, run: Run) -> Iterable[Finding]:
        found = stepped_while_scaled(run, self.min_divided_scale, self.min_clipped_steps)
        if found is not None:
            message = (
                f"the optimizer steps with {found.multiple:.2g} times the gradients of wgrad at {len(found.steps)} sampled steps"
                f" from step {found.steps[0]} on, under a loss scale of {times(found.scale)}: they were not divided by it"
            )
            yield self._of_steps(run, found.steps, "stepped-while-scaled", message, _STEP, found.multiple, found.scale**-0.5)

    def _twice(self, run: Run) -> Iterable[Finding]:
        limits = TwiceLimits(
            max_norm=self.max_clipped_norm,
            max_error=self.max_twice_error,
            min_range=self.min_twice_range,
            min_steps=self.min_clipped_steps,
        )
        found = unscaled_twice(run, limits)
        if found is not None:
            message = (
                f"the gradients that the optimizer gets have a norm of {found.norm:.2g} at {len(found.steps)} sampled steps from"
                f" step {found.steps[0]} on, and are those of wgrad over {found.scale**2:.2g}, the square of the loss scale of"
                f" {times(found.scale)}: they were divided by it twice"
            )
            yield self._of_steps(run, found.steps, "unscaled-twice", message, _ONCE, found.norm, self.max_clipped_norm)

    def _clipped(self, run: Run) -> Iterable[Finding]:
        limits = ClippingLimits(
            max_factor=self.max_clip_factor,
            max_norm=self.max_clipped_norm,
            limits=(self.least_limit, self.greatest_limit),
            min_steps=self.min_clipped_steps,
        )
        found = clipped_while_scaled(run, limits)
        if found is not None:
            message = (
                f"the gradients that the optimizer gets have a norm of {found.norm:.2g} at {len(found.steps)} sampled steps from"
                f" step {found.steps[0]} on, which is {found.norm * found.scale:.2g} over the loss scale of {times(found.scale)}:"
                f" they were clipped before they were divided by it, to {found.factor:.2g} of their size"
            )
            yield self._of_steps(run, found.steps, "clipped-while-scaled", message, _CLIP, found.factor, self.max_clip_factor)

    def _late(self, run: Run) -> Iterable[Finding]:
        limits = UnscalingLimits(
            min_growths=self.min_growths,
            max_deviation=self.max_deviation,
            min_noises=self.min_noises,
            max_growth_error=self.max_growth_error,
        )
        late = late_unscaling(run, limits)
        if late is not None:
            message = (
                f"{late.what} is {late.factor:.2f} times that of the steps before and after at {len(late.steps)} steps at which"
                f" the loss scale grows by {times(late.growth)}, from step {late.steps[0]} on: it is divided by the scale that"
                " has just grown, not by the one that its loss was multiplied with"
            )
            finding = self._finding(
                run,
                Severity.WARNING,
                (late.steps[0], late.steps[-1]),
                message,
                late.factor,
                late.growth ** (self.max_deviation - 1),
            )
            yield replace(finding, name="unscaled-late", cure=_UNSCALE)

    def _loop(self, run: Run, trace: Sequence[tuple[int, float]]) -> Iterable[Finding]:
        falls: list[int] = []
        settled = False
        for place in range(1, len(trace)):
            if trace[place][1] < trace[place - 1][1]:
                falls += [place] if settled else []
            else:
                settled = True
        crowded = [
            (first, last)
            for first, last in zip(falls, falls[self.max_reductions :], strict=False)
            if trace[last][0] - trace[first][0] < self.window
        ]
        if crowded:
            start, end = crowded[0][0], crowded[-1][1]
            inside = sum(start <= place <= end for place in falls)
            message = (
                f"the loss scale was reduced {inside} times from step {trace[start][0]} to {trace[end][0]}, from"
                f" {times(trace[start - 1][1])} to {times(trace[end][1])}"
            )
            steps = (trace[start][0], trace[end][0])
            finding = self._finding(run, Severity.ERROR, steps, message, float(inside), float(self.max_reductions))
            yield self._located(run, finding, dict(trace))
            return
        low = [(step, scale) for step, scale in trace if scale < self.min_scale]
        if low:
            message = f"the loss scale has sunk to {times(min(scale for _, scale in low))} by step {low[-1][0]}"
            yield self._finding(run, Severity.ERROR, (low[0][0], low[-1][0]), message, low[-1][1], self.min_scale)

    def _located(self, run: Run, finding: Finding, scales: Mapping[int, float]) -> Finding:
        """Return a loop with the Linear whose gradient is not finite at any scale, if there is one."""
        before = max(step for step in scales if step < finding.steps[0])
        origins = [o for o in gradients_from_outside(run, before, finding.steps[1]) if o.step in scales]
        if not origins or scales[origins[-1].step] * 2**self.max_reductions > scales[origins[0].step]:
            return finding
        numbers = Counter(origin.row["module"] for origin in origins)
        origin = max(origins, key=lambda origin: (numbers[origin.row["module"]], -origin.step))
        row = origin.row
        message = (
            f"{finding.message}; the first NaN or Inf of {len(origins)} sampled steps came with a gradient, at step"
            f" {origins[0].step} under a scale of {times(scales[origins[0].step])} and still at step {origins[-1].step} under"
            f" {times(scales[origins[-1].step])}, first in the {row['gemm']} {row['tensor']} of {row['module']}; no Linear"
            " produced it, and no scale prevents it"
        )
        return replace(finding, message=message, module=row["module"], gemm=row["gemm"], tensor=row["tensor"],
                       call_index=row["call_index"] or 0, also=tuple(name for name in numbers if name != row["module"]),
                       cure=cure_of_gradient(origin, may_overflow=False))  # fmt: skip

    def _vanishing(self, run: Run) -> Iterable[Finding]:
        if not (self._has_operands(run) and may_have(run, self._look)):
            return
        query = (
            "SELECT step, count(DISTINCT module) AS num, avg(zero_rate) AS zero_rate,"
            f" count(DISTINCT module) FILTER (WHERE {' AND '.join(c.rows for c in self._low)}) AS num_low FROM sites"
            " WHERE tensor = 'grad_output' AND reference = 'operand' AND numel > 0 GROUP BY step ORDER BY step"
        )
        rows: list[dict[str, Any]] = run.sql(query).to_pylist()
        low = [row for row in rows if row["num_low"] >= self.min_modules * row["num"]]
        if low and 2 * len(low) >= len(rows):
            worst = max(row["zero_rate"] for row in low)
            message = (
                f"the gradients of {low[-1]['num_low']} of {low[-1]['num']} modules lie among FP16's subnormals, and"
                f" {percent(worst)} of their elements are zero before any cast"
            )
            steps = (low[0]["step"], low[-1]["step"])
            finding = self._finding(run, Severity.WARNING, steps, message, worst, self.max_zero_rate)
            yield replace(finding, name="gradients-vanish", gemm="dgrad", tensor="grad_output", cure=_SCALE)

    def _of_steps(
        self, run: Run, steps: Sequence[int], name: str, message: str, cure: str, value: float, threshold: float
    ) -> Finding:
        """Return a warning about all of these steps, under a name and with a cure of its own."""
        finding = self._finding(run, Severity.WARNING, (steps[0], steps[-1]), message, value, threshold)
        return replace(finding, name=name, cure=cure)

    def _finding(
        self, run: Run, severity: Severity, steps: tuple[int, int], message: str, value: float, threshold: float | None
    ) -> Finding:
        return Finding(code=self.code, name=self.name, severity=severity, steps=steps, ranks=tuple(run.ranks), value=value,
                       threshold=threshold, message=message, cure=self.cure)  # fmt: skip


RULES.add(LossScaleLoop.code, LossScaleLoop())
