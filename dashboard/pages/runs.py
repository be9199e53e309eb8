"""The folder's first page: every run with its verdict, loss and chosen settings, so that the ill one is seen first."""

from __future__ import annotations

import time
from typing import Any

from dash import html
from dash.development.base_component import Component

from ..data.records import Summary
from ..data.run_settings import choices
from ..figures.sparkline import ends_in_words, sparkline
from ..figures.theme import BY_NUMBER, BY_SETTING, BY_SEVERITY, GRID_NUMBER, ICONS, NO_DATA, WORDS, plain_number
from ..web.mantine import dmc
from ..web.source import QUIET_S, ServedFolder
from ..web.urls import View, href
from ..widgets import SEPARATOR, card, code, grid, multi_control, note
from .overview import few_rules

#: How long the browser waits for verdicts before it shows those that are known; the others come with later refreshes.
WAIT_S = 3.0
#: How long the first page waits until the runs are read; those that are not come with later refreshes, the newest first.
READ_WAIT_S = 1.5

#: What stands for the first finding until the rules have run.
LOOKING = "triage is running"
#: Of a run that holds no step.
NO_STEP = "no step recorded yet"
#: What stands for everything about a run that has not been read yet.
READING = "reading"

_UNSORTED = {"sortable": False, "filter": False}
_TICK: dict[str, Any] = {"colId": "tick", "headerName": "✓", "cellRenderer": "Tick", **_UNSORTED}
COLUMNS: tuple[dict[str, Any], ...] = (
    {**_TICK, "width": 34, "minWidth": 34, "maxWidth": 34, "resizable": False},
    {"field": "name", "headerName": "Run", "cellRenderer": "Link", "width": 230, "minWidth": 130, "tooltipField": "name"},
    {
        "field": "severity",
        "headerName": "Verdict",
        "cellRenderer": "Severity",
        "comparator": BY_SEVERITY,
        "width": 110,
        "minWidth": 104,
    },
    {"field": "finding", "headerName": "First finding", "width": 270, "minWidth": 144, "tooltipField": "finding"},
    {"field": "recipe", "headerName": "Recipe", "width": 140, "minWidth": 128, "tooltipField": "recipe"},
    {"field": "last", "headerName": "Last step", "type": "rightAligned", "width": 84},
    {"field": "sampled", "headerName": "Sampled", "type": "rightAligned", "width": 80},
    {"field": "ranks", "headerName": "Ranks", "type": "rightAligned", "width": 64},
    {
        "field": "loss",
        "headerName": "Last loss",
        "type": "rightAligned",
        "width": 96,
        "valueFormatter": GRID_NUMBER,
        "comparator": BY_NUMBER,
    },
    {"colId": "line", "headerName": "Loss", "cellRenderer": "Line", **_UNSORTED, "width": 126, "minWidth": 126},
    {"field": "state", "headerName": "State", "width": 96, "minWidth": 92},
    {"field": "written", "headerName": "Last write", "width": 134, "minWidth": 134, "headerTooltip": "local time of the server"},
    {"field": "problems", "headerName": "Not readable", "width": 120, "tooltipField": "problems"},
)


def layout(view: View, source: ServedFolder) -> Component:
    """Return the page."""
    chosen = html.Span("tick two or more to compare them", id="compare-chosen", className="dim")
    label = {"aria-label": "search the runs"}
    search = dmc.TextInput(id="runs-search", value=view.get("q"), placeholder="Search  ( / )", size="xs", w=220, **label)
    record = f"fp8debug.watch(model, '{source.path}/exp1')"
    how = note("This folder is empty. To record a run into it: ", code(record))
    first = None if source.names() else html.Div(how, className="no-run-yet")
    rows = parts(source, READ_WAIT_S)
    columns, settings = configured(view, source)
    words = "last written first; click one to open it, a column's head to sort by it; "
    return html.Div(
        [
            card(
                "Runs",
                multi_control("columns", view.get("columns"), settings, "columns", "settings to show"),
                grid("runs", columns, rows, "No run yet: the first one stands here when it comes", search=view.get("q")),
                first,
                note=html.Div([search, html.Span([words, chosen])], className="controls"),
            )
        ],
        className="page",
    )


