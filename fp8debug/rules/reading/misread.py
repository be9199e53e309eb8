"""Codes of one format of 8 bits that are read as another: what each pair of formats does to a tensor, in closed form.

A code is a sign, an exponent field and a mantissa. Let t be a value over its block's scale, X the format that made its code and Y
the one that reads it, with the biases b_X and b_Y and an equal split of the bits: the value read is t 2^(b_X - b_Y), 2 t of FNUZ
codes read as the other kind and t / 2 the other way round, at the cosine of rounding. Across the splits:

    E4M3 read as E5M2: the exponent is 2 e + m2, m2 the first bit of the mantissa: the value is about t^2 2^(2 b_X - b_Y)
    E5M2 read as E4M3: the exponent is floor(e / 2):                               about sqrt(t) 2^(b_X / 2 - b_Y)

Codes that are a number in X and none in Y become NaN or Inf: E4M3's two largest binades in E5M2, the largest code of FNUZ (0x7f)
in E4M3, the largest binade of E5M2 FNUZ in E5M2, and -0 in FNUZ. t of the largest value is on record: headroom times the largest
value of Y.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from fp8debug.formats import FORMATS, Format
from fp8debug.metrics.histogram import FIRST_LOG2
from fp8debug.metrics.limits import SMALLEST_AMAX
from fp8debug.recipes import Cast

#: Formats of 8 bits that hold data.
DATA_FORMATS = tuple(f for f in FORMATS.values() if f.bits == 8 and not f.scale_only)
#: What a row needs for the judgement.
COLUMNS = (
    *("sqnr_db", "cosine", "gain", "norm_ratio", "headroom", "amax", "scale_inv_min", "scale_inv_max"),
    *("num_actual_nonfinite", "num_saturated", "log2_hist", "num_tensors"),
)
#: Values per binade of a histogram for which a misreading is computed.
_POINTS = 16
#: Relative difference of equal scales: FP32's rounding is 6e-8.
_SAME = 1e-6


@dataclass(frozen=True)
class PairLimits:
    """Thresholds of rules for codes in another format; the manual page of F120 says where each comes from.

    Attributes:
        max_ratio_error: relative, of the largest value over a format's largest.
        max_misread_db: SQNR above which nothing is misread.
        min_misread_cosine: least cosine across the splits.
        max_sums_ratio: of the gain to what a histogram predicts, or its inverse.
        max_growth: headroom of a delayed scale, or its inverse.
    """

    max_ratio_error: float = 0.002
    max_misread_db: float = 10.0
    min_misread_cosine: float = 0.1
    max_sums_ratio: float = 2.0
    max_growth: float = 16.0


class Misreading(NamedTuple):
    """A format whose codes are read as the declared one.

    Attributes:
        made: format of the codes.
        is_proven: whether no factor of two between the cast and its scale_inv leaves the same numbers.
    """

    made: Format
    is_proven: bool


def misreadings(row: Mapping[str, Any], cast: Cast, limits: PairLimits) -> tuple[Misreading, ...]:
    """Return the formats that explain an operand as their codes, read in the format of its cast.

    Args:
        row: with :data:`COLUMNS`.
        cast: the declared one.
        limits: thresholds.
    """
    read = FORMATS[cast.format]
    is_far = row["sqnr_db"] is not None and row["sqnr_db"] < limits.max_misread_db
    if (
        not is_far
        or read not in DATA_FORMATS
        or not row["headroom"]
        or not row["scale_inv_max"]
        or not row["gain"]
        or cast.hadamard
    ):
        return ()
    found = [made for made in DATA_FORMATS if made is not read and _fits(row, cast, made, read, limits)]
    return tuple(Misreading(made, _is_proven(row, cast, made, read)) for made in found)


@cache
def codes(made: Format, read: Format) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the finite values of a format from 0 upwards, and the values that another one reads from their codes."""
    finite = [(value, code) for code in range(2 ** (made.bits - 1)) if math.isfinite(value := made.value(code))]
    values, numbers = zip(*sorted(finite), strict=True)
    return values, tuple(read.value(code) for code in numbers)


def _as_read(x: float, made: Format, read: Format) -> float:
    """Return what a scaled magnitude is read as: rounded to the nearest value of the one format, its code read in the other."""
    values, others = codes(made, read)
    place = min(bisect_left(values, x), len(values) - 1)
    is_lower = place > 0 and x - values[place - 1] < values[place] - x
    return others[place - is_lower]


def _fits(row: Mapping[str, Any], cast: Cast, made: Format, read: Format, limits: PairLimits) -> bool:
    has_one_scale = row["scale_inv_max"] <= row["scale_inv_min"] * (1 + _SAME)
    return (
        _has_place(row, cast, made, read, limits, has_one_scale=has_one_scale)
        and _has_ends(row, made, read, limits)
        and _has_size(row, made, read, limits)
        and (made.mantissa_bits == read.mantissa_bits or not has_one_scale or _has_sums(row, made, read, limits))
    )


