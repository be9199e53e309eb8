"""Detection of loss spikes: beyond what the losses before it did, so that a descent, a bad batch and earlier spikes do not count.

    excess = loss - median of the last half window
    noise  = 1.4826 median(abs(d - median(d))) / sqrt(2)          d: differences from step to step

One loss after the other, in bounded memory: for a run that is under way (dumps) and for one that was recorded (rule F125).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import sqrt
from statistics import median
from typing import NamedTuple


class Excess(NamedTuple):
    """A loss that spikes: the median of the steps before it, their noise, and the limit that it exceeded."""

    usual: float
    noise: float
    limit: float


@dataclass
class SpikeDetector:
    """Sees finite losses in order and tells which of them spike; the steps that follow one are part of it.

    The thresholds are those of rule F125, which says where they come from.

    Attributes:
        min_noise: least excess in noise.
        min_rise: least excess relative to the usual loss.
        min_ratio: least excess relative to the largest of the last ``memory`` steps.
        window: steps of which the noise is taken; the usual loss is the median of their later half.
        memory: steps whose excesses are remembered.
        min_history: steps before the first that is judged.
    """

    min_noise: float = 8.0
    min_rise: float = 0.1
    min_ratio: float = 2.0
    window: int = 16
    memory: int = 128
    min_history: int = 10
    _before: deque[float] = field(init=False, repr=False)
    _excesses: deque[float] = field(init=False, repr=False)
    _since: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._before = deque(maxlen=2 * self.window)
        self._excesses = deque(maxlen=self.memory)
        self._since = self.window  # steps since the last spike

    def see(self, loss: float) -> Excess | None:
        """Take the next loss, which is finite; return how it spikes, if it does."""
        before = list(self._before)
        self._before.append(loss)
        if len(before) < max(self.min_history, 2):
            self._excesses.append(0.0)
            return None
        usual = median(before[-(self.window // 2) :])
        excess, is_after = loss - usual, self._since <= self.window // 2
        least = max(self.min_rise * abs(usual), self.min_ratio * max(self._excesses))
        found = None
        if excess > least and loss > max(self._recent(before, usual)) and not is_after:
            noise = max(noise_of(before), noise_of(before[-self.window :]))
            limit = usual + max(least, self.min_noise * noise)
            found = Excess(usual, noise, limit) if loss > limit else None
        self._excesses.append(0.0 if is_after and found is None else excess)
        self._since = 1 if found else self._since + 1
        return found

    def _recent(self, before: list[float], usual: float) -> list[float]:
        """Return the last window of losses, without those of a run's first descent, from where the usual loss was not reached."""
        is_whole = len(before) < 2 * self.window
        descent = next(place for place, loss in enumerate(before) if loss <= usual) if is_whole else 0
        return before[max(descent, len(before) - self.window) :]


def noise_of(losses: Sequence[float]) -> float:
    """Return the standard deviation of the noise of at least two losses."""
    differences = [b - a for a, b in pairwise(losses)]
    drift = median(differences)
    return 1.4826 * median(abs(d - drift) for d in differences) / sqrt(2)
