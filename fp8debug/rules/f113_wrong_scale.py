"""F113: an operand has the right shape and the wrong size: its scale is off by a factor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.evidence import Trace, above, traces

if TYPE_CHECKING:
    from fp8debug.store.run import Run


@dataclass(frozen=True)
class WrongScale(Rule):
    """An operand is faithful but for a factor: its scale_inv does not belong to its data.

    What it detects
        A gain that rounding cannot explain at a cosine that rounding explains well. A smaller deviation counts when it
        lasts and the cosine shows ordinary rounding noise, so that values which all round to one code (constants,
        weights one optimizer step after zero initialisation) do not count.

    Why it matters
        Every output of the layer is off by that factor, and cosine, SQNR of the data and plots of the direction look
        clean. It happens when scales are reloaded, synchronised or packed apart from their data: twice (E4M3 fn and
        fnuz), 448/240, a missing margin.

    Example
        blocks.1.attn.qkv, fprop weight, e4m3fn 128x128 current: gain 2.000 at cosine 0.99966 from step 30 on.

    Cure
        Recompute or reload the scales with their data (same flags and eps as when they were saved); BF16 for this GEMM
        until then. No other cast cures it.

    Thresholds
        - max_gain_error 0.05: abs(gain - 1); numerics.md, 4 (act beyond 5 %). Raised to what rounding itself can do to
          equal values: 1/17 for E4M3, 1/9 for E5M2, with a guard of 10 %, and 1/8 for clipping under pow2_floor.
        - warn_gain_error 0.01: numerics.md, 4 (warn beyond 1 %; healthy is 0.2 %).
        - min_cosine 0.999: numerics.md, 4 (warn below 0.999); below, the error is more than a factor.
        - max_cosine 0.9999: for the warning: above, there is no rounding noise and the values are few. Clean E4M3 has
          0.99965, E5M2 0.9986.
        - max_overflow_rate 0.0001: for the warning: clipping lowers the gain too, and has its own rules.
        - min_elements 256, warn_elements 4096, warn_steps 3: elements, and sampled steps at which it lasts. No
          published basis.
        - Seen in TransformerEngine #123 and #982, sglang #25733.
    """

    code = "F113"
    name = "wrong-scale"
    columns = ("sum_xy", "sum_x2", "sum_y2")
    cure = "recompute or reload the scale with its data (same flags and amax eps as when saved); else BF16 here"

    max_gain_error: float = 0.05
    warn_gain_error: float = 0.01
    min_cosine: float = 0.999
    max_cosine: float = 0.9999
    max_overflow_rate: float = 1e-4
    min_elements: int = 256
    warn_elements: int = 4096
    warn_steps: int = 3

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose size is wrong."""
        bad = (
            f"abs(gain - 1) > {self.warn_gain_error} AND cosine >= {self.min_cosine} AND numel >= {self.min_elements}"
            " AND coalesce(underflow_nonzero_rate, 0) < 0.01"
        )
        columns = ["gain", "abs(gain - 1) AS gain_error", "cosine", "numel", "overflow_rate"]
        for trace in traces(run, bad, columns):
            limit = self._limit(trace)
            severe = trace.where(above("gain_error", limit))
            slight = trace.where(
                lambda row: (
                    row["cosine"] < self.max_cosine
                    and row["numel"] >= self.warn_elements
                    and (row["overflow_rate"] or 0.0) < self.max_overflow_rate
                )
            )
            if severe:
                yield self._finding(severe, Severity.ERROR, limit)
            elif slight and slight.lasting(self.warn_steps):
                yield self._finding(slight, Severity.WARNING, self.warn_gain_error)

    def _limit(self, trace: Trace) -> float:
        cast = trace.cast
        if cast is None:
            return self.max_gain_error
        rounding = 1 / (2.0 ** (FORMATS[cast.format].mantissa_bits + 1) + 1)
        return max(self.max_gain_error, 1.1 * rounding, 0.13 if cast.scale_rounding == "pow2_floor" else 0.0)

    def _finding(self, trace: Trace, severity: Severity, threshold: float) -> Finding:
        row = trace.worst("gain_error")
        message = (
            f"the {trace.gemm} {trace.tensor} is {row['gain']:.4g} times its reference at step {row['step']}, at cosine"
            f" {row['cosine']:.5f}: its scale_inv does not belong to its data"
        )
        return trace.finding(self, severity, message, value=row["gain_error"], threshold=threshold)


RULES.add(WrongScale.code, WrongScale())
