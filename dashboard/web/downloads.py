"""The files that a page hands out: the list of candidates in a stack's format, and the documents of triage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash
from dash import Input, Output, State
from dash.exceptions import PreventUpdate

from .urls import parse

if TYPE_CHECKING:
    from .source import ServedFolder

_ADDRESS = (State("url", "pathname"), State("url", "search"))


def hand_out_files(app: dash.Dash, source: ServedFolder) -> None:
    """Register the callbacks that answer the buttons of both pages with a file."""

    @app.callback(Output("fallback-file", "data"), Input("fallback-save", "n_clicks"), *_ADDRESS, prevent_initial_call=True)
    def save(clicks: int | None, pathname: str | None, search: str | None) -> dict[str, Any]:
        if not clicks:
            raise PreventUpdate
        from ..pages import fallback

        view = parse(pathname, search)
        return fallback.exported(view, source.open(view.run))

    @app.callback(
        Output("findings-file", "data"),
        Input("findings-json", "n_clicks"),
        Input("findings-csv", "n_clicks"),
        *_ADDRESS,
        prevent_initial_call=True,
    )
    def export(json_clicks: int | None, csv_clicks: int | None, pathname: str | None, search: str | None) -> dict[str, Any]:
        if not (json_clicks or csv_clicks):
            raise PreventUpdate
        run_view = source.open(parse(pathname, search).run)
        found = run_view.judge().findings
        is_json = dash.ctx.triggered_id == "findings-json"
        return {
            "content": found.to_json() if is_json else found.to_csv(),
            "filename": f"{run_view.name}-findings.{'json' if is_json else 'csv'}",
            "type": "application/json" if is_json else "text/csv",
        }
