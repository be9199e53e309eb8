"""The plots of one module: nine sites over steps, scales and headroom of every cast, exponents under a cast's range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8debug.formats import FORMATS

from ..data.healthy_ranges import envelope, kind_of
from ..data.metric_labels import label_of
from ..data.nonfinite import NAMES
from ..data.records import CastRange, ExponentHistogram, StepSeries
from ..data.row_kinds import site_bits
from .base import empty, line
from .plot import LEGEND, Figure, Part
from .theme import GREY, LINES, ORANGE, VERMILLION, line_color

#: The three by three sites of a Linear as they are laid out: one row per GEMM, operands then result.
SITES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("fprop", "input"), ("fprop", "weight"), ("fprop", "output")),
    (("dgrad", "grad_output"), ("dgrad", "weight"), ("dgrad", "grad_input")),
    (("wgrad", "grad_output"), ("wgrad", "input"), ("wgrad", "grad_weight")),
)

#: A result this close to the exact GEMM has no accumulation error to speak of: BF16 rounding leaves 55 dB.
PERFECT_DB = 70


def sites(traces: Sequence[StepSeries], metric: str, selected: tuple[str, str], step: int | None = None) -> Figure:
    """Return the nine sites of one module, one small plot each: the running cast solid, what-ifs dotted.

    Where a healthy range is known the axis reaches at least to the warn threshold, so that noise looks like noise.
    """
    if not any(map(_shows, traces)):
        return empty(f"{label_of(metric)} was not recorded for this module", 300)
    flat = [site for row in SITES for site in row]
    figure = Figure(3, 3, gap=0.085, between=0.04)
    groups = sorted({_group(trace) for trace in traces}, key=_group_order)
    colors = {group: line_color(i) for i, group in enumerate(groups)}
    shown: set[str] = set()
    for i, site in enumerate(flat):
        title = f"{site[0]} · {site[1]}"
        title = f"<b>▸ {title}</b>" if site == selected else title
        here = [t for t in traces if (t.gemm, t.tensor) == site and _shows(t)]
        for trace in sorted(here, key=lambda t: t.actual):
            group = _group(trace)
            width = 1.6 if trace.actual else 1.2
            legend: dict[str, Any] = {"legend": group, "in_legend": group not in shown, "rank": groups.index(group)}
            line(figure, trace, colors[group], i, width=width, **legend)
            shown.add(group)
        scaled = _without_perfect(here, metric)
        if len(scaled) < len(here):
            title += f" · against exact above {PERFECT_DB} dB, off the scale"
        figure.note(title, i, x=0.5, y=1, yanchor="bottom", yshift=-2)
        if here:
            _thresholds(figure, scaled, metric, i)
            if step is not None:
                figure.rule(GREY, i, x=step, dash="dash")
        else:
            figure.note("not recorded", i, size=10, x=0.5, y=0.5)
            for letter in "xy":  # where a whole column is empty plotly draws its axes' lines at NaN
                figure.axis(letter, i, visible=False)
    for i in range(6, 9):
        figure.over_steps(i, cursor=step)
    legend = {**LEGEND, "y": 1.055}
    return figure.set(480, showlegend=True, legend=legend, margin={"l": 44, "t": 42})


def _shows(trace: StepSeries) -> bool:
    """Return whether a line has anything to draw: values, or a gap that is NaN or infinite."""
    return bool(np.isfinite(trace.values).any() or (trace.states is not None and trace.states.any()))


def _thresholds(figure: Figure, traces: Sequence[StepSeries], metric: str, i: int) -> None:
    """Set the range of the i-th axis such that the nearest warn threshold is in it; draw the thresholds that are."""
    main = next((t for t in traces if t.actual and t.reference != "exact"), traces[0])
    site = main.gemm, main.tensor, main.cast_name
    found = envelope(metric, kind_of(*site, main.reference) + site_bits(metric, *site))
    values = np.concatenate([part[np.isfinite(part)] for t in traces for part in (t.values, t.low, t.high) if part is not None])
    if found is None or not len(values):
        return
    low, high = float(values.min()), float(values.max())
    warn, act = found.at(1), found.at(2)
    below, above = [v for v in warn if v < high], [v for v in warn if v > low]
    low, high = min(low, *below[-1:], low), max(high, *above[:1], high)
    pad = 0.06 * (high - low) or 0.5
    figure.axis("y", i, range=[low - pad, high + pad])
    for limits, color in ((warn, ORANGE), (act, VERMILLION)):
        for value in limits:
            if low - pad <= value <= high + pad:
                figure.rule(color, i, y=value, dash="dash")


def _without_perfect(traces: Sequence[StepSeries], metric: str) -> list[StepSeries]:
    """Leave out results that equal the exact GEMM: at 140 dB they would flatten all others."""
    if metric != "sqnr_db":
        return list(traces)
    kept = [t for t in traces if t.reference != "exact" or not np.nanmin(t.values, initial=np.inf) > PERFECT_DB]
    return kept or list(traces)


def _group(trace: StepSeries) -> str:
    if trace.reference in ("shadow", "exact"):
        return {"shadow": "result against shadow (quantization)", "exact": "result against exact (accumulation)"}[trace.reference]
    return "running cast" if trace.actual else trace.cast_name


def _group_order(group: str) -> tuple[int, str]:
    order = ("running cast", "result against shadow (quantization)", "result against exact (accumulation)")
    return (order.index(group) if group in order else len(order), group)


def scales(scale: Sequence[StepSeries], headroom: Sequence[StepSeries], step: int | None = None) -> Figure:
    """Return log2 scale_inv of each cast over steps, and below it the headroom: above 1 the cast clips.

    Delayed against current scaling is the gap between two lines; steps at which a cast clips are marked.
    """
    if not any(map(_shows, (*scale, *headroom))):
        return empty("No scale_inv was recorded at this site: it is a GEMM's result, or runs in BF16", 110)
    figure = Figure(2, heights=[0.55, 0.45], gap=0.05)
    names = list(dict.fromkeys(t.cast_name for t in (*scale, *headroom)))
    colors = {name: line_color(i) for i, name in enumerate(names)}
    for trace in sorted(scale, key=lambda t: t.actual):
        legend: dict[str, Any] = {"legend": trace.name, "in_legend": True, "rank": names.index(trace.cast_name)}
        line(figure, trace, colors[trace.cast_name], **legend)
    for trace in sorted(headroom, key=lambda t: t.actual):
        line(figure, trace, colors[trace.cast_name], 1, legend=trace.name)
        clips = trace.values > 1 + 2.0**-20
        if clips.any():
            figure.add(_clipping(trace, clips), 1)
    figure.rule(VERMILLION, 1, y=1, dash="dash")
    if step is not None:
        figure.rule(GREY, x=step, dash="dash")
    figure.axis("y", title="log2 scale_inv", standoff=8)
    figure.axis("y", 1, title="headroom", standoff=8, **_powers_of_two(headroom))
    figure.over_steps(1, cursor=step)
    return figure.set(340, showlegend=True, legend=LEGEND, margin={"t": 46})


def _clipping(trace: StepSeries, clips: NDArray[np.bool_]) -> Part:
    return {
        "type": "scatter",
        "x": trace.steps[clips],
        "y": trace.values[clips],
        "mode": "markers",
        "marker": {"symbol": "x-thin", "size": 5, "line": {"width": 1, "color": VERMILLION}},
        "hovertemplate": "clips: headroom %{y:.4g} · step %{x}<extra></extra>",
        "showlegend": False,
    }


def _powers_of_two(traces: Sequence[StepSeries]) -> Part:
    """Return a log axis that shows all traces and 1, with ticks at powers of two."""
    values = np.concatenate([t.values[np.isfinite(t.values) & (t.values > 0)] for t in traces] or [np.ones(1, np.float32)])
    logs = np.log2(np.append(values, 1.0))
    low, high = float(np.floor(logs.min())), float(np.ceil(logs.max()))
    low, high = (low - 1, high + 1) if low == high else (low, high)
    every = max(1, round((high - low) / 4))
    ticks = [2.0**k for k in range(int(low), int(high) + 1, every)]
    two = float(np.log10(2))
    words = [f"{t:g}" if t >= 0.1 else f"2^{int(np.log2(t))}" for t in ticks]
    return {"type": "log", "range": [low * two, high * two], "tickmode": "array", "tickvals": ticks, "ticktext": words}


def histogram(hist: ExponentHistogram | None, lost: int = 0) -> Figure:
    """Return the exponents of one tensor with the range drawn in that the chosen cast can represent.

    Args:
        hist: the exponents, or None.
        lost: state of a tensor without any finite element, which has none; 0 of another.
    """
    if lost:
        return empty(f"No element is finite at this step ({NAMES[lost]}): there is no exponent to show", 110)
    if hist is None or not hist.counts.any():
        return empty("No exponent histogram was recorded at this site and step", 110)
    share = (hist.counts / hist.counts.sum()).astype(np.float32)
    exponents = hist.first_log2 + np.arange(len(share), dtype=np.int32)
    filled = np.flatnonzero(hist.counts)
    left, right = float(exponents[filled[0]]) - 1, float(exponents[filled[-1]]) + 2
    figure = Figure()
    figure.add(
        {
            "type": "bar",
            "x": exponents[filled].astype(np.float32) + 0.5,
            "y": share[filled],
            "width": 0.92,
            "customdata": exponents[filled],
            "marker": {"color": LINES[0]},
            "hovertemplate": "2^%{customdata} to twice that: %{y:.3%}<extra></extra>",
        }
    )
    if hist.cast is not None:
        low, high = _draw_range(figure, hist.cast)
        left, right = min(left, low - 1), max(right, high + 1)
    figure.axis("x", title=f"log2 of magnitude at step {hist.step}", range=[left, right])
    floor = float(np.log10(share[filled].min())) - 0.4
    powers: Part = {"type": "log", "range": [floor, 0.1], "dtick": 1, "tickfont": {"size": 10}}
    figure.axis("y", title="share of nonzeros", standoff=4, **powers)
    return figure.set(340, bargap=0, margin={"t": 40})


def _draw_range(figure: Figure, cast: CastRange) -> tuple[float, float]:
    """Shade normals and subnormals at the mean scale, with a line at both ends of what blocks differ by."""
    fmt = FORMATS[cast.format]
    lowest, mean, highest = cast.scale_inv_log2
    zero, normal, top = (float(np.log2(v)) for v in (fmt.min_subnormal / 2, fmt.min_normal, fmt.max))
    words: list[tuple[float, str, str]] = []
    whole = {"yref": "paper", "y0": 0, "y1": 1}
    for a, b, color, text in (
        (zero, normal, "rgba(230,159,0,0.16)", "subnormal"),
        (normal, top, "rgba(0,158,115,0.13)", "normal"),
    ):
        style = {"fillcolor": color, "line": {"width": 0}, "layer": "below"}
        figure.shape({"type": "rect", "x0": mean + a, "x1": mean + b, **whole, **style})
        words.append((mean + (a + b) / 2, text, "center"))
    for edge, text, anchor in ((zero, "0 ←", "right"), (top, "→ clips", "left")):
        for at in {lowest, mean, highest}:
            ends = {"x0": at + edge, "x1": at + edge, **whole}
            width, dash = (1.2, "solid") if at == mean else (0.8, "dot")
            figure.shape({"type": "line", **ends, "line": {"color": VERMILLION, "width": width, "dash": dash}})
        words.append((mean + edge, text, anchor))
    for x, text, anchor in words:
        figure.note(text, size=10, x=x, xref="x", xanchor=anchor, y=1, yanchor="bottom")
    return lowest + zero, highest + top
