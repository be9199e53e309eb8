"""The block scales of a cast: how many, how large, how many had nothing to scale, and the headroom left under the maximum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from fp8debug.formats import SCALE_FORMATS
from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def has_underflown(pair: Pair, scale_inv: Tensor) -> Tensor:
    """Return which scales were lost to their format, as E4M3's may be; NaN are not. Bool, of the shape of ``scale_inv``."""
    assert pair.cast is not None
    stored = SCALE_FORMATS[pair.cast.scale_format]
    return (scale_inv == 0) & (stored is not None and not stored.scale_only)


class Scale:
    """Over the blocks with a nonzero amax, but ``num_blocks`` and ``num_zero_blocks``; a zero block's scale_inv says nothing.

    A block counts in ``num_eps_blocks`` when its amax lies below amax eps, or is so small that max / amax is not finite
    (Transformer Engine's rule), or its stored scale underflows to 0. A zero block counts in ``num_zero_blocks`` alone.
    ``headroom`` is the largest ``abs(x) / scale_inv / max``: 1 under current scaling with FP32 scales, above 1 where one clips.
    """

    name = "scale"
    of_results = False
    present = "numel"
    slots = (
        Slot(name="scale_inv_min", merge="min", kind="float32", unit="x", doc="smallest scale_inv of a nonzero block"),
        Slot(name="scale_inv_max", merge="max", kind="float32", unit="x", doc="largest scale_inv of a nonzero block"),
        Slot(
            name="scale_inv_sum_log2",
            merge="sum",
            kind="float64",
            unit="log2",
            doc="sum of log2(scale_inv) over nonzero blocks",
        ),
        Slot(name="num_blocks", merge="sum", kind="int64", unit="1", doc="blocks that have a scale of their own"),
        Slot(name="num_zero_blocks", merge="sum", kind="int64", unit="1", doc="blocks whose amax is 0"),
        Slot(
            name="num_eps_blocks",
            merge="sum",
            kind="int64",
            unit="1",
            doc="nonzero blocks whose scale came from amax eps or from the largest finite FP32",
        ),
        Slot(
            name="headroom",
            merge="max",
            kind="float32",
            unit="1",
            doc="largest scaled magnitude over the format's max; above 1 it clips",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "scale_inv_mean_log2": Derived(
            expression="scale_inv_sum_log2 / (num_blocks - num_zero_blocks)",
            unit="log2",
            doc="mean log2(scale_inv) of nonzero blocks",
        ),
        "zero_block_rate": Derived(expression="num_zero_blocks / num_blocks", unit="1", doc="share of zero blocks"),
        "eps_block_rate": Derived(expression="num_eps_blocks / num_blocks", unit="1", doc="share of eps blocks"),
        "scale_log2_ratio": Derived(
            expression="-log2(headroom)",
            unit="log2",
            doc="log2 of scale_inv over current scaling's: positive is the underflow side, negative the overflow side",
        ),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Reduce over blocks; counts int64 ``[]``, extremes FP32 ``[]``, the sum FP64 ``[]``."""
        assert pair.quantized is not None and pair.cast is not None
        scale_inv = pair.quantized.scale_inv
        amax, _ = pair.as_read.block_extremes(pair.block)
        nonzero = amax > 0
        scale_inv = scale_inv.expand(amax.shape)
        lost = has_underflown(pair, scale_inv)
        scaled_blocks = nonzero & ~lost
        scaled = amax / scale_inv  # the largest of a block: a zero block's may be 0 / 0
        top = scaled.masked_fill(~scaled_blocks, -math.inf).amax()
        lifted = (amax < pair.cast.amax_eps) | (amax.new_full((), pair.format_max) / amax).isinf() | lost
        if pair.cast.scaling != "current":
            lifted = lifted & False
        return {
            "scale_inv_min": scale_inv.masked_fill(~nonzero, math.inf).amin(),
            "scale_inv_max": scale_inv.masked_fill(~nonzero, -math.inf).amax(),
            "scale_inv_sum_log2": scale_inv.double().log2().masked_fill(~scaled_blocks, 0.0).sum(),
            "num_blocks": nonzero.sum().new_full((), amax.numel()),
            "num_zero_blocks": (~nonzero).sum(),
            "num_eps_blocks": (nonzero & lifted).sum(),
            # By a tensor: a GPU divides by a Python number as a product with its reciprocal, one rounding more.
            # Infinity would read as "no data".
            "headroom": (top / top.new_full((), pair.format_max)).clamp(max=FLOAT32_MAX),
        }


METRICS.add(Scale.name, Scale())
