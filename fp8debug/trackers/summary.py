"""A run in few numbers, for trackers: at most twenty scalars a sampled step, and its worst modules as one table.

The numbers are those of the casts that ran; in a run without FP8 those of the recipe that was tried on it (``plain_recipe``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fp8debug.errors import UnknownNameError
from fp8debug.recipes import get_recipe
from fp8debug.rules.base import Finding, Severity
from fp8debug.rules.reading.traces import has_fp8
from fp8debug.store.flop_shares import gemm_shares
from fp8debug.store.read.run import Run
from fp8debug.types import OPERAND_SITES, Gemm

#: Of a step, in the order in which trackers show them; the key is ``fp8debug/NAME``.
SCALARS: dict[str, str] = {
    **{f"operand_sqnr_db_min/{gemm}": f"lowest SQNR of an operand of {gemm}, dB" for gemm in Gemm},
    **{f"result_sqnr_db_min/{gemm}": f"lowest SQNR of a result of {gemm} against the BF16 GEMM, dB" for gemm in Gemm},
    "underflow_rate": "share of all operands' elements that the cast turns into 0",
    "underflow_rate_max": "the same of the worst operand",
    "overflow_rate": "share of all operands' elements that the cast clips",
    "overflow_rate_max": "the same of the worst operand",
    "nonfinite_sites": "operands and results that hold a NaN or Inf",
    "damage": "sum of all layers' damage, loss^2",
    "findings_error": "errors found so far",
    "findings_warning": "warnings found so far",
    "fp8_flop_share": "share of the forward GEMMs' FLOPs in FP8",
    "loss": "training loss",
}
#: Columns of the table of the worst modules.
WORST_COLUMNS = (
    "module",
    "findings",
    "operand_sqnr_db_min",
    "result_sqnr_db_min",
    "underflow_rate_max",
    "overflow_rate_max",
    "nonfinite_sites",
    "damage",
)
#: Columns of the table of findings.
FINDING_COLUMNS = ("code", "severity", "module", "gemm", "tensor", "first_step", "last_step", "message", "cure")
MAX_WORST = 10

_NONFINITE = "coalesce(num_nan, 0) + coalesce(num_inf, 0) + coalesce(num_actual_nonfinite, 0) > 0"


def step_scalars(run: Run, findings: Iterable[Finding] = (), after: int = -1) -> dict[int, dict[str, float]]:
    """Return the numbers of each sampled step by name; one of ``SCALARS`` without data is left out.

    So is one that is not finite, but for the loss: a plot of it would end with the last loss that was.

    Args:
        run: the run.
        findings: of the run; those that began at a step or before it are counted there.
        after: only steps after this one.
    """
    found = list(findings)
    share = gemm_shares(run.modules, run.gemms)
    columns = ", ".join(
        f'{_least(reference, gemm)} AS "{name}_sqnr_db_min/{gemm}"'
        for name, reference in (("operand", "operand"), ("result", "shadow"))
        for gemm in Gemm
    )
    query = (
        f"SELECT step, {columns}, {_rates()}, count(*) FILTER (WHERE {_NONFINITE}) AS nonfinite_sites, {_damage(run)},"
        f" any_value(loss) AS loss FROM sites LEFT JOIN (SELECT step, loss FROM steps) USING (step)"
        f" WHERE step > {int(after)} AND ({_running(run)}) GROUP BY step ORDER BY step"
    )
    rows = {int(row.pop("step")): row for row in run.sql(query).to_pylist()}
    known: dict[int, dict[str, float]] = {}
    for step, row in rows.items():
        row["findings_error"] = sum(f.severity is Severity.ERROR and f.steps[0] <= step for f in found)
        row["findings_warning"] = sum(f.severity is Severity.WARNING and f.steps[0] <= step for f in found)
        row["fp8_flop_share"] = None if share is None else share.fp8
        there = {name: float(row[name]) for name in SCALARS if row[name] is not None}
        known[step] = {name: value for name, value in there.items() if name == "loss" or math.isfinite(value)}
    return known


def worst_modules(run: Run, findings: Iterable[Finding] = (), most: int = MAX_WORST) -> list[dict[str, Any]]:
    """Return a row of ``WORST_COLUMNS`` for the modules with findings, errors first, then for those of the lowest SQNR.

    Args:
        run: the run; the worst value of all its sampled steps counts.
        findings: of the run.
        most: number of rows.
    """
    query = (
        f"SELECT module, {_least('operand')} AS operand_sqnr_db_min, {_least('shadow')} AS result_sqnr_db_min, {_rates()},"
        f" count(DISTINCT (gemm, tensor)) FILTER (WHERE {_NONFINITE}) AS nonfinite_sites, {_damage(run)}"
        f" FROM sites WHERE {_running(run)} GROUP BY module"
    )
    codes: dict[str, list[str]] = {}
    ranks: dict[str, int] = {}
    for finding in findings:
        for module in (finding.module, *finding.also):
            if module is not None:
                codes.setdefault(module, []).append(finding.code)
                ranks[module] = max(ranks.get(module, 0), finding.severity.rank)

    def order(row: dict[str, Any]) -> tuple[int, int, float, str]:
        sqnr = row["operand_sqnr_db_min"]
        return -ranks.get(row["module"], 0), -row["nonfinite_sites"], math.inf if sqnr is None else sqnr, row["module"]

    rows = sorted(run.sql(query).to_pylist(), key=order)[:most]
    return [{name: " ".join(codes.get(row["module"], ())) if name == "findings" else row[name] for name in WORST_COLUMNS}
            for row in rows]  # fmt: skip


def finding_rows(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """Return a row of ``FINDING_COLUMNS`` for each finding."""
    known = [{**f.to_dict(), "first_step": f.steps[0], "last_step": f.steps[1]} for f in findings]
    return [{name: row[name] for name in FINDING_COLUMNS} for row in known]


def _least(reference: str, gemm: str | None = None) -> str:
    which = f"reference = '{reference}' AND isfinite(sqnr_db)" + (f" AND gemm = '{gemm}'" if gemm else "")
    return f"min(sqnr_db) FILTER (WHERE {which})"


def _rates() -> str:
    """Return the rates of operands in SQL: over all elements, and of the worst operand."""
    kinds = (("underflow", "num_underflow"), ("overflow", "num_saturated"))
    return ", ".join(
        f"sum({slot}) FILTER (WHERE {slot} IS NOT NULL) / nullif(sum(numel) FILTER (WHERE {slot} IS NOT NULL), 0) AS {name}_rate,"
        f" max({name}_rate) AS {name}_rate_max"
        for name, slot in kinds
    )


def _damage(run: Run) -> str:
    return f"sum({'damage' if 'damage' in run.slots else 'CAST(NULL AS DOUBLE)'}) AS damage"


def _running(run: Run) -> str:
    """Return the predicate of the rows that count: what ran in FP8, else the casts of the recipe that was tried."""
    if has_fp8(run):
        return "actual AND cast_name NOT IN ('bf16', 'bf16 @ bf16')"
    try:
        recipe = get_recipe(str(run.manifest.get("plain_recipe")))
    except UnknownNameError:
        return "FALSE"
    casts = recipe.casts
    tried = [
        f"(gemm = '{gemm}' AND tensor = '{tensor}' AND cast_name = '{casts[gemm, tensor]}')" for gemm, tensor in OPERAND_SITES
    ]
    return f"NOT actual AND reference = 'operand' AND ({' OR '.join(tried)})"
