"""Sparklines: a line a few letters high, as an image in the text of a page; no library draws it, so a list may have hundreds."""

from __future__ import annotations

from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ..data.nonfinite import FINITE, MISSING, spans_of
from ..data.records import Floats, Ints, StepSeries
from .base import STATE_COLORS
from .theme import LINE_BLUE, VERMILLION

WIDTH, HEIGHT = 110, 22
_PAD = 2.0


def sparkline(series: StepSeries | None, since: int | None = None) -> str:
    """Return the line as a ``data:`` address of an SVG, "" where there is nothing to draw.

    Steps that are NaN or infinite are bands of their colours, and the line has a gap there.

    Args:
        series: the line.
        since: step from which it is drawn in the colour of an error.
    """
    if series is None or not len(series.steps):
        return ""
    steps, values = series.steps, series.values
    found = series.states if series.states is not None else np.zeros(len(steps), np.int8)
    known = np.isfinite(values)
    low, high = (float(values[known].min()), float(values[known].max())) if known.any() else (0.0, 1.0)
    span = max(1, int(steps[-1]) - int(steps[0]))
    x = _PAD + (WIDTH - 2 * _PAD) * (steps - steps[0]) / span
    y = HEIGHT - _PAD - (HEIGHT - 2 * _PAD) * (np.where(known, values, low) - low) / (high - low if high > low else 1)
    y = y if high > low else np.full(len(y), HEIGHT / 2)
    parts = []
    for first, last, state in spans_of(steps, found):
        if FINITE < state < MISSING:
            begin = float(x[np.searchsorted(steps, first)])
            end = float(WIDTH if last is None else x[np.searchsorted(steps, last)])
            wide = max(2.0, end - begin)
            color = STATE_COLORS[state]
            parts.append(f"<rect x='{begin:.1f}' y='0' width='{wide:.1f}' height='{HEIGHT}' fill='{color}'/>")
    parts += [_path(x, y, known, LINE_BLUE)]
    if since is not None:
        parts += [_path(x, y, known & (steps >= since), VERMILLION)]
    text = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}'>{''.join(parts)}</svg>"
    return "data:image/svg+xml," + quote(text, safe=" ='/:")


def _path(x: NDArray[np.float64], y: NDArray[np.float64], known: NDArray[np.bool_], color: str) -> str:
    """Return the strokes between neighbours that are known; a point without neighbours is a dot."""
    words, is_open = [], False
    for i in range(len(x)):
        if not known[i]:
            is_open = False
            continue
        words.append(f"{'L' if is_open else 'M'}{x[i]:.1f} {y[i]:.1f}" + ("" if is_open else "h0.1"))
        is_open = True
    return f"<path d='{''.join(words)}' fill='none' stroke='{color}' stroke-width='1.5' stroke-linecap='round'/>"


def ends_in_words(steps: Ints, values: Floats) -> str:
    """Return the first and the last value of a line, for who cannot see it."""
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return "no finite value"
    return f"{values[known[0]]:.4g} at step {steps[known[0]]:,}, {values[known[-1]]:.4g} at step {steps[known[-1]]:,}"
