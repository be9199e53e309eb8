"""Operands that have no row in one GEMM, judged by its result: their tensor in high precision was gone when the GEMM ran.

A result beside its shadow has the errors of both operands. Of sums over M tokens of products of independent terms, the reference
has a mean square of M a^2 b^2, a and b the RMS of the tensors, and errors of e_a and e_b of each element add M a^2 b^2 (e_a^2 +
e_b^2). The ratio of the two is the operands' own, and falls by as much as the sum cancels: the reference's mean square over
M a^2 b^2, where that is below 1. The tensor's size is that of its row in another GEMM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8debug.errors import UsageError
from fp8debug.metrics import limits
from fp8debug.recipes import Cast
from fp8debug.rules.reading.conditions import Condition, Look, look
from fp8debug.types import OPERANDS, RESULTS, Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run


class FarResult(NamedTuple):
    """A result that is further from its shadow than both casts explain.

    Attributes:
        row: of the result, with step, module, gemm, tensor, sqnr_db, call_index and ranks.
        operand: the operand without a row.
        floor_db: least SQNR that the casts explain.
    """

    row: Mapping[str, Any]
    operand: str
    floor_db: float


def results_look(max_db: float) -> Look:
    """Return the look for results of FP8 GEMMs below an SQNR against their shadow."""
    keys = "actual AND reference = 'shadow'"
    rows = f"{keys} AND tensor IN ({', '.join(repr(tensor.value) for tensor in RESULTS.values())}) AND cast_name LIKE '% @ %'"
    return look([Condition("sqnr_db", "<", max_db)], ("sqnr_db", "sum_x2", "numel", "num_tensors"), rows=rows, keys=keys)


def far_results(run: Run, rows: Sequence[Mapping[str, Any]], margin_db: float, min_exact_db: float) -> list[FarResult]:
    """Return those of some results whose operands have no row but one, and which neither cast explains.

    Args:
        run: the run.
        rows: results, of :func:`results_look`.
        margin_db: how far below what the casts explain a result is.
        min_exact_db: SQNR against the exact product of what the GEMM read, below which the GEMM itself is at fault.
    """
    if not rows:
        return []
    modules, steps = sorted({row["module"] for row in rows}), sorted({row["step"] for row in rows})
    query = (
        "SELECT step, module, gemm, tensor, reference, sum_x2, numel, num_tensors FROM sites WHERE actual"
        f" AND step IN ({', '.join(map(str, steps))}) AND module IN ({', '.join('?' for _ in modules)})"
        f" AND (reference = 'operand' OR reference = 'exact' AND sqnr_db < {min_exact_db})"
    )
    operands: dict[tuple[int, str], dict[tuple[str, str], dict[str, Any]]] = {}
    wrong = set[tuple[int, str, str]]()
    for row in run.sql(query, modules).to_pylist():
        if row["reference"] == "exact":
            wrong.add((row["step"], row["module"], row["gemm"]))
        else:
            operands.setdefault((row["step"], row["module"]), {})[row["gemm"], row["tensor"]] = row
    sizes = {m["fqn"]: (m.get("in_features"), m.get("out_features")) for m in run.modules}
    found = []
    for row in rows:
        if (row["step"], row["module"], row["gemm"]) not in wrong:
            of_step = operands.get((row["step"], row["module"]), {})
            far = _judged(row, of_step, sizes.get(row["module"], (None, None)), margin_db)
            found += [far] if far else []
    return found


def _judged(
    row: Mapping[str, Any], operands: dict[tuple[str, str], dict[str, Any]], shape: tuple[Any, Any], margin_db: float
) -> FarResult | None:
    gemm, names = Gemm(row["gemm"]), [tensor.value for tensor in OPERANDS[Gemm(row["gemm"])]]
    lacking = [name for name in names if (gemm.value, name) not in operands]
    known = [next((row for (_, name), row in sorted(operands.items()) if name == wanted), None) for wanted in names]
    casts = _casts(row["cast_name"])
    if len(lacking) != 1 or casts is None or None in known or not all(shape):
        return None
    terms = {Gemm.FPROP: shape[0], Gemm.DGRAD: shape[1], Gemm.WGRAD: _num_tokens(operands, *shape)}[gemm]
    alone = terms * math.prod(one["sum_x2"] / one["numel"] if one and one["numel"] else 0.0 for one in known)
    if not alone or not math.isfinite(alone):
        return None
    kept = min(1.0, row["sum_x2"] / row["numel"] / alone)
    floor = 10 * math.log10(kept / sum(10 ** (-limits.operand_floor_db(cast) / 10) for cast in casts))
    return FarResult(row, lacking[0], floor) if row["sqnr_db"] < floor - margin_db else None


def _casts(name: str) -> list[Cast] | None:
    """Return the casts of a result's operands; None where one has none that is known."""
    try:
        return [Cast.parse(one) for one in name.split(" @ ")]
    except UsageError:
        return None


def _num_tokens(operands: dict[tuple[str, str], dict[str, Any]], in_features: int, out_features: int) -> float:
    """Return the tokens of a microbatch, from what a module's input or gradient holds."""
    widths = {"input": in_features, "grad_output": out_features}
    counts = (
        row["numel"] / (widths[name] * (row["num_tensors"] or 1)) for (_, name), row in sorted(operands.items()) if name in widths
    )
    return next(counts, 0.0)
