"""Every failure mode on demand: importing the package registers them, each file beside ``base`` some; ``inject`` plants one."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.faults.base import FAULTS, Fault, Injection, inject, list_faults

for _file in sorted(found.name for found in iter_modules(__path__) if found.name != "base"):
    import_module(f"{__name__}.{_file}")

__all__ = ["FAULTS", "Fault", "Injection", "inject", "list_faults"]
