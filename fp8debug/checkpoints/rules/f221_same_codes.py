"""F221: two weights with the same codes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fp8debug.checkpoints.comparison import Comparison
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, JudgedWeight, TensorFinding, db
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class SameCodes(FileRule):
    """Two weights have the same codes, element for element.

    What it detects
        Quantized weights under different names whose codes are equal. All-zero weights and small ones are left out. With a
        reference the copy is named alone, and weights that are equal in the reference too are none; without one either may be
        the copy.

    Why it matters
        Trained weights do not repeat: a layer or an expert was written over another one's name.

    Example
        model.layers.4.mlp.up_proj.weight: the codes are those of model.layers.3.mlp.up_proj.weight.

    Cure
        Export the weight again from its own layer; tied weights are written once.

    Thresholds
        - min_loss_db 6: SQNR below the cast of the reference by which a copy is told from the weight that was copied. No
          published basis: another layer's has -3 dB (computed: independent Gaussian data).
        - min_numel 1024: elements. No published basis. Seen in abliterix #93.
    """

    code = "F221"
    name = "same-codes"
    cure = "export the weight again from its own layer; tied weights are written once"

    min_numel: int = 1024
    min_loss_db: float = 6.0

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that repeat another one."""
        equals: dict[tuple[str, int], list[JudgedWeight]] = {}
        for weight, facts in judged.weights:
            if facts.numel >= self.min_numel and facts.num_distinct > 1 and facts.problem is None:
                equals.setdefault((facts.digest, facts.numel), []).append(JudgedWeight(weight, facts))
        for same in equals.values():
            if len(same) > 1:
                yield from self._named(same)

    def _named(self, same: Sequence[JudgedWeight]) -> Iterable[TensorFinding]:
        """Return the copies, where a reference tells them from the weight that was copied; else all but the first."""
        wrong = [one for one in same if (against := one.facts.comparison) is not None and _is_another(against, self.min_loss_db)]
        right = [one for one in same if one.facts.comparison is not None and one not in wrong]
        if not wrong and len(right) == len(same):
            return  # the reference has equal weights too
        for weight, facts in wrong if right and wrong else same[1:]:
            if right and wrong:
                against = facts.comparison
                assert against is not None
                text = (
                    f"the weight is a copy of {right[0].weight.name}, which fits the reference: SQNR {db(against.sqnr_db)}"
                    f" where its own cast gives {db(against.own_db)}"
                )
                yield self.of_weight(weight, Severity.ERROR, text, value=against.sqnr_db, threshold=against.own_db, unit="dB")
                continue
            text = f"its codes are those of {same[0].weight.name}, element for element: either may be the copy"
            yield replace(self.of_weight(weight, Severity.WARNING, text), also=(same[0].weight.name,))


def _is_another(against: Comparison, min_loss_db: float) -> bool:
    """Return whether a weight lies farther from its reference than its cast."""
    if against.sqnr_db is None or against.own_db is None:
        return False
    return against.own_db - against.sqnr_db >= min_loss_db


CHECKS.add(SameCodes.code, SameCodes())
