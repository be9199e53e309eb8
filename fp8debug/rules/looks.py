"""Which rows a rule asks for, and what one rank at least shows in each of them before ranks are joined.

A row that is bad when joined had something bad in it before. Sums of ranks: ``sum(a) > limit * sum(b)`` needs one rank with
``a > limit * b``, since otherwise the sums would obey the limit too; likewise ``abs(sum(a)) > limit * sum(b)``. A largest
maximum above a limit is the maximum of one rank. Of several such conditions only one may go into a hint, because one rank may
meet the first and another rank the second; conditions on the keys all ranks meet.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

#: Operands of casts that ran in FP8, given a finite tensor.
RUNNING = (
    "actual AND reference = 'operand' AND cast_name <> 'bf16' AND numel > 0 AND coalesce(num_nan, 0) + coalesce(num_inf, 0) = 0"
)
#: What their keys say, for the hint of a ``Look``.
KEYS = "actual AND reference = 'operand' AND cast_name <> 'bf16'"
#: Results of GEMMs that ran with both operands in FP8, where the exact product is finite.
FP8_PRODUCTS = (
    "actual AND reference = 'exact' AND numel > 0 AND cast_name NOT LIKE 'bf16 %' AND cast_name NOT LIKE '% bf16'"
    " AND coalesce(num_nan, 0) + coalesce(num_inf, 0) = 0"
)
#: All blocks have one scale_inv, to the rounding of FP32.
ONE_SCALE = "scale_inv_max <= scale_inv_min * (1 + 1e-6)"
#: The format's name is the first word of a cast's name, the scaling its third.
IS_DELAYED = "(cast_name LIKE '% delayed(%' OR cast_name LIKE '% static(%')"


@dataclass(frozen=True)
class Look:
    """The rows that a rule asks for.

    Attributes:
        rows: SQL predicate over the columns of ``sites``.
        hint: SQL predicate over slots that holds for the row of one rank at least among those joined into such a row: one
            inequality that is linear in sums or bounds one maximum, and conditions on the keys. The inequality comes first: it is
            cheap and leaves few rows. Empty for rows that are not looked for beforehand.
        keys: further conditions on the keys, shared by many looks.
        columns: what the rule reads of these rows, columns or ``expression AS name``; the keys and ``ranks`` are there anyway.
        gates: comparisons of a column with a constant of which the hint implies one, and which no healthy row meets: by them
            whole row groups are skipped.
    """

    rows: str
    hint: str
    keys: str
    columns: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


def look(
    bad: str, columns: Iterable[str], hint: str = "", *, rows: str = RUNNING, keys: str = KEYS, gates: Iterable[str] = ()
) -> Look:
    """Return the look of a rule that asks for the bad ones among some rows, by default those of running casts."""
    return Look(f"{rows} AND ({bad})", hint, keys, tuple(columns), tuple(gates))


def exceeds(part: str, whole: str, limit: float) -> str:
    """Return the hint of ``sum(part) / sum(whole) > limit``; a billionth is left for the rounding of the sums."""
    # With an exponent: DuckDB takes other numbers for decimals, and multiplies them ten times more slowly.
    return f"{part} > {limit - 1e-9 * abs(limit):.16e} * ({whole})"


def some(part: str, limit: float = 0.0) -> list[str]:
    """Return the gates of ``exceeds(part, ..., limit)``."""
    return [f"{part} > 0"] if limit >= 0 else []


def underflows(limit: float) -> str:
    """Return the hint of ``underflow_nonzero_rate > limit`` in a tensor without NaN and Inf."""
    return exceeds("num_underflow", "numel - num_zero", limit)


def below_db(limit_db: float, err2: str = "sum_err2", x2: str = "sum_x2") -> str:
    """Return the hint of ``-10 * log10(sum(err2) / sum(x2)) < limit_db``."""
    return exceeds(err2, x2, 10 ** (-limit_db / 10))
