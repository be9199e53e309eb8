"""Quantize and every statistic once more, in NumPy and float64, written from the definitions of docs/numerics.md alone.

It shares nothing with the package but the fields of Cast: FP8 values come from a table of all codes, ties to even by the
code's last bit; block reductions are ``ufunc.reduceat``; FP32 appears only where the definitions say FP32 (scale,
x * scale, scale_inv). Sums are float64 over float64 products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from fp8debug.recipes import Cast

Array = np.ndarray[Any, np.dtype[Any]]

FLOAT32_MAX = np.finfo(np.float32).max
BLOCKS = {
    "tensorwise": (0, 0),
    "rowwise": (1, 0),
    "columnwise": (0, 1),
    "1x128": (1, 128),
    "128x1": (128, 1),
    "128x128": (128, 128),
    "1x32": (1, 32),
    "32x1": (32, 1),
}
#: name -> (exponent bits, mantissa bits, bias, max)
FORMATS = {"e4m3fn": (4, 3, 7, 448.0), "e5m2": (5, 2, 15, 57344.0)}
FIRST_LOG2, NUM_BINS = -45, 64


def values_of(number_format: str) -> Array:
    """Return the value of codes 0, 1, ... up to the largest finite one; float64, increasing."""
    _, mantissa_bits, bias, largest = FORMATS[number_format]
    values = []
    for code in range(128):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / 2.0**mantissa_bits
        values.append(fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))
    return np.array([v for v in values if v <= largest])


def min_normal(number_format: str) -> float:
    return float(2.0 ** (1 - FORMATS[number_format][2]))


def round_to_format(scaled: Array, number_format: str) -> Array:
    """Round finite values to nearest, ties to the even code, after clamping to +-max; signed float64."""
    table = values_of(number_format)
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), table[-1])
    upper = np.searchsorted(table, magnitude).clip(1, len(table) - 1)
    below, above = magnitude - table[upper - 1], table[upper] - magnitude
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    return np.asarray(np.copysign(np.where(take_upper, table[upper], table[upper - 1]), scaled))


def scale_of(amax: float, cast: Cast) -> tuple[np.float32, np.float32, bool]:
    """Return (scale, scale_inv, came from amax eps or the largest FP32) of one block."""
    largest = FORMATS[cast.format][3]
    if amax == 0:
        return np.float32(1), np.float32(1), False
    a = max(np.float32(amax), np.float32(cast.amax_eps))
    with np.errstate(over="ignore"):
        scale = np.float32(largest) / a
    lifted = bool(np.float32(amax) < np.float32(cast.amax_eps) or np.isinf(scale))
    scale = min(scale, FLOAT32_MAX)
    if cast.scale_rounding == "pow2_ceil":
        scale = np.float32(2.0 ** (math.frexp(float(scale))[1] - 1))
    elif cast.scale_rounding == "pow2_floor":
        log2_a = math.frexp(float(a))[1] - 1
        scale = np.float32(2.0 ** min({"e4m3fn": 8, "e5m2": 15}[cast.format] - log2_a, 127))
    if cast.scaling == "delayed":
        scale = np.float32(scale * np.float32(2.0**-cast.margin))
    return scale, np.float32(1) / scale, lifted


def measure(x: Array, cast: Cast, amax_history: Sequence[float] = ()) -> dict[str, Any]:
    """Return what fp8debug.measure must return, derived values as far as docs/numerics.md, 3, names them."""
    x = np.asarray(x, dtype=np.float32)
    x = x.reshape(-1, x.shape[-1]) if x.ndim and x.size else x.reshape(1, 1) if x.size else np.zeros((0, 1), np.float32)
    found: dict[str, Any] = {
        "numel": x.size,
        "num_zero": int((x == 0).sum()),
        "num_nan": int(np.isnan(x).sum()),
        "num_inf": int(np.isinf(x).sum()),
    }
    finite = np.isfinite(x)
    magnitude = np.where(finite, np.abs(x), np.float32(0))
    found["log2_hist"] = histogram(magnitude)
    if not x.size:
        empty = ("underflow", "subnormal", "saturated", "blocks", "zero_blocks", "eps_blocks")
        return found | {f"num_{name}": 0 for name in empty}

    starts = [np.arange(0, n, b or n) for n, b in zip(x.shape, BLOCKS[cast.granularity], strict=True)]
    owner = [np.searchsorted(s, np.arange(n), side="right") - 1 for s, n in zip(starts, x.shape, strict=True)]

    def over_blocks(ufunc: Any, values: Array) -> Array:
        return np.asarray(ufunc.reduceat(ufunc.reduceat(values, starts[0], axis=0), starts[1], axis=1))

    amax = over_blocks(np.maximum, magnitude)
    scale, scale_inv, lifted = scales(amax, cast, amax_history)
    spread = np.ix_(*owner)
    with np.errstate(over="ignore"):
        scaled = np.where(finite, x, np.float32(0)) * scale[spread]
    assert scaled.dtype == np.float32
    data = round_to_format(scaled, cast.format)
    largest = FORMATS[cast.format][3]
    x64 = np.where(finite, x, 0).astype(np.float64)
    y64 = data * scale_inv[spread].astype(np.float64)
    error = y64 - x64

    nonzero = magnitude > 0
    used = amax > 0
    found |= {
        "num_underflow": int((nonzero & (data == 0)).sum()),
        "num_subnormal": int(((data != 0) & (np.abs(data) < min_normal(cast.format))).sum()),
        "num_saturated": int((np.abs(scaled.astype(np.float64)) > largest * (1 + 2.0**-20)).sum()),
        "num_blocks": amax.size,
        "num_zero_blocks": int((~used).sum()),
        "num_eps_blocks": int((lifted & used).sum()),
        "amax": float(magnitude.max()),
        "amin": float(magnitude[nonzero].min()) if nonzero.any() else None,
        "sum_x": x64.sum(),
        "sum_x2": (x64 * x64).sum(),
        "sum_y2": (y64 * y64).sum(),
        "sum_xy": (x64 * y64).sum(),
        "sum_err": error.sum(),
        "sum_err2": (error * error).sum(),
        "max_abs_err": float(np.abs(error).max()),
    }
    signal, noise = over_blocks(np.add, x64 * x64)[used], over_blocks(np.add, error * error)[used]
    amin = over_blocks(np.minimum, np.where(nonzero, magnitude, np.float32(np.inf)))[used].astype(np.float64)
    inverse = scale_inv[used].astype(np.float64)
    if used.any():
        found |= {
            "scale_inv_min": inverse.min(),
            "scale_inv_max": inverse.max(),
            "scale_inv_sum_log2": np.log2(inverse).sum(),
            "scale_inv_mean_log2": np.log2(inverse).mean(),
            "worst_block_nmse": (noise / signal).max(),
            "max_block_range_log2": np.log2(amax[used].astype(np.float64) / amin).max(),
            "headroom": (amax[used].astype(np.float64) / inverse / largest).max(),
        }
    return found | derived(found)


def scales(amax: Array, cast: Cast, amax_history: Sequence[float]) -> tuple[Array, Array, Array]:
    """Return scale, scale_inv and whether it was lifted, for each block."""
    if cast.scaling == "static":
        one_inverse = np.float32(cast.scale_inv)
        one = np.float32(1) / one_inverse
        lifted = False
    elif cast.scaling == "delayed" and len(amax_history):
        seen = list(amax_history)[-cast.history :]
        one, one_inverse, _ = scale_of(seen[-1] if cast.algo == "most_recent" else max(seen), cast)
        one = np.float32(1) / one_inverse  # only scale_inv crosses the function boundary
        lifted = False
    else:
        per_block = [scale_of(float(a), cast) for a in amax.flat]
        columns = [np.array(c).reshape(amax.shape) for c in zip(*per_block, strict=True)]
        return columns[0], columns[1], columns[2]
    return np.full(amax.shape, one), np.full(amax.shape, one_inverse), np.full(amax.shape, lifted)


def derived(found: dict[str, Any]) -> dict[str, Any]:
    """Return rates, dB and ratios; None where the denominator is 0."""

    def over(a: float, b: float) -> float | None:
        return None if b == 0 else a / b

    n, x2, y2, xy, e2 = (found[k] for k in ("numel", "sum_x2", "sum_y2", "sum_xy", "sum_err2"))
    num_finite = n - found["num_nan"] - found["num_inf"]
    num_finite_nonzero = num_finite - found["num_zero"]
    nmse = over(e2, x2)
    return {
        "underflow_rate": over(found["num_underflow"], n),
        "underflow_nonzero_rate": over(found["num_underflow"], num_finite_nonzero),
        "overflow_rate": over(found["num_saturated"], n),
        "subnormal_rate": over(found["num_subnormal"], n),
        "zero_rate": over(found["num_zero"], n),
        "nonfinite_rate": over(found["num_nan"] + found["num_inf"], n),
        "mse": over(e2, num_finite),
        "nmse": nmse,
        "sqnr_db": None if nmse is None else math.inf if nmse == 0 else -10 * math.log10(nmse),
        "cosine": over(xy, math.sqrt(x2) * math.sqrt(y2)),
        "gain": over(xy, x2),
        "norm_ratio": None if x2 == 0 else math.sqrt(y2 / x2),
        "bias": over(found["sum_err"], num_finite),
    }


def histogram(magnitude: Array) -> list[int]:
    """Count nonzero values by floor(log2), clipped to the first and last bin."""
    counts = [0] * NUM_BINS
    for exponent, count in zip(*np.unique(np.frexp(magnitude[magnitude > 0])[1] - 1, return_counts=True), strict=True):
        counts[min(max(int(exponent) - FIRST_LOG2, 0), NUM_BINS - 1)] += int(count)
    return counts
