"""The plot of the ranks page: the median of all ranks in the band of all of them, and the rank that lies apart."""

from __future__ import annotations

import numpy as np

from ..data.metric_labels import label_of
from ..data.ranks import Spread
from .base import empty, line, plain
from .plot import LEGEND, Figure
from .theme import GREY, LINES


def spread(found: Spread, metric: str, step: int | None = None) -> Figure:
    """Return one site of all ranks over steps."""
    if not np.isfinite(found.median.values).any() and found.median.states is None:
        return empty(f"{label_of(metric)} was not recorded at this site", 220)
    figure = Figure()
    line(figure, found.outlier, LINES[1], legend=found.outlier.name, in_legend=True, rank=1001, what=f"{found.outlier.name}:")
    line(figure, found.median, LINES[0], legend="median, band of all ranks", in_legend=True, what="a rank:")
    if step is not None:
        figure.rule(GREY, x=step, dash="dash")
    figure.over_steps()
    figure.axis("y", title=plain(label_of(metric)), standoff=4)
    return figure.set(240, showlegend=True, legend=LEGEND, margin={"t": 26})
