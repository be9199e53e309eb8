"""Gradients under a loss scale: divided by it once, twice or by the next one, clipped before that or after.

A gradient is the loss scale's multiple of what it should be, S g, and the program divides it by S. One that divides by S' = r S,
after the scale has grown, steps with g / r. At such a step log2 of the gradients' norm lies log2 r below its neighbours' mean;
without the fault it lies there by chance only.

Clipping to a norm of c multiplies g by c / |g|. A program that clips S g before it divides by S steps with a gradient of norm
c / S in place of c, and its clipping factor is c / (S |g|).

A program that divides twice steps with g / S, S^2 times smaller than what wgrad gave at every step. One that divides the gradient
of a sum by the number of its terms, T, steps with g, S T times smaller: T may be S, and then g tells the two apart.

A program that steps before it divides gives the optimizer S g, as wgrad gave it. Where the optimizer divides (a fused kernel that
gets the scale), weight.grad is S g too, but its first moment, or the update of SGD, is of g: smaller by S.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Where a program notes the scale: after it has grown, or before, so that the change shows one step later.
_OFFSETS = (0, -1)
#: Median absolute deviation of a normal variable over its standard deviation.
_MAD = 0.6745


@dataclass(frozen=True, kw_only=True)
class LateUnscaling:
    """Gradients that are short of their neighbours by the growth of the loss scale.

    Attributes:
        steps: at which they are.
        growth: of the scale at these steps, the median.
        factor: of the gradients' norm against the steps before and after, the geometric mean.
        what: where the norm comes from.
    """

    steps: tuple[int, ...]
    growth: float
    factor: float
    what: str


@dataclass(frozen=True, kw_only=True)
class UnscalingLimits:
    """Thresholds of ``late_unscaling``.

    Attributes:
        min_growths: steps at which the scale grows, with their neighbours known.
        max_deviation: of the mean shortfall from that growth, a share of it (both as log2).
        min_noises: of the mean shortfall, in standard errors of the norm's own variation.
        max_growth_error: of a growth from a power of two, as log2: a multiple that is known from samples is that inexact.
    """

    min_growths: int
    max_deviation: float
    min_noises: float
    max_growth_error: float


@dataclass(frozen=True, kw_only=True)
class ClippedWhileScaled:
    """Gradients that were clipped while they were multiplied by the loss scale.

    Attributes:
        steps: sampled steps, all of those that have a loss scale.
        scale: loss scale, the median.
        norm: of the gradients that the optimizer got, over the watched weights, the median.
        factor: what clipping multiplied them by, the median.
    """

    steps: tuple[int, ...]
    scale: float
    norm: float
    factor: float


@dataclass(frozen=True, kw_only=True)
class ClippingLimits:
    """Thresholds of ``clipped_while_scaled``.

    Attributes:
        max_factor: of clipping, at every step.
        max_norm: of the gradients that the optimizer gets, at every step.
        limits: least and greatest norm that programs clip to.
        min_steps: sampled steps that have a loss scale and known gradients.
    """

    max_factor: float
    max_norm: float
    limits: tuple[float, float]
    min_steps: int


@dataclass(frozen=True, kw_only=True)
class UnscaledTwice:
    """Gradients that were divided by the loss scale twice.

    Attributes:
        steps: sampled steps, all of those that have a loss scale.
        scale: loss scale, the median.
        norm: of the gradients that the optimizer got, over the watched weights, the median.
    """

    steps: tuple[int, ...]
    scale: float
    norm: float


@dataclass(frozen=True, kw_only=True)
class SteppedWhileScaled:
    """Gradients that were still multiplied by the loss scale when the optimizer stepped.

    Attributes:
        steps: sampled steps, all of those that have a loss scale.
        scale: loss scale, the median.
        multiple: of wgrad's gradients that the optimizer got, the median; the inverse of the loss scale where all is right.
    """

    steps: tuple[int, ...]
    scale: float
    multiple: float


def stepped_while_scaled(run: Run, min_scale: float, min_steps: int) -> SteppedWhileScaled | None:
    """Return the gradients that no one divided by the loss scale before the optimizer stepped; None where nothing shows it.

    Both limits lie halfway, as log2, between a gradient that was divided by the scale S and one that was not: 1 / sqrt(S).

    Args:
        run: the run.
        min_scale: loss scale from which these two are far apart.
        min_steps: sampled steps that have such a scale and known gradients.
    """
    scales = {step: scale for step, scale in _noted(run, "loss_scale").items() if scale >= min_scale}
    _, inverses = _sampled_gradients(run)
    steps = tuple(step for step in inverses if step in scales)
    if len(steps) < min_steps or any(inverses[step] > math.sqrt(scales[step]) for step in steps):
        return None
    used = _used_of_given(run)
    known = [used[step] * math.sqrt(scales[step]) for step in steps if step in used]
    if not known or median(known) < 1:
        return None
    scale = median(scales[step] for step in steps)
    return SteppedWhileScaled(steps=steps, scale=scale, multiple=1 / median(inverses[step] for step in steps))


def _used_of_given(run: Run) -> dict[int, float]:
    """Return by sampled step the RMS of the first moment, or of SGD's update, over that of the gradients."""
    query = (
        "SELECT step, CASE WHEN sum_moment2 IS NOT NULL THEN sum_moment2 / sum_grad2 ELSE sum_update2 / (lr * lr * sum_grad2) END"
        " AS used2 FROM updates WHERE sum_grad2 > 0 AND (sum_moment2 IS NOT NULL OR lr > 0) ORDER BY step, module"
    )
    found: dict[int, list[float]] = {}
    for row in run.sql(query).to_pylist():
        if _is_positive(row["used2"]):
            found.setdefault(row["step"], []).append(math.sqrt(row["used2"]))
    return {step: median(values) for step, values in found.items()}


