"""What to take out of FP8, or into a better cast: candidates with their reasons, and the file that a training job applies."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from dash import dcc, html
from dash.development.base_component import Component

from .. import source
from ..source import Opened
from ..theme import NO_DATA
from ..urls import View, href
from ..widgets import card, code, grid, note, number, percent
from .base import Page

if TYPE_CHECKING:
    from fp8debug import Fallback

COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "module", "headerName": "Module", "cellRenderer": "Link", "width": 190, "tooltipField": "module"},
    {"field": "gemms", "headerName": "GEMMs", "width": 120},
    {"field": "tensor", "headerName": "Tensor", "width": 84},
    {"field": "cast", "headerName": "Run in", "width": 170, "tooltipField": "cast"},
    {"field": "reasons", "headerName": "Reasons", "width": 110},
    {"field": "damage", "headerName": "Damage", "width": 90, "type": "rightAligned"},
    {"field": "cost", "headerName": "Speed-up given back", "width": 120, "type": "rightAligned"},
    {"field": "cheaper", "headerName": "Cheaper cure first", "width": 320, "tooltipField": "cheaper"},
)


def row(fallback: Fallback, run: str | None) -> dict[str, Any]:
    """Return a candidate as a row of the grid."""
    return {
        "module": fallback.module,
        "href": href("module", run, module=fallback.module),
        "gemms": " ".join(str(gemm) for gemm in fallback.gemms),
        "tensor": "all" if fallback.tensor == "*" else str(fallback.tensor),
        "cast": "BF16" if fallback.cast is None else str(fallback.cast),
        "reasons": " ".join(fallback.reasons),
        "damage": number(fallback.damage),
        "cost": percent(fallback.cost),
        "cheaper": fallback.cheaper or NO_DATA,
    }


def layout(view: View, opened: Opened) -> Component:
    """Return the page."""
    rows, text, about = parts(view, opened)
    path = shlex.quote(str(opened.run.path))
    apply = f"import fp8debug\n\nfp8debug.apply(model, {'fallback.json'!r})"
    return html.Div(
        [
            card("Candidates", html.Div(about, id="fallback-about"), grid("candidates", COLUMNS, rows, "No candidate")),
            html.Div(
                [
                    card(
                        "The file",
                        html.Div(
                            [dcc.Clipboard(target_id="exported", title="Copy", className="copy"), html.Pre(text, id="exported")],
                            className="exported",
                        ),
                        note="as fp8debug fallback --to json writes it",
                        grow=True,
                    ),
                    card(
                        "Use it",
                        html.P(["Write it: ", code(f"fp8debug fallback {path} --to json -o fallback.json")]),
                        html.P("Apply it after convert():"),
                        html.Pre(apply),
                        html.P(
                            "These are candidates: hard faults first, then measured damage per speed given back."
                            " Run again to see what they buy."
                        ),
                    ),
                ],
                className="columns columns-wide-left",
            ),
        ],
        className="page",
    )


def parts(view: View, opened: Opened) -> tuple[Any, ...]:
    """Return the rows, the exported text and a line about both."""
    fallbacks = opened.fallbacks()
    if opened.failure:
        about = note(f"Triage could not run, so nothing is recommended: {opened.failure}", kind="warning")
    elif not fallbacks:
        about = note("No candidate: no finding calls for another cast.")
    else:
        cost = sum(f.cost for f in fallbacks)
        count = f"{len(fallbacks)} candidate{'s' if len(fallbacks) > 1 else ''}"
        about = note(f"{count}, giving back {percent(cost) if cost else 'nothing'} of the FP8 speed-up.")
    return [row(f, view.run) for f in fallbacks], source.exported(fallbacks, opened.run), about


PAGE = Page(
    name="fallback",
    title="Fallback",
    layout=layout,
    parts=parts,
    outputs=(("candidates", "rowData"), ("exported", "children"), ("fallback-about", "children")),
)
