"""Gradients of a weight compared with the FP32 sum of what wgrad gave: rows and conditions of the rules that judge the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fp8debug.rules.reading.conditions import Condition, Conditions

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: SQL predicate of the rows that compare weight.grad with its FP32 sum.
IS_GRADIENT = "actual AND tensor = 'grad_weight' AND reference = 'shadow'"
#: The same of finite gradients.
IS_FINITE_GRADIENT = f"{IS_GRADIENT} AND num_nan + num_inf = 0"


def why_no_sum(run: Run) -> str | None:
    """Return why no sum can be judged: fewer than three microbatches."""
    query = "SELECT 1 AS one FROM raw WHERE num_grad > 0 LIMIT 1"
    return None if run.sql(query).num_rows else "no step has three microbatches or more, or weight.grad is kept elsewhere"


def far_from_sum(sqnr_db: float, min_elements: int, max_first_nmse: float) -> Conditions:
    """Return the conditions of a gradient that is right after one microbatch and far from the sum after all.

    Args:
        sqnr_db: of weight.grad against its FP32 sum, below which it is far.
        min_elements: elements that were compared.
        max_first_nmse: of weight.grad after a single gradient.
    """
    return [
        Condition("grad_sum_sqnr_db", "<", sqnr_db),
        f"num_grad >= {min_elements} AND grad_first_nmse < {max_first_nmse}",
    ]
