"""Everything triage found, to filter, sort and take along; one finding with its evidence and its rule's manual page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.reports.evidence import charts_of, loss_chart
from fp8debug.rules import RULES

from ..figures.base import empty
from ..figures.evidence import evidence
from ..figures.theme import NO_DATA, level
from ..web.run_view import Judgement, RunView
from ..web.urls import View, href
from ..widgets import badge, card, code, graph, grid, note, number, poster, segments
from . import overview
from .axes import controls as axis_controls
from .axes import shaped
from .base import Page

if TYPE_CHECKING:
    from fp8debug import Finding

GROUP = "none"
COLUMNS: tuple[dict[str, Any], ...] = tuple(
    {**column, "cellRenderer": "Link", "headerName": "Code", "width": 90, "maxWidth": 130}
    if column["field"] == "code"
    else {key: value for key, value in column.items() if key != "cellRenderer"}
    if column["field"] == "module"
    else column
    for column in overview.COLUMNS
)


def row(finding: Finding, run: str | None) -> dict[str, Any]:
    """Return a finding as a row whose link shows its evidence."""
    target = href("findings", run, code=finding.code, culprit=finding.module)
    return {**overview.row(finding, run), "href": target}


def grouped(findings: Sequence[Finding], run: str | None) -> list[dict[str, Any]]:
    """Return one row per culprit: its worst finding, with the codes and victims of all of them."""
    by_module: dict[str | None, list[Finding]] = {}
    for finding in findings:
        by_module.setdefault(finding.module, []).append(finding)
    rows = []
    for module, own in by_module.items():
        shown = row(own[0], run)
        others = dict.fromkeys(name for f in own for name in (*f.also, *f.victims))
        since, until = min(f.steps[0] for f in own), max(f.steps[1] for f in own)
        rows.append(
            {
                **shown,
                "id": str(module),
                "code": " ".join(dict.fromkeys(f.code for f in own)),
                "name": ", ".join(dict.fromkeys(f.name for f in own)),
                "since": since,
                "until": until,
                "message": f"{len(own)} finding{'s' if len(own) > 1 else ''}; {own[0].message}",
                "others": ", ".join(others) or NO_DATA,
            }
        )
    return rows


def chosen(view: View, judged: Judgement) -> Finding | None:
    """Return the finding of the URL, or the first."""
    findings = judged.findings
    asked, culprit = view.get("code"), view.get("culprit")
    named = (f for f in findings if f.code == asked and (f.module or "") == culprit)
    return next(named, findings[0] if findings else None)


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    about, rows, head, figure, manual = parts(view, run_view)
    choices = [{"value": "none", "label": "each finding"}, {"value": "culprit", "label": "by culprit"}]
    controls = html.Div(
        [
            segments("group", GROUP, view.get("group", GROUP), choices, "rows"),
            html.Button(
                "JSON", id="findings-json", className="linkish", title="save the document of fp8debug triage --format json"
            ),
            html.Button("CSV", id="findings-csv", className="linkish", title="save as fp8debug triage --format csv writes it"),
            dcc.Download(id="findings-file"),
        ],
        className="controls",
    )
    return html.Div(
        [
            card(
                "Findings",
                html.Div(about, id="findings-about"),
                grid("all-findings", COLUMNS, rows, overview.none_yet(run_view), csv=False),
                note=controls,
            ),
            html.Div(
                [
                    card(
                        "Evidence",
                        html.Div(head, id="finding-head"),
                        axis_controls(view, run_view),
                        graph("evidence", figure),
                    ),
                    card("About the rules", html.Div(manual, id="finding-manual", className="manual", tabIndex=0)),
                ],
                className="columns columns-wide-left",
            ),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about the list, its rows, and head, evidence and manual page of the chosen finding."""
    judged = run_view.judged()
    findings = judged.findings
    rows = grouped(findings, view.run) if view.get("group") == "culprit" else [row(f, view.run) for f in findings]
    finding = chosen(view, judged)
    if finding is None:
        waiting = "Triage is running; evidence appears with the first finding."
        head = None if judged.is_pending else html.P(_no_evidence(judged), className="no-evidence")
        return _about(judged), rows, head, empty(waiting, 160), _silent(judged)
    site = " ".join(part for part in (finding.module, finding.gemm, finding.tensor) if part)
    return (
        _about(judged),
        rows,
        _head(view, finding),
        shaped(_evidence(run_view, judged, finding), view, run_view).about(run_view.name, f"{finding.code} {finding.name}", site),
        _manual(finding),
    )


