"""F218: scales rounded after the cast that they belong to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import Comparison, fits, is_wrong
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class ScaleRoundedAfterCast(FileRule):
    """The scales were rounded to powers of two after the codes were made with the exact ones.

    What it detects
        Without a reference: power-of-two scales above blocks of which nearly every one reaches the format's largest code,
        which happens under FP32 scales alone. With one: the codes fit it under scales that differ from the stored ones by a
        factor between 1/2 and 2 for each block, and the stored ones are powers of two.

    Why it matters
        Each block is off by up to a factor of 2. Cosine by block does not see it; perplexity does.

    Example
        model.layers.0.mlp.down_proj.weight: 40 of 40 scales are powers of two, and 40 of 40 blocks reach 448; against the
        reference gain 1.41, SQNR 9.8 dB where the format can give 31.7 dB.

    Cure
        Round the scale first and cast with the rounded one, or store the scales as FP32.

    Thresholds
        - min_blocks 4: blocks. No published basis.
        - min_top_share 0.9: share of the blocks that reach the largest code; under scales rounded before the cast 5 % do
          (computed: log2(448 / 432)), when rounded down 25 %.
        - max_rms_share 0.5: root mean square of the codes over the largest; a uniform distribution, whose blocks may have one
          amax, has 0.58 (computed: 1 / sqrt(3)).
        - max_loss_db 1.5: how far the refitted weight may be below the ideal cast. No published basis. Seen in transformers
          #46763, sglang #28418.
    """

    code = "F218"
    name = "scale-rounded-after-cast"
    cure = "round the scale first and cast with the rounded one, or store the scales as FP32"

    min_blocks: int = 4
    min_top_share: float = 0.9
    max_rms_share: float = 0.5
    max_loss_db: float = 1.5

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such scales."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is not None and is_wrong(against):
                if against.pattern == "rounded" and fits(against, self.max_loss_db):
                    yield self.of_weight(
                        weight, Severity.ERROR, _against(against), value=against.sqnr_db, threshold=against.ideal_db, unit="dB"
                    )
                continue
            share = facts.num_at_top / max(1, facts.num_blocks)
            if FORMATS[weight.format].bits < 8 or facts.num_blocks < self.min_blocks or facts.num_scales < self.min_blocks:
                continue
            are_pow2 = facts.num_scale_pow2 == facts.num_scales
            if (
                against is None
                and are_pow2
                and share >= self.min_top_share
                and (facts.scale_min != facts.scale_max or facts.scale_min != 1)
                and facts.rms_codes <= self.max_rms_share * facts.amax_code
                and facts.num_distinct > 3
            ):
                reached = f"{facts.num_at_top} of {facts.num_blocks} blocks reach the largest code, as under FP32 scales alone"
                yield self.of_weight(
                    weight,
                    Severity.ERROR,
                    f"all {facts.num_scales} scales are powers of two, and {reached}",
                    value=share,
                    threshold=self.min_top_share,
                )


def _against(against: Comparison) -> str:
    return (
        f"the codes fit the reference under scales within a factor of 2 of the stored powers of two: SQNR {db(against.sqnr_db)}"
        f" (gain {against.gain:.3g}), {db(against.refit_db)} with the right ones"
    )


CHECKS.add(ScaleRoundedAfterCast.code, ScaleRoundedAfterCast())
