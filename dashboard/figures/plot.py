"""A plot as plotly.js reads it: traces and layout in plain dicts, with subplots laid out and arrays packed.

plotly's own classes look at every value that is set: 0.2 s for the five plots of a module, and as long again to be imported.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from .theme import FAINT, GREY, LINES

#: What a trace, an axis, a shape or an annotation is to plotly.js.
Part = dict[str, Any]

#: Margins are given, not found: to find them plotly draws a plot twice.
_AXIS: Part = {"gridcolor": FAINT, "zeroline": False, "linecolor": FAINT, "automargin": False}
#: Layout of all figures. The template replaces plotly's own, of 7 kB.
LOOK: Part = {
    "layout": {
        "margin": {"l": 56, "r": 12, "t": 8, "b": 34},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 11, "color": GREY, "family": "inherit"},
        # Given, not taken from the line or marker under the pointer: a white marker's box would be white under white words.
        "hoverlabel": {"font": {"size": 11, "color": "#ffffff"}, "bgcolor": "#24292f", "bordercolor": "#8a8f98", "align": "left"},
        "hovermode": "closest",
        "showlegend": False,
        "modebar": {"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": LINES[0]},
        "colorway": list(LINES),
        "xaxis": {**_AXIS, "ticks": "outside", "ticklen": 3, "tickcolor": FAINT},
        "yaxis": {**_AXIS, "ticks": "", "ticklabelstandoff": 4, "exponentformat": "power"},
    }
}
#: Share of a plot up to which the words about a gap stand at its right; behind it they would leave the plot. Of several columns
#: each has less room.
ROOM_FOR_WORDS, ROOM_IN_COLUMNS = 0.6, 0.5
#: Height of a line of these words in pixels, and the largest share of a subplot that is kept free for them.
NOTE_PX, MAX_NOTES = 13, 0.4
#: A legend above the plot, on its left.
LEGEND: Part = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}


class Figure:
    """A plot of one or more subplots, in rows from the top; the x axes of a column go together.

    Args:
        rows: number of rows.
        cols: number of columns.
        heights: of the rows, in proportion.
        gap: between rows, as a share of the whole height.
        between: between columns, as a share of the whole width.

    Attributes:
        data: traces.
        layout: everything else.
        cols: number of columns.
        num: number of subplots.
        told: (subplot, words) of the notes about gaps, once for all lines that have them.
    """

    def __init__(
        self, rows: int = 1, cols: int = 1, *, heights: Sequence[float] = (), gap: float = 0, between: float = 0
    ) -> None:
        self.data: list[Part] = []
        self.layout: Part = {"template": LOOK, "uirevision": "keep"}
        self.told: set[tuple[int, str]] = set()
        self.cols = cols
        self.num = rows * cols
        self._gap_notes: list[tuple[int, Part]] = []
        self._gap_lines: dict[int, int] = {}
        if self.num == 1:
            return
        shares = np.array(heights or [1] * rows, dtype=np.float64)
        shares *= (1 - gap * (rows - 1)) / shares.sum()
        tops = 1 - np.concatenate([[0], np.cumsum(shares + gap)])
        width = (1 - between * (cols - 1)) / cols
        for i in range(self.num):
            row, col = divmod(i, cols)
            n, left = _number(i), col * (width + between)
            bottom = max(0.0, float(tops[row] - shares[row]))
            self.axis("x", i, anchor=f"y{n}", domain=[left, left + width])
            self.axis("y", i, anchor=f"x{n}", domain=[bottom, float(tops[row])])
            if row:
                self.axis("x", i, matches=f"x{_number(col)}")
            if row < rows - 1:
                self.axis("x", i, showticklabels=False)

    def axis(self, letter: str, i: int = 0, *, title: str | None = None, standoff: int = 2, **values: Any) -> None:
        """Set values of the i-th subplot's axis ``x`` or ``y``."""
        if title is not None:
            values["title"] = {"text": title, "standoff": standoff}
        self.layout.setdefault(f"{letter}axis{_number(i)}", {}).update(values)

    def about(self, *words: str) -> Figure:
        """Say what it shows, run first, then site and metric: title and name of its picture (fp8debug.js adds the steps)."""
        self.layout["meta"] = {**self.layout.get("meta", {}), "about": [word for word in words if word]}
        return self

    def over_steps(self, i: int = 0, *, cursor: int | None = None, standoff: int = 2, **values: Any) -> None:
        """Have the x axes be steps, the i-th with the title: fp8debug.js marks the chosen step in them and zooms them together.

        Args:
            i: subplot whose axis has the title.
            cursor: the chosen step, where the figure marks it itself.
            standoff: of the title, in pixels.
            values: others of the axis.
        """
        self.axis("x", i, title="step", standoff=standoff, **values)
        self.layout.setdefault("meta", {}).update({"x": "step"} if cursor is None else {"x": "step", "cursor": cursor})

    def add(self, trace: Part, i: int = 0) -> None:
        """Add a trace to the i-th subplot."""
        place = {"xaxis": f"x{_number(i)}", "yaxis": f"y{_number(i)}"} if self.num > 1 else {}
        self.data.append({**trace, **place})

    def shape(self, *shapes: Part) -> None:
        """Add shapes."""
        self.layout.setdefault("shapes", []).extend(shapes)

    def rule(self, color: str, i: int | None = None, *, x: float | None = None, y: float | None = None, **line: Any) -> None:
        """Add a line through the i-th subplot, or through all of them, at a step or at a value."""
        for at in range(self.num) if i is None else (i,):
            n = _number(at)
            along = {"x0": x, "x1": x, "xref": f"x{n}", "y0": 0, "y1": 1, "yref": f"y{n} domain"}
            across = {"x0": 0, "x1": 1, "xref": f"x{n} domain", "y0": y, "y1": y, "yref": f"y{n}"}
            style = {"opacity": 0.7, "line": {"color": color, "width": 1, **line}}
            self.shape({"type": "line", **(across if x is None else along), **style})

    def note(self, text: str, i: int | None = None, *, size: int = 11, **values: Any) -> None:
        """Add words: at a place of the i-th subplot (0 to 1 both ways), or of the whole plot."""
        place: Part = {"xref": "paper", "yref": "paper"}
        for letter in "xy" if i is not None else "":
            if f"{letter}ref" not in values:  # by its place on the paper: a subplot without a line has no axes to refer to
                low, high = self.layout.get(f"{letter}axis{_number(i or 0)}", {}).get("domain", (0, 1))
                values[letter] = low + values[letter] * (high - low)
        look = {"text": text, "showarrow": False, "font": {"size": size}}
        self.layout.setdefault("annotations", []).append({**look, **place, **values})

    def gap_note(self, words: str, i: int = 0, *, x: float, yshift: int = 0) -> None:
        """Add words beside where a gap begins in the i-th subplot; :meth:`set` finds the side with room, once all is drawn."""
        self.note(words, i, xref=f"x{_number(i)}", x=x, y=0.98, yanchor="top", yshift=yshift, xanchor="left", xshift=4)
        self._gap_notes.append((i % self.cols, self.layout["annotations"][-1]))
        self._gap_lines[i] = self._gap_lines.get(i, 0) + 1

    def _place_gap_notes(self) -> None:
        room = ROOM_FOR_WORDS if self.cols == 1 else ROOM_IN_COLUMNS
        for column, note in self._gap_notes:
            low, high = self._x_range(column)
            if note["x"] - low > room * (high - low):
                note.update(xanchor="right", xshift=-4)

    def leave_room(self, of: Collection[int] | None = None) -> None:
        """Have the axes of subplots with words about gaps end above their lines, so that the words lie over none.

        Args:
            of: numbers of the subplots whose axes have no such room yet; all by default.
        """
        if not self._gap_lines:
            return
        margin = {**LOOK["layout"]["margin"], **self.layout.get("margin", {})}
        height = self.layout["height"] - margin["t"] - margin["b"]
        for i, lines in self._gap_lines.items():
            if of is not None and i not in of:
                continue
            axis, share = self.layout.setdefault(f"yaxis{_number(i)}", {}), NOTE_PX * lines + 6
            low, high = axis.get("domain", (0.0, 1.0))
            share = min(MAX_NOTES, share / max(1.0, height * (high - low)))
            ends = axis.get("range") or self._y_range(i, axis.get("type") == "log")
            if ends is not None:
                axis["range"] = [ends[0], ends[1] + (ends[1] - ends[0]) * share / (1 - share)]

    def _y_range(self, i: int, is_log: bool) -> list[float] | None:
        """Return the ends of a subplot's y axis with all that is drawn in it, as plotly would choose them; None without any."""
        n = _number(i)
        drawn = [t["y"] for t in self.data if t.get("yaxis", "y") == f"y{n}" and isinstance(t.get("y"), np.ndarray)]
        rules = [s["y0"] for s in self.layout.get("shapes", ()) if s.get("yref") == f"y{n}" and s["type"] == "line"]
        values = np.concatenate([*drawn, np.array(rules, np.float64)]) if drawn else np.zeros(0)
        values = values[np.isfinite(values) & ((values > 0) | (not is_log))]
        if not len(values):
            return None
        low, high = (float(np.log10(v)) if is_log else float(v) for v in (values.min(), values.max()))
        pad = 0.06 * (high - low) or 0.5 * abs(high) or 1.0
        return [low - pad, high + pad]

    def _x_range(self, column: int) -> tuple[float, float]:
        """Return the smallest and largest x of all that is drawn in a column of subplots, whose x axes go together."""
        axes = {f"x{_number(i)}" for i in range(column, self.num, self.cols)}
        own = [t["x"] for t in self.data if t.get("xaxis", "x") in axes and isinstance(t.get("x"), np.ndarray) and t["x"].size]
        return min((float(x.min()) for x in own), default=0.0), max((float(x.max()) for x in own), default=0.0)

    def set(self, height: int, **layout: Any) -> Figure:
        """Set the height in pixels, and other values of the layout; all traces have been added."""
        self._place_gap_notes()
        self.layout.update(height=height, **layout)
        self.leave_room()
        return self

    def packed(self) -> Part:
        """Return what goes to the browser: numpy arrays as base64, a quarter of their length as text."""
        return {"data": [_packed(trace) for trace in self.data], "layout": self.layout}


def _number(i: int) -> str:
    return "" if i == 0 else str(i + 1)


def _packed(trace: Part) -> Part:
    return {key: _array(value) if isinstance(value, np.ndarray) else value for key, value in trace.items()}


def _array(values: np.ndarray[Any, Any]) -> Part:
    dtype = np.dtype({"f": np.float32, "u": np.uint16}.get(values.dtype.kind, np.int32))
    data = np.ascontiguousarray(values, dtype=dtype)
    found: Part = {"dtype": dtype.str[1:], "bdata": base64.b64encode(data.data if data.size else b"").decode("ascii")}
    return found if data.ndim == 1 else {**found, "shape": ", ".join(map(str, data.shape))}
