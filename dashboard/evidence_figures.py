"""The series behind a finding as one figure: a panel each, the accused one first, with limit and span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # plotly ships no types

from .figures import empty, plain, styled
from .theme import LINES, ORANGE, VERMILLION

if TYPE_CHECKING:
    from fp8debug.reports.svg import Chart


def evidence(charts: Sequence[Chart], steps: tuple[int, int]) -> go.Figure:
    """Return the charts below each other over the same steps; the steps of the finding are shaded.

    Args:
        charts: of ``fp8debug.reports.evidence``.
        steps: first and last step of the finding.
    """
    if not charts:
        return empty("No series was recorded behind this finding; its message holds what is known", 140)
    figure = make_subplots(rows=len(charts), cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for row, chart in enumerate(charts, 1):
        values = np.array([np.nan if v is None else v for v in chart.values], dtype=np.float64).astype(np.float32)
        figure.add_trace(
            go.Scatter(
                x=np.array(chart.steps, dtype=np.int32),
                y=np.where(np.isinf(values), np.float32(np.nan), values),
                mode="lines+markers" if len(values) <= 60 else "lines",
                marker={"size": 4},
                line={"color": LINES[0], "width": 1.5},
                name=plain(chart.title),
                hovertemplate="%{y:.5g} · step %{x}<extra></extra>",
            ),
            row=row,
            col=1,
        )
        title = {"text": plain(chart.title), "font": {"size": 11}, "showarrow": False}
        figure.add_annotation(
            **title, x=0, y=1, xref="x domain", yref="y domain", xanchor="left", yanchor="bottom", row=row, col=1
        )
        if chart.limit is not None:
            limit = {"color": VERMILLION, "width": 1, "dash": "dash"}
            figure.add_hline(y=float(chart.limit), line=limit, row=row, col=1)
    if steps[1] > steps[0]:
        figure.add_vrect(x0=steps[0], x1=steps[1], fillcolor=ORANGE, opacity=0.12, line_width=0, layer="below")
    else:
        figure.add_vline(x=steps[0], line={"color": ORANGE, "width": 1})
    figure.update_xaxes(title_text="step", title_standoff=2, row=len(charts), col=1)
    styled(figure, 70 + 125 * len(charts))
    figure.update_layout(margin={"t": 24})
    return figure
