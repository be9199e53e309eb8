"""Records -> plotly figures: pure functions, no run, no app; arrays stay float32 all the way to the browser.

Backgrounds are transparent and greys half transparent, so one figure serves dark and light. Names come from outside: they
pass ``plain`` before plotly sees them, for it reads markup in text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..data.health import ROOM, reason_of
from ..data.healthy_ranges import envelope, kinds_in, severities
from ..data.heat_rows import HeatRows
from ..data.metric_labels import label_of
from ..data.nonfinite import FINITE, INF, MADE, MISSING, NAMES, NAN, States, in_words, spans_of
from ..data.records import Floats, Heat, Ints, Mark, StepSeries
from .plot import LEGEND, NOTE_PX, Figure, Part
from .theme import (
    COLORS,
    GREY,
    HEALTH_SCALE,
    ICONS,
    INF_COLOR,
    LINES,
    MADE_COLOR,
    MISSING_COLOR,
    NAN_COLOR,
    SEVERITY_RANGE,
    SEVERITY_SCALE,
    SYMBOLS,
)

NAME_LENGTH = 34
#: Of a row of a heatmap with many rows, in pixels: its label fits.
ROW_HEIGHT = 13
#: Place and look of a colour bar.
COLOR_BAR: Part = {"thickness": 10, "outlinewidth": 0, "len": 1, "x": 1.005, "xpad": 4, "tickfont": {"size": 10}}
#: Cells of a heatmap up to which each has a tick of its own.
FEW_CELLS = 8
#: Cells up to which there is a pixel between two: in a narrow window more would be a pixel wide themselves.
MAX_GAPS = 40
#: Width of a letter of a label, in pixels: the mean of proportional type at its size, and some to spare.
_LETTER = 5.9
#: Colours of what is no number.
STATE_COLORS = {MISSING: MISSING_COLOR, INF: INF_COLOR, MADE: MADE_COLOR, NAN: NAN_COLOR}
#: Stretches of one line that are shaded and get words of their own; the others are counted.
MAX_STRETCHES = 4
#: Lines of a hover box; the others are counted.
MAX_LINES = 8
#: What lies on the other side of healthy: no loss of precision, but not what was meant either.
_BEYOND = {"sqnr_db": "not FP8", "headroom": "range unused", "scale_log2_ratio": "scale too large"}


def plain(text: str) -> str:
    """Return text that plotly shows as it is: its labels know a little HTML and ``%{}``."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "%&#123;")


def shorten(name: str, length: int = NAME_LENGTH) -> str:
    """Return the end of a long name, which is where module names differ."""
    return name if len(name) <= length else "…" + name[-length + 1 :]


def empty(message: str, height: int = 220) -> Figure:
    """Return a figure that says why it is empty."""
    figure = Figure()
    for letter in "xy":
        figure.axis(letter, visible=False)
    figure.note(plain(message), x=0.5, y=0.5)
    return figure.set(height)


def training(
    series: Sequence[StepSeries],
    marks: Sequence[Mark] = (),
    lost_at: int | None = None,
    events: Sequence[tuple[int, str]] = (),
) -> Figure:
    """Return loss (and what else of a training step was recorded) over steps, with a rail of findings and events above.

    Args:
        series: one subplot each, all over the same steps.
        marks: where findings begin; a dotted line runs from each through all subplots.
        lost_at: first step whose loss is NaN or infinite, where a point stands for several steps.
        events: (step, words) of what else happened.
    """
    if not series and not marks and not events:
        return empty("No loss was recorded. Pass it on: watch.step(loss=loss, grad_norm=..., lr=...)")
    # 96 px hold the longest title of an axis, "gradient norm", and room to the next.
    heights = [3.0 if s.name == "loss" else 1.5 for s in series] or [1.0]
    has_rail = bool(marks or events)
    rows = ([0.55] if has_rail else []) + heights
    figure = Figure(len(rows), heights=rows, gap=0.025)
    first = 1 if has_rail else 0
    for i, trace in enumerate(series, first):
        is_loss = trace.name == "loss"
        line(
            figure, trace, LINES[0], i, width=1.6 if is_loss else 1.2, what=f"{trace.name} is", since=lost_at if is_loss else None
        )
        ticks = _doublings(trace) if trace.name == "loss_scale" else {"nticks": 6 if i == first else 3}
        figure.axis("y", i, title=label_of(trace.name), standoff=4, **ticks)
    if has_rail:
        if marks:
            figure.add(_rail(marks))
        if events:
            figure.add(_events(events))
        figure.axis("y", visible=False, range=[-1, 1], fixedrange=True)
        figure.axis("x", showgrid=False, showline=False, ticks="")
        for mark in marks:
            style = {"color": COLORS[mark.severity], "width": 1, "dash": "dot"}
            ends = {"x0": mark.step, "x1": mark.step, "y0": 0, "y1": 1, "yref": "paper"}
            figure.shape({"type": "line", **ends, "layer": "below", "line": style})
    figure.over_steps(len(rows) - 1, standoff=4)
    return figure.set(int(70 + 64 * sum(rows)), hovermode="x" if series else "closest")


