"""Every statistic of an observation: importing the package registers the metrics, every file of this folder one."""

from fp8debug.metrics.base import METRICS, Derived, Metric, Pair, Slot, Source, derive, derived_columns, slots
from fp8debug.registry import register_all

register_all(__name__, __path__)

__all__ = ["METRICS", "Derived", "Metric", "Pair", "Slot", "Source", "derive", "derived_columns", "slots"]
