"""F118: values of one magnitude lie where the scale cannot hold them, and round to one code together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Look, look
from fp8debug.rules.reading.traces import IS_DELAYED, percent, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class RoundsToOneCode(Rule):
    """Values that cluster near one magnitude are all clipped to the same code: the tensor shrinks as a whole.

    What it detects
        Under current scaling, a large share of the elements at the format's maximum, at a cosine that is better than rounding
        noise allows and a gain clearly below 1. It takes a scale rounded down (OCP MX's floor) and values of nearly one
        magnitude, such as the gains of a layer norm or weights multiplied by them, in the upper eighth of a binade. Where
        only block maxima clip it is F104. Clusters that round without clipping stay within rounding's own 5.9 % and are not
        reported: healthy weights one optimizer step after zero initialisation do the same.

    Why it matters
        Noise averages out, a common factor does not: every output of the layer is several percent too small in each forward
        pass, while cosine reads better than ever. arXiv 2506.20752 traces instabilities of MX training to it.

    Example
        blocks.1.norm_gain, fprop weight, e4m3fn 1x32 current pow2_floor: all elements clip, gain 0.921 at cosine 0.99994.

    Cure
        scale_rounding='none' or 'pow2_ceil', under which the cluster fits; BF16 for this GEMM.

    Thresholds
        - min_overflow_rate 0.2: share of clipped elements. No published basis: a scale rounded down clips 0.2 to 0.4 % of a
          bell-shaped tensor [measured], 100 % of a cluster.
        - min_cosine 0.9995: numerics.md, 4 (clean E4M3 has 0.99965); the planted cluster has 0.99999.
        - max_gain 0.98, min_gain 0.86: numerics.md, 4 (gain acts beyond 5 %, warns beyond 1 %); rounding down shrinks an
          element to 0.875 of itself at worst, numerics.md, 2.
        - max_headroom 1.15: under delayed scaling with pow2_floor, how far an amax can lie above what the scale holds by its
          rounding alone, 2 / 1.75 = 1.143; beyond, the scale is stale (F101).
        - min_elements 64: clipped elements. No published basis.
    """

    code = "F118"
    name = "rounds-to-one-code"
    columns = ("num_saturated", "sum_xy", "sum_x2", "sum_y2")
    cure = "scale_rounding='none' (or 'pow2_ceil') for this operand; else BF16 for this GEMM"
    changes: ClassVar[Mapping[str, Any]] = {"scale_rounding": "none"}

    min_overflow_rate: float = 0.2
    min_cosine: float = 0.9995
    max_gain: float = 0.98
    min_gain: float = 0.86
    max_headroom: float = 1.15
    min_elements: int = 64

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("overflow_rate", ">", self.min_overflow_rate),
            f"NOT {IS_DELAYED} OR cast_name LIKE '%pow2_floor%' AND headroom <= {self.max_headroom}",
            f"num_saturated >= {self.min_elements}",
            f"cosine >= {self.min_cosine} AND gain BETWEEN {self.min_gain} AND {self.max_gain}",
        ]
        return look(conditions, ["overflow_rate", "gain", "cosine", "1 - gain AS loss"])

    def looks(self) -> Iterable[Look]:
        """Return the operands that clip."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands that shrink as a whole."""
        for trace in traces(run, self._look):
            row = trace.worst("loss")
            message = (
                f"{percent(row['overflow_rate'])} of the {trace.gemm} {trace.tensor} clips to one code at step {row['step']}:"
                f" gain {row['gain']:.3f} at cosine {row['cosine']:.5f}"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["loss"], threshold=1 - self.max_gain)


RULES.add(RoundsToOneCode.code, RoundsToOneCode())
