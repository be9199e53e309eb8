"""The Dash app: a shell, a router over the URL, and one callback per page that redraws what a setting or new data changed.

The URL is the state. A control writes the URL (in the browser, assets/fp8debug.js); the page's parts are computed from it. So
every view can be reloaded and sent to a colleague, and no state lives in the server.
"""

from __future__ import annotations

import math
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import dash
import dash_mantine_components as dmc  # type: ignore[import-untyped]  # ships no types
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from fp8debug.errors import Fp8DebugError

from . import source as sources
from .figures import plain
from .pages import compare, fallback, findings, heatmap, module, overview, ranks, runs
from .pages.base import Page
from .source import Source
from .urls import View, href, parse, query
from .widgets import card, note

PAGES: dict[str, Page] = {page.PAGE.name: page.PAGE for page in (overview, heatmap, module, ranks, findings, fallback, compare)}
#: How often the browser asks whether a run's files have grown.
REFRESH_MS = 4000

#: What is on screen: the place it was laid out for, and the state of the files then.
Here = dict[str, Any]


def make_app(path: str | Path) -> dash.Dash:
    """Return the app for a run or a folder of runs.

    Raises:
        RunError: the path is neither.
    """
    source = Source(path)
    app = dash.Dash(
        "fp8debug_dashboard",
        assets_folder=str(Path(__file__).with_name("assets")),
        pages_folder="",
        serve_locally=True,
        eager_loading=True,  # the plot library comes while the server reads the run
        suppress_callback_exceptions=True,  # pages come and go
        title=f"{source.path.resolve().name} · fp8debug",
        update_title="",
    )
    app.layout = _shell()
    _route(app, source)
    _refresh(app, source)
    _settle(app, source)
    _clicks(app, source)
    for page in PAGES.values():
        _redraw(app, source, page)
    fallback.callbacks(app, source)
    findings.callbacks(app, source)
    if not source.is_folder:
        threading.Thread(target=_warm, args=(source,), daemon=True).start()
    return app


def _warm(source: Source) -> None:
    """Read what the first page shows while the browser loads its scripts."""
    with suppress(Fp8DebugError):  # the page says what is wrong
        overview.PAGE.layout(View("overview"), source.open(None))


def _in_browser(app: dash.Dash, function: str, *dependencies: Any, **options: Any) -> None:
    """Register a callback that assets/fp8debug.js answers without asking the server."""
    app.clientside_callback(ClientsideFunction("fp8debug", function), *dependencies, **options)  # type: ignore[no-untyped-call]  # untyped in dash


def _shell() -> Component:
    shell: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="stamp"),
            dcc.Store(id="settled"),
            dcc.Store(id="here"),
            dcc.Interval(id="tick", interval=REFRESH_MS),
            html.Header(
                [
                    html.Div(id="nav"),
                    html.Div(
                        [
                            html.Span(id="live", role="status"),
                            dmc.Switch(id="follow", label="follow", checked=True, size="xs"),
                            dmc.Button("Refresh", id="refresh", size="compact-xs", variant="default"),
                            dmc.ColorSchemeToggle(
                                lightIcon="☀", darkIcon="☾", size="sm", variant="default", **{"aria-label": "dark or light"}
                            ),
                        ],
                        className="tools",
                    ),
                ],
                className="top",
            ),
            dcc.Loading(html.Main(id="page"), delay_show=400, overlay_style={"visibility": "visible"}, type="dot"),
        ],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "fontSizes": {"xs": "12px"}, "defaultRadius": "3px"},
    )
    return shell


