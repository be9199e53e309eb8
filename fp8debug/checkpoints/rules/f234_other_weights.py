"""F234: a weight that is not the reference's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import Comparison, explains, is_in_order, keeps_order
from fp8debug.checkpoints.layouts import Weight
from fp8debug.checkpoints.names import parts_of
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.checkpoints.scan import WeightFacts
from fp8debug.formats import FORMATS
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class OtherWeights(FileRule):
    """The weight is another one than the reference's: another step's, another layer's, or damaged.

    What it detects
        Quantized weights whose error neither a scale nor a second rounding explains, single codes that no rounding of the
        reference gives, and tensors in high precision that differ by more than rounding. The message tells what cosine and
        order leave: another step (an adapter that was merged looks the same), some blocks, turned signs, another tensor, the two
        codes of a byte exchanged, codes of another format, or parts of a joined weight that were cast under other scales than the
        one that is stored.

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
          (Gaussian, tensorwise). In FP4, where single elements are off by more, from a quarter of it: there the same change
          moves a quarter of the codes.
        - Single elements count from the first that no rounding explains: it is further than one code from the reference, and not
          clipped.
        - max_rounding_db 8: what a weight in the order of its reference may lose by a second rounding; F233.
        - min_foreign_rate 0.9: share of such codes from which on they are others whatever the SQNR: under scales that clip
          nearly all, another format's are no worse than the right ones. No published basis.
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
    max_rounding_db: float = 8.0
    min_foreign_rate: float = 0.9

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that are not the reference's."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is None or against.sqnr_db is None or against.own_db is None or explains(against):
                continue
            lost = against.own_db - against.sqnr_db
            are_other_codes = against.differing_rate >= self.min_foreign_rate
            if (lost >= self.min_loss_db or are_other_codes) and against.differing_rate >= self.min_differing_rate:
                if is_in_order(against) and lost < self.max_rounding_db and not are_other_codes:
                    continue  # F233, where it is more than its limit
                where = f" in {against.num_bad_blocks} of {against.num_blocks} blocks" if against.num_bad_blocks else ""
                numbers = f"SQNR {db(against.sqnr_db)} where its cast gives {db(against.own_db)}{where}"
                text = f"{self._kind(against, weight)}: cosine {against.cosine or 0.0:.4g} with the reference, {numbers}"
                yield self.of_weight(weight, Severity.ERROR, text, value=against.sqnr_db, threshold=against.own_db, unit="dB")
            elif against.num_damaged:
                value = against.num_damaged / facts.numel
                text = f"{self._damage(against, weight, facts)}; SQNR {db(against.sqnr_db)}"
                yield self.of_weight(weight, Severity.ERROR, text, value=value, threshold=0.0)
        for tensor, plain in judged.plains:
            if plain.is_equal is False and plain.sqnr_db is not None and plain.sqnr_db < self.min_plain_db:
                text = f"the {tensor.dtype} tensor is not the reference's: SQNR {db(plain.sqnr_db)}, gain {plain.gain or 0.0:.4g}"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=plain.sqnr_db, threshold=self.min_plain_db, unit="dB")

    def _damage(self, against: Comparison, weight: Weight, facts: WeightFacts) -> str:
        """Return where the elements lie that no rounding explains, in a weight that loses little by them."""
        number = against.num_damaged
        if against.num_bad_blocks and self._is_rest_sound(against):
            blocks = f"{against.num_bad_blocks} of {against.num_blocks} blocks are not the reference's"
            return f"{blocks}: {number} elements are off by more than one code"
        if against.differing_rate > self.min_differing_rate * _coarseness(weight.format):
            rate = f"{against.differing_rate:.1%} of its codes are not those of the reference's cast"
            return f"the weight is that of another step: {rate}, {number} by more than one"
        return (
            f"{number} of {facts.numel} elements are not the reference's, by more than one code, and the others are: damaged"
            " codes, or a few rows of another weight"
        )

    def _is_rest_sound(self, against: Comparison) -> bool:
        is_part = 0 < against.num_bad_blocks < against.num_blocks
        return is_part and against.rest_loss_db is not None and against.rest_loss_db < self.min_loss_db

    def _kind(self, against: Comparison, weight: Weight) -> str:
        """Return whether the weight is another one or some of its blocks are: the rest is the reference's cast."""
        cosine = against.cosine or 0.0
        if self._is_rest_sound(against):
            return f"{against.num_bad_blocks} of {against.num_blocks} blocks are not the reference's"
        if against.swapped_cosine > max(0.7, cosine):
            return "the two codes of each byte are exchanged: the high one comes first, or was read first"
        if keeps_order(against) and cosine > 0.7 and against.num_blocks == weight.batch and any(parts_of(weight.name)):
            return (
                "the values are in the reference's order and no one scale fits: parts that were cast under scales of their own"
                " and joined under one, or codes of another format"
            )
        if is_in_order(against) and cosine > 0.7:
            return "the values are in the reference's order and no scale fits: codes of another format (E5M2 as E4M3), or changed"
        if cosine > 0.7:
            return "the weight is that of another step"
        return (
            "the signs are turned"
            if cosine < -0.7
            else "the weight is another tensor, or its rows or columns are in another order"
        )


def _coarseness(fmt: str) -> float:
    """Return how many codes a small change moves, beside E4M3: a code of fewer bits is as much wider."""
    return float(2.0 ** (FORMATS[fmt].mantissa_bits - FORMATS["e4m3fn"].mantissa_bits))


CHECKS.add(OtherWeights.code, OtherWeights())
