"""A run in a notebook: its rich representation, and figures with their values as tables; nothing needs a network or a script.

``Run`` has these functions as methods; they read rules and healthy ranges, which lie above the store.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fp8debug.errors import Fp8DebugError, NoMatchError, UnknownNameError, UsageError
from fp8debug.escaping import one_line
from fp8debug.reports.page import badge, loss_section, verdict_sections
from fp8debug.reports.svg import Chart
from fp8debug.rules import Findings, triage
from fp8debug.store.read.run import Run
from fp8debug.types import Gemm, TensorRole, match_fqn

from ..data import queries
from ..data.health import METRICS
from ..data.module_health import NAMES, NO_DATA, NONFINITE, ModuleHealth, module_health
from ..data.step_ranges import MOST_ROWS
from .heatmap import codes_by_module, heatmap
from .html_figure import HtmlFigure, fragment, table_figure

#: Findings in a representation, and names in a message.
MAX_FINDINGS, MAX_NAMES = 8, 12
#: Statistics of a site that are drawn, and their titles; all others are in the table.
DRAWN = {
    "sqnr_db": "SQNR in dB",
    "gain": "gain",
    "underflow_rate": "share that underflows",
    "overflow_rate": "share clipped",
    "amax": "amax",
}
#: Choices of sites that are several.
MANY = ("operands", "results", "exact")
_FINDING_COLUMNS = {
    **dict.fromkeys(("code", "name", "severity", "module", "gemm", "tensor", "cast"), pa.string()),
    **dict.fromkeys(("first_step", "last_step"), pa.int64()),
    **dict.fromkeys(("value", "threshold"), pa.float64()),
    **dict.fromkeys(("unit", "message", "cure", "ranks", "also", "victims"), pa.string()),
}


def run_html(run: Run) -> str:
    """Return a run's representation: verdict, loss, modules by steps, worst modules. An error of reading is one line in it."""
    try:
        return fragment(_summary(run))
    except Fp8DebugError as error:
        return fragment(f"<p>{badge('error')} {escape(str(error))}</p>")


def _judged(run: Run) -> Findings:
    """Return the findings of a run, judged once for each state of its files."""
    return run.memo("notebook findings", lambda: triage(run))


def _summary(run: Run) -> str:
    if run.num_rows > MOST_ROWS:
        words = f"{run.num_rows:,} rows: run.findings() judges them, run.heatmap('sqnr_db') reads some of the steps"
        return f"<h2>{escape(run.name)}</h2><p class='muted'>not judged yet; {words}</p>"
    findings = _judged(run)
    first, last = findings.steps
    what = (findings.classification or {}).get("what")
    lead = f"<p class='lead'>{escape(what)}.</p>" if what else ""
    facts = f"steps {first} to {last}{_progress(run)}; run.show() has the evidence, run.findings() the table"
    return (
        f"<h2>{badge(findings.verdict)} {escape(run.name)}</h2>{lead}<p class='muted'>{escape(facts)}</p>"
        f"{loss_section(run, findings)}"
        f"<section><h3>Modules by steps</h3>{_health_html(run, findings, with_modules=False)}</section>"
        f"<section>{_findings_html(findings)}</section>"
    )


def _progress(run: Run) -> str:
    """Return what to do about a run that is still being written."""
    known = run.rank_manifests.values()
    if not known or all(manifest.get("ended") for manifest in known):
        return ""
    return ", still being written or killed: run.refresh() reads on"


def _health_html(run: Run, findings: Findings, *, with_modules: bool) -> str:
    health = run.memo("notebook health", lambda: module_health(run))
    return heatmap(health, codes_by_module(findings), with_modules=with_modules)


def _findings_html(findings: Findings) -> str:
    if not findings:
        asked = len(findings.thresholds)
        return f"<p>No finding: {asked - len(findings.skipped)} of {asked} rules ran; none found a fault.</p>"
    rows = "".join(
        f"<li>{badge(str(f.severity))} <b>{escape(f.code)}</b> <code>{escape(one_line(f.module or 'no layer'))}</code>: "
        f"{escape(one_line(f.message))}. <span class='muted'>Cure: {escape(one_line(f.cure))}.</span></li>"
        for f in findings[:MAX_FINDINGS]
    )
    more = f"<p class='muted'>and {len(findings) - MAX_FINDINGS} more</p>" if len(findings) > MAX_FINDINGS else ""
    return f"<h3>Worst modules</h3><ul>{rows}</ul>{more}"


