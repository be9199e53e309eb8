"""F106: gradients of unequal tokens share a 128x128 block, and those of the quiet tokens underflow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.metrics import limits
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import Trace, percent, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_GRADIENT = "gemm = 'dgrad' AND tensor = 'grad_output' AND cast_name LIKE '% 128x128 current%'"


@dataclass(frozen=True)
class UnequalTokens(Rule):
    """Tokens whose gradients differ by many binades share the scale of a 128x128 block: the quiet ones underflow.

    What it detects
        A grad_output of dgrad in 128x128 blocks, under scales that fit their own amax, of which a material share becomes
        zero. Where the run also has a what-if of one row per scale (1x128, 1x32, rowwise) and the same share is lost there, it
        is not the blocks' doing and not reported. Tensorwise scales are not judged here: F102 and F105 know them.

    Why it matters
        dgrad chains through the depth: what underflows in one layer is missing in all layers before it. DeepSeek-V3,
        appendix B.2, saw a 16B model diverge after 300 B tokens with 128x128 blocks for these gradients, and not with 1x128.
        SQNR does not show it, because the loud tokens hold the energy.

    Example
        blocks.3.mlp.up, dgrad grad_output, e4m3fn 128x128 current: 50 % of the nonzero elements underflow at step 40, 0.02 %
        under the what-if e4m3fn 1x128 current.

    Cure
        1x128 blocks for this operand, which cost nothing in dgrad; BF16 for dgrad of this module.

    Thresholds
        - max_rate 0.05: share of nonzero elements that underflow; numerics.md, 4 (act above 5 %, clean at most 0.06 % in
          1x128).
        - max_share_left 0.5: share of the underflow that a what-if of one row per scale may leave. No published basis: planted
          tokens 2^-24 of the others' leave none of it.
        - min_elements 16: underflowed elements; in a small tensor a share says nothing. No published basis.
        - min_steps 2: sampled steps that show it (all, in a shorter run), and half of those since the first.
    """

    code = "F106"
    name = "unequal-tokens"
    needs_training = True
    columns = ("num_underflow", "num_zero")
    cure = "granularity='1x128' for this operand; else BF16 for this module's dgrad"
    changes: ClassVar[Mapping[str, Any]] = {"granularity": "1x128"}

    max_rate: float = limits.MAX_UNDERFLOW
    max_share_left: float = 0.5
    min_elements: int = limits.MIN_UNDERFLOW_ELEMENTS
    min_steps: int = 2

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("underflow_nonzero_rate", ">", self.max_rate),
            Keys(_GRADIENT),
            f"num_underflow >= {self.min_elements}",
        ]
        return look(conditions, ["underflow_nonzero_rate", "sqnr_db", "max_block_range_log2"])

    def looks(self) -> Iterable[Look]:
        """Return the gradients that underflow."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the gradients that coarse blocks flush."""
        for trace in traces(run, self._look):
            if not trace.lasting(min(self.min_steps, len(trace.sampled))):
                continue
            row = trace.worst("underflow_nonzero_rate")
            rate, what_if = row["underflow_nonzero_rate"], self._by_rows(run, trace, row["step"])
            if what_if is not None and what_if[1] > self.max_share_left * rate:
                continue
            if what_if is not None:
                other = f"{percent(what_if[1])} would under the what-if {what_if[0]}"
            else:
                other = "no what-if with 1x128 blocks was recorded to compare with (what_if=['blockwise'])"
            spread = row["max_block_range_log2"]
            wide = f" (2^{spread:.0f} between the values of a block)" if spread is not None else ""
            message = (
                f"{percent(rate)} of the nonzero dgrad grad_output underflows at step {row['step']}: tokens of unequal size"
                f" share 128x128 blocks{wide}; {other}"
            )
            yield trace.finding(self, Severity.ERROR, message, value=rate, threshold=self.max_rate)

    def _by_rows(self, run: Run, trace: Trace, step: int) -> tuple[str, float] | None:
        """Return the cast and the underflow of the best what-if with one row per scale."""
        query = (
            "SELECT cast_name, underflow_nonzero_rate AS rate FROM sites WHERE NOT actual AND reference = 'operand'"
            " AND module = ? AND gemm = 'dgrad' AND tensor = 'grad_output' AND step = ? AND underflow_nonzero_rate IS NOT NULL"
            " AND (cast_name LIKE '% 1x128 current%' OR cast_name LIKE '% 1x32 current%' OR cast_name LIKE '% rowwise current%')"
            " ORDER BY rate LIMIT 1"
        )
        for row in run.sql(query, [trace.module, step]).to_pylist():
            return row["cast_name"], row["rate"]
        return None


RULES.add(UnequalTokens.code, UnequalTokens())
