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

from fp8debug.formats import FORMATS, SWIZZLE, SWIZZLED_COLUMNS, SWIZZLED_FOURS, SWIZZLED_LINES, SWIZZLED_ROWS

Array = np.ndarray[Any, Any]

#: Tolerance of a scale's log2, at least: rounding moves the best factor of a block of 128x128 by less.
_NEAR_LOG2 = 0.05
#: Share of an error beside the cast's own that a factor has to explain. No published basis.
_OF_EXCESS = 0.7
#: Cosine of a multiple with its reference, at least: a cast to FP4 has 0.99.
_MIN_COSINE = 0.9
#: By how much a multiple may fit worse than its best cast, with the best factors: powers of two, and values that they clip.
_FACTOR_LOSS_DB = 6.0
#: Share of turned neighbours up to which a weight is in the order of its reference: none by construction. Noise that costs 1 dB
#: turns 0.003 (measured: E4M3, Gaussian data).
_MAX_INVERSIONS = 1e-3
#: What factors gain by making blocks of other values small: such blocks have twice the square of x as their error, and x^2
#: without them. Factors of a weight that is in order change nothing but its scales.
_SHRINKING_DB = 6.0
#: Rounding at random, or twice in other blocks, turns some: it costs 3 dB (closed form: the mean of p (1 - p) is 1/6, and 1/12 of
#: rounding to nearest), and puts no element beyond one code. Noise of 2.5 dB puts 0.0025 there (measured).
_AT_RANDOM_DB, _MAX_FAR = 2.5, 1e-4
#: Elements whose order is looked at, of each part of a weight that is read at once.
_ORDERED = 1 << 16
#: Share of the blocks that must have one factor.
_MOST = 0.9
#: How much worse than under the best factor of each block a weight may be under the scales of a pattern: 32 elements in FP4 gain
#: 0.4 dB by a factor of their own (measured: Gaussian data, scales rounded down). No published basis.
_MAX_LOSS_DB = 1.0
#: What powers of two cost at most beside scales of the amax: rounding them down clips (computed: Gaussian data, blocks of 32).
_POW2_LOSS_DB = 4.0
#: Patterns that are less apart explain the weight alike: the first of them is named.
_SAME_LOSS_DB = 0.1


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A weight against its reference.

    Attributes:
        gain: sum(x y) / sum(x x); None where the reference is zero.
        cosine: of x and y.
        swapped_cosine: of x and y with the two codes of each byte exchanged; 0 where a byte holds one.
        sqnr_db: of y; None where the reference is zero.
        refit_db: of y with the best factor for each block.
        own_db: of the reference's cast under the stored scales.
        own_gain: of that cast.
        ideal_db: of the reference's cast under scales made for it.
        far_rate: share of elements further from x than one code.
        differing_rate: share of elements whose code is not that of the cast under the stored scales.
        num_damaged: elements further from x than one code, and not clipped by their scale.
        num_blocks: blocks compared.
        clipped_rate: share of the blocks whose scale is smaller than a power of two rounded down (OCP MX).
        num_bad_blocks: blocks more than 6 dB below the ideal cast, and below the cast under their own scale.
        rest_loss_db: SQNR that the other blocks lose beside the cast under the stored scales; None where that cast is exact.
        inversion_rate: share of the neighbours in order of size, of 16 elements of a row, whose order the weight turns; a cast,
            or a cast of a cast, turns none.
        worst_db: SQNR of the worst block.
        scale_ratio: median of the stored scales over those of the blocks' amax; None where none is positive.
        factor: the one factor of all blocks; None where they differ.
        is_pow2: whether all stored scales are powers of two.
        pattern: whose scales the right ones are: inverse, transposed, shifted, swizzled (stored so and read as they lie),
            unswizzled (the reverse), reordered, rounded; None where none is.
        shift: rows and columns of blocks by which the scales are displaced.
    """

    gain: float | None
    cosine: float | None
    swapped_cosine: float
    sqnr_db: float | None
    refit_db: float | None
    own_db: float | None
    own_gain: float | None
    ideal_db: float | None
    far_rate: float
    differing_rate: float
    num_damaged: int
    num_blocks: int
    clipped_rate: float
    num_bad_blocks: int
    rest_loss_db: float | None
    inversion_rate: float
    worst_db: float | None
    scale_ratio: float | None
    factor: float | None
    is_pow2: bool
    pattern: str | None
    shift: tuple[int, int] = (0, 0)


class Sums:
    """Accumulates a weight's sums by block.

    Args:
        number_format: of the codes.
    """

    NAMES = ("x2", "xy", "y2", "error2", "own2", "x_own", "x_swapped", "ideal2", "far", "differing", "damaged", "compared")

    def __init__(self, number_format: str) -> None:
        self._totals = dict.fromkeys(self.NAMES, 0.0)
        self._refit2, self._num_blocks, self._num_bad, self._worst = 0.0, 0, 0, math.inf
        self._num_clipped = 0
        self._rest_error2, self._rest_own2 = 0.0, 0.0
        self._num_inversions, self._num_pairs = 0, 0
        fmt = FORMATS[number_format]
        #: A block's ideal scale over one that is rounded down to a power of two, at most.
        self._largest_ratio = 2.0 ** (math.floor(math.log2(fmt.max)) + 1) / fmt.max
        self._scales: list[Array] = []
        self._factors: list[Array] = []
        self._ratios: list[Array] = []
        self._kept: list[tuple[Array, Array, Array]] = []

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
        for name, value in partial.items():
            self._totals[name] += float(value.sum())
        x2, xy, y2, made = partial["x2"], partial["xy"], partial["y2"], ideal
        with np.errstate(divide="ignore", invalid="ignore"):
            factor = np.where((xy > 0) & (y2 > 0), xy / y2, np.nan)
            self._refit2 += float(np.where(np.isfinite(factor), x2 - factor * xy, x2).clip(min=0).sum())
            sqnr = np.where(x2 > 0, 10 * np.log10(x2 / partial["error2"]), np.inf)
            own, ideal = (np.where(x2 > 0, 10 * np.log10(x2 / partial[name]), np.inf) for name in ("own2", "ideal2"))
        self._num_blocks += x2.size
        is_bad = (sqnr < np.minimum(ideal, 60) - 6) & (sqnr < own - 1)
        self._num_bad += int(is_bad.sum())
        self._rest_error2 += float(partial["error2"][~is_bad].sum())
        self._rest_own2 += float(partial["own2"][~is_bad].sum())
        self._worst = min(self._worst, float(sqnr.min(initial=math.inf)))
        if keep:
            self._scales.append(np.array(scales, np.float64))
            self._factors.append(factor)
            self._ratios.append((scales / made)[(scales > 0) & (x2 > 0)])
            self._kept.append((x2, xy, y2))

    def add_order(self, reference: Array, values: Array) -> None:
        """Count where values are in another order than their reference, among 16 neighbours of a row, in a sample of the rows.

        No layout has smaller blocks of a row, and in a block rounding to nearest keeps the order.

        Args:
            reference: rows of it.
            values: the same rows of the weight.
        """
        rows, columns = reference.shape
        some = slice(None, None, max(1, rows * columns // _ORDERED))
        x, y = (part[some, : columns // 16 * 16].reshape(-1, 16) for part in (reference, values))
        order = np.argsort(x, axis=1)
        rises = np.diff(np.take_along_axis(x, order, 1)) > 0
        self._num_pairs += int(rises.sum())
        self._num_inversions += int((rises & (np.diff(np.take_along_axis(y, order, 1)) < 0)).sum())

    def result(self) -> Comparison:
        """Return the comparison."""
        total = self._totals
        x2, y2, compared = total["x2"], total["y2"], max(total["compared"], 1.0)
        factor, pattern, shift = self._pattern() if self._scales else (None, None, (0, 0))
        return Comparison(
            gain=total["xy"] / x2 if x2 else None,
            cosine=total["xy"] / math.sqrt(x2 * y2) if x2 and y2 else None,
            swapped_cosine=total["x_swapped"] / math.sqrt(x2 * y2) if x2 and y2 else 0.0,
            sqnr_db=_db(x2, total["error2"]),
            refit_db=_db(x2, self._refit2),
            own_db=_db(x2, total["own2"]),
            own_gain=total["x_own"] / x2 if x2 else None,
            ideal_db=_db(x2, total["ideal2"]),
            far_rate=total["far"] / compared,
            differing_rate=total["differing"] / compared,
            num_damaged=int(total["damaged"]),
            num_blocks=self._num_blocks,
            clipped_rate=self._num_clipped / max(1, self._num_blocks),
            num_bad_blocks=self._num_bad,
            rest_loss_db=_db(self._rest_error2, self._rest_own2) if self._rest_own2 else None,
            inversion_rate=self._num_inversions / max(1, self._num_pairs),
            worst_db=self._worst if math.isfinite(self._worst) else None,
            scale_ratio=float(np.median(np.concatenate(self._ratios))) if any(one.size for one in self._ratios) else None,
            factor=factor,
            is_pow2=all(_are_pow2(scales) for scales in self._scales) and bool(self._scales),
            pattern=pattern,
            shift=shift,
        )

    def _tolerance(self) -> float:
        """Return how far rounding may move the log2 of a block's best factor: three deviations of a mean over its elements."""
        x2, elements = self._totals["x2"], self._totals["compared"] / max(1, self._num_blocks)
        noise = math.sqrt(self._totals["ideal2"] / x2 / max(1.0, elements)) if x2 else 0.0
        return max(_NEAR_LOG2, min(0.25, 3 * noise / math.log(2)))

    def _pattern(self) -> tuple[float | None, str | None, tuple[int, int]]:
        """Return the cause under whose scales the blocks fit the reference best, if nearly as well as under the best factors."""
        stored, factors = np.concatenate(self._scales), np.concatenate(self._factors)
        x2, xy, y2 = (np.concatenate(parts) for parts in zip(*self._kept, strict=True))
        with np.errstate(divide="ignore", invalid="ignore"):
            has, needs = np.log2(stored), np.log2(stored * factors)
            change = needs - has
        good = np.isfinite(change)
        if good.sum() == 0:
            return None, None, (0, 0)

        def loss_db(change_log2: Array) -> float:
            """Return by how much the blocks fit worse under such factors than under their best ones."""
            valid = np.isfinite(change_log2) & good
            if valid.sum() < max(4, good.sum() / 2):
                return math.inf
            factor = np.exp2(change_log2[valid])
            error = (x2[valid] - 2 * factor * xy[valid] + factor**2 * y2[valid]).sum()
            best = (x2[valid] - factors[valid] * xy[valid]).clip(min=0).sum()
            # Equal to FP32's rounding where both are exact.
            return float(10 * np.log10((error + 1e-6 * x2[valid].sum()) / (best + 1e-6 * x2[valid].sum())))

        middle, near = float(np.median(change[good])), self._tolerance()
        whole = float(round(middle)) if _are_pow2(stored[good]) and abs(middle - round(middle)) < near else middle
        is_one = (np.abs(change[good] - middle) < near).mean() >= _MOST
        if abs(whole) > near / 2 and (is_one or loss_db(np.full_like(change, whole)) < _MAX_LOSS_DB):
            return 2.0**whole, None, (0, 0)
        # A factor near 1, nearer than rounding moves that of one block: of all of them it is known far better.
        common = float(np.log2(xy[good].sum() / y2[good].sum()))
        least = loss_db(np.full_like(change, common))
        if least < min(_MAX_LOSS_DB, loss_db(np.zeros_like(change)) / 4):
            return 2.0**common, None, (0, 0)
        with np.errstate(invalid="ignore"):
            found = [(loss_db(other - has), name, shift) for name, other, shift in _patterns(has, needs)]
        least = min((loss for loss, _, _ in found), default=math.inf)
        for loss, name, shift in found:
            if loss < _MAX_LOSS_DB and loss < least + _SAME_LOSS_DB:
                return None, name, shift
        if loss_db(_in_order(has, needs) - has) < _MAX_LOSS_DB:  # which nearly any scales of the same sizes fit
            return None, "reordered", (0, 0)
        # Scales that were rounded after the cast belong to no powers of two.
        is_near = bool((np.abs(change[good]) < 1 + near).mean() >= _MOST)
        if _are_pow2(stored[good]) and is_near and loss_db(np.round(change)) > _MAX_LOSS_DB:
            return None, "rounded", (0, 0)
        return None, None, (0, 0)


