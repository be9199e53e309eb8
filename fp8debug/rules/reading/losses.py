"""Anomalies of a loss: spikes, a level that rises and stays, and the first value that is not finite.

A clean loss falls, wanders, and has bad batches: a step counts only beyond what those before it did (see ``spikes``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING

from fp8debug.loss_spikes import noise_of
from fp8debug.rules.base import round_stable
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.store.schema import OTHER_LOSS_CODE

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Of the loss of a model that trains against another one.
OTHER_LOSS = (
    "another model of this process trains by a loss of its own, as a critic or a discriminator does, so this one need not fall"
)


@dataclass(frozen=True, kw_only=True)
class Spike:
    """A loss far above those before it.

    Attributes:
        step: of the spike.
        loss: there.
        usual: median of the steps before it.
        noise: standard deviation of their noise.
        limit: what it exceeded.
    """

    step: int
    loss: float
    usual: float
    noise: float
    limit: float

    @property
    def size(self) -> str:
        """The loss and what it rose from, for people."""
        ratio = f" ({(self.loss - self.usual) / self.noise:.0f}x the normal variation)" if self.noise else ""
        return f"{self.loss:.4g}, up from {self.usual:.3g}{ratio}"


@dataclass(frozen=True, kw_only=True)
class Nonfinite:
    """Losses that are NaN or infinite.

    Attributes:
        step: of the first.
        loss: there.
        last: step of the last.
        recovers_at: the first step after the last whose loss is finite; None where there is none.
        num: how many there are.
    """

    step: int
    loss: float
    last: int
    recovers_at: int | None
    num: int

    @property
    def what(self) -> str:
        """One clause for people."""
        name = "NaN" if math.isnan(self.loss) else "Inf" if self.loss > 0 else "-Inf"
        if self.recovers_at is None and self.num == 1:
            return f"the loss is {name} at step {self.step}, the last one"
        if self.recovers_at is None:
            return f"the loss is {name} from step {self.step} on"
        where = f"at step {self.step}" if self.num == 1 else f"from step {self.step} on, last at step {self.last}"
        return f"the loss is {name} {where}, and finite again from step {self.recovers_at} on"


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A loss that rose and did not come back by the end of the run.

    Attributes:
        step: first step above the limit for good.
        best: the lowest level before.
        last: the level at the end.
    """

    step: int
    best: float
    last: float


def read_losses(run: Run) -> tuple[list[int], list[float]]:
    """Return the steps that have a loss, and the losses, means over the ranks; a loss may be NaN."""
    found = run.sql("SELECT step, loss FROM steps WHERE loss IS NOT NULL ORDER BY step").to_pydict()
    losses: list[float] = found["loss"]
    return found["step"], losses if len(run.ranks) == 1 else list(map(round_stable, losses))


def has_other_loss(run: Run) -> bool:
    """Return whether another model of the process trains by a loss of its own, as a critic beside an actor.

    What such a loss is of changes with the other model: that it rises is no divergence.
    """
    found: bool = run.memo("other loss", lambda: _has_other_loss(run))
    return found


def _has_other_loss(run: Run) -> bool:
    return bool(run.sql("SELECT step FROM events WHERE kind = 'note' AND code = ? LIMIT 1", [OTHER_LOSS_CODE]).num_rows)


def falls_on(run: Run, step: int, *, max_rise: float, min_history: int) -> bool:
    """Return whether the losses after a step tell that it did no harm: none rises above those up to it, and the last lie below.

    Args:
        run: the run.
        step: the step.
        max_rise: how far a later loss may lie above the last one up to the step, relative.
        min_history: losses that must follow, and whose median must lie below.
    """
    steps, losses = read_losses(run)
    before = [loss for at, loss in zip(steps, losses, strict=True) if at <= step]
    after = losses[len(before) :]
    if not before or len(after) < min_history or not all(map(math.isfinite, losses)):
        return False
    level = before[-1]
    return level > 0 and max(after) <= level * (1 + max_rise) and median(after[-min_history:]) < level


def first_nonfinite(losses: Sequence[float]) -> int | None:
    """Return the place of the first loss that is NaN or infinite."""
    return next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)


