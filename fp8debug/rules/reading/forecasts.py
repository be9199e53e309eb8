"""A statistic that moves steadily towards a limit: when it gets there, and how sure that is.

Theil-Sen: the slope is the median of the slopes of all pairs of points, which a third of wild points cannot move; its 95 %
interval comes from the ranks of those slopes (Sen 1968), and the trend is judged by Mann and Kendall's z.

What will go wrong if it goes on: forecasts of F101 and F105, as information, under the code of what they foresee.

A forecast is told only when the trend is significant, goes on in its later half, has come more than half of the way, and
meets the limit within as many steps as it was seen for; so a clean run has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.formats import FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2
from fp8debug.rules.base import Finding, Rule, Severity
from fp8debug.rules.reading.conditions import look
from fp8debug.rules.reading.model_structure import product_words
from fp8debug.rules.reading.prefilter import has_cast
from fp8debug.rules.reading.traces import IS_DELAYED, Trace, percent, sampled_steps, times, traces

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Of a normal distribution, for 95 %: its quantile of 0.975.
_Z95 = 1.96
#: The fewest points of which each half has a slope: two points have one.
_FEWEST = 4


@dataclass(frozen=True)
class ForecastLimits:
    """Thresholds of rules for a forecast; the manual page of F101 says where each comes from.

    Attributes:
        horizon: how far it looks ahead, as a share of the steps that the trend was seen for; 0 for none.
        min_points: points that make a trend, at least.
        max_points: the same, at most; the last ones count.
        min_z: Mann-Kendall z from which a trend is one.
        min_later_slope: slope of the later half over that of the whole.
        trend_warmup: first steps of a run, in which everything moves.
    """

    horizon: float = 1.0
    min_points: int = 8
    max_points: int = 60
    min_z: float = 3.0
    min_later_slope: float = 0.5
    trend_warmup: int = 8


@dataclass(frozen=True, kw_only=True)
class Trend:
    """A steady rise.

    Attributes:
        slope: per step.
        low: lower end of its 95 % interval; above 0.
        high: upper end.
        level: where the line stands at the last step.
        first: first step of the points.
        last: last step.
    """

    slope: float
    low: float
    high: float
    level: float
    first: int
    last: int

    def reaches(self, limit: float) -> Forecast:
        """Return when the line meets a limit above its level."""
        distance = limit - self.level
        return Forecast(steps=distance / self.slope, soonest=distance / self.high, latest=distance / self.low, trend=self)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Step at which a trend meets a limit.

    Attributes:
        steps: from the last step, by the slope.
        soonest: by the upper end of its interval.
        latest: by the lower end.
        trend: what was extrapolated.
    """

    steps: float
    soonest: float
    latest: float
    trend: Trend

    def within(self, horizon: float) -> bool:
        """Return whether it is met, even at the slowest, within a share of the steps that the trend was seen for."""
        return 0 < self.latest <= horizon * (self.trend.last - self.trend.first)

    @property
    def words(self) -> str:
        """For people, with the uncertainty."""
        step = self.trend.last + math.ceil(self.steps)
        return f"in about {self.steps:.0f} steps (95 % interval {self.soonest:.0f} to {self.latest:.0f}), near step {step}"


