"""A run beside its baseline: what differs in the configuration that was in force, and how far the losses lie apart."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from fp8debug.rules.reading.changes import in_force
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.losses import departures, read_losses
from fp8debug.rules.reading.traces import has_fp8
from fp8debug.store.read.run import Run

#: Of a Gaussian: its standard deviation over its median absolute deviation, and the standard error of a median over a mean's.
_DEVIATIONS, _MEDIANS_ERROR = 1.4826, 1.2533
_CAST_KEY = re.compile(r"(.+)\.(fprop|dgrad|wgrad)\.(\w+)")


def compare(run: Run, baseline: Run, limits: CourseLimits) -> dict[str, Any]:
    """Return the comparison as plain values, gaps and losses among them that are NaN or infinite.

    Args:
        run: the run.
        baseline: another one.
        limits: thresholds for a loss that leaves its course.

    Returns:
        ``run``: the baseline's name. ``steps``: the last common steps whose losses were compared, or None; from ``diverges_at``
        on where that is later. ``loss`` and ``baseline_loss``: their medians, or the last loss where it is not finite;
        ``loss_gap``: the difference, positive where the run is worse, infinite where one of the two is NaN or Inf, None where
        both are; ``loss_gap_error``: its standard error, from the losses' differences step by step, None beside an infinite gap.
        ``diverges_at``: the first step from which on the gap exceeds the noise until the end, None when it does not.
        ``has_fp8``: whether the baseline runs in FP8. ``baseline_leaves_at``: steps at which its loss spikes, rises for good or
        is no longer finite.
        ``nonfinite_at``: of the baseline and of the run the first step whose loss is NaN or Inf, None where all are finite.
        ``configuration``: ``{key: [baseline's value, run's value]}`` of what differs.
    """
    ours, theirs = _losses(run), _losses(baseline)
    common = sorted(ours.keys() & theirs.keys())
    since = _diverges_at(common, ours, theirs, limits)
    last = [step for step in common[-limits.gap_steps :] if since is None or step >= since]
    loss, baseline_loss = _level(last, ours), _level(last, theirs)
    gap, error = _gap(last, ours, theirs)
    ours_in_force, theirs_in_force = configuration(run), configuration(baseline)
    return {
        "run": baseline.name,
        "steps": [last[0], last[-1]] if last else None,
        "loss": loss,
        "baseline_loss": baseline_loss,
        "loss_gap": gap,
        "loss_gap_error": error,
        "diverges_at": since,
        "has_fp8": has_fp8(baseline),
        "baseline_leaves_at": departures(*read_losses(baseline), limits),
        "nonfinite_at": [next((s for s in sorted(of) if not math.isfinite(of[s])), None) for of in (theirs, ours)],
        "configuration": {
            key: [theirs_in_force.get(key), ours_in_force.get(key)]
            for key in dict.fromkeys([*ours_in_force, *theirs_in_force])
            if ours_in_force.get(key) != theirs_in_force.get(key)
        },
    }


def gap_words(
    comparison: Mapping[str, Any],
    names: tuple[str, str] = ("the first run", "the second run"),
    limits: Mapping[str, float] | None = None,
) -> str:
    """Return one line about the losses of a comparison, the baseline's first.

    Args:
        comparison: of :func:`compare`.
        names: of the baseline and of the run.
        limits: thresholds of F125 that were in force; None for its own.
    """
    if not comparison["steps"]:
        return "no step has a loss in both runs"
    first, last = comparison["steps"]
    over = f"median of steps {first} to {last}" if first != last else f"step {last}"
    what = f"{over}: {loss_text(comparison['baseline_loss'])} -> {loss_text(comparison['loss'])}, {_gap_text(comparison)}"
    errors = (limits or {}).get("min_gap_errors", CourseLimits.min_gap_errors)
    share = (limits or {}).get("min_gap_share", CourseLimits.min_gap_share)
    since, noise = comparison["diverges_at"], f"the noise ({errors:g} standard errors, or {share:.0%} of the loss)"
    if since is not None:
        what += f": beyond {noise} from step {since} on"
    elif comparison["loss_gap"] is not None:
        what += f": within {noise}"
    for step, whose in zip(comparison["nonfinite_at"], names, strict=True):
        what += f"; the loss of {whose} is NaN or Inf at step {step}" if step is not None else ""
    return what


def loss_text(loss: float | None) -> str:
    """Write a loss for people; NaN and Inf by name."""
    if loss is None:
        return "-"
    return f"{loss:.4g}" if math.isfinite(loss) else "NaN" if math.isnan(loss) else "Inf" if loss > 0 else "-Inf"


def _gap_text(comparison: Mapping[str, Any]) -> str:
    gap, error = comparison["loss_gap"], comparison["loss_gap_error"]
    if gap is None:
        return "both are NaN or Inf, so their gap is not defined"
    return f"gap {gap:.2g} +- {error:.1g}" if math.isfinite(gap) and error is not None else "infinite gap"


def without_nonfinite(comparison: Mapping[str, Any]) -> dict[str, Any]:
    """Return a comparison as strict JSON values: a number that is NaN or infinite is None."""
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in comparison.items()}


def _level(steps: Sequence[int], losses: Mapping[int, float]) -> float | None:
    """Return the median of losses, or the last one where it is NaN or infinite."""
    if not steps or not math.isfinite(losses[steps[-1]]):
        return losses[steps[-1]] if steps else None
    return median(losses[step] for step in steps if math.isfinite(losses[step]))


def _gap(steps: Sequence[int], ours: Mapping[int, float], theirs: Mapping[int, float]) -> tuple[float | None, float | None]:
    """Return how far the losses lie apart at the end, and the standard error."""
    if not steps:
        return None, None
    last = steps[-1]
    if not math.isfinite(ours[last]) or not math.isfinite(theirs[last]):
        gap = _difference(ours[last], theirs[last])
        return (None if math.isnan(gap) else gap), None
    known = [gap for gap in (_difference(ours[step], theirs[step]) for step in steps) if math.isfinite(gap)]
    _, error = gap_of(known)
    level, baseline_level = _level(steps, ours), _level(steps, theirs)
    assert level is not None and baseline_level is not None
    return level - baseline_level, error


def _difference(ours: float, theirs: float) -> float:
    """Return how much worse a loss is: infinite where one of the two is NaN or Inf, NaN where both are."""
    if math.isfinite(ours) and math.isfinite(theirs):
        return ours - theirs
    if not math.isfinite(ours) and not math.isfinite(theirs):
        return math.nan
    return math.inf if math.isfinite(theirs) else -math.inf


def gap_of(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median of differences and its standard error (by the median absolute deviation); None without any."""
    if not differences:
        return None, None
    middle = median(differences)
    spread = _DEVIATIONS * median(abs(d - middle) for d in differences)
    return middle, _MEDIANS_ERROR * spread / math.sqrt(len(differences))


