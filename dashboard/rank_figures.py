"""The plot of the ranks page: the median of all ranks in the band of all of them, and the rank that lies apart."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # plotly ships no types

from .figures import empty, line, plain, styled
from .rank_data import Spread
from .theme import GREY, LINES


def spread(found: Spread, metric: str, step: int | None = None) -> go.Figure:
    """Return one site of all ranks over steps."""
    if not np.isfinite(found.median.values).any():
        return empty(f"{metric} was not recorded at this site", 220)
    figure = make_subplots(rows=1, cols=1)
    line(figure, found.median, LINES[0], row=1, col=1, legend="median, band of all ranks", in_legend=True)
    line(figure, found.outlier, LINES[1], row=1, col=1, legend=found.outlier.name, in_legend=True)
    if step is not None:
        figure.add_vline(x=step, line={"color": GREY, "width": 1, "dash": "dash"})
    styled(figure, 240, showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"t": 26})
    figure.update_xaxes(title_text="step", title_standoff=2)
    figure.update_yaxes(title_text=plain(metric), title_standoff=4)
    return figure
