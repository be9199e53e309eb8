"""Columns of Arrow over memory of NumPy's, which is written to once for all of a kind and not column by column."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def columns_over(values: npt.NDArray[Any], bits: npt.NDArray[np.uint8] | None = None) -> list[pa.Array]:
    """Return columns over memory that may be written to later; how many null they have is not counted before it is asked.

    Once it was, Arrow keeps the number: before each time that the memory was written to, take a slice of what holds them.

    Args:
        values: ``[columns, rows]``, contiguous.
        bits: for each column a bit a row, the lowest first, which says that a number is data; contiguous. None: all are.
    """
    num_rows, kind = values.shape[1], pa.from_numpy_dtype(values.dtype)
    data, size = pa.py_buffer(values), num_rows * values.itemsize
    masks, width = (None, 0) if bits is None else (pa.py_buffer(bits), bits.shape[1])
    return [
        pa.Array.from_buffers(kind, num_rows, [masks and masks.slice(i * width, width), data.slice(i * size, size)])
        for i in range(len(values))
    ]


class Lists:
    """A column of lists of equal length over memory that may be written to later, as :func:`columns_over` says.

    Args:
        num_rows: lists.
        size: numbers of each.
        dtype: of the numbers.
    """

    def __init__(self, num_rows: int, size: int, dtype: npt.DTypeLike) -> None:
        self._ends = np.zeros(num_rows + 1, dtype=np.int32)
        self._flat = np.zeros(num_rows * size, dtype=dtype)
        self._bits = np.zeros(-(-num_rows // 8), dtype=np.uint8)
        (flat,) = columns_over(self._flat[None])
        buffers = [pa.py_buffer(self._bits), pa.py_buffer(self._ends)]
        self.array = pa.Array.from_buffers(pa.list_(flat.type), num_rows, buffers, children=[flat])

    def fill(self, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> None:
        """Write lists ``[rows, size]``; one that is not valid is null."""
        np.cumsum(valid * np.int32(values.shape[1]), out=self._ends[1:])
        self._flat[: self._ends[-1]] = values[valid].reshape(-1)
        self._bits[:] = np.packbits(valid, bitorder="little")
