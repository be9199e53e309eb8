"""Which activation function a module computes, told by its input and output: GELU by erf or by tanh, SiLU, ReLU and others.

Legend: x input, y output; f and g formulas. Of N elements, f is better than g where the mean of (y - g(x))^2 - (y - f(x))^2 is
above zero by MIN_Z standard errors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import erf, pi, sqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Classes of modules that are asked.
_KIND = re.compile(r"(?i).*(?:gelu|silu|swish|relu|activation|sigmoid|mish)\w*")
#: Standard errors by which one formula has to be better than each other.
MIN_Z = 8.0
#: Largest error of a formula that is one's own: several roundings to BF16 in a row.
MAX_ERROR = 1e-4
#: Elements that are asked.
MAX_ELEMENTS = 1 << 16
_erf = np.vectorize(erf, otypes=[np.float64])


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


FORMULAS: Mapping[str, Callable[[Array], Array]] = {
    "GELU": lambda x: 0.5 * x * (1 + _erf(x / sqrt(2))),
    "GELU by tanh": lambda x: 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))),
    "quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "squared ReLU": lambda x: np.maximum(x, 0) ** 2,
}


def function_of(kind: str, x: Array | None, y: Array | None) -> str | None:
    """Return the name of the formula that fits an activation's output; None for other modules, or where several do.

    Args:
        kind: class of the module.
        x: what it read.
        y: what it gave, of the same shape.
    """
    if x is None or y is None or x.shape != y.shape or not x.size or _KIND.fullmatch(kind) is None:
        return None
    step = max(1, x.size // MAX_ELEMENTS)
    given, made = x.ravel()[::step].astype(np.float64), y.ravel()[::step].astype(np.float64)
    size = float((made * made).sum())
    if not (size > 0 and np.isfinite(size) and np.isfinite(given).all()):
        return None
    with np.errstate(all="ignore"):
        errors = {name: (made - formula(given)) ** 2 for name, formula in FORMULAS.items()}
    best = min(errors, key=lambda name: float(errors[name].sum()))
    if not float(errors[best].sum()) <= MAX_ERROR * size:
        return None
    for name, error in errors.items():
        more = error - errors[best]
        if name != best and not float(more.mean()) * sqrt(more.size) > MIN_Z * float(more.std()):
            return None
    return best