def _is_gap(gap: float | None, error: float | None, loss: float, limits: CourseLimits) -> bool:
    """Return whether a gap lies beyond the noise, in either direction."""
    least = limits.min_gap_share * abs(loss)
    return gap is not None and error is not None and abs(gap) > max(limits.min_gap_errors * error, least)


def _diverges_at(
    common: Sequence[int], ours: Mapping[int, float], theirs: Mapping[int, float], limits: CourseLimits
) -> int | None:
    """Return the first step from which on the losses lie apart until the end.

    Where both are NaN or Inf nothing can be compared: the steps before decide.
    """
    gaps = {step: _difference(ours[step], theirs[step]) for step in common}
    steps = [step for step in common if not math.isnan(gaps[step])]
    if not steps:
        return None
    infinite = len(steps)
    while infinite and math.isinf(gaps[steps[infinite - 1]]):
        infinite -= 1
    finite = [step for step in steps[:infinite] if math.isfinite(gaps[step])]
    known = {step: gaps[step] for step in finite}
    since = _begin_of_gap(finite, known, theirs, limits)
    if infinite == len(steps):
        return since
    # A gap that was there when the NaN came, in its direction, is part of the divergence.
    is_one = since is not None and (known[finite[-1]] > 0) == (gaps[steps[-1]] > 0)
    return since if is_one else steps[infinite]


def _begin_of_gap(
    steps: Sequence[int], gaps: Mapping[int, float], theirs: Mapping[int, float], limits: CourseLimits
) -> int | None:
    """Return the first step from which on finite gaps lie beyond the noise until the end."""
    if not steps:
        return None
    since, num = None, limits.gap_steps
    for start in range(len(steps) - min(num, len(steps)), -1, -1):
        window = steps[start : start + num]
        gap, error = gap_of([gaps[step] for step in window])
        if not _is_gap(gap, error, median(theirs[step] for step in window), limits):
            break
        since = start
    if since is None:
        return _end_apart(steps, gaps, theirs, limits)
    return steps[_change(since, [gaps[step] for step in steps], num)]


def _change(since: int, gaps: Sequence[float], num: int) -> int:
    """Return where gaps change, given the first window of ``num`` steps whose median lies beyond the noise.

    Half of a window does for its median to move, so the window's first step lies up to half a window before the change. The place
    is the one that splits the gaps around it into two levels with the smallest sum of absolute deviations.
    """
    first, end = max(0, since - num // 2), min(len(gaps), since + num + num // 2)
    level = median(gaps[since : since + num])

    def deviation(place: int) -> float:
        before, after = gaps[first:place], gaps[place:end]
        return sum(abs(gap - median(part)) for part in (before, after) for gap in part)

    places = [
        place for place in range(max(first + 1, since), min(end, since + num)) if abs(median(gaps[first:place])) < abs(level) / 2
    ]
    return min(places, key=deviation, default=since)


def _end_apart(steps: Sequence[int], gaps: Mapping[int, float], theirs: Mapping[int, float], limits: CourseLimits) -> int | None:
    """Return the first of the last steps that lie apart on the same side, each far beyond the noise, too few for a window."""
    middle, _ = gap_of([gaps[step] for step in steps])
    assert middle is not None
    noise = _DEVIATIONS * median(abs(gaps[step] - middle) for step in steps)
    place, side = len(steps), gaps[steps[-1]] > middle
    while place:
        step = steps[place - 1]
        far = abs(gaps[step] - middle) > max(limits.min_apart_noise * noise, limits.min_apart_share * abs(theirs[step]))
        if not far or (gaps[step] > middle) != side:
            break
        place -= 1
    return steps[place] if limits.apart_steps <= len(steps) - place < len(steps) else None


def _losses(run: Run) -> dict[int, float]:
    return dict(zip(*read_losses(run), strict=True))


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
