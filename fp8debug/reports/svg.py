"""A line over steps as inline SVG: no script, no font, colours from the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

#: Points of a line beyond which it is thinned, keeping the extremes of each stretch.
MAX_POINTS = 800
#: Stretches of NaN or Inf that are shaded and named.
MAX_GAPS = 4
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 22, 24
#: Height of a line of text, which values leave free below them for the words about NaN or Inf.
_LINE = 16
#: Of the largest value the least that an axis spans: drawn from end to end, noise would look like a change.
MIN_SPREAD = 0.05


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One line over steps.

    Attributes:
        title: above the plot.
        steps: where the values lie, rising.
        values: the values; None is a gap; NaN and Inf are one that is shaded and named.
        limit: a threshold, drawn dashed; None for none.
        span: steps to shade, both included; None for none.
        marks: (step, label) of vertical lines.
        beside: (name, steps, values) of another run's line, drawn dashed behind this one; None for none.
        width: in pixels.
        height: in pixels.
    """

    title: str
    steps: Sequence[int]
    values: Sequence[float | None]
    limit: float | None = None
    span: tuple[int, int] | None = None
    marks: Sequence[tuple[int, str]] = ()
    beside: tuple[str, Sequence[int], Sequence[float | None]] | None = None
    width: int = 430
    height: int = 170

    def to_svg(self) -> str:
        """Return the ``<svg>`` element; it scales with its column."""
        known = [v for v in self.values if v is not None and math.isfinite(v)]
        gaps = list(self._gaps())
        if not known:
            why = "; ".join(_gap_words(*gap) for gap in gaps) or "not recorded"
            return f"<p class='muted'>{escape(self.title)}: {escape(why)}, no finite value</p>"
        beside = [] if self.beside is None else [list(line) for line in _lines(*self.beside[1:])]
        plot = self._plot(known, beside)
        parts = [
            plot.title(self.title),
            *([] if self.span is None else [plot.span(*self.span)]),
            *plot.frame(),
            *(() if self.limit is None else plot.limit(self.limit)),
            *(part for gap in gaps[:MAX_GAPS] for part in plot.gap(*gap)),
            *(part for place, mark in enumerate(self.marks) for part in plot.mark(place, *mark)),
            *(plot.line(line, "line beside") for line in beside),
            *(plot.line(line, "line") for line in _lines(self.steps, self.values)),
            *([] if self.beside is None else [plot.right_text(14, f"dashed: {self.beside[0]}")]),
            *(plot.dot(step, value) for step, value in self._dots()),
        ]
        lost = "".join(f", {_gap_words(*gap)}" for gap in gaps)
        span = f"steps {plot.first} to {plot.last}, from {min(known):.3g} to {max(known):.3g}"
        label = escape(f"{self.title}, {span}{lost}", quote=True)
        return f"<svg viewBox='0 0 {self.width} {self.height}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"

    def _plot(self, known: Sequence[float], beside: Sequence[Sequence[tuple[int, float]]]) -> _Plot:
        """Return the axes on which the finite values and the lines of the other run lie, and the threshold where it can."""
        others = [value for line in beside for _, value in line]
        is_log = min(known) > 0 and max(known) / min(known) > 1000 and min(others, default=1.0) > 0
        ends = [*known, *others, *([self.limit] if self.limit is not None and (self.limit > 0 or not is_log) else [])]
        levels = low, high = min(ends), max(ends)
        if low == high:
            low, high = (low / 2, high * 2) if is_log else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)
        elif not is_log and high - low < (least := MIN_SPREAD * max(abs(low), abs(high))):
            low, high = (low + high - least) / 2, (low + high + least) / 2
        steps = [*self.steps, *(step for line in beside for step, _ in line)]
        first, last = min(steps), max(*steps, min(steps) + 1)
        size = {"width": self.width, "height": self.height, "room": _LINE if any(True for _ in self._gaps()) else 0}
        return _Plot(first=first, last=last, low=low, high=high, levels=levels, is_log=is_log, **size)

    def _gaps(self) -> Iterator[tuple[int, int | None, str]]:
        """Yield (first step, last step, NaN or Inf) of each stretch that is not finite; the last is None where the line ends."""
        words = [
            (step, "" if v is None or math.isfinite(v) else "NaN" if math.isnan(v) else "Inf")
            for step, v in zip(self.steps, self.values, strict=True)
        ]
        for is_lost, group in groupby(words, key=lambda entry: bool(entry[1])):
            stretch = list(group)
            if is_lost:
                ends_here = stretch[-1][0] == self.steps[-1]
                yield stretch[0][0], None if ends_here else stretch[-1][0], max(word for _, word in stretch)

    def _dots(self) -> list[tuple[int, float]]:
        found = [(s, v) for s, v in zip(self.steps, self.values, strict=True) if v is not None and math.isfinite(v)]
        return found if len(found) <= 120 else []


