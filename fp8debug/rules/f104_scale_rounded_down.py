"""F104: a scale_inv rounded down makes the largest values of a block clip, although its amax was known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.metrics import limits
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import SCALES_ARE_ROUNDED
from fp8debug.rules.reading.conditions import IS_POWER_OF_TWO, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.histories import HistoryLimits, operands_of_history
from fp8debug.rules.reading.traces import IS_DELAYED, percent, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Codes whose fault clips a few values besides: of an older or other tensor, whose amax the scale is made of.
_STRONGER = ("F107", "F112", "F113", "F117", "F118", "F119", "F121")


#: Casts under whose own scale no value lies beyond the format's max: an E4M3 scale (NVFP4) is rounded to nearest, and pow2_even
#: (torchao's EVEN) lets an amax clip that the format's mantissa rounds down.
_CLIPS_NOTHING = f"NOT {SCALES_ARE_ROUNDED} AND cast_name NOT LIKE '%pow2_even%'"
#: The cure where rounding down is not declared.
_OWN_SCALE = "check the cast's kernel, and that it makes the scales from this very tensor; else BF16 for this GEMM"


@dataclass(frozen=True)
class ScaleRoundedDown(Rule, HistoryLimits):
    """A power-of-two scale_inv is rounded down, so that the largest values of a block clip.

    What it detects
        Saturation under current scaling, where there can be none: the scale comes from this very tensor. The gain
        stays below 1 but near it, as only block maxima shrink. The name of the cast tells whether rounding down is its
        declared behaviour (pow2_floor, the text of OCP MX) or the kernel does not do what it declares.

    Why it matters
        The largest values of every fifth block lose up to 12.5 %, always downwards. arXiv 2506.08027 shows training on
        MXFP8 diverging with it and not with scales rounded up.

    Example
        blocks.0.mlp.up, fprop weight, e4m3fn 128x128 current pow2_floor: 0.21 % of the elements clip although the
        scale is this tensor's own, gain 0.9981.

    Cure
        scale_rounding='pow2_ceil' (or 'none' where the hardware takes FP32 scales); nothing has to leave FP8.

    Thresholds
        - max_rate 0.001: share of clipped elements that is an error; numerics.md, 4 (act above 0.1 %).
        - warn_elements 8: clipped elements of a cast that does not declare pow2_floor; one that does warns from the
          first. numerics.md, 4 warns above 0; a few are left to kernels that take the amax of a rounded copy.
        - min_gain 0.8: rounding down clips an element to 0.875 of itself at worst; below, the scale is off by more
          (F113).
        - max_gain 1.001: clipping makes a tensor smaller, so its gain is at most 1; the rest is rounding of the other elements.
        - min_gain_undeclared 0.97: the same where pow2_floor is not declared: block maxima alone clip, and the gain
          stays near 1 (0.998 measured); a scale that is off by a tenth is F113's. No published basis.
        - max_headroom 1.15: under delayed scaling with pow2_floor, how far an amax can lie above what the scale holds
          by its rounding alone, 2 / 1.75 = 1.143; beyond, the scale is stale (F101).
        - min_headroom_undeclared 1.07: where pow2_floor is not declared, how far the largest value must lie above what its
          scale holds. A scale made of values that were rounded to E4M3 before is at most 1/17 short, and harmless; an
          E4M3 scale (NVFP4) is so by its definition, and is left out.
        - max_history_headroom 0.98, min_history_move 0.002, min_history_share 0.5: by which a scale is of a history, under which
          values may clip; as in F113, which says where they come from.
        - Seen in ao #2035, mlx #4353, aiter #3212.
    """

    code = "F104"
    name = "scale-rounded-down"
    columns = ("num_saturated",)
    cure = "scale_rounding='pow2_ceil' for this operand, or 'none' where the hardware takes FP32 scales"
    changes: ClassVar[Mapping[str, Any]] = {"scale_rounding": "pow2_ceil"}

    max_rate: float = limits.MAX_CLIPPED
    warn_elements: int = limits.MIN_CLIPPED_ELEMENTS
    min_gain: float = 0.8
    max_gain: float = 1.001
    min_gain_undeclared: float = 0.97
    max_headroom: float = 1.15
    min_headroom_undeclared: float = limits.MIN_CLIPPED_HEADROOM

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("num_saturated", ">", 0),
            Keys(f"NOT {IS_DELAYED} OR cast_name LIKE '%pow2_floor%'"),
            f"NOT {IS_DELAYED} OR headroom <= {self.max_headroom}",
            f"coalesce(gain, 1) <= {self.max_gain}",
            f"cast_name LIKE '%pow2_floor%' AND coalesce(gain, 1) >= {self.min_gain}"
            f" OR {_CLIPS_NOTHING} AND num_saturated >= {self.warn_elements} AND coalesce(gain, 1) >= {self.min_gain_undeclared}"
            f" AND coalesce(headroom, 2) > {self.min_headroom_undeclared}",
        ]
        return look(conditions, ["overflow_rate", "gain", f"{IS_POWER_OF_TWO} AS is_pow2"])

    def looks(self) -> Iterable[Look]:
        """Return the rows that clip."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the sites that clip under current scaling."""
        found = traces(run, self._look)
        of_history = operands_of_history(run, self) if found else frozenset()
        for trace in found:
            row = trace.worst("overflow_rate")
            rate, gain = row["overflow_rate"], row["gain"]
            declared = trace.cast is not None and trace.cast.scale_rounding == "pow2_floor"
            if not declared and (trace.module, trace.gemm, trace.tensor, trace.cast_name) in of_history:
                continue
            older = "" if row["is_pow2"] else ", or takes that of an earlier step"
            cause = "pow2_floor rounds scale_inv down" if declared else f"the kernel makes its scale too small{older}"
            message = (
                f"{percent(rate)} of the {trace.gemm} {trace.tensor} clips at step {row['step']} under its own current"
                f" scale: {cause}" + (f" (gain {gain:.4f})" if gain is not None else "")
            )
            severity = Severity.ERROR if rate > self.max_rate else Severity.WARNING
            threshold = self.max_rate if severity is Severity.ERROR else 0.0
            finding = trace.finding(self, severity, message, value=rate, threshold=threshold)
            yield finding if declared else replace(finding, cure=_OWN_SCALE)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to what makes the scale another tensor's: a second cast, a stale or foreign weight, one code for all."""
        stronger = {(part.module, part.tensor) for f in others if f.code in _STRONGER for part in f.sites}
        return any((part.module, part.tensor) not in stronger for part in finding.sites)


RULES.add(ScaleRoundedDown.code, ScaleRoundedDown())
