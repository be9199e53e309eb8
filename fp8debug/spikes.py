"""When a loss is a spike: measured in the noise of the losses before it, so that a descent and earlier spikes do not count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt
from statistics import median

#: Losses of which the noise is taken, the least that must be known, and how far a spike lies outside: in standard deviations
#: of the noise, and relative to the usual loss. No published basis; those of rule F125.
WINDOW, MIN_HISTORY, MIN_NOISE, MIN_RISE = 16, 10, 8.0, 0.1


def is_spike(before: Sequence[float], loss: float) -> bool:
    """Tell whether a loss spikes above those before it.

    Args:
        before: finite losses, oldest first; the last ``WINDOW`` count.
        loss: finite.
    """
    before = before[-WINDOW:]
    if len(before) < MIN_HISTORY:
        return False
    differences = [b - a for a, b in pairwise(before)]
    drift = median(differences)
    noise = 1.4826 * median(abs(d - drift) for d in differences) / sqrt(2)
    usual = median(before[-(WINDOW // 2) :])
    return loss > max(before) and loss > usual + max(MIN_NOISE * noise, MIN_RISE * abs(usual))
