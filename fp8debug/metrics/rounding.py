"""Effects of the cast at both ends of the format: underflow to zero, subnormals, saturation at the maximum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.formats import FORMATS, SCALE_FORMATS
from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

#: One ulp of the scale must not make every block's amax look clipped (numerics.md, 3).
SATURATION_GUARD = 1 + 2.0**-20


class Rounding:
    """Counts over finite elements of the reference; rates are over numel as in Transformer Engine and Ling 2.0."""

    name = "rounding"
    of_results = False
    present = "numel"
    slots = (
        Slot(name="num_underflow", merge="sum", kind="int64", unit="1", doc="nonzero and finite, quantized to zero"),
        Slot(name="num_subnormal", merge="sum", kind="int64", unit="1", doc="quantized to a nonzero below min normal"),
        Slot(
            name="num_saturated",
            merge="sum",
            kind="int64",
            unit="1",
            doc="finite, scaled magnitude above the format's max * (1 + 2^-20), clamped to max",
        ),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "underflow_rate": Derived(expression="num_underflow / numel", unit="1", doc="share of elements that underflow"),
        "underflow_nonzero_rate": Derived(
            expression="num_underflow / (numel - num_zero - num_nan - num_inf)",
            unit="1",
            doc="share of the nonzero finite elements that underflow",
        ),
        "subnormal_rate": Derived(expression="num_subnormal / numel", unit="1", doc="share of elements in subnormals"),
        "overflow_rate": Derived(expression="num_saturated / numel", unit="1", doc="share of elements that saturate"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Count; each slot int64 ``[]``."""
        assert pair.cast is not None
        fmt = FORMATS[pair.cast.format]
        data, magnitude = pair.data.abs(), pair.as_read.magnitude
        if SCALE_FORMATS[pair.cast.scale_format] is not None:
            data = data * (pair.spread_scale_inv != 0)  # a block whose stored scale underflows is 0, whatever its codes
        below_normal = (data < fmt.min_normal) & (magnitude > 0)
        num_below = below_normal.count_nonzero()
        num_underflow = (below_normal & (data == 0)).count_nonzero()
        return {
            "num_underflow": num_underflow,
            "num_subnormal": num_below - num_underflow,
            "num_saturated": ((pair.scaled > fmt.max * SATURATION_GUARD) & (data == fmt.max)).count_nonzero(),
        }


METRICS.add(Rounding.name, Rounding())
