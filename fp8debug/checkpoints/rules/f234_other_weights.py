"""F234: a weight that is not the reference's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import Comparison, explains
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class OtherWeights(FileRule):
    """The weight is another one than the reference's: another step's, another layer's, or damaged.

    What it detects
        Quantized weights whose error neither a scale nor a second rounding explains, single codes that no rounding of the
        reference gives, and tensors in high precision that differ by more than rounding. The message tells what the cosine
        leaves: another step, some blocks, turned signs, or another tensor.

    Why it matters
        A stale copy of one module is the commonest reason why training and inference part.

    Example
        model.layers.17.mlp.down_proj.weight: cosine 0.98 with the reference, 14.1 dB: weights of another step.

    Cure
        Export both from the same step, and look at the row or expert order of fused weights.

    Thresholds
        - min_loss_db 0.2: SQNR below the cast of the reference, with differing codes. A reference in BF16 whose master
          weights were cast in FP32 costs 0.01 dB (Gaussian; 55.6 dB beside 31.5 dB, numerics.md, 4).
        - min_differing_rate 0.05: share of codes that differ from that cast. A BF16 copy of FP32 master weights moves 2 %
          (Gaussian, tensorwise).
        - Single elements count from the first that no rounding explains: it is further than one code from the reference, and not
          clipped.
        - min_plain_db 50: SQNR of tensors in high precision; BF16's own rounding gives 55.6 dB (numerics.md, 4). Seen in
          prime-rl #2438.
    """

    code = "F234"
    name = "other-weights"
    cure = "export both from the same step, and look at the row or expert order of fused weights"
    needs_reference = True
    only_unexplained = True

    min_loss_db: float = 0.2
    min_differing_rate: float = 0.05
    min_plain_db: float = 50.0

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that are not the reference's."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is None or against.sqnr_db is None or against.own_db is None or explains(against):
                continue
            lost = against.own_db - against.sqnr_db
            if lost >= self.min_loss_db and against.differing_rate >= self.min_differing_rate:
                where = f" in {against.num_bad_blocks} of {against.num_blocks} blocks" if against.num_bad_blocks else ""
                numbers = f"SQNR {db(against.sqnr_db)} where its cast gives {db(against.own_db)}{where}"
                text = f"{_kind(against)}: cosine {against.cosine or 0.0:.4g} with the reference, {numbers}"
                yield self.of_weight(weight, Severity.ERROR, text, value=against.sqnr_db, threshold=against.own_db, unit="dB")
            elif against.num_damaged:
                text = (
                    f"{against.num_damaged} of {facts.numel} elements are not the reference's, by more than one code, and the"
                    f" others are: damaged codes, or a few rows of another weight; SQNR {db(against.sqnr_db)}"
                )
                value = against.num_damaged / facts.numel
                yield self.of_weight(weight, Severity.ERROR, text, value=value, threshold=0.0)
        for tensor, plain in judged.plains:
            if plain.is_equal is False and plain.sqnr_db is not None and plain.sqnr_db < self.min_plain_db:
                text = f"the {tensor.dtype} tensor is not the reference's: SQNR {db(plain.sqnr_db)}, gain {plain.gain or 0.0:.4g}"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=plain.sqnr_db, threshold=self.min_plain_db, unit="dB")


def _kind(against: Comparison) -> str:
    cosine = against.cosine or 0.0
    if 0 < against.num_bad_blocks <= against.num_blocks / 2:
        return f"{against.num_bad_blocks} of {against.num_blocks} blocks are not the reference's"
    if cosine > 0.7:
        return "the weight is that of another step"
    return "the signs are turned" if cosine < -0.7 else "the weight is another tensor, or its rows are in another order"


CHECKS.add(OtherWeights.code, OtherWeights())
