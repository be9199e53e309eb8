"""F219: codes that pile up at the largest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ClippedCodes(FileRule):
    """Many codes are the format's largest: values beyond the scale were clamped.

    What it detects
        A share of elements at the largest code that is far above that at the code below it, beyond the one element that
        gives each block its amax. A scale smaller than the weight's amax, an old or calibrated one, does that.

    Why it matters
        The largest weights shrink, always towards zero.

    Example
        model.layers.6.mlp.down_proj.weight: 3.1 % of the codes are 448, 9 times as many as at 416.

    Cure
        Take the scale from the amax of this weight, and quantize it again.

    Thresholds
        - min_rate 0.005: share at the largest code, without one element for each block. No published basis; numerics.md, 4:
          under current scaling nothing clips.
        - min_count 32: such elements. No published basis.
        - min_ratio 4: times as many as at the next code. A uniform distribution, the flattest that initializations use, has
          0.5: the last code's interval is half as wide.
    """

    code = "F219"
    name = "clipped-codes"
    cure = "take the scale from the amax of this weight, and quantize it again"

    min_rate: float = 0.005
    min_ratio: float = 4.0
    min_count: int = 32

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such codes."""
        for weight, facts in judged.weights:
            beyond = facts.num_top - facts.num_at_top
            rate = beyond / max(1, facts.numel)
            if FORMATS[weight.format].bits < 8 or facts.num_distinct <= 8 or facts.problem is not None:
                continue
            if rate >= self.min_rate and beyond >= max(self.min_count, self.min_ratio * facts.num_next):
                times = f"{beyond / max(1, facts.num_next):.3g} times as many as at the next"
                text = f"{rate:.2%} of the codes are the format's largest, {times}"
                yield self.of_weight(weight, Severity.WARNING, text, value=rate, threshold=self.min_rate)


CHECKS.add(ClippedCodes.code, ClippedCodes())
