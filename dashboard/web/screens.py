"""Screens of a view: head and page, what is live, and what a part of a page is to the browser.

This module imports numpy, pyarrow and DuckDB; the app asks for it when a page is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import dash
from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError, RunError

from ..figures.plot import Figure
from ..pages.base import Page
from ..pages.contents import CONTENTS
from ..widgets import card, code, note
from . import source as sources
from .mantine import COMBO_BOX, dmc
from .run_view import RunView
from .source import ServedFolder
from .urls import View, href, parse


class Pages(Mapping[str, Page]):
    """The pages of a run by name; each is imported when it is asked for."""

    def __getitem__(self, name: str) -> Page:
        """Return a page."""
        if name not in CONTENTS:
            raise KeyError(name)
        page: Page = import_module(f"fp8debug_dashboard.pages.{name}").PAGE
        return page

    def __iter__(self) -> Iterator[str]:
        """Return the names in the order of the navigation."""
        return iter(CONTENTS)

    def __len__(self) -> int:
        """Return their number."""
        return len(CONTENTS)


PAGES = Pages()


def come_ahead(source: ServedFolder) -> None:
    """Import what the first page needs, and read what it shows, before anybody asks for it."""
    if not source.is_folder:
        source.read_ahead()
    import_module(f"fp8debug_dashboard.pages.{'runs' if source.is_folder else 'overview'}")


#: Seconds without a request after which nobody is taken to wait for the first page.
IDLE_S = 1.0


def go_ahead(source: ServedFolder) -> None:
    """Read and import what the first click asks for: the browser takes as long to paint the first page."""
    if not source.is_folder:
        source.has_answered.wait(IDLE_S)
        import_module("fp8debug_dashboard.pages.heatmap")
        source.read_on()
        import_rest()


def import_rest() -> None:
    """Import what the pages that nobody has asked for yet need, so that the first click does not wait for it."""
    import_module("fp8debug.rules")
    for _ in PAGES.values():
        pass


#: Stands for a page where the list of runs is shown.
LIST = "runs"
#: What the URL asks for: ``pathname``, ``search``, and ``n``, the number of the layout that serves it.
Asked = dict[str, Any]
#: What is on screen: the number of its layout, page and run of its head, the state of the files then, and whether it waited.
Here = dict[str, Any]


class Screen(NamedTuple):
    """A head, a page, and what the browser is told about both."""

    head: Component
    page: Component
    here: Here


def screen(asked: Asked, source: ServedFolder) -> Screen:
    """Return what the browser shows for an address."""
    view = parse(asked["pathname"], asked["search"])
    place = LIST if is_list(view, source) else view.page
    here = {"n": asked["n"], "head": [place, view.run], "stamp": source.stamp(view.run), "title": title_of(view, source)}
    here["was_pending"] = is_pending(view, source)  # asked before the page is laid out: what it shows may be older
    page = page_of(view, source)
    return Screen(navigation(view, source), page, here)  # in this order: a page that lists the modules does so for the search too


def title_of(view: View, source: ServedFolder) -> str:
    """Return the title of a page's tab: the page, the module if there is one, and the run or the folder."""
    name = source.path.resolve().name
    if is_list(view, source):
        return f"Runs · {name} · fp8debug"
    page = CONTENTS[view.page].title if view.page in CONTENTS else "No such page"
    words = [page, *([view.get("module")] if view.page == "module" and view.get("module") else []), view.run or name]
    return " · ".join([*words, "fp8debug"])


def page_of(view: View, source: ServedFolder) -> Component:
    """Return a whole page, or what went wrong and what to do."""
    try:
        if is_list(view, source):
            from ..pages import runs

            return html.Div([_heading("Runs"), runs.layout(view, source)])
        if view.page not in PAGES:
            raise Fp8DebugError(f"no page {view.page!r}; there are {', '.join(PAGES)}")
        run_view = source.open(view.run)
        shown = PAGES[view.page].layout(view, run_view)
        head = [] if view.page == "module" else [_heading(f"{CONTENTS[view.page].title} of {run_view.name}")]  # it has its own
        return html.Div([*head, html.Div(problems(run_view), id="problems"), shown])
    except Fp8DebugError as error:
        back = dcc.Link("all runs", href="/") if source.is_folder else dcc.Link("overview", href="/")
        waiting = "This page looks again by itself while the run is being written."
        again: Component | None = None
        if isinstance(error, RunError):
            folder = source.path / str(view.run) if source.is_folder else source.path
            again = note("If nobody is writing it, record another: ", code(f"fp8debug run --out {folder}-2 train.py"))
        shown = card("Cannot show this", note(str(error), kind="error"), note(waiting), again, back)
        return html.Div([_heading("Cannot show this"), shown], className="page")


