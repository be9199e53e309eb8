"""This run beside others: loss gap, configuration differences, and the first site and step at which they part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dash import html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.rules.comparison.configuration import configuration_words
from fp8debug.rules.comparison.sites import TOLERANCES, SiteDifference, unwrapped

from ..data import queries
from ..figures.base import empty
from ..figures.compare import losses, site_in_both
from ..figures.theme import NO_DATA
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import badge, card, code, control, graph, grid, note, number, poster, table
from .base import Page

if TYPE_CHECKING:
    from fp8debug.rules.comparison.runs import Differences
    from fp8debug.rules.reading.nonfinite import NonfiniteOrigin

METRIC = "rms"
#: What a folder name cannot hold: it separates names in the URL.
SEPARATOR = "/"
#: Differences of configuration and sites that the page lists; the command line has all of them.
MAX_SETTINGS, MAX_SITES = 60, 300
#: Height of the plot of one site, in pixels: kept free while runs are compared.
SITE_HEIGHT = 260
REST = "fp8debug diff --format json has all"
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "at", "headerName": "Diverges at", "type": "rightAligned", "width": 104},
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 220, "tooltipField": "module"},
    {"field": "site", "headerName": "Site", "width": 150},
    {"field": "reference", "headerName": "Against", "width": 90},
    {"field": "what", "headerName": "What", "width": 300, "tooltipField": "what"},
    {"field": "differs", "headerName": "Differs since", "type": "rightAligned", "width": 100},
    {"field": "sqnr_db", "headerName": "SQNR dB", "width": 140, "sortable": False},
    {"field": "rms", "headerName": "rms", "width": 170, "sortable": False},
)


def others(view: View, run_view: RunView) -> list[str]:
    """Return the names of the URL that are runs of this folder, this one left out."""
    asked = [name for name in view.get("with").split(SEPARATOR) if name]
    return [name for name in dict.fromkeys(asked) if name in run_view.siblings() and name != run_view.name]


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether a run is still to be compared, which reads the sites of both."""
    return any(run_view.differences(name) is None for name in others(view, run_view))


