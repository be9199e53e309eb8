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
    "16x16": (16, 16),
    "1x16": (1, 16),
    "16x1": (16, 1),
}
#: name -> (exponent bits, mantissa bits, bias, max)
FORMATS = {
    "e4m3fn": (4, 3, 7, 448.0),
    "e5m2": (5, 2, 15, 57344.0),
    "e4m3fnuz": (4, 3, 8, 240.0),
    "e5m2fnuz": (5, 2, 16, 57344.0),
    "e2m3fn": (2, 3, 1, 7.5),
    "e3m2fn": (3, 2, 3, 28.0),
    "e2m1fn": (2, 1, 1, 6.0),
}
#: floor(log2(max))
EMAX = {"e4m3fn": 8, "e5m2": 15, "e4m3fnuz": 7, "e5m2fnuz": 15, "e2m3fn": 2, "e3m2fn": 4, "e2m1fn": 2}
E4M3_MAX = np.float32(448)
SIGNS = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1])
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


def round_at_random(scaled: Array, number_format: str, noise: Array) -> Array:
    """Round finite values up where the distance to the value below, over the gap to the one above, exceeds the noise."""
    table = values_of(number_format)
    magnitude = np.minimum(np.abs(scaled.astype(np.float64)), table[-1])
    upper = np.searchsorted(table, magnitude, side="right").clip(1, len(table) - 1)
    low, high = table[upper - 1], table[upper]
    return np.asarray(np.copysign(np.where((magnitude - low) / (high - low) > noise, high, low), scaled))


