"""The Dash app: a shell, a router over the URL, and one callback per page that redraws what a setting or new data changed.

The URL is the state. A control writes the URL (in the browser, assets/fp8debug.js); the page's parts are computed from it. So
every view can be reloaded and sent to a colleague, and no state lives in the server.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import dash
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from fp8debug.errors import Fp8DebugError

from . import source as sources
from .mantine import dmc
from .opened import Opened
from .pages import compare, fallback, findings, heatmap, module, overview, ranks, runs
from .pages.base import Page
from .plot_library import serve_library
from .plots import Figure
from .source import Source
from .urls import View, href, parse
from .widgets import card, note

PAGES: dict[str, Page] = {page.PAGE.name: page.PAGE for page in (overview, heatmap, module, ranks, findings, fallback, compare)}
#: How often the browser asks whether a run's files have grown.
REFRESH_MS = 4000

#: What the URL asks for: ``pathname``, ``search``, and ``n``, the number of the layout that serves it.
Asked = dict[str, Any]
#: What is on screen: the number of its layout, page and run of its head, the state of the files then, and whether it waited.
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
        suppress_callback_exceptions=True,  # pages come and go
        title=f"{source.path.resolve().name} · fp8debug",
        update_title="",
    )
    app.layout = _shell()
    serve_library(app)
    _route(app, source)
    _refresh(app, source)
    _settle(app, source)
    _clicks(app)
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


def _in_browser(app: dash.Dash, function: str, *dependencies: Any) -> None:
    """Register a callback that assets/fp8debug.js answers without asking the server."""
    app.clientside_callback(ClientsideFunction("fp8debug", function), *dependencies)  # type: ignore[no-untyped-call]  # untyped in dash


def _shell() -> Component:
    shell: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="stamp"),
            dcc.Store(id="settled"),
            dcc.Store(id="place"),
            dcc.Store(id="asked"),
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
    """Lay out a page for each place; the browser tells whether a new URL is another place or only another setting."""

    @app.callback(
        Output("nav", "children"),
        Output("page", "children"),
        Output("here", "data"),
        Input("place", "data"),
        State("here", "data"),
        prevent_initial_call=True,
    )
    def route(place: Asked | None, here: Here | None) -> tuple[Any, Component, Here]:
        if place is None:
            raise PreventUpdate
        view = parse(place["pathname"], place["search"])
        now = {"n": place["n"], "head": [view.page, view.run], "stamp": source.stamp(view.run)}
        now["was_pending"] = is_pending(view, source)  # asked before the page is laid out: what it shows may be older
        is_new = here is None or here["head"] != now["head"]
        return navigation(view, source) if is_new else no_update, page_of(view, source), now

    _in_browser(
        app,
        "arrive",
        Output("place", "data"),
        Output("asked", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("here", "data"),
        State({"control": ALL, "default": ALL}, "value"),
        State({"control": ALL, "default": ALL}, "id"),
    )
    _in_browser(
        app,
        "sync",
        Input({"control": ALL, "default": ALL}, "value"),
        State({"control": ALL, "default": ALL}, "id"),
        State("here", "data"),
    )


def is_at(here: Here | None, asked: Asked | None) -> bool:
    """Tell whether the page on screen was laid out for the place that the URL names, so that its parts may be redrawn."""
    return here is not None and asked is not None and here["n"] == asked["n"]


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


def is_pending(view: View, source: Source) -> bool:
    """Tell whether parts of a page wait for something that takes long."""
    try:
        page = None if is_list(view, source) else PAGES.get(view.page)
        return page is not None and page.is_pending(view, source.open(view.run))
    except Fp8DebugError:
        return False


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
        choice = dmc.Select(
            id={"run-of": str(view.run)},
            value=view.run,
            data=names[:500],
            size="xs",
            w=190,
            searchable=True,
            allowDeselect=False,
            comboboxProps={"keepMounted": False},
            **{"aria-label": "run"},
        )
        links.append(choice)
    else:
        links.append(html.Span(source.path.resolve().name, className="run-name"))
    for page in PAGES.values():
        current: dict[str, Any] = {"aria-current": "page"} if page.name == view.page else {}
        classes = "tab tab-current" if current else "tab"
        links.append(html.Span(dcc.Link(page.title, href=href(page.name, view.run), className=classes), **current))
    return html.Div([*links, _search(view, source)], className="nav")


def _search(view: View, source: Source) -> Component:
    """Return the search of modules; its data, in execution order, also tell the keys ``[`` and ``]`` which module is next."""
    try:
        modules = [str(m["fqn"]) for m in source.open(view.run).run.modules]
    except Fp8DebugError:
        modules = []
    search: Component = dmc.Select(
        id="module-search",
        data=list(dict.fromkeys(modules)),
        placeholder="Find a module  ( / )",
        searchable=True,
        limit=60,
        size="xs",
        w=270,
        nothingFoundMessage="no such module",
        comboboxProps={"keepMounted": False},
        **{"aria-label": "find a module"},
    )
    return search


def _redraw(app: dash.Dash, source: Source, page: Page) -> None:
    @app.callback(
        *(Output(*output) for output in page.outputs),
        Input("asked", "data"),
        Input("stamp", "data"),
        Input("settled", "data"),
        State("here", "data"),
        prevent_initial_call=True,
    )
    def redraw(asked: Asked | None, stamp: str | None, settled: Any, here: Here | None) -> Any:
        if asked is None or not is_at(here, asked):
            raise PreventUpdate  # another page is being laid out
        view = parse(asked["pathname"], asked["search"])
        if view.page != page.name:
            raise PreventUpdate
        try:
            opened = source.open(view.run)
            was_pending = page.is_pending(view, opened)
            found = page.parts(view, opened)
            if was_pending and not page.is_pending(view, opened):  # it settled meanwhile, and will not say so again
                found = page.parts(view, opened)
        except Fp8DebugError:
            raise PreventUpdate from None  # the files are changing under us; the next tick looks again
        is_same_view = "asked.data" not in dash.ctx.triggered_prop_ids
        return tuple(sent(part, is_same_view) for part in found)


def sent(part: Any, is_same_view: bool) -> Any:
    """Return a part as it goes to the browser.

    A figure of the same view goes as a change of the one on screen, so that zoom, hidden lines and the plot itself stay.
    """
    if not isinstance(part, Figure):
        return part
    values = part.packed()
    if not is_same_view:
        return values
    patch = dash.Patch()
    patch["data"] = values["data"]
    patch["layout"] = values["layout"]  # whole: shapes and notes of the earlier figure must go; uirevision keeps the zoom
    return patch


def settled(page: Page, view: View, opened: Opened, was_pending: bool) -> bool:
    """Compute what a page waits for; return whether there is anything that it may not show yet.

    Args:
        page: the page.
        view: what it shows.
        opened: the run.
        was_pending: whether it waited just before it was laid out: what it waited for may have come right after.
    """
    if page.is_pending(view, opened):
        page.settle(view, opened)
        return True
    return was_pending


def _settle(app: dash.Dash, source: Source) -> None:
    """Say when what takes long is known: the browser waits for it with the page already on screen.

    The answer is set from within, not as an output: what depends on a callback's output waits while it runs, and a control
    that moves must be answered while the rules are looking.
    """

    @app.callback(
        Input("here", "data"),
        Input("stamp", "data"),
        Input("asked", "data"),
        prevent_initial_call=True,
    )
    def settle(here: Here | None, stamp: str | None, asked: Asked | None) -> None:
        if asked is None or not is_at(here, asked):
            raise PreventUpdate
        view = parse(asked["pathname"], asked["search"])
        if is_list(view, source):
            if not source.judge_all(runs.WAIT_S):
                raise PreventUpdate
            dash.set_props("settled", {"data": source.stamp(None)})
            return
        page = PAGES.get(view.page)
        try:
            opened = source.open(view.run)
            source.narrow_down(opened)
            was_pending = here is not None and "here.data" in dash.ctx.triggered_prop_ids and bool(here["was_pending"])
            if page is None or not settled(page, view, opened, was_pending):
                raise PreventUpdate
        except Fp8DebugError:
            raise PreventUpdate from None
        dash.set_props("settled", {"data": f"{opened.stamp} {time.monotonic()}"})


def _refresh(app: dash.Dash, source: Source) -> None:
    @app.callback(
        Output("live", "children"),
        Input("tick", "n_intervals"),
        Input("refresh", "n_clicks"),
        Input("here", "data"),
        State("asked", "data"),
        State("stamp", "data"),
        prevent_initial_call=True,
    )
    def refresh(ticks: int | None, clicks: int | None, here: Here | None, asked: Asked | None, known: str | None) -> str:
        if here is None or asked is None:
            raise PreventUpdate
        view = parse(asked["pathname"], asked["search"])
        stamp = source.stamp(view.run)
        if stamp not in (known, here["stamp"]):
            dash.set_props("stamp", {"data": stamp})
        return live_text(view, source)

    @app.callback(
        Output("runs", "rowData"),
        Input("stamp", "data"),
        Input("settled", "data"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def relist(stamp: str | None, settled: Any, asked: Asked | None) -> Any:
        if asked is None or not is_list(parse(asked["pathname"], asked["search"]), source):
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


def _clicks(app: dash.Dash) -> None:
    _in_browser(app, "open_cell", Input("heat", "clickData"))
    _in_browser(app, "zoom", Input("heat", "relayoutData"))
    _in_browser(app, "open_module", Input("module-search", "value"))
    _in_browser(app, "open_run", Input({"run-of": ALL}, "value"), State({"run-of": ALL}, "id"))
    _in_browser(app, "search_runs", Input("runs-search", "value"))
    _in_browser(app, "compare", Output("compare-chosen", "children"), Input("runs", "selectedRows"))
