"""Modules by steps: the health, or any metric at any site under any cast, folded, sorted and filtered as the URL says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data import queries
from ..data.health import DOC, HEALTH
from ..data.healthy_ranges import envelope
from ..data.heat_rows import MAX_ROWS, ORDERS, HeatRows, arranged, default_fold
from ..data.metric_cache import METRICS
from ..data.metric_labels import grouped, label_of, with_name
from ..data.records import Heat
from ..figures import base as figures
from ..figures.axes import is_over_steps, rescaled
from ..figures.module import SITES
from ..web import source
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import SEPARATOR, card, control, graph, note, text_control
from .axes import choice_of_x, scale_of
from .base import Page

METRIC, SITE = HEALTH, "worst"
#: Units of the schema that a reader of the page does not know.
UNITS = {"x": "units of the tensor", "x^2": "squared units of the tensor", "log2": "powers of two"}
#: Of a large run, for its first half minute.
READING = " The main metrics are being read into memory; the picture is drawn anew from all steps when they are there."
FOLD_LABELS = {
    "modules": "every module",
    "blocks": "blocks: blocks.3.*",
    "places": "same place in all blocks: blocks.{0..5}.mlp.up",
    "stacks": "all blocks: blocks.*",
}
ORDER_LABELS = {"order": "execution order", "worst": "worst first"}


def site_options() -> list[dict[str, Any]]:
    """Return the choices of site: the worst of many first, then the nine."""
    many = [
        {"value": SITE, "label": "worst (health: all sites; else operands)"},
        {"value": "all", "label": "all operands and results (worst)"},
        {"value": "operands", "label": "all operands (worst)"},
        {"value": "results", "label": "all results, quantization error (worst)"},
        {"value": "exact", "label": "all results, accumulation error (worst)"},
    ]
    nine = [{"value": f"{g}.{t}", "label": f"{g} {t}"} for line in SITES for g, t in line]
    return [{"group": "worst of", "items": many}, {"group": "one site", "items": nine}]


def metric_options(run_metrics: list[str]) -> list[dict[str, Any]]:
    """Return the recorded metrics by group, in words with the column's name."""
    return [
        {"group": group, "items": [{"value": name, "label": with_name(name)} for name in names]}
        for group, names in grouped(run_metrics)
    ]


def cast_options(casts: list[tuple[str, bool]]) -> list[dict[str, str]]:
    """Return the choices of cast."""
    names = [{"value": name, "label": name + ("" if running else " (what-if)")} for name, running in casts]
    kinds = {running for _, running in casts}
    many = [("running", "running cast", True), ("what-if", "all what-if casts (worst)", False)]
    return [*({"value": value, "label": label} for value, label, running in many if running in kinds), *names]


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    metrics = metric_options(run_view.recorded())
    cast = run_view.default_cast()
    casts = run_view.casts()
    fold = default_fold(len(run_view.run.modules))
    about, figure = parts(view, run_view)
    healths = [{"group": "all metrics", "items": [{"value": HEALTH, "label": "health"}]}]
    controls = html.Div(
        [
            control("metric", METRIC, view.get("metric", METRIC), [*healths, *metrics], "metric", 230),
            control("site", SITE, view.get("site", SITE), site_options(), "site", 290),
            control("cast", cast, view.get("cast", cast), cast_options(casts), "cast", 290),
            control("fold", fold, view.get("fold", fold), _options(FOLD_LABELS), "rows", 190),
            control("sort", ORDERS[0], view.get("sort", ORDERS[0]), _options(ORDER_LABELS), "sort", 160),
            text_control("filter", view.get("filter"), "filter", "name or *.mlp.*", 200),
            choice_of_x(view, run_view),
        ],
        className="controls",
    )
    return html.Div(
        [card("Modules by steps", controls, html.Div(about, id="heat-about"), graph("heat", figure))], className="page"
    )


