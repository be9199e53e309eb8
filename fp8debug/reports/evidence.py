"""The series behind a finding: what its site's statistics did over the steps, the accused one first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fp8debug.reports.svg import MIN_SPREAD, Chart
from fp8debug.rules import Finding, Findings
from fp8debug.rules.reading.losses import read_losses
from fp8debug.store.read.run import Run
from fp8debug.types import TensorRole

#: What can be drawn of a site, and its title.
COLUMNS = {
    "overflow_rate": "share clipped",
    "underflow_nonzero_rate": "share of the nonzero elements that underflows",
    "num_actual_nonfinite": "elements made NaN or Inf",
    "gain": "gain",
    "sqnr_db": "SQNR in dB",
    "headroom": "headroom",
    "amax": "amax",
}
MAX_PANELS = 4
OPERANDS = tuple(role.value for role in (TensorRole.INPUT, TensorRole.WEIGHT, TensorRole.GRAD_OUTPUT))


def charts_of(run: Run, finding: Finding) -> list[Chart]:
    """Return the charts of a finding's site; none for a finding that names no site."""
    if not (finding.module and finding.gemm and finding.tensor):
        return []
    columns = [column for column in COLUMNS if run.has(column)]
    reference = "reference = 'operand'" if finding.tensor in OPERANDS else "reference <> 'operand'"
    query = (
        f"SELECT step, reference, {', '.join(f'max({_finite(column)}) AS {column}' for column in columns)} FROM sites"
        f" WHERE actual AND {reference} AND module = ? AND gemm = ? AND tensor = ? GROUP BY step, reference ORDER BY step"
    )
    rows = run.sql(query, [finding.module, finding.gemm, finding.tensor]).to_pylist()
    charts = []
    for kind in sorted({row["reference"] for row in rows}):
        own = [row for row in rows if row["reference"] == kind]
        against = "" if kind == "operand" else f" against the {kind} GEMM"
        for column in columns:
            if any(row[column] is not None for row in own):
                charts.append((_is_accused(finding, own, column), _chart(finding, own, column, against)))
    charts.sort(key=lambda entry: not entry[0])
    return [chart for is_first, chart in charts if is_first or _moves(chart.values)][:MAX_PANELS]


def _finite(column: str) -> str:
    """Return SQL for a statistic that is NaN where no element is finite: of none the largest magnitude would be 0."""
    if column == "num_actual_nonfinite":
        return column
    return f"CASE WHEN num_nan + num_inf >= numel AND numel > 0 THEN 'nan'::DOUBLE ELSE {column} END"


def _moves(values: Sequence[float | None]) -> bool:
    """Return whether values spread by more than ``MIN_SPREAD`` of the largest (less is noise, and no evidence), or become NaN."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if any(value is not None and not math.isfinite(value) for value in values):
        return True
    return bool(known) and max(known) - min(known) > MIN_SPREAD * max(map(abs, known))


def _chart(finding: Finding, rows: Sequence[dict[str, Any]], column: str, against: str) -> Chart:
    limit = finding.threshold if _is_accused(finding, rows, column) else None
    if column == "gain" and limit is not None:
        limit = None  # the threshold is of its distance from 1
    return Chart(
        title=COLUMNS[column] + against,
        steps=[row["step"] for row in rows],
        values=[row[column] for row in rows],
        limit=limit,
        span=finding.steps,
    )


def _is_accused(finding: Finding, rows: Sequence[dict[str, Any]], column: str) -> bool:
    """Return whether a column is the one whose value the finding states."""
    if finding.value is None:
        return False
    values = [row[column] for row in rows if row[column] is not None]
    if column == "gain":
        values = [abs(value - 1) for value in values]
    return any(math.isclose(value, finding.value, rel_tol=1e-6) for value in values)


def loss_chart(run: Run, findings: Findings, baseline: Run | None = None) -> Chart | None:
    """Return the loss with a line where each finding begins; None when none was recorded.

    Args:
        run: the run.
        findings: in it.
        baseline: a run whose loss is drawn beside it.
    """
    steps, losses = read_losses(run)
    if not steps:
        return None
    begins: dict[int, list[str]] = {}
    for finding in findings:
        begins.setdefault(finding.steps[0], []).append(finding.code)
    marks = [(step, " ".join(dict.fromkeys(codes))) for step, codes in sorted(begins.items())]
    others = ([], []) if baseline is None else read_losses(baseline)
    beside = (baseline.name, *others) if baseline is not None and others[0] else None
    return Chart(title="training loss", steps=steps, values=losses, marks=marks, beside=beside, width=900, height=240)
