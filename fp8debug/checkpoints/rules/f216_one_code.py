"""F216: a weight with a single code."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class OneCode(FileRule):
    """All elements of a weight have the same code.

    What it detects
        A weight of some size whose elements all are zero, or all have one other code: memory that was allocated and never
        loaded, or a weight far below its scale.

    Why it matters
        The layer does nothing, and the model runs.

    Example
        model.layers.11.self_attn.o_proj.weight: all 589824 elements are zero.

    Cure
        Load the weight again from the original, and look at the scale that it was cast with.

    Thresholds
        - min_numel 64: elements; a smaller tensor may be constant. No published basis.
        - Seen in vllm #45835.
    """

    code = "F216"
    name = "one-code"
    cure = "load the weight again from the original, and look at the scale that it was cast with"

    min_numel: int = 64

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with a single code."""
        for weight, facts in judged.weights:
            if (
                facts.numel >= self.min_numel
                and facts.num_distinct <= 1
                and facts.num_nan < facts.numel
                and facts.problem is None
            ):
                what = "zero" if not facts.amax_code else f"of magnitude {facts.amax_code:g} with one sign"
                severity = Severity.ERROR if facts.amax_code else Severity.WARNING
                yield self.of_weight(weight, severity, f"all {facts.numel} elements are {what}", value=1.0, threshold=1.0)


CHECKS.add(OneCode.code, OneCode())
