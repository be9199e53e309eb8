"""F101: a delayed or static scale is older than the growth of its tensor, so values clip at the format's maximum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.rules.base import RULES, Finding, FollowingRule, Severity
from fp8debug.rules.reading.bounds import READ_AS_ANOTHER
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.forecasts import ForecastLimits, clipping_ahead
from fp8debug.rules.reading.traces import IS_DELAYED, Trace, above, percent, times, traces

if TYPE_CHECKING:
    from fp8debug.recipes import Cast
    from fp8debug.store.read.run import Run


_LEFT_BEHIND = ", nor does it hold what the tensor had at earlier sampled steps: it does not follow its tensor"


@dataclass(frozen=True)
class StaleScaleSaturation(FollowingRule, ForecastLimits):
    """A delayed scale predates a growth of its tensor: values clip at the format's maximum.

    What it detects
        Under delayed or static scaling the scale comes from amaxes before this step. When the tensor has grown since,
        values beyond the old amax are clamped. The rule wants a material share of clipped elements, at several sampled
        steps or one overwhelming one, and a headroom (amax / scale_inv / format maximum) clearly above 1. The few
        elements that clip while activations grow in the first steps are healthy and not reported, and gradients that clip
        only in the backward pass of a loss spike follow from that (F125).
        Where nothing clips yet, a headroom that rises steadily is reported as stale-scale-saturation-forecast, with when
        it will clip (docs/triage.md).

    Why it matters
        Clipping is a bias, not noise: the largest activations shrink, every step in the same direction. It was the
        cause of the FP8 divergence in arXiv 2409.12517, and shows in one layer first.

    Example
        blocks.3.mlp.gate, fprop input, e4m3fn tensorwise delayed(16,max): 93 % of the elements clip from step 212 on,
        because today's amax is 14 times what the scale was made for.

    Cure
        Current scaling for this operand; or a shorter amax history and a margin; or BF16 for this GEMM.

    Thresholds
        - max_rate 0.01: share of clipped elements; numerics.md, 4 (act above 1 % under delayed scaling: growth of 1 %
          a step clips the maximum alone).
        - max_rate_once 0.25: the share that counts at a single sampled step. No published basis: a Gaussian tensor
          whose amax doubles in one step clips 2.4 %, one whose amax grows fourfold 26 %.
        - early_headroom 8: headroom that counts, with that share, even during the warm-up and in a grad_output, which
          one bad batch may multiply. No published basis: weights that start at zero double from step 1 to step 2.
        - warn_rate 0.001: share that is a warning when it lasts; numerics.md, 4 (warn above 0.1 %).
        - min_headroom 1.25: below, clipping costs little more than the rounding error 1/17 of E4M3. No published
          basis. Where no headroom was recorded, as in an imported log, max_rate alone decides.
        - min_elements 8: clipped elements; in a small tensor a share says nothing. No published basis.
        - min_steps 2, warn_steps 3: sampled steps after the warm-up, and at least half of those since the first.
        - warmup 8: first steps of a run, which count for nothing else: layers that start at zero grow by 1 / step a
          step, and all their elements are near the amax, so that most of them clip [measured: 89 % at step 2 and 14 %
          at step 6, in a run that trains well].
        - early_steps 4: sampled steps of a static scale, all of the run's, that clip by max_rate where the warm-up hides
          them: a static scale follows nothing, so that growth is no excuse. A delayed scale needs no warm-up either where it
          does not hold, by min_headroom, an amax that its history has (algorithm max, sampled two steps before or
          earlier) at min_steps sampled steps: a healthy one does by construction.
        - max_lag 1: steps by which the amaxes that a delayed scale is made of may lag, as some stacks form it one step ahead.
          max_calls 2: amaxes that a history may get for one recorded tensor, as a recomputed forward pass adds its own.
        - horizon 1: how far a forecast looks ahead, as a share of the steps that the trend was seen for; 0 for none. No
          published basis.
        - min_points 8, max_points 60, min_z 3, min_later_slope 0.5, trend_warmup 8: of a forecast, the sampled steps that make a
          trend, at least and at most (the last ones count), after the first steps of the run; Mann-Kendall's z, which 1 of 740
          steady series has by chance; and the slope of the later half over that of the whole. No published basis.
        - follow_steps 2: sampled steps after the first of another fault, in a layer that ran before, within which this one is its
          consequence, as information. No published basis.
        - min_batch_growth 10: amax of what the module that runs first reads, over its largest of the sampled steps before; in
          another module a finding at such steps alone is a consequence of the batch, as information. No published basis.
    """

    code = "F101"
    name = "stale-scale-saturation"
    columns = ("num_saturated",)
    cure = "scaling='current' for this operand; else a shorter history or a margin; else BF16 for this GEMM"
    changes: ClassVar[Mapping[str, Any]] = {"scaling": "current"}

    max_rate: float = limits.MAX_CLIPPED_DELAYED
    max_rate_once: float = 0.25
    warn_rate: float = limits.WARN_CLIPPED_DELAYED
    min_headroom: float = limits.MIN_CLIPPED_HEADROOM_DELAYED
    min_elements: int = 8
    min_steps: int = 2
    warn_steps: int = 3
    warmup: int = 8
    early_headroom: float = 8.0
    early_steps: int = 4
    max_lag: int = 1
    max_calls: int = 2

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the sites whose scale is too old, or else those where it will be."""
        found = list(self._clipping(run))
        yield from found or clipping_ahead(self, run, self.min_headroom, self)

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("overflow_rate", ">", self.warn_rate),
            Keys(IS_DELAYED),
            f"headroom > {self.min_headroom} OR headroom IS NULL AND overflow_rate > {self.max_rate}",
            f"num_saturated >= {self.min_elements}",
        ]
        return look(conditions, ["overflow_rate", "headroom", "amax", "scale_inv_max", "num_tensors"])

    def looks(self) -> Iterable[Look]:
        """Return the rows that clip."""
        yield self._look

    def _clipping(self, run: Run) -> Iterable[Finding]:
        for trace in traces(run, self._look):
            severe = trace.where(above("overflow_rate", self.max_rate))
            once = trace.where(self._is_overwhelming(trace))
            if once is not None or (severe is not None and severe.lasting(self.min_steps, self.warmup)):
                yield self._finding(severe or trace, Severity.ERROR, self.max_rate)
            elif severe is not None and self._is_left_behind(severe):
                yield self._finding(severe, Severity.ERROR, self.max_rate, _LEFT_BEHIND)
            elif trace.lasting(self.warn_steps, self.warmup):
                yield self._finding(trace, Severity.WARNING, self.warn_rate)

    def _is_overwhelming(self, trace: Trace) -> Callable[[dict[str, Any]], bool]:
        def holds(row: dict[str, Any]) -> bool:
            is_settled = row["step"] >= trace.start + self.warmup and trace.tensor != "grad_output"
            is_far = row["step"] >= trace.start + self.min_steps and (row["headroom"] or 0) > self.early_headroom
            return bool(row["overflow_rate"] > self.max_rate_once and (is_settled or is_far))

        return holds

    def _is_left_behind(self, trace: Trace) -> bool:
        """Return whether the scale does not follow its tensor, whatever the tensor did: it needs no warm-up.

        A delayed scale of the largest amax of its history holds every amax of the sampled steps that the history reaches back
        to. A static scale follows nothing.
        """
        if trace.cast is None:
            return False
        if trace.cast.scaling == "static":
            return len(trace.rows) == len(trace.sampled) >= self.early_steps
        if trace.cast.algo != "max":
            return False
        behind = {row["step"] for row in trace.rows if any(self._is_beyond(trace.cast, row, past) for past in trace.rows)}
        return len(behind) >= self.min_steps

    def _is_beyond(self, cast: Cast, row: dict[str, Any], past: dict[str, Any]) -> bool:
        """Return whether an earlier amax, which is in the history of this row's scale, lies beyond it."""
        age = row["step"] - past["step"]
        calls = self.max_calls * age * max(row["num_tensors"] or 1, past["num_tensors"] or 1)
        if (
            age <= self.max_lag
            or calls > cast.history
            or not past["amax"]
            or not row["scale_inv_max"]
            or row["ranks"] != past["ranks"]
        ):
            return False
        return bool(past["amax"] > self.min_headroom * FORMATS[cast.format].max * row["scale_inv_max"])

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a stale or foreign weight, to codes of another format, and to a spike in whose backward pass it clips."""
        foreign = {part.module for f in others if f.code in ("F112", "F121") for part in f.sites}
        misread = {(part.module, part.gemm, part.tensor) for f in others if f.name == READ_AS_ANOTHER for part in f.sites}
        spikes = {f.steps[0] for f in others if f.code == "F125"}
        return not all(
            (part.tensor == "weight" and part.module in foreign)
            or (part.module, part.gemm, part.tensor) in misread
            or (part.tensor == "grad_output" and part.steps[0] == part.steps[1] and part.steps[0] in spikes)
            for part in finding.sites
        )

    def _finding(self, trace: Trace, severity: Severity, threshold: float, why: str = "") -> Finding:
        row = trace.worst("overflow_rate")
        kind = trace.cast.scaling if trace.cast else "delayed"
        by = "by how much was not recorded"
        if row["headroom"] is not None:
            by = f"its amax is {times(row['headroom'])} times what the {kind} scale can hold"
        message = f"{percent(row['overflow_rate'])} of the {trace.gemm} {trace.tensor} clips at step {row['step']}: {by}{why}"
        return trace.finding(self, severity, message, value=row["overflow_rate"], threshold=threshold)


RULES.add(StaleScaleSaturation.code, StaleScaleSaturation())
