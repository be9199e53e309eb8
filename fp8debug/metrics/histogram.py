"""The exponent histogram of the reference: where its values lie, whatever the format."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

NUM_BINS = 64
#: floor(log2(abs x)) of the first bin. -45 .. 18 holds gradients of 2^-40 and outliers of 2^18; the ends collect the rest.
FIRST_LOG2 = -45


class Histogram:
    """64 bins of floor(log2(abs x)); bin i counts ``FIRST_LOG2 + i``, the first and last bin also all beyond."""

    name = "histogram"
    of_results = False
    present = "numel"
    slots = (
        Slot(
            name="log2_hist",
            merge="sum",
            kind="int64",
            unit="1",
            size=NUM_BINS,
            doc=f"nonzero finite elements by floor(log2(abs x)), bin 0 is {FIRST_LOG2} and below, stored once per site",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {}

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Count; int64 ``[64]``. Exact: the exponent comes from frexp, not from a logarithm."""
        shared = pair.source.shared
        if "log2_hist" not in shared:
            magnitude = pair.source.magnitude.reshape(-1)
            bins = (magnitude.frexp().exponent.long() - 1 - FIRST_LOG2).clamp(0, NUM_BINS - 1)
            shared["log2_hist"] = bins.new_zeros(NUM_BINS).scatter_add(0, bins, (magnitude > 0).long())
        return {"log2_hist": shared["log2_hist"]}


METRICS.add(Histogram.name, Histogram())
