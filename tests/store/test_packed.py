"""Columns that are packed together are those that Arrow makes one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from fp8debug.store.packed import numbers_or, packed, packed_lists

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 64, 337])
@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.float32])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_columns_are_those_of_arrow(num_rows: int, dtype: Any, share: float) -> None:
    values = (1000 * RANDOM.standard_normal((5, num_rows))).astype(dtype)
    valid = RANDOM.random(values.shape) >= share
    columns = packed(values, valid)
    for column, numbers, is_there in zip(columns, values, valid, strict=True):
        column.validate(full=True)
        assert column.equals(pa.array(numbers, mask=~is_there)) and column.null_count == (~is_there).sum()
        np.testing.assert_array_equal(numbers_or(column, -1), np.where(is_there, numbers, dtype(-1)))
        middle = column[num_rows // 3 :]
        np.testing.assert_array_equal(numbers_or(middle, -1), np.where(is_there, numbers, dtype(-1))[num_rows // 3 :])
    batch = pa.record_batch(columns, names=list("abcde"))
    again = pa.ipc.read_record_batch(batch.serialize(), batch.schema)
    again.validate(full=True)
    assert again.equals(batch)


def test_transposed_numbers_are_packed_by_column() -> None:
    values = np.arange(12.0).reshape(4, 3)
    assert [column.to_pylist() for column in packed(values.T, np.ones((3, 4), dtype=bool))] == values.T.tolist()


@pytest.mark.parametrize("valid", [[True] * 9, [False] * 9, [True, False, True, True, False, False, True, True, False]])
def test_lists_are_those_of_arrow(valid: list[bool]) -> None:
    values = RANDOM.integers(0, 9, (9, 4))
    found = packed_lists(values, np.array(valid))
    found.validate(full=True)
    assert found.to_pylist() == [row if is_there else None for row, is_there in zip(values.tolist(), valid, strict=True)]
    assert found.type == pa.list_(pa.int64())


def test_a_column_without_null_is_given_as_it_lies() -> None:
    (column,) = packed(np.array([[1.0, 2.0]]), np.ones((1, 2), dtype=bool))
    assert np.shares_memory(numbers_or(column, 0.0), np.frombuffer(column.buffers()[1], np.float64))
