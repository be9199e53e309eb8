"""Block scales that their own format cannot hold (E4M3's, of NVFP4): too large, so that values clip, or zero."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fp8debug.formats import FORMATS
from fp8debug.metrics.limits import cast_floor_db
from fp8debug.rules.base import Finding, Rule, Severity
from fp8debug.rules.reading.bounds import SCALES_ARE_ROUNDED
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import percent, times, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_MAX_SQL = (
    "CASE " + " ".join(f"WHEN cast_name LIKE '{f.name} %' THEN {f.max}" for f in FORMATS.values() if not f.scale_only) + " END"
)
#: What rounding makes a scale too small by: to a normal value 17/16, to a subnormal one, below 1.5 of the smallest, 1.5. The
#: largest scale of a tensor is normal; under a Hadamard transform ``amax`` does not tell whether it is the largest that lacks.
_ROUNDED, _ROUNDED_SUBNORMAL = 17 / 16, 1.5
_COLUMNS = ("headroom", "overflow_rate", "sqnr_db", "eps_block_rate", "num_eps_blocks", "scale_inv_max", "amax")


def are_cut_off(min_own_share: float, min_own_share_transformed: float) -> str:
    """Return the SQL predicate that the largest value lies as far beyond the largest scale as any value beyond its own.

    The scales end there, and no block has another's.

    Args:
        min_own_share: of what the largest scale lacks, the largest value's own.
        min_own_share_transformed: the same under a Hadamard transform.
    """
    return (
        f"({SCALES_ARE_ROUNDED}"
        f" AND headroom > (CASE WHEN cast_name LIKE '% hadamard=%' THEN {_ROUNDED_SUBNORMAL} ELSE {_ROUNDED} END)"
        f" AND amax >= (CASE WHEN cast_name LIKE '% hadamard=%' THEN {min_own_share_transformed} ELSE {min_own_share} END)"
        f" * headroom * scale_inv_max * ({_MAX_SQL}))"
    )


@dataclass(frozen=True)
class ScaleRange(Rule):
    """Base of the rules over operands whose block scales do not fit their format, with or without a second level over them.

    A block whose scale is zero loses nothing that counts where the tensor's largest block has the largest scale of the
    format: it lies 2^-18 below that. So it counts where the operand lies below what its cast can do to any tensor.

    Attributes:
        keys: SQL predicate over ``cast_name`` for the casts meant, all of whose scales are rounded.
        saturates: end of the message on values that clip; ``{}`` is amax over what the scales hold.
        is_zero: end of the message on blocks whose scale is zero.
        min_headroom: amax over what the scale holds.
        margin_db: how far below the bound of its cast an operand with zero scales must lie.
        min_elements: in a small tensor a share has no meaning.
        min_own_share: share of what the largest scale lacks that must be the largest value's own.
        min_own_share_transformed: the same under a Hadamard transform, which moves the amax.
    """

    columns = ("headroom", "scale_inv_max", "amax")
    keys: ClassVar[str]
    saturates: ClassVar[str]
    is_zero: ClassVar[str]

    min_headroom: float = 1.25
    margin_db: float = 0.1
    min_elements: int = 256
    min_own_share: float = 0.86
    min_own_share_transformed: float = 0.6

    @property
    def _saturated(self) -> Look:
        conditions: Conditions = [
            Condition("headroom", ">", self.min_headroom),
            Keys(f"{SCALES_ARE_ROUNDED} AND {self.keys}"),
            f"numel >= {self.min_elements} AND {are_cut_off(self.min_own_share, self.min_own_share_transformed)}",
        ]
        return look(conditions, _COLUMNS)

    @property
    def _underflown(self) -> Look:
        conditions: Conditions = [
            Condition("num_eps_blocks", ">", 0),
            Keys(f"{SCALES_ARE_ROUNDED} AND {self.keys} AND cast_name NOT LIKE '% eps=%'"),
            f"numel >= {self.min_elements}",
        ]
        return look(conditions, _COLUMNS)

    def looks(self) -> Iterable[Look]:
        """Return the operands whose scales their format cuts off."""
        yield self._saturated
        yield self._underflown

    def check(self, run: Run) -> Iterable[Finding]:
        """Return the operands whose block scales saturate, then those where some are zero."""
        for trace in traces(run, self._saturated):
            row = trace.worst("headroom")
            message = (
                f"{percent(row['overflow_rate'] or 0.0)} of the {trace.gemm} {trace.tensor} clips at step {row['step']}:"
                f" {self.saturates.format(times(row['headroom']))}"
            )
            yield trace.finding(self, Severity.ERROR, message, value=row["headroom"], threshold=self.min_headroom)
        for whole in traces(run, self._underflown):
            floor = cast_floor_db(whole.cast) - self.margin_db if whole.cast is not None else 0.0
            below = whole.where(lambda row, floor=floor: row["sqnr_db"] is not None and row["sqnr_db"] < floor)  # type: ignore[misc]  # bound now
            if below is None:
                continue
            row = below.worst("eps_block_rate")
            message = (
                f"{percent(row['eps_block_rate'])} of the {below.gemm} {below.tensor}'s block scales are zero at step"
                f" {row['step']} ({row['sqnr_db']:.1f} dB): {self.is_zero}"
            )
            yield below.finding(self, Severity.ERROR, message, value=row["eps_block_rate"], threshold=0.0)

    def holds_beside(self, finding: Finding, others: Sequence[Finding], run: Run) -> bool:
        """Yield to other signs of a Hadamard transform, under which the blocks have other maxima too."""
        signs = {(part.module, part.tensor) for f in others if f.code == "F146" for part in f.sites}
        return any((part.module, part.tensor) not in signs for part in finding.sites)