def _about(judged: Judgement) -> Component:
    if judged.failure:
        return note(f"Triage could not run: {judged.failure}", kind="warning")
    if judged.is_pending:
        return poster("Triage is running.")
    from fp8debug.rules.reading.lost import Lost

    lost = "".join(f" {Lost(**entry)}." for entry in judged.findings.lost)
    if lost:
        return note(f"Not all was recorded:{lost}", kind="warning")
    ran = f"{overview.rules_in_words(judged)}{overview.skipped_in_words(judged)}"
    if not judged.findings:
        return note(f"{ran}; none found a fault.")
    return note(f"Most likely cause first: errors before warnings, then by first step. {ran}.")


def _no_evidence(judged: Judgement) -> str:
    """Return why there is no evidence."""
    if judged.failure:
        return "Triage could not run, so there is no evidence to show."
    return f"{overview.rules_in_words(judged)} and found no fault, so there is no evidence to show."


def _head(view: View, finding: Finding) -> list[Component]:
    grade = level(finding.severity)
    name = finding.module or "the whole run"
    where = dcc.Link(name, href=overview.module_href(finding, view.run)) if finding.module else name
    limit = f", limit {number(finding.threshold)}" if finding.threshold is not None else ""
    unit = "" if finding.unit == "1" else f" {finding.unit}"
    site = " ".join(part for part in (finding.gemm, finding.tensor) if part)
    first = [badge(grade, f"{finding.code} {finding.name}"), where, *([html.Span(site)] if site else [])]
    if finding.value is not None:
        first.append(f"value {number(finding.value)}{unit}{limit}")
    lines = [html.Div(first, className="chosen"), html.P(finding.message), html.P([html.B("Cure: "), finding.cure])]
    for label, names in (("Also: ", finding.also), ("Victims: ", finding.victims)):
        if names:
            links: list[Any] = [dcc.Link(n, href=overview.module_href(finding, view.run, n)) for n in names[:12]]
            spaced = [part for link in links for part in (link, " ")]
            lines.append(html.P([html.B(label), *spaced, f"and {len(names) - 12} more" if len(names) > 12 else ""]))
    return lines


def _evidence(run_view: RunView, judged: Judgement, finding: Finding) -> Any:
    try:
        charts = charts_of(run_view.run, finding)
        if not charts:
            loss = loss_chart(run_view.run, judged.findings)
            charts = [loss] if loss is not None else []
    except Fp8DebugError as error:
        return empty(str(error), 160)
    return evidence(charts, finding.steps)


def _manual(finding: Finding) -> list[Component]:
    if finding.code not in RULES:
        return [note(f"No rule {finding.code} is installed here.")]
    rule = RULES.get(finding.code)
    pages = [part for heading, text in rule.manual().items() for part in (html.H3(heading), *reflowed(text))]
    return [html.P([html.B(f"{rule.code} {rule.name}. "), rule.summary]), *pages]


def reflowed(text: str) -> list[Component]:
    """Return text of short lines as paragraphs and lists that are as wide as their place."""
    shown: list[Component] = []
    for line in text.splitlines():
        bare, last = line.strip(), shown[-1] if shown else None
        is_item = line.startswith("- ")
        if is_item and not isinstance(last, html.Ul):
            shown.append(html.Ul([html.Li(bare[2:])]))
        elif is_item and isinstance(last, html.Ul):
            last.children.append(html.Li(bare[2:]))
        elif isinstance(last, html.Ul) and line.startswith(" "):
            last.children[-1].children += f" {bare}"
        elif isinstance(last, html.P) and bare:
            last.children += f" {bare}"
        else:
            shown.append(html.P(bare))
    return [part for part in shown if part.children]


def _silent(judged: Judgement) -> list[Component]:
    lines = [html.Li([code(rule), f" {reason}"]) for rule, reason in judged.findings.skipped]
    if lines:
        return [html.P("Rules skipped, and why:"), html.Ul(lines)]
    return [note("No verdict yet." if judged.is_pending or judged.failure else "No rule was skipped.")]


PAGE = Page(name="findings", layout=layout, parts=parts)