def _route(app: dash.Dash, source: Source) -> None:
    @app.callback(
        Output("nav", "children"),
        Output("page", "children"),
        Output("here", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State({"control": ALL, "default": ALL}, "value"),
        State({"control": ALL, "default": ALL}, "id"),
        State("here", "data"),
    )
    def route(
        pathname: str | None, search: str | None, values: list[str], ids: list[dict[str, str]], here: Here | None
    ) -> tuple[Component, Component, Here]:
        view = parse(pathname, search)
        if is_at(here, view) and agrees(view, values, ids):
            raise PreventUpdate  # a control moved: its page redraws its parts
        now = {"place": list(view.place), "stamp": source.stamp(view.run)}
        return navigation(view, source), page_of(view, source), now

    _in_browser(
        app,
        "sync",
        Output("url", "search"),
        Input({"control": ALL, "default": ALL}, "value"),
        State({"control": ALL, "default": ALL}, "id"),
        State("url", "search"),
        prevent_initial_call=True,
    )


def is_at(here: Here | None, view: View) -> bool:
    """Tell whether the page on screen was laid out for the place that a view names."""
    return here is not None and here["place"] == list(view.place)


def agrees(view: View, values: list[str], ids: list[dict[str, str]]) -> bool:
    """Tell whether the controls on screen say what the URL says; after "back" they do not."""
    return all(view.get(i["control"], str(i["default"])) == str("" if v is None else v) for v, i in zip(values, ids, strict=True))


def page_of(view: View, source: Source) -> Component:
    """Return a whole page, or what went wrong and what to do."""
    try:
        if is_list(view, source):
            return runs.layout(source)
        if view.page not in PAGES:
            raise Fp8DebugError(f"no page {view.page!r}; there are {', '.join(PAGES)}")
        opened = source.open(view.run)
        shown = PAGES[view.page].layout(view, opened)
        if not opened.run.problems:
            return shown
        words = "Not everything could be read, the rest is shown: " + "; ".join(opened.run.problems)
        return html.Div([html.Div(words, className="problems", role="alert"), shown])
    except Fp8DebugError as error:
        back = dcc.Link("all runs", href="/") if source.is_folder else dcc.Link("overview", href="/")
        waiting = "This page looks again by itself while the run is being written."
        return html.Div(card("Cannot show this", note(str(error), kind="error"), note(waiting), back), className="page")


def is_list(view: View, source: Source) -> bool:
    """Tell whether a view is the list of runs."""
    return source.is_folder and view.run is None and view.page in ("overview", "runs")


def navigation(view: View, source: Source) -> Component:
    """Return the head of the page: where one is, and the ways from there."""
    links: list[Component] = [dcc.Link([html.B("fp8"), "debug"], href="/", className="mark")]
    if is_list(view, source):
        return html.Div([*links, html.Span(str(source.path), className="dim")], className="nav")
    names = source.names()
    if names:
        options = names[:500]
        links.append(
            dmc.Select(id="run-choice", value=view.run, data=options, size="xs", w=190, searchable=True, allowDeselect=False)
        )
    else:
        links.append(html.Span(source.path.resolve().name, className="run-name"))
    for page in PAGES.values():
        current: dict[str, Any] = {"aria-current": "page"} if page.name == view.page else {}
        classes = "tab tab-current" if current else "tab"
        links.append(html.Span(dcc.Link(page.title, href=href(page.name, view.run), className=classes), **current))
    return html.Div([*links, _search(view, source)], className="nav")


def _search(view: View, source: Source) -> Component:
    try:
        modules = [str(m["fqn"]) for m in source.open(view.run).run.modules]
    except Fp8DebugError:
        modules = []
    search: Component = dmc.Select(
        id="module-search",
        data=list(dict.fromkeys(modules)),
        value=view.get("module") if view.page == "module" and view.get("module") in modules else None,
        placeholder="Find a module  ( / )",
        searchable=True,
        limit=60,
        size="xs",
        w=270,
        nothingFoundMessage="no such module",
        **{"aria-label": "find a module"},
    )
    return search


def _redraw(app: dash.Dash, source: Source, page: Page) -> None:
    @app.callback(
        *(Output(*output) for output in page.outputs),
        Input("url", "search"),
        Input("stamp", "data"),
        Input("settled", "data"),
        State("url", "pathname"),
        State("here", "data"),
        prevent_initial_call=True,
    )
    def redraw(search: str | None, stamp: str | None, settled: Any, pathname: str | None, here: Here | None) -> Any:
        view = parse(pathname, search)
        if not is_at(here, view) or view.page != page.name:
            raise PreventUpdate  # the router lays out another page
        try:
            found = page.parts(view, source.open(view.run))
        except Fp8DebugError:
            raise PreventUpdate from None  # the files are changing under us; the next tick looks again
        is_same_view = "url.search" not in dash.ctx.triggered_prop_ids
        return tuple(patched(part) if is_same_view else part for part in found)


def patched(part: Any) -> Any:
    """Return a figure as a change of the one on screen: zoom, hidden lines and the plot itself stay; other parts as they are."""
    if not isinstance(part, go.Figure):
        return part
    values, patch = part.to_dict(), dash.Patch()
    patch["data"] = values["data"]
    patch["layout"] = values["layout"]  # whole: shapes and notes of the earlier figure must go; uirevision keeps the zoom
    return patch


def _settle(app: dash.Dash, source: Source) -> None:
    """Answer when what takes long is known: the browser waits for it with the page already on screen."""

    @app.callback(
        Output("settled", "data"),
        Input("here", "data"),
        Input("stamp", "data"),
        Input("url", "search"),
        State("url", "pathname"),
        prevent_initial_call=True,
    )
    def settle(here: Here | None, stamp: str | None, search: str | None, pathname: str | None) -> Any:
        view = parse(pathname, search)
        if here is None:
            raise PreventUpdate
        if is_list(view, source):
            if not source.judge_all(runs.WAIT_S):
                raise PreventUpdate
            return source.stamp(None)
        page = PAGES.get(view.page)
        try:
            opened = source.open(view.run)
            if page is None or not page.is_pending(view, opened):
                raise PreventUpdate
            page.settle(view, opened)
        except Fp8DebugError:
            raise PreventUpdate from None
        return f"{opened.stamp} {time.monotonic()}"


def _refresh(app: dash.Dash, source: Source) -> None:
    @app.callback(
        Output("stamp", "data"),
        Output("live", "children"),
        Input("tick", "n_intervals"),
        Input("refresh", "n_clicks"),
        State("url", "pathname"),
        State("url", "search"),
        State("stamp", "data"),
        State("here", "data"),
    )
    def refresh(
        ticks: int | None, clicks: int | None, pathname: str | None, search: str | None, known: str | None, here: Here | None
    ) -> tuple[Any, Any]:
        view = parse(pathname, search)
        stamp = source.stamp(view.run)
        fresh = here is not None and stamp not in (known, here["stamp"])
        return stamp if fresh else no_update, live_text(view, source)

    @app.callback(
        Output("runs", "rowData"),
        Input("stamp", "data"),
        Input("settled", "data"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def relist(stamp: str | None, settled: Any, pathname: str | None, search: str | None) -> Any:
        if not is_list(parse(pathname, search), source):
            raise PreventUpdate
        return runs.parts(source)

    _in_browser(app, "pause", Output("tick", "disabled"), Input("follow", "checked"))


def live_text(view: View, source: Source) -> str:
    """Return ``● writing``, ``ended`` or ``not closed`` for the run in view."""
    try:
        if is_list(view, source):
            return f"{len(source.names())} runs"
        opened = source.open(view.run)
        state = sources.state(opened.run.path, opened.run.rank_manifests)
    except Fp8DebugError:
        return "waiting"
    return f"● {state}" if state == "writing" else state


def _clicks(app: dash.Dash, source: Source) -> None:
    @app.callback(
        Output("url", "pathname", allow_duplicate=True),
        Output("url", "search", allow_duplicate=True),
        Input("heat", "clickData"),
        State("url", "pathname"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    def open_cell(click: dict[str, Any] | None, pathname: str | None, search: str | None) -> tuple[str, str]:
        view = parse(pathname, search)
        params = cell_params(click, view, source)
        if params is None:
            raise PreventUpdate
        return "/module", query(view.run, params)

    _in_browser(
        app,
        "zoom",
        Output("url", "search", allow_duplicate=True),
        Input("heat", "relayoutData"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    _in_browser(
        app,
        "open_module",
        Output("url", "pathname", allow_duplicate=True),
        Output("url", "search", allow_duplicate=True),
        Input("module-search", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )
    _in_browser(app, "compare", Output("compare-chosen", "children"), Input("runs", "selectedRows"))
    _in_browser(
        app,
        "open_run",
        Output("url", "search", allow_duplicate=True),
        Input("run-choice", "value"),
        State("url", "search"),
        prevent_initial_call=True,
    )


def cell_params(click: dict[str, Any] | None, view: View, source: Source) -> dict[str, Any] | None:
    """Return what the module page needs to show a clicked cell: module, step, and the metric and site on view."""
    try:
        point = (click or {})["points"][0]
        step, label = float(point["x"]), str(point["y"])
        names = [str(m["fqn"]) for m in source.open(view.run).run.modules]
    except (KeyError, IndexError, TypeError, ValueError, Fp8DebugError):
        return None
    name = next((n for n in names if plain(n) == label or n == label), None)
    if name is None or not math.isfinite(step):
        return None
    site = view.get("site")
    return {"module": name, "step": int(step), "metric": view.get("metric"), "site": site if "." in site else None}
