"""Figures over steps as a reader asks for them: over tokens or time, with a logarithmic y axis, or smoothed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..data.records import Floats
from ..data.step_scales import StepScale
from .plot import Figure, Part

_LINES = ("lines", "lines+markers")


def is_over_steps(figure: Figure) -> bool:
    """Return whether the x axes of a figure are steps."""
    return bool(figure.layout.get("meta", {}).get("x") == "step")


def rescaled(figure: Figure, scale: StepScale, of: Mapping[str, StepScale] | None = None) -> Figure:
    """Return a figure over steps with its traces, shapes and notes moved to another scale; the hover text keeps the step.

    Args:
        figure: over steps; it is changed.
        scale: where steps lie.
        of: by ``legendgroup`` the scale of a trace of another run.
    """
    for trace in figure.data:
        if isinstance(trace.get("x"), np.ndarray):
            own = (of or {}).get(str(trace.get("legendgroup")), scale)
            _name_scale_in_hover(trace, scale)
            trace["x"] = own(trace["x"]).astype(np.float32)
    for shape in figure.layout.get("shapes", ()):
        _move(shape, "xref", ("x0", "x1"), scale)
    for note in figure.layout.get("annotations", ()):
        _move(note, "xref", ("x",), scale)
    for name, axis in figure.layout.items():
        if re.fullmatch(r"xaxis\d*", name):
            _rescale_axis(axis, scale)
    figure.layout["uirevision"] = f"{figure.layout['uirevision']} {scale.name}"  # a zoom in steps is none in tokens
    figure.layout["meta"] = {**figure.layout["meta"], "x": scale.name, "steps": scale.steps.tolist(), "at": scale.at.tolist()}
    return figure


def _name_scale_in_hover(trace: Part, scale: StepScale) -> None:
    """Have the hover text of a trace over steps name the place on the scale, and of a line the step too."""
    if "hovertemplate" not in trace:
        return
    place = f"%{{x:.4~g}} {scale.title}"
    if "text" not in trace and trace["x"].ndim == 1 and trace["type"] == "scatter":
        trace["text"] = trace["x"].tolist()
        place = f"step %{{text}} · {place}"
    trace["hovertemplate"] = trace["hovertemplate"].replace("step %{x}", place)


def _rescale_axis(axis: Part, scale: StepScale) -> None:
    if axis.get("title", {}).get("text") == "step":
        axis["title"] = {**axis["title"], "text": scale.title}
    for key in ("range", "tickvals"):
        if key in axis:
            axis[key] = scale(axis[key]).tolist()


def _move(part: Part, ref: str, keys: tuple[str, ...], scale: StepScale) -> None:
    """Move the ends of a shape or note that lie on an axis of steps."""
    if re.fullmatch(r"x\d*", str(part.get(ref, "x"))):
        for key in keys:
            part[key] = float(scale(part[key]))


def logarithmic(figure: Figure) -> Figure:
    """Return a figure whose y axes are logarithmic, but for those with a value at or below 0 and those that have a type."""
    figure.layout["uirevision"] = f"{figure.layout['uirevision']} log"
    for i in range(figure.num):
        n = "" if i == 0 else str(i + 1)
        axis = figure.layout.get(f"yaxis{n}", {})
        own = [t for t in figure.data if t.get("yaxis", "y") == f"y{n}" and isinstance(t.get("y"), np.ndarray)]
        values = np.concatenate([t["y"][np.isfinite(t["y"])] for t in own]) if own else np.zeros(0, np.float32)
        if "type" in axis or not len(values) or values.min() <= 0 or any(t["type"] != "scatter" for t in own):
            continue
        low, high = (float(np.log10(v)) for v in (values.min(), values.max()))
        pad = 0.06 * (high - low) or 0.05
        figure.axis("y", i, type="log", range=[low - pad, high + pad])
        figure.leave_room([i])
    return figure


def smoothed(figure: Figure, points: int) -> Figure:
    """Return a figure whose lines are means over a window of points, each beside its faint original; gaps stay gaps.

    Args:
        figure: over steps; it is changed.
        points: width of the window.
    """
    traces: list[Part] = []
    for trace in figure.data:
        y: Any = trace.get("y")
        is_line = trace.get("mode") in _LINES and isinstance(y, np.ndarray) and trace.get("meta") is not None
        if not is_line or points < 2 or len(y) < 3:
            traces.append(trace)
            continue
        faint = {**trace, "opacity": 0.25, "showlegend": False, "hoverinfo": "skip", "mode": "lines"}
        faint.pop("hovertemplate", None)
        mean = {**trace, "y": moving_mean(y, points), "meta": f"{trace['meta']}, mean of {points} points"}
        traces += [faint, mean]
    figure.data[:] = traces
    return figure


def moving_mean(values: Floats, points: int) -> Floats:
    """Return the mean over a centred window, of what is finite in it; what is not finite stays as it is.

    Args:
        values: float32 ``[points]``.
        points: width of the window; at the ends it is cut.
    """
    known = np.isfinite(values)
    window = np.ones(min(points, 2 * len(values) - 1))
    total = np.convolve(np.where(known, values, 0).astype(np.float64), window)
    count = np.convolve(known.astype(np.float64), window)
    start = (len(window) - 1) // 2
    middle = slice(start, start + len(values))
    mean = total[middle] / np.maximum(count[middle], 1)
    return np.where(known, mean, values).astype(np.float32)
