"""F221: two weights with the same codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class SameCodes(FileRule):
    """Two weights have the same codes, element for element.

    What it detects
        Quantized weights under different names whose codes are equal. All-zero weights and small ones are left out.

    Why it matters
        Trained weights do not repeat: a layer or an expert was written over another one's name.

    Example
        model.layers.4.mlp.up_proj.weight: the codes are those of model.layers.3.mlp.up_proj.weight.

    Cure
        Export the weight again from its own layer; tied weights are written once.

    Thresholds
        - min_numel 1024: elements. No published basis. Seen in abliterix #93.
    """

    code = "F221"
    name = "same-codes"
    cure = "export the weight again from its own layer; tied weights are written once"

    min_numel: int = 1024

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights that repeat another one."""
        first: dict[tuple[str, int], str] = {}
        for weight, facts in judged.weights:
            if facts.numel < self.min_numel or facts.num_distinct <= 1 or facts.problem is not None:
                continue
            other = first.setdefault((facts.digest, facts.numel), weight.name)
            if other != weight.name:
                yield self.of_weight(weight, Severity.WARNING, f"the codes are those of {other}, element for element")


CHECKS.add(SameCodes.code, SameCodes())
