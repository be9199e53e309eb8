"""Two paths of one model side by side, training and rollout: modules in execution order, and where they part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dash import html
from dash.development.base_component import Component

from fp8debug.errors import Fp8DebugError
from fp8debug.parity.compare import compare_paths
from fp8debug.parity.report import metric_words

from ..data import parity as parity_data
from ..figures.base import empty
from ..figures.parity import HEIGHT, paths
from ..figures.theme import BY_NUMBER, GRID_NUMBER, plain_number
from ..web.run_view import RunView
from ..web.urls import View
from ..widgets import badge, card, code, control, graph, grid, note, poster
from .base import Page

_NUMBER: dict[str, Any] = {"type": "rightAligned", "valueFormatter": GRID_NUMBER, "comparator": BY_NUMBER, "width": 130}
#: Names of modules differ at their end: model.layers.0.post_attention_layernorm is whole; a narrow table scrolls.
_NAME: dict[str, Any] = {"width": 262, "minWidth": 240}
COLUMNS: tuple[dict[str, Any], ...] = (
    {"field": "place", "headerName": "#", "type": "rightAligned", "width": 64},
    {"field": "cause", "headerName": "Finding", "width": 110, "minWidth": 110},
    {"field": "module", "headerName": "Training", **_NAME, "tooltipField": "module"},
    {"field": "rollout_module", "headerName": "Rollout", **_NAME, "tooltipField": "rollout_module"},
    {"field": "input_nmse", "headerName": "Input", **_NUMBER},
    {"field": "output_nmse", "headerName": "Output", **_NUMBER},
    {"field": "weight_nmse", "headerName": "Weight", **_NUMBER},
    {"field": "error_train", "headerName": "Training's error", **_NUMBER},
    {"field": "error_rollout", "headerName": "Rollout's error", **_NUMBER},
)
#: Findings, and notes, that are listed; the others are counted.
MAX_LINES = 20
_NUMBERS = ("input_nmse", "output_nmse", "weight_nmse", "error_train", "error_rollout")


def _other(view: View, run_view: RunView) -> str | None:
    name = view.get("with")
    return name if name in run_view.siblings() and name != run_view.name and run_view.open_sibling is not None else None


def _key(view: View, run_view: RunView) -> tuple[str, str | None]:
    return "parity", _other(view, run_view)


def is_pending(view: View, run_view: RunView) -> bool:
    """Return whether the paths are still to be compared."""
    is_there = _other(view, run_view) is not None or parity_data.has_report(run_view.run.path)
    return is_there and not run_view.is_cached(_key(view, run_view))


def settle(view: View, run_view: RunView) -> object:
    """Compare this run with the chosen one, or read the report in its folder."""
    return run_view.cache(_key(view, run_view), lambda: _found(view, run_view))


def _found(view: View, run_view: RunView) -> dict[str, Any] | str:
    name = _other(view, run_view)
    try:
        if name is not None and run_view.open_sibling is not None:
            return compare_paths(run_view.run.path, run_view.open_sibling(name).run.path).to_dict()
        return parity_data.read_report(run_view.run.path)
    except Fp8DebugError as error:
        return str(error)


def layout(view: View, run_view: RunView) -> Component:
    """Return the page."""
    about, figure, rows = parts(view, run_view)
    names = [name for name in run_view.siblings() if name != run_view.name]
    first = f"({parity_data.FILE} of this run)" if parity_data.has_report(run_view.run.path) else "(choose the rollout's run)"
    pick = control("with", "", view.get("with"), [{"value": "", "label": first}, *names], "with", 280)
    return html.Div(
        [
            card(
                "Training and rollout",
                html.Div(about, id="parity-about"),
                graph("parity-paths", figure),
                note=html.Div([pick], className="controls"),
            ),
            card(
                "Modules in execution order",
                grid("parity-modules", COLUMNS, rows, "No module to list"),
                note="squares of relative differences; in the plot 0 lies at 1e-12",
            ),
        ],
        className="page",
    )


def parts(view: View, run_view: RunView) -> tuple[Any, ...]:
    """Return a line about both paths, the plot, and every module."""
    if view.get("with") and _other(view, run_view) is None:
        return note(f"No other run {view.get('with')!r} in this folder.", kind="error"), empty("nothing to compare", HEIGHT), []
    if _other(view, run_view) is None and not parity_data.has_report(run_view.run.path):
        command = f"fp8debug parity TRAIN ROLLOUT --format json -o {run_view.run.path / parity_data.FILE}"
        about = note("Choose the run of the rollout, or compare two dumps of the same tokens: ", code(command))
        return about, empty("nothing to compare with yet", HEIGHT), []
    found = run_view.cached(_key(view, run_view))
    if found is None:
        return poster("The two paths are being compared."), empty("not known yet", HEIGHT), []
    if isinstance(found, str):
        return note(found, kind="error"), empty("cannot be compared", HEIGHT), []
    causes = {one["module"]: one["code"] for one in reversed(found["findings"]) if one["module"]}
    lines = lines_of(found)
    rows = [
        {
            **{key: plain_number(one[key]) for key in _NUMBERS},
            "id": str(place),
            "place": place,
            "module": one["module"],
            "rollout_module": one["rollout_module"],
            "cause": causes.get(one["module"], ""),
        }
        for place, one in enumerate(found["modules"])
    ]
    rows += [
        {
            **dict.fromkeys(_NUMBERS, plain_number(None)),
            "id": f"alone {place}",
            "place": None,
            "module": one["module"] if one["path"] == "training" else "",
            "rollout_module": one["module"] if one["path"] != "training" else "",
            "cause": "not compared",
        }
        for place, one in enumerate(found["unmatched"])
    ]
    beside = Path(str(found["rollout"])).name
    figure = paths(found["modules"], list(causes)).about(run_view.name, f"with {beside}", "relative difference of paths")
    return lines, figure, rows


def lines_of(found: Mapping[str, Any]) -> list[Component]:
    """Return what a comparison found, in lines: findings, metrics, what only one path has, and notes."""
    lines: list[Component] = [
        html.P([badge(one["severity"], one["code"]), f" {one['message']}. Cure: {one['cure']}."])
        for one in found["findings"][:MAX_LINES]
    ]
    lines += _rest(found["findings"], "finding")
    num = len(found["modules"])
    named = {one["module"] for one in (*found["findings"], *found["unmatched"])}
    blind = [one["module"] for one in found["modules"] if one["module"] not in named and _is_blind(one)]
    if not lines and len(blind) < num:
        lines = [html.P([badge("ok", "parity"), f" {num - len(blind):,} modules compared; none differs beyond noise."])]
    elif not lines:
        lines = [html.P([badge("unknown", "parity"), " No module could be compared."])]
    if blind:
        some = f"{', '.join(blind[:3])}{' ...' if len(blind) > 3 else ''}"
        many = f"{len(blind):,} module{'' if len(blind) == 1 else 's'}"
        lines.append(
            note(f"Not compared: {many} whose input and output have no finite number in both paths ({some}).", kind="warning")
        )
    metrics = metric_words(found["metrics"])
    lines += [note("; ".join(metrics))] if metrics else []
    lines += _alone(found["unmatched"])
    lines += [note(f"Note: {one}.") for one in found["problems"][:MAX_LINES]]
    lines += _rest(found["problems"], "note")
    return lines


def _is_blind(module: Mapping[str, Any]) -> bool:
    """Return whether neither input nor output of a module could be compared: all NaN, say."""
    return module["input_nmse"] is None and module["output_nmse"] is None


def _rest(listed: Sequence[object], name: str) -> list[Component]:
    """Return a line that counts what is not listed; nothing where all is."""
    more = len(listed) - MAX_LINES
    return [note(f"{more} {name}{'' if more == 1 else 's'} more: fp8debug parity lists all.")] if more > 0 else []


def _alone(unmatched: Sequence[Mapping[str, str]]) -> list[Component]:
    """Return a line for each path that has modules which the other lacks."""
    found: list[Component] = []
    for path, other in (("training", "rollout"), ("rollout", "training")):
        names = [one["module"] for one in unmatched if one["path"] == path]
        if names:
            some = f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
            number = f"{len(names)} module{'' if len(names) == 1 else 's'}"
            found.append(note(f"Not compared: {number} of the {path} that the {other} does not have ({some})."))
    return found


PAGE = Page(name="parity", layout=layout, parts=parts, is_pending=is_pending, settle=settle)
