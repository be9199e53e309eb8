"""Colours and words shared by figures and pages: safe for the colour-blind, and never the only carrier of a meaning.

Hues are those of Okabe and Ito (2008). Grey parts are half transparent, so that one figure serves dark and light; style.css
sets text and grid lines of a plot from the page's own colours.
"""

from __future__ import annotations

#: Their yellow is not among them: it drowns in a light page.
BLUE, SKY, GREEN, ORANGE, VERMILLION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
GREY = "#8a8f98"
#: An eighth line beside those of Okabe and Ito.
BROWN = "#a0722a"
#: What a table says where there is no data.
NO_DATA = "\u2013"
#: The same in a grid, with four significant digits otherwise, evaluated without eval. NaN comes as text (``plain_number``).
_FORM = "params.value < 0.001 && params.value > -0.001 && params.value != 0 ? '.3~e' : '.4~g'"
GRID_NUMBER = {"function": f"params.value == null ? '{NO_DATA}' : d3.format({_FORM})(params.value)"}
#: Characters of the longest such number, -1.234e-12.
NUMBER_LENGTH = 10
#: A share in percent, in a grid.
GRID_PERCENT = {"function": f"params.value == null ? '{NO_DATA}' : d3.format('.3~%')(params.value)"}
#: Orders of a grid's column, by functions of assets/fp8debug.js: the worst last, and numbers with NaN as the largest.
BY_SEVERITY, BY_NUMBER, BY_SETTING = ({"function": name} for name in ("bySeverity", "byNumber", "bySetting"))
FAINT = "rgba(128,128,128,0.18)"

#: Okabe and Ito's blue, lighter: a thin line of the original drowns in a dark page.
LINE_BLUE = "#2a85c8"
#: Lines of one plot, the running cast first.
LINES = (LINE_BLUE, ORANGE, GREEN, PURPLE, SKY, VERMILLION)


#: NaN, Inf and values that were not recorded: hues that no scale of a figure has.
NAN_COLOR, INF_COLOR, MADE_COLOR, MISSING_COLOR = "#8e24aa", "#ff5fb0", "#c77dff", "rgba(110,120,140,0.45)"


def line_color(i: int) -> str:
    """Return the colour of the i-th line; where there are more than colours, the first stays that of the running cast alone."""
    return LINES[i] if i < len(LINES) else LINES[1 + (i - 1) % (len(LINES) - 1)]


#: Severity from -2 (too good, or far on the other side) over 0 (healthy: barely there) to 3 (hopeless).
SEVERITY_RANGE = (-2.0, 3.0)
SEVERITY_SCALE: tuple[tuple[float, str], ...] = (
    (0.0, "#0b5fa5"),
    (0.2, "rgba(86,180,233,0.75)"),
    (0.4, "rgba(128,128,128,0.16)"),
    (0.42, "rgba(240,200,80,0.35)"),
    (0.6, "#F2B134"),
    (0.8, "#D55E00"),
    (1.0, "#7d0a2c"),
)

#: The same from 0 on, for a health, which is never better than healthy.
HEALTH_SCALE: tuple[tuple[float, str], ...] = (
    (0.0, "rgba(0,158,115,0.22)"),
    (0.03, "rgba(240,200,80,0.4)"),
    (1 / 3, "#F2B134"),
    (2 / 3, "#D55E00"),
    (1.0, "#7d0a2c"),
)

#: Verdict and severity by icon, word and colour.
ICONS = {"error": "✖", "warning": "▲", "info": "\u2139", "ok": "✔", "unknown": "?"}
WORDS = {"error": "Error", "warning": "Warning", "info": "Info", "ok": "Healthy", "unknown": "Unknown"}
COLORS = {"error": VERMILLION, "warning": ORANGE, "info": BLUE, "ok": GREEN, "unknown": GREY}
SYMBOLS = {"error": "x", "warning": "triangle-up", "info": "circle", "unknown": "diamond"}


def plain_number(value: float | None) -> float | str | None:
    """Return a number as JSON can hold it: NaN and infinities as text, which a grid shows as it is and never as "no data"."""
    if value is None:
        return None
    if value != value:
        return "NaN"
    return float(value) if abs(value) != float("inf") else "Infinity" if value > 0 else "-Infinity"


def level(severity: object) -> str:
    """Return ``error``, ``warning``, ``info`` or ``ok`` for a severity or verdict in whatever form it comes."""
    word = str(severity).lower()
    if word in ("none", "clean", "healthy", "ok"):
        return "ok"
    return word if word in ICONS else "unknown"