def _has_place(
    row: Mapping[str, Any], cast: Cast, made: Format, read: Format, limits: PairLimits, *, has_one_scale: bool
) -> bool:
    """Return whether the scales are made for the other format: of the worst block, and of the one with the largest scale."""
    least = most = 1.0
    if cast.scaling != "current":
        if not has_one_scale:
            return False
        least, most = 1 / limits.max_growth, limits.max_growth
    elif cast.scale_rounding != "none":
        least = SMALLEST_AMAX.get(cast.scale_rounding, 0.5)
        most = 2.0 ** (made.emax + 1) / made.max if cast.scale_rounding in ("pow2_floor", "pow2_even") else 1.0
    own = row["amax"] / row["scale_inv_max"]
    places = [value / made.max for value in (row["headroom"] * read.max, own)]
    return all(least * (1 - limits.max_ratio_error) <= place <= most * (1 + limits.max_ratio_error) for place in places)


def _has_ends(row: Mapping[str, Any], made: Format, read: Format, limits: PairLimits) -> bool:
    """Return whether NaN, Inf and the largest value are read where the codes up to the largest have them, and nowhere else."""
    values, others = codes(made, read)
    largest = min(row["headroom"] * read.max, made.max)
    top = _as_read(largest, made, read)
    below = [other for value, other in zip(values, others, strict=True) if value <= largest * (1 + made.max_relative_error)]
    num_lost, num_clipped = row["num_actual_nonfinite"] or 0, row["num_saturated"] or 0
    if not math.isfinite(top) and not num_lost:
        return False
    # FNUZ reads -0 as NaN, which only its own kind does not make.
    if num_lost and all(map(math.isfinite, below)) and (made.is_unsigned_zero or not read.is_unsigned_zero):
        return False
    if num_clipped and read.max not in below:
        return False
    is_beyond = row["headroom"] > 1 + limits.max_ratio_error
    if is_beyond and top == read.max and not num_clipped:
        return False
    # A cast that clips does so to all that lie beyond the largest value, whatever their block's scale, and makes no NaN.
    return not (is_beyond and num_clipped and not num_lost) or num_clipped < _num_beyond(row, read)


def _num_beyond(row: Mapping[str, Any], read: Format) -> int:
    """Return how many elements at least lie beyond what the largest scale holds."""
    beyond = read.max * row["scale_inv_max"]
    histogram: Sequence[int] = row["log2_hist"] or ()
    return sum(count for place, count in enumerate(histogram) if 2.0 ** (FIRST_LOG2 + place) >= beyond)


def _has_size(row: Mapping[str, Any], made: Format, read: Format, limits: PairLimits) -> bool:
    """Return whether gain and cosine are those of the pair, to what rounding can do to any tensor."""
    gain, cosine, error = row["gain"], row["cosine"] or 0.0, made.max_relative_error
    if made.mantissa_bits == read.mantissa_bits:
        factor = 2.0 ** (made.bias - read.bias)
        return bool(abs(gain / factor - 1) <= error and cosine >= math.sqrt(1 - error**2))
    return cosine >= limits.min_misread_cosine and (gain > 1) is (made.mantissa_bits > read.mantissa_bits)


def _has_sums(row: Mapping[str, Any], made: Format, read: Format, limits: PairLimits) -> bool:
    """Return whether the gain is near what the histogram gives under one scale, each binade filled evenly.

    Of the highest one all may be read as NaN, as they are where its elements are equal.
    """
    histogram: Sequence[int] | None = row["log2_hist"]
    if histogram is None:
        return True
    highest = max((place for place, count in enumerate(histogram) if count), default=0)
    most = [_gain_of(histogram[: highest + 1], row, made, read), _gain_of(histogram[:highest], row, made, read)]
    expected = [gain for gain in most if gain]
    return not expected or min(expected) / limits.max_sums_ratio <= row["gain"] <= max(expected) * limits.max_sums_ratio


def _gain_of(histogram: Sequence[int], row: Mapping[str, Any], made: Format, read: Format) -> float:
    """Return the gain of the elements in these bins that are read as numbers; 0 where there are none."""
    energy = product = 0.0
    for place, count in enumerate(histogram):
        low = 2.0 ** (FIRST_LOG2 + place)
        high = min(2 * low, row["amax"])
        for point in range(_POINTS) if count and high >= low else ():
            t = (low + (high - low) * (point + 0.5) / _POINTS) / row["scale_inv_max"]
            value = _as_read(t, made, read)
            if math.isfinite(value):
                energy, product = energy + count * t * t, product + count * t * value
    return product / energy if energy else 0.0


def _is_proven(row: Mapping[str, Any], cast: Cast, made: Format, read: Format) -> bool:
    """Return whether a factor of two between the data and their scale_inv cannot be the reason.

    It makes no NaN of -0, and of E4M3's values none below another largest value. Beyond that of E5M2 it makes Inf as the other
    kind's codes do.
    """
    has_own_place = cast.scaling == "current" and cast.scale_rounding == "none" and made.max != read.max
    has_nan = bool(row["num_actual_nonfinite"]) and (made.max != read.max or read.is_unsigned_zero)
    return made.mantissa_bits != read.mantissa_bits or has_own_place or has_nan
