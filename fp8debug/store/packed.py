"""Columns of one type as Arrow arrays, all at once: what is done column by column takes a hundred calls of Python a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8debug.store.numbers import numbers_of


def packed(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> list[pa.Array]:
    """Return numbers as Arrow arrays that share their memory.

    Args:
        values: ``[columns, rows]``, not to be changed any more.
        valid: of that shape; what is not is null.
    """
    num_rows = values.shape[1]
    bits = np.packbits(valid, axis=1, bitorder="little")
    data, masks = pa.py_buffer(np.ascontiguousarray(values)), pa.py_buffer(bits)
    size, width, kind = num_rows * values.itemsize, bits.shape[1], pa.from_numpy_dtype(values.dtype)
    nulls = (num_rows - np.count_nonzero(valid, axis=1)).tolist()
    return [
        pa.Array.from_buffers(kind, num_rows, [masks.slice(i * width, width) if null else None, data.slice(i * size, size)], null)
        for i, null in enumerate(nulls)
    ]


def packed_lists(values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> pa.Array:
    """Return lists of equal length ``[rows, size]`` as an Arrow array; a row that is not valid is null."""
    ends = np.zeros(len(values) + 1, dtype=np.int32)
    np.cumsum(valid * np.int32(values.shape[1]), out=ends[1:])
    (flat,) = packed(values[valid].reshape(1, -1), np.ones((1, int(ends[-1])), dtype=bool))
    masks = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(pa.list_(flat.type), len(values), [masks, pa.py_buffer(ends)], children=[flat])


def numbers_or(column: pa.Array, missing: float) -> npt.NDArray[Any]:
    """Return the numbers of a column of one width, ``missing`` for null."""
    numbers = numbers_of(column, column.type.to_pandas_dtype())
    masks = column.buffers()[0]
    if masks is None or not column.null_count:
        return numbers
    bits = np.unpackbits(np.frombuffer(masks, np.uint8), bitorder="little")[column.offset : column.offset + len(column)]
    return np.where(bits, numbers, numbers.dtype.type(missing))
