"""Modules by steps as HTML without scripts: a row is a name, its cells, and the worst of them in words.

Neighbouring cells of one level are one rectangle, whose hover text tells its steps. Layers fold into blocks, which open.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import groupby

import numpy as np

from fp8debug.escaping import one_line
from fp8debug.rules import Findings

from ..data.module_health import ERROR, HEALTHY, NAMES, NEAR, NO_DATA, NONFINITE, WARNING, Levels, ModuleHealth

#: Rows beyond which layers fold into blocks, and rows of a page: more modules are counted, not shown.
MAX_FLAT, MAX_ROWS = 40, 2_000
#: Levels from the best to the worst, for what stands for several modules.
_ORDER = np.argsort([NO_DATA, HEALTHY, NEAR, WARNING, ERROR, NONFINITE])
#: Metrics in words; a name that is not here stands for itself.
WORDS = {"sqnr_db": "SQNR", "overflow_rate": "overflow", "underflow_rate": "underflow"}
QUARTILES = ("lowest quarter", "second quarter", "third quarter", "highest quarter")


def heatmap(health: ModuleHealth, codes: Mapping[str, Sequence[str]] | None = None, *, with_modules: bool = True) -> str:
    """Return the figure.

    Args:
        health: levels of the modules.
        codes: codes of the findings that name a module.
        with_modules: whether a block opens to its modules; else its row alone is there, which is smaller.
    """
    if not len(health.steps):
        return "<p class='muted'>not recorded</p>"
    found = codes or {}
    shown = health.modules[:MAX_ROWS]
    blocks = [list(group) for _, group in groupby(range(len(shown)), key=lambda i: _block(shown[i]))]
    if len(shown) <= MAX_FLAT or len(blocks) == len(shown):
        rows = [_row(health, [i], found) for i in range(len(shown))]
    else:
        rows = list(_folded_rows(health, blocks, found, with_modules=with_modules))
    axis = (
        f"<div class='hm-row hm-axis'><span></span><span class='hm-ends'><span>step {health.steps[0]}</span>"
        f"<span>{health.last}</span></span><span></span></div>"
    )
    return f"<div class='hm'>{_legend(health)}{axis}{''.join(rows)}{_remarks(health)}</div>"


def codes_by_module(findings: Findings) -> dict[str, list[str]]:
    """Return the codes of the findings that name a module, as culprit or with the same cause."""
    codes: dict[str, list[str]] = {}
    for finding in findings:
        for module in (finding.module, *finding.also):
            if module is not None:
                codes.setdefault(module, []).append(finding.code)
    return codes


def _block(name: str) -> str:
    """Return the part of a name that its block shares: all up to its first number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return name if at is None else ".".join(parts[: at + 1])


def _folded_rows(
    health: ModuleHealth, blocks: Sequence[list[int]], codes: Mapping[str, Sequence[str]], *, with_modules: bool
) -> Iterator[str]:
    """Yield a row for each block, which opens to its modules; neighbouring blocks without a warning are one."""

    def is_fine(places: list[int]) -> bool:
        is_sick = np.isin(health.levels[places], (WARNING, ERROR, NONFINITE)).any()
        return health.is_judged and not is_sick and not any(health.modules[i] in codes for i in places)

    for fine, group in groupby(blocks, key=is_fine):
        stretch = list(group)
        together = [[i for places in stretch for i in places]] if fine and len(stretch) > 2 else stretch
        for places in together:
            if len(places) == 1 or not with_modules:
                yield _row(health, places, codes)
                continue
            inner = "".join(_row(health, [i], codes) for i in places)
            yield f"<details><summary>{_row(health, places, codes)}</summary>{inner}</details>"


def _worst(levels: Levels) -> Levels:
    """Return the worst level of each column of several modules, int8 ``[columns]``; no data is the best."""
    ranks = _ORDER[levels].max(axis=0)
    worst: Levels = np.argsort(_ORDER)[ranks].astype(np.int8)
    return worst


def _name(health: ModuleHealth, places: Sequence[int]) -> str:
    names = [health.modules[i] for i in places]
    if len(names) == 1:
        return names[0]
    first, last = _block(names[0]), _block(names[-1])
    return f"{first}.* ({len(names)})" if first == last else f"{first} … {last} ({len(names)})"


