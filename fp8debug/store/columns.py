"""Columns of Arrow over memory of NumPy's, which is written to once for all of a kind and not column by column."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_CELL = 8
_EPOCH, _MICROSECOND = datetime(1970, 1, 1, tzinfo=timezone.utc), timedelta(microseconds=1)


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
        self._lists = np.zeros((num_rows, size), dtype=dtype)
        self._bits = np.zeros(-(-num_rows // 8), dtype=np.uint8)
        self._valid, self._at = bytes(num_rows), np.zeros(0, dtype=np.intp)  # as last written
        (flat,) = columns_over(self._lists.reshape(1, -1))
        buffers = [pa.py_buffer(self._bits), pa.py_buffer(self._ends)]
        self.array = pa.Array.from_buffers(pa.list_(flat.type), num_rows, buffers, children=[flat])

    def fill(self, values: npt.NDArray[Any], valid: npt.NDArray[np.bool_]) -> None:
        """Write lists ``[rows, size]``; one that is not valid is null."""
        if valid.tobytes() != self._valid:
            self._valid, self._at = valid.tobytes(), np.flatnonzero(valid)
            np.cumsum(valid * np.int32(values.shape[1]), out=self._ends[1:])
            self._bits[:] = np.packbits(valid, bitorder="little")
        if self._valid.count(1):
            values.take(self._at, axis=0, out=self._lists[: len(self._at)], mode="clip")


def _as_flag(value: Any) -> int:
    if not isinstance(value, bool):
        raise TypeError("not a flag")
    return int(value)


def _as_microseconds(value: datetime) -> int:
    return (value - _EPOCH) // _MICROSECOND


def _as_it_is(value: Any) -> Any:
    return value


#: How :mod:`struct` writes one number into a cell of eight bytes, and what makes that number of a value.
_CELLS: dict[pa.DataType, tuple[str, Callable[[Any], Any]]] = {
    pa.int64(): ("q", _as_it_is),
    pa.int32(): ("i4x", _as_it_is),
    pa.float64(): ("d", _as_it_is),
    pa.bool_(): ("B7x", _as_flag),
    pa.timestamp("us", tz="UTC"): ("q", _as_microseconds),
}


class Message(NamedTuple):
    """Rows of one step as they are written."""

    data: pa.Buffer
    num_rows: int
    step: int


class OneRow:
    """Makes the message of Arrow's stream that holds one row, in a quarter of the time that its columns take.

    Args:
        schema: of the row; a column that is no number is always null.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._columns = {field.name: _CELLS[field.type] for field in schema if field.type in _CELLS}
        self._struct = struct.Struct("=" + "".join(code for code, _ in self._columns.values()))
        self._memory = bytearray(self._struct.size + len(self._columns))  # cells; a byte for each that says that it is data
        self._mine = threading.Lock()
        data, first = pa.py_buffer(self._memory), self._struct.size
        arrays = dict(zip(schema.names, (pa.nulls(1, field.type) for field in schema), strict=True))
        for i, name in enumerate(self._columns):
            buffers = [data.slice(first + i, 1), data.slice(i * _CELL, _CELL)]
            arrays[name] = pa.Array.from_buffers(schema.field(name).type, 1, buffers)
        self._batch = pa.record_batch(list(arrays.values()), schema=schema)

    def message(self, row: Mapping[str, Any]) -> Message | None:
        """Return the message; what is missing in ``row`` or None is null.

        None where the row has more than numbers, as a text or what the schema does not know, or lacks its step.
        """
        given = {name: value for name, value in row.items() if value is not None}
        try:
            if not given.keys() <= self._columns.keys():
                return None
            cells = [make(given[name]) if name in given else 0 for name, (_, make) in self._columns.items()]
            with self._mine:
                self._struct.pack_into(self._memory, 0, *cells)
                self._memory[self._struct.size :] = bytes(name in given for name in self._columns)
                return Message(self._batch.slice(0).serialize(), 1, given["step"])
        except (KeyError, TypeError, ValueError, OverflowError, struct.error):
            return None


def numbers_of(column: pa.Array | pa.ChunkedArray, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return the numbers of a column, ``[rows]``, any number for null; read-only where they are Arrow's own memory.

    Args:
        column: numbers of one width; no booleans, which take a bit each.
        dtype: their type, which has to be Arrow's: nothing is converted, so cast the column first.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.frombuffer(c.buffers()[1], dtype)[c.offset : c.offset + len(c)] for c in chunks if len(c)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, dtype)
