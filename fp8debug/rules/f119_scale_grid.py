"""F119: the data of a tensor stand under scales of other blocks: a grid that is misaligned, transposed or foreign."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS, GRANULARITIES
from fp8debug.metrics.limits import cast_floor_db
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import HIGHEST_FLOOR_DB, OF_ANOTHER_FORMAT
from fp8debug.rules.reading.conditions import ONE_SCALE, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.stored_scales import ScaleRange, are_cut_off
from fp8debug.rules.reading.traces import (
    SCALE_COLUMNS,
    ElsewhereLimits,
    JoinedLimits,
    Trace,
    num_right,
    scaled_elsewhere,
    times,
    traces,
)
from fp8debug.rules.reading.weights import HAS_SHRUNK, WeightLimits, are_scales_of_others, has_outgrown, is_clipped, starts_of

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


#: The longest side of a fine block, in elements: those of MXFP8, and NVFP4's.
_FINE = 32
#: SQL: blocks of 16 or 32 elements; a side of None is the tensor's own.
_IS_FINE = (
    "("
    + " OR ".join(f"cast_name LIKE '% {n} %'" for n, sides in GRANULARITIES.items() if all(s and s <= _FINE for s in sides))
    + ")"
)


@dataclass(frozen=True)
class ScaleGrid(Rule, ElsewhereLimits, JoinedLimits):
    """Each block is multiplied by another block's scale_inv: the scale grid is misaligned, transposed or another tensor's.

    What it detects
        An operand under current scaling that has lost nearly all accuracy (SQNR below 10 dB, typically below 0: the error is
        larger than the tensor), with values beyond what its recorded scales can hold. Under current scaling the scale is made
        of the block's own amax, so that there can be none. A weight counts at any SQNR below its cast's bound at the first
        sampled step of a run or a resumed part, before it could outgrow its scales, where its direction is right (cosine
        0.9). One factor or one scale for all blocks is a wrong scale (F113); a scale that is off by rounding holds all but a
        factor of 1.15 (F104).

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
        - margin_db 0.1: in blocks of 16 and 32 elements, whose scales lie swizzled for the tensor core, neighbours differ little:
          there any operand counts that lies this far below what its cast can do to a tensor (closed form, F128).
        - min_headroom 1.25: amax over what the scale holds; under current scaling 1, with a scale rounded down at most 1.143, in
          E2M1 1.333, to which rounded_margin 1.02 is room. Scales that their format cuts off are F147 or F148.
        - max_cosine 0.999: above, the shape is right and one factor is wrong (F113). A weight that is
          too short, with its error across its FP8 values, is an older one of its own (F112).
        - min_elements 256: elements; a small tensor says little. No published basis.
        - max_unrelated 0.25: cosine, as a share of the least that scales in a random order leave, 4 r / (1 + r)^2 where the
          largest is r times the smallest; below, data of the right size are another tensor's or an older one's (F128). The share
          allows for orders in which large blocks get small scales.
        - max_resized 16: norm of the data over the tensor's, or its inverse, beyond which an order of the tensor's own scales
          does not explain them: it leaves the norm, but for blocks that differ in energy under like scales. No published basis.
        - max_own_ratio 2: the same within which data are another tensor's of about this size. No published basis.
        - min_own_share 0.86, min_own_share_transformed 0.6: amax over the largest scale's range, as a share of headroom, from
          which on the scales are cut off and none is another block's, as in F147: 1 in closed form, but that scales are
          rounded, by 1/17, and a Hadamard transform moves the amax. No published basis for the margin.
        - min_coefficient 0.9, max_block_growth 4, max_flushed_rate 0.05, min_own_cosine 0.9: what parts other blocks' scales from
          an older weight that outgrew its scales, and from another weight's values at a start; F112 says where they come from.
        - max_own_scale_sqnr_db 30: by which all that is wrong clips, so that the scales are older than the tensor; as in F113.
        - max_joined 8, max_joined_error 0.1: where some of at most so many microbatches are another tensor's, the norm lies
          within the latter of the tensor's, as one of the same module has about its size, and the cosine within as much of a
          microbatch of their share: unrelated tensors of e elements have a cosine of 1 / sqrt(e), so that shares of eight are
          told from 6,400 elements on. No published basis.
        - max_unit_gain 2, min_pair_cosine 0.999, max_pair_error 0.15, min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16,
          min_result_cosine 0.9, min_compensated 4: by which a scale is applied outside the GEMM or on the other operand's side;
          as in F113, which says where they come from.
    """

    code = "F119"
    name = "scale-grid"
    columns = ("headroom", "sum_err2", "sum_xy")
    cure = "check the scale layout between cast and GEMM (transposed, offset, swizzled); else BF16 for this GEMM"

    max_sqnr_db: float = 10.0
    margin_db: float = 0.1
    min_headroom: float = 1.25
    max_cosine: float = 0.999
    min_elements: int = 256
    max_unrelated: float = 0.25
    rounded_margin: float = 1.02
    max_resized: float = 16.0
    max_own_ratio: float = 2.0
    min_coefficient: float = WeightLimits.min_coefficient
    max_block_growth: float = WeightLimits.max_block_growth
    max_flushed_rate: float = WeightLimits.max_flushed_rate
    min_own_cosine: float = WeightLimits.min_own_cosine
    max_own_scale_sqnr_db: float = WeightLimits.max_own_scale_sqnr_db
    min_own_share: float = ScaleRange.min_own_share
    min_own_share_transformed: float = ScaleRange.min_own_share_transformed

    @property
    def _look(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", ">", self.min_headroom),
            Keys("cast_name LIKE '% current%'"),
            f"(sqnr_db < {self.max_sqnr_db} OR {_IS_FINE} AND sqnr_db < {HIGHEST_FLOOR_DB}) AND cosine < {self.max_cosine}",
            f"numel >= {self.min_elements} AND NOT {are_cut_off(self.min_own_share, self.min_own_share_transformed)}",
            f"coalesce(NOT ({ONE_SCALE}), true)",
            f"NOT {is_clipped(self.max_own_scale_sqnr_db)}",
            f"NOT (tensor = 'weight' AND {has_outgrown(self.min_coefficient, self.max_block_growth, self.max_flushed_rate)})",
        ]
        return look(conditions, ["sqnr_db", "headroom", "norm_ratio", *SCALE_COLUMNS])

    def looks(self) -> Iterable[Look]:
        """Return the operands beyond their scales."""
        yield self._look
        yield self._of_weights

    @property
    def _of_weights(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", ">", self.min_headroom),
            Keys("cast_name LIKE '% current%' AND tensor = 'weight'"),
            f"sqnr_db < {HIGHEST_FLOOR_DB} AND cosine < {self.max_cosine}",
            f"numel >= {self.min_elements} AND NOT {are_cut_off(self.min_own_share, self.min_own_share_transformed)}",
            f"coalesce(NOT ({ONE_SCALE}), true)",
        ]
        return look(conditions, ["sqnr_db", "headroom", f"{HAS_SHRUNK} AS has_shrunk", *SCALE_COLUMNS])

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands under foreign scales."""
        told = set()
        found = traces(run, self._look)
        is_elsewhere = scaled_elsewhere(run, found, self)
        for whole in found:
            trace = whole.where(self._is_of_others(whole))
            trace = trace and trace.where(lambda row, site=trace: not is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            if trace is None:
                continue
            row = trace.least("sqnr_db")
            message = (
                f"the {trace.gemm} {trace.tensor} has {row['sqnr_db']:.1f} dB at step {row['step']}, and values"
                f" {times(row['headroom'])} times beyond their block's current scale: the scales are those of other blocks"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=self.max_sqnr_db, unit="dB")
            told.add((trace.module, trace.gemm))
        weights = traces(run, self._of_weights)
        starts = starts_of(run) if weights else frozenset()
        is_elsewhere = scaled_elsewhere(run, weights, self)
        for trace in weights:
            row = trace.rows[0]
            if (
                (trace.module, trace.gemm) in told
                or is_elsewhere(trace, row)
                or not are_scales_of_others(row, starts, self._rounded_headroom(trace), self.min_own_cosine)
            ):
                continue
            message = (
                f"the {trace.gemm} weight has {row['sqnr_db']:.1f} dB at step {row['step']}, before any update, at"
                f" cosine {row['cosine']:.3f}, and values {times(row['headroom'])} times beyond their block's scale: the scales"
                " are those of other blocks (rows that were put in another order, as a fused weight's, without their scales)"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=self.min_headroom)

    def _is_of_others(self, trace: Trace) -> Callable[[dict[str, Any]], bool]:
        """Return the test whether a row lies below what its cast can do, beyond what rounding its scale down can."""
        cast, headroom, floor = trace.cast, self._rounded_headroom(trace), self.max_sqnr_db
        if cast is not None:
            floor = max(floor, cast_floor_db(cast) - self.margin_db)
        return lambda row: bool(row["headroom"] > headroom and row["sqnr_db"] < floor and not self._is_of_another_tensor(row))

    def _is_of_another_tensor(self, row: dict[str, Any]) -> bool:
        """Return whether the data cannot be the tensor's, under whatever order of its scales.

        Blocks at random under scales s of each other have the cosine E[s]^2 / E[s^2], by Kantorovich's inequality at least
        4 r / (1 + r)^2 where the largest scale is r times the smallest, and never a negative one, as scales have no sign. Data of
        another tensor have about 0, or less, at the right size,
        and where j of n tensors of a row were right, about j / n. Scales of other blocks leave a tensor its size; where
        it is far larger, they may be inverse, so that r is squared.
        """
        smallest, largest = row["scale_inv_min"], row["scale_inv_max"]
        if not smallest or row["norm_ratio"] is None:
            return False
        cosine, spread = row["cosine"] or 0.0, largest / smallest
        if not 1 / self.max_resized < row["norm_ratio"] < self.max_resized:
            return bool(cosine < self.max_unrelated * _kantorovich(spread if row["norm_ratio"] < 1 else spread**2))
        if not 1 / self.max_own_ratio < row["norm_ratio"] < self.max_own_ratio:
            return False
        is_unrelated = cosine < self.max_unrelated * _kantorovich(max(spread, row["headroom"]))
        return is_unrelated or num_right(row, self) is not None

    def _rounded_headroom(self, trace: Trace) -> float:
        """Return how far a value may lie beyond its scale where that is rounded down."""
        fmt = None if trace.cast is None else FORMATS[trace.cast.format]
        return self.min_headroom if fmt is None else max(self.min_headroom, self.rounded_margin * 2.0 ** (fmt.emax + 1) / fmt.max)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to other signs, another format, and a weight that is another's or went stale before it outgrew its scales."""
        misread = {(part.module, part.gemm, part.tensor) for f in others if f.name in OF_ANOTHER_FORMAT for part in f.sites}
        if all((part.module, part.gemm, part.tensor) in misread for part in finding.sites):
            return False
        signs = {(part.module, part.tensor) for f in others if f.code == "F146" for part in f.sites}
        if all((part.module, part.tensor) in signs for part in finding.sites):
            return False
        foreign = {part.module: part.steps[0] for f in others if f.code in ("F112", "F121") for part in f.sites}
        return not all(part.tensor == "weight" and foreign.get(part.module, math.inf) <= part.steps[0] for part in finding.sites)


def _kantorovich(spread: float) -> float:
    """Return the least cosine that scales which differ by ``spread`` leave in a random order."""
    return float(4 * spread / (1 + spread) ** 2)


RULES.add(ScaleGrid.code, ScaleGrid())
