"""Closed-form bounds: the most that a correct cast, or a correct accumulator of limited width, can do to a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fp8debug.formats import FORMATS, SCALE_FORMATS, Format
from fp8debug.metrics.histogram import FIRST_LOG2
from fp8debug.metrics.limits import IN_PYTHON, squared_errors, sum_of_errors
from fp8debug.recipes import Cast

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Bits of a sum that Hopper's FP8 tensor cores keep (DeepSeek-V3, section 3.3.2), the shortest accumulator in use.
ACCUMULATOR_BITS = 14
#: The highest floor of any cast, rounded upwards: 20 log10(17), E4M3 with 3 mantissa bits.
HIGHEST_FLOOR_DB = 24.61


#: Names of F120's findings of codes that are read in a format other than their own, of those that a factor of two explains as
#: well, and of scales that are made for another one.
READ_AS_ANOTHER, READ_OR_SCALED, SCALED_FOR_ANOTHER = OF_ANOTHER_FORMAT = (
    "read-as-another-format",
    "read-as-another-or-off-by-two",
    "scaled-for-another-format",
)


#: SQL: the block scales are rounded to nearest (E4M3's, of NVFP4), so that the amax of every other block clips a little.
SCALES_ARE_ROUNDED = (
    "("
    + " OR ".join(f"cast_name LIKE '%scale={name}%'" for name, f in SCALE_FORMATS.items() if f is not None and not f.scale_only)
    + ")"
)


#: SQL: a format of less than 8 bits, in which small values underflow by design.
IS_BELOW_8_BITS = "(" + " OR ".join(f"cast_name LIKE '{f.name} %'" for f in FORMATS.values() if f.bits < 8) + ")"


def deficit_sql(*, per_bit_db: float = 6.0) -> str:
    """Return SQL of how many dB of SQNR a row's format lies below E4M3 by its mantissa bits, 6 dB each; 0 for E4M3.

    Rounding at random costs 3 dB more, twice the power of the noise.
    """
    most = max(f.mantissa_bits for f in FORMATS.values())
    below = [f for f in FORMATS.values() if not f.scale_only and f.mantissa_bits < most]
    cases = " ".join(f"WHEN cast_name LIKE '{f.name} %' THEN {per_bit_db * (most - f.mantissa_bits):g}" for f in below)
    return f"(CASE {cases} ELSE 0 END + CASE WHEN cast_name LIKE '% stochastic%' THEN 3 ELSE 0 END)"


def tensor_floor_db(cast: Cast, histogram: Sequence[int] | None, amax: float, scale_inv: float, energy: float) -> float:
    """Return the lowest SQNR, in dB, that a correct cast can give the tensor of these magnitudes.

    Each element counts as the largest of its bin, x. A normal value changes by at most its relative error r x, one in the
    subnormals by half the smallest value under the largest scale, s / 2, and rounding to nearest changes none by more than x:

        sum of min(x^2, max((r x)^2, (s / 2)^2))    at random: u = max((r x)^2, min(s x, (s / 2)^2))

    What is rounded at random has the mean u of its squared error, at most the square of a spacing, v, so that the sum is beyond
    sum u + sqrt(2 t sum u v) + 2 t max v / 3 with a probability of exp(-t) at most (Bernstein's inequality).

    That is far above ``limits.cast_floor_db`` where a block has many elements of few bits, which bounds every tensor. A Hadamard
    transform makes other magnitudes, and E4M3 block scales with none over them may be subnormal, so that they clip more: there,
    and without a histogram, it is -inf.

    Args:
        cast: the running cast.
        histogram: elements by floor(log2(abs x)).
        amax: the largest magnitude.
        scale_inv: the largest.
        energy: sum of the squares.
    """
    stored = SCALE_FORMATS[cast.scale_format]
    may_clip = stored is not None and not stored.scale_only and cast.tensor_scale == "none"
    if histogram is None or cast.hadamard or may_clip or not energy or not math.isfinite(scale_inv):
        return -math.inf
    lost = variance = largest = 0.0
    for place, count in enumerate(histogram):
        x = min(2.0 ** (FIRST_LOG2 + place + 1), amax) if place < len(histogram) - 1 else amax  # the last has all beyond
        mean, most = squared_errors(cast, x, scale_inv, IN_PYTHON)
        lost, variance, largest = lost + count * mean, variance + count * mean * most, max(largest, most if count else 0.0)
    lost = sum_of_errors(cast, lost, variance, largest, IN_PYTHON)
    return -10 * math.log10(lost / energy) if lost else -math.inf


def one_scale_db(fmt: Format, histogram: Sequence[int], amax: float) -> float:
    """Return the SQNR, in dB, that a format with one scale for the whole tensor would give it; with a scale per block no less.

    A normal value has the format's mean relative error. Below, the spacing is that of the smallest value: x gets the mean square
    error of its rounding, 1/12 of that spacing squared, or is lost with x^2, whichever is less.

    Args:
        fmt: the format.
        histogram: elements by floor(log2(abs x)).
        amax: the largest magnitude.
    """
    usual = fmt.gaussian_sqnr_db
    assert usual is not None, f"{fmt.name} is a format of scales"
    relative, spacing = 10 ** (-usual / 10), (fmt.min_subnormal * amax / fmt.max) ** 2 / 12
    signal = noise = 0.0
    for place, count in enumerate(histogram):
        # Mean square of values spread evenly over a binade.
        square = 7 / 3 * 4.0 ** (FIRST_LOG2 + place)
        signal += count * square
        noise += count * (relative * square if square >= (fmt.min_normal * amax / fmt.max) ** 2 else min(spacing, square))
    return 10 * math.log10(signal / noise) if noise else math.inf


def most_underflow(fmt: Format, histogram: Sequence[int], scale_inv: float) -> int:
    """Return the most nonzero elements that rounding to nearest can make zero under scales of at most ``scale_inv``.

    A value becomes zero up to half the smallest one of the format, times its scale; the bin that holds this limit counts as a
    whole, and the lowest bin, which holds all below it, always.
    """
    limit = fmt.min_subnormal / 2 * scale_inv
    return sum(histogram[: max(0, math.frexp(limit)[1] - 1 - FIRST_LOG2) + 1])


def accumulator_floor_db(length: int | None) -> float:
    """Return the lowest SQNR, in dB, that a sum of ``length`` products can have in an accumulator of 14 bits.

    Truncating each of ``length`` partial sums loses at most 2^-14 of the sum each: 12 dB at K = 4096 (measured there: 7 %
    of uniform operands, 23 dB), 33 dB at K = 384. Without a length, that of K = 16384.
    """
    return -20 * math.log10(min(1.0, (length or 16384) * 2.0**-ACCUMULATOR_BITS))


def contracted_length(run: Run, module: str, gemm: str) -> int | None:
    """Return how many products each element of a GEMM's result sums, K; None where it is not recorded.

    For wgrad it is the number of tokens: the elements of its input over the module's input features.
    """
    entry = next((m for m in run.modules if m["fqn"] == module), None)
    if entry is None or gemm != "wgrad":
        return None if entry is None else entry.get("in_features" if gemm == "fprop" else "out_features")
    if not entry.get("in_features"):
        return None
    query = (
        "SELECT max(numel) AS numel FROM sites WHERE module = ? AND gemm = 'wgrad' AND tensor = 'input' AND reference = 'operand'"
    )
    numel = run.sql(query, [module])["numel"][0].as_py()
    return numel // entry["in_features"] if numel else None
