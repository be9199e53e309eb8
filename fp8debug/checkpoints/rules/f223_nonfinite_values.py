"""F223: NaN or Inf in a tensor of high precision."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import is_scale
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class NonfiniteValues(FileRule):
    """A tensor in 16 bits or more has NaN or Inf.

    What it detects
        NaN or Inf in a norm, an embedding, a bias or a weight that was left in high precision.

    Why it matters
        One of them reaches every output.

    Example
        model.norm.weight: 3 of 4096 values are NaN or Inf.

    Cure
        Take the tensor from an earlier checkpoint, and triage the run that wrote it.

    Thresholds
        None: one such value is a fault. A training that wrote it: numerics.md, 5.
    """

    code = "F223"
    name = "nonfinite-values"
    cure = "take the tensor from an earlier checkpoint, and triage the run that wrote it"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the tensors with such values."""
        for tensor, facts in judged.plains:
            if facts.num_nonfinite and not is_scale(tensor.name):
                text = f"{facts.num_nonfinite} of {facts.numel} values are NaN or Inf"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=facts.num_nonfinite / facts.numel, threshold=0.0)


CHECKS.add(NonfiniteValues.code, NonfiniteValues())
