"""Difference of a weight from its reference, and the single cause that explains it.

Notation as in :mod:`fp8debug.checkpoints.scan`. A weight whose ``refit`` reaches ``ideal`` has the right codes under wrong
scales: then the scales that would be right, s * factor, are compared with the stored ones of other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8debug.formats import FORMATS

Array = np.ndarray[Any, Any]

#: Tolerance of a scale's log2, at least: rounding moves the best factor of a block of 128x128 by less.
_NEAR_LOG2 = 0.05
#: Quartiles of the factors' log2 that are less apart have one factor: those of scales rounded to powers of two are 0.5 apart.
_NARROW_LOG2 = 0.25
#: Share of the blocks that must follow a pattern.
_MOST = 0.9


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A weight against its reference.

    Attributes:
        gain: sum(x y) / sum(x x); None where the reference is zero.
        cosine: of x and y.
        sqnr_db: of y; None where the reference is zero.
        refit_db: of y with the best factor for each block.
        own_db: of the reference's cast under the stored scales.
        ideal_db: of the reference's cast under scales made for it.
        far_rate: share of elements further from x than one code.
        differing_rate: share of elements whose code is not that of the cast under the stored scales.
        num_blocks: blocks compared.
        clipped_rate: share of the blocks whose scale is smaller than a power of two rounded down (OCP MX).
        num_bad_blocks: blocks more than 6 dB below the ideal cast, and below the cast under their own scale.
        worst_db: SQNR of the worst block.
        factor: the one factor of all blocks; None where they differ.
        pattern: whose scales the right ones are: inverse, transposed, shifted, reordered, rounded; None where none is.
        shift: rows and columns of blocks by which the scales are displaced.
    """

    gain: float | None
    cosine: float | None
    sqnr_db: float | None
    refit_db: float | None
    own_db: float | None
    ideal_db: float | None
    far_rate: float
    differing_rate: float
    num_blocks: int
    clipped_rate: float
    num_bad_blocks: int
    worst_db: float | None
    factor: float | None
    pattern: str | None
    shift: tuple[int, int] = (0, 0)


class Sums:
    """Accumulates a weight's sums by block.

    Args:
        number_format: of the codes.
    """

    NAMES = ("x2", "xy", "y2", "error2", "own2", "ideal2", "far", "differing", "compared")

    def __init__(self, number_format: str) -> None:
        self.number_format = number_format
        self._totals = dict.fromkeys(self.NAMES, 0.0)
        self._refit2, self._num_blocks, self._num_bad, self._worst = 0.0, 0, 0, math.inf
        self._num_clipped = 0
        fmt = FORMATS[number_format]
        #: A block's ideal scale over one that is rounded down to a power of two, at most.
        self._largest_ratio = 2.0 ** (math.floor(math.log2(fmt.max)) + 1) / fmt.max
        self._scales: list[Array] = []
        self._factors: list[Array] = []

    def add(self, partial: Mapping[str, Array], scales: Array, ideal: Array, *, keep: bool) -> None:
        """Add complete rows of blocks.

        Args:
            partial: sums by name, ``[block rows, block columns]``.
            scales: of these blocks.
            ideal: FP32 scales made for the reference, of the same blocks.
            keep: whether to keep the scales for the pattern.
        """
        is_small = ideal > 1.01 * self._largest_ratio * scales
        self._num_clipped += int((is_small & (partial["x2"] > 0)).sum())  # a block of zeros may have any scale
        for name in self.NAMES:
            self._totals[name] += float(partial[name].sum())
        x2, xy, y2 = partial["x2"], partial["xy"], partial["y2"]
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where((xy > 0) & (y2 > 0), xy / y2, np.nan)
            self._refit2 += float(np.where(np.isfinite(factor), x2 - factor * xy, x2).clip(min=0).sum())
            sqnr = np.where(x2 > 0, 10 * np.log10(x2 / partial["error2"]), np.inf)
            own, ideal = (np.where(x2 > 0, 10 * np.log10(x2 / partial[name]), np.inf) for name in ("own2", "ideal2"))
        self._num_blocks += x2.size
        self._num_bad += int(((sqnr < np.minimum(ideal, 60) - 6) & (sqnr < own - 1)).sum())
        self._worst = min(self._worst, float(sqnr.min(initial=math.inf)))
        if keep:
            self._scales.append(np.array(scales, np.float64))
            self._factors.append(factor)

    def result(self) -> Comparison:
        """Return the comparison."""
        total = self._totals
        x2, y2, compared = total["x2"], total["y2"], max(total["compared"], 1.0)
        factor, pattern, shift = self._pattern() if self._scales else (None, None, (0, 0))
        return Comparison(
            gain=total["xy"] / x2 if x2 else None,
            cosine=total["xy"] / math.sqrt(x2 * y2) if x2 and y2 else None,
            sqnr_db=_db(x2, total["error2"]),
            refit_db=_db(x2, self._refit2),
            own_db=_db(x2, total["own2"]),
            ideal_db=_db(x2, total["ideal2"]),
            far_rate=total["far"] / compared,
            differing_rate=total["differing"] / compared,
            num_blocks=self._num_blocks,
            clipped_rate=self._num_clipped / max(1, self._num_blocks),
            num_bad_blocks=self._num_bad,
            worst_db=self._worst if math.isfinite(self._worst) else None,
            factor=factor,
            pattern=pattern,
            shift=shift,
        )

    def _tolerance(self) -> float:
        """Return how far rounding may move the log2 of a block's best factor: three deviations of a mean over its elements."""
        x2, elements = self._totals["x2"], self._totals["compared"] / max(1, self._num_blocks)
        noise = math.sqrt(self._totals["ideal2"] / x2 / max(1.0, elements)) if x2 else 0.0
        return max(_NEAR_LOG2, min(0.25, 3 * noise / math.log(2)))

    def _pattern(self) -> tuple[float | None, str | None, tuple[int, int]]:
        stored, factors, near = np.concatenate(self._scales), np.concatenate(self._factors), self._tolerance()
        with np.errstate(divide="ignore", invalid="ignore"):
            has, needs = np.log2(stored), np.log2(stored * factors)
            change = needs - has
        good = np.isfinite(change)
        if good.sum() == 0:
            return None, None, (0, 0)
        middle = float(np.median(change[good]))
        if (np.abs(change[good] - middle) < near).mean() >= _MOST:
            return 2.0**middle, None, (0, 0)
        for name, other, shift in _patterns(has, needs):
            valid = np.isfinite(other) & good
            if valid.sum() >= max(4, good.sum() / 2) and (np.abs(needs - other)[valid] < near).mean() >= _MOST:
                return None, name, shift
        mantissa, _ = np.frexp(stored[good])
        is_pow2 = bool((mantissa == 0.5).all())
        if is_pow2 and bool((np.abs(change[good]) < 1 + near).mean() >= _MOST):
            low, high = np.quantile(change[good], (0.25, 0.75))
            if round(middle) and abs(middle - round(middle)) < near and high - low < _NARROW_LOG2:
                return 2.0 ** round(middle), None, (0, 0)
            return None, "rounded", (0, 0)
        return None, None, (0, 0)


