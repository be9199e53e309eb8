"""Fallback: modules to leave their cast (``recommend``), their list as a file, and its application to a model (``apply``).

Importing this package loads neither torch nor DuckDB: a training machine that can only record can still apply a list.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fp8debug.fallback.application import apply
from fp8debug.fallback.candidates import Fallback, load_fallbacks, scheduled

if TYPE_CHECKING:
    from fp8debug.fallback.policy import positional_prior, recommend

__all__ = ["Fallback", "apply", "load_fallbacks", "positional_prior", "recommend", "scheduled"]

_READING = ("positional_prior", "recommend")


def __getattr__(name: str) -> object:
    if name not in _READING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module("fp8debug.fallback.policy"), name)
    return value
