"""Every statistic of an observation: importing the package registers the metrics, every file of this folder one."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.metrics.base import METRICS, Derived, Metric, Pair, Slot, Source, derive, derived_columns, slots

for _file in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

__all__ = ["METRICS", "Derived", "Metric", "Pair", "Slot", "Source", "derive", "derived_columns", "slots"]