def show_run(run: Run) -> None:
    """Display the whole of a run in a notebook: verdict, what to do, loss, every module by steps, findings.

    In a terminal the verdict and the findings are printed.
    """
    findings = _judged(run)
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None:
        print("\n".join(map(one_line, _lines(findings))))
        return
    from IPython.display import display

    parts = [
        *verdict_sections(run, findings),
        f"<section><h2>Modules by steps</h2>{_health_html(run, findings, with_modules=True)}",
    ]
    html = "".join([*parts, f"</section><section>{_findings_html(findings)}</section>"])
    figure = HtmlFigure(title=run.name, html=html, table=_findings_table(findings))
    display(figure)  # type: ignore[no-untyped-call]  # IPython states no types for it


def _lines(findings: Findings) -> list[str]:
    first, last = findings.steps
    lines = [f"{findings.run}: {findings.verdict}, {len(findings)} findings, steps {first} to {last}"]
    return [*lines, *(f"{f.code} {f.severity} {f.module or 'no layer'}: {f.message}; cure: {f.cure}" for f in findings)]


def findings_figure(
    run: Run, baseline: Run | str | Path | None = None, select: Sequence[str] = ("F",), ignore: Sequence[str] = ()
) -> HtmlFigure:
    """Judge a run; return the findings as a table. Arguments and errors are those of :func:`fp8debug.triage`."""
    is_plain = baseline is None and tuple(select) == ("F",) and not ignore
    findings = _judged(run) if is_plain else triage(run, baseline, select, ignore)
    table = _findings_table(findings)
    shown = ["code", "severity", "module", "gemm", "tensor", "first_step", "last_step", "message", "cure"]
    return table_figure(f"{findings.run}: {findings.verdict}", table, shown)


def _findings_table(findings: Findings) -> pa.Table:
    rows = [findings.flat(finding) for finding in findings]
    for row in rows:
        row |= {name: ", ".join(map(str, row[name])) for name in ("ranks", "also", "victims")}
    schema = pa.schema(_FINDING_COLUMNS.items())
    return pa.Table.from_pylist([{name: row[name] for name in schema.names} for row in rows], schema=schema)


def heatmap_figure(run: Run, metric: str | None = None, site: str | None = None, module: str = "*") -> HtmlFigure:
    """Return a metric of modules over steps.

    Args:
        run: the run.
        metric: a column of ``sites``; health by default, which is the worst of all metrics with a healthy range.
        site: ``gemm.tensor`` as ``fprop.input``, ``operands``, ``results`` (against the shadow) or ``exact``; all by
            default.
        module: glob over module names.

    Returns:
        The figure. Rows of its table: ``module``, ``step`` (first of the cell), ``level``, ``metric`` and ``value`` of the worst.

    Raises:
        UnknownNameError: no such metric or site.
        UsageError: the run has no value of it.
        NoMatchError: no module matches the glob.
    """
    if metric is not None:
        queries.column(metric)
    if site is not None and site not in MANY:
        _check_site(*site.partition(".")[::2])
    names = [str(m["fqn"]) for m in run.modules]
    chosen = set(match_fqn(names, module))
    if not chosen:
        raise NoMatchError("module", module, names)
    health = module_health(run, METRICS if metric is None else [metric], site)
    rows = [i for i, name in enumerate(health.modules) if name in chosen]
    if (health.levels[rows] == NO_DATA).all():
        where = f" at {site}" if site else ""
        names = queries.recorded(run)
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        known = f"recorded are {', '.join(names[:MAX_NAMES])}{more}" if names else "no metric is"
        raise UsageError(f"{metric or 'health'}{where} is not recorded in {run.name}; {known}")
    health = _only(health, rows)
    title = f"{run.name}: {metric or 'health'}" + (f" at {site}" if site else "")
    return HtmlFigure(title=title, html=f"<h3>{escape(title)}</h3>{heatmap(health)}", table=_health_table(health))


