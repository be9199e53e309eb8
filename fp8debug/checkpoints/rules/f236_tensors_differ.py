"""F236: tensors that only one of the two has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class TensorsDiffer(FileRule):
    """The checkpoint and the reference do not have the same tensors, or a tensor has another shape.

    What it detects
        Names of the reference that the checkpoint lacks, and shapes that differ. A head that is tied to the embedding and
        buffers that are computed anew may be left out. What only the checkpoint has is information: it was not compared.

    Why it matters
        A weight that is missing keeps its initial value.

    Example
        model.layers.31.mlp.down_proj.weight: the reference has it, the checkpoint does not.

    Cure
        Export the tensor, or give the reference of the same model.

    Thresholds
        None: names and shapes decide. Missing weights that loaders accept: trl #7085.
    """

    code = "F236"
    name = "tensors-differ"
    cure = "export the tensor, or give the reference of the same model"
    needs_reference = True

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the names that differ."""
        for name, reason in judged.unmatched:
            severity = Severity.INFO if reason.startswith("not compared") else Severity.ERROR
            yield self.found(severity, f"the tensor is {reason}" if severity is Severity.INFO else reason, tensor=name)


CHECKS.add(TensorsDiffer.code, TensorsDiffer())
