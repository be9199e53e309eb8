"""Low-precision number formats and scale granularities as frozen tables of facts; a new one is one literal.

Sources: OCP OFP8 1.0 for E4M3 and E5M2; OCP Microscaling (MX) 1.0, section 5.3, for E2M1, E2M3, E3M2, E8M0 and the 1x32 block;
"8-bit Numerical Formats for Deep Neural Networks" (arXiv 2206.02915), which AMD's CDNA3 follows, for the fnuz formats;
DeepSeek-V3 (arXiv 2412.19437) section 3.3.2 for 1x128 and 128x128; NVIDIA's NVFP4 (arXiv 2509.25149) for 1x16 and 16x16.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple


@dataclass(frozen=True, kw_only=True)
class Format:
    """Facts about one format of 4 to 8 bits; values are plain floats.

    Attributes:
        name: spelling used in casts, files and on the command line.
        torch_dtype: name of the torch dtype of its codes; two to a byte for a format of 4 bits, empty where torch has none.
        safetensors_dtype: name of the type in safetensors; its files pack codes of less than 8 bits.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa.
        bias: exponent bias.
        max: largest finite value.
        has_inf: whether infinities have a code; without one an Inf becomes NaN.
        has_nan: whether NaN has a code. Where not, ``Quantized.data`` keeps NaN, since its dtype has one.
        is_unsigned_zero: the code of -0 is the only NaN, as in the fnuz formats.
        scale_only: a format for block scales, not for data: powers of two, no sign, no zero, no subnormals.
    """

    name: str
    torch_dtype: str
    safetensors_dtype: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool = False
    has_nan: bool = True
    is_unsigned_zero: bool = False
    scale_only: bool = False

    @property
    def bits(self) -> int:
        """Width of a code, its sign included."""
        return (0 if self.scale_only else 1) + self.exponent_bits + self.mantissa_bits

    @property
    def data_dtype(self) -> str:
        """Name of the torch dtype of ``Quantized.data``: one element to a byte, every value of the format exact in it.

        E2M1, E2M3 and E3M2 have at most 3 mantissa bits and values of 2^-4 to 28 in magnitude, all of them values of E4M3.
        """
        return self.torch_dtype if self.bits == 8 else "float8_e4m3fn"

    @property
    def emax(self) -> int:
        """floor(log2(max)): 8 for E4M3, 15 for E5M2, 2 for E2M1 (OCP MX 1.0, section 6.3)."""
        return int(self.max).bit_length() - 1

    @property
    def min_normal(self) -> float:
        """Smallest value with full precision; E8M0 spends no code on zero and starts one power lower."""
        return 2.0 ** ((0 if self.scale_only else 1) - self.bias)

    @property
    def min_subnormal(self) -> float:
        """Smallest nonzero value."""
        return self.min_normal * 2.0**-self.mantissa_bits

    @property
    def inf_code(self) -> int | None:
        """Code of +Inf; None where the format has none."""
        return ((1 << self.exponent_bits) - 1) << self.mantissa_bits if self.has_inf else None

    @property
    def nan_code(self) -> int | None:
        """Code of the NaN that a cast makes: quiet and without a sign bit, as ml_dtypes and torch write it; None without NaN."""
        if not self.has_nan:
            return None
        if self.is_unsigned_zero:
            return 1 << (self.bits - 1)
        if self.inf_code is not None:
            return self.inf_code | 1 << (self.mantissa_bits - 1)
        return (1 << (self.bits if self.scale_only else self.bits - 1)) - 1

    def value(self, code: int) -> float:
        """Return the number that a code stands for, NaN and Inf included.

        Args:
            code: 0 to 2^bits - 1.
        """
        sign = 0 if self.scale_only else code >> (self.bits - 1)
        magnitude = code if self.scale_only else code & ((1 << (self.bits - 1)) - 1)
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        if self.is_unsigned_zero and sign and not magnitude:
            return math.nan
        fraction = mantissa / (1 << self.mantissa_bits)
        is_subnormal = exponent == 0 and not self.scale_only
        found = math.ldexp(fraction, 1 - self.bias) if is_subnormal else math.ldexp(1 + fraction, exponent - self.bias)
        if found > self.max:
            found = math.inf if magnitude == self.inf_code else math.nan
        return -found if sign else found

    @property
    def gaussian_sqnr_db(self) -> float | None:
        """SQNR of Gaussian data under one scale per tensor, in dB, in closed form (numerics.md, 4); None for a format of scales.

        Of 2^16 elements, averaged over the scale's place within a binade, to a hundredth. With blocks see :func:`gaussian`.
        """
        return None if self.scale_only else round(gaussian(self, 2**16, "pow2_ceil").sqnr_db, 2)

    @property
    def max_relative_error(self) -> float:
        """Largest relative error of a normal value rounded to nearest: 1/17 for E4M3, 1/9 for E5M2, 1/5 for E2M1."""
        return 1 / (2.0 ** (self.mantissa_bits + 1) + 1)


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            name="e4m3fn",
            torch_dtype="float8_e4m3fn",
            safetensors_dtype="F8_E4M3",
            exponent_bits=4,
            mantissa_bits=3,
            bias=7,
            max=448.0,
        ),
        Format(
            name="e5m2",
            torch_dtype="float8_e5m2",
            safetensors_dtype="F8_E5M2",
            exponent_bits=5,
            mantissa_bits=2,
            bias=15,
            max=57344.0,
            has_inf=True,
        ),
        Format(
            name="e4m3fnuz",
            torch_dtype="float8_e4m3fnuz",
            safetensors_dtype="F8_E4M3FNUZ",
            exponent_bits=4,
            mantissa_bits=3,
            bias=8,
            max=240.0,
            is_unsigned_zero=True,
        ),
        Format(
            name="e5m2fnuz",
            torch_dtype="float8_e5m2fnuz",
            safetensors_dtype="F8_E5M2FNUZ",
            exponent_bits=5,
            mantissa_bits=2,
            bias=16,
            max=57344.0,
            is_unsigned_zero=True,
        ),
        Format(
            name="e2m3fn",
            torch_dtype="",
            safetensors_dtype="F6_E2M3",
            exponent_bits=2,
            mantissa_bits=3,
            bias=1,
            max=7.5,
            has_nan=False,
        ),
        Format(
            name="e3m2fn",
            torch_dtype="",
            safetensors_dtype="F6_E3M2",
            exponent_bits=3,
            mantissa_bits=2,
            bias=3,
            max=28.0,
            has_nan=False,
        ),
        Format(
            name="e2m1fn",
            torch_dtype="float4_e2m1fn_x2",
            safetensors_dtype="F4",
            exponent_bits=2,
            mantissa_bits=1,
            bias=1,
            max=6.0,
            has_nan=False,
        ),
        Format(
            name="e8m0",
            torch_dtype="float8_e8m0fnu",
            safetensors_dtype="F8_E8M0",
            exponent_bits=8,
            mantissa_bits=0,
            bias=127,
            max=2.0**127,
            scale_only=True,
        ),
    )
}

#: Formats by the name of their torch dtype without its prefix, those of one code to a byte.
OF_TORCH_DTYPE: dict[str, Format] = {f.torch_dtype: f for f in FORMATS.values() if f.bits == 8}


def format_named(text: str) -> Format | None:
    """Return the format that a configuration of another library names, e.g. ``e4m3`` or ``e4m3fn``; None where there is none."""
    return next((f for f in FORMATS.values() if text.lower() in (f.name, f.name.removesuffix("fn"))), None)


#: What a block's scale is stored in: FP32, or one of these formats.
SCALE_FORMATS: dict[str, Format | None] = {"fp32": None, "e8m0": FORMATS["e8m0"], "e4m3fn": FORMATS["e4m3fn"]}

#: Rows x columns of the region that shares a scale; None is the whole extent of the tensor.
GRANULARITIES: dict[str, tuple[int | None, int | None]] = {
    "tensorwise": (None, None),
    "rowwise": (1, None),
    "columnwise": (None, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "32x1": (32, 1),
    "16x16": (16, 16),
    "1x16": (1, 16),
    "16x1": (16, 1),
}

#: Tile of block scales that a tensor core of Blackwell reads: 32 lines of four rows of four, where row r is the (r // 32)th of
#: line r % 32 (cuBLAS documentation, "1D block scaling factors layout").
SWIZZLE = SWIZZLED_LINES, SWIZZLED_FOURS, SWIZZLED_COLUMNS = 32, 4, 4
SWIZZLED_ROWS = SWIZZLED_LINES * SWIZZLED_FOURS

#: The same granularity for the transposed tensor.
TRANSPOSED: dict[str, str] = {
    name: next(other for other, o in GRANULARITIES.items() if o == (block[1], block[0])) for name, block in GRANULARITIES.items()
}


def block_shape(granularity: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the block's (rows, columns) for a tensor of that size; at least 1 so that an empty tensor has a grid."""
    block_rows, block_columns = GRANULARITIES[granularity]
    return (
        max(1, rows if block_rows is None else block_rows),
        max(1, columns if block_columns is None else block_columns),
    )


