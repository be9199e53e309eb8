"""A run beside its baseline: what differs in the configuration that was in force, and how far the losses lie apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fp8debug.rules.changes import in_force
from fp8debug.rules.losses import read_losses
from fp8debug.store.run import Run

#: Losses are compared by the median of as many common steps, so that one batch does not decide. No published basis.
WINDOW = 20
#: A gap is one beyond so many standard errors and this share of the baseline's loss. No published basis: the loss of a
#: good FP8 run lies within 0.25 % of BF16's in DeepSeek-V3 (appendix B.1), and small runs are noisier.
MIN_ERRORS, MIN_SHARE = 4.0, 0.01
_CAST_KEY = re.compile(r"(.+)\.(fprop|dgrad|wgrad)\.(\w+)")


def compare(run: Run, baseline: Run) -> dict[str, Any]:
    """Return the comparison as plain JSON values.

    Returns:
        ``run``: the baseline's name. ``steps``: the last common steps whose losses were compared, or None. ``loss`` and
        ``baseline_loss``: their medians; ``loss_gap``: the difference, positive where the run is worse, and
        ``loss_gap_error``: its standard error, from the losses' differences step by step. ``diverges_at``: the first
        step from which on the gap exceeds the noise until the end, None when it does not. ``configuration``:
        ``{key: [baseline's value, run's value]}`` of what differs.
    """
    ours, theirs = _finite(run), _finite(baseline)
    common = sorted(ours.keys() & theirs.keys())
    last = common[-WINDOW:]
    loss = median(ours[step] for step in last) if last else None
    baseline_loss = median(theirs[step] for step in last) if last else None
    _, error = gap_of([ours[step] - theirs[step] for step in last])
    ours_in_force, theirs_in_force = configuration(run), configuration(baseline)
    return {
        "run": baseline.name,
        "steps": [last[0], last[-1]] if last else None,
        "loss": loss,
        "baseline_loss": baseline_loss,
        "loss_gap": loss - baseline_loss if loss is not None and baseline_loss is not None else None,
        "loss_gap_error": error,
        "diverges_at": _diverges_at(common, ours, theirs),
        "configuration": {
            key: [theirs_in_force.get(key), ours_in_force.get(key)]
            for key in dict.fromkeys([*ours_in_force, *theirs_in_force])
            if ours_in_force.get(key) != theirs_in_force.get(key)
        },
    }


def gap_of(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median of differences and its standard error (by the median absolute deviation); None without any."""
    if not differences:
        return None, None
    middle = median(differences)
    spread = 1.4826 * median(abs(d - middle) for d in differences)
    return middle, 1.2533 * spread / math.sqrt(len(differences))


def is_gap(gap: float | None, error: float | None, loss: float) -> bool:
    """Tell whether a gap lies beyond the noise, in either direction."""
    return gap is not None and error is not None and abs(gap) > max(MIN_ERRORS * error, MIN_SHARE * abs(loss))


def _diverges_at(common: Sequence[int], ours: dict[int, float], theirs: dict[int, float]) -> int | None:
    since = None
    if not common:
        return None
    for start in range(len(common) - min(WINDOW, len(common)), -1, -1):
        window = common[start : start + WINDOW]
        gap, error = gap_of([ours[step] - theirs[step] for step in window])
        if not is_gap(gap, error, median(theirs[step] for step in window)):
            break
        since = window[0]
    return since


def _finite(run: Run) -> dict[int, float]:
    return {step: loss for step, loss in zip(*read_losses(run), strict=True) if math.isfinite(loss)}


def configuration(run: Run) -> dict[str, Any]:
    """Return what was in force, flat: recipe, environment, argv, and the casts of each module as they ran."""
    flat = in_force(run.manifest)
    query = (
        "SELECT module, gemm, tensor, cast_name, min(step) AS first FROM raw WHERE actual AND reference = 'operand'"
        " GROUP BY module, gemm, tensor, cast_name ORDER BY module, gemm, tensor, first, cast_name"
    )
    for row in run.sql(query).to_pylist():
        key = f"{row['module']}.{row['gemm']}.{row['tensor']}"
        flat[key] = f"{flat[key]} then {row['cast_name']}" if key in flat else row["cast_name"]
    return flat


def configuration_words(differing: Mapping[str, Sequence[Any]]) -> list[tuple[str, Any, Any]]:
    """Return (what, first, second) of each difference for people, casts that change alike in several modules as one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for key, values in differing.items():
        module, site = _split(key)
        alike.setdefault((site if module else key, repr(list(values))), []).append(key)
    words = []
    for (site, _), keys in alike.items():
        modules = [module for module, _ in map(_split, keys)]
        what = keys[0] if len(keys) == 1 else f"{site} of {len(modules)} modules, first {modules[0]}"
        first, second = differing[keys[0]]
        words.append((what, first, second))
    return words


def _split(key: str) -> tuple[str, str]:
    """Return module and ``gemm tensor`` of a cast's key; no module for another key."""
    match = _CAST_KEY.fullmatch(key)
    return (match[1], f"{match[2]} {match[3]}") if match else ("", key)