def _row(health: ModuleHealth, places: list[int], codes: Mapping[str, Sequence[str]]) -> str:
    levels = health.levels[places[0]] if len(places) == 1 else _worst(health.levels[places])
    rects, at = [], 0
    for level, group in groupby(levels.tolist()):
        size = len(list(group))
        if level != NO_DATA:
            told = escape(_stretch(health, places, at, size, level))
            kind = f"l{level}" if health.is_judged or level >= NONFINITE else f"v{level}"
            rects.append(f"<rect class='{kind}' x='{at}' width='{size}' height='1'><title>{told}</title></rect>")
        at += size
    name, words = one_line(_name(health, places)), _in_words(health, places, levels)
    own = " ".join(dict.fromkeys(code for i in places for code in codes.get(health.modules[i], ())))
    mark = f"<b>{escape(own)}</b> " if own else ""
    label = escape(f"{name}: {words or NAMES[HEALTHY]}", quote=True)
    return (
        f"<div class='hm-row'><span class='hm-name'>{escape(name)}</span><svg class='hm-cells' role='img' aria-label='{label}'"
        f" viewBox='0 0 {len(levels)} 1' preserveAspectRatio='none'>{''.join(rects)}</svg>"
        f"<span class='hm-words'>{mark}{escape(words)}</span></div>"
    )


def _steps(health: ModuleHealth, at: int, size: int) -> str:
    first = int(health.steps[at])
    last = int(health.steps[at + size]) - 1 if at + size < len(health.steps) else health.last
    return f"step {first}" if last <= first else f"steps {first} to {last}"


def _stretch(health: ModuleHealth, places: Sequence[int], at: int, size: int, level: int) -> str:
    where = _steps(health, at, size)
    if not health.is_judged and level < NONFINITE:
        values = health.values[places, at : at + size]
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        return f"{where}: {low:.4g}" + (f" to {high:.4g}" if high > low else "")
    return f"{where}: {NAMES[level]}{_value(health, places, at, size, level)}"


def _value(health: ModuleHealth, places: Sequence[int], at: int, size: int, level: int) -> str:
    """Return the metric and its first value of a stretch that is not healthy."""
    if level in (HEALTHY, NONFINITE):
        return ""
    own = health.levels[places, at : at + size]
    row, column = np.argwhere(own == level)[0]
    value = float(health.values[places[row], at + column])
    metric = health.metrics[health.causes[places[row], at + column]]
    return f", {value_words(metric, value)}" if math.isfinite(value) else ""


def value_words(metric: str, value: float) -> str:
    """Return a metric with its value for people: ``SQNR 9.02 dB``, ``overflow 5.7 %``."""
    name = WORDS.get(metric, metric)
    if metric.endswith("_db"):
        return f"{name} {value + 0.0:.3g} dB"  # never -0
    return f"{name} {100 * value:.3g} %" if metric.endswith("_rate") else f"{name} {value:.4g}"


def _in_words(health: ModuleHealth, places: Sequence[int], levels: Levels) -> str:
    """Return where the worst level of a row begins; nothing for one that stays healthy."""
    if not health.is_judged:
        values = health.values[places]
        known = values[np.isfinite(values)]
        return f"{known.min():.3g} to {known.max():.3g}" if known.size else NAMES[NONFINITE]
    for level in (NONFINITE, ERROR, WARNING, NEAR):
        if (levels == level).any():
            at = int(np.flatnonzero(levels == level)[0])
            return f"{NAMES[level]} from step {health.steps[at]}{_value(health, places, at, 1, level)}"
    return NAMES[NO_DATA] if (levels == NO_DATA).all() else ""


def _legend(health: ModuleHealth) -> str:
    names = dict(enumerate(NAMES)) if health.is_judged else {NONFINITE: NAMES[NONFINITE], NO_DATA: NAMES[NO_DATA]}
    items = [(f"l{level}", name) for level, name in names.items()]
    if not health.is_judged:
        items = [*((f"v{place}", name) for place, name in enumerate(QUARTILES)), *items]
    return f"<p class='hm-legend'>{''.join(f'<span><i class={kind!r}></i>{name}</span>' for kind, name in items)}</p>"


def _remarks(health: ModuleHealth) -> str:
    told = []
    if len(health.modules) > MAX_ROWS:
        told.append(f"The first {MAX_ROWS} of {len(health.modules)} modules.")
    if health.steps_apart > 1:
        told.append(f"One of {health.steps_apart} sampled steps was read.")
    return f"<p class='muted'>{' '.join(told)}</p>" if told else ""
