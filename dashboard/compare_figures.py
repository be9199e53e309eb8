"""Runs over each other: their losses with the gap to the first, and one site in two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # plotly ships no types

from .figures import empty, line, plain, styled
from .records import Trace
from .theme import GREY, LINES, VERMILLION


def losses(runs: Sequence[tuple[str, Trace | None]], diverges_at: int | None = None) -> go.Figure:
    """Return the losses of several runs over steps, and below them what the first lies above each other one.

    Args:
        runs: (name, loss or None) of each.
        diverges_at: first step from which the first run lies beyond the noise of the second.
    """
    known = [(name, trace) for name, trace in runs if trace is not None]
    if not known:
        return empty("None of these runs recorded a loss", 200)
    gaps = [(name, _gap(known[0][1], trace)) for name, trace in known[1:]] if known[0][0] == runs[0][0] else []
    figure = make_subplots(
        rows=2 if gaps else 1, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[3, 1.3] if gaps else [1]
    )
    for i, (name, trace) in enumerate(known):
        line(figure, trace, LINES[i % len(LINES)], row=1, col=1, legend=plain(name), in_legend=True, rank=i)
    for i, (_, gap) in enumerate(gaps, 1):
        line(figure, gap, LINES[i % len(LINES)], row=2, col=1, width=1.2)
    if gaps:
        figure.add_hline(y=0, line={"color": GREY, "width": 1}, row=2, col=1)
        figure.update_yaxes(title_text=f"{plain(runs[0][0])[:18]} minus it", title_standoff=4, row=2, col=1)
    if diverges_at is not None:
        figure.add_vline(x=diverges_at, line={"color": VERMILLION, "width": 1.2, "dash": "dash"})
    styled(figure, 360 if gaps else 260, showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"t": 26}, hovermode="x")
    figure.update_yaxes(title_text="loss", title_standoff=4, row=1, col=1)
    figure.update_xaxes(title_text="step", title_standoff=2, row=2 if gaps else 1, col=1)
    return figure


def _gap(first: Trace, other: Trace) -> Trace:
    """Return first minus other at their common points."""
    steps, ours, theirs = np.intersect1d(first.steps, other.steps, return_indices=True)
    values = first.values[ours] - other.values[theirs]
    return Trace(name="gap", steps=steps.astype(np.int32), values=values.astype(np.float32))


def site_in_both(runs: Sequence[tuple[str, Sequence[Trace]]], metric: str, step: int | None = None) -> go.Figure:
    """Return one metric of one site in several runs, the running cast or the result against the shadow."""
    figure = make_subplots(rows=1, cols=1)
    drawn = False
    for i, (name, traces) in enumerate(runs):
        own = [t for t in traces if t.actual and t.reference != "exact"] or [t for t in traces if t.reference != "exact"][:1]
        for trace in own[:1]:
            named = replace(trace, name=name, actual=True)
            line(figure, named, LINES[i % len(LINES)], row=1, col=1, legend=plain(name), in_legend=True, rank=i)
            drawn = drawn or bool(np.isfinite(trace.values).any())
    if not drawn:
        return empty(f"{metric} was recorded at this site in none of these runs", 200)
    if step is not None:
        figure.add_vline(x=step, line={"color": VERMILLION, "width": 1.2, "dash": "dash"})
    styled(figure, 260, showlegend=True, legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0})
    figure.update_layout(margin={"t": 26}, hovermode="x")
    figure.update_yaxes(title_text=plain(metric), title_standoff=4)
    figure.update_xaxes(title_text="step", title_standoff=2)
    return figure
