"""Distance of a tensor's largest values from its ordinary ones, by its histogram of exponents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.store.columns import numbers_of

#: Histograms that are looked at together: they stay in the cache, and what is made of them in memory that is taken once.
_CHUNK = 1024


def spread_log2(row: dict[str, Any]) -> float | None:
    """Return log2(amax / median magnitude) of a row with ``amax`` and ``log2_hist``; None without either."""
    amax, median = row["amax"], _median_log2(row["log2_hist"] or ())
    return math.log2(amax) - median if amax and median is not None else None


def spreads_log2(table: pa.Table) -> list[float | None]:
    """Return :func:`spread_log2` of many rows."""
    found = zip(table["amax"].to_pylist(), _medians_log2(table).tolist(), strict=True)
    return [math.log2(amax) - median if amax and not math.isnan(median) else None for amax, median in found]


def bound_log2(table: pa.Table) -> tuple[float, Counter[str]]:
    """Return what no spread of a module at a step exceeds when the rows of its ranks are joined, and by module its steps.

    The median of all ranks is no smaller than the least of theirs. Steps count at which a spread is known.

    Args:
        table: rows of ranks with ``step``, ``module``, ``amax`` and ``log2_hist``.
    """
    medians = _medians_log2(table)
    is_there = numbers_of(table["amax"].is_valid().cast(pa.uint8()), np.uint8) > 0
    amaxes = np.where(is_there, np.nan_to_num(numbers_of(table["amax"].cast(pa.float64()), np.float64), posinf=math.inf), 0.0)
    modules = table["module"].combine_chunks().dictionary_encode()
    names = modules.dictionary.to_pylist()
    steps = numbers_of(table["step"].cast(pa.int64()), np.int64)
    keys, places = np.unique(steps * len(names) + numbers_of(modules.indices, np.int32), return_inverse=True)
    least, highest = np.full(len(keys), math.inf), np.zeros(len(keys))
    is_known = ~np.isnan(medians) & (amaxes > 0)
    np.minimum.at(least, places[is_known], medians[is_known])
    np.maximum.at(highest, places, amaxes)
    is_seen = least < math.inf
    bounds = np.log2(highest[is_seen]) - least[is_seen]
    return float(bounds.max(initial=-math.inf)), Counter(names[code] for code in (keys[is_seen] % len(names)).tolist())


def _medians_log2(table: pa.Table) -> npt.NDArray[np.float64]:
    """Return log2 of the median magnitude of each row; NaN where no element was counted."""
    return np.concatenate([np.empty(0), *map(_medians_of, table["log2_hist"].chunks)])


def _medians_of(lists: pa.ListArray) -> npt.NDArray[np.float64]:
    bins = lists.flatten()
    if bins.null_count or len(bins) != NUM_BINS * len(lists) or set(lists.value_lengths().unique().to_pylist()) - {NUM_BINS}:
        known = [_median_log2(histogram or ()) for histogram in lists.to_pylist()]
        return np.array([math.nan if median is None else median for median in known], dtype=np.float64)
    counts, medians = numbers_of(bins.cast(pa.int64()), np.int64).reshape(-1, NUM_BINS), np.empty(len(lists))
    below, is_half = np.empty((_CHUNK, NUM_BINS), dtype=np.int64), np.empty((_CHUNK, NUM_BINS), dtype=np.bool_)
    for start in range(0, len(lists), _CHUNK):
        num = min(_CHUNK, len(lists) - start)
        np.cumsum(counts[start : start + num], axis=1, out=below[:num])
        totals = below[:num, -1:]
        places = np.greater_equal(below[:num], totals - totals // 2, out=is_half[:num]).argmax(1)
        medians[start : start + num] = np.where(totals[:, 0] > 0, FIRST_LOG2 + 0.5 + places, math.nan)
    return medians


def _median_log2(histogram: Sequence[int]) -> float | None:
    half, below = sum(histogram) / 2, 0
    for place, count in enumerate(histogram if half else ()):
        below += count
        if below >= half:
            return FIRST_LOG2 + place + 0.5
    return None
