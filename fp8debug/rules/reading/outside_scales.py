"""Operands whose scale_inv is 1 in every block: their scales are applied outside the GEMM, or nowhere.

Whether a program multiplies the result of a GEMM afterwards is not recorded. What it does elsewhere is: of one tensor in the
other GEMMs of its module, and of the same operand in modules of the same role.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fp8debug.rules.reading.model_structure import numbered
from fp8debug.rules.reading.traces import RUNNING, ElsewhereLimits, Trace

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


def otherwise_scaled(run: Run, trace: Trace, max_unit_gain: float) -> str | None:
    """Return what contradicts that an operand without a scale has it applied afterwards; None where nothing does.

    A GEMM of which neither operand has its scale multiplies codes alone, on purpose: its result is multiplied by both scales.

    Args:
        run: the run.
        trace: of the operand.
        max_unit_gain: as in :func:`applied_outside`.
    """
    rows = _scales(run, trace.rows[0]["step"])
    other = [row for row in rows if (row["module"], row["gemm"]) == (trace.module, trace.gemm) and row["tensor"] != trace.tensor]
    if other and all(_is_unscaled(row, max_unit_gain) for row in other):
        return None
    here = {row["gemm"] for row in rows if row["module"] == trace.module and row["tensor"] == trace.tensor and _has_scale(row)}
    if here - {trace.gemm}:
        return f"{' and '.join(sorted(here))} of the module {'has' if len(here) == 1 else 'have'} a scale for it"
    roles = {name for group in numbered(run) if trace.module in (own := group.members.values()) for name in own}
    alike = [row for row in rows if row["module"] in roles - {trace.module}]
    alike = [row for row in alike if (row["gemm"], row["tensor"]) == (trace.gemm, trace.tensor)]
    if alike and all(map(_has_scale, alike)):
        return f"the {trace.tensor} of {alike[0]['module']} has a scale{_and_more(len(alike) - 1)}"
    return None


def applied_outside(run: Run, max_unit_gain: float = ElsewhereLimits.max_unit_gain) -> list[dict[str, Any]]:
    """Return the operands of the first sampled step whose scale, if it is applied at all, is applied outside the GEMM.

    Args:
        run: the run.
        max_unit_gain: gain of codes over their tensor beyond which a scale_inv of 1 is not the tensor's own, and its inverse.
    """
    if not run.has("scale_inv_min") or not run.has("sum_xy"):
        return []
    step = min(run.sampled_steps, default=0)
    return [row for row in _scales(run, step) if _is_unscaled(row, max_unit_gain)]


def _scales(run: Run, step: int) -> list[dict[str, Any]]:
    """Return the operands that ran at a step, with their scales and gain, in order of execution."""
    query = (
        "SELECT module, gemm, tensor, scale_inv_min, scale_inv_max, gain FROM sites"
        f" WHERE {RUNNING} AND step = {step} AND scale_inv_min IS NOT NULL ORDER BY call_index, module, gemm, tensor"
    )
    return run.memo(f"scales at step {step}", lambda: run.sql(query).to_pylist())


def _is_unscaled(row: dict[str, Any], max_unit_gain: float) -> bool:
    """Return whether codes are read with a scale of 1 that is not their own."""
    return not _has_scale(row) and not 1 / max_unit_gain <= abs(row["gain"] or 1.0) <= max_unit_gain


def _has_scale(row: dict[str, Any]) -> bool:
    return not row["scale_inv_min"] == row["scale_inv_max"] == 1.0


def _and_more(count: int) -> str:
    return f", as do {count} more" if count else ""
