"""F137: weights that lie on an FP8 grid already are cast under other scales, so that each value is rounded twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Look
from fp8debug.rules.reading.rounded_twice import ExactCastLimits, held_exactly, rounded_again
from fp8debug.rules.reading.traces import Trace

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class RoundedTwice(Rule, ExactCastLimits):
    """A weight lies on an FP8 grid already, and the running cast rounds it again under other scales.

    What it detects
        A weight that a what-if cast holds without any error, while the running one leaves the noise of FP8. The weight was
        made by the first cast: it comes from an FP8 checkpoint. Constant weights and those of few magnitudes, which
        several casts hold exactly, are left out. It needs the checkpoint's own cast among what_if.

    Why it matters
        Each layer's weights carry two rounding errors. FP32 scales that are replaced by powers of two added 2.6 % error in
        every layer and cost 12 points of accuracy in vllm #38083.

    Example
        blocks.0.up, fprop weight: 32.0 dB under e4m3fn 128x128 current pow2_ceil, no error under e4m3fn 128x128 current.

    Cure
        Keep the checkpoint's own codes and scales, or cast with its recipe; else train from the high-precision weights.

    Thresholds
        - min_exact_db 100: SQNR of the what-if cast; FP32 arithmetic leaves 120 dB and more, BF16 55.6 dB; numerics.md, 4.
        - max_sqnr_db 45: SQNR of the running cast; between FP8's 31.5 dB and BF16's 55.6 dB; numerics.md, 4.
        - min_binades 8: occupied bins of the exponent histogram of the weight. No published basis: a trained weight fills
          twenty.
        - min_elements 1024: elements; a small tensor may be exact by chance.
        - Seen in vllm #38083, #37804 and #58157.
    """

    code = "F137"
    name = "rounded-twice"
    columns = ("sum_err2", "sum_x2")
    cure = "keep the checkpoint's own codes and scales, or use the cast that holds the weight exactly"

    def looks(self) -> Iterable[Look]:
        """Return the weights that a what-if cast holds exactly."""
        yield held_exactly(self)

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the weights that the running cast rounds once more."""
        for trace, exact in rounded_again(run, self):
            yield self._finding(trace, exact)

    def _finding(self, trace: Trace, exact: str) -> Finding:
        row = trace.rows[0]
        message = (
            f"the weight lies on the grid of {exact} already, which holds it without error, and {trace.cast_name} rounds it"
            f" again ({row['sqnr_db']:.1f} dB at step {row['step']})"
        )
        return trace.finding(self, Severity.WARNING, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB")


RULES.add(RoundedTwice.code, RoundedTwice())
