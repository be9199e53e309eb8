"""F212: scales that are zero or negative."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import is_scale
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ZeroScale(FileRule):
    """A scale is zero above codes that are not, or negative.

    What it detects
        Scales of zero whose block has nonzero codes, and scales below zero. A block of zero codes may have any scale. E4M3
        scales of NVFP4 underflow for blocks that are tiny beside their tensor: there only a material share counts.

    Why it matters
        The block is read as zeros, or with its signs turned. A scale that was allocated with zeros and never loaded is one.

    Example
        model.layers.7.mlp.gate_proj.weight: 40 of 40 scales are zero above nonzero codes.

    Cure
        Quantize the weight again from the original, with an amax eps of 0 and a scale of 1 for empty blocks.

    Thresholds
        - max_underflow_rate 0.1: share of E4M3 scales that may be zero. No published basis: block amaxes of one weight lie
          within the 2^15 that E4M3 spans (numerics.md, 1).
    """

    code = "F212"
    name = "zero-scale"
    cure = "quantize the weight again from the original; an empty block takes scale 1"

    max_underflow_rate: float = 0.1

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights and activation scales with such scales."""
        for weight, facts in judged.weights:
            stored = FORMATS.get(weight.scale_format)
            limit = self.max_underflow_rate if stored is not None and not stored.scale_only else 0.0
            rate = facts.num_scale_zero / max(1, facts.num_scales)
            if facts.num_scale_negative:
                text = f"{facts.num_scale_negative} of {facts.num_scales} scales are negative"
                yield self.of_weight(
                    weight, Severity.ERROR, text, value=facts.num_scale_negative / facts.num_scales, threshold=0.0
                )
            elif facts.num_scale_zero and rate > limit:
                text = f"{facts.num_scale_zero} of {facts.num_scales} scales are zero above nonzero codes"
                yield self.of_weight(weight, Severity.ERROR, text, value=rate, threshold=limit)
            elif facts.tensor_scale is not None and facts.tensor_scale <= 0 and facts.amax_code:
                text = f"the scale of the tensor (second level) is {facts.tensor_scale:g}"
                yield self.of_weight(weight, Severity.ERROR, text, value=facts.tensor_scale, threshold=0.0)
        for tensor, plain in judged.plains:
            if plain.num_nonpositive and is_scale(tensor.name):
                text = f"{plain.num_nonpositive} of {plain.numel} scales of activations are zero or negative"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=plain.num_nonpositive / plain.numel, threshold=0.0)


CHECKS.add(ZeroScale.code, ZeroScale())
