"""F148: block scales in a format with few exponents, and nothing over them that brings a tensor into their range."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.base import RULES, Finding, Rule, Severity
from fp8debug.rules.reading.bounds import SCALES_ARE_ROUNDED
from fp8debug.rules.reading.conditions import Look
from fp8debug.rules.reading.stored_scales import ScaleLimits, beyond_range
from fp8debug.rules.reading.traces import percent, times

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class BlockScaleRange(Rule):
    """E4M3 block scales without a second level saturate, or underflow to zero.

    What it detects
        Block scales in E4M3 under no scale of the tensor: values beyond what the largest one, 448, holds; or blocks whose scale
        is zero (below 2^-10) in an operand that has lost more than its cast can.

    Why it matters
        E4M3 spans 2^-9 to 448, eighteen binades. Gradients of 1e-5 have scales of 1e-6: every block becomes zero, and the layers
        below get no gradient. A second scale in FP32 is why NVFP4 has two levels (arXiv 2509.25149).

    Example
        blocks.1.down, dgrad grad_output, e2m1fn 1x16 current scale=e4m3fn: 98 % of the block scales are zero from step 12 on.

    Cure
        tensor_scale='tensor', or 'row', for this operand; or scales in E8M0 (MXFP4, MXFP8); else BF16 for this GEMM.

    Thresholds
        - min_headroom 1.25: amax over what the scales hold; rounding alone gives 1.0625; numerics.md, 2.
        - margin_db 0.1: how far below the closed-form bound of its cast an operand with zero scales must lie (F128).
        - min_elements 256: elements. No published basis.
    """

    code = "F148"
    name = "block-scale-range"
    columns = ("headroom", "scale_inv_max", "amax")
    cure = "tensor_scale='tensor' for this operand, or E8M0 scales; else BF16 for this GEMM"

    min_headroom: float = 1.25
    margin_db: float = 0.1
    min_elements: int = 256

    @property
    def _limits(self) -> ScaleLimits:
        keys = f"{SCALES_ARE_ROUNDED} AND cast_name NOT LIKE '% tensor_scale=%'"
        return ScaleLimits(keys=keys, min_headroom=self.min_headroom, margin_db=self.margin_db, min_elements=self.min_elements)

    def looks(self) -> Iterable[Look]:
        """Return the operands whose scales their format cuts off."""
        yield self._limits.saturated
        yield self._limits.underflown

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose block scales do not fit their format."""
        for trace, is_small in beyond_range(run, self._limits):
            if is_small:
                row = trace.worst("headroom")
                message = (
                    f"{percent(row['overflow_rate'] or 0.0)} of the {trace.gemm} {trace.tensor} clips at step {row['step']}:"
                    f" its block scales saturate in E4M3, {times(row['headroom'])} times below its amax, with none over them"
                )
                yield trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=self.min_headroom)
            else:
                row = trace.worst("eps_block_rate")
                message = (
                    f"{percent(row['eps_block_rate'])} of the {trace.gemm} {trace.tensor}'s block scales are zero at step"
                    f" {row['step']} ({row['sqnr_db']:.1f} dB): E4M3 does not reach down to them, with no scale over them"
                )
                yield trace.finding(self, Severity.ERROR, message, value=row["eps_block_rate"], threshold=0.0)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to other signs of a Hadamard transform, under which the blocks have other maxima too."""
        signs = {(part.module, part.tensor) for f in others if f.code == "F146" for part in f.sites}
        return any((part.module, part.tensor) not in signs for part in finding.sites)


RULES.add(BlockScaleRange.code, BlockScaleRange())