def parts(source: ServedFolder, wait_s: float = 0.0) -> list[dict[str, Any]]:
    """Return one row per run; one that is not read, or not judged, says so and comes with a later refresh.

    Args:
        source: the folder.
        wait_s: how long to wait, at most, until all runs are read.
    """
    source.read_all(wait_s)
    rows = []
    for name, summary in source.summaries():
        if summary is None:
            rows.append(row(Summary(name=name, state=READING), "unknown", READING))
            continue
        verdict, finding = "unknown", NO_STEP if summary.is_empty else "" if summary.error else LOOKING
        judged = None if summary.error else source.known(name)
        if judged is not None and (judged.known is not None or judged.failure):
            verdict = judged.verdict
            finding = next((f"{f.code} {f.name} {f.module or ''}" for f in judged.known or ()), judged.failure)
            finding = finding or few_rules(judged)
        rows.append(row(summary, verdict, finding))
    return rows


def configured(view: View, source: ServedFolder) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the columns of the grid, with the settings that the URL asks for, and the settings that can be columns."""
    settings = [summary.settings for _, summary in source.summaries() if summary is not None]
    differing, same = choices(settings)
    groups = (("differ between the runs", differing), ("same in all runs", same))
    options = [{"group": title, "items": [{"value": n, "label": n} for n in names]} for title, names in groups if names]
    chosen = [name for name in view.get("columns").split(SEPARATOR) if name]
    after = COLUMNS[_BEFORE:] if _has_problems(source) else COLUMNS[_BEFORE:-1]
    return [*COLUMNS[:_BEFORE], *map(_setting, chosen), *after], options


def _has_problems(source: ServedFolder) -> bool:
    """Tell whether any run, or a part of one, cannot be read: else a column would hold nothing."""
    return any(
        (summary.error and not summary.is_empty) or summary.problems for _, summary in source.summaries() if summary is not None
    )


#: Columns before those of settings: what a run is called, and how it fares.
_BEFORE = 5


def _setting(name: str) -> dict[str, Any]:
    """Return the column of a setting; numbers and words in one column are sorted, numbers first."""
    key = setting_key(name)
    return {"field": key, "headerName": name, "comparator": BY_SETTING, "tooltipField": key, "width": 120}


def setting_key(name: str) -> str:
    """Return the field of a setting in a row: AG Grid takes a dot in a field for a path."""
    return "setting " + name.replace(".", "\u2024")


def row(summary: Summary, verdict: str, finding: str) -> dict[str, Any]:
    """Return a run as a row of the grid."""
    return {
        "id": summary.name,
        "name": summary.name,
        "href": None if summary.error else href("overview", summary.name),
        "severity": verdict,
        "icon": ICONS[verdict],
        "word": "Judging" if finding in (LOOKING, READING) else WORDS[verdict],
        "finding": finding or NO_DATA,
        "recipe": summary.recipe,
        "last": summary.last,
        "sampled": None if summary.last is None else summary.sampled,
        "ranks": None if summary.last is None else summary.ranks,
        "loss": plain_number(summary.loss),
        "line": sparkline(summary.line),
        "lineWords": "" if summary.line is None else f"loss {ends_in_words(summary.line.steps, summary.line.values)}",
        "state": state_now(summary),
        "written": time.strftime("%Y-%m-%d %H:%M", time.localtime(summary.written)) if summary.written else NO_DATA,
        "problems": ("" if summary.is_empty else summary.error) or "; ".join(summary.problems) or NO_DATA,
        **{setting_key(name): value for name, value in summary.settings.items()},
    }


def state_now(summary: Summary) -> str:
    """Return whether a run is being written: one that was when it was read, and has been silent since, is not closed."""
    is_silent = summary.state == "writing" and time.time() - summary.written >= QUIET_S
    return "not closed" if is_silent else summary.state or "unreadable"
