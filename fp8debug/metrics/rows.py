"""Errors row by row: rows that are lost while the tensor as a whole looks fine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

#: nmse beyond which a row is lost (10 dB), and below which it is good: 24 dB, 4 dB below a healthy GEMM result.
BAD_NMSE, GOOD_NMSE = 0.1, 0.004


class Rows:
    """Rows of a result, and sampled rows of fprop's weight; an operand in FP8 has none (it would cost another pass).

    A row counts as lost or good when both sides are finite and the reference is not all zero.
    """

    name = "rows"
    of_results = True
    of_operands = False
    present = "num_rows"
    slots = (
        Slot(
            name="num_rows",
            merge="sum",
            kind="int64",
            unit="1",
            doc="rows that were judged one by one, of wide results by a share of each row",
        ),
        Slot(name="num_bad_rows", merge="sum", kind="int64", unit="1", doc="of these, with an SQNR of their own below 10 dB"),
        Slot(name="num_good_rows", merge="sum", kind="int64", unit="1", doc="of these, with an SQNR of their own above 24 dB"),
        Slot(name="num_nonfinite_rows", merge="sum", kind="int64", unit="1", doc="of these, with a NaN or Inf on either side"),
        Slot(name="worst_row_nmse", merge="max", kind="float32", unit="1", doc="largest nmse of one row"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "bad_row_rate": Derived(expression="num_bad_rows / num_rows", unit="1", doc="share of rows below 10 dB"),
        "good_row_rate": Derived(expression="num_good_rows / num_rows", unit="1", doc="share of rows above 24 dB"),
        "worst_row_sqnr_db": Derived(expression="-10 * log10(worst_row_nmse)", unit="dB", doc="SQNR of the worst row"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Count over rows; int64 ``[]``, the extreme FP32 ``[]``; nothing for an operand."""
        if pair.quantized is not None:
            return {}
        signal, noise = pair.x64.square().sum(1), pair.error64.square().sum(1)
        clean = pair.finite_rows
        judged = clean & (signal > 0)
        nmse = noise / signal
        return {
            "num_rows": judged.sum().new_full((), len(judged)),
            "num_bad_rows": (judged & (nmse > BAD_NMSE)).sum(),
            "num_good_rows": (judged & (nmse < GOOD_NMSE)).sum(),
            "num_nonfinite_rows": (~clean).sum(),
            "worst_row_nmse": nmse.masked_fill(~judged, -math.inf).amax().float(),
        }


METRICS.add(Rows.name, Rows())
