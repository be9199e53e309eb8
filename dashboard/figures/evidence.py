"""The series behind a finding as one figure: a panel each, the accused one first, with limit and span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fp8debug.reports.svg import MIN_SPREAD

from ..data.nonfinite import states_of
from ..data.records import Floats
from .base import empty, mark_gaps, plain
from .plot import Figure, Part
from .theme import LINES, ORANGE, VERMILLION

if TYPE_CHECKING:
    from fp8debug.reports.svg import Chart


def evidence(charts: Sequence[Chart], steps: tuple[int, int]) -> Figure:
    """Return the charts below each other over the same steps; the steps of the finding are shaded.

    Args:
        charts: of ``fp8debug.reports.evidence``.
        steps: first and last step of the finding.
    """
    if not charts:
        return empty("No series was recorded behind this finding; its message holds what is known", 140)
    figure = Figure(len(charts), gap=0.09)
    for i, chart in enumerate(charts):
        values = np.array([np.nan if v is None else v for v in chart.values], dtype=np.float64).astype(np.float32)
        figure.add(
            {
                "type": "scatter",
                "x": np.array(chart.steps, dtype=np.int32),
                "y": np.where(np.isinf(values), np.float32(np.nan), values),
                "mode": "lines+markers" if len(values) <= 60 else "lines",
                "marker": {"size": 4},
                "line": {"color": LINES[0], "width": 1.5},
                "name": plain(chart.title),
                "meta": plain(chart.title),
                "hovertemplate": "%{y:.5g} · step %{x}<extra></extra>",
            },
            i,
        )
        figure.axis("y", i, **_wide_enough(values))
        mark_gaps(figure, np.array(chart.steps, dtype=np.int32), states_of(chart.values), i)
        figure.note(plain(chart.title), i, x=0, y=1, xanchor="left", yanchor="bottom")
        if chart.limit is not None:
            figure.rule(VERMILLION, i, y=float(chart.limit), dash="dash")
        n = str(i + 1) if i else ""
        if steps[1] > steps[0]:
            place = {"x0": steps[0], "x1": steps[1], "xref": f"x{n}", "y0": 0, "y1": 1, "yref": f"y{n} domain"}
            look = {"fillcolor": ORANGE, "opacity": 0.12, "line": {"width": 0}, "layer": "below"}
            figure.shape({"type": "rect", **place, **look})
        else:
            figure.rule(ORANGE, i, x=steps[0])
    figure.over_steps(len(charts) - 1)
    return figure.set(70 + 125 * len(charts), margin={"t": 24})


def _wide_enough(values: Floats) -> Part:
    """Return the range of an axis whose values differ by noise alone: drawn from end to end, noise would look like a change.

    So would, of values that are all 0, the ends that plotly chooses.
    """
    known = values[np.isfinite(values)]
    if not len(known):
        return {}
    low, high = float(known.min()), float(known.max())
    if low == high == 0:
        return {"range": [-0.06, 1.0]}  # plotly would go down to -1, and a share is never negative
    least = MIN_SPREAD * max(abs(low), abs(high))
    return {"range": [(low + high - least) / 2, (low + high + least) / 2]} if 0 < high - low < least else {}
