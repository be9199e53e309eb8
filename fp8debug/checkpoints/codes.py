"""Codes of low-precision formats and their values: one table per format, derived from its facts in :mod:`fp8debug.formats`."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fp8debug.formats import FORMATS

Array = np.ndarray[Any, Any]


#: Formats of data by the type names of safetensors, those whose codes fill a byte or half of one.
OF_DTYPE = {f.safetensors_dtype: f.name for f in FORMATS.values() if f.bits in (4, 8) and not f.scale_only}
#: Formats of scales alone, likewise.
_OF_SCALE_DTYPE = {f.safetensors_dtype: f.name for f in FORMATS.values() if f.scale_only}
_FLOATS = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}


@cache
def table(name: str) -> Array:
    """Return the value of each code of a format, FP32 ``[2^bits]``; NaN and Inf where a code means them."""
    fmt = FORMATS[name]
    return np.array([fmt.value(code) for code in range(1 << fmt.bits)], np.float32)


def unpacked(raw: Array) -> Array:
    """Return two codes for each byte, the low nibble first."""
    codes = np.empty(2 * raw.size, np.uint8)
    codes[0::2] = raw & 15
    codes[1::2] = raw >> 4
    return codes


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
    name = OF_DTYPE.get(dtype) or _OF_SCALE_DTYPE.get(dtype)
    if name is not None:
        return table(name)[unpacked(raw) if FORMATS[name].bits == 4 else raw]
    values = raw.view(_FLOATS[dtype])
    return values.astype(np.float32) if dtype == "F16" else values


def is_float(dtype: str) -> bool:
    """Return whether a type holds floating-point numbers of 16 bits or more."""
    return dtype == "BF16" or dtype in _FLOATS


def spacing(values: Array, name: str) -> Array:
    """Return the distance between neighbouring values of a format at each value, FP32."""
    fmt = FORMATS[name]
    _, exponent = np.frexp(np.where(values == 0, np.float32(2.0**-126), values))
    quantum: Array = np.ldexp(np.float32(1), np.maximum(exponent - 1, 1 - fmt.bias) - fmt.mantissa_bits)
    return quantum


def rounded(values: Array, name: str) -> Array:
    """Return values on a format's grid: clamped to its largest, then rounded to nearest even."""
    largest = np.float32(FORMATS[name].max)
    clamped = np.clip(values, -largest, largest)
    quantum = spacing(clamped, name)
    found: Array = np.rint(clamped / quantum) * quantum
    return found
