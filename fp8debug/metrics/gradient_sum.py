"""Error of the sum of a weight's gradients over the microbatches of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class GradientSum:
    """``weight.grad`` against the FP32 sum of the gradients that wgrad gave so far, on sampled columns.

    Compared when the next microbatch's backward pass begins. After a single gradient the two agree, unless something else adds
    to ``weight.grad`` or changes it (a tied weight, a hook, an all-reduce): ``grad_first_nmse`` tells.
    """

    name = "gradient_sum"
    of_results = True
    kinds = ("first_sum", "later_sum")
    present = "num_grad_sums"
    slots = (
        Slot(name="num_grad_sums", merge="sum", kind="int64", unit="1", doc="comparisons of weight.grad with its FP32 sum"),
        Slot(name="grad_first_nmse", merge="max", kind="float32", unit="1", doc="nmse of weight.grad after one gradient"),
        Slot(name="num_grad", merge="sum", kind="int64", unit="1", doc="nonzero elements compared after two gradients or more"),
        Slot(name="num_grad_bf16", merge="sum", kind="int64", unit="1", doc="of these, those that BF16 holds exactly"),
        Slot(name="grad_sum_x2", merge="sum", kind="float64", unit="x^2", doc="sum of the FP32 sums squared"),
        Slot(name="grad_sum_xy", merge="sum", kind="float64", unit="x^2", doc="sum of FP32 sum times weight.grad"),
        Slot(name="grad_sum_err2", merge="sum", kind="float64", unit="x^2", doc="sum of the squared differences"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "grad_sum_sqnr_db": Derived(
            expression="-10 * log10(grad_sum_err2 / grad_sum_x2)", unit="dB", doc="SQNR of the accumulated gradient"
        ),
        "grad_sum_gain": Derived(
            expression="grad_sum_xy / grad_sum_x2", unit="1", doc="accumulated gradient over its FP32 sum; below 1 it stalls"
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; nothing for a pair of another kind, ``grad_first_nmse`` alone after one gradient."""
        if pair.kind not in ("first_sum", "later_sum"):
            return {}
        x, y, error = pair.x64, pair.y64, pair.error64
        x2, err2 = x.square().sum(), error.square().sum()
        one = x2.new_ones(()).long()
        if pair.kind == "first_sum":
            return {"num_grad_sums": one, "grad_first_nmse": (err2 / x2.clamp(min=1e-300)).float()}
        nonzero = pair.y != 0
        return {
            "num_grad_sums": one,
            "num_grad": nonzero.sum(),
            "num_grad_bf16": (nonzero & (pair.y.bfloat16().float() == pair.y)).sum(),
            "grad_sum_x2": x2,
            "grad_sum_xy": (x * y).sum(),
            "grad_sum_err2": err2,
        }


METRICS.add(GradientSum.name, GradientSum())
