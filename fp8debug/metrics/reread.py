"""An operand as it is read once more in the same step: a cached weight, an input that was recomputed for the backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Reread:
    """Sampled rows of a weight in the step's second forward pass, sampled columns of wgrad's input after a recomputation.

    The first read of the step fills the other slots of the row. The reference is the tensor as it is now, for a
    recomputed input as it was in the first forward pass.
    """

    name = "reread"
    of_results = False
    kinds = ("reread",)
    present = "num_reread"
    slots = (
        Slot(name="num_reread", merge="sum", kind="int64", unit="1", doc="elements compared at the second read"),
        Slot(name="reread_sum_x2", merge="sum", kind="float64", unit="x^2", doc="sum of their reference squared"),
        Slot(name="reread_sum_err2", merge="sum", kind="float64", unit="x^2", doc="sum of their squared error"),
        Slot(name="num_reread_blocks", merge="sum", kind="int64", unit="1", doc="blocks of the whole tensor at the second read"),
        Slot(
            name="reread_scale_inv_sum_log2",
            merge="sum",
            kind="float64",
            unit="log2",
            doc="sum of log2(scale_inv) over all blocks at the second read",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "reread_sqnr_db": Derived(
            expression="-10 * log10(reread_sum_err2 / reread_sum_x2)", unit="dB", doc="SQNR at the second read"
        ),
        "reread_scale_log2": Derived(
            expression="(reread_scale_inv_sum_log2 - scale_inv_sum_log2) / (num_blocks - num_zero_blocks)",
            unit="log2",
            doc="mean log2 of the second read's scale_inv over the first one's; means it where num_reread_blocks = num_blocks",
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; int64 and FP64 ``[]``; nothing for a first read."""
        if pair.kind != "reread":
            return {}
        assert pair.quantized is not None
        x, error, scale_inv = pair.x64, pair.error64, pair.quantized.scale_inv
        num = x.new_full((), x.numel()).long()
        return {
            "num_reread": num,
            "reread_sum_x2": x.square().sum(),
            "reread_sum_err2": error.square().sum(),
            "num_reread_blocks": num.new_full((), scale_inv.numel()),
            "reread_scale_inv_sum_log2": scale_inv.double().log2().sum(),
        }


METRICS.add(Reread.name, Reread())