def random_numbers(x: Array, seed: int) -> Array:
    """Return one number in [0, 1) for each element: Philox4x32-10 from its definition, its checksum in unbounded integers."""
    x = np.ascontiguousarray(x, np.float32)
    bits = np.where(np.isnan(x), np.int32(0x7FC00000), x.view(np.int32)).ravel().tolist()
    checksum = sum(b * (2 * i + 1) for i, b in enumerate(bits)) ^ seed
    low = np.uint64(0xFFFFFFFF)
    block = np.arange(-(-len(bits) // 4), dtype=np.uint64)
    c = [block & low, block >> np.uint64(32), np.zeros_like(block), np.zeros_like(block)]
    k = [checksum & 0xFFFFFFFF, checksum >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)  # factors below 2**32: the product is exact
        c = [(b >> np.uint64(32)) ^ c[1] ^ np.uint64(k[0]), b & low, (a >> np.uint64(32)) ^ c[3] ^ np.uint64(k[1]), a & low]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    numbers = np.stack(c, axis=-1).ravel() >> np.uint64(8)
    return np.asarray((numbers / 2.0**24)[: len(bits)].reshape(x.shape))


def hadamard_matrix() -> Array:
    """Return diag(signs) H / 4: entry (i, j) of H is -1 to the number of bits that i and j share."""
    return np.array([[SIGNS[i] * (-1) ** bin(i & j).count("1") / 4 for j in range(16)] for i in range(16)])


def transform(x: Array, cast: Cast, undo: bool = False) -> Array:
    """Transform whole groups of 16 along the blocks of a cast, float64."""
    matrix = hadamard_matrix().T if undo else hadamard_matrix()
    turned = x.astype(np.float64) if BLOCKS[cast.granularity][0] == 1 else x.astype(np.float64).T
    found = turned.copy()
    whole = turned.shape[1] // 16 * 16
    with np.errstate(invalid="ignore"):
        found[:, :whole] = (turned[:, :whole].reshape(-1, 16) @ matrix).reshape(len(turned), whole)
    return found if BLOCKS[cast.granularity][0] == 1 else found.T


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


def scale_of(amax: Array, cast: Cast) -> tuple[Array, Array, Array]:
    """Return (scale, scale_inv, came from amax eps or the largest FP32) of blocks."""
    amax = np.asarray(amax, np.float32)
    largest, one = np.float32(FORMATS[cast.format][3]), np.float32(1)
    a = np.maximum(amax, np.float32(cast.amax_eps))
    with np.errstate(over="ignore", divide="ignore"):
        scale = largest / a
    lifted = (amax < np.float32(cast.amax_eps)) | np.isinf(scale)
    scale = np.minimum(scale, FLOAT32_MAX)
    if cast.scale_rounding == "pow2_ceil":
        scale = (2.0 ** (np.frexp(scale)[1] - 1)).astype(np.float32)
    elif cast.scale_rounding != "none":
        mantissa, exponent = np.frexp(a.astype(np.float64))
        log2_a, fraction = exponent - 1, 2 * mantissa  # in [1, 2)
        if cast.scale_rounding == "pow2_amax_ceil":
            log2_a = log2_a + (fraction > 1)
        elif cast.scale_rounding == "pow2_even":
            log2_a = log2_a + (fraction >= 2 - 0.5 ** (FORMATS[cast.format][1] + 1))  # a tie rounds up to the even 2
        scale = (2.0 ** np.minimum(EMAX[cast.format] - log2_a, 127)).astype(np.float32)
    if cast.scaling == "delayed":
        scale = scale * np.float32(2.0**-cast.margin)
    is_zero = amax == 0
    scale = np.where(is_zero, one, scale)
    return scale, np.where(is_zero, one, one / scale), lifted & ~is_zero


def blocks(shape: tuple[int, ...], cast: Cast) -> tuple[Any, Any]:
    """Return what reduces a tensor over the blocks of a cast, and the index that repeats a grid over them."""
    starts = [np.arange(0, n, b or n) for n, b in zip(shape, BLOCKS[cast.granularity], strict=True)]
    owner = [np.searchsorted(s, np.arange(n), side="right") - 1 for s, n in zip(starts, shape, strict=True)]

    def over_blocks(ufunc: Any, values: Array) -> Array:
        return np.asarray(ufunc.reduceat(ufunc.reduceat(values, starts[0], axis=0), starts[1], axis=1))

    return over_blocks, np.ix_(*owner)


def quantize(x: Array, cast: Cast, amax_history: Sequence[float] = ()) -> tuple[Array, Array, Array, Array, Array, Array]:
    """Quantize FP32 ``[rows, columns]``, not empty.

    Returns:
        what the cast reads with 0 where that is not finite, where it is finite, the data in float64 (0 likewise), and for each
        block scale, scale_inv and whether it was lifted.
    """
    over_blocks, spread = blocks(x.shape, cast)
    raw = transform(x, cast).astype(np.float32) if cast.hadamard else x
    finite = np.isfinite(raw)
    read = np.where(finite, raw, np.float32(0))

    def data_of(scale: Array, noise: Array | None = None) -> Array:
        with np.errstate(over="ignore"):
            scaled = read * scale[spread]
        assert scaled.dtype == np.float32
        return round_to_format(scaled, cast.format) if noise is None else round_at_random(scaled, cast.format, noise)

    def error_of(scale: Array, scale_inv: Array) -> Array:
        error = np.abs(data_of(scale) * scale_inv[spread].astype(np.float64) - read)
        return np.asarray(over_blocks(np.add, error))

    amax = over_blocks(np.maximum, np.abs(read))
    scale, scale_inv, lifted = scales(amax, cast, amax_history, error_of)
    data = data_of(scale, random_numbers(raw, cast.seed) if cast.rounding == "stochastic" else None)
    return read, finite, data, scale, scale_inv, lifted


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

    over_blocks, spread = blocks(x.shape, cast)
    read, read_finite, data, scale, scale_inv, lifted = quantize(x, cast, amax_history)
    read_magnitude = np.abs(read)
    amax = over_blocks(np.maximum, read_magnitude)
    with np.errstate(over="ignore"):
        scaled = read * scale[spread]
    largest = FORMATS[cast.format][3]
    read_y = data * scale_inv[spread].astype(np.float64)
    read_error = read_y - read.astype(np.float64)
    y64 = np.where(read_finite, read_y, np.nan)
    y64 = transform(y64.astype(np.float32), cast, undo=True) if cast.hadamard else y64
    valid = finite & np.isfinite(y64)
    found["num_actual_nonfinite"] = int((finite & ~valid).sum())
    x64 = np.where(valid, x, 0).astype(np.float64)
    y64 = np.where(valid, y64, 0)
    error = y64 - x64

    nonzero, read_nonzero = magnitude > 0, read_magnitude > 0
    used = amax > 0
    given = used & (scale_inv > 0)
    stored = data * (scale_inv > 0)[spread]
    beyond = read_magnitude / np.where(given, scale_inv, np.inf).astype(np.float64)[spread] > largest * (1 + 2.0**-20)
    beyond = beyond if cast.scale_format == "e4m3fn" else np.abs(scaled.astype(np.float64)) > largest * (1 + 2.0**-20)
    found |= {
        "num_underflow": int((read_nonzero & (stored == 0)).sum()),
        "num_subnormal": int((read_nonzero & (stored != 0) & (np.abs(stored) < min_normal(cast.format))).sum()),
        "num_saturated": int((beyond & (np.abs(data) == largest)).sum()),
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
    read64 = read.astype(np.float64)
    signal, noise = over_blocks(np.add, read64 * read64)[used], over_blocks(np.add, read_error * read_error)[used]
    amin = over_blocks(np.minimum, np.where(read_nonzero, read_magnitude, np.float32(np.inf)))[used].astype(np.float64)
    inverse = scale_inv[used].astype(np.float64)
    positive = scale_inv[given].astype(np.float64)
    if used.any():
        found |= {
            "scale_inv_min": inverse.min(),
            "scale_inv_max": inverse.max(),
            "scale_inv_sum_log2": np.log2(positive).sum(),
            "scale_inv_mean_log2": np.log2(positive).sum() / used.sum(),
            "worst_block_nmse": (noise / signal).max(),
            "max_block_range_log2": np.log2(amax[used].astype(np.float64) / amin).max(),
            "headroom": (amax[given].astype(np.float64) / positive / largest).max() if given.any() else None,
        }
    return found | derived(found)


def two_levels(amax: Array, cast: Cast, factor: float = 1.0) -> tuple[Array, Array, Array]:
    """Return the same with E4M3 scales of blocks under FP32 scales of the tensor, or of each line along the blocks."""
    one, largest, bound = np.float32(1), np.float32(FORMATS[cast.format][3]), np.float32(256 if cast.four_over_six else 448)
    tops = {
        "none": np.zeros((1, 1), np.float32),
        "tensor": amax.max(keepdims=True),
        "row": amax.max(1 if BLOCKS[cast.granularity][0] == 1 else 0, keepdims=True),
    }[cast.tensor_scale]
    with np.errstate(over="ignore", divide="ignore"):
        g = np.where(tops == 0, one, np.minimum(bound * largest / tops, FLOAT32_MAX)).astype(np.float32)
        a = np.maximum(amax, np.float32(cast.amax_eps))
        exact = a / largest * g * np.float32(factor) if cast.four_over_six else a * (g * (one / largest))
        assert exact.dtype == np.float32
        d = round_to_format(np.minimum(exact, E4M3_MAX), "e4m3fn").astype(np.float32)
        scale_inv = np.where(amax == 0, one, d * (one / g)).astype(np.float32)
        scale = np.minimum(one / scale_inv, FLOAT32_MAX).astype(np.float32)
        tiny = np.isinf(largest / amax)
    return scale, scale_inv, (amax < np.float32(cast.amax_eps)) | tiny | (scale_inv == 0)


def scales(amax: Array, cast: Cast, amax_history: Sequence[float], error: Any) -> tuple[Array, Array, Array]:
    """Return scale, scale_inv and whether it was lifted, for each block; ``error`` of two of them is per block."""
    if cast.scale_format == "e4m3fn":
        six = two_levels(amax, cast)
        if not cast.four_over_six:
            return six
        four = two_levels(amax, cast, 1.5)
        pick = error(*four[:2]) < error(*six[:2])
        return np.where(pick, four[0], six[0]), np.where(pick, four[1], six[1]), np.where(pick, four[2], six[2])
    if cast.scaling == "static":
        one_inverse = np.array(cast.scale_inv, np.float32)
    elif cast.scaling == "delayed" and len(amax_history):
        seen = list(amax_history)[-cast.history :]
        one_inverse = scale_of(np.array(seen[-1] if cast.algo == "most_recent" else max(seen)), cast)[1]
    else:
        return scale_of(amax, cast)
    one = np.float32(1) / one_inverse  # only scale_inv crosses the function boundary
    return np.full(amax.shape, one), np.full(amax.shape, one_inverse), np.full(amax.shape, False)


def derived(found: dict[str, Any]) -> dict[str, Any]:
    """Return rates, dB and ratios; None where the denominator is 0."""

    def over(a: float, b: float) -> float | None:
        return None if b == 0 else a / b

    n, x2, y2, xy, e2 = (found[k] for k in ("numel", "sum_x2", "sum_y2", "sum_xy", "sum_err2"))
    num_finite = n - found["num_nan"] - found["num_inf"]
    num_finite_nonzero = num_finite - found["num_zero"]
    num_finite -= found.get("num_actual_nonfinite", 0)
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
