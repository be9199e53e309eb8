"""Derived columns are written once, as arithmetic on slot names, and compiled to a number here or to SQL for a query engine.

The language: slot names, numbers, ``+ - * /``, ``log2(.)``, ``log10(.)``, ``sqrt(.)``, ``max(., .)``. What has no data stays
without data: a missing operand, a division by zero and the logarithm of a negative number give None (NULL), while log(0) is minus
infinity, so that a tensor without any error has an infinite SQNR. The SQL is the common subset of DuckDB and Spark.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple


class _Operator(NamedTuple):
    sign: str
    apply: Callable[[float, float], float | None]


def _quotient(a: float, b: float) -> float | None:
    return None if b == 0 else a / b


_FUNCTIONS: dict[str, Callable[[float], float]] = {"log2": math.log2, "log10": math.log10, "sqrt": math.sqrt}
_OPERATORS: dict[type[ast.operator], _Operator] = {
    ast.Add: _Operator("+", operator.add),
    ast.Sub: _Operator("-", operator.sub),
    ast.Mult: _Operator("*", operator.mul),
    ast.Div: _Operator("/", _quotient),
}


@cache
def parse(expression: str) -> ast.expr:
    """Return the syntax tree of an expression; anything outside the language is a bug of the metric's author."""
    tree = ast.parse(expression, mode="eval").body
    for node in ast.walk(tree):
        allowed = (ast.BinOp, ast.UnaryOp, ast.USub, ast.Call, ast.Name, ast.Load, ast.Constant, *_OPERATORS)
        assert isinstance(node, allowed), f"{ast.dump(node)} in {expression!r}"
    return tree


def names(expression: str) -> list[str]:
    """Return the slot names that an expression reads, sorted."""
    return list(_names(expression))


@cache
def _names(expression: str) -> tuple[str, ...]:
    found = {node.id for node in ast.walk(parse(expression)) if isinstance(node, ast.Name)}
    return tuple(sorted(found - {*_FUNCTIONS, "max"}))


def evaluate(expression: str, values: Mapping[str, float | None]) -> float | None:
    """Return the value of an expression; None where there is no data."""
    return _evaluate(parse(expression), values)


def _evaluate(node: ast.expr, values: Mapping[str, float | None]) -> float | None:
    match node:
        case ast.Constant(value=value):
            return float(value)  # type: ignore[arg-type]  # parse() admits numbers only
        case ast.Name(id=name):
            return values.get(name)
        case ast.UnaryOp(operand=operand):
            inner = _evaluate(operand, values)
            return None if inner is None else -inner
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            inner = _evaluate(argument, values)
            return None if inner is None else _called(name, inner)
        case ast.Call(func=ast.Name(id="max"), args=[left, right]):
            a, b = _evaluate(left, values), _evaluate(right, values)
            return None if a is None or b is None else b if a < b else a  # a NaN stays, as the engines have it
        case ast.BinOp(left=left, op=sign, right=right):
            a, b = _evaluate(left, values), _evaluate(right, values)
            return None if a is None or b is None else _OPERATORS[type(sign)].apply(a, b)
    raise AssertionError(ast.dump(node))


def _called(name: str, value: float) -> float | None:
    """Return a function of a number: None of a negative one, minus infinity for the logarithm of 0."""
    if value < 0:
        return None
    return -math.inf if value == 0 and name != "sqrt" else _FUNCTIONS[name](value)


@cache
def to_sql(expression: str) -> str:
    """Return the expression as SQL over columns of the same names."""
    return _sql(parse(expression))


def _sql(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=value):
            return f"CAST({value!r} AS DOUBLE)"
        case ast.Name(id=name):
            return name
        case ast.UnaryOp(operand=operand):
            return f"(-{_sql(operand)})"
        case ast.Call(func=ast.Name(id="sqrt"), args=[argument]):
            inner = _sql(argument)
            return f"CASE WHEN {inner} >= 0 THEN sqrt({inner}) END"
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            inner = _sql(argument)
            return f"CASE WHEN {inner} > 0 THEN {name}({inner}) WHEN {inner} = 0 THEN CAST('-Infinity' AS DOUBLE) END"
        case ast.Call(func=ast.Name(id="max"), args=[left, right]):
            a, b = _sql(left), _sql(right)
            return f"CASE WHEN {a} >= {b} THEN {a} WHEN {a} < {b} THEN {b} END"
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return f"({_sql(left)} / nullif(CAST({_sql(right)} AS DOUBLE), 0))"
        case ast.BinOp(left=left, op=sign, right=right):
            return f"({_sql(left)} {_OPERATORS[type(sign)].sign} {_sql(right)})"
    raise AssertionError(ast.dump(node))
