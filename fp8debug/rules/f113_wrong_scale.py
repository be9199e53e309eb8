"""F113: an operand has the right shape and the wrong size: its scale is off by a factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.recipes import Cast
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import IS_BELOW_8_BITS, READ_AS_ANOTHER, SCALED_FOR_ANOTHER
from fp8debug.rules.reading.conditions import IS_DELAYED, IS_POWER_OF_TWO, ONE_SCALE, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.histories import HistoryLimits, operands_of_history
from fp8debug.rules.reading.misread import COLUMNS, PairLimits, misreadings
from fp8debug.rules.reading.outside_scales import otherwise_scaled
from fp8debug.rules.reading.stored_scales import ScaleRange, are_cut_off
from fp8debug.rules.reading.traces import (
    SCALE_COLUMNS,
    ElsewhereLimits,
    Trace,
    above,
    percent,
    scaled_elsewhere,
    scaled_on_other_side,
    times,
    traces,
)
from fp8debug.rules.reading.weights import HAS_SHRUNK, WeightLimits, has_small_scales, is_clipped

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: The cures where one scale is older than its tensor: of a weight, and of what is computed anew in each microbatch.
_RECOMPUTE = "recompute the scale after the tensor was loaded or replaced; else BF16 here"
_RECOMPUTE_BLOCKS = (
    "make the scales from the tensor that is cast, at each cast, and anew after it was loaded or replaced (no scale that is kept"
    " from an earlier step); else BF16 here"
)
_ROUND_BEFORE = "round a scale to a power of two before the data are made with it, and upwards; or "
_OF_BLOCKS = (
    "take each block's scale from its own largest magnitude, and check that the GEMM reads the scales of its own rows (of each"
    " part of a fused weight); else BF16 here"
)
_RECALIBRATE = (
    "compute the scale from this tensor's own amax, or calibrate it on training's data; a history needs the amax of all"
    " microbatches and ranks; else BF16 here"
)
_FILL = (
    "save and restore the amax history (a module's extra state) with the weights, or fill it by a few steps before the first"
    " cast that reads it; until it holds an amax, take the scale from the tensor itself; else BF16 here"
)
_NOT_OWN = "static, older than the tensor, or from the amax of a part of it"
_MAXIMUM = "divide the amax by the maximum of the format that the cast runs, as the device has it"
#: SQL: the largest scale is no power of two, so that scales are not rounded to one.
_IS_NO_POWER_OF_TWO = f"NOT {IS_POWER_OF_TWO}"
#: Relative spread of what a power of two that is rounded upwards leaves of the range: between a half and all of it.
_BINADE = 0.5
_PASS = (
    "pass the operand's scale to this GEMM as the others do, or multiply the result by it; compare the module's output with a"
    " BF16 product of its input and weight; else BF16 here"
)


#: Names of F120's findings that say more.
_TOLD = (READ_AS_ANOTHER, SCALED_FOR_ANOTHER)


@dataclass(frozen=True)
class WrongScale(Rule, HistoryLimits, ElsewhereLimits, PairLimits):
    """An operand is faithful but for a factor: its scale_inv does not belong to its data.

    What it detects
        A gain that rounding cannot explain at a cosine that rounding explains well. A smaller deviation is not
        reported: values that are nearly equal (constants, weights one optimizer step after zero initialisation, inputs
        of few distinct tokens) round the same way, and move the gain by some percent in healthy runs. Under current scaling also
        one scale for all blocks that is too small for the tensor, so that values clip: it is a static one, or one of an
        earlier tensor (before a checkpoint was loaded). A program with delayed scaling of its own does so for a step or two,
        whatever its casts are called: one scale that moves, and that is at times larger than its tensor needs, is of a
        history, and is reported where more clips than a history may cost. Also block scales under which some rows of a weight
        clip while others are right, so that no element grew; and those under which values clip while all else is rounded as it
        should be, in all rows: scales of an earlier step. Data of an earlier step are F112, whose error lies in all elements.
        Scales of other blocks, of which elements grow too, are F119.
        A scale may also be applied outside the GEMM, or on the other operand's side. Not reported: an operand whose
        scale_inv is 1 in every block, because the program then multiplies before or after (that it does so was not looked
        at); and two operands whose factors make 1 together, or that are both off where their GEMM's result is right (of
        several microbatches with factors of their own). scale-not-applied: of the former, an operand whose tensor has a
        scale in another GEMM of its module, or in the same GEMM of all modules of its role (the same name in other
        numbered blocks): a program applies its scales in one way. Not where the GEMM's other operand is without its scale
        too: it multiplies codes alone, and its result is multiplied by both scales, as Meta Lingua does in dgrad.

    Why it matters
        Every output of the layer is off by that factor, and cosine, SQNR of the data and plots of the direction look
        clean. It happens when scales are reloaded, synchronised or packed apart from their data: twice (E4M3 fn and
        fnuz), 448/240, a missing margin.

    Example
        blocks.1.attn.qkv, fprop weight, e4m3fn 128x128 current: gain 2.000 at cosine 0.99966 from step 30 on.

    Cure
        Recompute the scales from the data they are for, or reload both as they were saved, with the same flags; BF16 for
        this GEMM until then. No other cast cures it.

    Thresholds
        - max_gain_error 0.05: abs(gain - 1); numerics.md, 4 (act beyond 5 %). Raised to what rounding itself can do to
          equal values: 1/17 for E4M3, 1/9 for E5M2, with a guard of 10 %, and 1/8 for clipping under pow2_floor.
        - min_cosine 0.999: numerics.md, 4 (warn below 0.999); below, the error is more than a factor.
        - max_likely_error 0.01: relative distance of a gain from the ratio of two formats' maxima at which the message has it;
          what rounding changes of a gain (numerics.md, 4: warn beyond 1 %).
        - max_overflow_rate 0.05: share of elements beyond the maximum by the recorded scale: with half the scale the
          maxima of all blocks count, at most one or two of 32. Above, equal values clip together (F101).
        - max_underflow_rate 0.01: under delayed or static scaling, the share of nonzero elements that underflow, above which
          the scale is too old (F102); numerics.md, 4. Current scaling has no such excuse.
        - max_subnormal_rate 0.5: under delayed or static scaling, the share of subnormal codes. A delayed scale that has seen
          nothing but zeros is 1, under which weights of 0.001 round to 2^-9, the double [measured at step 1 of a healthy run].
        - min_headroom 1.25: amax over what the one scale holds, under current scaling, where it is 1 by construction and at most
          1.143 with a scale rounded down.
        - min_mixed_rows 0.03, min_judged_rows 0.8: of a weight with several scales, the share of rows that clip, and that are
          right, and of both together; as in F121.
        - max_own_scale_sqnr_db 30: SQNR below which an operand with several scales is judged by what clips; the errors that
          rounding leaves are this far below it. numerics.md, 4 (warn below 30), 6 dB lower for E5M2.
        - min_elements 256: elements; in a small tensor a gain says little. No published basis.
        - min_exact_headroom 1.07, min_clipped 8, max_clipped_rate 0.001: the same where the one scale is no power of two, so
          that nothing was rounded down: from so many clipped elements on it was made from a smaller amax, of a part of the
          tensor or of an earlier one; an error from that share on. As in F104.
        - max_history_rate 0.001, max_grown_rate 0.01: share of elements that clip under a scale of a history, above which it is a
          warning, and an error; numerics.md, 4 (delayed scaling).
        - max_history_headroom 0.98, min_history_move 0.002, min_history_share 0.5: such a scale is at times larger than its
          tensor needs, which fills less than that share of its range (half of it under a power of two, which is rounded
          upwards): rounding a scale to BF16 changes it by 0.4 %; scale and share move by more than BF16's rounding, 2^-9, as a
          margin keeps its share; and so do as many operands of one cast and tensor, where growing tensors fill their scales.
          No published basis.
        - max_unused_headroom 0.9, max_spread 0.002: of scale-for-another-maximum, information: amax over what its scale holds at
          every sampled step, in all blocks at most, and its relative spread. Under current scaling without rounding it is 1; a
          constant below, while the scales of an operand of this cast change, is a margin or the maximum of another format. Where
          all of them are constant, nothing says what they were made for. Seen in sglang #30900.
        - max_unused_headroom_pow2 0.25: the same of scales that are powers of two: rounding one upwards leaves more than half of
          the range, one binade of margin more than a quarter; the spread is then at most a binade. Seen in vllm #53668.
        - min_unused_headroom 0.1, max_unused_underflow 0.01: of scale-for-another-maximum; below that share of the range it is a
          warning where more of the nonzero elements underflow (numerics.md, 4: warn above 1 %), and told for powers of two
          alone: other scales are there too old or have a floor (F102, F103). No published basis for 0.1.
        - min_own_share 0.86, min_own_share_transformed 0.6: amax over the largest scale's range, as a share of headroom, from
          which on the scales are cut off and none is another block's, as in F147: 1 in closed form, but that scales are
          rounded, by 1/17, and a Hadamard transform moves the amax. No published basis for the margin.
        - min_unused_steps 2: of scale-for-another-maximum, sampled steps, all of the run's. No published basis.
        - max_unit_gain 2: of scale-not-applied, the gain (or its inverse) beyond which a scale_inv of 1 is not the tensor's own:
          codes that fill a format's range within a binade are at most twice their tensor.
        - min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16: of a scale that is applied outside the GEMM, cosine of codes
          with their tensor: factors of rows part the directions, to 0.58 in a gradient whose rows differ a hundredfold
          [measured]; and the same of codes so many times their tensor, a size that chance does not give them.
        - min_pair_cosine 0.999, max_pair_error 0.15: of a scale on the other operand's side, cosine that rounding leaves
          (numerics.md, 4: warn below; of E5M2 what its error leaves, 0.994), and relative difference of the product of both
          factors from 1, and of a result from its product. No published basis for the latter.
        - min_result_cosine 0.9, min_compensated 4: cosine of a result that is right but for noise, as in F128; and squared error
          of both operands over the result's where their scales make up for each other: the smaller one is at most half of it
          where they do not (closed form), and 4 lies 9 dB above that. No published basis for the margin.
        - max_ratio_error 0.002, max_misread_db 10, min_misread_cosine 0.1, max_sums_ratio 2, max_growth 16: by which the message
          has another format whose codes leave the same numbers; as in F120, which says where they come from.
        - Seen in TransformerEngine #123, #567 and #982, sglang #25733, pytorch #190979.
    """

    code = "F113"
    name = "wrong-scale"
    columns = ("sum_xy", "sum_x2", "sum_y2")
    cure = "recompute the scale from its data, or reload both as saved with the same flags; else BF16 here"

    max_gain_error: float = limits.MAX_GAIN_ERROR
    min_cosine: float = 0.999
    max_likely_error: float = 0.01
    max_overflow_rate: float = 0.05
    max_underflow_rate: float = 0.01
    max_subnormal_rate: float = 0.5
    min_headroom: float = 1.25
    min_mixed_rows: float = 0.03
    min_judged_rows: float = 0.8
    min_elements: int = 256
    min_exact_headroom: float = 1.07
    min_clipped: int = 8
    max_clipped_rate: float = 0.001
    max_history_rate: float = limits.WARN_CLIPPED_DELAYED
    max_grown_rate: float = limits.MAX_CLIPPED_DELAYED
    max_unused_headroom: float = 0.9
    max_unused_headroom_pow2: float = 0.25
    min_unused_headroom: float = 0.1
    max_unused_underflow: float = 0.01
    min_unused_steps: int = 2
    max_spread: float = 0.002
    max_own_scale_sqnr_db: float = WeightLimits.max_own_scale_sqnr_db
    min_own_share: float = ScaleRange.min_own_share
    min_own_share_transformed: float = ScaleRange.min_own_share_transformed

    @property
    def _look(self) -> Look:
        columns = ["abs(gain - 1) AS gain_error", *COLUMNS]
        conditions: Conditions = [
            Condition("gain", ">", self.max_gain_error, center=1),
            f"cosine >= {self.min_cosine} AND numel >= {self.min_elements}",
            f"coalesce(overflow_rate, 0) < {self.max_overflow_rate}",
            f"NOT {IS_DELAYED} OR coalesce(underflow_nonzero_rate, 0) < {self.max_underflow_rate}"
            f" AND coalesce(subnormal_rate, 0) < {self.max_subnormal_rate}",
        ]
        return look(conditions, columns)

    def looks(self) -> Iterable[Look]:
        """Return the operands whose gain is off, and those that one scale for all blocks clips."""
        yield self._look
        yield self._moved
        yield self._clipped
        yield self._unit
        yield self._unused

    @property
    def _moved(self) -> Look:
        """Operands that are a factor off, whatever their cosine: by them a scale is told that is applied elsewhere."""
        return look([Condition("gain", ">", self.max_gain_error, center=1)], SCALE_COLUMNS)

    @property
    def _unused(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", "<", self.max_unused_headroom),
            Keys("cast_name LIKE '% current%' AND cast_name NOT LIKE '%eps=%'"),
            f"numel >= {self.min_elements} AND coalesce(num_eps_blocks, 0) = 0 AND (headroom < {self.max_unused_headroom_pow2}"
            f" AND {IS_POWER_OF_TWO} AND NOT {IS_BELOW_8_BITS} OR headroom > {self.min_unused_headroom}"
            f" AND {_IS_NO_POWER_OF_TWO} AND cast_name NOT LIKE '%pow2%')",
        ]
        columns = ["headroom", "scale_inv_max", "underflow_nonzero_rate", f"{IS_POWER_OF_TWO} AS is_pow2"]
        return look(conditions, columns)

    @property
    def _unit(self) -> Look:
        conditions: Conditions = [
            Condition("gain", ">", 1 - 1 / self.max_unit_gain, center=1),
            f"scale_inv_min = 1 AND scale_inv_max = 1 AND (gain > {self.max_unit_gain} OR gain < {1 / self.max_unit_gain})",
            f"numel >= {self.min_elements}",
        ]
        return look(conditions, SCALE_COLUMNS)

    @property
    def _clipped(self) -> Look:
        clipped = is_clipped(self.max_own_scale_sqnr_db)
        conditions: Conditions = [
            Condition("headroom", ">", min(self.min_headroom, self.min_exact_headroom)),
            Keys("cast_name LIKE '% current%'"),
            f"numel >= {self.min_elements} AND num_saturated > 0"
            f" AND NOT {are_cut_off(self.min_own_share, self.min_own_share_transformed)}"
            f" AND (headroom > {self.min_headroom} AND ({ONE_SCALE} OR {clipped} OR tensor = 'weight' AND {HAS_SHRUNK})"
            f" OR num_saturated >= {self.min_clipped} AND ({ONE_SCALE} OR {clipped}) AND {_IS_NO_POWER_OF_TWO})",
        ]
        columns = ["headroom", "overflow_rate", "amax", *SCALE_COLUMNS]
        columns += ["bad_row_rate", "good_row_rate", f"{ONE_SCALE} AS has_one_scale", f"{HAS_SHRUNK} AS has_shrunk"]
        return look(conditions, [*columns, f"{clipped} AS is_clipped"])

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose size is wrong."""
        moved = traces(run, self._moved)
        is_elsewhere = scaled_elsewhere(run, moved, self)
        for whole in traces(run, self._look):
            limit = limits.gain_limit(whole.cast, self.max_gain_error)
            trace = whole.where(above("gain_error", limit))
            trace = trace and trace.where(lambda row, site=trace: not is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            if trace is not None:
                row = trace.worst("gain_error")
                message = (
                    f"the {trace.gemm} {trace.tensor} is {row['gain']:.4g} times its reference at step {row['step']}, at"
                    f" cosine {row['cosine']:.5f}: its scale_inv does not belong to its data"
                    f"{_likely(trace.cast, row['gain'], self.max_likely_error)}{_or_codes(trace.cast, row, self)}"
                )
                yield trace.finding(self, Severity.ERROR, message, value=row["gain_error"], threshold=limit)
        clipped = traces(run, self._clipped)
        of_history = operands_of_history(run, self) if clipped else frozenset()
        for whole in clipped:
            trace = whole.where(lambda row, site=whole: not is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            trace = trace and trace.where(self._is_scale)
            is_of_history = (whole.module, whole.gemm, whole.tensor, whole.cast_name) in of_history
            if is_of_history and trace is not None:
                trace = trace.where(lambda row: row["overflow_rate"] > self.max_history_rate)
            if trace is None:
                continue
            row = trace.worst("headroom")
            if not row["has_one_scale"]:
                yield self._of_blocks(trace, row)
                continue
            if row["scale_inv_max"] == 0 and trace.tensor != "weight":
                message = (
                    f"all of the {trace.gemm} {trace.tensor} clips at step {row['step']}: its scale_inv is 0, made from an amax"
                    " of zero (a history or buffer that is new, was never filled, or was not restored by a resume)"
                )
                finding = trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=self.min_headroom)
                yield replace(finding, cure=_FILL)
                continue
            is_rounded = math.frexp(row["scale_inv_max"])[0] == 0.5 and row["headroom"] < 2
            why = "a power of two: rounded down after the cast, or static" if is_rounded else _NOT_OWN
            message = (
                f"{percent(row['overflow_rate'])} of the {trace.gemm} {trace.tensor} clips at step {row['step']}: its scale_inv"
                f" {row['scale_inv_max']:.3g}, the same for all blocks, was made for a tensor {times(row['headroom'])} times"
                f" smaller ({why}){_likely(trace.cast, row['gain'], self.max_likely_error)}"
            )
            is_large = row["headroom"] > self.min_headroom or row["overflow_rate"] > self.max_clipped_rate
            if is_of_history:
                is_large = row["overflow_rate"] > self.max_grown_rate
            severity = Severity.ERROR if is_large else Severity.WARNING
            threshold = self.min_headroom if row["headroom"] > self.min_headroom else self.min_exact_headroom
            finding = trace.finding(self, severity, message, value=row["headroom"], threshold=threshold)
            remedy = _RECOMPUTE if trace.tensor == "weight" else _RECALIBRATE
            yield replace(finding, cure=_ROUND_BEFORE + remedy if is_rounded else remedy)

        yield from self._unapplied(run, scaled_on_other_side(run, moved, self))
        yield from self._unused_range(run)

    def _of_blocks(self, trace: Trace, row: dict[str, Any]) -> Finding:
        """Return the finding of values that clip under the scales of their blocks or rows."""
        where = (
            f"{percent(row['overflow_rate'])} of the {trace.gemm} {trace.tensor} clips at step {row['step']}, up to"
            f" {times(row['headroom'])} times beyond its block's scale"
        )
        if self._has_small_scales(row):
            why = (
                f", in {percent(row['bad_row_rate'])} of its rows; the others are right: scales of other blocks, or of the"
                " greatest value in place of the magnitude"
            )
            cure = _OF_BLOCKS
        else:
            why = (
                ", and all else is rounded as it should be: the data are this step's, and the scales those of an earlier step, of"
                " what was there before a load, or of a part of the tensor"
            )
            cure = _RECOMPUTE_BLOCKS
        finding = trace.finding(self, Severity.ERROR, where + why, value=row["headroom"], threshold=self.min_headroom)
        return replace(finding, cure=cure)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to codes of another format, to scales made for one (their ratio says more), and to one code for all values."""
        stronger = [f for f in others if f.name in _TOLD or f.code == "F118"]
        named = {(part.module, part.gemm, part.tensor) for f in stronger for part in f.sites}
        return any((part.module, part.gemm, part.tensor) not in named for part in finding.sites)

    def _unused_range(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose largest value uses the same share of the format's range at every step."""
        found = [trace for trace in traces(run, self._unused) if len(trace.rows) == len(trace.sampled) >= self.min_unused_steps]
        found = [
            trace
            for trace in found
            if trace.cast and not trace.cast.margin and self._spread(trace, "headroom") <= self._allowed(trace)
        ]
        # A constant scale on a constant tensor has a constant headroom, whatever the scale was made for.
        follows = [(trace.cast, _share(trace)) for trace in found if self._spread(trace, "scale_inv_max") > self.max_spread]
        for trace in found:
            share, cast = _share(trace), trace.cast
            allowed = self._allowed(trace)
            if cast is None or not any(c == cast and math.isclose(share, s, rel_tol=allowed) for c, s in follows):
                continue
            largest = FORMATS[cast.format].max
            lost = max(row["underflow_nonzero_rate"] or 0.0 for row in trace.rows)
            message = (
                f"the {trace.gemm} {trace.tensor} uses {percent(share)} of its format's range at every step: its scales are"
                f" made for a maximum of {share * largest:.3g}, not {largest:g} (a margin, or another format's or device's"
                f" maximum); it costs small values ({percent(lost)} underflow), no precision of the others"
            )
            severity = (
                Severity.WARNING if share < self.min_unused_headroom and lost > self.max_unused_underflow else Severity.INFO
            )
            finding = trace.finding(self, severity, message, value=share, threshold=self.max_unused_headroom)
            yield replace(finding, name="scale-for-another-maximum", cure=_MAXIMUM)

    def _allowed(self, trace: Trace) -> float:
        """Return the relative spread that a share of the range may have: that of rounding a scale to a power of two, or none."""
        return _BINADE if all(row["is_pow2"] for row in trace.rows) else self.max_spread

    @staticmethod
    def _spread(trace: Trace, column: str) -> float:
        values = [row[column] for row in trace.rows]
        return float((max(values) - min(values)) / max(values))

    def _unapplied(self, run: Run, is_on_other_side: Callable[[Trace, dict[str, Any]], bool]) -> Iterable[Finding]:
        """Return the operands without a scale that the rest of the program contradicts."""
        found = traces(run, self._unit)
        is_elsewhere = scaled_elsewhere(run, found, self)
        for whole in found:
            if any(is_on_other_side(whole, row) for row in whole.rows):
                continue
            trace = whole.where(lambda row, site=whole: is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            why = trace and otherwise_scaled(run, trace, self.max_unit_gain)
            if trace is None or why is None:
                continue
            row = trace.rows[0]
            message = (
                f"the {trace.gemm} {trace.tensor} is read with a scale_inv of 1, {times(row['gain'])} times its tensor at step"
                f" {row['step']}, where {why}: its scale was dropped on the way to this GEMM, unless this one alone has its"
                " result multiplied afterwards"
            )
            finding = trace.finding(self, Severity.WARNING, message, value=row["gain"], threshold=self.max_unit_gain)
            yield replace(finding, name="scale-not-applied", cure=_PASS)

    def _is_scale(self, row: dict[str, Any]) -> bool:
        """Return whether the scales are at fault: one for all blocks, or some that are too small for their rows."""
        return bool(row["has_one_scale"] or row["is_clipped"]) or self._has_small_scales(row)

    def _has_small_scales(self, row: dict[str, Any]) -> bool:
        return has_small_scales(row, self.min_headroom, self.min_mixed_rows, self.min_judged_rows)


def _share(trace: Trace) -> float:
    """Return the largest share of the format's range that an operand used."""
    return float(max(row["headroom"] for row in trace.rows))


def _likely(cast: Cast | None, gain: float | None, max_error: float) -> str:
    """Return what a factor says where it is that between the maxima of two formats of one mantissa; empty where it is not."""
    own = None if cast is None else FORMATS[cast.format]
    if own is None or gain is None:
        return ""
    for other in FORMATS.values():
        if other.bits != own.bits or other.mantissa_bits != own.mantissa_bits or other.is_unsigned_zero is own.is_unsigned_zero:
            continue
        ratio = own.max / other.max
        if any(ratio != 1 and math.isclose(gain, value, rel_tol=max_error) for value in (ratio, 1 / ratio)):
            return (
                f"; it is {max(own.max, other.max):g}/{min(own.max, other.max):g}, a scale made for the maximum of {other.name}"
            )
    return ""


def _or_codes(cast: Cast | None, row: dict[str, Any], limits: PairLimits) -> str:
    """Return which format's codes, read in the declared one, leave the same numbers; empty where none's do."""
    names = [one.made.name for one in misreadings(row, cast, limits)] if cast is not None else []
    return f", or its codes are of {names[0]} and read as {row['cast_name'].partition(' ')[0]}" if names else ""


RULES.add(WrongScale.code, WrongScale())
