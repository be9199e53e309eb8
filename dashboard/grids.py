"""Answers of the engine as numpy arrays: columns, and grids of names by steps."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from fp8debug.store.numbers import numbers_of

from .records import Floats, Heat, Ints


def floats(table: pa.Table, name: str) -> Floats:
    """Return a column as float32, NaN for null."""
    values, known = known_floats(table, name)
    return np.where(known, values, np.float32(np.nan))


def known_floats(table: pa.Table, name: str) -> tuple[Floats, NDArray[np.bool_]]:
    """Return a column as float32, any number for null, and where it is not null."""
    column = table.column(name)
    with np.errstate(over="ignore"):
        values = numbers_of(column.cast(pa.float64()), np.float64).astype(np.float32)
    return values, numbers_of(column.is_valid().cast(pa.uint8()), np.uint8) > 0


def ints(table: pa.Table, name: str) -> Ints:
    """Return a column without nulls as int32."""
    return numbers_of(table.column(name).cast(pa.int64()), np.int64).astype(np.int32)


def grid_of(table: pa.Table, metric: str, unit: str, modules: list[str], width: int) -> Heat:
    """Return rows of (module, cell, step, v, kind) as an array of modules, in the given order, by cells of steps."""
    coded = table.column("module").cast(pa.string()).combine_chunks().dictionary_encode()
    named, codes = coded.dictionary.to_pylist(), numbers_of(coded.indices, np.int32)
    order = {name: i for i, name in enumerate(dict.fromkeys([*modules, *named]))}
    present = sorted(named, key=order.__getitem__)
    row = {name: i for i, name in enumerate(present)}
    cells, index = np.unique(ints(table, "cell"), return_inverse=True)
    rows = np.array([row[name] for name in named], dtype=np.int64)[codes]
    values = np.full((len(present), len(cells)), np.nan, dtype=np.float32)
    kinds = np.zeros((len(present), len(cells)), dtype=np.int32)
    steps = np.full(len(cells), np.iinfo(np.int32).max, dtype=np.int32)
    values[rows, index] = floats(table, "v")
    kinds[rows, index] = ints(table, "kind")
    np.minimum.at(steps, index, ints(table, "step"))
    return Heat(metric=metric, unit=unit, modules=tuple(present), steps=steps, values=values, kinds=kinds, steps_per_cell=width)
