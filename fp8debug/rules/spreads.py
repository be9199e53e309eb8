"""How far the largest values of a tensor lie above the ordinary ones, by its histogram of exponents."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS

#: Histograms that are looked at together: they stay in the cache.
_CHUNK = 2048


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
    amaxes = np.nan_to_num(table["amax"].to_numpy().astype(np.float64), nan=0.0, posinf=math.inf)
    modules = table["module"].combine_chunks().dictionary_encode()
    names = modules.dictionary.to_pylist()
    keys, places = np.unique(table["step"].to_numpy() * len(names) + modules.indices.to_numpy(), return_inverse=True)
    least, highest = np.full(len(keys), math.inf), np.zeros(len(keys))
    is_known = ~np.isnan(medians) & (amaxes > 0)
    np.minimum.at(least, places[is_known], medians[is_known])
    np.maximum.at(highest, places, amaxes)
    is_seen = least < math.inf
    bounds = np.log2(highest[is_seen]) - least[is_seen]
    return float(bounds.max(initial=-math.inf)), Counter(names[code] for code in (keys[is_seen] % len(names)).tolist())


def _medians_log2(table: pa.Table) -> npt.NDArray[np.float64]:
    """Return log2 of the median magnitude of each row; NaN where no element was counted."""
    lists = table["log2_hist"].combine_chunks()
    bins = lists.flatten()
    if bins.null_count or len(bins) != NUM_BINS * len(lists) or set(lists.value_lengths().unique().to_pylist()) - {NUM_BINS}:
        known = [_median_log2(histogram or ()) for histogram in lists.to_pylist()]
        return np.array([math.nan if median is None else median for median in known], dtype=np.float64)
    counts, medians = bins.to_numpy().reshape(-1, NUM_BINS), np.empty(len(lists))
    for start in range(0, len(lists), _CHUNK):
        below = counts[start : start + _CHUNK].cumsum(1)
        totals = below[:, -1:]
        places = (below >= totals - totals // 2).argmax(1)
        medians[start : start + _CHUNK] = np.where(totals[:, 0] > 0, FIRST_LOG2 + 0.5 + places, math.nan)
    return medians


def _median_log2(histogram: Sequence[int]) -> float | None:
    half, below = sum(histogram) / 2, 0
    for place, count in enumerate(histogram if half else ()):
        below += count
        if below >= half:
            return FIRST_LOG2 + place + 0.5
    return None