@dataclass(frozen=True, kw_only=True)
class TwiceLimits:
    """Thresholds of ``unscaled_twice``.

    Attributes:
        max_norm: of the gradients that the optimizer gets, at every step.
        max_error: of the multiple of wgrad's gradients from the inverse of the scale's square, as log2, at every step.
        min_range: of that norm times the loss scale, the largest over the smallest: a norm that was clipped to is one.
        min_steps: sampled steps that have a loss scale above 1 and known gradients.
    """

    max_norm: float
    max_error: float
    min_range: float
    min_steps: int


def unscaled_twice(run: Run, limits: TwiceLimits) -> UnscaledTwice | None:
    """Return the gradients that were divided by the loss scale twice; None where nothing shows it.

    Args:
        run: the run.
        limits: thresholds.
    """
    scales = {step: scale for step, scale in _noted(run, "loss_scale").items() if scale > 1}
    norms, inverses = _sampled_gradients(run)
    steps = tuple(step for step in norms if step in scales and step in inverses)
    if len(steps) < limits.min_steps or not all(
        norms[step] <= limits.max_norm and abs(math.log2(inverses[step] / scales[step] ** 2)) <= limits.max_error
        for step in steps
    ):
        return None
    sizes = [norms[step] * scales[step] for step in steps]
    if max(sizes) < limits.min_range * min(sizes):
        return None
    scale, norm = median(scales[step] for step in steps), median(norms[step] for step in steps)
    return UnscaledTwice(steps=steps, scale=scale, norm=norm)


def clipped_while_scaled(run: Run, limits: ClippingLimits) -> ClippedWhileScaled | None:
    """Return the gradients that were clipped before they were divided by the loss scale; None where nothing shows it.

    Args:
        run: the run.
        limits: thresholds.
    """
    scales = _noted(run, "loss_scale")
    norms, inverses = _sampled_gradients(run)
    steps = tuple(step for step in norms if step in scales and step in inverses)
    factors = [scales[step] / inverses[step] for step in steps]
    if len(steps) < limits.min_steps or not all(
        factor <= limits.max_factor
        and norms[step] <= limits.max_norm
        and limits.limits[0] <= norms[step] * scales[step] <= limits.limits[1]
        for step, factor in zip(steps, factors, strict=True)
    ):
        return None
    scale, norm = median(scales[step] for step in steps), median(norms[step] for step in steps)
    return ClippedWhileScaled(steps=steps, scale=scale, norm=norm, factor=median(factors))


def late_unscaling(run: Run, limits: UnscalingLimits) -> LateUnscaling | None:
    """Return the gradients that are divided by a loss scale that has just grown; None where nothing shows it.

    Args:
        run: the run.
        limits: thresholds.
    """
    scales, norms = _noted(run, "loss_scale"), _noted(run, "grad_norm")
    given, multiples = _optimizers_gradients(run)
    series = [(scales, norms, "the gradient norm"), (scales or multiples, given, "the gradient that the optimizer gets")]
    for scale, norm, what in series:
        found = _shortfall(scale, norm, limits)
        if found is not None:
            steps, growth, factor = found
            return LateUnscaling(steps=steps, growth=growth, factor=factor, what=what)
    return None


