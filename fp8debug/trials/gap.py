"""Gap of FP8's loss above BF16's, and the share of it that an arm closes, each with its noise.

    gap     g   = L_fp8 - L_bf16                    L: mean loss of the last steps of the window
    share   s   = (L_fp8 - L_arm) / (L_fp8 - L_bf16)

Arms of one repeat share seed and data, so the differences are taken within a repeat. Over R >= 3 repeats the band is Student's
95 % interval of the mean with R - 1 degrees of freedom; that of the share is the same of the residuals ``(L_fp8 - L_arm) -
s (L_fp8 - L_bf16)`` over the mean gap (ratio estimator, delta method). Fewer repeats have only their own steps: then the samples
are the means of up to eight blocks of each one's last steps, which cannot see how another seed would have gone.

A training diverged when any of its losses is NaN or infinite; a gap to it is infinite, and closed or not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

#: A gap below this share of the BF16 loss is nothing to close: DeepSeek-V3 holds a relative loss error below 0.25 % for
#: the randomness of training (arXiv 2412.19437, section 3.3).
MIN_GAP = 0.0025
#: Share from which a gap counts as closed (no published basis: four fifths).
CLOSED = 0.8
#: Repeats that make a band of their own (of two, Student's interval is thirteen standard errors wide), and the blocks of
#: steps that stand in for fewer.
MIN_REPEATS, NUM_BLOCKS = 3, 8

#: 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)

#: Losses of an arm's trainings by repeat.
Curves = Mapping[int, Sequence[float]]
_Samples = np.ndarray[Any, np.dtype[np.float64]]


class Band(NamedTuple):
    """A value with its 95 % interval, which is infinite where there is but one sample."""

    value: float
    low: float
    high: float

    def to_dict(self) -> dict[str, float | None]:
        """Return plain JSON values; an infinite bound is null."""
        return {name: value if math.isfinite(value) else None for name, value in self._asdict().items()}


def mean_band(samples: _Samples) -> Band:
    """Return the mean of samples with its interval."""
    return _band(float(samples.mean()), samples - samples.mean(), 1.0)


def ratio_band(numerators: _Samples, denominators: _Samples) -> Band:
    """Return the ratio of two means, whose samples belong together in pairs, with its interval."""
    below = float(denominators.mean())
    if below == 0:
        return Band(math.nan, -math.inf, math.inf)
    ratio = float(numerators.mean()) / below
    return _band(ratio, numerators - ratio * denominators, abs(below))


def _band(value: float, residuals: _Samples, scale: float) -> Band:
    count = len(residuals)
    if count < 2:
        return Band(value, -math.inf, math.inf)
    error = math.sqrt(float((residuals**2).sum()) / (count - 1) / count) / scale
    freedom = count - 1
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.65 / freedom
    return Band(value, value - t * error, value + t * error)


@dataclass(frozen=True, kw_only=True)
class ArmGap:
    """One arm beside BF16 and FP8.

    Attributes:
        name: of the arm.
        num_repeats: trainings of it that can be compared.
        num_diverged: how many of them had a loss that is not finite.
        loss: mean over the last steps of those that did not diverge; None without any.
        above_bf16: its loss over BF16's; None where some training diverged.
        share: of the gap that it closes; None where that means nothing: no gap, or something diverged.
        closed: ``yes``, ``partly``, ``no``; None when there is no gap.
    """

    name: str
    num_repeats: int
    num_diverged: int
    loss: float | None
    above_bf16: Band | None
    share: Band | None
    closed: str | None


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """Conclusions from the losses.

    Attributes:
        verdict: ``gap``, ``diverged`` (FP8 does, BF16 does not), ``nothing_to_close``, ``bf16_diverged`` or ``incomplete``
            (no repeat has both BF16 and FP8).
        gap: FP8 above BF16; None where it is infinite or unknown.
        bf16_loss: mean BF16 loss of the last steps.
        num_steps: steps that all the compared trainings have.
        num_last: of which so many at the end are compared.
        arms: by name.
    """

    verdict: str
    gap: Band | None
    bf16_loss: float | None
    num_steps: int
    num_last: int
    arms: dict[str, ArmGap] = field(default_factory=dict)


def assess(
    curves: Mapping[str, Curves], last: int | None = None, *, min_gap: float = MIN_GAP, closed: float = CLOSED
) -> Assessment:
    """Compare arms, among them ``bf16`` and ``fp8``.

    Args:
        curves: losses by arm and repeat.
        last: steps at the end of the window to compare; None is a quarter of it, at least ``NUM_BLOCKS``.
        min_gap: share of the BF16 loss below which the gap is nothing to close.
        closed: share of the gap from which an arm has closed it.
    """
    both = sorted(set(curves.get("bf16", {})) & set(curves.get("fp8", {})))
    whole = [len(c) for arm in curves.values() for c in arm.values() if c and _is_finite(c)]
    num_steps = min(whole, default=0)
    num_last = min(num_steps, last or max(NUM_BLOCKS, num_steps // 4))
    if not both or not num_steps:
        return Assessment(verdict="incomplete", gap=None, bf16_loss=None, num_steps=num_steps, num_last=num_last)

    def samples(name: str, repeats: Sequence[int]) -> _Samples:
        tails = [np.asarray(curves[name][r][num_steps - num_last : num_steps], dtype=np.float64) for r in repeats]
        parts = 1 if len(repeats) >= MIN_REPEATS else min(NUM_BLOCKS, num_last)
        return np.array([block.mean() for tail in tails for block in np.array_split(tail, parts)])

    bf16_diverged, fp8_diverged = (any(not _is_finite(curves[name][r]) for r in both) for name in ("bf16", "fp8"))
    gap = None
    loss = None if bf16_diverged else float(samples("bf16", both).mean())
    verdict = "bf16_diverged" if bf16_diverged else "diverged"
    if loss is not None and not fp8_diverged:
        gap = mean_band(samples("fp8", both) - samples("bf16", both))
        is_nothing = gap.low <= 0 or gap.value < min_gap * abs(loss)
        verdict = "nothing_to_close" if is_nothing else "gap"

    def judge(name: str) -> ArmGap:
        repeats = [r for r in both if r in curves[name]]
        healthy = [r for r in repeats if _is_finite(curves[name][r])]
        above = share = answer = None
        is_whole = bool(repeats) and healthy == repeats
        if is_whole and loss is not None:
            above = mean_band(samples(name, repeats) - samples("bf16", repeats))
        if repeats and verdict == "diverged":
            answer = "yes" if is_whole else "no"
        elif repeats and verdict == "gap":
            answer = "no"
            if is_whole:
                reference = samples("fp8", repeats)
                share = ratio_band(reference - samples(name, repeats), reference - samples("bf16", repeats))
                answer = "yes" if share.value >= closed else "partly" if share.low > 0 else "no"
        return ArmGap(
            name=name,
            num_repeats=len(repeats),
            num_diverged=len(repeats) - len(healthy),
            loss=float(samples(name, healthy).mean()) if healthy else None,
            above_bf16=above,
            share=share,
            closed=answer,
        )

    arms = {name: judge(name) for name in curves}
    return Assessment(verdict=verdict, gap=gap, bf16_loss=loss, num_steps=num_steps, num_last=num_last, arms=arms)


def _is_finite(curve: Sequence[float]) -> bool:
    return all(map(math.isfinite, curve))


def sentence(found: Assessment) -> str:
    """Say in one sentence what FP8 costs."""
    arms = found.arms
    if found.verdict == "incomplete":
        return "nothing can be compared: no repeat has both its BF16 and its FP8 training"
    if found.verdict == "bf16_diverged":
        return f"BF16 itself diverges in {arms['bf16'].num_diverged} of {arms['bf16'].num_repeats} repeats: not FP8's doing"
    if found.verdict == "diverged":
        fp8 = arms["fp8"]
        return f"FP8 diverges in {fp8.num_diverged} of {fp8.num_repeats} repeats, BF16 in none: the gap is infinite"
    assert found.gap is not None and found.bf16_loss is not None
    size = (
        f"{found.gap.value:+.4g} {interval(found.gap)}, {found.gap.value / max(abs(found.bf16_loss), 1e-30):+.2%} of BF16's loss"
    )
    if found.verdict == "gap":
        return f"FP8 trains {size}, above BF16"
    if found.gap.high < 0:
        return f"nothing to close: FP8 trains below BF16 ({size})"
    reason = "within the noise" if found.gap.low <= 0 else "below the gap that counts"
    return f"nothing to close: FP8 less BF16 is {size}, {reason}"


def interval(band: Band) -> str:
    """Write a band's interval for people."""
    return f"[{band.low:.4g}, {band.high:.4g}]" if math.isfinite(band.low) else "[one sample: no band]"
