"""Modules by steps: any metric at any site under any cast, in execution order from the top."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data import queries
from ..data.healthy_ranges import envelope
from ..data.records import Heat
from ..figures import base as figures
from ..figures.module import SITES
from ..web import source
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import card, control, graph, note
from .base import Page

METRIC, SITE = "sqnr_db", "operands"
#: Units of the schema that a reader of the page does not know.
UNITS = {"x": "units of the tensor", "x^2": "squared units of the tensor", "log2": "powers of two"}
#: Of a large run, for its first half minute.
READING = " The main metrics are being read into memory; until then each change of view takes seconds."


def site_options() -> list[dict[str, Any]]:
    """Return the choices of site: the worst of many first, then the nine."""
    many = [
        {"value": "operands", "label": "all operands (worst)"},
        {"value": "results", "label": "all results, quantization error (worst)"},
        {"value": "exact", "label": "all results, accumulation error (worst)"},
    ]
    nine = [{"value": f"{g}.{t}", "label": f"{g} {t}"} for line in SITES for g, t in line]
    return [{"group": "worst of", "items": many}, {"group": "one site", "items": nine}]


def metric_options(run_metrics: list[str]) -> list[dict[str, Any]]:
    """Return the recorded metrics: those with a healthy envelope first."""
    known = [name for name in run_metrics if envelope(name) is not None]
    rest = [name for name in run_metrics if envelope(name) is None]
    groups = (("known healthy range", known), ("other", rest))
    return [{"group": title, "items": [{"value": n, "label": n} for n in names]} for title, names in groups if names]


def cast_options(casts: list[tuple[str, bool]]) -> list[dict[str, str]]:
    """Return the choices of cast."""
    names = [{"value": name, "label": name + ("" if running else " (what-if)")} for name, running in casts]
    kinds = {running for _, running in casts}
    many = [("running", "running cast", True), ("what-if", "all what-if casts (worst)", False)]
    return [*({"value": value, "label": label} for value, label, running in many if running in kinds), *names]


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    metrics = run_view.recorded()
    cast = run_view.cache("default cast", lambda: queries.default_cast(run_view.run))
    casts = run_view.cache("casts", lambda: queries.casts(run_view.run))
    about, figure = parts(view, run_view)
    controls = html.Div(
        [
            control("metric", METRIC, view.get("metric", METRIC), metric_options(metrics), "metric", 230),
            control("site", SITE, view.get("site", SITE), site_options(), "site", 290),
            control(
                "cast",
                cast,
                view.get("cast", cast),
                cast_options(casts),
                "cast",
                290,
            ),
        ],
        className="controls",
    )
    return html.Div(
        [card("Modules by steps", controls, html.Div(about, id="heat-about"), graph("heat", figure))], className="page"
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about the figure, and the figure."""
    metric, site = view.get("metric", METRIC), view.get("site", SITE)
    cast = view.get("cast") or run_view.cache("default cast", lambda: queries.default_cast(run_view.run))
    if metric not in run_view.recorded() and not run_view.run.has(metric):
        text = f"{metric} is not recorded in this run; recorded are {', '.join(run_view.recorded()) or 'no metrics'}."
        return note(text, kind="warning"), figures.empty("not recorded", 300)
    try:
        steps = (view.get_int("from"), view.get_int("to"))
        is_thin = run_view.is_thin(metric)
        heat = run_view.cache(
            ("heat", metric, site, cast, steps, is_thin),
            lambda: queries.heat(run_view.run, metric, site, cast, steps, run_view.metric_cache, is_thin),
        )
    except Fp8DebugError as error:
        return note(str(error), kind="warning"), figures.empty("not recorded", 300)
    heat = replace(heat, marks=source.marks(run_view.judged().known or (), by_module=True))
    whole = None
    if view.get("from") or view.get("to"):
        kept = {key: value for key, value in view.params.items() if key not in ("from", "to")}
        whole = dcc.Link("show all steps", href=href("heatmap", view.run, **kept))
    words = _about(heat, len(run_view.run.modules)) + (READING if run_view.is_loading_cache else "")
    about = note(words, " ", whole) if whole else note(words)
    return about, figures.heatmap(heat, f"{view.get('from')}:{view.get('to')}")


def read_thinly(interval: int) -> str:
    """Return the sentence that one of so many sampled steps was read only."""
    return f"Large run: one of {interval} sampled steps was read."


def _about(heat: Heat, num_modules: int) -> str:
    unit, doc = queries.metrics()[heat.metric]
    words = [doc[:1].upper() + doc[1:] + (f", in {UNITS.get(unit, unit)}." if unit != "1" else ".")]
    if heat.steps_apart > 1:
        words.append(read_thinly(heat.steps_apart))
    elif heat.steps_per_cell > 1:
        words.append(f"A cell is the worst of {heat.steps_per_cell} steps.")
    if envelope(heat.metric) is None:
        words.append("No healthy range is known for it: colours run from the 2nd to the 98th percentile.")
    missing = num_modules - len(heat.modules)
    if missing > 0:
        words.append(f"{missing} module{'s have' if missing > 1 else ' has'} no such data.")
    return " ".join([*words, "Click a cell for the module at that step; draw a box to see its steps one by one."])


PAGE = Page(name="heatmap", layout=layout, parts=parts)
