"""Two paths of one model, training and rollout, on the same tokens: where they part, and why.

``record_path`` writes the dump of a path (torch); ``compare_paths`` reads two of them (no torch).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp8debug.parity.compare import compare_paths
    from fp8debug.parity.hook import PathRecorder, record_path
    from fp8debug.parity.report import ParityReport

__all__ = ["ParityReport", "PathRecorder", "compare_paths", "record_path"]

_HOME = {"ParityReport": "report", "PathRecorder": "hook", "compare_paths": "compare", "record_path": "hook"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
