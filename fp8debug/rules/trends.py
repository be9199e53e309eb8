"""A statistic that moves steadily towards a limit: when it gets there, and how sure that is.

Theil-Sen: the slope is the median of the slopes of all pairs of points, which a third of wild points cannot move; its 95 %
interval comes from the ranks of those slopes (Sen 1968), and the trend is judged by Mann and Kendall's z.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

#: Points that make a trend, at least and at most (the last ones count).
MIN_POINTS, MAX_POINTS = 8, 60
#: Mann-Kendall z from which a trend is one: 1 of 740 steady series has it by chance.
MIN_Z = 3.0
#: Of a normal distribution, for 95 %.
_Z95 = 1.96


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
    """When a limit is met.

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
        """Tell whether it is met, even at the slowest, within a share of the steps that the trend was seen for."""
        return 0 < self.latest <= horizon * (self.trend.last - self.trend.first)

    @property
    def words(self) -> str:
        """For people, with the uncertainty."""
        step = self.trend.last + math.ceil(self.steps)
        return f"in about {self.steps:.0f} steps (95 % interval {self.soonest:.0f} to {self.latest:.0f}), near step {step}"


def rising(steps: Sequence[int], values: Sequence[float]) -> Trend | None:
    """Return the trend of values that rise steadily and still do in their later half; None where they do not."""
    steps, values = steps[-MAX_POINTS:], values[-MAX_POINTS:]
    quarter = len(values) // 4
    if len(values) < MIN_POINTS or median(values[-quarter:]) <= median(values[:quarter]):
        return None
    whole, later = _line(steps, values), _line(steps[len(steps) // 2 :], values[len(values) // 2 :])
    slope, low, high, z = whole
    if z < MIN_Z or low <= 0 or later[0] < slope / 2:
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
