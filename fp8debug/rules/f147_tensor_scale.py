"""F147: the second-level scale of a tensor is older than the tensor, so that its block scales saturate or are zero."""

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
class StaleTensorScale(Rule):
    """The FP32 scale over E4M3 block scales was made for another amax than the tensor's.

    What it detects
        Under scales in two levels (NVFP4), values beyond what the largest block scale holds: the second level maps the tensor's
        amax to the largest E4M3 scale, 448, so that no block scale saturates while it is the tensor's own. Or blocks whose scale
        is zero in an operand that has lost more than its cast can: a second level made for a larger tensor. Scales of
        other blocks (F119) leave the largest value within the largest scale.

    Why it matters
        The block scales follow each block, and hide for 2^17 of growth or decline that the tensor scale does not. Then all
        large blocks clip at once, or all blocks become zero.

    Example
        blocks.1.down, fprop input, e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor: 80 % of the elements clip from step 12
        on, the amax is 64 times what the second-level scale was made for.

    Cure
        Compute the second-level scale from this very tensor, over all ranks that share it; or current scaling with
        tensor_scale='row'; else MXFP8 or BF16 for this GEMM.

    Thresholds
        - min_headroom 1.25: amax over what the scales hold. Rounding a scale to E4M3 makes it 1/17 too small at most, 1.0625;
          numerics.md, 2.
        - margin_db 0.1: how far below the closed-form bound of its cast an operand with zero scales must lie (F128).
        - min_elements 256: elements. No published basis.
        - Asked for in TransformerEngine #2801.
    """

    code = "F147"
    name = "stale-tensor-scale"
    columns = ("headroom", "scale_inv_max", "amax")
    cure = "compute the second-level scale from this tensor's own amax; else MXFP8 or BF16 for this GEMM"

    min_headroom: float = 1.25
    margin_db: float = 0.1
    min_elements: int = 256

    @property
    def _limits(self) -> ScaleLimits:
        keys = f"{SCALES_ARE_ROUNDED} AND cast_name LIKE '% tensor_scale=%'"
        return ScaleLimits(keys=keys, min_headroom=self.min_headroom, margin_db=self.margin_db, min_elements=self.min_elements)

    def looks(self) -> Iterable[Look]:
        """Return the operands whose scales their format cuts off."""
        yield self._limits.saturated
        yield self._limits.underflown

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose tensor scale is another's."""
        for trace, is_small in beyond_range(run, self._limits):
            if is_small:
                row = trace.worst("headroom")
                message = (
                    f"{percent(row['overflow_rate'] or 0.0)} of the {trace.gemm} {trace.tensor} clips at step {row['step']}: its"
                    f" amax is {times(row['headroom'])} times what the second-level scale was made for: the block scales saturate"
                )
                yield trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=self.min_headroom)
            else:
                row = trace.worst("eps_block_rate")
                message = (
                    f"{percent(row['eps_block_rate'])} of the {trace.gemm} {trace.tensor}'s block scales are zero at step"
                    f" {row['step']} ({row['sqnr_db']:.1f} dB): the second-level scale was made for a larger tensor"
                )
                yield trace.finding(self, Severity.ERROR, message, value=row["eps_block_rate"], threshold=0.0)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to other signs of a Hadamard transform, under which the blocks have other maxima too."""
        signs = {(part.module, part.tensor) for f in others if f.code == "F146" for part in f.sites}
        return any((part.module, part.tensor) not in signs for part in finding.sites)


RULES.add(StaleTensorScale.code, StaleTensorScale())
