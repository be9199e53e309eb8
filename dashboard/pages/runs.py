"""The folder's first page: every run with its verdict, so that the ill one is seen before it is run_view."""

from __future__ import annotations

import time
from typing import Any

from dash import html
from dash.development.base_component import Component

from ..data.records import Summary
from ..figures.theme import BY_NUMBER, BY_SEVERITY, GRID_NUMBER, ICONS, NO_DATA, WORDS, plain_number
from ..web.mantine import dmc
from ..web.source import ServedFolder
from ..web.urls import href
from ..widgets import card, code, grid, note

#: How long the browser waits for verdicts before it shows those that are known; the others come with later refreshes.
WAIT_S = 3.0

#: What stands for the first finding until the rules have run.
LOOKING = "triage is running"

_TICK: dict[str, Any] = {"colId": "tick", "headerName": "✓", "cellRenderer": "Tick", "sortable": False, "filter": False}
COLUMNS: tuple[dict[str, Any], ...] = (
    {**_TICK, "width": 34, "minWidth": 34, "maxWidth": 34, "resizable": False},
    {"field": "name", "headerName": "Run", "cellRenderer": "Link", "width": 180, "tooltipField": "name"},
    {"field": "severity", "headerName": "Verdict", "cellRenderer": "Severity", "comparator": BY_SEVERITY, "width": 110},
    {"field": "finding", "headerName": "First finding", "width": 300, "tooltipField": "finding"},
    {"field": "recipe", "headerName": "Recipe", "width": 170, "tooltipField": "recipe"},
    {"field": "last", "headerName": "Last step", "type": "rightAligned", "width": 90},
    {"field": "sampled", "headerName": "Sampled", "type": "rightAligned", "width": 90},
    {"field": "ranks", "headerName": "Ranks", "type": "rightAligned", "width": 76},
    {
        "field": "loss",
        "headerName": "Last loss",
        "type": "rightAligned",
        "width": 96,
        "valueFormatter": GRID_NUMBER,
        "comparator": BY_NUMBER,
    },
    {"field": "state", "headerName": "State", "width": 96, "minWidth": 92},
    {"field": "written", "headerName": "Last write", "width": 134, "minWidth": 134, "headerTooltip": "local time of the server"},
    {"field": "problems", "headerName": "Not readable", "width": 120, "tooltipField": "problems"},
)


def layout(source: ServedFolder) -> Component:
    """Return the page."""
    chosen = html.Span("tick two or more to compare them", id="compare-chosen", className="dim")
    label = {"aria-label": "search the runs"}
    search = dmc.TextInput(id="runs-search", placeholder="Search  ( / )", size="xs", w=220, **label)
    record = f"fp8debug.watch(model, '{source.path}/exp1')"
    first = None if source.names() else note("This folder is empty. To record a run into it: ", code(record))
    return html.Div(
        [
            card(
                "Runs",
                grid("runs", COLUMNS, parts(source), "No run yet: the first one stands here when it comes"),
                first,
                note=html.Div([search, html.Span(["last written first; click one to open it; ", chosen])], className="controls"),
            )
        ],
        className="page",
    )


def parts(source: ServedFolder) -> list[dict[str, Any]]:
    """Return one row per run; a verdict that is not known yet says so and comes with a later refresh."""
    rows = []
    for name in source.names():
        summary = source.summary(name)
        verdict, finding = "unknown", "" if summary.error else LOOKING
        judged = None if summary.error else source.known(name)
        if judged is not None and (judged.known is not None or judged.failure):
            verdict = judged.verdict
            finding = next((f"{f.code} {f.name} {f.module or ''}" for f in judged.known or ()), judged.failure)
        rows.append(row(summary, verdict, finding))
    return rows


def row(summary: Summary, verdict: str, finding: str) -> dict[str, Any]:
    """Return a run as a row of the grid."""
    return {
        "id": summary.name,
        "name": summary.name,
        "href": None if summary.error else href("overview", summary.name),
        "severity": verdict,
        "icon": ICONS[verdict],
        "word": WORDS[verdict],
        "finding": finding or NO_DATA,
        "recipe": summary.recipe,
        "last": summary.last,
        "sampled": summary.sampled,
        "ranks": summary.ranks,
        "loss": plain_number(summary.loss),
        "state": summary.state or "unreadable",
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.written)) if summary.written else NO_DATA,
        "problems": summary.error or "; ".join(summary.problems) or NO_DATA,
    }
