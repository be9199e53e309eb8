"""Operands whose scale is of a history although their cast is not called delayed: a program with delayed scaling of its own.

What a library or a program of one's own hands to a GEMM says nothing of where its scales come from. A scale of an amax of a part
of the tensor never exceeds the tensor's own; a static one does not move. One scale for all blocks that moves, and that is at
times larger than its tensor needs, is of earlier tensors.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from fp8debug.rules.reading.conditions import IS_DELAYED, ONE_SCALE

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Share of a scale's range that its tensor fills, below which the scale is larger than the tensor needs: 2 %, where rounding a
#: scale to BF16 changes it by 0.4 %. A power of two that is rounded upwards leaves up to a half.
MAX_HEADROOM, MAX_HEADROOM_POW2 = 0.98, 0.49
#: Relative distance of two scales, and of two shares, of an operand whose scale does not follow it; a margin keeps its share.
MIN_MOVED = 0.002
#: Share of the operands of one cast and tensor from which on the program has delayed scaling: growing tensors fill their scales.
MIN_SHARE = 0.5
#: Share of elements that a scale of a history may clip, and beyond which it is an error; numerics.md, 4 (delayed).
MAX_CLIPPED, MAX_CLIPPED_ACT = 0.001, 0.01

#: Module, GEMM, tensor and name of a cast.
Operand = tuple[str, str, str, str]


def operands_of_history(run: Run) -> frozenset[Operand]:
    """Return the operands under one scale for all blocks in a program whose scales are of a history."""
    return run.memo("operands of a history", lambda: _operands(run))


def _operands(run: Run) -> frozenset[Operand]:
    if not all(run.has(column) for column in ("headroom", "scale_inv_min", "scale_inv_max")):
        return frozenset()
    is_pow2 = "abs(log2(scale_inv_max) - round(log2(scale_inv_max))) <= 1e-5"
    moves = " AND ".join(f"max({column}) > {1 + MIN_MOVED} * min({column})" for column in ("scale_inv_max", "headroom"))
    is_larger = f"headroom < CASE WHEN {is_pow2} THEN {MAX_HEADROOM_POW2} ELSE {MAX_HEADROOM} END"
    rows = run.sql(
        f"SELECT module, gemm, tensor, cast_name, {moves} AND max(CASE WHEN {is_larger} THEN 1 ELSE 0 END) = 1 AS is_shown"
        f" FROM sites WHERE actual AND reference = 'operand' AND scale_inv_min > 0 AND NOT {IS_DELAYED}"
        f" GROUP BY module, gemm, tensor, cast_name HAVING min(CASE WHEN {ONE_SCALE} THEN 1 ELSE 0 END) = 1"
    ).to_pylist()
    kinds: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in rows:
        kinds[row["tensor"], row["cast_name"]].append(bool(row["is_shown"]))
    is_program = any(sum(shown) >= MIN_SHARE * len(shown) > 0 for shown in kinds.values())
    return frozenset((r["module"], r["gemm"], r["tensor"], r["cast_name"]) for r in rows if is_program or r["is_shown"])
