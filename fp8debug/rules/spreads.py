"""How far the largest values lie above the ordinary ones, for many tensors at once."""

from __future__ import annotations

import math

import pyarrow as pa

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.rules.f105_outlier_underflow import spread_log2


def spreads_log2(table: pa.Table) -> list[float | None]:
    """Return :func:`spread_log2` of rows that have a histogram."""
    lists, amaxes = table["log2_hist"].combine_chunks(), table["amax"].to_pylist()
    bins = lists.flatten()
    if bins.null_count or len(bins) != NUM_BINS * len(lists) or set(lists.value_lengths().unique().to_pylist()) - {NUM_BINS}:
        return [spread_log2(row) for row in table.select(["amax", "log2_hist"]).to_pylist()]
    below = bins.to_numpy().reshape(-1, NUM_BINS).cumsum(1)
    places = (2 * below >= below[:, -1:]).argmax(1).tolist()
    found = zip(amaxes, below[:, -1].tolist(), places, strict=True)
    return [math.log2(amax) - (FIRST_LOG2 + place + 0.5) if amax and num else None for amax, num, place in found]