def settle(view: View, run_view: RunView) -> object:
    """Compare this run with each of the others."""
    run_view.compare(others(view, run_view))
    return None


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    about, figure, settings, rows, site = parts(view, run_view)
    names = [name for name in run_view.siblings() if name != run_view.name]
    value = view.get("with")
    options = [{"value": "", "label": "(choose a run)"}, *names]
    if SEPARATOR in value:
        options.append({"value": value, "label": value.replace(SEPARATOR, " and ")})
    metrics = [name for name in TOLERANCES if run_view.run.has(name)]
    pairs = {"--pairs": max(1, len(others(view, run_view)))}
    pick = control("with", "", value, options, "with", 260)
    return html.Div(
        [
            card(
                "Loss",
                html.Div(about, id="compare-about", style=pairs),
                graph("compare-loss", figure),
                note=html.Div([pick], className="controls"),
            ),
            card(
                "One site in these runs",
                graph("compare-site", site),
                note=html.Div(
                    [control("metric", METRIC, view.get("metric", METRIC), metrics or [METRIC], "metric", 200)],
                    className="controls",
                ),
            ),
            # Below the plots: its height is known only after the comparison.
            card(
                "Where they diverge",
                grid("compare-sites", COLUMNS, rows, "No site to list"),
                note="first divergence on top; click a module to see it above",
            ),
            card("Configuration differences", html.Div(settings, id="compare-settings")),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about both, the losses, the configuration, the sites that part, and one site in all of them."""
    names = others(view, run_view)
    if not names or run_view.open_sibling is None:
        return _nothing(view, run_view)
    try:
        beside = [(name, run_view.open_sibling(name).run) for name in names]
    except Fp8DebugError as error:
        return note(str(error), kind="error"), empty("cannot be read", 200), None, [], empty("cannot be read", 160)
    runs = [(run_view.name, run_view.run), *beside]
    curves = [(name, next((t for t in queries.training(run) if t.name == "loss"), None)) for name, run in runs]
    pairs = [found for name in names if (found := run_view.differences(name)) is not None]
    figure = losses(curves, [found.loss["diverges_at"] for found in pairs], _nonfinite_at(pairs))
    if len(pairs) < len(names):
        waiting = poster(f"The sites of {run_view.name} and {' and '.join(names)} are being compared.")
        return waiting, figure, None, [], empty("not known yet", SITE_HEIGHT)
    about = [line for found in pairs for line in _about(found)]
    if len(pairs) > 1:
        about.append(note(f"The sites and the configuration below are those of {run_view.name} beside {names[0]}."))
    found = pairs[0]
    parted = [site for site in found.sites if site.diverges_at is not None]
    rows = [_row(site, view) for site in parted[:MAX_SITES]]
    return about, figure, _settings(found), rows, _site(view, runs, parted, found.origin)


def _nonfinite_at(pairs: Sequence[Differences]) -> dict[str, int]:
    """Return by run the first step whose loss is NaN or Inf, for the runs that have one."""
    steps = {name: step for found in pairs for name, step in zip(found.names, found.loss["nonfinite_at"], strict=True)}
    return {name: step for name, step in steps.items() if step is not None}


def _nothing(view: View, run_view: RunView) -> tuple[Any, ...]:
    if run_view.open_sibling is None:
        folder = run_view.run.path.resolve().parent
        about = note("One run is served. To compare runs serve their folder: ", code(f"fp8debug dashboard {folder}"))
    elif len(run_view.siblings()) < 2:
        about = note("This folder holds one run; record a second one, in BF16 say, beside it.")
    else:
        about = note("Choose a run to compare with: the good one, or the one in BF16.")
    if view.get("with") and run_view.open_sibling is not None:
        about = note(f"No run {view.get('with')!r} in this folder.", kind="error")
    return about, empty("nothing to compare with yet", 160), None, [], empty("nothing to compare with yet", 120)


def _about(found: Differences) -> list[Component]:
    is_lost = any(step is not None for step in found.loss["nonfinite_at"])
    loss_level = "error" if is_lost else "ok" if found.loss["diverges_at"] is None else "warning"
    site_level = "error" if found.origin is not None else "ok" if found.first is None else "warning"
    parted = sum(site.diverges_at is not None for site in found.sites)
    lines: list[Component] = [
        html.P([badge(loss_level, "loss"), f" {found.names[0]} -> {found.names[1]}, {found.loss_words}"]),
        html.P([badge(site_level, "sites"), f" {found.site_words}"]),
    ]
    if parted > MAX_SITES:
        lines.append(note(f"{MAX_SITES} of {parted} rows below; {REST}."))
    for name, only in zip(found.names, found.only, strict=True):
        if only:
            more = f" and {len(only) - 8} more" if len(only) > 8 else ""
            lines.append(note(f"Only in {name}: {', '.join(only[:8])}{more}", kind="warning"))
    return lines


def _settings(found: Differences) -> Component:
    words = configuration_words(found.configuration)
    if not words:
        return note("No difference.")
    body = [[what, _cell(first), _cell(second)] for what, first, second in words[:MAX_SETTINGS]]
    return table(["What", found.names[0], found.names[1]], body, name="configuration", total=len(words), rest=REST)


def _cell(value: Any) -> str:
    if value is None:
        return NO_DATA
    return value if isinstance(value, str) else json.dumps(value)


def _row(site: SiteDifference, view: View) -> dict[str, Any]:
    name = f"{site.gemm}.{site.tensor}"
    pairs = {key: " -> ".join(number(v) for v in site.medians.get(key, (None, None))) for key in ("sqnr_db", "rms")}
    kept = {"with": view.get("with"), "of": site.module, "site": name}
    return {
        "id": f"{site.module} {name} {site.reference}",
        "at": site.diverges_at,
        "module": site.module,
        "href": href("compare", view.run, **kept),
        "site": name.replace(".", " "),
        "reference": site.reference,
        "what": site.what,
        "differs": site.differs_at,
        **pairs,
    }


def _site(
    view: View, runs: list[tuple[str, Any]], parted: list[SiteDifference], origin: tuple[str, NonfiniteOrigin] | None = None
) -> Any:
    """Return one site in all runs: of the URL, or the first that diverges, or else the first tensor that is NaN or Inf."""
    places = {(site.module, site.gemm, site.tensor): site.diverges_at for site in parted}
    if origin is not None:
        row = origin[1].row
        places.setdefault((unwrapped(str(row["module"])), str(row["gemm"]), str(row["tensor"])), origin[1].step)
    first = next(iter(places), ("", "fprop", "input"))
    module = view.get("of") or first[0]
    gemm, _, tensor = (view.get("site") or ".".join(first[1:])).partition(".")
    metric = view.get("metric", METRIC)
    step = places.get((module, gemm, tensor))
    lines = []
    for name, run in runs:
        own = next((str(m["fqn"]) for m in run.modules if unwrapped(str(m["fqn"])) == module), None)
        own = own or next((str(m["fqn"]) for m in run.modules), "")
        try:
            lines.append((f"{name}: {own} {gemm} {tensor}", queries.module_traces(run, own, metric, (gemm, tensor))))
        except Fp8DebugError as error:
            return empty(str(error), 160)
    return site_in_both(lines, metric, step)


PAGE = Page(name="compare", layout=layout, parts=parts, is_pending=is_pending, settle=settle)
