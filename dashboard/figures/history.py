"""Exponents over time under a cast's range, the error of a result split in two, and the tiles of a dumped operand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fp8debug.formats import FORMATS

from ..data.healthy_ranges import envelope, kind_of
from ..data.nonfinite import NAMES, in_words
from ..data.records import BlockMap, History, StepSeries
from .base import COLOR_BAR, STATE_COLORS, empty, line, plain, severity_ticks
from .plot import LEGEND, Figure, Part
from .theme import GREY, LINES, ORANGE, SEVERITY_RANGE, SEVERITY_SCALE, VERMILLION

#: Tiles of a dumped operand along one side up to which each has a tick of its own.
MAX_TILE_TICKS = 12


def exponents(found: History | None, step: int | None = None, lost: int = 0) -> Figure:
    """Return the share of each exponent by step, with the ends of what the cast can represent.

    Args:
        found: the exponents, or None.
        step: to mark.
        lost: state of a tensor that has none at any step, as no element is finite; 0 of another.
    """
    if found is None and lost:
        return empty(f"No element is finite at any step ({NAMES[lost]}): there is no exponent to show", 110)
    if found is None or not found.shares.any():
        return empty("No exponent histogram was recorded at this site", 110)
    filled = np.flatnonzero(found.shares.any(axis=1))
    low, high = int(filled[0]), int(filled[-1]) + 1
    steps, shares, scale_inv_log2 = found.with_gaps()  # or the axis ends where the finite elements do
    shares = shares[low:high]
    with np.errstate(divide="ignore"):
        shown = np.where(shares > 0, np.log10(shares), np.float32(np.nan)).astype(np.float32)
    bins = (found.first_log2 + np.arange(low, high)).astype(np.float32) + np.float32(0.5)
    figure = Figure()
    figure.add(
        {
            "type": "heatmap",
            "x": steps,
            "y": bins,
            "z": shown,
            "zmin": -7,
            "zmax": 0,
            "customdata": shares,
            "colorscale": "Cividis",
            "hovertemplate": "2^%{y:.0f} · step %{x}: %{customdata:.3%}<extra></extra>",
            "hoverongaps": False,
            "colorbar": {**COLOR_BAR, "tickvals": [-6, -4, -2, 0], "ticktext": ["1e-6", "1e-4", "1%", "all"]},
        }
    )
    if found.format:
        fmt = FORMATS[found.format]
        ends = (
            (fmt.max, "clips above", VERMILLION),
            (fmt.min_normal, "subnormal below", ORANGE),
            (fmt.min_subnormal / 2, "0 below", VERMILLION),
        )
        for value, text, color in ends:
            figure.add(
                {
                    "type": "scatter",
                    "x": steps,
                    "y": (scale_inv_log2 + np.float32(np.log2(value))).astype(np.float32),
                    "mode": "lines",
                    "line": {"color": color, "width": 1.6, "dash": "dot" if color == ORANGE else "solid"},
                    "name": text,
                    "hovertemplate": f"{text} 2^%{{y:.2f}} · step %{{x}}<extra></extra>",
                }
            )
    if step is not None:
        figure.rule(GREY, x=step, dash="dash")
    for first, last, state in found.lost:
        end = int(steps[-1]) if last is None else last
        figure.rule(STATE_COLORS[state], x=first, width=1.4)
        span = {"x0": first, "x1": max(first, end), "y0": 0, "y1": 1, "yref": "y domain"}
        figure.shape({"type": "rect", **span, "fillcolor": STATE_COLORS[state], "opacity": 0.2, "line": {"width": 0}})
        place: Part = {"xanchor": "left", "yanchor": "top", "xshift": 4}
        figure.note(f"no finite element: {in_words(first, last, state)}", x=first, xref="x", y=0.97, **place)
    figure.over_steps(cursor=step, showgrid=False)
    figure.axis("y", title="log2 of magnitude", standoff=4, showgrid=False)
    return figure.set(320, margin={"r": 54})


def error_split(traces: Sequence[StepSeries], step: int | None = None) -> Figure:
    """Return SQNR of a result against the exact and the shadow GEMM: what accumulation costs, and what quantization does."""
    words = {"shadow": "quantization: exact against shadow", "exact": "accumulation: actual against exact"}
    own = [t for t in traces if t.reference in words and (np.isfinite(t.values).any() or t.states is not None)]
    if not own:
        return empty("The error of this GEMM's result was not recorded: it needs shadow_rows above 0", 110)
    figure = Figure()
    colors = {"shadow": LINES[1], "exact": LINES[2]}  # those of both in the nine sites
    for i, trace in enumerate(sorted(own, key=lambda t: t.reference, reverse=True)):
        color = colors[trace.reference]
        line(figure, trace, color, legend=words[trace.reference], in_legend=True, rank=i)
        found = envelope("sqnr_db", kind_of(trace.gemm, trace.tensor, trace.cast_name, trace.reference))
        for value in found.at(1) if found is not None else ():
            figure.rule(color, y=value, dash="dash")
    if step is not None:
        figure.rule(GREY, x=step, dash="dash")
    figure.over_steps(cursor=step)
    figure.axis("y", title="SQNR dB", standoff=4)
    return figure.set(320, showlegend=True, legend=LEGEND, margin={"t": 26})


def blocks(found: BlockMap | None) -> Figure:
    """Return the SQNR of the tiles of a dumped operand as a map, coloured as the heatmap is."""
    if found is None:
        return empty("not dumped", 80)
    limits = envelope("sqnr_db", 0)
    assert limits is not None
    figure = Figure()
    figure.add(
        {
            "type": "heatmap",
            "z": limits.severity(found.sqnr_db),
            "customdata": found.sqnr_db,
            "zmin": SEVERITY_RANGE[0],
            "zmax": SEVERITY_RANGE[1],
            "colorscale": SEVERITY_SCALE,
            "colorbar": {**COLOR_BAR, **severity_ticks("sqnr_db", np.zeros(1, np.int32))},
            "hovertemplate": "tile row %{y}, column %{x}: %{customdata:.4g} dB<extra></extra>",
        }
    )
    rows, columns = (f"{n} x " if n > 1 else "" for n in found.stride)
    every_row, every_column = (max(1, -(-n // MAX_TILE_TICKS)) for n in found.sqnr_db.shape)  # of whole tiles
    figure.axis("x", title=plain(f"tile of {columns}{found.tile[1]} columns"), showgrid=False, dtick=every_column)
    look = {"standoff": 4, "showgrid": False, "autorange": "reversed", "dtick": every_row}
    figure.axis("y", title=plain(f"tile of {rows}{found.tile[0]} rows"), **look)
    return figure.set(320, margin={"r": 84})
