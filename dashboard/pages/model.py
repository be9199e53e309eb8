"""Tree of the model: every module under what contains it, with its health, its share of the FLOPs and its casts."""

from __future__ import annotations

from typing import Any

from dash import dcc, html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError

from ..data.metric_labels import label_of
from ..data.module_tree import ModuleNode, module_tree, rank_of
from ..data.nonfinite import FINITE, NAMES
from ..data.worst_modules import LISTED, WorstModule, every_module
from ..figures.theme import ICONS, NO_DATA
from ..web.run_view import RunView
from ..web.urls import View, href
from ..widgets import card, note, percent, poster
from .base import Page

#: A tree of no more modules is open from the beginning; of a larger one only the way to the modules that are ill.
MAX_OPEN = 40


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether the health of a large run is still to be read."""
    return not run_view.is_small and not run_view.has_health()


def settle(view: View, run_view: RunView) -> object:
    """Read the health of the run."""
    return run_view.heat(run=run_view.second_connection())


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    about, tree = parts(view, run_view)
    shown = card(
        "Modules",
        html.Div(about, id="model-about"),
        html.Div([html.Span(text) for text in ("module", "worst health of all steps", "FLOPs", "casts")], className="tree-head"),
        html.Div(tree, id="model-tree", className="tree"),
        note="in execution order; open and close with a click or Enter; a name opens its module",
    )
    return html.Div([shown], className="page")


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about the tree, and the tree."""
    modules = run_view.run.modules
    if not modules:
        return note("This run lists no module: its manifest is missing, or nothing was recorded."), []
    healths: dict[str, WorstModule] = {}
    waits, problem = is_pending(view, run_view), ""
    if not waits:
        try:
            healths = {one.module: one for one in every_module(run_view.heat())}
        except Fp8DebugError as error:
            problem = str(error)
    root = module_tree(modules, healths, run_view.run.gemms)
    ill = sum(one.state > FINITE or one.severity >= LISTED for one in healths.values())
    words = f"{len(modules):,} modules; {ill:,} beyond a warn threshold, or NaN or Inf, at some step."
    about = poster("The health of the modules is being read.") if waits else note(words)
    lines = [about, *([note(problem, kind="warning")] if problem else [])]
    is_open = len(modules) <= MAX_OPEN
    return lines, [_shown(child, view, 0, is_open) for child in root.children.values()]


def _shown(node: ModuleNode, view: View, depth: int, is_open: bool, above: str = "") -> Component:
    level, words = in_words(node.health)
    link: Any = node.name
    if node.entry is not None:
        since = node.health.since if node.health is not None else None
        params = {"module": node.path, "step": since, "site": _sick_site(node.health)}
        link = dcc.Link(node.name, href=href("module", view.run, **params))
    elif len(node.children) > 1:
        link = f"{node.name} ({sum(node.casts.values()):,})"
    casts = "; ".join(cast if len(node.casts) == 1 else f"{n:,} x {cast}" for cast, n in node.casts.items())
    cells = [
        html.Span(link, className="tree-name", style={"--depth": depth}),
        html.Span([f"{ICONS[level]} ", words], className=f"badge-{level}"),
        html.Span(percent(node.share), className="tree-share", style={"--share": node.share or 0.0}),
        html.Span("same casts", className="dim", title=casts) if casts == above else html.Span(casts),
    ]
    if not node.children:
        return html.Div(cells, className=f"tree-row tree-{level}")
    children = [_shown(child, view, depth + 1, is_open, casts) for child in node.children.values()]
    is_shown = is_open or depth == 0 or rank_of(node.health) >= (False, LISTED)
    return html.Details([html.Summary(cells, className=f"tree-row tree-{level}"), *children], open=is_shown)


def _sick_site(health: WorstModule | None) -> str | None:
    """Return the site that the row names; None where it names none."""
    if health is None or health.state > FINITE or health.reason is None or not health.severity >= LISTED:
        return None
    return f"{health.reason.gemm}.{health.reason.tensor}"


def in_words(health: WorstModule | None) -> tuple[str, str]:
    """Return (level, words) of a health: ``error`` at the act threshold or where NaN or Inf is, ``warning`` at that to warn."""
    if health is None:
        return "unknown", "not recorded"
    where = f" at {health.reason.gemm} {health.reason.tensor}" if health.reason is not None else ""
    since = f" from step {health.since:,}" if health.since is not None else ""
    if health.state > FINITE:
        return "error", f"{NAMES[health.state]}{since}"
    if health.severity != health.severity:
        return "unknown", NO_DATA
    if health.severity < LISTED or health.reason is None:
        return "ok", "healthy"
    return "error" if health.severity >= 2 else "warning", f"{label_of(health.reason.metric)}{where}{since}"


PAGE = Page(name="model", layout=layout, parts=parts, is_pending=is_pending, settle=settle)
