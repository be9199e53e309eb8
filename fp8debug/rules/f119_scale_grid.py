"""F119: the data of a tensor stand under scales of other blocks: a grid that is misaligned, transposed or foreign."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.conditions import ONE_SCALE, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import times, traces
from fp8debug.rules.reading.weights import HAS_OUTGROWN

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class ScaleGrid(Rule):
    """Each block is multiplied by another block's scale_inv: the scale grid is misaligned, transposed or another tensor's.

    What it detects
        An operand under current scaling that has lost nearly all accuracy (SQNR below 10 dB, typically below 0: the error is
        larger than the tensor), with values beyond what its recorded scales can hold. Under current scaling the scale is made
        of the block's own amax, so that there can be none. One factor or one scale for all blocks is a wrong scale (F113); a
        scale that is off by rounding holds all but a factor of 1.15 (F104).

    Why it matters
        The GEMM computes with noise. It happens when scales are stored for one layout and read in another (row or column
        major, swizzled or padded for the tensor core, transposed for dgrad), often in one of three GEMMs only.

    Example
        blocks.1.attn.qkv, dgrad weight, e4m3fn 128x128 current: -7.9 dB at step 40, values 4 times beyond their block's scale.

    Cure
        Compare the layout that the cast writes with the one that the GEMM reads, on a tensor whose blocks differ; BF16 for this
        GEMM until then. No other cast cures it, but a tensorwise one has no grid.

    Thresholds
        - max_sqnr_db 10: numerics.md, 5, has below 0 dB; a grid whose blocks differ by a third gives 10 dB. No published basis.
        - min_headroom 1.25: amax over what the scale holds; under current scaling 1, with a scale rounded down at most 1.143.
        - max_cosine 0.999: above, the shape is right and one factor is wrong (F113). A weight that is
          too short, with its error across its FP8 values, is an older one of its own (F112).
        - min_elements 256: elements; a small tensor says little. No published basis.
    """

    code = "F119"
    name = "scale-grid"
    columns = ("headroom", "sum_err2", "sum_xy")
    cure = "check the scale layout between cast and GEMM (transposed, offset, swizzled); else BF16 for this GEMM"

    max_sqnr_db: float = 10.0
    min_headroom: float = 1.25
    max_cosine: float = 0.999
    min_elements: int = 256

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", ">", self.min_headroom),
            Keys("cast_name LIKE '% current%'"),
            f"sqnr_db < {self.max_sqnr_db} AND cosine < {self.max_cosine} AND numel >= {self.min_elements}",
            f"coalesce(NOT ({ONE_SCALE}), true)",
            f"NOT (tensor = 'weight' AND {HAS_OUTGROWN})",
        ]
        return look(conditions, ["sqnr_db", "headroom", "cosine"])

    def looks(self) -> Iterable[Look]:
        """Return the operands beyond their scales."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands under foreign scales."""
        for trace in traces(run, self._look):
            row = trace.least("sqnr_db")
            message = (
                f"the {trace.gemm} {trace.tensor} has {row['sqnr_db']:.1f} dB at step {row['step']}, and values"
                f" {times(row['headroom'])} times beyond their block's current scale: the scales are those of other blocks"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB")

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a weight that is another's or went stale before it outgrew its scales."""
        foreign = {part.module: part.steps[0] for f in others if f.code in ("F112", "F121") for part in f.sites}
        return not all(part.tensor == "weight" and foreign.get(part.module, math.inf) <= part.steps[0] for part in finding.sites)


RULES.add(ScaleGrid.code, ScaleGrid())