def _noted(run: Run, column: str) -> dict[int, float]:
    """Return a column of ``steps`` by step, where it is a positive number."""
    rows = run.sql(f"SELECT step, {column} AS value FROM steps ORDER BY step").to_pylist()
    return {row["step"]: row["value"] for row in rows if _is_positive(row["value"])}


def has_gradients(run: Run) -> bool:
    """Return whether a loss scale can be told from what the optimizer got of the step's gradients."""
    return bool(_optimizers_gradients(run)[1])


def _optimizers_gradients(run: Run) -> tuple[dict[int, float], dict[int, float]]:
    """Return ``_sampled_gradients`` where sampled steps lie beside each other, which alone tell of a scale that grows."""
    has_neighbours = any(step + 1 == following for step, following in pairwise(run.sampled_steps))
    return _sampled_gradients(run) if has_neighbours else ({}, {})


def _sampled_gradients(run: Run) -> tuple[dict[int, float], dict[int, float]]:
    """Return by sampled step the norm of the gradients that the optimizer got, and the inverse of their multiple of wgrad's.

    Both are of samples of the elements: the multiple of a single pass is known to some percent.
    """
    query = (
        "SELECT u.step AS step, u.module AS module, u.sum_grad2 / u.num_sampled AS given2, u.numel AS numel,"
        " CASE WHEN u.sum_given_passes > 0 THEN u.sum_passes2 / u.sum_given_passes END AS inverse,"
        " g.sum_y2 / g.numel AS passes2 FROM updates u LEFT JOIN"
        " (SELECT step, module, max(sum_y2) AS sum_y2, max(numel) AS numel FROM raw WHERE actual AND tensor = 'grad_weight'"
        " AND reference = 'shadow' AND num_nan + num_inf = 0 AND num_tensors = 1 GROUP BY step, module) g"
        " ON g.step = u.step AND g.module = u.module"
        " WHERE u.num_sampled > 0 AND u.sum_grad2 > 0 ORDER BY u.step, u.module"
    )

    def read() -> tuple[dict[int, float], dict[int, float]]:
        norms, inverses = {}, {}
        for step, group in groupby(run.sql(query).to_pylist(), key=lambda row: row["step"]):
            rows = [row for row in group if math.isfinite(row["given2"])]
            known = [
                row["inverse"] or math.sqrt(row["passes2"] / row["given2"])
                for row in rows
                if _is_positive(row["inverse"]) or _is_positive(row["passes2"])
            ]
            if rows:
                norms[step] = math.sqrt(sum(row["given2"] * row["numel"] for row in rows))
            if known:
                inverses[step] = median(known)
        return norms, inverses

    return run.memo("gradients that the optimizer gets", read)


def _shortfall(
    scales: Mapping[int, float], norms: Mapping[int, float], limits: UnscalingLimits
) -> tuple[tuple[int, ...], float, float] | None:
    """Return steps, growth and factor of the gradients that are short by the growth of the scale."""
    dips = {
        step: math.log2(norm) - (math.log2(norms[step - 1]) + math.log2(norms[step + 1])) / 2
        for step, norm in norms.items()
        if step - 1 in norms and step + 1 in norms
    }
    growths = {
        step: math.log2(scale / scales[step - 1])
        for step, scale in scales.items()
        if step - 1 in scales
        and _is_growth(scale / scales[step - 1], limits.max_growth_error)
        and not _is_growth(scales.get(step + 1, scale) / scale, limits.max_growth_error)
    }
    for offset in _OFFSETS:
        shown = [step for step in growths if step + offset in dips]
        near = {step + offset + by for step in growths for by in (-1, 0, 1)}
        others = [dip for step, dip in dips.items() if step not in near]
        if min(len(shown), len(others)) < limits.min_growths:
            continue
        short = [dips[step + offset] for step in shown]
        mean, growth = _mean(short), _mean([growths[step] for step in shown])
        noise = max(median(abs(dip) for dip in others) / _MAD, median(abs(dip - mean) for dip in short) / _MAD)
        if abs(mean + growth) <= limits.max_deviation * growth and -mean > limits.min_noises * noise / math.sqrt(len(shown)):
            return tuple(sorted(step + offset for step in shown)), 2**growth, 2**mean
    return None


def _is_growth(ratio: float, max_error: float) -> bool:
    """Return whether a scale grows by a power of two, as scalers do; clipping gives other multiples."""
    power = math.log2(ratio)
    return round(power) >= 1 and abs(power - round(power)) < max_error


def _is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
