"""F233: a weight that was rounded twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import is_in_order, is_rounded_twice
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding, db
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class DoubleRounding(FileRule):
    """The weight was rounded to another low-precision grid before this cast.

    What it detects
        An error above that of one cast under the stored scales, of elements that all lie within one code of the reference:
        a cast of a cast, from other blocks, other scales or another format; or one cast that rounds at random. A second
        rounding leaves 16 neighbours of a row in the order of their reference, and rounding at random costs 3 dB and leaves
        each within one code; a weight of another step does neither (F234).

    Why it matters
        It costs 3 dB or more, everywhere, and no scale is wrong.

    Example
        model.layers.0.mlp.up_proj.weight: 28.4 dB where the cast of the reference gives 31.5 dB; 99.9 % within one code.

    Cure
        Quantize from the original and not from the dequantized weights of another checkpoint.

    Thresholds
        - min_loss_db 1: below the cast under the stored scales. numerics.md, 4: one cast has 31.5 dB, two have 28.5 dB.
        - max_loss_db 8: more has another cause; E4M3 of an E5M2 cast loses 6 dB (Gaussian).
        - max_far_rate 0.05: share of elements further than one code from the reference. No published basis. Seen in vllm
          #38083.
    """

    code = "F233"
    name = "double-rounding"
    cure = "quantize from the original and not from the dequantized weights of another checkpoint"
    needs_reference = True

    min_loss_db: float = 1.0
    max_loss_db: float = 8.0
    max_far_rate: float = 0.05

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that were rounded twice."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if against is None or not is_rounded_twice(against, self.min_loss_db, self.max_loss_db, self.max_far_rate):
                continue
            numbers = f"{db(against.sqnr_db)} where the cast of the reference gives {db(against.own_db)}"
            how = "twice" if is_in_order(against) else "at random, or twice in other blocks"
            text = f"the weight was rounded {how}: {numbers}, {1 - against.far_rate:.1%} of the elements within one code of it"
            yield self.of_weight(weight, Severity.WARNING, text, value=against.sqnr_db, threshold=against.own_db, unit="dB")


CHECKS.add(DoubleRounding.code, DoubleRounding())