def _heading(text: str) -> Component:
    """Return the heading of a page for who has it read: on screen the navigation says as much."""
    heading: Component = html.H1(text, className="only-read")
    return heading


def is_pending(view: View, source: ServedFolder) -> bool:
    """Return whether parts of a page wait for something that takes long."""
    try:
        page = None if is_list(view, source) else PAGES.get(view.page)
        return page is not None and page.is_pending(view, source.open(view.run))
    except Fp8DebugError:
        return False


def is_list(view: View, source: ServedFolder) -> bool:
    """Return whether a view is the list of runs."""
    return source.is_folder and view.run is None and view.page in ("overview", "runs")


def navigation(view: View, source: ServedFolder) -> Component:
    """Return the head of the page: where one is, and the ways from there."""
    links: list[Component] = [dcc.Link([html.B("fp8"), "debug"], href="/", className="mark")]
    if is_list(view, source):
        return html.Div([*links, html.Span(str(source.path), className="dim folder")], className="nav")
    names = source.names()
    if names:
        choice = dmc.Select(
            id={"run-of": str(view.run)},
            value=view.run,
            data=names,
            limit=200,
            size="xs",
            className="run-choice",
            searchable=True,
            allowDeselect=False,
            comboboxProps=COMBO_BOX,
            withScrollArea=False,
            **{"aria-label": "run"},
        )
        links.append(choice)
    else:
        links.append(html.Span(source.path.resolve().name, className="run-name"))
    tabs: list[Component] = []
    for name, entry in CONTENTS.items():
        current: dict[str, Any] = {"aria-current": "page"} if name == view.page else {}
        classes = "tab tab-current" if current else "tab"
        tabs.append(html.Span(dcc.Link(entry.title, href=href(name, view.run), className=classes), **current))
    shown = CONTENTS[view.page].title if view.page in CONTENTS else "Pages"
    expands: dict[str, Any] = {"aria-expanded": "false", "aria-controls": "tabs"}
    menu = html.Button(["☰ ", shown], id="menu", className="linkish", title="the pages of this run", **expands)
    label: dict[str, Any] = {"aria-label": "pages"}
    pages = html.Nav(tabs, id="tabs", className="tabs", **label)
    return html.Div([*links, menu, pages, _search(view, source)], className="nav")


def _search(view: View, source: ServedFolder) -> Component:
    """Return the search of modules; its data, in execution order, also tell the keys ``[`` and ``]`` which module is next."""
    try:
        run_view = source.open(view.run)
        modules = module_names(run_view) if run_view.knows_modules else []  # else they come when the page has been painted
    except Fp8DebugError:
        modules = []
    search: Component = dmc.Select(
        id="module-search",
        data=modules,
        placeholder="Find a module  ( / )",
        searchable=True,
        limit=60,
        size="xs",
        className="module-search",
        nothingFoundMessage="no such module",
        comboboxProps=COMBO_BOX,
        withScrollArea=False,
        **{"aria-label": "find a module"},
    )
    return search


def module_names(run_view: RunView) -> list[str]:
    """Return the names of the modules in execution order."""
    return list(dict.fromkeys(str(m["fqn"]) for m in run_view.run.modules))


def problems(run_view: RunView) -> Component | None:
    """Return what could not be read."""
    if not run_view.run.problems:
        return None
    words = "Not everything could be read, the rest is shown: " + "; ".join(run_view.run.problems)
    found: Component = html.Div(words, className="problems", role="alert")
    return found


def redrawn(page: Page, view: View, source: ServedFolder, is_same_view: bool) -> tuple[Any, ...]:
    """Return the parts of a page as they go to the browser.

    Raises:
        Fp8DebugError: the run cannot be read.
    """
    run_view = source.open(view.run)
    was_pending = page.is_pending(view, run_view)
    found = page.parts(view, run_view)
    if was_pending and not page.is_pending(view, run_view):  # it settled meanwhile, and will not say so again
        found = page.parts(view, run_view)
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


def settled(page: Page, view: View, run_view: RunView, was_pending: bool) -> bool:
    """Compute what a page waits for; return whether there is anything that it may not show yet.

    Args:
        page: the page.
        view: what it shows.
        run_view: the run.
        was_pending: whether it waited just before it was laid out: what it waited for may have come right after.
    """
    if page.is_pending(view, run_view):
        page.settle(view, run_view)
        return True
    return was_pending


def live_text(view: View, source: ServedFolder) -> str:
    """Return ``● writing``, ``ended`` or ``not closed`` for the run in view."""
    try:
        if is_list(view, source):
            number = len(source.names())
            return f"{number} run{'' if number == 1 else 's'}"
        run_view = source.open(view.run)
        state = sources.state(run_view.run.path, run_view.run.rank_manifests)
    except Fp8DebugError:
        return "waiting"
    return f"● {state}" if state == "writing" else state
