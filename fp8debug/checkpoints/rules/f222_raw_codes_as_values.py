"""F222: codes stored as values in 16 bits or more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.names import scaled_by
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class RawCodesAsValues(FileRule):
    """A weight in high precision holds FP8 codes whose scales were never applied.

    What it detects
        A tensor in BF16, FP16 or FP32 whose every value is one of E4M3's and whose largest is a format's largest (448, or
        240 of fnuz).

    Why it matters
        A converter that casts codes to BF16 and drops the scales gives a file that loads without a warning.

    Example
        model.layers.0.mlp.up_proj.weight: BF16, every value on E4M3's grid, amax 448.

    Cure
        Multiply by the scales while converting.

    Thresholds
        - min_numel 256: elements. No published basis.
        - min_rms 4: rms below which a tensor that happens to hold 448 is no weight of codes. No published basis: codes of a
          Gaussian have about 100. Seen in unsloth #6978 and vllm #45835.
    """

    code = "F222"
    name = "raw-codes-as-values"
    cure = "multiply by the scales while converting"

    min_numel: int = 256
    min_rms: float = 4.0

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the tensors that hold codes."""
        for tensor, facts in judged.plains:
            if (
                scaled_by(tensor.name) is None
                and facts.is_on_grid
                and facts.numel >= self.min_numel
                and facts.rms >= self.min_rms
            ):
                values = f"every value is one of E4M3's and the largest is {facts.amax:g}"
                text = f"the {tensor.dtype} tensor holds codes whose scales were not applied: {values}"
                yield self.of_tensor(tensor, Severity.ERROR, text, value=facts.rms, threshold=self.min_rms)


CHECKS.add(RawCodesAsValues.code, RawCodesAsValues())
