"""The plot of the parity page: how far two paths lie apart at every module, in execution order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .base import empty, plain
from .plot import LEGEND, Figure
from .theme import GREY, LINES

#: Lines: key of a module's row -> name in the legend.
KINDS = {
    "output_nmse": "output: rollout from training",
    "weight_nmse": "weight: rollout from training",
    "error_train": "training: casts and GEMM",
    "error_rollout": "rollout: casts and GEMM",
}
#: Drawn in place of an exact zero on the logarithmic axis.
LEAST = 1e-12
HEIGHT = 300


def paths(modules: Sequence[Mapping[str, Any]], culprits: Sequence[str]) -> Figure:
    """Return one line of each kind over the modules, squares of relative differences, and a rule at each culprit."""
    places = np.arange(len(modules), dtype=np.int32)
    names = [plain(str(one["module"])) for one in modules]
    figure = Figure()
    drawn = 0
    for number, (key, name) in enumerate(KINDS.items()):
        values = np.array([np.nan if one.get(key) is None else max(float(one[key]), LEAST) for one in modules], np.float32)
        if not np.isfinite(values).any():
            continue
        drawn += 1
        style = {"color": LINES[number % len(LINES)], "width": 1.5}
        figure.add(
            {
                "type": "scatter",
                "x": places,
                "y": values,
                "text": names,
                "line": style,
                "marker": {"size": 4},
                "mode": "lines+markers",
                "name": name,
                "showlegend": True,
                "hovertemplate": "%{text}<br>%{y:.3g}<extra></extra>",
            }
        )
    if not drawn:
        return empty("no module of both paths was recorded", HEIGHT)
    for place, one in enumerate(modules):
        if any(one["module"] == name or str(one["module"]).startswith(f"{name}.") for name in culprits):
            figure.rule(GREY, x=place, dash="dash")
    figure.axis("x", title="module, in execution order")
    shown = np.concatenate([trace["y"] for trace in figure.data])
    low, high = (float(np.log10(value)) for value in (np.nanmin(shown), np.nanmax(shown)))
    every = max(1, round((high - low) / 6))  # powers of ten alone: digits between them lie over each other
    figure.axis("y", title="relative difference, squared", type="log", standoff=4, dtick=every)
    return figure.set(HEIGHT, showlegend=True, legend=LEGEND, margin={"t": 26})
