"""The arithmetic of derived columns: what has no data stays without, and a lossless cast has an infinite SQNR."""

from __future__ import annotations

import math

import pytest

from fp8debug.metrics import derive, derived_columns, slots
from fp8debug.metrics.expression import evaluate, names, parse

INF = math.inf


@pytest.mark.parametrize(
    ("expression", "values", "expected"),
    [
        ("a / b", {"a": 1, "b": 4}, 0.25),
        ("a / b", {"a": 0, "b": 0}, None),
        ("a / b", {"a": 1, "b": 0}, None),
        ("a / b", {"a": 0, "b": 4}, 0.0),
        ("a / b", {"a": None, "b": 4}, None),
        ("a / b", {"a": 1}, None),
        ("a / (b - c)", {"a": 1, "b": 2, "c": 2}, None),
        ("a - b - c", {"a": 10, "b": 3, "c": 2}, 5.0),
        ("a + b * c", {"a": 1, "b": 2, "c": 3}, 7.0),
        ("-a", {"a": 2}, -2.0),
        ("-a", {"a": None}, None),
        ("log2(a)", {"a": 8}, 3.0),
        ("log2(a)", {"a": 0}, -INF),
        ("log2(a)", {"a": -1}, None),
        ("-10 * log10(a)", {"a": 0}, INF),
        ("-10 * log10(a)", {"a": 1e-3}, 30.0),
        ("-10 * log10(a / b)", {"a": 0, "b": 0}, None),
        ("-10 * log10(a / b)", {"a": 0, "b": 1}, INF),
        ("log10(a)", {}, None),
        ("sqrt(a)", {"a": 0}, 0.0),
        ("sqrt(a)", {"a": 9}, 3.0),
        ("sqrt(a)", {"a": -9}, None),
        ("max(a - 1, 0)", {"a": 3}, 2.0),
        ("max(a - 1, 0)", {"a": 0.5}, 0.0),
        ("max(a - 1, 0)", {"a": None}, None),
        ("max(a, b)", {"a": 1}, None),
        ("a / sqrt(b * c)", {"a": 0, "b": 1, "c": 0}, None),
        ("3", {}, 3.0),
    ],
)
def test_evaluate(expression: str, values: dict[str, float | None], expected: float | None) -> None:
    assert evaluate(expression, values) == expected


def test_names_are_sorted_and_without_functions() -> None:
    assert names("-10 * log10(b / sqrt(a)) + max(b, 0)") == ["a", "b"]


@pytest.mark.parametrize("expression", ["a ** b", "a if b else c", "a.b", "'x' < a", "a % b", "[a]", "+a"])
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(AssertionError):
        parse(expression)


def test_derived_columns_read_slots_only() -> None:
    for name, column in derived_columns().items():
        assert set(names(column.expression)) <= set(slots()), name


def test_derived_of_nothing_is_nothing() -> None:
    assert set(derive({}).values()) == {None}
    zeros = dict.fromkeys(slots(), 0.0)
    assert all(value is None or abs(value) == INF for value in derive(zeros).values())


def test_derived_of_a_lossless_cast() -> None:
    sums = {"sum_x": 3.0, "sum_x2": 5.0, "sum_y2": 5.0, "sum_xy": 5.0, "sum_err": 0.0, "sum_err2": 0.0}
    found = derive({"numel": 2, "num_zero": 0, "num_nan": 0, "num_inf": 0, "num_underflow": 0, "num_actual_nonfinite": 0, **sums})
    assert found["sqnr_db"] == INF
    assert (found["mse"], found["nmse"], found["bias"]) == (0, 0, 0)
    assert (found["cosine"], found["gain"], found["norm_ratio"]) == (1, 1, 1)
    assert found["underflow_rate"] == 0 and found["overflow_rate"] is None


def test_derived_of_a_total_underflow() -> None:
    found = derive({"numel": 4, "sum_x2": 4.0, "sum_y2": 0.0, "sum_xy": 0.0, "sum_err2": 4.0, "num_underflow": 4})
    assert found["sqnr_db"] == 0 and found["norm_ratio"] == 0 and found["gain"] == 0
    assert found["cosine"] is None, "0/0 is no data"
    assert found["underflow_rate"] == 1