class Gaussian(NamedTuple):
    """Expected losses of Gaussian data.

    Attributes:
        sqnr_db: signal to quantization noise ratio.
        underflow_rate: share of the elements that become 0.
        saturation_rate: share of the elements whose scaled magnitude exceeds the format's max.
    """

    sqnr_db: float
    underflow_rate: float
    saturation_rate: float


#: Points of the averages over a block's amax and over the scale's place between two values of its format.
_QUANTILES, _PHASES = 12, 48
#: Cells below this share of the amax add nothing to the error; but for the one of 0, which is the underflow.
_TINY = 2.0**-8
_SQRT2, _SQRT_2PI = math.sqrt(2), math.sqrt(2 * math.pi)


@cache
def gaussian(fmt: Format, elements: int, scale_rounding: str = "none", stochastic: bool = False) -> Gaussian:
    """Return what a cast with current scaling loses of Gaussian data, in closed form.

    The amax a of a block of n independent elements has the distribution function (2 Phi(a) - 1)^n; given a, the others are
    normal, cut off at a. Over each cell of the format the squared error is an integral of (x - v)^2, or of (x - low)(high - x)
    under stochastic rounding, against the normal density, which Phi and its density give. Averaged over quantiles of a, and over
    the scale's place: log-uniform between two powers of two, or between the values of a scale format.

    Args:
        fmt: of the data.
        elements: n, of one block.
        scale_rounding: ``none``, a power-of-two rounding of :class:`~fp8debug.recipes.Cast`, or a scale format that rounds to
            nearest, such as ``e4m3fn``.
        stochastic: rounding up or down at random in proportion, in place of to nearest.
    """
    noise = underflow = saturated = 0.0
    ratios = [_scaled_amax(fmt, scale_rounding, (i + 0.5) / _PHASES) for i in range(_PHASES if scale_rounding != "none" else 1)]
    for i in range(_QUANTILES):
        amax = _normal_quantile(((i + 0.5) / _QUANTILES) ** (1 / elements))
        inside = math.erf(amax / _SQRT2)
        for scaled_amax in ratios:
            sums = _cells(fmt, amax / scaled_amax, amax, stochastic)
            share = (elements - 1) / inside / elements
            top = amax / scaled_amax * _error_at(fmt, scaled_amax, stochastic)
            noise += sums[0] * share + top * top / elements
            underflow += sums[1] * share
            saturated += sums[2] * share + (scaled_amax > fmt.max * (1 + 2.0**-20)) / elements
    count = _QUANTILES * len(ratios)
    return Gaussian(-10 * math.log10(noise / count), underflow / count, saturated / count)


