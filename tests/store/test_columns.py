"""Columns over memory that is written to again are those that Arrow makes one by one of what the memory holds then."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fp8debug.store.columns import Lists, OneRow, columns_over
from fp8debug.store.schema import arrow_schema
from fp8debug.store.write.batch import row_batch

RANDOM = np.random.default_rng(0)
SHARES = (0.0, 0.3, 0.0, 1.0, 0.7)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 64, 337])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
def test_columns_are_those_of_arrow(num_rows: int, dtype: Any) -> None:
    values, bits = np.zeros((5, num_rows), dtype), np.zeros((5, -(-num_rows // 8)), np.uint8)
    held = pa.record_batch(columns_over(values, bits), names=list("abcde"))
    for share in SHARES:
        values[:] = 1000 * RANDOM.standard_normal(values.shape)
        valid: Any = RANDOM.random(values.shape) >= share
        bits[:] = np.packbits(valid, axis=1, bitorder="little")
        batch = held.slice(0)
        batch.validate(full=True)
        again = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
        again.validate(full=True)
        for i, is_there in enumerate(valid):
            for column in (batch[i], again[i]):
                assert column.null_count == (~is_there).sum()
                assert column.equals(pa.array(values[i], mask=~is_there))


def test_columns_without_bits_have_no_null() -> None:
    (column,) = columns_over(np.array([[1.0, np.nan]]))
    assert column.null_count == 0 and column.buffers()[0] is None


@pytest.mark.parametrize("num_rows", [1, 8, 9])
def test_lists_are_those_of_arrow(num_rows: int) -> None:
    lists = Lists(num_rows, 4, np.int64)
    held = pa.record_batch([lists.array], names=["a"])
    for share in SHARES:
        values, valid = RANDOM.integers(0, 9, (num_rows, 4)), RANDOM.random(num_rows) >= share
        lists.fill(values, valid)
        batch = held.slice(0)
        again = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
        expected = [row if is_there else None for row, is_there in zip(values.tolist(), valid, strict=True)]
        for column in (batch["a"], again["a"]):
            column.validate(full=True)
            assert column.to_pylist() == expected and column.null_count == expected.count(None)
            assert column.type == pa.list_(pa.int64())
        assert len(again["a"].values) == 4 * int(valid.sum()), "no more than the lists is written"


STEPS = arrow_schema("steps")
NOW = datetime(2026, 11, 23, 12, 0, 0, 123457, tzinfo=timezone.utc)


def test_a_row_in_cells_is_the_row_that_arrow_makes() -> None:
    """Each over the memory of the one before."""
    one = OneRow(STEPS)
    rows: list[dict[str, Any]] = [
        {"step": 0, "rank": 7, "time": NOW, "sampled": True, "loss": 2.5, "lr": 1e-5, "seconds": 0.25, "tokens": 2**40},
        {"step": np.int64(1), "rank": 0, "time": NOW.astimezone(timezone(timedelta(hours=-5))), "sampled": False},
        {"step": 2**62, "loss": float("inf"), "grad_norm": np.float32(0.1), "lr": 1, "tokens": None, "loss_scale": -0.0},
        {"step": -1, "loss": None, "time": datetime(1969, 12, 31, tzinfo=timezone.utc), "nonfinite_module": None},
    ]
    for row in rows:
        found, expected = one.message(row), row_batch(STEPS, row)
        assert found is not None and (found.num_rows, found.step) == (1, row["step"])
        batch = pa.ipc.read_record_batch(found.data, STEPS)
        batch.validate(full=True)
        assert batch.equals(expected)
        assert [column.null_count for column in batch.columns] == [column.null_count for column in expected.columns]
    found = one.message({"step": 3, "loss": float("nan")})
    assert found is not None and str(pa.ipc.read_record_batch(found.data, STEPS)["loss"].to_pylist()) == "[nan]"


@pytest.mark.parametrize(
    "more",
    [
        {"nonfinite_module": "a"},
        {"moon": 1},
        {"loss": "2.5"},
        {"tokens": 2.5},
        {"tokens": 2**63},
        {"rank": 2**31},
        {"sampled": 1},
        {"time": 1.0},
        {"time": NOW.replace(tzinfo=None)},
        {"step": None},
    ],
)
def test_a_row_of_more_than_numbers_is_left_to_arrow(more: dict[str, Any]) -> None:
    assert OneRow(STEPS).message({"step": 1, **more}) is None
