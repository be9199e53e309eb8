"""The first-order effect of a layer's output error on the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Damage:
    """Sum over sampled rows of (grad_output . (actual - shadow))^2, the Fisher/Taylor score of numerics.md, 3 and 6.

    Only fprop's output has it, and only once the backward pass has brought grad_output.
    """

    name = "damage"
    of_results = True
    of_operands = False
    present = "num_damage_rows"
    slots = (
        Slot(
            name="damage",
            merge="sum",
            kind="float64",
            unit="loss^2",
            doc="sum over sampled rows of (grad_output . (actual - shadow output))^2; fprop output against shadow only",
        ),
        Slot(name="num_damage_rows", merge="sum", kind="int64", unit="1", doc="sampled rows that entered damage"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "damage_per_row": Derived(expression="damage / num_damage_rows", unit="loss^2", doc="mean damage of a row"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; FP64 ``[]`` and int64 ``[]``; nothing before the gradient is known."""
        if pair.grad is None:
            return {}
        per_row = (pair.error64 * pair.grad.double()).sum(1)
        per_row = per_row.masked_fill(~per_row.isfinite(), 0.0)
        return {"damage": (per_row * per_row).sum(), "num_damage_rows": per_row.new_full((), len(per_row)).long()}


METRICS.add(Damage.name, Damage())
