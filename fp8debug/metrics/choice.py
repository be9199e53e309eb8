"""Changes of the largest column of a row by a GEMM's error: the effect on a router."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fp8debug.metrics.base import METRICS, Derived, Pair, Slot

if TYPE_CHECKING:
    from torch import Tensor

#: A result with more columns is no choice among experts; 512 holds every published router.
MAX_CHOICES = 512


class Choice:
    """Rows of a result whose largest columns the actual tensor names otherwise than the reference.

    Judged by the reference's values at the columns that the actual tensor chooses, so that equal values are no flip. It
    means something for fprop's output; results of more than 512 columns have none.
    """

    name = "choice"
    of_results = True
    of_operands = False
    max_columns = MAX_CHOICES
    of_whole_rows = True
    present = "num_choice_rows"
    slots = (
        Slot(name="num_choice_rows", merge="sum", kind="int64", unit="1", doc="finite rows of a result of 2 to 512 columns"),
        Slot(name="num_top1_flips", merge="sum", kind="int64", unit="1", doc="of these, whose largest column is another"),
        Slot(name="num_top2_flips", merge="sum", kind="int64", unit="1", doc="of these, whose two largest columns are others"),
    )
    derived: ClassVar[dict[str, Derived]] = {
        "top1_flip_rate": Derived(expression="num_top1_flips / num_choice_rows", unit="1", doc="share of top-1 choices changed"),
        "top2_flip_rate": Derived(expression="num_top2_flips / num_choice_rows", unit="1", doc="share of top-2 choices changed"),
    }

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        """Count; each slot int64 ``[]``; nothing for an operand or a wide result."""
        num_rows, num_columns = pair.source.x.shape
        if pair.quantized is not None or not pair.whole_rows or not 2 <= num_columns <= MAX_CHOICES or not num_rows:
            return {}
        x, y = pair.source.value, pair.y
        finite = pair.finite_rows
        wanted = x.topk(2).values
        chosen = x.gather(1, y.topk(2).indices)
        return {
            "num_choice_rows": finite.count_nonzero(),
            "num_top1_flips": (finite & (chosen[:, 0] < wanted[:, 0])).count_nonzero(),
            "num_top2_flips": (finite & (chosen.amin(1) < wanted[:, 1])).count_nonzero(),
        }


METRICS.add(Choice.name, Choice())
