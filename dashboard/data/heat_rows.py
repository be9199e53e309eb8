"""Rows of a heatmap: modules folded into blocks, chosen by name, in an order, and as many as can have a label each."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np

from fp8debug.store.read.module_names import folded

from .healthy_ranges import badness, kinds_in, severities
from .nonfinite import FINITE, MISSING
from .records import Floats, Heat, Ints, Mark

#: Rows that are drawn at once: each has room for a label of its own.
MAX_ROWS = 100
#: Ways to fold, and the names of what they make: each module; blocks.3.*; blocks.{0..5}.mlp.up; blocks.*
FOLDS = ("modules", "blocks", "places", "stacks")
ORDERS = ("order", "worst")


@dataclass(frozen=True, kw_only=True)
class HeatRows:
    """A heatmap's rows as they are drawn.

    Attributes:
        heat: with one row for each module or fold; its ``modules`` are their labels.
        members: modules behind each row.
        worst: place among ``names`` of the module that a cell shows, int32 ``[rows, cells]``.
        names: all modules that have data.
        first: number of the first row, of all that were chosen.
        total: how many were chosen.
    """

    heat: Heat
    members: tuple[tuple[str, ...], ...]
    worst: Ints
    names: tuple[str, ...]
    first: int = 0
    total: int = 0

    @property
    def folds(self) -> tuple[str, ...]:
        """Labels of the rows that stand for several modules."""
        return tuple(label for label, of in zip(self.heat.modules, self.members, strict=True) if len(of) > 1)


def default_fold(num_modules: int) -> str:
    """Return how a run of so many modules is folded unasked: as far as each row has a label."""
    return "modules" if num_modules <= MAX_ROWS else "blocks"


def labels_of(names: Sequence[str], fold: str, opened: Sequence[str] = ()) -> list[str]:
    """Return the row of each module by its label: the module's own name where it is not folded.

    Args:
        names: of modules, in execution order.
        fold: one of ``FOLDS``.
        opened: labels whose modules stand for themselves.
    """
    labels = list(names)
    if fold == "places":
        for pattern, places in folded(names):
            for place in places:
                labels[place] = pattern
    elif fold in ("blocks", "stacks"):
        number = re.compile(r"^(.*?)(?:(?<=\.)|^)(\d+)(\..*)?$")
        for i, name in enumerate(names):
            found = number.match(name)
            if found is not None:
                block = f"{found[1]}{found[2]}"
                labels[i] = f"{block}.*" if fold == "blocks" else f"{found[1]}*"
    counts: dict[str, int] = {}
    for label in labels:
        counts[label] = counts.get(label, 0) + 1
    return [name if counts[label] == 1 or label in opened else label for name, label in zip(names, labels, strict=True)]


def is_chosen(name: str, text: str) -> bool:
    """Return whether a module's name has a text in it, or matches it where it is a pattern with ``*``, ``?`` or ``[]``."""
    name, text = name.lower(), text.strip().lower()
    return fnmatchcase(name, text) if any(c in text for c in "*?[") else text in name


def scores(heat: Heat) -> Floats:
    """Return how bad each cell is, float32 ``[modules, cells]``: NaN and Inf above all numbers, -inf where nothing is known."""
    if heat.reasons is not None:
        found = heat.values.copy()
    else:
        known = severities(heat.metric, heat.values, heat.kinds)
        found = np.full(heat.values.shape, np.nan, np.float32)
        for kind in kinds_in(heat.kinds):
            own = heat.kinds == kind
            found[own] = badness(heat.metric, heat.values[own], kind)
        if known is not None:  # the order of badness among equally severe ones
            found = np.maximum(known, 0) + np.float32(1e-3) * np.tanh(found)
    found = np.where(np.isnan(found), -np.inf, found)
    if heat.states is not None:
        lost = (heat.states > FINITE) & (heat.states < MISSING)
        found = np.where(lost, np.float32(1e30) * heat.states, found)
    return found.astype(np.float32)


def arranged(
    heat: Heat,
    fold: str = "modules",
    opened: Sequence[str] = (),
    text: str = "",
    order: str = "order",
    rows: tuple[int, int] | None = None,
) -> HeatRows:
    """Return the rows of a heatmap.

    Args:
        heat: with one row for each module, in execution order.
        fold: one of ``FOLDS``; a fold shows its worst module.
        opened: labels of folds whose modules are rows of their own.
        text: see :func:`is_chosen`.
        order: ``order`` of execution, or ``worst`` first.
        rows: first and last of the chosen rows to draw; the first ``MAX_ROWS`` by default.
    """
    chosen = [i for i, name in enumerate(heat.modules) if not text or is_chosen(name, text)]
    labels = labels_of([heat.modules[i] for i in chosen], fold, opened)
    groups: dict[str, list[int]] = {}
    for i, label in zip(chosen, labels, strict=True):
        groups.setdefault(label, []).append(i)
    bad = scores(heat)
    places = list(groups.values())
    names = list(groups)
    if order == "worst" and bad.shape[1]:
        worst = [float(bad[of].max()) for of in places]
        turn = sorted(range(len(places)), key=lambda i: -worst[i])
        places, names = [places[i] for i in turn], [names[i] for i in turn]
    total = len(places)
    low, high = rows if rows is not None else (0, MAX_ROWS - 1)
    low = max(0, min(low, total - 1))
    high = max(low, min(high, low + MAX_ROWS - 1, total - 1))
    places, names = places[low : high + 1], names[low : high + 1]
    cells = np.arange(bad.shape[1])
    worst_of = np.array([np.asarray(of)[bad[of].argmax(axis=0)] for of in places], np.int64).reshape(len(places), len(cells))
    shown = replace(
        heat,
        modules=tuple(names),
        values=heat.values[worst_of, cells],
        kinds=heat.kinds[worst_of, cells],
        states=None if heat.states is None else heat.states[worst_of, cells],
        reasons=None if heat.reasons is None else heat.reasons[worst_of, cells],
        marks=_marks(heat.marks, {heat.modules[i]: label for label, of in zip(names, places, strict=True) for i in of}),
    )
    members = tuple(tuple(heat.modules[i] for i in of) for of in places)
    return HeatRows(heat=shown, members=members, worst=worst_of.astype(np.int32), names=heat.modules, first=low, total=total)


def _marks(marks: Sequence[Mark], row_of: Mapping[str, str]) -> tuple[Mark, ...]:
    """Return the marks of the rows that are drawn, those of one row and step together."""
    ranks = {"error": 0, "warning": 1, "info": 2}
    found: dict[tuple[int, str], Mark] = {}
    for mark in marks:
        row = row_of.get(mark.module or "")
        if row is None:
            continue
        known = found.get((mark.step, row))
        if known is not None:
            first, second = sorted((known, mark), key=lambda m: ranks.get(m.severity, 3))
            mark = replace(first, codes=tuple(dict.fromkeys((*first.codes, *second.codes))), lines=(*first.lines, *second.lines))
        found[mark.step, row] = replace(mark, module=row)
    return tuple(found.values())
