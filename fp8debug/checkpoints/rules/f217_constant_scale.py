"""F217: one scale for blocks that were cast with their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ConstantScale(FileRule):
    """All blocks have the same scale, and each block's codes were made with a scale of its own.

    What it detects
        A grid of equal scales above blocks of which nearly every one reaches the format's largest code: each was divided by
        its own amax, and amaxes of different blocks do not agree to the last bit. Scales that were allocated and not
        loaded, or one that was broadcast over the grid, look so.

    Why it matters
        Every block is off by the ratio of its amax to the one that was kept.

    Example
        model.layers.1.mlp.gate_proj.weight: all 40 scales are 0.000344, and 40 of 40 blocks reach 448.

    Cure
        Export the scales of all blocks.

    Thresholds
        - min_blocks 8: blocks. No published basis.
        - min_top_share 0.9: share of the blocks that reach the largest code. Under one scale for all, one block does; under
          scales rounded to powers of two 5 % do (computed: log2(448 / 432)). Block scales as in numerics.md, 2.
        - max_rms_share 0.5: root mean square of the codes over the largest. A uniform distribution has 0.58 (computed:
          1 / sqrt(3)), a Gaussian in blocks of 128x128 0.25 (computed: its amax is 4 standard deviations).
    """

    code = "F217"
    name = "constant-scale"
    cure = "export the scales of all blocks"
    only_unexplained = True

    min_blocks: int = 8
    min_top_share: float = 0.9
    max_rms_share: float = 0.5

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such scales."""
        for weight, facts in judged.weights:
            is_equal = facts.scale_min is not None and facts.scale_min == facts.scale_max
            share = facts.num_at_top / max(1, facts.num_blocks)
            if (
                FORMATS[weight.format].bits < 8
                or not is_equal
                or facts.rms_codes > self.max_rms_share * facts.amax_code
                or (facts.num_scale_pow2 == facts.num_scales and facts.scale_min != 1)
                or facts.num_blocks < self.min_blocks
                or facts.num_scales < self.min_blocks
            ):
                continue
            if share >= self.min_top_share and facts.num_distinct > 3:
                largest = f"{facts.num_at_top} of {facts.num_blocks} blocks reach the largest code, each under a scale of its own"
                text = f"all {facts.num_scales} scales are {facts.scale_min:.3g}, and {largest}"
                yield self.of_weight(weight, Severity.ERROR, text, value=share, threshold=self.min_top_share)


CHECKS.add(ConstantScale.code, ConstantScale())