def _patterns(has: Array, needs: Array) -> Iterator[tuple[str, Array, tuple[int, int]]]:
    """Yield (name, log2 of the scales that would be right under it, displacement)."""
    yield "inverse", -has, (0, 0)
    if has.shape[0] == has.shape[1]:
        yield "transposed", has.T, (0, 0)
    for rows in (0, 1, -1, 2, -2):
        for columns in (0, 1, -1, 2, -2):
            if (rows or columns) and abs(rows) < has.shape[0] and abs(columns) < has.shape[1]:
                yield "shifted", _displaced(has, rows, columns), (rows, columns)
    if np.isfinite(has).all() and np.isfinite(needs).all():
        order = np.argsort(needs, axis=None)
        sorted_has = np.empty(has.size)
        sorted_has[order] = np.sort(has, axis=None)
        yield "reordered", sorted_has.reshape(has.shape), (0, 0)


def _displaced(values: Array, rows: int, columns: int) -> Array:
    """Return at each block the value that lies that far below and to the right; NaN beyond the edge."""
    out = np.full(values.shape, np.nan)
    height, width = values.shape
    to = slice(max(0, -rows), min(height, height - rows)), slice(max(0, -columns), min(width, width - columns))
    of = slice(max(0, rows), min(height, height + rows)), slice(max(0, columns), min(width, width + columns))
    out[to] = values[of]
    return out


def _db(signal: float, error: float) -> float | None:
    if not signal > 0 or not math.isfinite(error):
        return None
    return math.inf if error <= 0 else 10 * math.log10(signal / error)


def is_wrong(against: Comparison, max_gain_error: float = 0.01) -> bool:
    """Return whether a weight is worse than its best cast, and than the cast under its own scales or off by a factor."""
    if against.sqnr_db is None or against.ideal_db is None or against.own_db is None:
        return False
    # Under scales far too small the cast clips as the weight does; there only the factor tells.
    is_off = against.gain is None or abs(against.gain - 1) > max_gain_error
    is_off = is_off and against.refit_db is not None and against.refit_db > against.sqnr_db + 3
    return against.sqnr_db < min(against.ideal_db, 60) - 1 and (is_off or against.sqnr_db < min(against.own_db, 60) - 1)


def fits(against: Comparison, max_loss_db: float = 1.5) -> bool:
    """Return whether the codes fit the reference once each block has the right factor."""
    if against.refit_db is None or against.ideal_db is None:
        return False
    is_better = against.sqnr_db is None or against.refit_db >= against.sqnr_db + 1  # else the factors explain nothing
    return is_better and against.refit_db >= min(against.ideal_db, 60) - max_loss_db


def is_rounded_twice(against: Comparison, min_loss_db: float = 1.0, max_loss_db: float = 8.0, max_far_rate: float = 0.05) -> bool:
    """Return whether a second rounding explains the error: every element within one code, no block far off."""
    if against.sqnr_db is None or against.own_db is None or against.ideal_db is None or (is_wrong(against) and fits(against)):
        return False
    lost = against.own_db - against.sqnr_db
    return min_loss_db <= lost <= max_loss_db and against.far_rate <= max_far_rate and abs((against.gain or 0.0) - 1) < 0.01


def explains(against: Comparison) -> bool:
    """Return whether wrong scales or a second rounding explain the error."""
    return (is_wrong(against) and fits(against)) or is_rounded_twice(against)
