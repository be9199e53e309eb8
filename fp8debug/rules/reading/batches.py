"""Batches out of size: the input of the module that runs first, against the sampled steps before.

No watched GEMM lies before that module, so that its input is of the data, or of what embeds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fp8debug.rules.reading.course_limits import CourseLimits

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

_LAST_INPUTS = (
    "SELECT step, max(amax) AS amax FROM raw WHERE actual AND module = ? AND gemm = 'fprop' AND tensor = 'input'"
    " AND reference = 'operand' AND numel > 0 AND step <= ? GROUP BY step ORDER BY step DESC LIMIT ?"
)


class Growth(NamedTuple):
    """Amax of the first module's input over its largest of the sampled steps before, and that module."""

    module: str
    ratio: float


def batch_growth(run: Run, step: int) -> Growth | None:
    """Return the growth of what the first module reads at a sampled step; None where it is not known."""
    called = [module for module in run.modules if module.get("call_index") is not None]
    if not called:
        return None
    first = min(called, key=lambda module: int(module["call_index"]))["fqn"]
    rows = run.sql(_LAST_INPUTS, [first, step, CourseLimits.past_steps + 1]).to_pylist()
    past = [row["amax"] for row in rows if row["step"] < step and row["amax"] is not None]
    if len(past) < CourseLimits.min_past_steps or rows[0]["step"] != step or not rows[0]["amax"] or not max(past):
        return None
    return Growth(first, rows[0]["amax"] / max(past))
