"""The Dash app: a shell, a router over the URL, and one callback per page that redraws what a setting or new data changed.

The URL is the state. A control writes the URL (in the browser, assets/fp8debug.js); the page's parts are computed from it. So
every view can be reloaded and sent to a colleague, and no state lives in the server.

This module imports nothing that reads a run: the browser loads its scripts while that comes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import dash
import flask
from dash import ALL, ClientsideFunction, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from fp8debug.errors import Fp8DebugError

from ..pages.contents import CONTENTS, Entry
from .background import in_background
from .downloads import hand_out_files
from .early_shell import SCRIPTS
from .grid_library import leave_out_grid
from .mantine import dmc
from .note_taking import take_notes
from .plot_library import serve_library
from .source import ServedFolder
from .urls import View, parse

if TYPE_CHECKING:
    from .screens import Asked, Here, Screen

#: How often the browser asks whether a run's files have grown.
REFRESH_MS = 4000
#: What every page needs from the server; its head asks for it before it has loaded the scripts that will.
EARLY = """(() => {
  const ask = window.fetch, asked = {};
  for (const path of ["/_dash-layout", "/_dash-dependencies"]) asked[path] = ask(path, { credentials: "same-origin" });
  window.fetch = (path, how) => {
    const answer = asked[path];
    delete asked[path];
    return answer || ask.call(window, path, how);
  };
})()"""


def make_app(path: str | Path | ServedFolder) -> dash.Dash:
    """Return the app for a run or a folder of runs.

    Raises:
        RunError: the path is neither.
    """
    source = path if isinstance(path, ServedFolder) else ServedFolder(path)
    app = dash.Dash(
        "fp8debug_dashboard",
        assets_folder=str(Path(__file__).parents[1] / "assets"),
        pages_folder="",
        serve_locally=True,
        suppress_callback_exceptions=True,  # pages come and go
        title="fp8debug",  # the page gives its own
        update_title="",
    )
    app.layout = lambda: _layout(source)
    # Whatever DASH_DEBUG and DASH_UI say: the tools of Dash's developers ask a server of theirs for the newest version.
    app.enable_dev_tools(
        debug=False,
        dev_tools_ui=False,
        dev_tools_props_check=False,
        dev_tools_serve_dev_bundles=False,
        dev_tools_hot_reload=False,
        dev_tools_disable_version_check=True,
    )
    app.index_string = app.index_string.replace("<html>", '<html lang="en">').replace(
        "{%metas%}", f"<script>{EARLY}</script>{{%metas%}}"
    )
    serve_library(app)
    leave_out_grid(app)
    _route(app, source)
    _refresh(app, source)
    _settle(app, source)
    _search(app, source)
    _clicks(app)
    for name, entry in CONTENTS.items():
        _redraw(app, source, name, entry)
    hand_out_files(app, source)
    take_notes(app, source)
    app.server.config[SCRIPTS] = lambda: [EARLY, *app._inline_scripts, app.renderer]
    # Dash looks for the scripts of its pages with the first request, and a page that is asked for meanwhile has none of them.
    with app.server.test_request_context("/"):
        app.server.preprocess_request()
    return app


def _layout(source: ServedFolder) -> Component:
    """Return the shell; in it, where the request says which page it is for, that page."""
    if not flask.has_request_context() or flask.request.path != "/_dash-layout" or not flask.request.referrer:
        return _shell()
    try:
        from . import screens

        address = urlsplit(flask.request.referrer)
        asked: Asked = {"pathname": address.path, "search": f"?{address.query}" if address.query else "", "n": 1}
        view = parse(asked["pathname"], asked["search"])
        shell = _shell(asked, screens.screen(asked, source), screens.live_text(view, source))
    except Exception as error:  # without a layout the browser shows nothing at all; with the shell it asks for the page again
        print(f"fp8debug: the page did not come with the layout: {type(error).__name__}: {error}", file=sys.stderr)
        return _shell()
    source.has_answered.set()
    return shell


def _in_browser(app: dash.Dash, function: str, *dependencies: Any) -> None:
    """Register a callback that assets/fp8debug.js answers without asking the server."""
    app.clientside_callback(ClientsideFunction("fp8debug", function), *dependencies)  # type: ignore[no-untyped-call]  # untyped in dash


def _shell(asked: Asked | None = None, screen: Screen | None = None, live: str = "") -> Component:
    head, page, here = screen or (None, None, None)
    shell: Component = dmc.MantineProvider(
        [
            dcc.Location(id="url", refresh="callback-nav"),
            dcc.Store(id="stamp"),
            dcc.Store(id="settled"),
            dcc.Store(id="place"),
            dcc.Store(id="asked", data=asked),
            dcc.Store(id="here", data=here),
            dcc.Store(id="seen"),
            dcc.Store(id="unlisted"),
            dcc.Store(id="noted"),
            dcc.Store(id="reload"),
            dcc.Interval(id="tick", interval=REFRESH_MS),
            html.Header(
                [
                    html.Div(head, id="nav"),
                    html.Div(
                        [
                            html.Button(
                                _cursor(asked),
                                id="cursor",
                                className="linkish",
                                hidden=not _cursor(asked),
                                title="marked in every plot; click a point, or press , and . to move it; click here to let go",
                            ),
                            html.Span(live, id="live", role="status"),
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
            dcc.Loading(
                html.Main(page, id="page"),
                delay_show=400,
                overlay_style={"visibility": "visible"},
                type="dot",
                # Another page, not the parts of a live one that are drawn anew.
                target_components={"page": "children"},  # type: ignore[arg-type]  # typed in dash as without any key
            ),
        ],
        defaultColorScheme="auto",
        theme={"primaryColor": "blue", "fontSizes": {"xs": "0.75rem"}, "defaultRadius": "3px"},
    )
    return shell


def _cursor(asked: Asked | None) -> str:
    """Return what the button of the cursor says; "" where no step is chosen."""
    step = None if asked is None else parse(asked["pathname"], asked["search"]).get_int("step")
    return "" if step is None else f"step {step:,} ✕"


def _route(app: dash.Dash, source: ServedFolder) -> None:
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
        try:
            from . import screens

            head, page, now = screens.screen(place, source)
        except Exception as error:
            app.logger.exception("cannot show %s%s", place["pathname"], place["search"])
            return no_update, _failure(error), {"n": place["n"], "head": None, "stamp": "", "was_pending": False, "title": ""}
        is_new = here is None or here["head"] != now["head"]
        return head if is_new else no_update, page, now

    _in_browser(
        app,
        "arrive",
        Output("place", "data"),
        Output("asked", "data"),
        Input("url", "pathname"),
        Input("url", "search"),
        State("here", "data"),
        State("asked", "data"),
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


def _failure(error: Exception) -> Component:
    """Return the page in place of one that an error of ours, which the server's log has in full, kept from being laid out."""
    words = f"Cannot show this page: {type(error).__name__}: {error}. The terminal of fp8debug dashboard says where it happened."
    failure: Component = html.Div(html.Div(words, className="problems", role="alert"), className="page")
    return failure


