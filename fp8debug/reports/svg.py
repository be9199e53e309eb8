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
        is_log = min(known) > 0 and max(known) / min(known) > 1000
        other = [] if self.beside is None else [list(line) for line in _lines(*self.beside[1:])]
        known_too = [value for line in other for _, value in line]
        is_log = is_log and min(known_too, default=1.0) > 0
        ends = [*known, *known_too, *([self.limit] if self.limit is not None and (self.limit > 0 or not is_log) else [])]
        low, high = min(ends), max(ends)
        if low == high:
            low, high = (low / 2, high * 2) if is_log else (low - (abs(low) or 1) * 0.05, high + (abs(high) or 1) * 0.05)
        all_steps = [*self.steps, *(step for line in other for step, _ in line)]
        first, last = min(all_steps), max(*all_steps, min(all_steps) + 1)

        def across(step: float) -> float:
            return _LEFT + (step - first) / (last - first) * (self.width - _LEFT - _RIGHT)

        def down(value: float) -> float:
            ratio = math.log(value / low) / math.log(high / low) if is_log else (value - low) / (high - low)
            return self.height - _BOTTOM - ratio * (self.height - _TOP - _BOTTOM)

        bottom = self.height - _BOTTOM
        parts = [f"<text x='{_LEFT}' y='14' class='name'>{escape(self.title)}{' (log scale)' if is_log else ''}</text>"]
        if self.span is not None:
            left, right = (across(min(max(step, first), last)) for step in self.span)
            parts.append(
                f"<rect x='{left:.1f}' y='{_TOP}' width='{max(right - left, 2):.1f}' height='{bottom - _TOP}' class='span'/>"
            )
        for value in dict.fromkeys((low, high)):
            parts.append(
                f"<line x1='{_LEFT}' x2='{self.width - _RIGHT}' y1='{down(value):.1f}' y2='{down(value):.1f}' class='grid'/>"
            )
            parts.append(f"<text x='{_LEFT - 6}' y='{down(value) + 4:.1f}' class='tick end'>{value:.3g}</text>")
        parts.append(f"<text x='{_LEFT}' y='{self.height - 6}' class='tick'>step {first}</text>")
        parts.append(f"<text x='{self.width - _RIGHT}' y='{self.height - 6}' class='tick end'>{last}</text>")
        if self.limit is not None and low <= self.limit <= high:
            at = down(self.limit)
            parts.append(f"<line x1='{_LEFT}' x2='{self.width - _RIGHT}' y1='{at:.1f}' y2='{at:.1f}' class='limit'/>")
            parts.append(f"<text x='{self.width - _RIGHT}' y='{at - 4:.1f}' class='tick end'>threshold {self.limit:.3g}</text>")
        for first_lost, last_lost, word in gaps[:MAX_GAPS]:
            left, right = across(first_lost), across(last if last_lost is None else last_lost)
            parts.append(
                f"<rect x='{left:.1f}' y='{_TOP}' width='{max(right - left, 2):.1f}' height='{bottom - _TOP}' class='lost'/>"
            )
            side = " end" if left > self.width * 0.6 else ""
            parts.append(
                f"<text x='{left + (-4 if side else 4):.1f}' y='{bottom - 6}' class='tick strong{side}'>"
                f"{escape(_gap_words(first_lost, last_lost, word))}</text>"
            )
        for place, (step, label) in enumerate(self.marks):
            at = across(min(max(step, first), last))
            height = _TOP + 12 + 13 * (place % 4)
            parts.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='{_TOP}' y2='{bottom}' class='mark'/>")
            side = " end" if at > self.width * 0.85 else ""
            parts.append(
                f"<text x='{at + (-4 if side else 4):.1f}' y='{height}' class='tick strong{side}'>{escape(label)}</text>"
            )
        for name, lines in (("line beside", other), ("line", list(_lines(self.steps, self.values)))):
            for line in lines:
                points = " ".join(f"{across(step):.1f},{down(value):.1f}" for step, value in line)
                parts.append(f"<polyline points='{points}' class='{name}'/>")
        if self.beside is not None:
            told = f"dashed: {self.beside[0]}"
            parts.append(f"<text x='{self.width - _RIGHT}' y='14' class='tick end'>{escape(told)}</text>")
        for step, value in self._dots():
            told = f"<title>step {step}: {value:.6g}</title>"
            parts.append(f"<circle cx='{across(step):.1f}' cy='{down(value):.1f}' r='2.4' class='dot'>{told}</circle>")
        lost = "".join(f", {_gap_words(*gap)}" for gap in gaps)
        label = escape(f"{self.title}, steps {first} to {last}, from {min(known):.3g} to {max(known):.3g}{lost}", quote=True)
        return f"<svg viewBox='0 0 {self.width} {self.height}' role='img' aria-label='{label}'>{''.join(parts)}</svg>"

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
