"""Records -> plotly figures: pure functions, no run, no app; arrays stay float32 all the way to the browser.

Backgrounds are transparent and greys half transparent, so one figure serves dark and light. Names come from outside: they
pass ``plain`` before plotly sees them, for it reads markup in text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
from plotly.subplots import make_subplots  # type: ignore[import-untyped]  # plotly ships no types

from .envelopes import envelope, severities
from .records import Floats, Heat, Mark, Trace
from .theme import (
    COLORS,
    FAINT,
    GREY,
    ICONS,
    LINES,
    SEVERITY_RANGE,
    SEVERITY_SCALE,
    SYMBOLS,
    VERMILLION,
)

MAX_LABELS = 48
NAME_LENGTH = 34

_AXIS = {"gridcolor": FAINT, "zeroline": False, "linecolor": FAINT, "automargin": True}
#: Layout of all figures; a template, for setting each axis of nine plots takes plotly 30 ms. It replaces plotly's own, of 7 kB.
LOOK = go.layout.Template(
    layout={
        "margin": {"l": 56, "r": 12, "t": 8, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11, "color": GREY, "family": "inherit"},
        "hoverlabel": {"font": {"size": 11}, "align": "left"},
        "hovermode": "closest",
        "showlegend": False,
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)"},
        "colorway": list(LINES),
        "xaxis": {**_AXIS, "ticks": "outside", "ticklen": 3, "tickcolor": FAINT},
        "yaxis": {**_AXIS, "ticks": "", "exponentformat": "power"},
    }
)


def plain(text: str) -> str:
    """Return text that plotly shows as it is: its labels know a little HTML and ``%{}``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "%&#123;")


def shorten(name: str, length: int = NAME_LENGTH) -> str:
    """Return the end of a long name, which is where module names differ."""
    return name if len(name) <= length else "…" + name[-length + 1 :]