def is_at(here: Here | None, asked: Asked | None) -> bool:
    """Return whether the page on screen was laid out for the place that the URL names, so that its parts may be redrawn."""
    return here is not None and asked is not None and here["n"] == asked["n"]


def _redraw(app: dash.Dash, source: ServedFolder, name: str, entry: Entry) -> None:
    @app.callback(
        *(Output(*output) for output in entry.outputs),
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
        if view.page != name:
            raise PreventUpdate
        from . import screens

        try:
            return screens.redrawn(screens.PAGES[name], view, source, "asked.data" not in dash.ctx.triggered_prop_ids)
        except Fp8DebugError:
            raise PreventUpdate from None  # the files are changing under us; the next tick looks again

    _in_browser(app, "answered", Input(*entry.outputs[0]))


def _settle(app: dash.Dash, source: ServedFolder) -> None:
    """Say when what takes long is known: the browser asks once the page has been painted, and its control answered.

    The answer is set from within, not as an output: what depends on a callback's output waits while it runs, and a control
    that moves must be answered while the rules are looking.
    """
    _in_browser(app, "entitle", Input("here", "data"))
    _in_browser(app, "reload", Input("reload", "data"))
    _in_browser(app, "look", Output("seen", "data"), Input("here", "data"), Input("asked", "data"))

    @app.callback(
        Input("seen", "data"),
        Input("stamp", "data"),
        State("asked", "data"),
        State("here", "data"),
        prevent_initial_call=True,
    )
    def settle(seen: dict[str, Any] | None, stamp: str | None, asked: Asked | None, here: Here | None) -> None:
        if asked is None or not is_at(here, asked):
            raise PreventUpdate
        from ..pages import runs
        from . import screens

        view = parse(asked["pathname"], asked["search"])
        if screens.is_list(view, source):
            if not source.judge_all(runs.WAIT_S, until_new=True):
                raise PreventUpdate
            dash.set_props("settled", {"data": source.stamp(None)})
            return
        is_first = "seen.data" in dash.ctx.triggered_prop_ids and seen is not None and seen["isFirst"]
        was_pending = here is not None and is_first and bool(here["was_pending"])

        try:
            stamp = settled_stamp(view, source, was_pending)
        except Fp8DebugError:
            raise PreventUpdate from None
        if stamp is None:
            raise PreventUpdate
        dash.set_props("settled", {"data": f"{stamp} {time.monotonic()}"})


def settled_stamp(view: View, source: ServedFolder, was_pending: bool) -> str | None:
    """Compute in the background what a page waits for; return the state of the run's files, or None where nothing is new.

    Raises:
        Fp8DebugError: the run cannot be read.
    """
    from . import screens

    with source.reading_on:  # a click right after the first paint waits for that, and would share the cores with the rules
        screens.import_rest()
    run_view, page = source.open(view.run), screens.PAGES.get(view.page)
    if page is not None:
        page.is_pending(view, run_view)  # opens the runs beside it: threads of a connection keep the priority of who opens it

    def work() -> bool:
        source.load_cache(run_view)
        return page is not None and screens.settled(page, view, run_view, was_pending)

    return run_view.stamp if in_background(work) else None


def _search(app: dash.Dash, source: ServedFolder) -> None:
    """Fill the search of modules where it came without them: listing those of a large run takes a pass over it."""

    _in_browser(app, "unlisted", Output("unlisted", "data"), Input("seen", "data"))

    @app.callback(
        Output("module-search", "data"),
        Input("unlisted", "data"),
        State("asked", "data"),
        prevent_initial_call=True,
    )
    def fill(unlisted: Any, asked: Asked | None) -> list[str]:
        if unlisted is None or asked is None:
            raise PreventUpdate
        from . import screens

        try:
            run_view = source.open(parse(asked["pathname"], asked["search"]).run)
            names = screens.module_names(run_view)
        except Fp8DebugError:
            raise PreventUpdate from None  # the page says what is wrong
        dash.set_props("problems", {"children": screens.problems(run_view)})  # the pass may have met damage
        return names


def _refresh(app: dash.Dash, source: ServedFolder) -> None:
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
        from . import screens

        view = parse(asked["pathname"], asked["search"])
        was_list = here["head"] is not None and here["head"][0] == screens.LIST
        if was_list and not screens.is_list(view, source):
            dash.set_props("reload", {"data": True})  # the folder has become a run
        stamp = source.stamp(view.run)
        if stamp not in (known, here["stamp"]):
            dash.set_props("stamp", {"data": stamp})
        return screens.live_text(view, source)

    @app.callback(
        Output("runs", "rowData"),
        Output("runs", "columnDefs"),
        Output({"control": "columns", "default": ""}, "data"),
        Input("stamp", "data"),
        Input("settled", "data"),
        Input("asked", "data"),
        State("runs", "rowData"),
        State("runs", "columnDefs"),
        State({"control": "columns", "default": ""}, "data"),
        prevent_initial_call=True,
    )
    def relist(stamp: str | None, settled: Any, asked: Asked | None, *shown: Any) -> list[Any]:
        from ..pages import runs
        from ..widgets import column_definitions
        from . import screens

        view = None if asked is None else parse(asked["pathname"], asked["search"])
        if view is None or not screens.is_list(view, source):
            raise PreventUpdate
        rows = runs.parts(source)
        columns, settings = runs.configured(view, source)
        new = [rows, column_definitions(columns), settings]
        return [no_update if value == before else value for value, before in zip(new, shown, strict=True)]

    _in_browser(app, "pause", Output("tick", "disabled"), Input("follow", "checked"))


def _clicks(app: dash.Dash) -> None:
    _in_browser(app, "open_cell", Input("heat", "clickData"))
    _in_browser(app, "zoom", Input("heat", "relayoutData"))
    _in_browser(app, "open_module", Input("module-search", "value"))
    _in_browser(app, "open_run", Input({"run-of": ALL}, "value"), State({"run-of": ALL}, "id"))
    _in_browser(app, "search_runs", Input("runs-search", "value"))
    _in_browser(app, "listed", Output("compare-chosen", "children"), Input("runs", "rowData"))
