"""Notes of a run, a module or a step, as pages show them, and what adds and deletes them."""

from __future__ import annotations

import hashlib
from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.store.read.notes import Note, add_note, delete_note, read_notes, why_not_writable

from ..web.mantine import dmc
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import Child, card, note


def notes_card(view: View, run_view: RunView) -> Component:
    """Return the card of a page: of a module's page the notes on the module, else all, and what adds one."""
    folder = run_view.run.path
    why = why_not_writable(folder)
    label = {"aria-label": "a note"}
    form: Child = note(f"No note can be added: {why}.") if why else None
    if not why:
        text = dmc.Textarea(id="note-text", placeholder="Write a note", autosize=True, minRows=1, maxRows=8, size="xs", **label)
        form = html.Div([text, html.Button("Add note", id="note-add", className="linkish")], className="note-form")
    about = "on this module, and the step of the cursor" if view.page == "module" else "on the run, or the step of the cursor"
    return card(
        "Notes",
        html.Div(listed(view, run_view), id="notes-list"),
        form,
        html.Div(id="note-status", role="status", className="hint"),
        note=f"{about}; kept in notes.json beside the run",
    )


def key_of(one: Note) -> str:
    """Return what tells a note from others."""
    return hashlib.sha256(f"{one.written}\0{one.about}\0{one.text}".encode()).hexdigest()[:16]


def listed(view: View, run_view: RunView) -> list[Component]:
    """Return the notes that a page shows, the last first."""
    folder = run_view.run.path
    try:
        found = read_notes(folder)
    except Fp8DebugError as error:
        return [note(str(error), kind="error")]
    module = view.get("module") if view.page == "module" else ""
    shown = [one for one in reversed(found) if not module or one.module == module]
    can_write = not why_not_writable(folder)
    lines = [_line(one, view, can_write) for one in shown]
    if len(shown) < len(found):
        more = f"{len(found) - len(shown)} notes are about other things: "
        lines.append(note(more, dcc.Link("all notes", href=href("overview", view.run))))
    return lines


def _line(one: Note, view: View, can_write: bool) -> Component:
    page = "module" if one.module is not None else "overview"
    target = href(page, view.run, module=one.module, step=one.step)
    head: list[Any] = [dcc.Link(one.about, href=target), html.Span(f" {one.written.replace('T', ' ').removesuffix('Z')} UTC ")]
    if can_write:
        label: dict[str, Any] = {"aria-label": f"delete the note on {one.about}: {one.text[:40]}"}
        head.append(html.Button("delete", id={"note-delete": key_of(one)}, className="linkish", **label))
    return html.Div([html.Div(head, className="dim"), html.P(one.text, className="note-text")], className="one-note")


def add(view: View, run_view: RunView, text: str) -> str:
    """Keep a note on what a view is about; return what went wrong, or ""."""
    module = (view.get("module") or None) if view.page == "module" else None
    try:
        add_note(run_view.run.path, text, module=module, step=view.get_int("step"))
    except Fp8DebugError as error:
        return f"The note was not kept: {error}."
    except OSError as error:
        return f"The note was not kept: {error.strerror or error}."
    return ""


def delete(run_view: RunView, key: str) -> str:
    """Delete the note with a key; return what went wrong, or ""."""
    try:
        for one in read_notes(run_view.run.path):
            if key_of(one) == key:
                delete_note(run_view.run.path, one)
                break
    except Fp8DebugError as error:
        return f"The note was not deleted: {error}."
    except OSError as error:
        return f"The note was not deleted: {error.strerror or error}."
    return ""