def empty(message: str, height: int = 220) -> go.Figure:
    """Return a figure that says why it is empty."""
    figure = styled(go.Figure(), height)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    figure.add_annotation(text=plain(message), showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure


def styled(figure: go.Figure, height: int, **layout: object) -> go.Figure:
    """Give a figure the look of all: small grey text, faint grid, no background."""
    figure.update_layout(template=LOOK, height=height, uirevision="keep", **layout)
    return figure


def training(series: Sequence[Trace], marks: Sequence[Mark] = (), lost_at: int | None = None) -> go.Figure:
    """Return loss (and what else of a training step was recorded) over steps, with a rail of findings above.

    Args:
        series: one subplot each, all over the same steps.
        marks: where findings begin; a dotted line runs from each through all subplots.
        lost_at: first step whose loss is NaN or infinite; a line ends there, and nobody sees what is not drawn.
    """
    if not series and not marks:
        return empty("No loss was recorded. Pass it on: watch.step(loss=loss, grad_norm=..., lr=...)")
    heights = [3.0 if s.name == "loss" else 1.2 for s in series] or [1.0]
    rows = ([0.55] if marks else []) + heights
    figure = make_subplots(rows=len(rows), cols=1, shared_xaxes=True, row_heights=rows, vertical_spacing=0.025)
    first = 2 if marks else 1
    for row, trace in enumerate(series, first):
        line(figure, trace, LINES[0], row=row, col=1, width=1.6 if trace.name == "loss" else 1.2)
        figure.update_yaxes(title_text=trace.name, title_standoff=4, nticks=6 if row == first else 3, row=row, col=1)
    if marks:
        figure.add_trace(_rail(marks), row=1, col=1)
        figure.update_yaxes(visible=False, range=[-1, 1], fixedrange=True, row=1, col=1)
        for mark in marks:
            figure.add_shape(
                type="line",
                x0=mark.step,
                x1=mark.step,
                y0=0,
                y1=1,
                yref="paper",
                layer="below",
                line={"color": COLORS[mark.severity], "width": 1, "dash": "dot"},
            )
    if lost_at is not None:
        words = {"text": f"loss is NaN or infinite from step {lost_at:,}", "font": {"size": 11, "color": VERMILLION}}
        figure.add_annotation(
            **words, x=lost_at, y=0.5, yref="y2 domain" if marks else "y domain", xanchor="left", xshift=6, showarrow=False
        )
        figure.add_vline(x=lost_at, line={"color": VERMILLION, "width": 1.2}, row=first, col=1)
    figure.update_xaxes(title_text="step", title_standoff=4, row=len(rows), col=1)
    styled(figure, int(70 + 52 * sum(rows)), hovermode="x" if series else "closest")
    if marks:
        figure.update_xaxes(showgrid=False, showline=False, ticks="", row=1, col=1)
    return figure


def _rail(marks: Sequence[Mark]) -> go.Scatter:
    texts = ["<br>".join(plain(line) for line in mark.lines) for mark in marks]
    labels = [" ".join(mark.codes[:3]) + (f" +{len(mark.codes) - 3}" if len(mark.codes) > 3 else "") for mark in marks]
    return go.Scatter(
        x=np.array([mark.step for mark in marks], dtype=np.int32),
        y=np.zeros(len(marks), dtype=np.float32),
        mode="markers+text",
        text=labels,
        textposition="middle right",
        customdata=texts,
        hovertemplate="step %{x}<br>%{customdata}<extra></extra>",
        marker={
            "size": 10,
            "symbol": [SYMBOLS[mark.severity] for mark in marks],
            "color": [COLORS[mark.severity] for mark in marks],
        },
        cliponaxis=False,
        name="findings",
    )


def line(
    figure: go.Figure,
    trace: Trace,
    color: str,
    *,
    row: int,
    col: int,
    width: float = 1.5,
    legend: str | None = None,
    in_legend: bool = False,
    rank: int = 1000,
) -> None:
    """Add a line, its band of smallest to largest value behind it, and points where a line alone would be invisible."""
    if trace.low is not None and trace.high is not None:
        band = np.concatenate([trace.high, trace.low[::-1]])
        steps = np.concatenate([trace.steps, trace.steps[::-1]])
        known = ~np.isnan(band)
        figure.add_trace(
            go.Scatter(
                x=steps[known],
                y=band[known],
                fill="toself",
                fillcolor=color,
                opacity=0.15,
                mode="none",
                hoverinfo="skip",
                showlegend=False,
                legendgroup=legend,
            ),
            row=row,
            col=col,
        )
    what = plain(trace.cast_name or trace.name) + ("" if trace.actual else " (what-if)")
    figure.add_trace(
        go.Scatter(
            x=trace.steps,
            y=trace.values,
            mode="lines+markers" if len(trace.steps) <= 40 else "lines",
            marker={"size": 4},
            line={"color": color, "width": width, "dash": "solid" if trace.actual else "dot"},
            name=plain(legend or trace.name),
            legendgroup=legend,
            showlegend=in_legend,
            legendrank=rank,
            meta=what,
            hovertemplate="%{y:.5g} · step %{x}<br>%{meta}<extra></extra>",
        ),
        row=row,
        col=col,
    )


def rule_lines(i: int, color: str, *, x: float | None = None, y: float | None = None, dash: str = "dash") -> dict[str, object]:
    """Return a line through the i-th subplot, at a step or at a value, for ``layout.shapes``.

    ``add_vline`` and ``add_hline`` look through the whole figure for each of them: a second for the nine sites of a module.
    """
    n = "" if i == 0 else str(i + 1)
    along = {"x0": x, "x1": x, "xref": f"x{n}", "y0": 0, "y1": 1, "yref": f"y{n} domain"}
    across = {"x0": 0, "x1": 1, "xref": f"x{n} domain", "y0": y, "y1": y, "yref": f"y{n}"}
    style = {"type": "line", "line": {"color": color, "width": 1, "dash": dash}, "opacity": 0.7}
    return {**(across if x is None else along), **style}


def heatmap(heat: Heat, view: str = "") -> go.Figure:
    """Return modules (execution order, from the top) by steps; colour is severity where NUMERICS.md says what is healthy.

    The axes keep what the reader zoomed to as long as ``view`` is the same.

    A metric without an envelope is coloured between its 2nd and 98th percentile, so that one outlier hides nothing.
    """
    if not heat.modules or np.isnan(heat.values).all():
        return empty(f"{heat.metric} was not recorded for this choice", 300)
    names = [plain(name) for name in heat.modules]
    colors = severities(heat.metric, heat.values, heat.kinds)
    unit = "" if heat.unit == "1" else f" {heat.unit}"
    cells = go.Heatmap(
        x=heat.steps,
        y=names,
        z=heat.values if colors is None else colors,
        customdata=heat.values,
        hovertemplate=f"<b>%{{y}}</b><br>step %{{x}}<br>{heat.metric} %{{customdata:.5g}}{unit}<extra></extra>",
        hoverongaps=False,
        xgap=1 if len(heat.steps) <= 120 else 0,
        ygap=1 if len(names) <= 120 else 0,
        colorbar={"thickness": 10, "outlinewidth": 0, "len": 1, "x": 1.005, "xpad": 4, "tickfont": {"size": 10}},
    )
    if colors is None:
        cells.update(colorscale="Cividis", **_robust(heat.values))
    else:
        cells.update(zmin=SEVERITY_RANGE[0], zmax=SEVERITY_RANGE[1], colorscale=SEVERITY_SCALE)
        cells.colorbar.update(**_severity_ticks(heat))
    figure = go.Figure(cells)
    _heat_marks(figure, heat)
    height = int(min(1400, max(240, 74 + len(names) * (18 if len(names) <= 60 else 9))))
    every = -(-len(names) // MAX_LABELS) if len(names) > 80 else 1
    labelled = range(0, len(names), every)
    styled(figure, height)
    figure.update_layout(margin={"l": 8, "r": 8, "t": 8, "b": 38})
    figure.update_xaxes(title_text="step", title_standoff=4, showgrid=False, uirevision=view)
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        automargin=True,
        tickmode="array",
        tickvals=list(labelled),
        ticktext=[plain(shorten(heat.modules[i])) for i in labelled],
    )
    return figure


def _robust(values: Floats) -> dict[str, object]:
    """Return z and its range from the 2nd to the 98th percentile, as log2 where values span many binades."""
    finite = values[np.isfinite(values)]
    low, high = (float(v) for v in np.percentile(finite, [2, 98])) if len(finite) else (0.0, 1.0)
    if len(finite) and finite.min() > 0 and high > 32 * low:
        low, high, values = float(np.log2(low)), float(np.log2(high)), np.log2(values)
        ticks = np.unique(np.linspace(np.ceil(low), np.floor(high), 7).round())
        words = {"tickvals": ticks.tolist(), "ticktext": [f"2^{int(t)}" for t in ticks]}
        return {"z": values, "zmin": low, "zmax": high, "colorbar": words}
    return {"z": values, "zmin": low, "zmax": high if high > low else low + 1}


def _severity_ticks(heat: Heat) -> dict[str, object]:
    """Return the colour bar's words, with the thresholds where one envelope serves all cells."""
    kinds = np.unique(heat.kinds[~np.isnan(heat.values)])
    found = envelope(heat.metric, int(kinds[0])) if len(kinds) == 1 else None
    words = {-2: "beyond", 0: "healthy", 1: "warn", 2: "act", 3: "lost"}
    if found is not None and not any(s < 0 for s in found.severities):
        del words[-2]
    labels = []
    for severity, word in words.items():
        values = found.at(severity) if found is not None and severity in (1, 2) else []
        labels.append(word + (" " + " / ".join(f"{v:.4g}" for v in values) if values else ""))
    return {"tickvals": list(words), "ticktext": labels}


def _heat_marks(figure: go.Figure, heat: Heat) -> None:
    marks = [mark for mark in heat.marks if mark.module in heat.modules]
    if not marks or not len(heat.steps):
        return
    figure.add_trace(
        go.Scatter(
            x=np.array([mark.step for mark in marks], dtype=np.int32),
            y=[plain(mark.module or "") for mark in marks],
            mode="markers",
            customdata=["<br>".join(plain(line) for line in mark.lines) for mark in marks],
            hovertemplate="%{customdata}<extra></extra>",
            marker={
                "size": 9,
                "symbol": [SYMBOLS[mark.severity] for mark in marks],
                "color": "#ffffff",
                "line": {"width": 1.5, "color": "#111111"},
            },
        )
    )


def mark_label(severity: str, code: str, module: str | None, message: str) -> str:
    """Return one line of hover text for a finding."""
    return f"{ICONS[severity]} {code} {module or 'whole run'}: {shorten(message, 110) if len(message) > 110 else message}"
