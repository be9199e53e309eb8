"""Answers of the engine as numpy arrays: columns, and grids of names by steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8debug.store.columns import numbers_of

from .nonfinite import MISSING, NAN, States
from .records import Floats, Heat, Ints

#: What needs no conversion of Arrow's: importing those takes 50 ms, for which the first page shall not wait.
_PLAIN: dict[pa.DataType, type[np.generic]] = {
    pa.float64(): np.float64,
    pa.float32(): np.float32,
    pa.int64(): np.int64,
    pa.int32(): np.int32,
}


def floats(table: pa.Table, name: str) -> Floats:
    """Return a column as float32, NaN for null."""
    values, known = known_floats(table, name)
    return np.where(known, values, np.float32(np.nan))


def known_floats(table: pa.Table, name: str) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a column as float32, any number for null, and where it is not null."""
    values, known = _numbers(table, name)
    with np.errstate(over="ignore", invalid="ignore"):  # what stands for null may be anything
        return values.astype(np.float32), known


def doubles(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as float64, NaN for null."""
    values, known = _numbers(table, name)
    return np.where(known, values.astype(np.float64), np.nan)


def _numbers(table: pa.Table, name: str) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a column as it is, any number for null, and where it is not null."""
    column = table.column(name)
    if column.type not in _PLAIN:
        column = column.cast(pa.float64())
    values = numbers_of(column, _PLAIN[column.type])
    return values, np.concatenate([_known(chunk) for chunk in column.chunks]) if column.num_chunks else values > 0


def _known(chunk: pa.Array) -> NDArray[np.bool_]:
    """Return where an array is not null."""
    bits = chunk.buffers()[0]
    if bits is None:
        return np.ones(len(chunk), dtype=bool)
    places = np.unpackbits(np.frombuffer(bits, np.uint8), count=chunk.offset + len(chunk), bitorder="little")
    return places[chunk.offset :].astype(bool)


def ints(table: pa.Table, name: str) -> Ints:
    """Return a column without nulls as int32."""
    column = table.column(name)
    if column.type not in (pa.int64(), pa.int32()):
        column = column.cast(pa.int64())
    return numbers_of(column, _PLAIN[column.type]).astype(np.int32)


def _places(table: pa.Table, modules: list[str]) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64], Ints]:
    """Return the modules that are there, in the given order, each row's place among them and among the cells, and the steps.

    The steps are the first of each cell.
    """
    coded = table.column("module").cast(pa.string()).combine_chunks().dictionary_encode()
    named, codes = coded.dictionary.to_pylist(), numbers_of(coded.indices, np.int32)
    order = {name: i for i, name in enumerate(dict.fromkeys([*modules, *named]))}
    present = sorted(named, key=order.__getitem__)
    row = {name: i for i, name in enumerate(present)}
    cells, index = np.unique(ints(table, "cell"), return_inverse=True)
    rows = np.array([row[name] for name in named], dtype=np.int64)[codes]
    steps = np.full(len(cells), np.iinfo(np.int32).max, dtype=np.int32)
    np.minimum.at(steps, index, ints(table, "step"))
    return present, rows, index, steps


def grid_of(table: pa.Table, metric: str, unit: str, modules: list[str], width: int) -> Heat:
    """Return rows of (module, cell, step, v, kind, state) as an array of modules, in the given order, by cells of steps."""
    present, rows, index, steps = _places(table, modules)
    shape = len(present), len(steps)
    values = np.full(shape, np.nan, dtype=np.float32)
    kinds = np.zeros(shape, dtype=np.int32)
    states = np.full(shape, MISSING, dtype=np.int8)
    own, known = known_floats(table, "v")
    values[rows, index] = np.where(known, own, np.float32(np.nan))
    kinds[rows, index] = ints(table, "kind")
    states[rows, index] = np.where(known & np.isnan(own), NAN, ints(table, "state"))
    return Heat(
        metric=metric,
        unit=unit,
        modules=tuple(present),
        steps=steps,
        values=values,
        kinds=kinds,
        states=states,
        steps_per_cell=width,
    )


def states(table: pa.Table, name: str) -> States:
    """Return a column of states without nulls as int8."""
    return ints(table, name).astype(np.int8)
