"""Activation functions by name: the formula that a module's input and output follow (GELU by erf or by tanh, SiLU, ReLU).

Legend: x input, y output; f and g formulas. f is named where the sum of (y - f(x))^2 is at most MAX_ERROR of that of y^2, and for
each other g below MAX_SHARE of that of (f(x) - g(x))^2: roundings as large as the distance of two formulas cannot tell them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import erf, pi, sqrt
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
#: Classes of modules that are activation functions.
_KIND = re.compile(r"(?i).*(?:gelu|silu|swish|relu|activation|sigmoid|mish)\w*")
#: Largest error of the output from its own formula: several roundings to BF16 in a row.
MAX_ERROR = 1e-4
#: Part that this error lies below of the distance to each other formula.
MAX_SHARE = 0.1
#: Distinct values of x, at least: a few roundings can agree with another formula by chance.
MIN_VALUES = 64
#: Elements that are compared, at most.
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
    given, first = np.unique(x.ravel()[::step].astype(np.float64), return_index=True)
    made = y.ravel()[::step].astype(np.float64)[first]
    size = float((made * made).sum())
    if given.size < MIN_VALUES or not (size > 0 and np.isfinite(size) and np.isfinite(given).all()):
        return None
    with np.errstate(all="ignore"):
        values = {name: formula(given) for name, formula in FORMULAS.items()}
        errors = {name: float(((made - value) ** 2).sum()) for name, value in values.items()}
        best = min(errors, key=lambda name: errors[name])
        distances = [float(((values[best] - value) ** 2).sum()) for name, value in values.items() if name != best]
    return best if errors[best] <= MAX_ERROR * size and errors[best] < MAX_SHARE * min(distances) else None
