"""Limits that the rules and the dashboard's colours share: where a rule's finding begins, a cell's "act" does.

A rule's thresholds are fields with these defaults, and its docstring has the source of each. They stand here because a page must
not wait until all rules are imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from fp8debug.formats import FORMATS, GRANULARITIES, SCALE_FORMATS
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.recipes import Cast

#: Share of elements that clip under a scale of their own tensor; and the number of elements and the headroom (amax over what the
#: scale holds) from which on it counts where the cast does not round its scales down (F104): values that were rounded to E4M3
#: before the scale was made lie up to 1/17 beyond it.
MAX_CLIPPED, MIN_CLIPPED_ELEMENTS, MIN_CLIPPED_HEADROOM = 0.001, 8, 1.07
#: The same under delayed and static scales, which lag behind growth (F101): a warning, an error, and the headroom.
WARN_CLIPPED_DELAYED, MAX_CLIPPED_DELAYED, MIN_CLIPPED_HEADROOM_DELAYED = 0.001, 0.01, 1.25
#: Share of nonzero elements that become zero: a warning, an error, and the number of elements (F102, F105, F106).
WARN_UNDERFLOW, MAX_UNDERFLOW, MIN_UNDERFLOW_ELEMENTS = 0.01, 0.05, 16
#: The same of a format of less than 8 bits (F105), and where no error was recorded (F128).
MAX_UNDERFLOW_LOW_BITS, MAX_UNDERFLOW_UNMEASURED = 0.6, 0.5
#: What makes an outlier (F105): log2 of amax over the median magnitude; amax over the RMS where no histogram was recorded.
MIN_SPREAD_LOG2, MIN_CREST = 10.0, 6.0
#: Headroom below which a scale is too old, and the SQNR below which that costs accuracy (F102).
MAX_STALE_HEADROOM, MAX_STALE_SQNR_DB = 2.0**-6, 20.0
#: Gain of an operand off 1 (F113), and what it is raised to by rounding (times a guard) and by scales that are rounded down.
MAX_GAIN_ERROR, ROUNDING_GUARD, MAX_GAIN_ERROR_FLOOR = 0.05, 1.1, 0.13
#: SQNR of an operand (F128): so far below the bound of its cast; and under delayed and static scales, which may clip and flush.
FLOOR_MARGIN_DB, DELAYED_SQNR_DB = 0.1, 23.5
#: Elements under one scale per row or tensor.
_ELEMENTS = 2**20
#: Smallest scaled amax of a block over the format's max, by scale rounding; an E4M3 scale is at most 1/17 too large.
SMALLEST_AMAX = {"pow2_ceil": 1 / 2, "pow2_amax_ceil": 1 / 4, "pow2_floor": 1 / 2, "pow2_even": 1 / 2}
#: Share of the energy that a bound leaves out: what E4M3's subnormals add.
_NEGLIGIBLE = 1e-4
#: -ln of the probability by which errors made at random lie beyond the bound of a tensor: 1e-9.
_CHANCE = 20.7


def gain_limit(cast: Cast | None, max_gain_error: float = MAX_GAIN_ERROR) -> float:
    """Return how far an operand's gain may be off 1: equal values round the same way, and a scale rounded down clips them."""
    if cast is None:
        return max_gain_error
    rounding = ROUNDING_GUARD * FORMATS[cast.format].max_relative_error
    return max(max_gain_error, rounding, MAX_GAIN_ERROR_FLOOR if cast.scale_rounding == "pow2_floor" else 0.0)


def operand_floor_db(cast: Cast, margin_db: float = FLOOR_MARGIN_DB, delayed_sqnr_db: float = DELAYED_SQNR_DB) -> float:
    """Return the SQNR, in dB, below which an operand is not the cast of its tensor."""
    return cast_floor_db(cast) - margin_db if cast.scaling == "current" else min(delayed_sqnr_db, cast_floor_db(cast))


def cast_floor_db(cast: Cast) -> float:
    """Return the lowest SQNR, in dB, that a correct cast under current scaling can give any tensor.

    Rounding to nearest with m mantissa bits changes a normal value by at most 1 / (2^(m + 1) + 1) of itself, rounding at random
    by 2^-m / (2 sqrt(1 + 2^-m)) in the root mean square, with up to 1 dB more by chance. A value in the subnormals changes by
    at most half the smallest one, so that all others of a block add (n - 1) (s / 2)^2 to an amax of at least half the
    format's max: nothing in FP8, and what bounds FP4. A scale rounded down (``pow2_floor``, ``pow2_even``) clips a value that
    lies beyond max by up to the ratio of the two.
    """
    fmt = FORMATS[cast.format]
    rows, columns = GRANULARITIES[cast.granularity]
    others = rows * columns - 1 if rows and columns else _ELEMENTS
    smallest = SMALLEST_AMAX.get(cast.scale_rounding, 16 / 17) * fmt.max
    lost = others * (fmt.min_subnormal / 2 / smallest) ** 2
    chance = 1.0 if cast.rounding == "stochastic" else 0.0
    return -10 * math.log10(relative_error(cast) ** 2 + (lost if lost > _NEGLIGIBLE else 0.0)) - chance


