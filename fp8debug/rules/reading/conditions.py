"""Rows that a rule asks for, written once as conditions; what must hold of a single rank's row follows from them.

A row of ``sites`` joins the rows of all ranks, and to join them all is most of what a query costs. A row that is bad when
joined had something bad in it before. Sums of ranks: ``sum(a) > limit * sum(b)`` needs one rank with ``a > limit * b``, since
otherwise the sums would obey the limit too; likewise ``abs(sum(a)) > limit * sum(b)``. A largest maximum above a limit is the
maximum of one rank; below a limit, all ranks' maxima are. Of several conditions that one rank at least meets, only one may be
looked for, because one rank may meet the first and another rank the second; conditions on the keys all ranks meet.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from fp8debug.metrics import derived_columns, slots
from fp8debug.metrics.expression import parse

#: Operands of casts that ran in FP8, given a finite tensor.
RUNNING = (
    "actual AND reference = 'operand' AND cast_name <> 'bf16' AND numel > 0 AND coalesce(num_nan, 0) + coalesce(num_inf, 0) = 0"
)
#: What their keys say.
KEYS = "actual AND reference = 'operand' AND cast_name <> 'bf16'"
#: Results of GEMMs that ran with both operands in FP8, where the exact product is finite.
FP8_PRODUCTS = (
    "actual AND reference = 'exact' AND numel > 0 AND cast_name NOT LIKE 'bf16 %' AND cast_name NOT LIKE '% bf16'"
    " AND coalesce(num_nan, 0) + coalesce(num_inf, 0) = 0"
)
#: All blocks have one scale_inv, to the rounding of FP32.
ONE_SCALE = "scale_inv_max <= scale_inv_min * (1 + 1e-6)"
#: The largest scale_inv is a power of two: its logarithm is whole, to the rounding of FP32 (1e-7), with a wide margin.
IS_POWER_OF_TWO = "abs(log2(scale_inv_max) - round(log2(scale_inv_max))) <= 1e-5"
#: The format's name is the first word of a cast's name, the scaling its third.
IS_DELAYED = "(cast_name LIKE '% delayed(%' OR cast_name LIKE '% static(%')"
#: Counts that are zero in nearly all rows of a healthy run: by them whole row groups are skipped.
_RARE = {"num_saturated", "num_bad_rows", "num_actual_nonfinite"}
#: Relative slack for the rounding of sums.
_SLACK = 1e-9


@dataclass(frozen=True)
class Keys:
    """A condition on the keys of a row: what it says of the joined row it says of each rank's.

    Attributes:
        rows: SQL predicate.
        gate: a comparison of one column that it implies and that few row groups of a healthy run meet; empty where there is none.
    """

    rows: str
    gate: str = ""


@dataclass(frozen=True)
class Condition:
    """A comparison of a slot or a derived column with a number.

    Attributes:
        column: its name.
        operator: ``>``, ``>=``, ``<`` or ``<=``.
        limit: the number.
        center: if given, the distance from it is compared: ``abs(column - center) > limit``.
    """

    column: str
    operator: str
    limit: float
    center: float | None = None

    @property
    def rows(self) -> str:
        """SQL predicate over the columns of ``sites``."""
        if self.center is None:
            value = self.column
        else:
            value = f"abs({self.column} - {self.center})" if self.center else f"abs({self.column})"
        return f"{value} {self.operator} {self.limit}"

    @property
    def some_rank(self) -> str:
        """SQL predicate over slots that the row of one rank at least meets; empty where none follows."""
        is_above = self.operator.startswith(">")
        merge = self._merge
        if merge == "sum":
            is_positive = self.limit > 0 or (self.limit == 0 and self.operator == ">")
            return f"{self.column} > 0" if is_above and is_positive else ""
        if merge is not None:
            return self.rows if self.center is None and is_above is (merge == "max") else ""
        part, whole, of_log = _fraction(self.column)
        limit = 10 ** (-self.limit / 10) if of_log else self.limit
        is_above ^= of_log
        if self.center:
            part = f"({part}) - {self.center} * ({whole})"
        if self.center is not None:
            part = f"abs({part})"
        # With an exponent: DuckDB takes other numbers for decimals, and multiplies them ten times more slowly.
        limit += (-1 if is_above else 1) * _SLACK * abs(limit)
        return f"{part} {'>' if is_above else '<'} {limit:.16e} * ({whole})"

    @property
    def every_rank(self) -> str:
        """SQL predicate over slots that the rows of all ranks meet, a rank without data too; empty where none follows."""
        is_within = (self._merge, self.operator[0]) in (("max", "<"), ("min", ">"))
        return f"coalesce({self.rows}, true)" if is_within else ""

    @property
    def gate(self) -> str:
        """Comparison of one column that ``some_rank`` implies and that few row groups of a healthy run meet; empty if none."""
        if not self.some_rank:
            return ""
        if self._merge == "max":
            return self.some_rank
        counted = self.column if self._merge else _fraction(self.column)[0]
        return f"{counted} > 0" if counted in _RARE and self.operator == ">" and self.limit >= 0 else ""

    @property
    def _merge(self) -> str | None:
        """Rule by which the slots of two ranks join; None for a derived column."""
        slot = slots().get(self.column)
        return None if slot is None else slot.merge


#: What a rule asks for: all of it must hold; text is an SQL predicate over the columns of ``sites``.
Conditions: TypeAlias = "list[Condition | Keys | str]"


@dataclass(frozen=True)
class Look:
    """The rows that a rule asks for.

    Attributes:
        rows: SQL predicate over the columns of ``sites``.
        hint: SQL predicate over slots that holds for the row of one rank at least among those joined into such a row. Empty for
            rows that are not looked for beforehand.
        keys: further conditions on the keys, shared by many looks.
        columns: what the rule reads of these rows, columns or ``expression AS name``; the keys and ``ranks`` are there anyway.
        gates: comparisons of a column with a constant of which the hint implies one, and which few healthy rows meet: by them
            whole row groups are skipped.
    """

    rows: str
    hint: str
    keys: str
    columns: tuple[str, ...] = ()
    gates: tuple[str, ...] = ()


def look(conditions: Iterable[Condition | Keys | str], columns: Iterable[str], *, rows: str = RUNNING, keys: str = KEYS) -> Look:
    """Return the look of a rule that asks for some rows where all of its conditions hold.

    Args:
        conditions: the first that one rank at least must meet, and those on keys, are looked for beforehand; SQL predicates
            over the columns of ``sites`` are not.
        columns: what the rule reads.
        rows: which rows are asked for; by default operands of running casts.
        keys: what their keys say.
    """
    compared = [c for c in conditions if isinstance(c, Condition)]
    first = next((c for c in compared if c.some_rank), None)
    of_keys = [c for c in conditions if isinstance(c, Keys)]
    hints = [first.some_rank if first else "", *(c.every_rank for c in compared), *(f"({c.rows})" for c in of_keys)]
    gates = [first.gate if first else "", *(c.gate for c in of_keys)]
    bad = " AND ".join(f"({c if isinstance(c, str) else c.rows})" for c in conditions)
    return Look(f"{rows} AND {bad}", " AND ".join(filter(None, hints)), keys, tuple(columns), tuple(filter(None, gates))[:1])


def _fraction(column: str) -> tuple[str, str, bool]:
    """Return numerator and denominator of a derived column as SQL, and whether it is -10 log10 of the fraction."""
    return _sides_of(column, derived_columns()[column].expression)


@cache
def _sides_of(column: str, expression: str) -> tuple[str, str, bool]:
    tree, of_log = parse(expression), False
    match tree:
        case ast.BinOp(left=ast.UnaryOp(operand=ast.Constant(value=10)), op=ast.Mult(), right=ast.Call(args=[inner])):
            tree, of_log = inner, True
    sides = [tree.left, tree.right] if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Div) else []
    linear = (ast.Name, ast.Load, ast.BinOp, ast.Add, ast.Sub)
    if not sides or not all(isinstance(node, linear) for side in sides for node in ast.walk(side)):
        raise ValueError(f"{column} is no fraction of sums: its condition is written as text")
    # A rank that records no NaN has none.
    part, whole = (re.sub(r"\b(num_nan|num_inf)\b", r"coalesce(\1, 0)", ast.unparse(side)) for side in sides)
    return part, whole, of_log