def rising(steps: Sequence[int], values: Sequence[float], limits: ForecastLimits) -> Trend | None:
    """Return the trend of values that rise steadily and still do in their later half; None where they do not."""
    steps, values = steps[-limits.max_points :], values[-limits.max_points :]
    quarter = len(values) // 4
    if len(values) < max(limits.min_points, _FEWEST) or median(values[-quarter:]) <= median(values[:quarter]):
        return None
    whole, later = _line(steps, values), _line(steps[len(steps) // 2 :], values[len(values) // 2 :])
    slope, low, high, z = whole
    if z < limits.min_z or low <= 0 or later[0] < limits.min_later_slope * slope:
        return None
    level = median(value + slope * (steps[-1] - step) for step, value in zip(steps, values, strict=True))
    return Trend(slope=slope, low=low, high=high, level=level, first=steps[0], last=steps[-1])


def _line(steps: Sequence[int], values: Sequence[float]) -> tuple[float, float, float, float]:
    """Return slope, its 95 % interval and z."""
    num = len(steps)
    slopes = sorted((values[j] - values[i]) / (steps[j] - steps[i]) for i in range(num) for j in range(i + 1, num))
    signs = sum((slope > 0) - (slope < 0) for slope in slopes)
    deviation = math.sqrt(num * (num - 1) * (2 * num + 5) / 18)
    reach = _Z95 * deviation
    low = slopes[max(0, math.floor((len(slopes) - reach) / 2))]
    high = slopes[min(len(slopes) - 1, math.ceil((len(slopes) + reach) / 2))]
    return median(slopes), low, high, (signs - (signs > 0) + (signs < 0)) / deviation


def clipping_ahead(rule: Rule, run: Run, limit: float, limits: ForecastLimits) -> Iterator[Finding]:
    """Yield the operands whose headroom will exceed ``limit``.

    A static scale stands still while its tensor grows. A delayed one follows, and lies behind by what the tensor grows
    within a step: it has a trend only while its headroom stays above 1.
    """
    if limits.horizon <= 0 or not has_cast(run, IS_DELAYED):
        return
    for trace in traces(run, look([f"{IS_DELAYED} AND headroom > 0 AND {_recent(run, limits)}"], ["headroom"])):
        rows = [row for row in trace.rows if row["step"] >= trace.start + limits.trend_warmup]
        steps, values = [row["step"] for row in rows], [math.log2(row["headroom"]) for row in rows]
        is_static = trace.cast is not None and trace.cast.scaling == "static"
        if not is_static and any(value <= 0 for value in values[len(values) // 2 :]):
            continue
        forecast = _ahead(rising(steps, values, limits), math.log2(limit), limits.horizon)
        if forecast is not None:
            message = (
                f"the {trace.gemm} {trace.tensor} grows towards the end of its scale: headroom"
                f" {times(2.0 ** values[0])} at step {steps[0]}, {times(2.0 ** values[-1])} at step {steps[-1]}, rising by"
                f" {_rate(forecast.trend)}; it clips {forecast.words}"
            )
            yield _finding(rule, trace, forecast, message, 2.0 ** values[-1], limit)


def underflow_ahead(
    rule: Rule,
    run: Run,
    rate: float,
    spread_log2: float,
    spread_of: Callable[[dict[str, Any]], float | None],
    limits: ForecastLimits,
) -> Iterator[Finding]:
    """Yield the inputs under one scale for the tensor of which the share ``rate`` will underflow, as their amax runs away.

    The distance is the number of binades from the smallest value that survives to the quantile ``rate`` of the nonzero
    elements. It must shrink while the amax moves away from the median, to ``spread_log2`` binades by then.
    """
    if limits.horizon <= 0 or not run.has("log2_hist") or not has_cast(run, "cast_name LIKE '% tensorwise %'"):
        return
    where = "gemm = 'fprop' AND tensor = 'input' AND cast_name LIKE '% tensorwise %' AND log2_hist IS NOT NULL"
    where += f" AND {_recent(run, limits)}"
    for trace in traces(run, look([where], ["amax", "scale_inv_max", "log2_hist"])):
        cast = trace.cast
        rows = [
            row for row in trace.rows if row["step"] >= trace.start + limits.trend_warmup and row["amax"] and row["scale_inv_max"]
        ]
        if cast is None or not rows:
            continue
        smallest = math.log2(FORMATS[cast.format].min_subnormal / 2)
        steps = [row["step"] for row in rows]
        left = [quantile_log2(row["log2_hist"], rate) - smallest - math.log2(row["scale_inv_max"]) for row in rows]
        spreads = [spread_of(row) or 0.0 for row in rows]
        forecast = _ahead(rising(steps, [-value for value in left], limits), 0.0, limits.horizon)
        away = rising(steps, spreads, limits)
        if forecast is None or away is None or away.level + away.slope * forecast.steps < spread_log2:
            continue
        message = (
            f"the amax of the {trace.gemm} {trace.tensor} runs away from its other values, {times(2.0 ** spreads[-1])} times"
            f" the median at step {steps[-1]}, by {_rate(forecast.trend)}: {percent(rate)} of the nonzero elements underflow"
            f" {forecast.words}{product_words(run, trace.module, steps[0], steps[-1])}"
        )
        yield _finding(rule, trace, forecast, message, spreads[-1], spread_log2, unit="log2")


def quantile_log2(histogram: Sequence[int], share: float) -> float:
    """Return log2 of the magnitude below which a share of the nonzero elements lies, interpolated within its binade."""
    wanted = share * sum(histogram)
    for place, count in enumerate(histogram):
        if count and wanted <= count:
            return FIRST_LOG2 + place + wanted / count
        wanted -= count
    return float(FIRST_LOG2 + len(histogram))


def _recent(run: Run, limits: ForecastLimits) -> str:
    """Return the condition of the sampled steps that a trend looks at."""
    return f"step >= {min(sampled_steps(run)[-limits.max_points :], default=0)}"


def _ahead(trend: Trend | None, limit: float, horizon: float) -> Forecast | None:
    if trend is None or trend.level >= limit:
        return None
    forecast = trend.reaches(limit)
    return forecast if forecast.within(horizon) else None


def _rate(trend: Trend) -> str:
    return f"{trend.slope:.2g} binades a step ({trend.low:.2g} to {trend.high:.2g})"


def _finding(
    rule: Rule, trace: Trace, forecast: Forecast, message: str, value: float, threshold: float, unit: str = "1"
) -> Finding:
    found = trace.finding(rule, Severity.INFO, message, value=value, threshold=threshold, unit=unit)
    return replace(found, name=f"{rule.name}-forecast", steps=(forecast.trend.first, forecast.trend.last))
