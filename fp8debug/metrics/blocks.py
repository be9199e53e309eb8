"""The worst block of a cast: one bad tile is invisible in the mean of thousands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Blocks:
    """Extremes over the blocks of the cast that have a nonzero finite element."""

    name = "blocks"
    of_results = False
    present = "numel"
    slots = (
        Slot(name="worst_block_nmse", merge="max", kind="float32", unit="1", doc="largest nmse of one block"),
        Slot(
            name="max_block_range_log2",
            merge="max",
            kind="float32",
            unit="log2",
            doc="largest log2(amax / amin) inside one block",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "worst_block_sqnr_db": Derived(expression="-10 * log10(worst_block_nmse)", unit="dB", doc="SQNR of the worst block"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Reduce over blocks; each slot FP32 ``[]``."""
        x, error = pair.block_sides
        signal, noise = pair.sum_per_block(x * x), pair.sum_per_block(error * error)
        amax, amin = pair.as_read.block_extremes(pair.block)
        nmse = (noise / signal).masked_fill(signal == 0, -math.inf)
        span = (amax.double() / amin.double()).log2().masked_fill(amax == 0, -math.inf)
        return {"worst_block_nmse": nmse.amax().float(), "max_block_range_log2": span.amax().float()}


METRICS.add(Blocks.name, Blocks())
