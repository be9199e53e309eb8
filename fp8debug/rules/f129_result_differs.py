"""F129: a GEMM's result is not the product of its own operands, by more than any accumulator of its length can lose."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.bounds import accumulator_floor_db, contracted_length
from fp8debug.rules.evidence import Trace, percent, traces
from fp8debug.rules.looks import FP8_PRODUCTS, Look, below_db, look

if TYPE_CHECKING:
    from fp8debug.store.run import Run

_COLUMNS = ("sqnr_db", "gain", "cosine", "norm_ratio", "bad_row_rate", "good_row_rate")


@dataclass(frozen=True)
class ResultDiffers(Rule):
    """A GEMM's result is not the product of the operands that it was given.

    What it detects
        The result of a GEMM in FP8 that lies farther from the exact product of its own dequantized operands than an
        accumulator of 14 bits, the shortest in use, can lose over this many products. The operands' own errors are in
        both sides and cannot cause it. What is left is the kernel, or what it was handed: scales that it cut, ignored or
        read in another layout, rows that it never wrote, an output buffer that something else wrote to. One sampled
        step counts where hardly any signal is left; else it has to last. Losses that an accumulator explains are F108.

    Why it matters
        The operands' statistics are clean, and the layer computes something else. No other accumulation cures it.

    Example
        blocks.1.down, fprop output: 9.9 dB from the exact product of its own FP8 operands, gain 0.70, over 384 terms, where
        14 bits lose at most 33 dB.

    Cure
        Another kernel or backend for this GEMM; compare the scale format that it reads (FP32 or UE8M0, layout) with the one
        that the cast writes; BF16 for this GEMM until then.

    Thresholds
        - margin_db 3: how far below the accumulator's closed-form bound, -20 log10(K * 2^-14), the result must lie. The bound
          is itself three times what was measured on an H200 (docs/accumulation.md); numerics.md, 2.
        - max_sqnr_db 35: a result above it is never reported; numerics.md, 4 (act below 35).
        - min_steps 2: sampled steps that show it, and half of those since the first. No published basis.
        - once_sqnr_db 10: SQNR below which one sampled step counts; NUMERICS' line for a row without signal.
        - Seen in sglang #39193, DeepGEMM #365.
    """

    code = "F129"
    name = "result-differs"
    columns = ("sum_err2", "sum_x2")
    cure = "another kernel or backend for this GEMM; check which scales it reads, and in which layout; else BF16 for this GEMM"

    margin_db: float = 3.0
    max_sqnr_db: float = 35.0
    min_steps: int = 2
    once_sqnr_db: float = 10.0

    @property
    def _look(self) -> Look:
        bad, hint = f"isfinite(sqnr_db) AND sqnr_db < {self.max_sqnr_db}", below_db(self.max_sqnr_db)
        return look(bad, _COLUMNS, hint, rows=FP8_PRODUCTS, keys="actual AND reference = 'exact'")

    def looks(self) -> Iterable[Look]:
        """Return the results far from the exact product."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the results that no accumulator explains."""
        for whole in traces(run, self._look):
            length = contracted_length(run, whole.module, whole.gemm)
            floor = min(self.max_sqnr_db, accumulator_floor_db(length) - self.margin_db)
            trace = whole.where(lambda row, floor=floor: row["sqnr_db"] < floor)  # type: ignore[misc]  # bound now
            if trace is None:
                continue
            if trace.lasting(min(self.min_steps, len(trace.sampled))) or min(r["sqnr_db"] for r in trace.rows) < self.once_sqnr_db:
                yield self._finding(trace, floor, length)

    def _finding(self, trace: Trace, floor: float, length: int | None) -> Finding:
        row = min(trace.rows, key=lambda row: float(row["sqnr_db"]))
        since = sum(step >= trace.rows[0]["step"] for step in trace.sampled)
        over = f" over {length} terms" if length else ""
        message = (
            f"the {trace.gemm} {trace.tensor} is {row['sqnr_db']:.1f} dB from the exact product of its own FP8 operands at step"
            f" {row['step']} ({len(trace.rows)} of {since} sampled steps), where the shortest accumulator gives at least"
            f" {floor:.0f} dB{over}: {candidates(row)}"
        )
        return trace.finding(self, Severity.ERROR, message, value=row["sqnr_db"], threshold=floor, unit="dB")


def candidates(row: dict[str, Any]) -> str:
    """Return the causes that the statistics of a result leave, with the numbers that speak for them."""
    gain, cosine, norm_ratio = row["gain"], row["cosine"], row["norm_ratio"]
    bad, good = row.get("bad_row_rate") or 0.0, row.get("good_row_rate") or 0.0
    if gain is None or cosine is None or norm_ratio is None:
        return "the result holds nothing of the product"
    if bad > 0.005 and good > 0.005 and bad + good > 0.9:
        return f"{percent(bad)} of its rows are wrong and {percent(good)} right, so that the kernel left rows unwritten or mixed them"
    if cosine >= 0.999:
        return f"gain {gain:.3g} at cosine {cosine:.5f}, so that the kernel applies a scale twice, not at all, or another one"
    if cosine >= 0.9:
        return (
            f"gain {gain:.3g} at cosine {cosine:.3f}, so that the kernel does not use the scales that it is given as they are"
            " (exponents alone, another block, another layout)"
        )
    if norm_ratio < 0.05:
        return f"norm ratio {norm_ratio:.2g}, so that the kernel wrote next to nothing"
    return f"cosine {cosine:.3f}, norm ratio {norm_ratio:.3g}: other data, or an output buffer that something else wrote to"


RULES.add(ResultDiffers.code, ResultDiffers())
