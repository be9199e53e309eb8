"""F213: UE8M0 scales that are no powers of two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class NotAPowerOfTwo(FileRule):
    """Scales that should be powers of two are not.

    What it detects
        FP32 scales that are no powers of two although the configuration says ``scale_fmt: ue8m0``, or although all but a
        few scales of the same weight, or all of nearly every other weight, are.

    Why it matters
        A kernel for UE8M0 reads the exponent alone: it takes another scale than the file has, up to a factor of 2.

    Example
        model.layers.2.mlp.up_proj.weight: 40 of 40 scales are no powers of two, and config.json declares scale_fmt ue8m0.

    Cure
        Quantize with scales rounded up to a power of two before the cast, or remove scale_fmt from config.json.

    Thresholds
        - most 0.9: share of the scales of a weight, or of the weights of a checkpoint, from which the others should follow.
          No published basis: of FP32 scales one in 2^23 is a power of two by chance. Seen in transformers #46763.
        - min_count 8: scales or weights below which a share says nothing. No published basis.
    """

    code = "F213"
    only_unexplained = True
    name = "not-a-power-of-two"
    cure = "round the scales up to powers of two before the cast, or remove scale_fmt from config.json"

    most: float = 0.9
    min_count: int = 8

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such scales."""
        fp32 = [(weight, facts) for weight, facts in judged.weights if facts.num_scales and weight.scale_format == "float"]
        blocks = [(weight, facts) for weight, facts in fp32 if weight.granularity not in ("tensorwise", "rowwise")]
        whole = sum(facts.num_scale_pow2 == facts.num_scales for _, facts in blocks)
        are_usual = len(blocks) >= self.min_count and whole >= self.most * len(blocks)
        for weight, facts in fp32:
            others = (
                facts.num_scales - facts.num_scale_pow2 - facts.num_scale_nan - facts.num_scale_inf - facts.num_scale_negative
            )
            others -= facts.num_scale_zero
            if others <= 0:
                continue
            is_block = weight.granularity not in ("tensorwise", "rowwise")
            if weight.wants_pow2:
                why = "the configuration declares ue8m0"
            elif facts.num_scales >= self.min_count and facts.num_scale_pow2 >= self.most * facts.num_scales:
                why = "the others are"
            elif are_usual and is_block:
                why = f"those of {whole} of {len(blocks)} weights are"
            else:
                continue
            text = f"{others} of {facts.num_scales} scales are no powers of two, and {why}"
            yield self.of_weight(weight, Severity.ERROR, text, value=others / facts.num_scales, threshold=0.0)


CHECKS.add(NotAPowerOfTwo.code, NotAPowerOfTwo())
