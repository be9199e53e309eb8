"""Counts of a tensor's elements, and of those that are zero, NaN or Inf before the cast."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Elements:
    """Counts of the reference tensor; ``num_actual_nonfinite`` is the damage the cast or GEMM did to finite ones."""

    name = "elements"
    of_results = True
    present = "numel"
    slots = (
        Slot(name="numel", merge="sum", kind="int64", unit="1", doc="elements of the reference (sampled ones of a result)"),
        Slot(name="num_zero", merge="sum", kind="int64", unit="1", doc="zeros of the reference, of both signs"),
        Slot(name="num_nan", merge="sum", kind="int64", unit="1", doc="NaN of the reference"),
        Slot(name="num_inf", merge="sum", kind="int64", unit="1", doc="infinities of the reference"),
        Slot(
            name="num_actual_nonfinite",
            merge="sum",
            kind="int64",
            unit="1",
            doc="finite in the reference, NaN or Inf in the actual tensor: made by this cast or GEMM",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "zero_rate": Derived(expression="num_zero / numel", unit="1", doc="share of zeros in the reference"),
        "nonfinite_rate": Derived(
            expression="(num_nan + num_inf) / numel", unit="1", doc="share of NaN and Inf in the reference"
        ),
        "actual_nonfinite_rate": Derived(
            expression="num_actual_nonfinite / numel", unit="1", doc="share of finite elements that became NaN or Inf"
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Count; each slot int64 ``[]``."""
        x, shared = pair.source.value, pair.source.shared
        if "numel" not in shared:
            shared["num_zero"] = x.numel() - x.count_nonzero()
            shared["numel"] = shared["num_zero"].new_full((), x.numel())
            none, clean = shared["num_zero"].new_zeros(()), pair.source.nonfinite is None
            shared["num_nan"] = none if clean else x.isnan().count_nonzero()
            shared["num_inf"] = none if clean else x.isinf().count_nonzero()
        made = pair.made_nonfinite
        num_made = shared["numel"].new_zeros(()) if made is None else made.count_nonzero()
        names = ("numel", "num_zero", "num_nan", "num_inf")
        return {**{name: shared[name] for name in names}, "num_actual_nonfinite": num_made}


METRICS.add(Elements.name, Elements())
