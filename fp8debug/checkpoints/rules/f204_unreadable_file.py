"""F204: a file or tensor that cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.files import FileFault
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class UnreadableFile(FileRule):
    """A file, or a tensor in it, cannot be read.

    What it detects
        Truncated files, headers that are no safetensors header, an index or a configuration that is no JSON, entries whose
        type, shape or place cannot be, tensors that share bytes, and read errors. Everything else is judged.

    Why it matters
        Loaders fail, or skip the tensor and leave it at its initial value.

    Example
        model-00002-of-00004.safetensors: lies beyond the end of the file: it needs 4294967 bytes, the file has 1000000.

    Cure
        Copy or download the file again, and compare its size and checksum.

    Thresholds
        None: a file is readable or not. Sizes as in the safetensors format; loaders that went on: transformers #46763.
    """

    code = "F204"
    name = "unreadable-file"
    cure = "copy or download the file again, and compare its size and checksum"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return what could not be read."""
        for fault in judged.checkpoint.faults:
            if fault.kind == "unreadable":
                yield self.found(Severity.ERROR, _text(fault), tensor=fault.tensor, file=fault.file, **_cure(fault))
        for weight, facts in judged.weights:
            if facts.problem is not None:
                yield self.of_weight(weight, Severity.ERROR, f"the weight cannot be read: {facts.problem}")
        for tensor, plain in judged.plains:
            if plain.problem is not None:
                yield self.of_tensor(tensor, Severity.ERROR, f"the tensor cannot be read: {plain.problem}")


def _text(fault: FileFault) -> str:
    return f"the {'tensor' if fault.tensor else 'file'} {fault.reason}"


def _cure(fault: FileFault) -> dict[str, str]:
    """Return another cure where a copy of the same file would have the same fault."""
    if fault.reason.startswith("has the type"):
        return {"cure": "save the tensor in a type that safetensors defines, with a newer safetensors, or as bytes (U8)"}
    if "permission" in fault.reason.lower():
        return {"cure": "give this user the right to read the file"}
    return {"cure": "save its tensors with safetensors"} if "which is not read" in fault.reason else {}


CHECKS.add(UnreadableFile.code, UnreadableFile())
