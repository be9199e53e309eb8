"""F111: an operand is declared FP8 and is too faithful to be in FP8 at all."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2
from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import IS_BELOW_8_BITS
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import RUNNING, Trace, traces
from fp8debug.types import OPERANDS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


_COLUMNS = ("sqnr_db", "range_log2", "log2_hist", "sum_err2", "sum_x2", "amax", "rms")
#: SQNR of Gaussian data in E4M3, closed form (numerics.md, 4).
_FP8_DB = 31.5
#: By operand: the GEMM of another Linear that made it, which of that one's features is 1, which are the operand's columns, and
#: which of the operand's own Linear they are.
_RANK_ONE = {
    "grad_output": ("dgrad", "out_features", "in_features", "out_features"),
    "input": ("fprop", "in_features", "out_features", "in_features"),
}


@dataclass(frozen=True)
class Fp8NotOn(Rule):
    """A GEMM is declared FP8, but its operands are too faithful to have been cast.

    What it detects
        An operand of a GEMM with an SQNR that no 8-bit format reaches, at half of the sampled steps or more. It is a
        warning where no other operand of the GEMM shows the error of FP8 at those steps, and information where one does:
        then FP8 is on, and the exact operand was either not cast, or held values of the FP8 grid before its cast (the
        output of a layer that quantizes it), which the statistics cannot tell apart. An outlier is kept exactly, being
        the amax of its block, and raises the SQNR of an FP8 tensor beyond any limit: so the error must also be too small
        for the smaller nine tenths of the elements. A tensor that FP8 holds exactly is no evidence, and is left out: few
        distinct magnitudes (one-hot inputs, weights one optimizer step after zero initialisation); powers of two; blocks
        with few nonzero elements, or with elements of one magnitude, each of which is its block's amax (grad_output of a
        layer with one output, or of a router that takes the softmax of its two best experts; a batch of one token in
        wgrad); a weight that lies on the FP8 grid already beside an input that does not; a tensor of rank one that a Linear
        with one output sends back, or one with one input sends on: each row is a multiple of that Linear's weight, which is
        FP8 already, so that the row's own scale brings the same values back. Its error is that of rounding the product, and
        not 0, as it is of an operand that was not cast; the GEMM's other operand shows the error of FP8.

    Why it matters
        A wrong flag or an unsupported dimension falls back to BF16 without a word. The run proves nothing about FP8
        and has none of its speed.

    Example
        blocks.2.mlp.down, fprop input: declared e4m3fn 1x128 current, but the operand equals its reference at 40 of 40
        sampled steps (E4M3 gives 31.5 dB, BF16 55.6 dB).

    Cure
        Check the flag, the dimensions (multiples of 16) and the device; fp8debug coverage RUN shows what was declared.

    Thresholds
        - min_sqnr_db 45: between E4M3's 31.5 dB and BF16's own rounding at 55.6 dB; numerics.md, 4.
          A format of less than 8 bits has its own: halfway between its closed-form SQNR (E2M1 in 1x16: 20.4 dB) and E4M3's.
        - min_low_bit_sqnr_db 22: the lowest that this limit may be: E2M1 rounded at random in its coarsest blocks has 13 dB,
          halfway to E4M3 (computed).
        - min_bulk_sqnr_db 40, bulk_share 0.9: energy of that share of the elements, the smallest, over the whole error. FP8
          cannot exceed 31.5 dB; BF16 has 53 dB for a Gaussian, 48 dB for a product of two (computed). It needs the exponent
          histogram; without one the rule asks for max_crest.
        - max_crest 8: amax / rms, without a histogram. No published basis: 4.5 for a Gaussian of 1e5 elements.
        - max_underflow_rate 0.01: share of nonzero elements that underflow; BF16 has FP32's range and flushes nothing.
        - min_binades 8: occupied bins of the exponent histogram (or log2(amax / amin) without one). No published
          basis: a trained operand fills twenty.
        - min_elements 256: elements; a small tensor may be exact by chance. No published basis.
        - min_per_block 4: nonzero elements of a nonzero block, in the mean. Where a block has two, one is the amax and exact;
          the errors of four leave 33 dB (closed form).
        - min_block_range_log2 1: log2(amax / amin) of the widest block. Below, all elements of a block have one binade.
        - min_mantissa2 1.05: mean of (x / 2^floor(log2 x))^2 over the energy of the exponents: 1 for powers of two, 2.3 for a
          Gaussian (computed).
        - Seen in TransformerEngine #1422; KempnerForge's guide: "silent by default".
    """

    code = "F111"
    name = "fp8-not-on"
    columns = ("sum_err2", "sum_x2")
    cure = "check the FP8 or FP4 flag, the dimensions (multiples of 16) and the device; fp8debug coverage shows what is declared"
    is_harmful = False

    min_sqnr_db: float = 45.0
    min_low_bit_sqnr_db: float = 22.0
    min_bulk_sqnr_db: float = 40.0
    bulk_share: float = 0.9
    max_crest: float = 8.0
    max_underflow_rate: float = 0.01
    min_binades: int = 8
    min_elements: int = 256
    min_per_block: float = 4.0
    min_block_range_log2: float = 1.0
    min_mantissa2: float = 1.05

    @property
    def _look(self) -> Look:
        return look([Condition("sqnr_db", ">", self.min_sqnr_db), *self._look_conditions], _COLUMNS)

    @property
    def _look_conditions(self) -> Conditions:
        return [
            f"numel >= {self.min_elements} AND coalesce(underflow_nonzero_rate, 0) <= {self.max_underflow_rate}",
            f"coalesce(max_block_range_log2, {self.min_block_range_log2}) >= {self.min_block_range_log2}",
            f"coalesce(numel - num_zero >= {self.min_per_block} * greatest(num_blocks - coalesce(num_zero_blocks, 0), 1), true)",
        ]

    def looks(self) -> Iterable[Look]:
        """Return the operands that are too good."""
        yield self._look
        yield self._low

    @property
    def _low(self) -> Look:
        conditions: Conditions = [
            Condition("sqnr_db", ">", self.min_low_bit_sqnr_db),
            Keys(IS_BELOW_8_BITS),
            *self._look_conditions,
        ]
        return look(conditions, _COLUMNS)

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands that were never cast."""
        found = self._proved(traces(run, self._look), self.min_sqnr_db)
        yield from self._not_low(run, found)
        too_good = {(trace.module, trace.gemm, trace.tensor) for trace in found}
        in_fp8 = self._in_fp8(run, found)
        for trace in found:
            partners = {t for m, g, t in too_good if (m, g) == (trace.module, trace.gemm)}
            if partners != {"weight"}:
                other = next(t.value for t in OPERANDS[Gemm(trace.gemm)] if t.value != trace.tensor)
                key = (trace.module, trace.gemm, other, trace.rows[0]["step"])
                if key not in in_fp8 or not self._is_of_rank_one(run, trace, in_fp8):
                    yield self._finding(trace, partner_in_fp8=key in in_fp8)

    def _proved(self, wholes: Iterable[Trace], limit_db: float | None = None) -> list[Trace]:
        """Return the traces whose operands no cast of their format can have made, at half of the sampled steps or more."""
        found = []
        for whole in wholes:
            limit = limit_db or self._limit_db(whole)
            trace = whole.where(lambda row, limit=limit: row["sqnr_db"] > limit and self._is_proof(row, limit))  # type: ignore[misc]  # bound now
            if trace is not None and trace.lasting(min(2, len(trace.sampled))):
                found.append(trace)
        return found

    def _limit_db(self, trace: Trace) -> float:
        """Return the SQNR halfway between a format of less than 8 bits and E4M3; BF16's limit where they round alike."""
        widest = max(f.mantissa_bits for f in FORMATS.values())
        if trace.cast is None or FORMATS[trace.cast.format].mantissa_bits == widest:
            return self.min_sqnr_db
        return max(self.min_low_bit_sqnr_db, (trace.cast.gaussian.sqnr_db + _FP8_DB) / 2)

    def _not_low(self, run: Run, in_high_precision: Sequence[Trace]) -> Iterable[Finding]:
        """Return the operands of less than 8 bits that show the error of FP8 alone."""
        known = {(trace.module, trace.gemm, trace.tensor) for trace in in_high_precision}
        found = [t for t in self._proved(traces(run, self._low)) if (t.module, t.gemm, t.tensor) not in known]
        too_good = known | {(trace.module, trace.gemm, trace.tensor) for trace in found}
        for trace in found:
            other = next(t.value for t in OPERANDS[Gemm(trace.gemm)] if t.value != trace.tensor)
            if trace.tensor != "weight" or (trace.module, trace.gemm, other) in too_good:
                row, since = trace.least("sqnr_db"), sum(step >= trace.rows[0]["step"] for step in trace.sampled)
                assert trace.cast is not None  # or it had no limit
                message = (
                    f"the {trace.gemm} {trace.tensor} has {row['sqnr_db']:.1f} dB or more at {len(trace.rows)} of"
                    f" {since} sampled steps: it is declared {trace.cast_name}, which gives about"
                    f" {trace.cast.gaussian.sqnr_db:.1f} dB, and FP8 {_FP8_DB:.1f} dB: it did not run in {trace.cast.format}"
                )
                severity = Severity.WARNING if (trace.module, trace.gemm, other) in too_good else Severity.INFO
                yield trace.finding(self, severity, message, value=row["sqnr_db"], threshold=self._limit_db(trace), unit="dB")

    def _in_fp8(self, run: Run, found: Sequence[Trace]) -> set[tuple[str, str, str, int]]:
        """Return module, GEMM, operand and step where an operand shows the error of an 8-bit cast, at the traces' first steps."""
        steps = sorted({trace.rows[0]["step"] for trace in found})
        query = (
            f"SELECT DISTINCT module, gemm, tensor, step FROM sites WHERE {RUNNING} AND tensor <> 'output'"
            f" AND step IN ({', '.join(map(str, steps))}) AND sum_err2 >= {10 ** (-self.min_sqnr_db / 10):.6e} * sum_x2"
        )
        return {tuple(row.values()) for row in run.sql(query).to_pylist()} if found else set()

    def _is_of_rank_one(self, run: Run, trace: Trace, in_fp8: Container[tuple[str, str, str, int]]) -> bool:
        """Return whether an operand's rows are multiples of one FP8 vector: the weight of a Linear with one output or input.

        With one output, dgrad is grad_input = g w for a column g and the only row w of the weight as the GEMM reads it. A block
        within a row is then g_i w: its amax is g_i times that of w, and w's codes come back. ReLU and dropout on the way leave
        multiples of w's elements. With one input, fprop's output is x w, likewise, without a bias.
        """
        if math.isinf(trace.least("sqnr_db")["sqnr_db"]):
            return False
        gemm, one, other, side = _RANK_ONE.get(trace.tensor, ("",) * 4)
        modules = {m["fqn"]: m for m in run.modules if m["call_index"] is not None}
        if not gemm or trace.module not in modules:
            return False
        own, step = modules[trace.module], trace.rows[0]["step"]
        order = 1 if gemm == "dgrad" else -1
        return any(
            m.get(one) == 1
            and m.get(other) == own.get(side)
            and order * (m["call_index"] - own["call_index"]) > 0
            and not (gemm == "fprop" and m.get("bias"))
            and (name, gemm, "weight", step) in in_fp8
            for name, m in modules.items()
        )

    def _finding(self, trace: Trace, *, partner_in_fp8: bool) -> Finding:
        row = trace.least("sqnr_db")
        sqnr_db = row["sqnr_db"]
        since = sum(step >= trace.rows[0]["step"] for step in trace.sampled)
        how = "equals its reference" if math.isinf(sqnr_db) else f"has {sqnr_db:.1f} dB or more"
        message = (
            f"the {trace.gemm} {trace.tensor} {how} at {len(trace.rows)} of {since} sampled steps: it is declared"
            f" {trace.cast_name}, but FP8 gives about 31.5 dB and BF16 55.6 dB"
        )
        severity = Severity.WARNING
        if partner_in_fp8:
            severity = Severity.INFO
            message += "; the GEMM's other operand is in FP8, so this one was either not cast or on the FP8 grid already"
        return trace.finding(self, severity, message, value=sqnr_db, threshold=self.min_sqnr_db, unit="dB")

    def _is_proof(self, row: dict[str, Any], limit_db: float) -> bool:
        """Return whether values are many, and the error too small for all of them but the outliers."""
        histogram = row["log2_hist"]
        if histogram is None:
            spread, crest = row["range_log2"], row["amax"] / row["rms"]
            return spread is not None and bool(spread >= self.min_binades and crest <= self.max_crest)
        if len([count for count in histogram if count]) < self.min_binades:
            return False
        if abs(row["sum_x2"] / _energy_of_exponents(histogram) - 1) < self.min_mantissa2 - 1:
            return False  # powers of two
        return bool(
            row["sum_err2"]
            <= bulk_energy(histogram, self.bulk_share) * 10 ** ((self.min_sqnr_db - self.min_bulk_sqnr_db - limit_db) / 10)
        )


def bulk_energy(histogram: Sequence[int], share: float) -> float:
    """Return the sum of x^2 over a share of the elements, the smallest, from their exponents (within 3 dB)."""
    left = share * sum(histogram)
    energy = 0.0
    for place, count in enumerate(histogram):
        energy += min(count, left) * 2.0 * 4.0 ** (FIRST_LOG2 + place)
        left -= min(count, left)
    return energy


def _energy_of_exponents(histogram: Sequence[int]) -> float:
    """Return the sum of x^2 if every element were a power of two."""
    return math.fsum(count * 4.0 ** (FIRST_LOG2 + place) for place, count in enumerate(histogram))


RULES.add(Fp8NotOn.code, Fp8NotOn())
