"""Fallback lists in the formats of their consumers: importing the package registers them, every file of this folder one."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.exporters.base import EXPORTERS, Exporter

for _file in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

__all__ = ["EXPORTERS", "Exporter"]
