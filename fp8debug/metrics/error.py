"""Moments of reference x, actual y and error y - x: MSE, SQNR, cosine, gain, norm ratio and bias come from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


def _sum(name: str, unit: str, doc: str) -> Slot:
    return Slot(name=name, merge="sum", kind="float64", unit=unit, doc=f"sum of {doc}, pairs with both sides finite")


#: How many pairs the sums are of: a tensor that is all NaN has no mean, rather than a mean of 0.
_NUM_FINITE = "(numel - num_nan - num_inf - num_actual_nonfinite)"


class Error:
    """Float64 sums over the pairs whose both sides are finite (numerics.md, 3)."""

    name = "error"
    of_results = True
    present = "numel"
    slots = (
        _sum("sum_x", "x", "the reference"),
        _sum("sum_x2", "x^2", "the reference squared"),
        _sum("sum_y2", "x^2", "the actual squared"),
        _sum("sum_xy", "x^2", "reference times actual"),
        _sum("sum_err", "x", "actual minus reference"),
        _sum("sum_err2", "x^2", "the squared error"),
        Slot(name="max_abs_err", merge="max", kind="float32", unit="x", doc="largest absolute error"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "mse": Derived(expression=f"sum_err2 / {_NUM_FINITE}", unit="x^2", doc="mean squared error"),
        "nmse": Derived(expression="sum_err2 / sum_x2", unit="1", doc="squared error over squared reference"),
        "sqnr_db": Derived(expression="-10 * log10(sum_err2 / sum_x2)", unit="dB", doc="signal to quantization noise ratio"),
        "cosine": Derived(expression="sum_xy / sqrt(sum_x2 * sum_y2)", unit="1", doc="cosine similarity of reference and actual"),
        "gain": Derived(expression="sum_xy / sum_x2", unit="1", doc="least-squares factor of actual on reference; 1 is faithful"),
        "norm_ratio": Derived(expression="sqrt(sum_y2 / sum_x2)", unit="1", doc="norm of actual over norm of reference"),
        "bias": Derived(expression=f"sum_err / {_NUM_FINITE}", unit="x", doc="mean error"),
        "rms": Derived(expression=f"sqrt(sum_x2 / {_NUM_FINITE})", unit="x", doc="root mean square of the reference"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; each slot FP64 ``[]`` but max_abs_err, FP32 ``[]``."""
        x, y, error = pair.x64.reshape(-1), pair.y64.reshape(-1), pair.error64.reshape(-1)
        return {
            "sum_x": x.sum(),
            "sum_x2": x.dot(x),
            "sum_y2": y.dot(y),
            "sum_xy": x.dot(y),
            "sum_err": error.sum(),
            "sum_err2": error.dot(error),
            "max_abs_err": error.abs().amax().float(),
        }


METRICS.add(Error.name, Error())
