"""Block scales that their own format cannot hold (E4M3's, of NVFP4): too large, so that values clip, or zero."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS
from fp8debug.rules.reading.bounds import SCALES_ARE_ROUNDED, cast_floor_db
from fp8debug.rules.reading.conditions import Condition, Conditions, Keys, Look, look
from fp8debug.rules.reading.traces import Trace, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_MAX_SQL = (
    "CASE " + " ".join(f"WHEN cast_name LIKE '{f.name} %' THEN {f.max}" for f in FORMATS.values() if not f.scale_only) + " END"
)
#: Share of what the largest scale lacks that must be the largest value's own: 1, but that a Hadamard transform moves the amax.
_OWN, _OWN_TRANSFORMED = 0.8, 0.6
#: SQL: the largest value lies as far beyond the largest scale as any value beyond its own: the scales end there, and no block
#: has another's.
ARE_CUT_OFF = (
    f"({SCALES_ARE_ROUNDED} AND amax >= (CASE WHEN cast_name LIKE '% hadamard=%' THEN {_OWN_TRANSFORMED} ELSE {_OWN} END)"
    f" * headroom * scale_inv_max * ({_MAX_SQL}))"
)
_COLUMNS = ("headroom", "overflow_rate", "sqnr_db", "eps_block_rate", "num_eps_blocks", "scale_inv_max", "amax")


@dataclass(frozen=True, kw_only=True)
class ScaleLimits:
    """Thresholds for scales beyond their format, and which casts are meant.

    Attributes:
        keys: SQL predicate over ``cast_name``.
        min_headroom: amax over what the scale holds.
        margin_db: how far below the bound of its cast an operand with zero scales must lie.
        min_elements: in a small tensor a share says nothing.
    """

    keys: str
    min_headroom: float
    margin_db: float
    min_elements: int

    @property
    def saturated(self) -> Look:
        """The rows whose scales are too small for the tensor."""
        conditions: Conditions = [
            Condition("headroom", ">", self.min_headroom),
            Keys(self.keys),
            f"numel >= {self.min_elements} AND {ARE_CUT_OFF}",
        ]
        return look(conditions, _COLUMNS)

    @property
    def underflown(self) -> Look:
        """The rows with blocks whose scale is zero."""
        conditions: Conditions = [
            Condition("num_eps_blocks", ">", 0),
            Keys(f"{self.keys} AND cast_name NOT LIKE '% eps=%'"),
            f"numel >= {self.min_elements}",
        ]
        return look(conditions, _COLUMNS)


def beyond_range(run: Run, limits: ScaleLimits) -> Iterable[tuple[Trace, bool]]:
    """Yield the operands whose block scales do not fit their format, and whether they are too large for it (else zero).

    A block whose scale is zero loses nothing that counts where the tensor's largest block has the largest scale of the
    format: it lies 2^-18 below that. So it counts where the operand lies below what its cast can do to any tensor.
    """
    for trace in traces(run, limits.saturated):
        yield trace, True
    for whole in traces(run, limits.underflown):
        floor = cast_floor_db(whole.cast) - limits.margin_db if whole.cast is not None else 0.0
        below = whole.where(lambda row, floor=floor: row["sqnr_db"] is not None and row["sqnr_db"] < floor)  # type: ignore[misc]  # bound now
        if below is not None:
            yield below, False
