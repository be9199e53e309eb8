"""F102: a delayed scale still remembers a spike, so that ordinary values underflow to zero."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from fp8debug.metrics import limits
from fp8debug.rules.base import RULES, Finding, FollowingRule, Severity
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import IS_DELAYED, percent, times, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class StaleHistoryUnderflow(FollowingRule):
    """A delayed scale holds the amax of an old spike: ordinary values underflow to zero.

    What it detects
        A spike stays in a max-history for as long as the history is. Meanwhile scale_inv is far too large, the
        headroom (amax / scale_inv / format maximum) far below 1, and a large share of the nonzero elements becomes
        zero.

    Why it matters
        The layer sees zeros instead of activations, or the layers below it no gradient. With Transformer Engine's
        default history of 1024 it lasts 1024 steps, long after the spike has left every plot.

    Example
        blocks.2.attn.qkv, fprop input, e4m3fn tensorwise delayed(1024,max): 98 % of the nonzero elements underflow
        since step 130; the scale is made for an amax 2.6e+05 times today's.

    Cure
        Current scaling for this operand; or a shorter history, or algo 'most_recent'; or BF16 for this GEMM. Clearing
        the history helps until the next spike.

    Thresholds
        - max_rate 0.05: share of nonzero elements that underflow; numerics.md, 4 (act above 5 %).
        - max_rate_once 0.5: the share that counts at a single sampled step. No published basis.
        - max_headroom 0.015625: 2^-6. A scale 64 times too large takes six of the binades of E4M3, which has 15 normal
          ones and 3 subnormal; above it underflow has another cause.
        - max_sqnr_db 20: SQNR of the operand. A history that is merely long costs elements far below the rms, which a
          solved token's gradient is full of, and no accuracy: a Gaussian has 28.8 dB at 5 % underflow and 16.8 dB at
          20 % (computed).
        - min_elements 16: underflowed elements; in a small tensor a share says nothing. No published basis.
        - min_steps 2: sampled steps after the warm-up, and at least half of those since the first.
        - warmup 8: first steps of a run, which do not count: a layer behind a zero-initialised one has no gradient at
          first, and an empty history scales by 1 [measured: 63 % at step 1, in a run that trains well].
        - follow_steps 2: sampled steps after the first of another fault, in a layer that ran before, within which this one is its
          consequence, as information. No published basis.
        - min_batch_growth 10: amax of what the module that runs first reads, over its largest of the sampled steps before; in
          another module a finding at such steps alone is a consequence of the batch, as information. No published basis.
    """

    code = "F102"
    name = "stale-history-underflow"
    columns = ("num_underflow", "headroom", "sum_err2")
    cure = "scaling='current' for this operand; else a shorter history or algo='most_recent'; else BF16 for this GEMM"
    changes: ClassVar[Mapping[str, Any]] = {"scaling": "current"}

    max_rate: float = limits.MAX_UNDERFLOW
    max_rate_once: float = 0.5
    max_headroom: float = limits.MAX_STALE_HEADROOM
    min_elements: int = limits.MIN_UNDERFLOW_ELEMENTS
    min_steps: int = 2
    warmup: int = 8
    max_sqnr_db: float = limits.MAX_STALE_SQNR_DB

    @property
    def _looks(self) -> tuple[Look, Look]:
        """Rows whose zeros were counted before the cast, and those whose share of all elements is the least it can be."""
        whole = [Condition("underflow_rate", ">", self.max_rate), "num_zero IS NULL", *self._conditions]
        columns = ["underflow_rate AS underflow_nonzero_rate", "headroom"]
        return self._look, look(whole, columns)

    @property
    def _conditions(self) -> Conditions:
        return [
            Keys(IS_DELAYED),
            f"headroom < {self.max_headroom} AND num_underflow >= {self.min_elements} AND sqnr_db < {self.max_sqnr_db}",
        ]

    @property
    def _look(self) -> Look:
        conditions = [Condition("underflow_nonzero_rate", ">", self.max_rate), *self._conditions]
        return look(conditions, ["underflow_nonzero_rate", "headroom"])

    def looks(self) -> Iterable[Look]:
        """Return the rows that underflow."""
        yield from self._looks

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the sites whose scale remembers too much."""
        for trace in chain.from_iterable(traces(run, rows) for rows in self._looks):
            once = any(
                row["underflow_nonzero_rate"] > self.max_rate_once and row["step"] >= trace.start + self.warmup
                for row in trace.rows
            )
            if once or trace.lasting(self.min_steps, self.warmup):
                row = trace.worst("underflow_nonzero_rate")
                rate = row["underflow_nonzero_rate"]
                message = (
                    f"{percent(rate)} of the nonzero {trace.gemm} {trace.tensor} underflows to zero at step"
                    f" {row['step']}: the scale is made for an amax {times(1 / row['headroom'])} times today's"
                )
                yield trace.finding(self, Severity.ERROR, message, value=rate, threshold=self.max_rate)


RULES.add(StaleHistoryUnderflow.code, StaleHistoryUnderflow())