def _scaled_amax(fmt: Format, scale_rounding: str, phase: float) -> float:
    """Return a block's amax over its scale_inv where the exact scale lies at a place in [0, 1) of a binade, in log2."""
    match scale_rounding:
        case "none":
            return fmt.max
        case "pow2_ceil":
            return float(fmt.max * 2.0**-phase)
        case "pow2_floor":
            return float(2.0 ** (fmt.emax + phase))
        case "pow2_amax_ceil":
            return float(2.0 ** (fmt.emax + phase - 1))
        case "pow2_even":
            return float(2.0 ** (fmt.emax + phase - (2.0**phase >= 2 - 2.0 ** -(fmt.mantissa_bits + 1))))
    steps = 2.0 ** FORMATS[scale_rounding].mantissa_bits
    return float(fmt.max * 2.0**phase / (round(2.0**phase * steps) / steps))


@cache
def _magnitudes(fmt: Format) -> tuple[float, ...]:
    values = (fmt.value(code) for code in range(1 << (fmt.bits - 1)))
    return tuple(v for v in values if v <= fmt.max)


def _cells(fmt: Format, scale_inv: float, amax: float, stochastic: bool) -> tuple[float, float, float]:
    """Return squared error, share of zeros and share beyond max of both halves of a normal distribution within +-amax."""
    values = [v * scale_inv for v in _magnitudes(fmt)]
    noise = underflow = 0.0
    if stochastic:
        for low, high in zip(values, [*values[1:], math.inf], strict=True):
            if low and high < amax * _TINY:
                continue
            m0, m1, m2 = _moments(low, min(high, amax))
            noise += m2 - 2 * low * m1 + low * low * m0 if high == math.inf else (low + high) * m1 - m2 - low * high * m0
            underflow += m0 - m1 / high if low == 0 else 0.0
    else:
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(values)), math.inf]
        for value, low, high in zip(values, edges, edges[1:], strict=False):
            if value and high < amax * _TINY:
                continue
            m0, m1, m2 = _moments(low, min(high, amax))
            noise += m2 - 2 * value * m1 + value * value * m0
            underflow += m0 if value == 0 else 0.0
    return 2 * noise, 2 * underflow, 2 * _moments(values[-1] * (1 + 2.0**-20), amax)[0]


def _moments(low: float, high: float) -> tuple[float, float, float]:
    """Return the integrals of 1, x and x^2 times the normal density from low to high; 0 where high is not above low."""
    if high <= low:
        return 0.0, 0.0, 0.0
    at_low, at_high = (math.exp(-x * x / 2) / _SQRT_2PI for x in (low, high))
    m0 = (math.erf(high / _SQRT2) - math.erf(low / _SQRT2)) / 2
    return m0, at_low - at_high, m0 + low * at_low - high * at_high


def _error_at(fmt: Format, scaled: float, stochastic: bool) -> float:
    """Return the root mean square error of rounding one scaled magnitude."""
    values = _magnitudes(fmt)
    if scaled >= values[-1]:
        return scaled - values[-1]
    high = next(i for i, v in enumerate(values) if v > scaled)
    below, above = scaled - values[high - 1], values[high] - scaled
    return math.sqrt(below * above) if stochastic else min(below, above)


def _normal_quantile(share: float) -> float:
    """Return a with P(abs(x) <= a) = share, by bisection."""
    low, high = 0.0, 12.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.erf(middle / _SQRT2) < share else (low, middle)
    return (low + high) / 2