def _doublings(trace: StepSeries) -> Part:
    """Return a logarithmic axis of what doubles and halves, with up to five powers of two on it."""
    known = trace.values[np.isfinite(trace.values) & (trace.values > 0)]
    if not len(known):
        return {"nticks": 3}
    low, high = int(np.floor(np.log2(known.min()))), int(np.ceil(np.log2(known.max())))
    powers = range(low, high + 1, max(1, -(-(high - low) // 4)))
    return {"type": "log", "tickvals": [2.0**k for k in powers], "ticktext": [f"2<sup>{k}</sup>" for k in powers]}


def _events(events: Sequence[tuple[int, str]]) -> Part:
    """Return small open marks below the findings, those of one step together."""
    by_step: dict[int, list[str]] = {}
    for step, words in events:
        by_step.setdefault(step, []).append(words)
    return {
        "type": "scatter",
        "x": np.array(list(by_step), dtype=np.int32),
        "y": np.full(len(by_step), -0.85, dtype=np.float32),
        "mode": "markers",
        "customdata": [_in_box(found) for found in by_step.values()],
        "hovertemplate": "step %{x}<br>%{customdata}<extra></extra>",
        "marker": {"size": 7, "symbol": "diamond-open", "color": GREY},
        "cliponaxis": False,
        "name": "events",
    }


def _in_box(lines: Sequence[str]) -> str:
    """Return the lines of a hover box: those that it has room for, and how many more there are."""
    more = [f"and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
    return "<br>".join([*map(plain, lines[:MAX_LINES]), *more])


def _rail(marks: Sequence[Mark]) -> Part:
    labels = [" ".join(mark.codes[:3]) + (f" +{len(mark.codes) - 3}" if len(mark.codes) > 3 else "") for mark in marks]
    return {
        "type": "scatter",
        "x": np.array([mark.step for mark in marks], dtype=np.int32),
        "y": np.zeros(len(marks), dtype=np.float32),
        "mode": "markers+text",
        "text": labels,
        "textposition": "middle right",
        "customdata": [_in_box(mark.lines) for mark in marks],
        "hovertemplate": "step %{x}<br>%{customdata}<extra></extra>",
        "marker": {
            "size": 10,
            "symbol": [SYMBOLS[mark.severity] for mark in marks],
            "color": [COLORS[mark.severity] for mark in marks],
        },
        "cliponaxis": False,
        "name": "findings",
    }


def line(
    figure: Figure,
    trace: StepSeries,
    color: str,
    i: int = 0,
    *,
    width: float = 1.5,
    legend: str | None = None,
    in_legend: bool = False,
    rank: int = 1000,
    what: str = "",
    since: int | None = None,
) -> None:
    """Add a line, its band of smallest to largest value behind it, and points where a line alone would be invisible.

    Where its values are NaN or infinite it has a gap, which is marked: nobody sees what is not drawn.

    Args:
        figure: to add it to.
        trace: the line.
        color: its colour.
        i: number of the subplot.
        width: of the line, in pixels.
        legend: name of its group in the legend.
        in_legend: it stands in the legend.
        rank: place in the legend.
        what: begins the words about a gap.
        since: step at which the first gap begins, where it is known better than by the line's points.
    """
    grouped = {"legendgroup": legend} if legend else {}
    if trace.low is not None and trace.high is not None:
        band = np.concatenate([trace.high, trace.low[::-1]])
        steps = np.concatenate([trace.steps, trace.steps[::-1]])
        known = ~np.isnan(band)
        area = {"type": "scatter", "x": steps[known], "y": band[known], "fill": "toself", "fillcolor": color, "opacity": 0.15}
        figure.add({**area, "mode": "none", "hoverinfo": "skip", "showlegend": False, **grouped}, i)
    name = plain(trace.cast_name or trace.name) + ("" if trace.actual else " (what-if)")
    style = {"color": color, "width": width, "dash": "solid" if trace.actual else "dot"}
    points = {"type": "scatter", "x": trace.steps, "y": trace.values, "line": style, "marker": {"size": 4}}
    named = {"name": plain(legend or trace.name), "showlegend": in_legend, "legendrank": rank, **grouped}
    mode = "lines+markers" if len(trace.steps) <= 40 else "lines"
    hover = "%{y:.5g} · step %{x}<br>%{meta}<extra></extra>"
    figure.add({**points, "mode": mode, **named, "meta": name, "hovertemplate": hover}, i)
    if trace.states is not None:
        mark_gaps(figure, trace.steps, trace.states, i, what, since)


def mark_gaps(figure: Figure, steps: Ints, states: States, i: int = 0, what: str = "", since: int | None = None) -> None:
    """Shade the steps at which a line's values are NaN or infinite, and say which these are; the same of several lines once.

    Args:
        figure: to draw in.
        steps: of the line's points.
        states: of ``nonfinite``, one for each point.
        i: number of the subplot.
        what: begins the words.
        since: step at which the first stretch begins, where it is known better.
    """
    n = str(i + 1) if i else ""
    spans = list(spans_of(steps, states))
    rest = len(spans) - MAX_STRETCHES
    for k, (first, last, state) in enumerate(spans[:MAX_STRETCHES]):
        begin = first if k or since is None else since
        words = f"{what} {in_words(begin, last, state)}".strip()
        words += f", and {rest} times more up to step {spans[-1][0]:,}" if rest > 0 and k == MAX_STRETCHES - 1 else ""
        if (i, words) in figure.told:
            continue
        row = sum(1 for at, _ in figure.told if at == i)
        figure.told.add((i, words))
        color = STATE_COLORS[state]
        end = int(steps[-1]) if last is None else last
        across = {"xref": f"x{n}", "yref": f"y{n} domain", "y0": 0, "y1": 1}
        figure.shape(
            {"type": "rect", "x0": begin, "x1": end, **across, "fillcolor": color, "opacity": 0.14, "line": {"width": 0}}
        )
        figure.rule(color, i, x=begin, width=1.4)
        figure.gap_note(words, i, x=begin, yshift=-NOTE_PX * row)


def heatmap(heat: Heat, view: str = "", rows: HeatRows | None = None) -> Figure:
    """Return modules (execution order, from the top) by steps; colour is severity where NUMERICS.md says what is healthy.

    The axes keep what the reader zoomed to as long as ``view`` is the same.

    A metric without an envelope is coloured between its 2nd and 98th percentile, so that one outlier hides nothing.

    Args:
        heat: what is drawn, each of its rows with a label.
        view: of what the zoom is kept.
        rows: what the rows of ``heat`` stand for, where they are more than modules.
    """
    states = heat.states if heat.states is not None else np.where(np.isnan(heat.values), MISSING, FINITE).astype(np.int8)
    if not heat.modules or (states == MISSING).all():
        return empty(f"{label_of(heat.metric)} was not recorded for this choice", 300)
    names = [plain(name) for name in heat.modules]
    colors = severities(heat.metric, heat.values, heat.kinds)
    unit = "" if heat.unit == "1" or heat.unit.startswith("x") else f" {heat.unit}"  # x: the tensor's own
    shown: Part
    hover = f"{heat.metric} %{{customdata:.5g}}{unit}"
    if heat.reasons is not None:
        shown = {"z": heat.values, "zmin": 0, "zmax": SEVERITY_RANGE[1], "colorscale": HEALTH_SCALE}
        shown |= {"colorbar": {"tickvals": [0, 1, 2, 3], "ticktext": ["healthy", "warn", "act", "lost"]}}
        hover = "severity %{customdata:.2f} of 3"
    elif colors is None:
        shown = {"colorscale": "Cividis", **_robust(heat.values)}
    else:
        ends = {"zmin": SEVERITY_RANGE[0], "zmax": SEVERITY_RANGE[1], "colorscale": SEVERITY_SCALE}
        shown = {"z": colors, **ends, "colorbar": severity_ticks(heat.metric, heat.kinds[~np.isnan(heat.values)])}
    texts = _cell_texts(heat, rows, states)
    if texts:
        hover += "<br>%{text}"
    cells = {
        "type": "heatmap",
        "x": heat.steps,
        "y": names,
        "customdata": heat.values,
        **texts,
        "hovertemplate": f"<b>%{{y}}</b><br>step %{{x}}<br>{hover}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1 if len(heat.steps) <= MAX_GAPS else 0,
        "ygap": 1 if len(names) <= 120 else 0,
        **shown,
        "colorbar": {**COLOR_BAR, **shown.get("colorbar", {})},
    }
    figure = Figure()
    figure.add(cells)
    has_legend = _heat_states(figure, heat, states, cells)
    _heat_marks(figure, heat)
    top = 30 if has_legend else 8
    height = int(max(240, 66 + top + len(names) * (18 if len(names) <= 60 else ROW_HEIGHT)))
    sizes = [len(of) for of in rows.members] if rows is not None else [1] * len(names)
    labels = [shorten(name) + (f" ({n})" if n > 1 else "") for name, n in zip(heat.modules, sizes, strict=True)]
    # Few cells are wide: ticks between their steps would name steps that are none, below 0 even.
    ticks = {"tickvals": heat.steps.tolist()} if len(heat.steps) <= FEW_CELLS else {}
    figure.over_steps(standoff=4, showgrid=False, uirevision=view, **ticks)
    figure.axis(
        "y",
        autorange="reversed",
        showgrid=False,
        tickmode="array",
        tickvals=list(range(len(names))),
        ticktext=[plain(label) for label in labels],
        tickfont={"size": 11 if len(names) <= 60 else 10},
        uirevision=view,
    )
    right = max((len(text) for text in cells["colorbar"].get("ticktext", ())), default=7)
    margin = {"l": 14 + _LETTER * max(map(len, labels)), "r": 42 + _LETTER * right, "t": top, "b": 38}
    folds = list(map(plain, rows.folds)) if rows is not None else []  # the browser opens a fold that is clicked
    return figure.set(
        height,
        margin=margin,
        meta={**figure.layout["meta"], "folds": folds},
        showlegend=has_legend,
        legend={**LEGEND, "itemclick": False, "itemdoubleclick": False},
    )


def _cell_texts(heat: Heat, rows: HeatRows | None, states: States) -> Part:
    """Return what the box of each cell adds: the module of a fold that is shown, and metric and site of a severity.

    Each text goes to the browser once, in ``meta.words``; ``text`` has its place there for each cell, ``[rows, cells]``, and
    assets/fp8debug.js puts the one for the other. Healthy cells of a module have none. Empty where no cell has any.
    """
    folds = np.array([len(of) > 1 for of in rows.members] if rows is not None else [False] * len(heat.modules), np.bool_)
    if heat.reasons is None and not folds.any():
        return {}
    modules = np.zeros(states.shape, np.int64)
    if rows is not None:
        modules = np.where(folds[:, None] & (states != MISSING), rows.worst.astype(np.int64) + 1, 0)
    reasons, room = np.zeros(states.shape, np.int64), ROOM * ROOM + 1
    if heat.reasons is not None:
        reasons = np.where((states == FINITE) & (heat.values > 0), heat.reasons % (ROOM * ROOM) + 1, 0)
    found, places = np.unique(np.append(modules * room + reasons, 0), return_inverse=True)
    words = []
    for code in found.tolist():
        module, reason = divmod(code, room)
        named = [plain(rows.names[module - 1])] if module and rows is not None else []
        words.append(": ".join([*named, *([str(reason_of(reason - 1, heat.sites))] if reason else [])]))
    kind = np.min_scalar_type(max(len(words) - 1, 1 << 8))  # uint16 or uint32
    return {"text": places[:-1].reshape(states.shape).astype(kind), "meta": {"words": words}}


def _heat_states(figure: Figure, heat: Heat, states: States, cells: Part) -> bool:
    """Add the cells that are NaN, infinite or not recorded, each kind in its own colour, and a legend; tell if there are any."""
    shared: Part = {key: cells[key] for key in ("type", "x", "y", "xgap", "ygap", "hoverongaps", "text", "meta") if key in cells}
    found = [state for state in STATE_COLORS if (states == state).any()]
    for state in found:
        color, z = STATE_COLORS[state], np.where(states == state, np.float32(1), np.float32(np.nan))
        look = {"colorscale": [[0, color], [1, color]], "zmin": 0, "zmax": 1, "showscale": False}
        text = "<br>%{text}" if "text" in cells and state != MISSING else ""
        hover = f"<b>%{{y}}</b><br>step %{{x}}<br>{heat.metric}: {NAMES[state]}{text}<extra></extra>"
        figure.add({**shared, "z": z, **look, "hovertemplate": hover, "name": NAMES[state]})
        marker = {"symbol": "square", "size": 10, "color": color}
        key = {"type": "scatter", "x": [None], "y": [None], "mode": "markers", "marker": marker, "hoverinfo": "skip"}
        figure.add({**key, "name": NAMES[state], "showlegend": True})
    return bool(found)


def _robust(values: Floats) -> Part:
    """Return z and its range from the 2nd to the 98th percentile, as log2 where values span many binades."""
    finite = values[np.isfinite(values)]
    low, high = (float(v) for v in np.percentile(finite, [2, 98])) if len(finite) else (0.0, 1.0)
    if len(finite) and finite.min() > 0 and high > 32 * low:
        low, high, values = float(np.log2(low)), float(np.log2(high)), np.log2(values)
        ticks = np.unique(np.linspace(np.ceil(low), np.floor(high), 7).round())
        words = {"tickvals": ticks.tolist(), "ticktext": [f"2^{int(t)}" for t in ticks]}
        return {"z": values, "zmin": low, "zmax": high, "colorbar": words}
    return {"z": values, "zmin": low, "zmax": high if high > low else low + 1}


def severity_ticks(metric: str, kinds: Ints) -> Part:
    """Return the colour bar's words, with the thresholds where one envelope serves all cells of these kinds."""
    one = kinds_in(kinds)
    found = envelope(metric, one[0]) if len(one) == 1 else None
    words = {-2: _BEYOND.get(metric, "beyond"), 0: "healthy", 1: "warn", 2: "act", 3: "lost"}
    if found is not None and not any(s < 0 for s in found.severities):
        del words[-2]
    labels = []
    for severity, word in words.items():
        values = found.at(severity) if found is not None and severity in (1, 2) else []
        labels.append(word + (" " + " / ".join(f"{v:.4g}" for v in values) if values else ""))
    return {"tickvals": list(words), "ticktext": labels}


def _heat_marks(figure: Figure, heat: Heat) -> None:
    marks = [mark for mark in heat.marks if mark.module in heat.modules]
    if not marks or not len(heat.steps):
        return
    look = {"size": 9, "color": "#ffffff", "line": {"width": 1.5, "color": "#111111"}}
    figure.add(
        {
            "type": "scatter",
            "x": np.array([mark.step for mark in marks], dtype=np.int32),
            "y": [plain(mark.module or "") for mark in marks],
            "mode": "markers",
            "showlegend": False,
            "customdata": [_in_box(mark.lines) for mark in marks],
            "hovertemplate": "%{customdata}<extra></extra>",
            "marker": {**look, "symbol": [SYMBOLS[mark.severity] for mark in marks]},
        }
    )


def mark_label(severity: str, code: str, module: str | None, message: str) -> str:
    """Return one line of hover text for a finding."""
    return f"{ICONS[severity]} {code} {module or 'whole run'}: {shorten(message, 110) if len(message) > 110 else message}"
