"""F202: a scale that nothing reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import scaled_by
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class UnreadScale(FileRule):
    """A scale in the file belongs to no weight, or to one that is read another way.

    What it detects
        Scales whose weight is missing, whose weight is stored in 16 bits or more, or beside another scale of the same
        weight.

    Why it matters
        A scale without its weight is the rest of a renamed, dropped or dequantized one; a loader that meets two scales
        takes either.

    Example
        model.layers.3.mlp.up_proj.weight_scale_inv: the weight is BF16; its scales are those of an FP8 weight.

    Cure
        Delete the scale, or restore the weight that it belongs to.

    Thresholds
        None: names and types decide. Seen in vllm #38083.
    """

    code = "F202"
    name = "unread-scale"
    cure = "delete the scale, or restore the weight that it belongs to"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the scales that no reader reads."""
        missing = {name for name, reason in judged.unmatched if not reason.startswith("not compared")}
        for tensor, reason in judged.unread:
            if scaled_by(tensor.name) in missing:
                continue  # the weight is what is missing (F236)
            yield self.of_tensor(tensor, Severity.WARNING, f"the scale is not read: {reason}")


CHECKS.add(UnreadScale.code, UnreadScale())
