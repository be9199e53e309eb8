"""F215: codes that mean NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fp8debug.checkpoints.comparison import fits, is_wrong
from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding
from fp8debug.rules.base import Severity


@dataclass(frozen=True)
class NanCodes(FileRule):
    """Some codes of a weight mean NaN or Inf.

    What it detects
        Elements whose code is NaN (E4M3: 0x7f, 0xff; fnuz: 0x80), NaN or Inf (E5M2). A cast that does not clamp makes them;
        so does memory that was never written.

    Why it matters
        One such weight makes every output of its row NaN.

    Example
        model.layers.5.mlp.up_proj.weight: 12 of 587000 codes are NaN.

    Cure
        Clamp to the format's maximum before the cast, and quantize the weight again.

    Thresholds
        None: one such code is a fault. Casts that give NaN past the maximum: numerics.md, 1.
    """

    code = "F215"
    name = "nan-codes"
    cure = "clamp to the format's maximum before the cast, and quantize the weight again"

    def check(self, judged: Judged) -> Iterable[TensorFinding]:
        """Return the weights with such codes."""
        for weight, facts in judged.weights:
            against = facts.comparison
            if facts.num_nan and not (against is not None and is_wrong(against) and fits(against) and _is_fnuz(against.factor)):
                rate = facts.num_nan / facts.numel
                all_of_it = ": the weight was never written" if rate == 1 else ""
                text = f"{facts.num_nan} of {facts.numel} codes are NaN or Inf{all_of_it}"
                yield self.of_weight(weight, Severity.ERROR, text, value=rate, threshold=0.0)


def _is_fnuz(factor: float | None) -> bool:
    """Return whether it is the factor that fnuz codes need which are read as fn: its largest values are NaN there (F231)."""
    return factor is not None and abs(factor - 0.5) < 0.005


CHECKS.add(NanCodes.code, NanCodes())
