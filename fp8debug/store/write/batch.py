"""Columns of lists and numpy arrays become one Arrow record batch of the schema; what means "no data" becomes null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fp8debug.store.columns import Lists

#: Items of a list that become an array before others may run.
_PIECE = 1024


def record_batch(
    schema: pa.Schema,
    columns: Mapping[str, Any],
    breathe: Callable[[], None] = lambda: None,
) -> pa.RecordBatch:
    """Return the columns as a batch.

    Args:
        schema: schema of the batch; a column that is missing in ``columns`` is null.
        columns: equally long lists or arrays by name, or one value for all rows.
        breathe: called now and then, to let other threads have the interpreter.

    Raises:
        ValueError: a column that the schema has not, or columns of different lengths.
    """
    breathe()
    _refuse_unknown(schema, columns)
    lengths = {name: len(value) for name, value in columns.items() if _is_column(value)}
    if len(set(lengths.values())) != 1:
        raise ValueError(f"the columns of {_table(schema)} differ in length: {lengths}")
    num_rows = next(iter(lengths.values()))
    is_statistic = _table(schema) == "stats"
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if not _is_column(values):
            array = pa.nulls(num_rows, field.type) if values is None else pa.repeat(pa.scalar(values, field.type), num_rows)
        else:
            breathe()
            is_list = pa.types.is_list(field.type)
            array = _lists(values, field) if is_list else _array(values, field, is_statistic=is_statistic, breathe=breathe)
        arrays.append(array)
    breathe()
    return pa.record_batch(arrays, schema=schema)


def row_batch(schema: pa.Schema, row: Mapping[str, Any]) -> pa.RecordBatch:
    """Return one row as a batch of the schema, in fewer calls than its columns take; what is missing in ``row`` is null.

    Raises:
        ValueError: a column that the schema has not.
    """
    _refuse_unknown(schema, row)
    made = pa.RecordBatch.from_struct_array(pa.array([row], type=pa.struct(list(schema))))
    return made.replace_schema_metadata(schema.metadata)


def _refuse_unknown(schema: pa.Schema, columns: Mapping[str, Any]) -> None:
    unknown = columns.keys() - set(schema.names)
    if unknown:
        raise ValueError(f"columns {', '.join(sorted(unknown))} are not in the schema of {_table(schema)}")


def _table(schema: pa.Schema) -> str:
    return str((schema.metadata or {}).get(b"fp8debug.table", b"the table").decode())


def _is_column(values: Any) -> bool:
    return isinstance(values, (list, tuple, np.ndarray))


def _array(values: Any, field: pa.Field, *, is_statistic: bool, breathe: Callable[[], None]) -> pa.Array:
    if isinstance(values, np.ndarray):
        array = _of_numpy(values, field)
    else:
        pieces: list[pa.Array] = []
        for start in range(0, len(values), _PIECE):
            if pieces:
                breathe()
            pieces.append(pa.array(values[start : start + _PIECE], type=field.type))
        array = pieces[0] if len(pieces) == 1 else pa.concat_arrays(pieces) if pieces else pa.array([], type=field.type)
    if is_statistic and pa.types.is_floating(field.type):
        array = _without_neutral(array, field.metadata[b"merge"].decode())
    return array


def _of_numpy(values: np.ndarray[Any, Any], field: pa.Field) -> pa.Array:
    """Return an array; a masked element is null, and among integers NaN is."""
    mask, values = np.ma.getmaskarray(values), np.ma.getdata(values)
    if np.issubdtype(values.dtype, np.floating) and pa.types.is_integer(field.type):
        mask = mask | np.isnan(values)
        values = np.where(mask, 0, values)
    array = pa.array(values, mask=mask if mask.any() else None)
    return array if array.type == field.type else array.cast(field.type)


def _without_neutral(array: pa.Array, merge: str) -> pa.Array:
    """Null what no tensor contributed: NaN, and -inf of a maximum or +inf of a minimum."""
    no_data = pc.is_nan(array)
    if merge in ("max", "min"):
        neutral = pa.scalar(-math.inf if merge == "max" else math.inf, array.type)
        no_data = pc.or_(no_data, pc.equal(array, neutral))
    return pc.if_else(no_data, pa.scalar(None, array.type), array)


def _lists(values: Any, field: pa.Field) -> pa.Array:
    """Return a list column from a list of (sequence | None) or an array ``[rows, size]``; a masked row is null."""
    if isinstance(values, np.ndarray) and values.ndim == 2:
        num_rows, size = values.shape
        lists = Lists(num_rows, size, values.dtype)
        lists.fill(np.ma.getdata(values), np.logical_not(np.all(np.ma.getmaskarray(values), axis=1)))
        return lists.array.cast(field.type)
    return pa.array([None if v is None else np.asarray(v) for v in values], type=field.type)
