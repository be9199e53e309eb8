"""F205: shards, index and tensors disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity

#: Cures of single kinds of faults.
_CURES = {
    "missing_shard": "copy or download the shard that is missing; if the save never had it, write the index again",
    "no_index": "copy or download the index, or write it again from the files",
    "missing_tensor": "copy or download the shard again, or write the index again from the files",
}


@dataclass(frozen=True)
class ShardsDisagree(FileRule):
    """The shards and the index do not hold the same tensors once each.

    What it detects
        A shard that the index or the numbering asks for and that is missing; a tensor that the index places in a shard
        which lacks it; a tensor in two shards; shards of two sets in one folder; a shard of the set that the index does not
        name; a set without an index.

    Why it matters
        A stale shard of an earlier save has other weights under the same names, and the order of files decides what is
        loaded.

    Example
        model.layers.9.mlp.up_proj.weight lies in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors.

    Cure
        Delete the shards of the earlier save and write the index again; copy or download a shard that is missing.

    Thresholds
        None: names decide. Stale copies: prime-rl #2438.
    """

    code = "F205"
    name = "shards-disagree"
    cure = "delete the shards of the earlier save and write the index again"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the disagreements."""
        for fault in judged.checkpoint.faults:
            if fault.kind == "unreadable":
                continue
            severity = Severity.ERROR if fault.kind in ("missing_shard", "missing_tensor", "duplicate") else Severity.WARNING
            what = "tensor" if fault.tensor else "shard"
            cure = _CURES.get(fault.kind, self.cure)
            yield self.found(severity, f"the {what} {fault.reason}", tensor=fault.tensor, file=fault.file, cure=cure)


CHECKS.add(ShardsDisagree.code, ShardsDisagree())
