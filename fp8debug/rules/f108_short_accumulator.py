"""F108: a GEMM's sums keep too few bits, so that its result is far from the exact product of its own operands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.bounds import contracted_length
from fp8debug.rules.evidence import Trace, percent, traces
from fp8debug.rules.looks import FP8_PRODUCTS, Look, below_db, look

if TYPE_CHECKING:
    from fp8debug.store.run import Run


@dataclass(frozen=True)
class ShortAccumulator(Rule):
    """A GEMM keeps its sums in too few bits, so that its result is not the product of its operands.

    What it detects
        The result of a GEMM in FP8 far from the exact GEMM of the same dequantized operands: the error is neither the
        cast's, which both share, nor the rounding of the result to BF16, which leaves 55 dB. It grows with the
        contracted dimension: K in fprop, N in dgrad, the tokens in wgrad. A gain below 1 tells that the operands have
        one sign and the loss adds up. A result farther off than 14 bits can lose over K products is F129.

    Why it matters
        Hopper's FP8 tensor cores keep about 14 bits of a sum. Without promotion to FP32 every 128 elements, uniform
        operands lose 7 % at K = 4096 and 26 % at K = 16384 (docs/accumulation.md), and no statistic of an operand shows
        it. DeepSeek-V3 promotes for this reason; DeepGEMM #37 and #50 discuss it.

    Example
        blocks.0.mlp.down, fprop output, tensorwise with fast_accum, K = 14336: 22 dB from the exact product, gain 0.92.

    Cure
        Switch fast accumulation off (fast_accum of the Recipe; use_fast_accum, use_split_accumulator=True elsewhere), or
        use blockwise scales, which have to promote; else BF16 for this GEMM.

    Thresholds
        - warn_sqnr_db 45: SQNR of the result against the exact GEMM, in dB, below which it warns; numerics.md, 4.
        - max_sqnr_db 35: below which it is an error; numerics.md, 4.
        - min_steps 2: sampled steps that show it, and half of those since the first; one step of a result that
          cancels is no evidence. No published basis.
    """

    code = "F108"
    name = "short-accumulator"
    columns = ("sum_err2", "sum_x2")
    cure = "fast_accum off (promotion to FP32 every 128 elements), or blockwise scales; else BF16 for this GEMM"

    warn_sqnr_db: float = 45.0
    max_sqnr_db: float = 35.0
    min_steps: int = 2

    @property
    def _bad(self) -> str:
        return f"isfinite(sqnr_db) AND sqnr_db < {self.warn_sqnr_db}"

    @property
    def _look(self) -> Look:
        keys = "actual AND reference = 'exact'"
        return look(self._bad, ["sqnr_db", "gain"], below_db(self.warn_sqnr_db), rows=FP8_PRODUCTS, keys=keys)

    def looks(self) -> Iterable[Look]:
        """Return the results far from the exact product."""
        yield self._look

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the results that lie far from the exact product."""
        for trace in traces(run, self._look):
            if trace.lasting(self.min_steps):
                yield self._found(trace, contracted_length(run, trace.module, trace.gemm))

    def stands(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to a result that no accumulator explains."""
        wrong = {(part.module, part.gemm) for f in others if f.code == "F129" for part in f.sites}
        return any((part.module, part.gemm) not in wrong for part in finding.sites)

    def _found(self, trace: Trace, length: int | None) -> Finding:
        row = min(trace.rows, key=lambda row: float(row["sqnr_db"]))
        sqnr, gain = float(row["sqnr_db"]), row["gain"]
        severity = Severity.ERROR if sqnr < self.max_sqnr_db else Severity.WARNING
        over = f" over {length} terms" if length else ""
        lost = f", {percent(1 - gain)} of its size lost" if gain is not None and gain < 0.999 else ""
        message = (
            f"the {trace.gemm} {trace.tensor} is {sqnr:.1f} dB from the exact product of its own FP8 operands{lost}: its sums"
            f"{over} keep too few bits (rounding to BF16 leaves 55 dB)"
        )
        limit = self.max_sqnr_db if severity is Severity.ERROR else self.warn_sqnr_db
        return trace.finding(self, severity, message, value=sqnr, threshold=limit, unit="dB")


RULES.add(ShortAccumulator.code, ShortAccumulator())