def relative_error(cast: Cast) -> float:
    """Return what a normal value changes by, at most or, rounded at random, in the root mean square."""
    fmt, step = FORMATS[cast.format], 2.0 ** -FORMATS[cast.format].mantissa_bits
    rounding = step / (2 * math.sqrt(1 + step)) if cast.rounding == "stochastic" else fmt.max_relative_error
    largest = 2.0 ** (fmt.emax + 1) * (1 - step / 4 if cast.scale_rounding == "pow2_even" else 1)
    clipping = 1 - fmt.max / largest if cast.scale_rounding in ("pow2_floor", "pow2_even") else 0.0
    return max(rounding, clipping)


def judges_magnitudes(cast: Cast) -> bool:
    """Return whether an operand's limit depends on the magnitudes of its tensor (F128): below 8 bits under current scaling.

    A Hadamard transform makes other magnitudes, and E4M3 block scales with none over them may be subnormal and clip.
    """
    stored = SCALE_FORMATS[cast.scale_format]
    may_clip = stored is not None and not stored.scale_only and cast.tensor_scale == "none"
    return FORMATS[cast.format].bits < 8 and cast.scaling == "current" and not cast.hadamard and not may_clip


def highest_floor_db(cast: Cast) -> float:
    """Return the SQNR, in dB, above which no tensor's magnitudes put an operand below its limit: no value is subnormal."""
    return -20 * math.log10(relative_error(cast)) - FLOOR_MARGIN_DB


class Term:
    """A number of a row as SQL text: what is computed with it is text too, so that one formula serves rows in Python and in SQL.

    Args:
        text: SQL.
    """

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        """Return the SQL."""
        return self.text

    def __add__(self, other: Term) -> Term:
        """Return the SQL of a sum."""
        return Term(f"({self} + {other})")

    def __mul__(self, other: Term) -> Term:
        """Return the SQL of a product."""
        return Term(f"({self} * {other})")

    def __rmul__(self, other: float) -> Term:
        """Return the SQL of a multiple."""
        return Term(f"({other!r} * {self})")


Number = TypeVar("Number", float, Term)


class Functions(NamedTuple, Generic[Number]):
    """Smaller and larger of two numbers, and the root of one."""

    least: Callable[[Number, Number], Number]
    greatest: Callable[[Number, Number], Number]
    root: Callable[[Number], Number]


IN_PYTHON = Functions[float](min, max, math.sqrt)
IN_SQL = Functions[Term](
    lambda a, b: Term(f"least({a}, {b})"), lambda a, b: Term(f"greatest({a}, {b})"), lambda a: Term(f"sqrt({a})")
)


def squared_errors(cast: Cast, x: Number, scale_inv: Number, functions: Functions[Number]) -> tuple[Number, Number]:
    """Return the squared error by a correct cast of an element of magnitude x: at random its mean, to nearest the most; the most.

    The equations are those of ``rules.reading.bounds.tensor_floor_db``.

    Args:
        cast: the running cast.
        x: the magnitude.
        scale_inv: the largest scale.
        functions: of this kind of number.
    """
    fmt = FORMATS[cast.format]
    smallest, error = fmt.min_subnormal * scale_inv, relative_error(cast) * x
    normal, subnormal = error * error, (0.25 * smallest) * smallest
    if cast.rounding != "stochastic":
        most = functions.least(x * x, functions.greatest(normal, subnormal))
        return most, most
    spacing = functions.greatest(2.0**-fmt.mantissa_bits * x, smallest)
    return functions.greatest(normal, functions.least(smallest * x, subnormal)), spacing * spacing


def sum_of_errors(cast: Cast, mean: Number, variance: Number, largest: Number, functions: Functions[Number]) -> Number:
    """Return the most that squared errors sum to: rounded at random, but for one of 1e9 tensors (Bernstein's inequality).

    Args:
        cast: the running cast.
        mean: sum of the means of :func:`squared_errors`.
        variance: sum of the products of both.
        largest: the largest of the most.
        functions: of this kind of number.
    """
    if cast.rounding != "stochastic":
        return mean
    return mean + functions.root(2 * _CHANCE * variance) + (2 / 3 * _CHANCE) * largest


def below_tensor_floor_sql(cast: Cast) -> str:
    """Return SQL over ``sites`` of whether a row of a cast is farther from its tensor than its magnitudes let it be (F128).

    It is ``rules.reading.bounds.tensor_floor_db`` for the query engine, which has all rows: null without a histogram.
    """
    # The last bin has all beyond.
    x = Term(f"CASE WHEN i < {NUM_BINS} THEN least(pow(2.0, {FIRST_LOG2} + i), amax) ELSE amax END")
    mean, most = squared_errors(cast, x, Term("scale_inv_max"), IN_SQL)

    def of_bins(function: str, value: object) -> Term:
        return Term(f"list_{function}([{value} for count, i in log2_hist])")

    sums = of_bins("sum", f"count * {mean}"), of_bins("sum", f"count * {mean * most}")
    bound = sum_of_errors(cast, *sums, of_bins("max", f"CASE WHEN count > 0 THEN {most} ELSE 0 END"), IN_SQL)
    is_known = "sum_x2 > 0 AND isfinite(scale_inv_max)"
    return f"({is_known} AND {bound} > 0 AND {bound} < sum_x2 * pow(10, -(sqnr_db + {FLOOR_MARGIN_DB}) / 10))"
