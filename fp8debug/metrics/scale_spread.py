"""Spread of a cast's block scales: whether blocks differ enough to be worth a scale each."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot
from fp8debug.metrics.scale import has_underflown

if TYPE_CHECKING:
    from torch import Tensor

_VARIANCE = "(scale_inv_sum2_log2 - scale_inv_sum_log2 * scale_inv_sum_log2 / num_scales) / num_scales"


class ScaleSpread:
    """Second moment of log2(scale_inv) over the blocks that ``scale_inv_sum_log2`` sums, those with a nonzero amax."""

    name = "scale_spread"
    of_results = False
    present = "num_scales"
    slots = (
        Slot(name="num_scales", merge="sum", kind="int64", unit="1", doc="nonzero blocks in scale_inv_sum2_log2"),
        Slot(
            name="scale_inv_sum2_log2",
            merge="sum",
            kind="float64",
            unit="log2^2",
            doc="sum of log2(scale_inv)^2 over nonzero blocks",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        # Equal scales leave the rounding of two sums: 2^-53 of a square, which is 2e4 at most, and more over many blocks.
        "scale_inv_std_log2": Derived(
            expression=f"sqrt(max({_VARIANCE} - 1e-9, 0))",
            unit="log2",
            doc="standard deviation of log2(scale_inv) over nonzero blocks",
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Sum; int64 and FP64 ``[]``; nothing for a result."""
        if pair.quantized is None:
            return {}
        amax, _ = pair.as_read.block_extremes(pair.block)
        scale_inv = pair.quantized.scale_inv.expand(amax.shape)
        counts = (amax > 0) & ~has_underflown(pair, scale_inv)
        return {
            "num_scales": counts.count_nonzero(),
            "scale_inv_sum2_log2": scale_inv.double().log2().square().masked_fill(~counts, 0.0).sum(),
        }


METRICS.add(ScaleSpread.name, ScaleSpread())
