"""The recording core: slots on the device, what a probe adds to them, and the copy to the host at the end of a step."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp8debug.observer.observer import FinishedStep, Observer, RowInfo, RowKey, Settings

__all__ = ["FinishedStep", "Observer", "RowInfo", "RowKey", "Settings"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("fp8debug.observer.observer"), name)
    return value
