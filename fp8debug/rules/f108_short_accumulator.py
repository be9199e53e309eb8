"""F108: a GEMM's result is far from the exact product of its own operands: a short accumulator, or another kernel fault."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import accumulator_floor_db, contracted_length
from fp8debug.rules.reading.conditions import FP8_PRODUCTS, Condition, Conditions, Look, look
from fp8debug.rules.reading.traces import Trace, percent, traces
from fp8debug.types import Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_COLUMNS = ("sqnr_db", "gain", "cosine", "norm_ratio", "bad_row_rate", "good_row_rate", "max_abs_err", "rms")
#: The cure where no accumulator explains the result.
_OF_KERNEL = "another kernel or backend for this GEMM; check which scales it reads, and in which layout; else BF16 for this GEMM"
#: The same where FP16 rounds the result.
_OF_FP16 = (
    "multiply the loss by a scale (loss scaling), so that gradients lie within FP16's range; or write this GEMM's result in BF16"
    " (its output's type, or the autocast's)"
)
#: Half of the distance of two values of FP16 below 2^-13: the largest error that rounding to them makes.
_FP16_ERROR = 2.0**-25
#: The same where there was nothing to sum.
_OF_NOTHING = (
    "zero the output buffer before the GEMM (torch.zeros, not torch.empty), or write zeros for a group without tokens; another"
    " kernel or backend; else BF16 for this GEMM"
)


@dataclass(frozen=True)
class ShortAccumulator(Rule):
    """A GEMM keeps its sums in too few bits, so that its result is not the product of its operands.

    What it detects
        The result of a GEMM in FP8 far from the exact GEMM of the same dequantized operands: the error is neither the cast's,
        which both share, nor the rounding of the result to BF16, which leaves 55 dB. It grows with the contracted dimension: K
        in fprop, N in dgrad, the tokens in wgrad. A gain below 1 tells that the operands have one sign and the loss adds up. A
        result farther off than 14 bits, the shortest accumulator in use, can lose over K products is reported as result-differs:
        the kernel, or what it was handed, is wrong (scales that it cuts, ignores or reads in another layout, rows that it never
        writes, an output buffer that something else writes to). A result that is right where it is not zero has a cosine that is
        its norm ratio, which the message says. result-of-nothing: the exact product is zero, as of an expert without tokens, and
        the result is not: no SQNR shows it, as there is no signal. result-below-fp16, a warning: the largest error is half of
        FP16's smallest spacing, so that a result in FP16 lies below its normal values, as of gradients without a loss scale.
        What fprop gives with a bias is not judged, of which rounding leaves a rest.

    Why it matters
        Hopper's FP8 tensor cores keep about 14 bits of a sum. Without promotion to FP32 every 128 elements, uniform
        operands lose 7 % at K = 4096 and 26 % at K = 16384 (docs/accumulation.md), and no statistic of an operand shows
        it. DeepSeek-V3 promotes for this reason; DeepGEMM #37 and #50 discuss it.

    Example
        blocks.0.mlp.down, fprop output, tensorwise with fast_accum, K = 14336: 22 dB from the exact product, gain 0.92.

    Cure
        For result-differs another kernel or backend, and a look at which scales it reads in which layout. Else switch fast
        accumulation off (fast_accum of the Recipe; use_fast_accum, use_split_accumulator=True elsewhere), or use blockwise
        scales, which have to promote; else BF16 for this GEMM.

    Thresholds
        - warn_sqnr_db 45: SQNR of the result against the exact GEMM, in dB, below which it warns; numerics.md, 4.
        - max_sqnr_db 35: below which it is an error; numerics.md, 4.
        - min_steps 2: sampled steps that show it, and half of those since the first; one step of a result that
          cancels is no evidence. No published basis.
        - margin_db 3: how far below the closed-form bound of 14 bits, -20 log10(K * 2^-14), a result-differs lies. The bound
          itself is 10 dB below what uniform operands lose at K = 1024 (34 dB).
        - once_sqnr_db 10: SQNR below which a result-differs counts at a single sampled step; metrics/rows.py calls a row
          below it one without signal. Seen in sglang #39193, DeepGEMM #365.
        - min_lost_gain 0.001: share of its size that a result has to lose for the message to say so. No published basis.
        - The rest says which cause a result-differs names. min_factor_cosine 0.999: cosine from which on one factor is wrong;
          min_scaled_cosine 0.9: from which on scales are, and not the data; numerics.md, 4 (warn below 0.999), no published
          basis for 0.9.
        - max_projection_error 0.003: difference of cosine and norm ratio. A result that is right where it is not missing is a
          projection of the product: what is missing is orthogonal to it, so that both are equal (closed form; BF16 changes
          either by 1e-5). min_norm_ratio 0.05: below, there is next to nothing to compare. No published basis.
        - max_norm_ratio 16: norm of a result over that of the product beyond which parts of the sum lack a scale: scales of FP8
          lie below 1/16 in tensors whose amax is below 28.
        - min_mixed_rows 0.005, min_parted_rows 0.9: share of wrong rows and of right ones, and of both together, where a
          kernel left rows out. No published basis.
        - min_of_nothing 1e-30: of result-of-nothing, the largest element that counts. A product below FP32's smallest normal
          value (1.2e-38) may be zero for one and not for the other.
        - max_fp16_change 0.05: of result-below-fp16, relative distance of the largest error from 2^-25, at min_steps sampled
          steps, and all that are far from the product. Closed form: half of the distance of two FP16 values below 2^-13; of
          1,000 errors that are spread evenly below a limit, the largest is within 5 % of it but once in 10^22.
        - Seen in pytorch #172439 (result-of-nothing) and transformers #5651 (result-below-fp16).
    """

    code = "F108"
    name = "short-accumulator"
    columns = ("sum_err2", "sum_x2")
    cure = "fast_accum off (promotion to FP32 every 128 elements), or blockwise scales; else BF16 for this GEMM"

    warn_sqnr_db: float = 45.0
    max_sqnr_db: float = 35.0
    min_steps: int = 2
    margin_db: float = 3.0
    once_sqnr_db: float = 10.0
    min_lost_gain: float = 0.001
    min_factor_cosine: float = 0.999
    min_scaled_cosine: float = 0.9
    max_projection_error: float = 0.003
    min_norm_ratio: float = 0.05
    max_norm_ratio: float = 16.0
    min_mixed_rows: float = 0.005
    min_parted_rows: float = 0.9
    min_of_nothing: float = 1e-30
    max_fp16_change: float = 0.05

    @property
    def _look(self) -> Look:
        keys = "actual AND reference = 'exact'"
        conditions: Conditions = [Condition("sqnr_db", "<", self.warn_sqnr_db), "isfinite(sqnr_db)"]
        return look(conditions, _COLUMNS, rows=FP8_PRODUCTS, keys=keys)

    @property
    def _nothing(self) -> Look:
        is_something = f"sum_x2 = 0 AND sum_err2 > 0 AND max_abs_err > {self.min_of_nothing}"
        keys = "actual AND reference = 'exact'"
        return Look(
            f"{FP8_PRODUCTS} AND {is_something}", is_something, keys, ("max_abs_err", "sum_y2", "numel"), ("sum_x2 <= 0",)
        )

    def looks(self) -> Iterable[Look]:
        """Return the results far from the exact product, and those where it is zero."""
        yield self._look
        yield self._nothing

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the results that lie far from the exact product."""
        for trace in traces(run, self._look):
            if all(map(self._is_of_fp16, trace.rows)) and trace.lasting(self.min_steps):
                yield self._rounded(trace)
                continue
            length = contracted_length(run, trace.module, trace.gemm)
            floor = min(self.max_sqnr_db, accumulator_floor_db(length) - self.margin_db)
            wrong = trace.where(lambda row, floor=floor: row["sqnr_db"] < floor)  # type: ignore[misc]  # bound now
            lowest = min(row["sqnr_db"] for row in trace.rows)
            if wrong is not None and (wrong.lasting(self.min_steps) or lowest < self.once_sqnr_db):
                yield self._differing(wrong, floor, length)
            elif trace.lasting(self.min_steps):
                yield self._short(trace, length)
        has_bias = {module["fqn"] for module in run.modules if module.get("bias")}
        for trace in traces(run, self._nothing):
            if trace.gemm != Gemm.FPROP or trace.module not in has_bias:
                yield self._of_nothing(run, trace)

    def _is_of_fp16(self, row: dict[str, Any]) -> bool:
        """Return whether the largest error of a result is what rounding it to FP16's smallest spacing makes."""
        largest = row["max_abs_err"]
        return largest is not None and abs(largest - _FP16_ERROR) <= self.max_fp16_change * _FP16_ERROR

    def _rounded(self, trace: Trace) -> Finding:
        row = trace.least("sqnr_db")
        message = (
            f"the {trace.gemm} {trace.tensor} is {row['sqnr_db']:.1f} dB from the exact product of its own FP8 operands at step"
            f" {row['step']} ({len(trace.rows)} of {len(trace.sampled)} sampled steps), and the largest error is half of FP16's"
            f" smallest spacing, {_FP16_ERROR:.2g}: the result is rounded to FP16, below whose normal values it lies (RMS"
            f" {row['rms']:.2g})"
        )
        found = trace.finding(self, Severity.WARNING, message, value=row["sqnr_db"], threshold=self.warn_sqnr_db, unit="dB")
        return replace(found, name="result-below-fp16", cure=_OF_FP16)

    def _of_nothing(self, run: Run, trace: Trace) -> Finding:
        row = trace.worst("max_abs_err")
        query = (
            "SELECT 1 AS one FROM sites WHERE actual AND reference = 'operand' AND numel = 0 AND step = ? AND module = ?"
            " AND gemm = ? LIMIT 1"
        )
        is_empty = run.sql(query, [row["step"], trace.module, trace.gemm]).num_rows > 0
        why = "as the module got no tokens" if is_empty else "as an operand is zero"
        message = (
            f"the {trace.gemm} {trace.tensor} is not zero at step {row['step']} ({len(trace.rows)} of"
            f" {len(trace.sampled)} sampled steps; RMS {math.sqrt(row['sum_y2'] / row['numel']):.2g}), though the exact product"
            f" of its operands is, {why}: the kernel never wrote its output, which holds what the buffer held before"
        )
        found = trace.finding(self, Severity.ERROR, message, value=row["max_abs_err"], threshold=self.min_of_nothing)
        return replace(found, name="result-of-nothing", cure=_OF_NOTHING)

    def _differing(self, trace: Trace, floor: float, length: int | None) -> Finding:
        row = trace.least("sqnr_db")
        since = sum(step >= trace.rows[0]["step"] for step in trace.sampled)
        over = f" over {length} terms" if length else ""
        message = (
            f"the {trace.gemm} {trace.tensor} is {row['sqnr_db']:.1f} dB from the exact product of its own FP8 operands at step"
            f" {row['step']} ({len(trace.rows)} of {since} sampled steps), where the shortest accumulator gives at least"
            f" {floor:.0f} dB{over}: {self._candidates(row)}"
        )
        found = trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=floor, unit="dB")
        return replace(found, name="result-differs", cure=_OF_KERNEL)

    def _short(self, trace: Trace, length: int | None) -> Finding:
        row = trace.least("sqnr_db")
        sqnr, gain = float(row["sqnr_db"]), row["gain"]
        severity = Severity.ERROR if sqnr < self.max_sqnr_db else Severity.WARNING
        over = f" over {length} terms" if length else ""
        lost = f", {percent(1 - gain)} of its size lost" if gain is not None and 1 - gain > self.min_lost_gain else ""
        message = (
            f"the {trace.gemm} {trace.tensor} is {sqnr:.1f} dB from the exact product of its own FP8 operands{lost}: its sums"
            f"{over} keep too few bits (rounding to BF16 leaves 55 dB)"
        )
        limit = self.max_sqnr_db if severity is Severity.ERROR else self.warn_sqnr_db
        return trace.finding(self, severity, message, value=sqnr, threshold=limit, unit="dB")

    def _candidates(self, row: dict[str, Any]) -> str:
        """Return the causes that the statistics of a result leave, with the numbers that speak for them."""
        gain, cosine, norm_ratio = row["gain"], row["cosine"], row["norm_ratio"]
        bad, good = row.get("bad_row_rate") or 0.0, row.get("good_row_rate") or 0.0
        if gain is None or cosine is None or norm_ratio is None:
            return "the result holds nothing of the product"
        if min(bad, good) > self.min_mixed_rows and bad + good > self.min_parted_rows:
            return f"{percent(bad)} of its rows are wrong and {percent(good)} right: the kernel left rows unwritten or mixed them"
        if cosine >= self.min_factor_cosine:
            return f"gain {gain:.3g} at cosine {cosine:.5f}, so that the kernel applies a scale twice, not at all, or another one"
        if norm_ratio >= self.min_norm_ratio and abs(cosine - norm_ratio) < self.max_projection_error:
            return (
                f"{percent(1 - norm_ratio**2)} of the product's energy is missing and what is there is right (cosine"
                f" {cosine:.3f}, norm ratio {norm_ratio:.3f}): rows or columns that the kernel never wrote, or a part of the"
                " sum that it left out"
            )
        if cosine >= self.min_scaled_cosine:
            return (
                f"gain {gain:.3g} at cosine {cosine:.3f}, so that the kernel does not use the scales that it is given as they are"
                " (exponents alone, another block, another layout)"
            )
        if norm_ratio > self.max_norm_ratio:
            return (
                f"cosine {cosine:.3f}, norm ratio {norm_ratio:.3g}: a part of the sum lacks its scales (a block along the"
                " contracted dimension, or some rows), or the result is in an output buffer that something else wrote to"
            )
        if norm_ratio < self.min_norm_ratio:
            return f"norm ratio {norm_ratio:.2g}, so that the kernel wrote next to nothing"
        return f"cosine {cosine:.3f}, norm ratio {norm_ratio:.3g}: other data, or an output buffer that something else wrote to"


RULES.add(ShortAccumulator.code, ShortAccumulator())
