"""Figures of a fallback budget: damage recovered against speed given back, and the losses of the trainings that proved a list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..data.records import StepSeries
from .base import empty, line
from .plot import LEGEND, Figure
from .theme import LINES, ORANGE

#: Of the curve, in pixels: the file beside it is as high.
HEIGHT = 340


@dataclass(frozen=True, kw_only=True)
class BudgetPoint:
    """One point of the curve: a budget, what its candidates cost, and the share of all damage that they take away.

    Attributes:
        budget: share of the FP8 speed-up, in [0, 1].
        cost: share of it that the candidates give back.
        recovered: share of the recorded damage; None where candidates cure what no record measures, such as another cast's error.
        count: number of candidates.
    """

    budget: float
    cost: float
    recovered: float | None
    count: int


def pareto(choices: Sequence[BudgetPoint], chosen: BudgetPoint | None) -> Figure:
    """Return the curve of damage recovered over speed given back, with the chosen budget on it."""
    known = [choice for choice in choices if choice.recovered is not None]
    if not any(choice.recovered for choice in known):
        return empty("No damage was recorded, so nothing tells what a budget buys: record with shadow_rows above 0", 200)
    cost = np.array([100 * choice.cost for choice in known], dtype=np.float32)
    figure = Figure()
    figure.add(
        {
            "type": "scatter",
            "x": cost,
            "y": np.array([100 * (choice.recovered or 0) for choice in known], dtype=np.float32),
            "mode": "lines+markers",
            "line": {"color": LINES[0], "width": 1.6},
            "marker": {"size": 5},
            "customdata": np.array([[choice.count, round(100 * choice.budget)] for choice in known], dtype=np.int32),
            "hovertemplate": "budget %{customdata[1]}%: %{customdata[0]} candidates<br>gives back %{x:.3g}% of the speed-up,"
            " recovers %{y:.3g}% of the damage<extra></extra>",
        }
    )
    if chosen is not None and chosen.recovered is None:
        figure.rule(ORANGE, x=100 * chosen.cost, width=1.6, dash="dash")
        words = "chosen: what it recovers was not recorded; fp8debug verify measures it"
        figure.note(words, 0, xref="x", x=100 * chosen.cost, xanchor="left", xshift=6, y=0.97)
    elif chosen is not None:
        figure.add(
            {
                "type": "scatter",
                "x": np.array([100 * chosen.cost], dtype=np.float32),
                "y": np.array([100 * (chosen.recovered or 0)], dtype=np.float32),
                "mode": "markers+text",
                "text": ["chosen"],
                "textposition": "bottom right",
                "marker": {"size": 12, "symbol": "diamond", "color": ORANGE},
                "hoverinfo": "skip",
            }
        )
    figure.axis("x", title="speed-up given back, %", range=[-3, 4 + float(cost.max())])
    # Words above the curve have two lines where the plot is narrow.
    top = 108 if chosen is None or chosen.recovered is not None else 132
    figure.axis("y", title="damage recovered, %", standoff=4, range=[-14, top], tickvals=list(range(0, 101, 20)))
    return figure.set(HEIGHT)


def trials(document: Mapping[str, Any]) -> Figure:
    """Return the loss of every arm that ``fp8debug verify`` trained, the mean of its repeats that got to a step."""
    figure = Figure()
    arms = [arm for arm in document.get("arms") or () if isinstance(arm, Mapping)]
    for i, arm in enumerate(arms):
        curves = [curve for curve in arm.get("losses") or () if isinstance(curve, Sequence) and curve]
        if not curves:
            continue
        longest = max(len(curve) for curve in curves)
        there = np.array([[i < len(curve) for i in range(longest)] for curve in curves])
        padded = [[*(np.nan if v is None else float(v) for v in curve), *[0.0] * (longest - len(curve))] for curve in curves]
        values = np.array(padded, dtype=np.float32)
        first = arm.get("first_step")
        steps = (int(first) if isinstance(first, int) else 0) + np.arange(longest, dtype=np.int32)
        many = len(curves) > 1
        mean = StepSeries(
            name=str(arm.get("name")),
            steps=steps,
            values=values.mean(axis=0, where=there),
            low=values.min(axis=0, where=there, initial=np.inf) if many else None,
            high=values.max(axis=0, where=there, initial=-np.inf) if many else None,
        )
        line(figure, mean, LINES[i % len(LINES)], legend=mean.name, in_legend=True, rank=i)
    if not figure.data:
        return empty("verify.json holds no losses yet", 160)
    figure.axis("y", title="loss", standoff=4)
    figure.over_steps()
    return figure.set(260, showlegend=True, legend=LEGEND, margin={"t": 26}, hovermode="x")