def nonfinite(steps: Sequence[int], losses: Sequence[float]) -> Nonfinite | None:
    """Return where losses are NaN or infinite; None where all are finite."""
    places = [place for place, loss in enumerate(losses) if not math.isfinite(loss)]
    if not places:
        return None
    after = steps[places[-1] + 1 :]
    return Nonfinite(
        step=steps[places[0]],
        loss=losses[places[0]],
        last=steps[places[-1]],
        recovers_at=after[0] if after else None,
        num=len(places),
    )


def spikes(steps: Sequence[int], losses: Sequence[float], limits: CourseLimits) -> Iterator[Spike]:
    """Yield the spikes of finite losses.

    Args:
        steps: the steps.
        losses: their losses, all finite.
        limits: thresholds.
    """
    detector = limits.spike_detector
    for step, loss in zip(steps, losses, strict=True):
        found = detector.see(loss)
        if found is not None:
            yield Spike(step=step, loss=loss, usual=found.usual, noise=found.noise, limit=found.limit)


def departures(steps: Sequence[int], losses: Sequence[float], limits: CourseLimits) -> list[int]:
    """Return the steps at which losses leave their course: spikes, a rise for good, the first that is NaN or Inf."""
    sick = first_nonfinite(losses)
    found = [spike.step for spike in spikes(steps[:sick], losses[:sick], limits)]
    rise = divergence(steps[:sick], losses[:sick], limits)
    return sorted({*found, *([rise.step] if rise else []), *([steps[sick]] if sick is not None else [])})


def divergence(steps: Sequence[int], losses: Sequence[float], limits: CourseLimits) -> Divergence | None:
    """Return where finite losses rose for good, by the median of ``level_steps`` losses; None where they did not."""
    num = limits.level_steps
    if len(losses) < 2 * num:
        return None
    levels = [median(losses[place : place + num]) for place in range(len(losses) - num + 1)]
    best = min(range(len(levels)), key=levels.__getitem__)
    noise = noise_of(losses[max(0, best - 2 * num) : best + num])
    least = max(limits.min_level_rise * abs(levels[best]), limits.min_level_noise * noise)
    above = len(levels)
    while above > best and levels[above - 1] > levels[best] + least:
        above -= 1
    if len(levels) - above < num:
        return None
    start = next(place for place in range(above, len(losses)) if losses[place] > levels[best] + least)
    while start > best and losses[start - 1] > levels[best] + limits.max_level_noise * noise:
        start -= 1
    if levels[-1] - levels[best] < limits.min_level_ratio * _largest_rise(levels[: max(best + 1, start - num)]):
        return None
    return Divergence(step=steps[start], best=levels[best], last=levels[-1])


def _largest_rise(levels: Sequence[float]) -> float:
    """Return how far levels rose at most above their lowest so far."""
    return max(level - lowest for level, lowest in zip(levels, accumulate(levels, min), strict=True))


#: Formats of 16 bits by the bits of their significands, the implicit one among them.
_SIGNIFICANDS = {8: "BF16", 11: "FP16"}


def loss_format(losses: Sequence[float], min_distinct: int, min_full: float) -> tuple[str, float] | None:
    """Return the 16-bit format on whose grid all losses lie, and the distance of two of its values at the median loss.

    A loss of FP32 needs no more than b bits of its 24 with a probability of 2^(b - 24), one of a format of b bits all b of them
    with 1/2. Losses that are whole numbers, or few, need fewer: no format is told of them.

    Args:
        losses: of a run; what is not finite, or 0, is left out.
        min_distinct: different losses needed.
        min_full: share of the losses that need all bits, at least.
    """
    known = [loss for loss in losses if math.isfinite(loss) and loss]
    if len(set(known)) < min_distinct:
        return None
    needed = [_significant_bits(loss) for loss in known]
    bits = max(needed)
    if bits not in _SIGNIFICANDS or needed.count(bits) < min_full * len(needed):
        return None
    return _SIGNIFICANDS[bits], 2.0 ** (math.frexp(median(map(abs, known)))[1] - bits)


def _significant_bits(x: float) -> int:
    """Return the bits from the first to the last one that is set in a number's significand."""
    numerator = abs(x).as_integer_ratio()[0]
    return (numerator // (numerator & -numerator)).bit_length()
