"""Every statistic of an observation: importing the package registers the metrics, one file each."""

from fp8debug.metrics import blocks, damage, elements, error, histogram, magnitude, rounding, scale
from fp8debug.metrics.base import METRICS, Derived, Metric, Pair, Slot, Source, derive, derived_columns, slots

__all__ = [
    "METRICS",
    "Derived",
    "Metric",
    "Pair",
    "Slot",
    "Source",
    "blocks",
    "damage",
    "derive",
    "derived_columns",
    "elements",
    "error",
    "histogram",
    "magnitude",
    "rounding",
    "scale",
    "slots",
]
