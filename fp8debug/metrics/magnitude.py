"""The largest and smallest magnitudes of the reference."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor


class Magnitude:
    """amax and amin over finite elements; amin skips zeros and is "no data" when nothing else is there."""

    name = "magnitude"
    of_results = True
    present = "numel"
    slots = (
        Slot(name="amax", merge="max", kind="float32", unit="x", doc="largest finite magnitude of the reference"),
        Slot(name="amin", merge="min", kind="float32", unit="x", doc="smallest nonzero finite magnitude"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "range_log2": Derived(expression="log2(amax / amin)", unit="log2", doc="binades between amin and amax"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Reduce; each slot FP32 ``[]``."""
        magnitude, shared = pair.source.magnitude, pair.source.shared
        if "amax" not in shared:
            shared["amax"] = magnitude.amax()
            shared["amin"] = magnitude.masked_fill(magnitude == 0, math.inf).amin()
        return {"amax": shared["amax"], "amin": shared["amin"]}


METRICS.add(Magnitude.name, Magnitude())