def _options(labels: dict[str, str]) -> list[dict[str, str]]:
    return [{"value": value, "label": label} for value, label in labels.items()]


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about the figure, and the figure."""
    metric, site = view.get("metric", METRIC), view.get("site", SITE)
    if site == SITE:
        site = "all" if metric == HEALTH else "operands"
    cast = view.get("cast") or run_view.default_cast()
    if metric != HEALTH and metric not in run_view.recorded() and not run_view.run.has(metric):
        text = f"{metric} is not recorded in this run; recorded are {', '.join(run_view.recorded()) or 'no metrics'}."
        return note(text, kind="warning"), figures.empty("not recorded", 300)
    try:
        heat = run_view.heat(metric, site, cast, (view.get_int("from"), view.get_int("to")), at_once=True)
    except Fp8DebugError as error:
        return note(str(error), kind="warning"), figures.empty("not recorded", 300)
    heat = replace(heat, marks=source.marks(run_view.judged().known or (), by_module=True))
    rows = arranged(
        heat,
        fold=view.get("fold", default_fold(len(run_view.run.modules))),
        opened=[label for label in view.get("open").split(SEPARATOR) if label],
        text=view.get("filter"),
        order=view.get("sort", ORDERS[0]),
        rows=_rows(view),
    )
    if heat.modules and not rows.total:
        clear = dcc.Link("show all modules", href=_href(view, "filter"))
        return note(f"No module matches {view.get('filter')!r}. ", clear, kind="warning"), figures.empty("no such module", 300)
    words = _about(heat, site, len(run_view.run.modules))
    if heat.steps_apart > 1 and run_view.is_loading_cache and metric in (HEALTH, *METRICS):
        words += READING
    about = html.Div([note(words), *_ways(view, rows)])
    settings = [view.get(key) for key in ("from", "to", "fold", "open", "filter", "sort", "rows")]
    named = (run_view.name, site.replace(".", " "), HEALTH if metric == HEALTH else label_of(metric))
    figure, scale = figures.heatmap(rows.heat, " ".join(settings), rows).about(*named), scale_of(run_view, view.get("x"))
    return about, figure if scale is None or not is_over_steps(figure) else rescaled(figure, scale)


def _rows(view: View) -> tuple[int, int] | None:
    """Return the first and the last row in the URL, as ``rows=12:40``."""
    first, _, last = view.get("rows").partition(":")
    return (int(first), int(last)) if first.isdecimal() and last.isdecimal() else None


def _href(view: View, *without: str, **params: object) -> str:
    kept = {key: value for key, value in view.params.items() if key not in without}
    return href("heatmap", view.run, **{**kept, **params})


def _ways(view: View, rows: HeatRows) -> list[Component]:
    """Return how many rows are drawn of how many, and the links to the others, to the whole and to closed folds."""
    drawn = len(rows.heat.modules)
    ways: list[Component | str] = []
    if drawn < rows.total:
        ways.append(f"Rows {rows.first + 1:,} to {rows.first + drawn:,} of {rows.total:,}.")
        size = min(MAX_ROWS, max(drawn, 1))
        for words, first in (("previous rows", rows.first - size), ("next rows", rows.first + drawn)):
            if 0 <= first < rows.total or (words.startswith("previous") and rows.first > 0):
                first = max(0, first)
                ways.append(dcc.Link(words, href=_href(view, rows=f"{first}:{first + size - 1}")))
    if view.get("from") or view.get("to"):
        ways.append(dcc.Link("show all steps", href=_href(view, "from", "to")))
    if view.get("rows"):
        ways.append(dcc.Link("show the first rows" if rows.total > MAX_ROWS else "show all rows", href=_href(view, "rows")))
    if view.get("open"):
        ways.append(dcc.Link("fold again what was opened", href=_href(view, "open", "rows")))
    return [html.P([html.Span(way) for way in ways], className="hint ways")] if ways else []


def read_thinly(interval: int) -> str:
    """Return the sentence that one of so many sampled steps was read only."""
    return f"Large run: one of {interval} sampled steps was read."


#: In words, what of a site's choice the cells show.
_WORST_OF = {
    "all": "all operands and results",
    "operands": "all operands",
    "results": "all results",
    "exact": "all accumulation errors",
}


def _about(heat: Heat, site: str, num_modules: int) -> str:
    unit, doc = ("1", DOC) if heat.metric == HEALTH else queries.metrics()[heat.metric]
    words = [doc[:1].upper() + doc[1:] + (f", in {UNITS.get(unit, unit)}." if unit != "1" else ".")]
    if site in _WORST_OF:
        words.append(f"A cell is the worst of {_WORST_OF[site]}.")
    if heat.steps_apart > 1:
        words.append(read_thinly(heat.steps_apart))
    elif heat.steps_per_cell > 1:
        words.append(f"A cell is the worst of {heat.steps_per_cell} steps.")
    if heat.metric != HEALTH and envelope(heat.metric) is None:
        words.append("No healthy range is known for it: colours run from the 2nd to the 98th percentile.")
    missing = num_modules - len(heat.modules)
    if missing > 0:
        words.append(f"{missing} module{'s have' if missing > 1 else ' has'} no such data.")
    ways = "Click a cell for the module at that step, or a folded row to open it; draw a box to see its steps and rows alone."
    return " ".join([*words, ways])


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether the findings, or the main metrics of all steps, are still to come."""
    return not run_view.is_triaged or run_view.is_loading_cache


def settle(view: View, run_view: RunView) -> object:
    """Judge the run, and wait for its main metrics."""
    run_view.judge()
    run_view.wait_for_cache()
    return None


PAGE = Page(name="heatmap", layout=layout, parts=parts, is_pending=is_pending, settle=settle)