def _are_pow2(scales: Array) -> bool:
    mantissa, _ = np.frexp(scales)
    return bool((mantissa == 0.5).all())


def _patterns(has: Array, needs: Array) -> Iterator[tuple[str, Array, tuple[int, int]]]:
    """Yield (name, log2 of the scales that would be right under it, displacement)."""
    yield "inverse", -has, (0, 0)
    if has.shape[0] == has.shape[1]:
        yield "transposed", has.T, (0, 0)
    for rows in (0, 1, -1, 2, -2):
        for columns in (0, 1, -1, 2, -2):
            if (rows or columns) and abs(rows) < has.shape[0] and abs(columns) < has.shape[1]:
                yield "shifted", _displaced(has, rows, columns), (rows, columns)
    if has.shape[0] >= SWIZZLED_ROWS and has.shape[1] % SWIZZLED_COLUMNS == 0:
        for name in ("swizzled", "unswizzled"):
            yield name, _retiled(has, is_swizzled=name == "swizzled"), (0, 0)


def _in_order(has: Array, needs: Array) -> Array:
    """Return the stored scales, the smallest where the smallest is needed; NaN where one is missing."""
    if not (np.isfinite(has).all() and np.isfinite(needs).all()):
        return np.full(has.shape, np.nan)
    found = np.empty(has.size)
    found[np.argsort(needs, axis=None)] = np.sort(has, axis=None)
    return found.reshape(has.shape)


