"""F128: an FP8 operand lies farther from its tensor than its cast can put it, and no other rule names the cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.recipes import Cast
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import HIGHEST_FLOOR_DB, IS_BELOW_8_BITS, SCALES_ARE_ROUNDED, most_underflow, tensor_floor_db
from fp8debug.rules.reading.conditions import KEYS, RUNNING, Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.histories import HistoryLimits, Operand, operands_of_history
from fp8debug.rules.reading.traces import (
    SCALE_COLUMNS,
    ElsewhereLimits,
    JoinedLimits,
    Trace,
    above,
    num_right,
    percent,
    scaled_elsewhere,
    times,
    traces,
)
from fp8debug.rules.reading.unrecorded_operands import FarResult, far_results, results_look

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Relative distance of a scale from that of an amax floor of which it is made: FP32's rounding, 6e-8, with a wide margin.
_FLOOR_ROUNDING = 1e-3
#: Half the distance of a format's two largest values: what rounding to nearest changes an element by, times scale_inv.
_HALF_STEPS = {name: 2.0 ** (f.emax - f.mantissa_bits - 1) for name, f in FORMATS.items() if f.bits == 8 and not f.scale_only}
#: Headroom below which a cast leaves nothing: half the smallest value of its format over the largest.
_FLUSHING = {name: f.min_subnormal / 2 / f.max for name, f in FORMATS.items() if not f.scale_only}
#: SQL: the largest error of an element over what rounding to nearest can do under the largest scale of the tensor.
_ELEMENT_ERROR = (
    "max_abs_err / (scale_inv_max * CASE "
    + " ".join(f"WHEN cast_name LIKE '{name} %' THEN {half}" for name, half in _HALF_STEPS.items())
    + " END)"
)
#: What cutting off mantissas of values that are spread evenly over a binade takes of their gain, over the step s of the mantissa
#: (E[(x mod s) x] / E[x^2] = (s / 2)(3 / 2) / (7 / 3)), and their squared error over that of the step (1 / 3) / (7 / 3).
_CUT_GAIN, _CUT_NMSE = 9 / 28, 1 / 7
#: SQL: the step of the mantissa of a format of 8 bits.
_STEP = (
    "CASE "
    + " ".join(f"WHEN cast_name LIKE '{name} %' THEN {2.0 ** -FORMATS[name].mantissa_bits}" for name in _HALF_STEPS)
    + " END"
)
#: SQL predicates: a cast with its own scales that rounds to nearest and clips nothing; a row in which it clips nothing.
_NEAREST = "cast_name LIKE '% current%' AND " + " AND ".join(
    f"cast_name NOT LIKE '%{word}%'" for word in ("floor", "even", "stochastic", "hadamard")
)
_OF_ELEMENTS = f"{_NEAREST} AND NOT {SCALES_ARE_ROUNDED} AND coalesce(num_saturated, 0) = 0"
#: The operand of which errors stay where they are (wgrad's result is not multiplied again), and its SQL predicate.
_LEAF = ("wgrad", "grad_output")
_IS_LEAF = "(gemm = '{}' AND tensor = '{}')".format(*_LEAF)
_COLUMNS = (
    *("sqnr_db", "cosine", "gain", "norm_ratio", "headroom", "underflow_nonzero_rate", "overflow_rate", "subnormal_rate"),
    *("num_eps_blocks", "num_blocks", "nmse", "scale_inv_min", "scale_inv_max", "max_abs_err", "num_tensors"),
    *("log2_hist", "amax", "sum_x2", "numel"),
)


_ROUNDING = (
    "make the cast round to nearest even (a conversion with saturation, not a shift of bits or a cast through integers); compare"
    " its codes with fp8debug.quantize() of the same tensor; else BF16 for this GEMM"
)
_OF_PARTS = (
    "check that each part of the tensor (shard, rank, expert) was cast under the scale that the GEMM reads for it: take the amax"
    " over all of them before the cast, or cast after they are gathered; compare its codes with fp8debug.quantize() of the same"
    " tensor; else BF16 for this GEMM"
)
_UNRECORDED = (
    "keep what is cast in high precision until this GEMM has run, for one step, so that its row says what is wrong; compare the"
    " codes that the GEMM reads with fp8debug.quantize() of the tensor (a transposed copy, a cached one, one that was sent); else"
    " BF16 for this GEMM"
)


@dataclass(frozen=True)
class OperandDiffers(Rule, HistoryLimits, ElsewhereLimits, JoinedLimits):
    """The FP8 data of an operand are not the cast of its tensor, whatever the reason.

    What it detects
        An operand with a lower SQNR than rounding can cause. Under current scaling the bound is exact and holds for every
        tensor: rounding to nearest changes a value by at most 1/17 of itself in E4M3 (24.6 dB), 1/9 in E5M2 (19.1 dB), and
        a scale rounded down clips at most 1/8 (18.1 dB). One sampled step below it is proof. Delayed and static scales
        may clip or flush values, so that their bound is empirical and has to last. A site that another rule explains is
        left to that rule, and so is one whose scale is applied outside the GEMM (scale_inv is 1 in every block) or on the
        other operand's side: a correct program may do so. The message lists what the statistics fit: zeros, signs, places,
        noise, or a scale that is not the data's.
        element-differs: rounding to nearest moves an element by at most half the distance of the format's two largest values,
        times the largest scale, where nothing clips. One element beyond is proof of another rounding, or of a wrong element,
        at any SQNR: mantissas that are cut off have 26.8 dB. Further than a whole step no rounding moves it, in any direction:
        then a part of the tensor was cast under another scale than the GEMM reads, or single elements are wrong.

        values-cut-off: gain and error are those of mantissas that are cut off, at all steps from the first one on: of values that
        are spread evenly over binades the gain loses 9/28 of the mantissa's step (0.08 in E5M2, 0.04 in E4M3), and the SQNR is
        7 over its square (20.5 and 26.5 dB), which no bound of single elements shows where few of them lie near the maximum.
        The upper byte of an FP16 number is E5M2 that was cut off.

        zeros-differ: more zeros than the cast can make. A value becomes zero below half the format's smallest one times its
        scale; the histogram of magnitudes bounds how many lie there under the largest scale, the whole bin counted. Small
        values that are lost leave the SQNR as it is.

        data-of-nothing: a tensor of zeros whose data are not: a cast gives zeros, and no SQNR shows it, as there is no signal.

        unrecorded-differs: an operand without a row in a GEMM, as its tensor in high precision was gone when that ran, is judged
        by the result: the GEMM multiplies what it reads, and its result is further from the shadow than both casts explain.
        Errors e_a and e_b of the operands leave 1 / (e_a^2 + e_b^2) of a sum of independent terms, and as much less as the sum
        cancels: its mean square over that of independent terms, M a^2 b^2 of M tokens or features, a and b the RMS of the
        tensors.

    Why it matters
        The GEMM multiplies something else than the model computed. A catalogue of known faults recognizes only what it has
        seen; rows that a kernel never wrote, wrong signs and stale buffers have no signature of their own.

    Example
        blocks.1.down, wgrad input, e4m3fn 128x1 current: 3.0 dB from its tensor at 5 of 5 sampled steps, where this cast
        gives at least 24.6 dB; 50 % of the nonzero elements are zero.

    Cure
        Dump the operand (watch(dump=...)), compare it with fp8debug.measure() of its tensor under the same cast, and repeat
        the step with another backend; BF16 for this GEMM until then.

    Thresholds
        - margin_db 0.1: how far below the closed-form bound of the cast an operand must lie; FP32 rounding of the sums is
          1e-6 dB. The bound follows from the format's mantissa bits; numerics.md, 4.
          In formats of less than 8 bits, whose blocks of 16x16 elements that bound leaves at 3 dB, it follows from the
          histogram of magnitudes and the largest scale (every element the largest of its bin); under stochastic rounding a
          sound tensor lies below it with a probability of 1e-9 (Bernstein's inequality).
        - max_element_error 1.1: of element-differs, in that half distance; 1 in closed form, with room for a kernel that casts
          from more bits than BF16 keeps (2^-9 of a value is 0.06 of it).
        - max_directed_error 2.1: the same of a cast that always rounds one way, or at random: a whole step, twice the half, with
          the same room.
        - max_headroom 1.002: of element-differs, amax over what its block's scale holds, below which nothing clips: 1 by
          construction, and FP32 scales hit it to 1e-6; a power of two holds more. Beyond, an element may be clipped (F104, F113).
        - min_gain_error 0.015: of element-differs, the gain from which on all elements are rounded one way. Cutting off E4M3's
          mantissa gives a gain of 0.965, rounding to nearest 1 +- 0.002 [measured].
        - delayed_sqnr_db 23.5, delayed_steps 2, warmup 8: under delayed or static scaling, the SQNR below which it counts, the
          sampled steps that show it, and the first steps of a run, which do not count. A healthy weight that grows from
          zero has 24.3 dB at step 8 [measured].
        - max_history_headroom 0.98, min_history_move 0.002, min_history_share 0.5: by which a scale is of a history, and judged
          as under delayed scaling; as in F113, which says where they come from.
        - max_unmeasured_underflow 0.5: share of underflow that counts, for as long, where no error was recorded, as in an
          imported log; numerics.md, 4 acts above 5 %, and such a log may count values that were zero before the cast.
          At the last sampled step alone, after as many healthy ones, it is a warning: no later step tells whether it lasts.
        - min_unmeasured_jump 0.25: the same of underflow that was below max_lost_rate at early_steps sampled steps or more and is
          beyond this from one to the next, to the end of the run: a warning, as zeros before the cast may be counted. No
          published basis; numerics.md, 4 acts above 5 %.
        - early_steps 4: sampled steps that show it, all of the run's, where none is after the warm-up. No published basis.
        - max_unmeasured_headroom 8: amax over what the scale holds, for as long, where neither an error nor clipped elements
          were recorded: the largest values are cut to an eighth. A delayed scale lags behind by the growth of one step.
        - max_unmeasured_weight_headroom 2: the same of a weight, which does not double at each of so many steps.
        - max_cut_deviation 0.25, max_cut_db 2, min_cut_steps 3, max_binade_share 0.6: of values-cut-off, distance of the lost
          gain from its closed form, relative, and of the SQNR from its own; sampled steps; and energy in one binade, beyond
          which equal values may round one way. No published basis.
        - max_unexplained_rate 0.01, max_lost_rate 0.05: of zeros-differ, share of the elements that are zero beyond those, a
          warning and an error; numerics.md, 4 (warn and act). The bound is exact for rounding to nearest, whatever the scales of
          blocks; not judged are stochastic rounding, a Hadamard transform and formats of less than 8 bits.
        - max_leaf_rate 0.16: the same of wgrad's grad_output, beyond the zeros that dgrad's cast of it has, of which it may be
          made: what Ling 2.0 saw without harm (numerics.md, 4). It is a warning: wgrad is a leaf.
        - max_result_db 6, min_exact_db 30, min_far_steps 2: of unrecorded-differs, how far below that a result lies, a factor of
          4 for tokens that are large in both operands, which the closed form takes as independent; SQNR against the exact
          product of what the GEMM read, below which the GEMM is at fault; sampled steps. No published basis for 6 and 30.
        - max_amax_floor 1e-12: a tensor below the amax of its scales is information where that is no larger: the amax eps
          of torchao, and what LoongForge recommends (numerics.md, 2). Gradients behind a gate that starts at zero are
          1e-18 at first, and an optimizer's own eps (Adam 1e-8) makes nothing of them.
        - min_of_nothing 1e-30: of data-of-nothing, the largest element that counts: far above FP32's smallest normal value
          (1.2e-38), so that a tensor that was flushed to zero once is none.
        - max_unrelated 0.1: cosine of data and tensor below which no positive scale explains values beyond it, as the message
          says: values that all clip keep E|x| over the RMS, 0.8 of Gaussian data and 0.3 where a tenth of the elements has
          all of the energy (closed form). The same of a tensor of another size, beyond max_foreign_ratio.
        - max_unit_gain 2, min_pair_cosine 0.999, max_pair_error 0.15, min_outside_cosine 0.5, min_far_cosine 0.1, far_gain 16,
          min_result_cosine 0.9, min_compensated 4: by which a scale is applied outside the GEMM or on the other operand's side;
          as in F113, which says where they come from.
        - What follows chooses among the causes in the message, and decides no finding.
        - min_zero_rate 0.9995: share of nonzero elements that are zero, from which on all are (as percentages are written).
        - max_inverse_headroom 0.125: 2^-3, share of the range below which the scale is another's. A scale of the data's own
          uses half of the range or more; two binades are left for a margin. No published basis.
        - min_clipped_rate 0.01, min_scale_headroom 1.25: share of clipped elements, and amax over what the scale holds, from
          which on the scale is at fault. numerics.md, 4 (act beyond 1 % under delayed scaling); as in F113.
        - min_flushed_rate 0.01, min_flushed_share 0.5, max_flushed_share 3: share of zeros, and the squared error over it, where
          they are elements like the others: 1 in closed form for zeros in random places, while what underflows is far
          smaller than the rest. No published basis for the width.
        - max_headroom_error 0.001: distance of headroom from 1 at which a tensor fills its format: 1e-6 under FP32 scales.
        - min_cut_gain 0.03, min_cut_share 0.0009765625, max_cut_share 0.9: gain that a conversion which stops short takes, or one
          towards zero (0.965 in E4M3), and the code at which it stops, over the largest. No published basis.
        - max_foreign_ratio 16: norm over the tensor's, or its inverse, of another tensor; as max_resized of F119.
        - max_placed_cosine 0.3, max_placed_ratio 2: cosine and norm ratio of values in wrong places or of another tensor of
          this size. The cosine of two independent tensors of 256 elements is below 0.19 at three deviations (3 / sqrt(n)).
        - min_cosine 0.9, max_size_error 0.05, max_noise_gain_error 0.06: cosine from which on values are the tensor's with
          noise, and how far norm ratio and gain are then from 1: random signs of a share s leave 1 - 2 s at the same
          norm; equal values round by up to 1/17 in E4M3.
        - min_single_error 0.5, min_single_peak 6: of such values, largest error of an element over the range of the largest
          scale, and over the RMS of all errors, from which on it is a few elements that are wrong: noise of every element
          has a peak of 5.3 in a million and 6 in 40 million (closed form, Gaussian). No published basis for 0.5.
        - max_joined 8, max_joined_error 0.1: tensors that a row joins of which some are another's, and how near norm and cosine
          lie to those of a share; as in F119, which says where they come from.
        - min_factor_cosine 0.999: cosine that rounding leaves, numerics.md, 4 (warn below 0.999).
        - Seen in TransformerEngine #3281 and #3342, vllm #36297, sglang #28418.
    """

    code = "F128"
    name = "operand-differs"
    cure = (
        "dump this operand (watch(dump=...)) and compare it with fp8debug.measure() of its tensor; repeat the step with another"
        " backend; else BF16 for this GEMM"
    )
    only_unexplained = True

    margin_db: float = limits.FLOOR_MARGIN_DB
    max_element_error: float = 1.1
    max_directed_error: float = 2.1
    max_headroom: float = 1.002
    min_gain_error: float = 0.015
    delayed_sqnr_db: float = limits.DELAYED_SQNR_DB
    delayed_steps: int = 2
    warmup: int = 8
    max_unmeasured_underflow: float = limits.MAX_UNDERFLOW_UNMEASURED
    min_unmeasured_jump: float = 0.25
    early_steps: int = 4
    max_unmeasured_headroom: float = 8.0
    max_unmeasured_weight_headroom: float = 2.0
    max_amax_floor: float = 1e-12
    min_of_nothing: float = 1e-30
    max_unrelated: float = 0.1
    min_zero_rate: float = 0.9995
    max_inverse_headroom: float = 2.0**-3
    min_clipped_rate: float = 0.01
    min_scale_headroom: float = 1.25
    min_flushed_rate: float = 0.01
    min_flushed_share: float = 0.5
    max_flushed_share: float = 3.0
    max_headroom_error: float = 0.001
    min_cosine: float = 0.9
    min_cut_gain: float = 0.03
    min_cut_share: float = 2.0**-10
    max_cut_share: float = 0.9
    max_foreign_ratio: float = 16.0
    max_placed_cosine: float = 0.3
    max_placed_ratio: float = 2.0
    max_size_error: float = 0.05
    min_factor_cosine: float = 0.999
    max_noise_gain_error: float = 0.06
    min_single_error: float = 0.5
    min_single_peak: float = 6.0
    max_cut_deviation: float = 0.25
    max_cut_db: float = 2.0
    min_cut_steps: int = 3
    max_binade_share: float = 0.6
    max_unexplained_rate: float = 0.01
    max_lost_rate: float = 0.05
    max_leaf_rate: float = 0.16
    max_result_db: float = 6.0
    min_exact_db: float = 30.0
    min_far_steps: int = 2

    def needs(self, run: Run) -> str | None:
        """Return why the rule cannot judge: neither errors nor underflow nor scales were recorded."""
        if (run.has("sum_err2") and run.has("sum_x2")) or run.has("num_underflow") or run.has("headroom"):
            return None
        return "not recorded: sum_err2 and sum_x2, num_underflow or headroom"

    @property
    def _unmeasured(self) -> Look:
        limit = min(self.max_unmeasured_underflow, self.max_lost_rate)
        return look([Condition("underflow_rate", ">", limit), "sqnr_db IS NULL"], ["underflow_rate"])

    @property
    def _unscaled(self) -> Look:
        """Operands without an error whose scale cannot be that of their values: they clip, or become zero to the last."""
        least = " ".join(f"WHEN cast_name LIKE '{name} %' THEN {low}" for name, low in _FLUSHING.items())
        most = f"CASE tensor WHEN 'weight' THEN {self.max_unmeasured_weight_headroom} ELSE {self.max_unmeasured_headroom} END"
        beyond = f"headroom > {most} OR headroom > 0 AND headroom < CASE {least} END"
        return Look(f"{RUNNING} AND ({beyond}) AND sqnr_db IS NULL AND overflow_rate IS NULL", f"({beyond})", KEYS, ("headroom",))

    @property
    def _look(self) -> Look:
        return look([Condition("sqnr_db", "<", HIGHEST_FLOOR_DB)], _COLUMNS)

    def looks(self) -> Iterable[Look]:
        """Return the operands below the highest floor of any cast, those that underflow where no error was recorded, and results
        that no cast explains."""
        yield self._look
        yield self._unmeasured
        yield self._unscaled
        yield self._elements
        yield self._cut_off
        yield self._zeros
        yield self._nothing
        yield self._results

    @property
    def _results(self) -> Look:
        return results_look(HIGHEST_FLOOR_DB - self.max_result_db)

    @property
    def _nothing(self) -> Look:
        is_something = f"sum_x2 = 0 AND sum_err2 > 0 AND max_abs_err > {self.min_of_nothing}"
        return Look(f"{RUNNING} AND {is_something}", is_something, KEYS, ("max_abs_err", "sum_y2", "numel"), ("sum_x2 <= 0",))

    @property
    def _zeros(self) -> Look:
        conditions: Conditions = [
            Condition("underflow_rate", ">", self.max_unexplained_rate),
            f"(NOT {_IS_LEAF} OR underflow_rate > {self.max_leaf_rate})",
            Keys("cast_name NOT LIKE '%stochastic%' AND cast_name NOT LIKE '%hadamard%'"),
            Keys(f"NOT {IS_BELOW_8_BITS}"),
            "NOT (scale_inv_min = 1 AND scale_inv_max = 1)",
        ]
        columns = ["underflow_rate", "num_underflow", "numel", "num_zero", "scale_inv_max", "log2_hist", "gain"]
        return look(conditions, columns)

    @property
    def _elements(self) -> Look:
        beyond = f"{_ELEMENT_ERROR} > {self.max_element_error}"
        holds_all = f"coalesce(headroom, 1) < {self.max_headroom}"
        # The rank with the largest error is beyond under its own scale, which is at most the largest.
        columns = (f"{_ELEMENT_ERROR} AS element_error", "sqnr_db", *SCALE_COLUMNS)
        rows = f"{RUNNING} AND sum_x2 > 0 AND {_OF_ELEMENTS} AND {holds_all} AND {beyond}"
        return Look(rows, beyond, f"{KEYS} AND {_NEAREST}", columns)

    @property
    def _cut_off(self) -> Look:
        loss, width, most = f"(1 - gain) / ({_CUT_GAIN} * {_STEP})", self.max_cut_deviation, 10 ** (self.max_cut_db / 10)
        error = f"pow(10, -sqnr_db / 10) / ({_CUT_NMSE} * pow({_STEP}, 2))"
        is_cut = f"{loss} BETWEEN {1 - width} AND {1 + width} AND {error} BETWEEN {1 / most} AND {most}"
        rows = f"{RUNNING} AND sum_x2 > 0 AND {_OF_ELEMENTS} AND {is_cut}"
        loses = f"sum_x2 > 0 AND sum_x2 - sum_xy >= {(1 - width) * _CUT_GAIN} * {_STEP} * sum_x2"  # one rank at least as much
        return Look(rows, loses, f"{KEYS} AND {_NEAREST}", ("gain", "sqnr_db", "log2_hist", *SCALE_COLUMNS))

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands that are not their tensor."""
        found = traces(run, self._look)
        is_elsewhere = scaled_elsewhere(run, found, self)
        of_history = operands_of_history(run, self) if found else frozenset()
        named: set[tuple[str, str, str]] = set()
        for whole in found:
            cast = whole.cast
            if cast is None:
                continue
            is_current = cast.scaling == "current"
            floor = limits.operand_floor_db(cast, self.margin_db, self.delayed_sqnr_db)
            trace = whole.where(lambda row, cast=cast, floor=floor: row["sqnr_db"] < self._floor_of(cast, row, floor))  # type: ignore[misc]  # bound now
            trace = trace and trace.where(lambda row, site=trace: not is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            if trace is not None and is_current and self._site(trace) in of_history:
                fitting = trace.where(lambda row: (row["headroom"] or 0.0) <= 1)  # a scale of a history clips for a step
                trace = fitting or (trace if trace.lasting(self.delayed_steps, self.warmup) else None)
            if trace is not None and (is_current or trace.lasting(self.delayed_steps, self.warmup)):
                named.add((trace.module, trace.gemm, trace.tensor))
                finding = self._finding(trace, self._floor_of(cast, trace.least("sqnr_db"), floor), is_current)
                yield _below_floor(finding, trace) if self._is_below_amax_floor(trace) else finding
        told = {(trace.module, trace.gemm, trace.tensor) for trace in found}
        for trace in self._rounded_otherwise(run, self._elements, told, is_elsewhere):
            named.add((trace.module, trace.gemm, trace.tensor))
            yield self._of_elements(trace)
        for trace in self._rounded_otherwise(run, self._cut_off, named, is_elsewhere):
            yield from self._of_cut_off(trace)
        for whole in traces(run, self._zeros):
            trace = self._beyond_explained(run, whole)
            if trace is not None and (trace.module, trace.gemm, trace.tensor) not in named:
                yield self._of_zeros(trace)
        for trace in traces(run, self._nothing):
            yield self._of_nothing(trace)
        yield from self._without_rows(run)
        yield from self._without_errors(run)

    @staticmethod
    def _rounded_otherwise(
        run: Run, chosen: Look, told: Collection[tuple[str, str, str]], is_elsewhere: Callable[[Trace, dict[str, Any]], bool]
    ) -> Iterable[Trace]:
        """Return the traces of a look whose scale is the GEMM's own, but for those that were told."""
        for whole in traces(run, chosen):
            trace = whole.where(lambda row, site=whole: not is_elsewhere(site, row))  # type: ignore[misc]  # bound now
            if trace is not None and (trace.module, trace.gemm, trace.tensor) not in told:
                yield trace

    def _of_nothing(self, trace: Trace) -> Finding:
        row = trace.worst("max_abs_err")
        message = (
            f"the {trace.gemm} {trace.tensor} is zero at step {row['step']} ({len(trace.rows)} of {len(trace.sampled)} sampled"
            f" steps) and its FP8 data are not (RMS {math.sqrt(row['sum_y2'] / row['numel']):.2g}): the cast wrote nothing, or"
            " the GEMM reads another tensor's data or older ones"
        )
        found = trace.finding(self, Severity.WARNING, message, value=row["max_abs_err"], threshold=self.min_of_nothing)
        return replace(found, name="data-of-nothing")

    @staticmethod
    def _site(trace: Trace) -> Operand:
        return trace.module, trace.gemm, trace.tensor, trace.cast_name

    @staticmethod
    def _unexplained(cast: Cast | None, row: dict[str, Any]) -> float:
        """Return the share of elements that are zero beyond those that the cast can make so; 0 where that is not known.

        A scale_inv that is not the one of the cast, as the gain shows, explains nothing: it may be the product of both operands'.
        """
        histogram = row["log2_hist"]
        if row["gain"] is not None and abs(row["gain"] - 1) > limits.gain_limit(cast):
            return 0.0
        if cast is None or not histogram or not row["scale_inv_max"] or sum(histogram) + (row["num_zero"] or 0) != row["numel"]:
            return 0.0
        most = most_underflow(FORMATS[cast.format], histogram, row["scale_inv_max"])
        return float((row["num_underflow"] - most) / row["numel"])

    def _beyond_explained(self, run: Run, whole: Trace) -> Trace | None:
        """Return the rows with more zeros than their cast can make, and than dgrad's cast left of what wgrad reads."""
        is_leaf = (whole.gemm, whole.tensor) == _LEAF
        earlier = _zeros_of_dgrad(run, whole.module) if is_leaf else {}
        limit = self.max_leaf_rate if is_leaf else self.max_unexplained_rate
        return whole.where(lambda row: self._unexplained(whole.cast, row) - earlier.get(row["step"], 0.0) > limit)

    def _of_zeros(self, trace: Trace) -> Finding:
        row = max(trace.rows, key=lambda row: self._unexplained(trace.cast, row))
        more = self._unexplained(trace.cast, row)
        message = (
            f"{percent(row['underflow_rate'])} of the {trace.gemm} {trace.tensor} is zero after the cast at step {row['step']}"
            f" ({len(trace.rows)} sampled steps), where its magnitudes and its largest scale explain at most"
            f" {percent(max(row['underflow_rate'] - more, 0.0))}: rows or blocks of small values were never written, or were"
            " masked, or the kernel makes zeros of subnormal values"
        )
        is_error = more > self.max_lost_rate and (trace.gemm, trace.tensor) != _LEAF
        severity, limit = (Severity.ERROR, self.max_lost_rate) if is_error else (Severity.WARNING, self.max_unexplained_rate)
        return replace(trace.finding(self, severity, message, value=more, threshold=limit), name="zeros-differ")

    def _floor_of(self, cast: Cast, row: dict[str, Any], least: float) -> float:
        """Return the lowest SQNR of a correct cast: of any tensor, or below 8 bits under current scaling of these magnitudes."""
        if cast.scaling != "current" or FORMATS[cast.format].bits >= 8:
            return least
        known = (row["amax"], row["scale_inv_max"], row["sum_x2"])
        if None in known:
            return least
        return max(least, tensor_floor_db(cast, row["log2_hist"], *known) - self.margin_db)

    def _without_rows(self, run: Run) -> Iterable[Finding]:
        """Return the operands without a row whose GEMM's result is too far from its shadow, at two sampled steps or more."""
        found: dict[tuple[str, str], list[FarResult]] = {}
        rows = [row for trace in traces(run, self._results) for row in trace.rows]
        for far in far_results(run, rows, self.max_result_db, self.min_exact_db):
            found.setdefault((far.row["module"], far.row["gemm"]), []).append(far)
        for (module, gemm), all_far in found.items():
            if len(all_far) < self.min_far_steps:
                continue
            far, sampled = min(all_far, key=lambda far: far.row["sqnr_db"]), run.sampled_steps_of(module)
            row, steps = far.row, [one.row["step"] for one in all_far]
            message = (
                f"the {gemm} {row['tensor']} is {row['sqnr_db']:.1f} dB from its shadow at step {row['step']} ({len(all_far)} of"
                f" {len(sampled)} sampled steps), where both casts give at least {far.floor_db:.1f} dB, and the GEMM multiplies"
                f" what it reads: its {far.operand}, of which this cast has no row, is not its tensor"
            )
            yield Finding(code=self.code, name="unrecorded-differs", severity=Severity.ERROR, module=module, gemm=gemm,
                          tensor=far.operand, steps=(steps[0], steps[-1]), ranks=tuple(row["ranks"]), value=row["sqnr_db"],
                          threshold=far.floor_db - self.max_result_db, message=message, cure=_UNRECORDED,
                          call_index=row["call_index"] or 0)  # fmt: skip

    def _without_errors(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose error was not recorded, by their underflow and their scale."""
        for whole in traces(run, self._unmeasured):
            trace = whole.where(above("underflow_rate", self.max_unmeasured_underflow))
            severity, steps = (None, "") if trace is None else self._lasts(trace)
            if severity is None and self._jumps(whole):
                yield self._jumped(whole)
            elif severity is not None and trace is not None:
                row = trace.worst("underflow_rate")
                message = (
                    f"{percent(row['underflow_rate'])} of the {trace.gemm} {trace.tensor} is zero after the cast at step"
                    f" {row['step']} ({steps}); its SQNR was not recorded"
                )
                limit = self.max_unmeasured_underflow
                yield trace.finding(self, severity, message, value=row["underflow_rate"], threshold=limit)
        for trace in traces(run, self._unscaled):
            severity, steps = self._lasts(trace)
            if severity is not None:
                row = max(trace.rows, key=lambda row: abs(math.log2(row["headroom"])))
                is_weight = trace.tensor == "weight"
                limit = self.max_unmeasured_weight_headroom if is_weight else self.max_unmeasured_headroom
                what = "clip: its amax is {} times what its scale holds"
                if row["headroom"] < 1:
                    what, limit = "become zero: its scale is made for an amax {} times its own", _flushing_headroom(trace)
                size = times(max(row["headroom"], 1 / row["headroom"]))
                message = (
                    f"values of the {trace.gemm} {trace.tensor} {what.format(size)} at step {row['step']} ({steps}); how many was"
                    " not recorded"
                )
                yield trace.finding(self, severity, message, value=row["headroom"], threshold=limit)

    def _jumps(self, trace: Trace) -> bool:
        """Return whether the share of zeros rose at once, beyond what counts, after as many sampled steps, and stays there.

        Zeros that are counted along with what underflows, as those of padding or of a ReLU, are there from the start.
        """
        later = [step for step in trace.sampled if step >= trace.rows[0]["step"]]
        before = len(trace.sampled) - len(later)
        is_far = all(row["underflow_rate"] > self.min_unmeasured_jump for row in trace.rows)
        return is_far and len(trace.rows) == len(later) >= self.delayed_steps and before >= self.early_steps

    def _jumped(self, trace: Trace) -> Finding:
        row = trace.worst("underflow_rate")
        message = (
            f"{percent(row['underflow_rate'])} of the {trace.gemm} {trace.tensor} is zero after the cast at step {row['step']},"
            f" and less than {percent(self.max_lost_rate)} at every sampled step before step {trace.rows[0]['step']}: its scale"
            " was made for larger values, or its tensor became zero (more padding); its SQNR was not recorded"
        )
        limit = self.min_unmeasured_jump
        return trace.finding(self, Severity.WARNING, message, value=row["underflow_rate"], threshold=limit)

    def _lasts(self, trace: Trace) -> tuple[Severity | None, str]:
        """Return how much statistics without an error count, None for not at all, and at which steps they are bad.

        They count after the warm-up, or at all steps of a run that has no more.
        """
        first = self.warmup + (0 if trace.start < self.warmup else trace.start - self.warmup)
        settled = [step for step in trace.sampled if step >= first]
        bad = {row["step"] for row in trace.rows}
        steps = f"{len(trace.rows)} of {len(trace.sampled)} sampled steps"
        if not settled:
            is_bad = len(bad) == len(trace.sampled) >= self.early_steps
        else:
            is_bad = trace.lasting(min(self.delayed_steps, len(settled)), first - trace.start)
        if is_bad:
            return Severity.ERROR, steps
        if bad == {trace.sampled[-1]} and len(settled) > self.delayed_steps:
            return Severity.WARNING, f"the last of {len(trace.sampled)} sampled steps alone: log more to see whether it lasts"
        return None, steps

    def _of_elements(self, trace: Trace) -> Finding:
        row = trace.worst("element_error")
        gain, more, cure = row["gain"], row["element_error"], _ROUNDING
        if more > self.max_directed_error:
            cure = _OF_PARTS
            cause = (
                "no rounding in any direction moves it so far: a part of the tensor has another scale than it was cast under, or"
                f" single elements are wrong (its gain is {gain:.3f})"
            )
        elif gain < 1 - self.min_gain_error:
            cause = (
                f"its gain is {gain:.3f}: the cast rounds towards zero (it cuts mantissas off), which makes every value smaller"
            )
        elif gain > 1 + self.min_gain_error:
            cause = f"its gain is {gain:.3f}: the cast rounds away from zero: every value is larger"
        else:
            cause = "single elements are wrong, or are rounded to more than half a step (at random, or twice)"
        message = (
            f"an element of the {trace.gemm} {trace.tensor} is off by {more:.2f} times what rounding to nearest can do at step"
            f" {row['step']} ({len(trace.rows)} sampled steps), at {row['sqnr_db']:.1f} dB: {cause}"
        )
        finding = trace.finding(self, Severity.WARNING, message, value=more, threshold=self.max_element_error)
        return replace(finding, name="element-differs", cure=cure)

    def _is_spread(self, row: dict[str, Any]) -> bool:
        """Return whether no binade holds so much of a tensor's energy that equal values may round one way."""
        energy = [count * 4.0**place for place, count in enumerate(row["log2_hist"] or ())]
        return bool(energy) and max(energy) <= self.max_binade_share * sum(energy)

    def _of_cut_off(self, whole: Trace) -> Iterable[Finding]:
        trace = whole.where(self._is_spread)
        since = [] if trace is None else [step for step in trace.sampled if step >= trace.rows[0]["step"]]
        if trace is None or len(trace.rows) < max(self.min_cut_steps, len(since)):
            return
        row = trace.rows[0]
        message = (
            f"the {trace.gemm} {trace.tensor} has gain {row['gain']:.3f} at {row['sqnr_db']:.1f} dB, and the like at all"
            f" {len(trace.rows)} sampled steps since step {row['step']}: the cast cuts mantissas off (it rounds towards zero), as"
            " the upper byte of FP16 does: every value is smaller, and so is the result"
        )
        finding = trace.finding(self, Severity.WARNING, message, value=row["gain"], threshold=1.0)
        yield replace(finding, name="values-cut-off", cure=_ROUNDING)

    def _is_below_amax_floor(self, trace: Trace) -> bool:
        """Return whether every scale is that of an amax floor as stacks have it, above a tensor of next to nothing."""
        if trace.cast is None:
            return False
        limit = self.max_amax_floor * (1 + _FLOOR_ROUNDING) / FORMATS[trace.cast.format].max
        return all(row["headroom"] is not None and row["headroom"] < 1 and row["scale_inv_max"] <= limit for row in trace.rows)

    def _finding(self, trace: Trace, floor: float, is_current: bool) -> Finding:
        row = trace.least("sqnr_db")
        since = sum(step >= trace.rows[0]["step"] for step in trace.sampled)
        largest = FORMATS[trace.cast.format].max if trace.cast is not None else 0.0
        bound = f"this cast gives at least {floor:.1f} dB" if is_current else f"healthy operands have {floor:.1f} dB or more"
        message = (
            f"the {trace.gemm} {trace.tensor} is {row['sqnr_db']:.1f} dB from its tensor at step {row['step']}"
            f" ({len(trace.rows)} of {since} sampled steps), where {bound}:"
            f" {candidates(row, self, _flushing_headroom(trace), largest)}"
        )
        return trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=floor, unit="dB")


def _below_floor(finding: Finding, trace: Trace) -> Finding:
    """Return the information that a tensor of next to nothing lies below the amax floor of its scales."""
    row = trace.least("sqnr_db")
    floor = FORMATS[trace.cast.format].max * row["scale_inv_max"] if trace.cast is not None else 0.0
    message = (
        f"the {trace.gemm} {trace.tensor} is {row['sqnr_db']:.1f} dB from its tensor at step {row['step']} ({len(trace.rows)}"
        f" sampled steps): its amax of {row['headroom'] * floor:.2g} is below the amax floor of {floor:.2g} that its scales show"
    )
    return replace(finding, severity=Severity.INFO, message=message)


def _flushing_headroom(trace: Trace) -> float:
    """Return the headroom below which its cast leaves nothing."""
    return _FLUSHING[trace.cast.format] if trace.cast is not None else 0.0


def _beyond_its_scale(row: dict[str, Any], over: float, headroom: float, limits: OperandDiffers) -> str | None:
    """Return what values beyond the scale say, by the direction of the data; None where there are none."""
    if over <= limits.min_clipped_rate and headroom <= limits.min_scale_headroom:
        return None
    beyond = f"values lie {times(headroom)} times beyond what the scale holds"
    cosine = row["cosine"] or 0.0
    if headroom > limits.min_scale_headroom and cosine < limits.max_unrelated:
        return (
            f"{beyond}, and the data have another direction than the tensor, which no scale gives them (cosine {cosine:.2g}):"
            " data and scale are another tensor's (a buffer that was overwritten, a wrong pointer)"
        )
    return f"{beyond}, so that the scale is not the one of the data"


def candidates(row: dict[str, Any], limits: OperandDiffers, flushing_headroom: float = 0.0, largest: float = 0.0) -> str:
    """Return the causes that the statistics of an operand leave, with the numbers that speak for them.

    Args:
        row: of ``sites``.
        limits: the rule, with its thresholds.
        flushing_headroom: headroom below which its cast leaves no value.
        largest: largest value of its format; 0 where that is not known.
    """
    flushed, over = row["underflow_nonzero_rate"] or 0.0, row["overflow_rate"] or 0.0
    headroom = 1.0 if row["headroom"] is None else row["headroom"]
    if row["num_eps_blocks"]:
        return (
            f"{row['num_eps_blocks']} of {row['num_blocks']} blocks have an amax below the amax eps, which sets their scale:"
            " lower the eps"
        )
    if flushed >= limits.min_zero_rate and 0 < headroom < flushing_headroom:
        return (
            f"every element is zero, as under scales made for an amax {times(1 / headroom)} times its own: the scale was never"
            " set or updated, or an amax floor lies far above the tensor"
        )
    if flushed >= limits.min_zero_rate:
        return "every element is zero, so that the cast returned zeros or its output was never written"
    if headroom < limits.max_inverse_headroom:
        return (
            f"its values use {percent(headroom)} of the format's range, so that the scale is not the one of the data (an"
            " inverse, a static or a stale scale, or an amax floor far above the tensor)"
        )
    if (other := _of_another(row, limits)) is not None:
        return other
    if (beyond := _beyond_its_scale(row, over, headroom, limits)) is not None:
        return beyond
    lost = (row["nmse"] or 0.0) / flushed if flushed > limits.min_flushed_rate else 0.0
    if limits.min_flushed_share < lost < limits.max_flushed_share:
        return (
            f"{percent(flushed)} of the nonzero elements are zero, large ones among them: rows or blocks were never written, or"
            " were masked"
        )
    is_full = abs(headroom - 1) < limits.max_headroom_error
    limit = _limit_of_codes(row, largest, limits) if is_full and flushed <= limits.min_flushed_rate else None
    if limit is not None:
        return (
            f"no value grew, and its largest is off by as much as a conversion that stops at {limit:.3g} in place of"
            f" {largest:.6g} leaves: it saturates too early, as for another format"
        )
    is_along = row["gain"] is not None and (row["cosine"] or 0.0) >= limits.min_cosine
    if is_full and is_along and abs(row["gain"] - 1) > limits.min_cut_gain:
        return (
            f"its largest value is the format's largest under its own scale, and gain {row['gain']:.3g} at cosine"
            f" {row['cosine']:.3f}: the conversion to codes changes values (it saturates too early, rounds away or towards zero,"
            " treats some exponents otherwise), or blocks have scales of others that are no smaller"
        )
    return _single_elements(row, largest, limits) or _by_direction(row["cosine"], row["gain"], row["norm_ratio"], limits)


def _single_elements(row: dict[str, Any], largest: float, limits: OperandDiffers) -> str | None:
    """Return that few elements are off by a large part of the range, and the rest is right; None where noise is everywhere.

    Noise of variance s^2 in n elements has a largest error of s sqrt(2 log n), five times its RMS in a million.
    """
    gain, norm_ratio, cosine = row["gain"], row["norm_ratio"], row["cosine"] or 0.0
    known = (row["max_abs_err"], row["scale_inv_max"], row["sum_x2"], row["nmse"], row["numel"], gain, norm_ratio)
    if not largest or any(not value for value in known):
        return None
    rms = math.sqrt(row["nmse"] * row["sum_x2"] / row["numel"])
    share, peak = row["max_abs_err"] / (largest * row["scale_inv_max"]), row["max_abs_err"] / rms
    is_right = cosine >= limits.min_cosine and abs(gain - 1) < limits.max_noise_gain_error and norm_ratio > 1
    if not is_right or share < limits.min_single_error or peak < limits.min_single_peak:
        return None
    return (
        f"cosine {cosine:.3f}, gain {gain:.3g}, norm ratio {norm_ratio:.3g}: a few elements are off by {percent(share)} of the"
        f" range, {times(peak)} times the RMS of all errors, and the rest is right: a tile that something else wrote to, that was"
        " never written, or a race in the cast"
    )


def _of_another(row: dict[str, Any], limits: OperandDiffers) -> str | None:
    """Return the causes where values are those of another tensor, in all calls that a row holds or in some; else None."""
    numbers = f"cosine {row['cosine'] or 0.0:.3f}, norm ratio {row['norm_ratio'] or 0.0:.3g}"
    if _is_foreign(row, limits):
        return (
            f"{numbers}: neither the direction nor the size of the tensor: data and scale of another tensor (a buffer that"
            " something else wrote to, an older version)"
        )
    if (right := num_right(row, limits)) is not None:
        return (
            f"{numbers} over {row['num_tensors']} tensors (microbatches, calls, ranks), as where {row['num_tensors'] - right} of"
            " them were read as another tensor or an older one (that of the call before, a buffer that was read too early); wrong"
            " signs or places in a part of each leave the same numbers"
        )
    if not _are_placed(row["cosine"], row["norm_ratio"], limits):
        return None
    return _by_direction(row["cosine"], row["gain"], row["norm_ratio"], limits)


def _is_foreign(row: dict[str, Any], limits: OperandDiffers) -> bool:
    """Return whether the values have neither the size of the tensor's nor a direction in common with them."""
    cosine, norm_ratio = row["cosine"], row["norm_ratio"]
    if norm_ratio is None or 1 / limits.max_foreign_ratio < norm_ratio < limits.max_foreign_ratio:
        return False
    return bool(abs(cosine or 0.0) < limits.max_unrelated)


def _are_placed(cosine: float | None, norm_ratio: float | None, limits: OperandDiffers) -> bool:
    """Return whether the values have the size of the tensor's and no direction in common with them."""
    if cosine is None or norm_ratio is None:
        return False
    has_size = 1 / limits.max_placed_ratio < norm_ratio < limits.max_placed_ratio
    return has_size and abs(cosine) < limits.max_placed_cosine


def _limit_of_codes(row: dict[str, Any], largest: float, limits: OperandDiffers) -> float | None:
    """Return the code at which a conversion stops short of the format's largest; None where it does not.

    Under one scale that its amax fills, values that are cut off at L have sum_xy >= sum_y2, as no element grows, and the largest
    error is that of the amax: L = max - max_abs_err / scale_inv.
    """
    gain, norm_ratio, scale = row["gain"], row["norm_ratio"], row["scale_inv_max"]
    if gain is None or norm_ratio is None or row["max_abs_err"] is None or not scale or scale != row["scale_inv_min"]:
        return None
    limit = largest - float(row["max_abs_err"]) / float(scale)
    is_cut = gain >= norm_ratio**2 and 1 - gain > limits.min_cut_gain
    return limit if is_cut and limits.min_cut_share < limit / largest < limits.max_cut_share else None


def _by_direction(cosine: float | None, gain: float | None, norm_ratio: float | None, limits: OperandDiffers) -> str:
    """Return the causes that direction and size of what was read leave, where range and zeros say nothing."""
    if cosine is None or gain is None or norm_ratio is None:
        return "the cause is unknown"
    if cosine >= limits.min_factor_cosine:
        return f"it is {gain:.3g} times its tensor at cosine {cosine:.5f}, so that one factor is missing or applied twice"
    numbers = f"cosine {cosine:.3f}, gain {gain:.3g}, norm ratio {norm_ratio:.3g}"
    has_size = cosine < limits.min_cosine and abs(norm_ratio - 1) < limits.max_size_error
    if has_size or _are_placed(cosine, norm_ratio, limits):
        return (
            f"{numbers}: the values have the right size, but wrong signs or places (sign bit, data that are permuted,"
            " transposed or in another order, another tensor, an older version)"
        )
    if cosine >= limits.min_cosine and abs(gain - 1) < limits.max_noise_gain_error:
        return (
            f"{numbers}: the right values with noise (another format's rounding, a race, random rounding), block factors near 1,"
            " or another version of the tensor"
        )
    return f"{numbers}: one factor per block (scales of other blocks, or rounded after the cast) or values of another tensor"


def _zeros_of_dgrad(run: Run, module: str) -> dict[int, float]:
    """Return by step the share of a module's grad_output that dgrad's cast makes zero."""
    query = (
        "SELECT step, max(underflow_rate) AS rate FROM sites WHERE module = ? AND gemm = 'dgrad' AND tensor = 'grad_output'"
        " AND actual AND reference = 'operand' AND underflow_rate IS NOT NULL GROUP BY step"
    )
    return {row["step"]: row["rate"] for row in run.sql(query, [module]).to_pylist()}


RULES.add(OperandDiffers.code, OperandDiffers())