@dataclass(frozen=True, kw_only=True)
class _Plot:
    """Axes of a chart, from step ``first`` to ``last`` and from ``low`` to ``high``, and the elements that lie on them.

    ``levels`` are the ends that values reach: where they differ little, the axis goes on to both sides of them. ``room`` pixels
    below the lowest end are free for words.
    """

    first: int
    last: int
    low: float
    high: float
    levels: tuple[float, float]
    is_log: bool
    width: int
    height: int
    room: int

    @property
    def right(self) -> int:
        return self.width - _RIGHT

    @property
    def bottom(self) -> int:
        return self.height - _BOTTOM

    def inside(self, step: int) -> int:
        """Return the nearest step on the axis."""
        return min(max(step, self.first), self.last)

    def across(self, step: float) -> float:
        return _LEFT + (step - self.first) / (self.last - self.first) * (self.right - _LEFT)

    def down(self, value: float) -> float:
        low, high = self.low, self.high
        ratio = math.log(value / low) / math.log(high / low) if self.is_log else (value - low) / (high - low)
        floor = self.bottom - self.room
        return floor - ratio * (floor - _TOP)

    def title(self, text: str) -> str:
        return f"<text x='{_LEFT}' y='14' class='name'>{escape(text)}{' (log scale)' if self.is_log else ''}</text>"

    def frame(self) -> Iterator[str]:
        """Yield the ends of the steps and of the values; of two values without room for two texts the lower one."""
        low, high = self.levels
        has_room = self.down(low) - self.down(high) >= _LINE
        for value in (low, high) if has_room else (low,):
            yield self.level(self.down(value), "grid")
            yield f"<text x='{_LEFT - 6}' y='{self.down(value) + 4:.1f}' class='tick end'>{value:.3g}</text>"
        yield f"<text x='{_LEFT}' y='{self.height - 6}' class='tick'>step {self.first}</text>"
        yield self.right_text(self.height - 6, str(self.last))

    def span(self, first: int, last: int) -> str:
        return self.band(self.across(self.inside(first)), self.across(self.inside(last)), "span")

    def limit(self, value: float) -> Iterator[str]:
        """Yield a threshold, where it lies between the ends."""
        if self.low <= value <= self.high:
            at = self.down(value)
            yield self.level(at, "limit")
            yield self.right_text(f"{at - 4:.1f}", f"threshold {value:.3g}")

    def gap(self, first: int, last: int | None, word: str) -> Iterator[str]:
        """Yield the shade and the name of a stretch of NaN or Inf."""
        left = self.across(first)
        yield self.band(left, self.across(self.last if last is None else last), "lost")
        yield self.label(left, self.bottom - 6, _gap_words(first, last, word), 0.6)

    def mark(self, place: int, step: int, label: str) -> Iterator[str]:
        """Yield the vertical line of a mark and its label, lower for each of four that follow one another."""
        at = self.across(self.inside(step))
        yield f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{_TOP}' y2='{self.bottom}' class='mark'/>"
        yield self.label(at, _TOP + 12 + 13 * (place % 4), label, 0.85)

    def line(self, points: Sequence[tuple[int, float]], name: str) -> str:
        places = " ".join(f"{self.across(step):.1f},{self.down(value):.1f}" for step, value in points)
        return f"<polyline points='{places}' class='{name}'/>"

    def dot(self, step: int, value: float) -> str:
        told = f"<title>step {step}: {value:.6g}</title>"
        return f"<circle cx='{self.across(step):.1f}' cy='{self.down(value):.1f}' r='2.4' class='dot'>{told}</circle>"

    def band(self, left: float, right: float, name: str) -> str:
        size = f"width='{max(right - left, 2):.1f}' height='{self.bottom - _TOP}'"
        return f"<rect x='{left:.1f}' y='{_TOP}' {size} class='{name}'/>"

    def level(self, at: float, name: str) -> str:
        return f"<line x1='{_LEFT}' x2='{self.right}' y1='{at:.1f}' y2='{at:.1f}' class='{name}'/>"

    def right_text(self, y: int | str, text: str) -> str:
        return f"<text x='{self.right}' y='{y}' class='tick end'>{escape(text)}</text>"

    def label(self, at: float, y: int, text: str, turn: float) -> str:
        """Return a text beside a place, on its left where that is beyond a share of the width."""
        is_left = at > self.width * turn
        x, side = (at - 4, " end") if is_left else (at + 4, "")
        return f"<text x='{x:.1f}' y='{y}' class='tick strong{side}'>{escape(text)}</text>"


def _lines(steps: Sequence[int], values: Sequence[float | None]) -> Iterator[list[tuple[int, float]]]:
    """Yield the unbroken stretches of finite values, thinned."""
    line: list[tuple[int, float]] = []
    for step, value in [*zip(steps, values, strict=True), (0, None)]:
        if value is not None and math.isfinite(value):
            line.append((step, value))
        elif line:
            yield thinned(line, MAX_POINTS)
            line = []


def _gap_words(first: int, last: int | None, word: str) -> str:
    if last is None:
        return f"{word} from step {first}"
    return f"{word} at step {first}" if first == last else f"{word} in steps {first} to {last}"


def thinned(line: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Return a line of at most so many points: the smallest and largest of each stretch, in order."""
    if len(line) <= most:
        return line
    size = math.ceil(len(line) / (most // 2))
    kept: list[tuple[int, float]] = []
    for start in range(0, len(line), size):
        stretch = line[start : start + size]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept
