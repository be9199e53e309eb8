"""Sources of steps and losses: importing the package registers the loops, every file of this folder one."""

from importlib import import_module
from pkgutil import iter_modules

from fp8debug.trainers.base import LOOPS, Loop, LoopRecorder, loop_of

for _file in sorted(found.name for found in iter_modules(__path__)):
    import_module(f"{__name__}.{_file}")

__all__ = ["LOOPS", "Loop", "LoopRecorder", "loop_of"]