def _retiled(values: Array, *, is_swizzled: bool) -> Array:
    """Return scales in the order in which they would lie if those stored were swizzled, or were to be; NaN in cut tiles.

    The tiles of 128x4 are those of :func:`fp8debug.checkpoints.layouts.base.unswizzled`.
    """
    out = np.full(values.shape, np.nan)
    rows, columns = values.shape[0] // SWIZZLED_ROWS * SWIZZLED_ROWS, values.shape[1]
    down, across = rows // SWIZZLED_ROWS, columns // SWIZZLED_COLUMNS
    if is_swizzled:
        tiles = values[:rows].reshape(down, across, *SWIZZLE).transpose(0, 3, 2, 1, 4)
    else:
        tiles = values[:rows].reshape(down, SWIZZLED_FOURS, SWIZZLED_LINES, across, SWIZZLED_COLUMNS).transpose(0, 3, 2, 1, 4)
    out[:rows] = tiles.reshape(rows, columns)
    return out


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


def gain_beside_cast(against: Comparison) -> float | None:
    """Return the factor of a weight beside its own cast, which has a gain too; None where one of both is not known."""
    return against.gain / against.own_gain if against.gain is not None and against.own_gain else None


def is_in_order(against: Comparison) -> bool:
    """Return whether the weight is a rising function of the reference: its cast, a cast of that, or of a multiple.

    Blocks that are far off may be too few to count there: then a factor has to explain a part of the error.
    """
    is_explained = against.num_bad_blocks == 0 or _of_excess(against) >= _OF_EXCESS / 2
    return is_explained and keeps_order(against)


