"""Activation functions by name: the formula that a module's input and output follow (GELU by erf or by tanh, SiLU, ReLU).

Legend: x input, y output; f and g formulas. f is named where the sum of (y - f(x))^2 is at most MAX_ERROR of that of y^2, and for
each other g below MAX_SHARE of that of (f(x) - g(x))^2.

Outputs in BF16 or FP16 are rounded by more than GELU by erf and by tanh lie apart on average, yet by much less where f(x) is
small: at x = -3 the two are 2.6e-4 apart, which is 17 steps of BF16. There each error counts in units of its own rounding:

    e_f = mean((y - f(x))^2 / (step(f(x))^2 / 12 + (x KERNEL)^2))    1 for a kernel that rounds f(x) once

f is named where e_f is at most MAX_STEPS, and e_g of each other at least MIN_TIMES.

Where all x are small, and in eager code, which rounds after each operation (1 + tanh at x = -3 has steps larger than the
distance), values are counted. f is named where at most MAX_UNEQUAL of the outputs are not f(x), rounded once or after each
operation, and MIN_TIMES as many, MIN_UNEQUAL at least, are not each other g(x). Where f and g round to two values, a kernel of g
gives that of f in a share MAX_UNEQUAL of the cases: four of four by chance at 1e-8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import erf, pi, sqrt
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
Rounding = Callable[[Array], Array]
#: Classes of modules that are activation functions.
_KIND = re.compile(r"(?i).*(?:gelu|silu|swish|relu|activation|sigmoid|mish)\w*")
#: Largest error of the output from its own formula: several roundings to BF16 in a row.
MAX_ERROR = 1e-4
#: Part that this error lies below of the distance to each other formula.
MAX_SHARE = 0.1
#: Largest error of the output from its own formula in squared roundings (one rounding makes 1), and share of unequal values.
MAX_STEPS, MAX_UNEQUAL = 3.0, 0.01
#: Least error of each other formula, in the same units; times as many unequal values, and their least number.
MIN_TIMES, MIN_UNEQUAL = 12.0, 4
#: Error of the kernel before it rounds, by x: erf and tanh near -1 in FP32, four steps.
KERNEL = 2.0**-22
#: Distinct values of x, at least: a few roundings can agree with another formula by chance.
MIN_VALUES = 64
#: Elements that are compared, at most.
MAX_ELEMENTS = 1 << 16
_erf = np.vectorize(erf, otypes=[np.float64])


class _Kept(NamedTuple):
    """Precision in which an output is stored.

    Attributes:
        round: to its values.
        bits: of the significand, the hidden one included.
        least: exponent of the smallest step.
    """

    round: Rounding
    bits: int
    least: int


def _to_bf16(x: Array) -> Array:
    with np.errstate(all="ignore"):
        bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    return np.asarray(((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64))


def _to_fp16(x: Array) -> Array:
    with np.errstate(all="ignore"):
        return np.asarray(x.astype(np.float16).astype(np.float64))


_PRECISIONS = _Kept(_to_bf16, 8, -133), _Kept(_to_fp16, 11, -24)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def _gelu(x: Array, r: Rounding) -> Array:
    return r(r(0.5 * x) * r(1 + r(_erf(r(x / sqrt(2))))))


def _gelu_by_tanh(x: Array, r: Rounding) -> Array:
    inner = r(x + r(0.044715 * r(x**3)))
    return r(r(0.5 * x) * r(1 + r(np.tanh(r(sqrt(2 / pi) * inner)))))


#: By name; the second argument rounds after each operation.
FORMULAS: Mapping[str, Callable[[Array, Rounding], Array]] = {
    "GELU": _gelu,
    "GELU by tanh": _gelu_by_tanh,
    "quick GELU": lambda x, r: r(x * r(_sigmoid(r(1.702 * x)))),
    "SiLU": lambda x, r: r(x * r(_sigmoid(x))),
    "ReLU": lambda x, r: np.maximum(x, 0),
    "squared ReLU": lambda x, r: r(np.maximum(x, 0) ** 2),
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
        values = {name: formula(given, np.asarray) for name, formula in FORMULAS.items()}
        errors = {name: float(((made - value) ** 2).sum()) for name, value in values.items()}
        best = min(errors, key=lambda name: errors[name])
        distances = [float(((values[best] - value) ** 2).sum()) for name, value in values.items() if name != best]
        if errors[best] > MAX_ERROR * size:
            return None
        return best if errors[best] < MAX_SHARE * min(distances) else _by_roundings(given, made, values)


def _by_roundings(x: Array, y: Array, values: Mapping[str, Array]) -> str | None:
    """Return the name of the formula that differs from an output in BF16 or FP16 by roundings, where no other does."""
    kept = next((one for one in _PRECISIONS if np.array_equal(one.round(y), y)), None)
    if kept is None:
        return None
    errors: dict[str, float] = {}
    unequal: dict[str, int] = {}
    for name, value in values.items():
        step = 2.0 ** np.maximum(np.floor(np.log2(np.abs(value))) - (kept.bits - 1), kept.least)
        errors[name] = float(np.mean((y - value) ** 2 / (step**2 / 12 + (KERNEL * x) ** 2)))
        unequal[name] = min(int((y != way).sum()) for way in (kept.round(value), FORMULAS[name](x, kept.round)))
    best, second = sorted(errors, key=lambda name: errors[name])[:2]
    if errors[best] <= MAX_STEPS and errors[second] >= MIN_TIMES:
        return best
    best, second = sorted(unequal, key=lambda name: unequal[name])[:2]
    is_best = unequal[best] <= MAX_UNEQUAL * x.size and unequal[second] >= max(MIN_UNEQUAL, MIN_TIMES * unequal[best])
    return best if is_best else None
