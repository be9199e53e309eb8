"""Codes of low-precision formats and their values: one table per format, derived from its facts.

E4M3 and E5M2 take their facts from :mod:`fp8debug.formats`; E2M1 and AMD's fnuz variants are formats of files alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from fp8debug.formats import FORMATS

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True)
class CodeFormat:
    """Facts about the codes of a format.

    Attributes:
        name: spelling in messages.
        bits: of one code.
        exponent_bits: width of the exponent field.
        mantissa_bits: width of the stored mantissa.
        bias: exponent bias.
        max: largest finite value.
        has_inf: whether infinities have a code.
        is_unsigned_zero: the code of -0 is the one NaN, as in AMD's fnuz formats.
        gaussian_sqnr_db: SQNR of Gaussian data; None where no closed form is known.
    """

    name: str
    bits: int = 8
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_inf: bool = False
    is_unsigned_zero: bool = False
    gaussian_sqnr_db: float | None = None

    @property
    def num_codes(self) -> int:
        """Number of codes."""
        return 1 << self.bits


def _from_facts(name: str) -> CodeFormat:
    fmt = FORMATS[name]
    return CodeFormat(
        name=name,
        exponent_bits=fmt.exponent_bits,
        mantissa_bits=fmt.mantissa_bits,
        bias=fmt.bias,
        max=fmt.max,
        has_inf=fmt.has_inf,
        gaussian_sqnr_db=fmt.gaussian_sqnr_db,
    )


CODE_FORMATS: dict[str, CodeFormat] = {
    f.name: f
    for f in (
        _from_facts("e4m3fn"),
        _from_facts("e5m2"),
        CodeFormat(name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, max=240.0, is_unsigned_zero=True),
        CodeFormat(name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, max=57344.0, is_unsigned_zero=True),
        CodeFormat(name="e2m1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0),
    )
}

#: Formats by the type names of safetensors.
OF_DTYPE = {"F8_E4M3": "e4m3fn", "F8_E5M2": "e5m2", "F8_E4M3FNUZ": "e4m3fnuz", "F8_E5M2FNUZ": "e5m2fnuz", "F4": "e2m1"}
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


@cache
def table(name: str) -> Array:
    """Return the value of each code of a format, FP32 ``[num_codes]``; NaN and Inf where a code means them."""
    fmt = CODE_FORMATS[name]
    codes = np.arange(fmt.num_codes)
    half = fmt.num_codes // 2
    exponent, mantissa = (codes % half) >> fmt.mantissa_bits, codes & ((1 << fmt.mantissa_bits) - 1)
    fraction = mantissa / (1 << fmt.mantissa_bits)
    values = np.where(exponent == 0, np.ldexp(fraction, 1 - fmt.bias), np.ldexp(1 + fraction, exponent - fmt.bias))
    beyond = values > fmt.max
    values[beyond] = np.where(fmt.has_inf & (mantissa[beyond] == 0), np.inf, np.nan)
    values = np.where(codes >= half, -values, values)
    if fmt.is_unsigned_zero:
        values[half] = np.nan
    return values.astype(np.float32)


def unpacked(raw: Array) -> Array:
    """Return two codes for each byte, the low nibble first."""
    codes = np.empty(2 * raw.size, np.uint8)
    codes[0::2] = raw & 15
    codes[1::2] = raw >> 4
    return codes


def e8m0(raw: Array) -> Array:
    """Return the powers of two that E8M0 bytes stand for, FP32; 255 is NaN."""
    with np.errstate(over="ignore"):
        return np.where(raw == 255, np.nan, np.ldexp(np.float32(1), raw.astype(np.int32) - 127)).astype(np.float32)


def decoded(raw: Array, dtype: str) -> Array:
    """Return the numbers that bytes of a floating-point type stand for, FP32; FP64 stays.

    Args:
        raw: ``uint8``.
        dtype: as safetensors spells it: F64, F32, F16, BF16, an FP8 type or F8_E8M0.

    Raises:
        KeyError: a type without numbers.
    """
    if dtype == "BF16":
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E8M0":
        return e8m0(raw)
    if dtype in OF_DTYPE:
        return table(OF_DTYPE[dtype])[unpacked(raw) if dtype == "F4" else raw]
    values = raw.view(_FLOATS[dtype])
    return values.astype(np.float32) if dtype == "F16" else values


def is_float(dtype: str) -> bool:
    """Return whether a type holds floating-point numbers of 16 bits or more."""
    return dtype == "BF16" or dtype in _FLOATS


def spacing(values: Array, name: str) -> Array:
    """Return the distance between neighbouring values of a format at each value, FP32."""
    fmt = CODE_FORMATS[name]
    _, exponent = np.frexp(np.where(values == 0, np.float32(2.0**-126), values))
    quantum: Array = np.ldexp(np.float32(1), np.maximum(exponent - 1, 1 - fmt.bias) - fmt.mantissa_bits)
    return quantum


def rounded(values: Array, name: str) -> Array:
    """Return values on a format's grid: clamped to its largest, then rounded to nearest even."""
    largest = np.float32(CODE_FORMATS[name].max)
    clamped = np.clip(values, -largest, largest)
    quantum = spacing(clamped, name)
    found: Array = np.rint(clamped / quantum) * quantum
    return found
