"""F235: scales that waste the format."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import explains
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class PoorScales(FileRule):
    """The codes are right for the stored scales, and the scales are far from those that the reference asks for.

    What it detects
        A cast under the stored scales that is much worse than one under scales made for the reference, in the same blocks:
        scales too large, so that values underflow, or too small, so that they clip.

    Why it matters
        The weight is worse than its format and its blocks need be.

    Example
        model.layers.8.mlp.down_proj.weight: 17.2 dB under the stored scales, 31.6 dB under scales of its own amax.

    Cure
        Take the scales from the amax of the weight's own blocks, without an eps above it.

    Thresholds
        - max_loss_db 6: between the two casts. No published basis: rounding scales to powers of two costs less than 1 dB,
          rounding them down as OCP MX does less than 4 dB (computed for Gaussian data in blocks of 32); numerics.md, 2.
        - max_free_loss_db 3: the same where scales are no powers of two and need lose nothing. No published basis.
        - max_clipped_rate 0.1: share of the blocks whose scale is smaller than one rounded down to a power of two, where the
          cast loses min_clip_loss_db 1 with it. No published basis: none is in OCP MX. Seen in vllm #43557.
        - max_differing_rate 0.9: share of the codes that are not those of the cast under the stored scales; beyond, they are
          other codes (F234).
    """

    code = "F235"
    name = "poor-scales"
    cure = "take the scales from the amax of the weight's own blocks, without an eps above it"
    needs_reference = True
    only_unexplained = True

    max_loss_db: float = 6.0
    max_free_loss_db: float = 3.0
    max_clipped_rate: float = 0.1
    min_clip_loss_db: float = 1.0
    max_differing_rate: float = 0.9

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such scales."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if (
                against is None
                or against.own_db is None
                or against.ideal_db is None
                or against.sqnr_db is None
                or explains(against)
                or against.differing_rate > self.max_differing_rate
            ):
                continue
            lost = against.ideal_db - against.own_db
            clips = against.clipped_rate > self.max_clipped_rate and lost > self.min_clip_loss_db
            limit = self.max_loss_db if against.is_pow2 else self.max_free_loss_db
            if (lost > limit or clips) and against.sqnr_db >= against.own_db - 1:
                text = (
                    f"{db(against.own_db)} under the stored scales, {db(against.ideal_db)} under scales of its own blocks' amax"
                )
                if clips:
                    text += f"; in {against.clipped_rate:.0%} of the blocks the scale is too small for the largest values"
                limit = self.min_clip_loss_db if clips else limit
                yield self.of_weight(weight, Severity.WARNING, text, value=lost, threshold=limit, unit="dB")


CHECKS.add(PoorScales.code, PoorScales())
