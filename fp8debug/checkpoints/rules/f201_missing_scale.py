"""F201: a quantized weight has no scale."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import may_have_scale
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class MissingScale(FileRule):
    """A quantized weight has no scale: whoever loads it reads codes as values.

    What it detects
        An FP8, MX or NVFP4 weight without a tensor that holds its scales under any name that a layout reads. Where the
        codes use the format's top binade the weight was divided by a scale that is lost: an error. Where all codes are
        small the weight was cast without a scale, as some diffusion models are: information, with the share that became
        zero. Where one shard alone was given and the index places the scale in another, nothing is reported.

    Why it matters
        Codes read as values are hundreds of times too large. Loaders of some stacks do that silently.

    Example
        model.layers.0.mlp.down_proj.weight: e4m3fn codes up to 448 and no weight_scale_inv, weight_scale or other scale.

    Cure
        Export the scales with the codes, or quantize the weight again from the original.

    Thresholds
        - min_amax_share 0.5: largest code over the format's maximum from which a scale must have been applied. A current
          scale, rounded to a power of two or not, puts the amax into the top binade (numerics.md, 2); weights cast as they
          are stay far below it.
    """

    code = "F201"
    name = "missing-scale"
    cure = "export the scales with the codes, or quantize the weight again from the original"

    min_amax_share: float = 0.5

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights without scales."""
        part = judged.checkpoint.is_part and not judged.checkpoint.elsewhere
        for weight, facts in judged.weights:
            if weight.scale is not None or may_have_scale(weight.name, judged.checkpoint.elsewhere):
                continue
            largest = FORMATS[weight.format].max
            reached = facts.amax_code / largest
            if facts.problem is None and facts.numel and not facts.amax_code:
                continue
            if facts.problem is None and reached < self.min_amax_share and FORMATS[weight.format].bits == 8:
                codes = f"codes up to {facts.amax_code:g} of {largest:g}, {facts.num_zero / max(1, facts.numel):.2%} of them zero"
                text = f"the weight was cast to {weight.format} without a scale: {codes}"
                yield self.of_weight(weight, Severity.INFO, text, value=reached, threshold=self.min_amax_share)
            elif part:
                text = "the weight has no scale in this shard; without an index, another shard may hold it"
                yield self.of_weight(weight, Severity.INFO, text)
            else:
                text = f"the weight has {weight.format} codes up to {facts.amax_code:g} and no scale that a loader finds"
                yield self.of_weight(weight, Severity.ERROR, text, value=reached, threshold=self.min_amax_share)


CHECKS.add(MissingScale.code, MissingScale())