def _only(health: ModuleHealth, rows: Sequence[int]) -> ModuleHealth:
    """Return the health of some of the modules."""
    return replace(
        health,
        modules=tuple(health.modules[i] for i in rows),
        levels=health.levels[rows],
        causes=health.causes[rows],
        values=health.values[rows],
    )


def _health_table(health: ModuleHealth) -> pa.Table:
    places, columns = np.nonzero(health.levels != NO_DATA)
    levels = health.levels[places, columns].tolist()
    values = health.values[places, columns].astype(np.float64)
    words = [NAMES[level] if health.is_judged or level == NONFINITE else None for level in levels]
    return pa.table(
        {
            "module": pa.array([health.modules[i] for i in places.tolist()], pa.string()),
            "step": pa.array(health.steps[columns].astype(np.int64)),
            "level": pa.array(words, pa.string()),
            "metric": pa.array([health.metrics[i] for i in health.causes[places, columns].tolist()], pa.string()),
            "value": pa.array(values, pa.float64(), mask=np.isnan(values)),
        }
    )


def _check_site(gemm: str, tensor: str) -> None:
    for kind, name, known in (("gemm", gemm, list(Gemm)), ("tensor", tensor, list(TensorRole))):
        if name not in (names := [str(one) for one in known]):
            raise UnknownNameError(kind, name, names)


def site_figure(run: Run, module: str, gemm: str = "fprop", tensor: str = "input") -> HtmlFigure:
    """Return the statistics of one site over steps.

    Args:
        run: the run.
        module: FQN.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        tensor: an operand or result of it.

    Returns:
        The figure. Its table is that of ``run.table()``: one row per step, cast and reference, what-if casts too.

    Raises:
        UnknownNameError: no such module, gemm or tensor.
        UsageError: nothing was recorded at that site.
    """
    names = [str(m["fqn"]) for m in run.modules]
    if module not in names:
        raise UnknownNameError("module", module, names)
    _check_site(gemm, tensor)
    where = " AND ".join(f"{name} = ?" for name in ("module", "gemm", "tensor"))
    columns = [name for name in run.columns if name not in ("log2_hist", "ranks")]
    table = run.sql(
        f"SELECT {', '.join(columns)} FROM sites WHERE {where} ORDER BY step, reference, actual DESC, cast_name",
        [module, gemm, tensor],
    )
    if not table.num_rows:
        there = run.sql("SELECT DISTINCT gemm, tensor FROM raw WHERE module = ? ORDER BY gemm, tensor", [module]).to_pylist()
        known = ", ".join(f"{row['gemm']} {row['tensor']}" for row in there) or "no site"
        raise UsageError(f"{module} {gemm} {tensor} is not recorded in {run.name}; recorded of this module: {known}")
    title = f"{run.name}: {module} {gemm} {tensor}"
    charts = "".join(f"<div>{chart.to_svg()}</div>" for chart in _charts(table))
    return HtmlFigure(title=title, html=f"<h3>{escape(title)}</h3><div class='charts'>{charts}</div>", table=table)


def _is_lost(row: Mapping[str, Any]) -> bool:
    """Return whether no element is finite: of none, statistics are no numbers."""
    return 0 < (row["numel"] or 0) <= (row["num_nan"] or 0) + (row["num_inf"] or 0)


def _charts(table: pa.Table) -> list[Chart]:
    rows = [row for row in table.to_pylist() if row["actual"]]
    charts = []
    for reference in dict.fromkeys(row["reference"] for row in rows):
        own = [row for row in rows if row["reference"] == reference]
        against = "" if reference == "operand" else f" against the {reference} GEMM"
        for column, title in DRAWN.items():
            if any(row[column] is not None for row in own):
                values = [math.nan if _is_lost(row) else row[column] for row in own]
                charts.append(Chart(title=title + against, steps=[row["step"] for row in own], values=values))
    return charts