def keeps_order(against: Comparison) -> bool:
    """Return whether neighbours in a row are in the order of the reference's, as under any scales."""
    return against.inversion_rate <= _MAX_INVERSIONS


def is_factor(against: Comparison, max_gain_error: float = 0.01) -> bool:
    """Return whether one factor of all elements explains what a weight loses beside its own cast."""
    gain = gain_beside_cast(against)
    if gain is None or abs(gain - 1) <= max_gain_error or (against.cosine or 0.0) < _MIN_COSINE:
        return False
    if against.refit_db is None or against.ideal_db is None or against.refit_db < min(against.ideal_db, 60) - _FACTOR_LOSS_DB:
        return False
    return _of_excess(against) >= _OF_EXCESS or (is_in_order(against) and against.differing_rate > _MAX_INVERSIONS)


def _of_excess(against: Comparison) -> float:
    """Return the share of the error beside the cast's own that a factor explains: (g - 1)^2 of the square of a weight g x."""
    gain = gain_beside_cast(against)
    if gain is None or against.sqnr_db is None or against.own_db is None:
        return 0.0
    excess = 10 ** (-against.sqnr_db / 10) - 10 ** (-against.own_db / 10)
    return (gain - 1) ** 2 / excess if excess > 0 else 0.0


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
    gained = math.inf if against.sqnr_db is None else against.refit_db - against.sqnr_db  # little, and factors explain nothing
    lost = min(against.ideal_db, 60) - against.refit_db
    if against.inversion_rate > _MAX_INVERSIONS and gained < _SHRINKING_DB:
        return False
    return (gained >= 1 and lost <= max_loss_db) or (against.is_pow2 and gained >= 3 and lost <= max_loss_db + _POW2_LOSS_DB)


def is_rounded_twice(against: Comparison, min_loss_db: float = 1.0, max_loss_db: float = 8.0, max_far_rate: float = 0.05) -> bool:
    """Return whether a second rounding explains the error: every element within one code, no block far off."""
    if against.sqnr_db is None or against.own_db is None or against.ideal_db is None or (is_wrong(against) and fits(against)):
        return False
    lost = against.own_db - against.sqnr_db
    if against.inversion_rate > _MAX_INVERSIONS and (against.far_rate > _MAX_FAR or lost < _AT_RANDOM_DB):
        return False
    return min_loss_db <= lost <= max_loss_db and against.far_rate <= max_far_rate and abs((against.gain or 0.0) - 1) < 0.01


def explains(against: Comparison) -> bool:
    """Return whether wrong scales or a second rounding explain the error."""
    return is_factor(against) or (is_wrong(against) and fits(against)) or is_rounded_twice(against)
