"""Attributes that a module stores, read without running any code of the program.

A property, a parametrization (spectral_norm, weight_norm, orthogonal) and a ``__getattr__`` compute a value anew at each access.
They may update state, draw random numbers or start a collective: one additional read would change the training.
"""

from __future__ import annotations

from typing import Any

#: Why a weight that a module computes is not read.
COMPUTED = "its weight is computed at each access (a parametrization or a property), and one more read could change the training"


def is_computed(module: object, name: str) -> bool:
    """Return whether reading an attribute runs code: that of a property, or a parametrization's."""
    return any(hasattr(type(c.__dict__[name]), "__get__") for c in type(module).__mro__ if name in c.__dict__)


def stored(module: object, name: str) -> Any:
    """Return a parameter, buffer or plain value of a module; None where it has none of that name, or computes it."""
    if is_computed(module, name):
        return None
    own = vars(module)
    for place in (own, own.get("_parameters") or {}, own.get("_buffers") or {}):
        if name in place:
            return place[name]
    return None


def has(module: object, name: str) -> bool:
    """Return whether a module has an attribute that is not None, or computes one."""
    return is_computed(module, name) or stored(module, name) is not None
