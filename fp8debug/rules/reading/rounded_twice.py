"""Weights that another recorded cast holds without error, while the running one rounds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8debug.rules.reading.conditions import Condition, Look, look
from fp8debug.rules.reading.traces import Trace, traces
from fp8debug.rules.reading.weights import spans_binades

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


@dataclass(frozen=True)
class ExactCastLimits:
    """Thresholds for a weight that was made by another cast; F137's page says where each comes from."""

    min_exact_db: float = 100.0
    max_sqnr_db: float = 45.0
    min_binades: int = 8
    min_elements: int = 1024


def held_exactly(limits: ExactCastLimits) -> Look:
    """Return the rows of weights that a what-if cast holds without error."""
    kind = "NOT actual AND reference = 'operand' AND tensor = 'weight'"
    return look([Condition("sqnr_db", ">=", limits.min_exact_db), f"numel >= {limits.min_elements}"], (), rows=kind, keys=kind)


def rounded_again(run: Run, limits: ExactCastLimits) -> list[tuple[Trace, str]]:
    """Return the weights that a what-if cast holds without error and the running one rounds, each with that cast."""
    exact = {(t.module, t.gemm): t for t in traces(run, held_exactly(limits))}
    if not exact:
        return []
    steps = {(t.module, t.gemm): {row["step"] for row in t.rows} for t in exact.values()}
    running = look([f"sqnr_db < {limits.max_sqnr_db} AND tensor = 'weight'"], ["sqnr_db", "log2_hist", "range_log2"])
    found = []
    for whole in traces(run, running, [(module, step) for (module, _), at in steps.items() for step in at]):
        key = whole.module, whole.gemm
        trace = whole.where(lambda row, key=key: row["step"] in steps.get(key, ()) and spans_binades(row, limits.min_binades))  # type: ignore[misc]  # bound now
        if trace is not None:
            found.append((trace, exact[key].cast_name))
    return found
