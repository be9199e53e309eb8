"""F211: scales that are NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import is_scale
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class NonfiniteScale(FileRule):
    """A scale is NaN or infinite.

    What it detects
        Block, tensor or activation scales that are NaN or Inf; the byte 255 of E8M0.

    Why it matters
        Everything under the scale becomes NaN or Inf. A scale that was allocated and never loaded often is.

    Example
        model.layers.4.self_attn.q_proj.weight: 40 of 40 scales are NaN.

    Cure
        Quantize the weight again from the original; the codes alone do not tell the scale.

    Thresholds
        None: one such scale is a fault. Seen in unsloth #6978 and vllm #45835.
    """

    code = "F211"
    name = "nonfinite-scale"
    cure = "quantize the weight again from the original; the codes alone do not tell the scale"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights and activation scales with such scales."""
        for weight, facts in judged.weights:
            number = facts.num_scale_nan + facts.num_scale_inf
            second = facts.tensor_scale
            if number:
                kind = "NaN" if facts.num_scale_nan else "infinite"
                text = f"{number} of {facts.num_scales} scales are {kind}"
                yield self.of_weight(weight, Severity.ERROR, text, value=number / facts.num_scales, threshold=0.0)
            elif second is not None and not math.isfinite(second):
                yield self.of_weight(
                    weight, Severity.ERROR, "the scale of the tensor (second level) is NaN, infinite or a divisor of zero"
                )
        for tensor, plain in judged.plains:
            if plain.num_nonfinite and is_scale(tensor.name):
                text = f"{plain.num_nonfinite} of {plain.numel} scales are NaN or infinite"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=plain.num_nonfinite / plain.numel, threshold=0.0)


CHECKS.add(NonfiniteScale.code, NonfiniteScale())
