"""Runs over each other: their losses with the gap to the reference, and one site in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ..data.metric_labels import label_of
from ..data.records import StepSeries
from .base import empty, line, plain
from .plot import LEGEND, Figure
from .theme import BROWN, GREY, LINES, VERMILLION


def losses(
    runs: Sequence[tuple[str, StepSeries | None]],
    diverges_at: Sequence[int | None] = (),
    nonfinite_at: Mapping[str, int] | None = None,
) -> Figure:
    """Return the losses of several runs over steps, and below them what each lies above the reference.

    Args:
        runs: (name, loss or None) of each, the reference first.
        diverges_at: of each run after the first, the step from which on it lies beyond the noise, or None.
        nonfinite_at: by run the first step whose loss is NaN or Inf, where a point of its line stands for several steps.
    """
    lost = nonfinite_at or {}
    known = [(name, trace) for name, trace in runs if trace is not None]
    if not known:
        return empty("None of these runs recorded a loss", 200)
    gaps = [(name, _gap(known[0][1], trace)) for name, trace in known[1:]] if known[0][0] == runs[0][0] else []
    figure = Figure(2, heights=[3, 1.3], gap=0.06) if gaps else Figure()
    for i, (name, trace) in enumerate(known):
        legend = f"{name} (reference)" if gaps and i == 0 else name
        what = f"{plain(name)}:"
        line(figure, trace, _color(i), legend=legend, in_legend=True, rank=i, what=what, since=lost.get(name))
    for i, (name, gap) in enumerate(gaps, 1):
        since = min((lost[one] for one in (runs[0][0], name) if one in lost), default=None)
        line(figure, gap, _color(i), 1, width=1.2, what=f"no gap of {plain(name)}:" if len(gaps) > 1 else "no gap:", since=since)
    if gaps:
        figure.rule(GREY, 1, y=0)
        figure.axis("y", 1, title="gap", standoff=4)
        figure.note(f"each minus {plain(runs[0][0])}", 1, x=0, y=1, xanchor="left", yanchor="bottom")
    for step in sorted({step for step in diverges_at if step is not None}):
        figure.rule(VERMILLION, x=step, width=1.2, dash="dash")
    figure.axis("y", title="loss", standoff=4)
    figure.over_steps(1 if gaps else 0)
    return figure.set(360 if gaps else 260, showlegend=True, legend=LEGEND, margin={"t": 26}, hovermode="x")


def _color(i: int) -> str:
    """Return the colour of the i-th of eight runs; no two are alike."""
    return (*LINES, GREY, BROWN)[i % (len(LINES) + 2)]


def _gap(first: StepSeries, other: StepSeries) -> StepSeries:
    """Return other minus first at their common points."""
    steps, ours, theirs = np.intersect1d(first.steps, other.steps, return_indices=True)
    values = other.values[theirs] - first.values[ours]
    states = [t.states[at] for t, at in ((first, ours), (other, theirs)) if t.states is not None]
    found = np.maximum.reduce(states) if states else None
    return StepSeries(name="gap", steps=steps.astype(np.int32), values=values.astype(np.float32), states=found)


def site_in_both(runs: Sequence[tuple[str, Sequence[StepSeries] | None]], metric: str, step: int | None = None) -> Figure:
    """Return one metric of one site in several runs, the reference first: the running cast or the result against the shadow.

    A run without a line is in the legend with the reason, and so is a cast that did not run or that stands for several.

    Args:
        runs: (name, its lines at the site) of each; None where the run has no such module.
        metric: column of ``sites``.
        step: step to mark.
    """
    figure, missing = Figure(), []
    for i, (name, traces) in enumerate(runs):
        known = [t for t in traces or () if t.reference != "exact"]
        own = [t for t in known if t.actual] or known
        if not own:
            missing.append((i, f"{name}: {'no such module' if traces is None else 'not recorded here'}"))
            continue
        words = name + ("" if own[0].actual else f", what-if {own[0].cast_name}")
        if len(own) > 1:
            words += f", 1 of {len(own)} casts" if not own[0].actual else f", {own[0].cast_name}, 1 of {len(own)} casts"
        line(figure, own[0], _color(i), legend=name, in_legend=True, rank=i, what=f"{plain(name)}:")
        figure.data[-1]["name"] = plain(words)
    if not figure.told and not any(np.isfinite(drawn["y"]).any() for drawn in figure.data):
        return empty(f"{label_of(metric)} was recorded at this site in none of these runs", 200)
    for i, words in missing:
        key = {"type": "scatter", "x": [None], "y": [None], "mode": "lines", "line": {"color": _color(i)}, "hoverinfo": "skip"}
        figure.add({**key, "name": plain(words), "showlegend": True, "legendrank": i})
    if step is not None:
        figure.rule(VERMILLION, x=step, width=1.2, dash="dash")
    figure.axis("y", title=plain(label_of(metric)), standoff=4)
    figure.over_steps()
    return figure.set(260, showlegend=True, legend=LEGEND, margin={"t": 26, "l": 72}, hovermode="x")
