"""Rules over checkpoints: importing the package registers them, every file ``f2NN_*`` one."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.checkpoints.rules.base import CHECKS, FileRule, Judged, TensorFinding

for _file in sorted(found.name for found in iter_modules(__path__) if found.name.startswith("f2")):
    import_module(f"{__name__}.{_file}")

__all__ = ["CHECKS", "FileRule", "Judged", "TensorFinding"]
