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
        gives each block its amax. And block scales that pile up at the largest of their format. A scale smaller than the
        weight's amax, an old or calibrated one, does that.

    Why it matters
        The largest weights shrink, always towards zero.

    Example
        model.layers.6.mlp.down_proj.weight: 3.1 % of the codes are 448, 9 times as many as at 416.

    Cure
        Take the scale from the amax of this weight, and quantize it again.

    Thresholds
        - min_rate 0.005: share at the largest code, without one element for each block. No published basis; numerics.md, 4:
          under current scaling nothing clips.
        - min_scale_rate 0.02: share of the block scales that are the largest of their own format (448 in NVFP4). The tensor's
          scale puts one block there. No published basis. min_ratio holds here too: of blocks of 16 uniform elements 44 %
          have 448 and 39 % 416 (closed form).
        - min_count 32: such elements, or scales. No published basis.
        - min_ratio 4: times as many as at the next code. A uniform distribution, the flattest that initializations use, has
          0.5: the last code's interval is half as wide.
        - min_ratio_fp4 1.5, min_ratio_mxfp4 2: the same in FP4. Where fewer values are larger, 6 (from 5 on) has at most 0.67
          times the elements of 4 (3.5 to 5), 0.93 where rounding the scale to E4M3 lets values reach 6.4, and 2 where a power
          of two that is rounded down (OCP MX) lets them reach 8 (closed form: uniform data). Scales of the least error clip
          Gaussian blocks of 16 to 0.8 of their amax: 0.82 (measured). Half the right scale has 1.7 to 2.3 in NVFP4.
    """

    code = "F219"
    name = "clipped-codes"
    cure = "take the scale from the amax of this weight, and quantize it again"

    min_rate: float = 0.005
    min_ratio: float = 4.0
    min_ratio_fp4: float = 1.5
    min_ratio_mxfp4: float = 2.0
    min_count: int = 32
    min_scale_rate: float = 0.02

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such codes."""
        for weight, facts in judged.weights:
            beyond = facts.num_top - facts.num_at_top
            rate = beyond / max(1, facts.numel)
            if facts.num_distinct <= 8 or facts.problem is not None:
                continue
            ratio = self.min_ratio
            if FORMATS[weight.format].bits < 8:
                is_pow2 = facts.num_scale_pow2 == facts.num_scales
                ratio = self.min_ratio_mxfp4 if is_pow2 else self.min_ratio_fp4
            if rate >= self.min_rate and beyond >= max(self.min_count, ratio * facts.num_next):
                times = f"{beyond / max(1, facts.num_next):.3g} times as many as at the next"
                text = f"{rate:.2%} of the codes are the format's largest, {times}"
                yield self.of_weight(weight, Severity.WARNING, text, value=rate, threshold=self.min_rate)
                continue
            share = facts.num_scale_top / max(1, facts.num_scales)
            least = max(self.min_count, self.min_ratio * facts.num_scale_next)
            if share >= self.min_scale_rate and facts.num_scale_top >= least and facts.scale_min != facts.scale_max:
                text = (
                    f"{facts.num_scale_top} of {facts.num_scales} block scales are the largest of their format: the scale of the"
                    " tensor is too small, and the largest blocks clip"
                )
                cure = "take the tensor's scale from its amax (amax / (448 * 6) in NVFP4), and quantize it again"
                yield self.of_weight(weight, Severity.WARNING, text, value=share, threshold=self.min_scale_rate, cure=cure)


CHECKS.add(ClippedCodes.code, ClippedCodes())
