"""Operands whose scale is of a history although their cast is not called delayed: a program with delayed scaling of its own.

What a library or a program of one's own hands to a GEMM says nothing of where its scales come from. A scale of an amax of a part
of the tensor never exceeds the tensor's own; a static one does not move. One scale for all blocks that moves, and that is at
times larger than its tensor needs, is of earlier tensors.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.reading.conditions import IS_DELAYED, IS_POWER_OF_TWO, ONE_SCALE

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Module, GEMM, tensor and name of a cast.
Operand = tuple[str, str, str, str]


@dataclass(frozen=True)
class HistoryLimits:
    """Thresholds of rules for scales of a history; the manual page of F113 says where each comes from.

    Attributes:
        max_history_headroom: share of its range that a tensor fills, below which the scale is larger than it needs.
        min_history_move: relative distance of two scales, and of two such shares, of a scale that does not follow its tensor.
        min_history_share: share of the operands of one cast and tensor that show it where the program has delayed scaling.
    """

    max_history_headroom: float = 0.98
    min_history_move: float = 0.002
    min_history_share: float = 0.5


def operands_of_history(run: Run, limits: HistoryLimits) -> frozenset[Operand]:
    """Return the operands under one scale for all blocks in a program whose scales are of a history.

    Args:
        run: the run.
        limits: thresholds.
    """
    most, least, share = limits.max_history_headroom, limits.min_history_move, limits.min_history_share
    return run.memo(f"operands of a history {most} {least} {share}", lambda: _operands(run, most, least, share))


def _operands(run: Run, most: float, least: float, share: float) -> frozenset[Operand]:
    if not all(run.has(column) for column in ("headroom", "scale_inv_min", "scale_inv_max")):
        return frozenset()
    moves = " AND ".join(f"max({column}) > {1 + least} * min({column})" for column in ("scale_inv_max", "headroom"))
    # A power of two that is rounded upwards leaves up to a half of its range.
    is_larger = f"headroom < CASE WHEN {IS_POWER_OF_TWO} THEN {most / 2} ELSE {most} END"
    rows = run.sql(
        f"SELECT module, gemm, tensor, cast_name, {moves} AND max(CASE WHEN {is_larger} THEN 1 ELSE 0 END) = 1 AS is_shown"
        f" FROM sites WHERE actual AND reference = 'operand' AND scale_inv_min > 0 AND NOT {IS_DELAYED}"
        # Of several microbatches each may have a scale of its own, as at the first step, before there is a history.
        f" GROUP BY module, gemm, tensor, cast_name HAVING min(CASE WHEN {ONE_SCALE} OR num_tensors > 1 THEN 1 ELSE 0 END) = 1"
        f" AND avg(CASE WHEN {ONE_SCALE} THEN 1 ELSE 0 END) >= {share}"
    ).to_pylist()
    kinds: dict[tuple[str, str], list[bool]] = defaultdict(list)
    for row in rows:
        kinds[row["tensor"], row["cast_name"]].append(bool(row["is_shown"]))
    is_program = any(sum(shown) >= share * len(shown) > 0 for shown in kinds.values())
    return frozenset((r["module"], r["gemm"], r["tensor"], r["cast_name"]) for r in rows if is_program or r["is_shown"])
