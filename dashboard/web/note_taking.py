"""Callbacks that add and delete notes: the only thing that the dashboard writes, beside the run that is shown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import dash
from dash import ALL, ClientsideFunction, Input, Output, State, no_update
from dash.exceptions import PreventUpdate

from fp8debug.errors import Fp8DebugError

from .urls import parse

if TYPE_CHECKING:
    from .source import ServedFolder


def take_notes(app: dash.Dash, source: ServedFolder) -> None:
    """Register them. What a note is about stands in the address bar, which the browser sends along."""
    app.clientside_callback(  # type: ignore[no-untyped-call]  # untyped in dash
        ClientsideFunction("fp8debug", "noted"),
        Output("noted", "data"),
        Input("note-add", "n_clicks"),
        Input({"note-delete": ALL}, "n_clicks"),
        State("note-text", "value"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("notes-list", "children"),
        Output("note-status", "children"),
        Output("note-text", "value"),
        Input("noted", "data"),
        prevent_initial_call=True,
    )
    def take(asked: dict[str, Any] | None) -> tuple[Any, str, Any]:
        if asked is None:
            raise PreventUpdate
        from ..pages import notes

        view = parse(asked["pathname"], asked["search"])
        try:
            run_view = source.open(view.run)
        except Fp8DebugError as error:
            return no_update, str(error), no_update
        if asked["key"] is not None:
            failure = notes.delete(run_view, str(asked["key"]))
            return notes.listed(view, run_view), failure, no_update
        failure = notes.add(view, run_view, str(asked["text"]))
        return notes.listed(view, run_view), failure, no_update if failure else ""
