"""Controls of the plots over steps of a page: what x is, whether y is logarithmic, how much is smoothed; all in the URL."""

from __future__ import annotations

from collections.abc import Mapping

from dash import html
from dash.development.base_component import Component

from ..data.step_scales import StepScale, step_scale
from ..figures import axes
from ..figures.plot import Figure
from ..web.run_view import RunView
from ..web.urls import View
from ..widgets import control, segments

#: Widths of the window of smoothing, in points of a line.
WINDOWS = ("5", "15", "50")
_LABELS = {"step": "step", "tokens": "tokens", "time": "wall time"}


def scale_of(run_view: RunView, name: str) -> StepScale | None:
    """Return a scale of a run, None for steps and for what was not recorded."""
    if name not in ("tokens", "time"):
        return None
    found: StepScale | None = run_view.cache(("scale", name), lambda: step_scale(run_view.run, name))
    return found


def choice_of_x(view: View, run_view: RunView) -> Component:
    """Return the choice of the x axis among what the run recorded."""
    known = ["step", *(name for name in ("tokens", "time") if run_view.run.has(name))]
    x = view.get("x", "step")
    return segments("x", "step", x if x in known else "step", [{"value": n, "label": _LABELS[n]} for n in known], "x")


def controls(view: View, run_view: RunView) -> Component:
    """Return the choices; of the axis those that the run recorded."""
    smooth = view.get("smooth")
    shown = [
        choice_of_x(view, run_view),
        segments("y", "linear", "log" if view.get("y") == "log" else "linear", ["linear", "log"], "y"),
        control(
            "smooth",
            "",
            smooth if smooth in WINDOWS else "",
            [{"value": "", "label": "none"}, *({"value": n, "label": f"{n} points"} for n in WINDOWS)],
            "smoothing",
            170,
        ),
    ]
    found: Component = html.Div(shown, className="controls axes")
    return found


def shaped(figure: Figure, view: View, run_view: RunView, of: Mapping[str, StepScale] | None = None) -> Figure:
    """Return a figure over steps as the URL asks for it; another figure as it is.

    Args:
        figure: the figure; it is changed.
        view: the URL.
        run_view: the run whose steps are on the axis.
        of: by ``legendgroup`` the scale of a trace of another run.
    """
    if not axes.is_over_steps(figure):
        return figure
    if view.get("smooth") in WINDOWS:
        axes.smoothed(figure, int(view.get("smooth")))
    if view.get("y") == "log":
        axes.logarithmic(figure)
    scale = scale_of(run_view, view.get("x"))
    return figure if scale is None else axes.rescaled(figure, scale, of)
