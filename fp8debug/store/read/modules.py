"""The view ``modules``: what the manifest says of each module, every value of its type or null."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from fp8debug.store.schema import ARROW_TYPES

#: Columns of the view ``modules``, from the manifest; ``call_index`` and ``flops_per_token`` are added.
_COLUMNS: dict[str, str] = {
    "fqn": "string",
    "kind": "string",
    "in_features": "int64",
    "out_features": "int64",
    "bias": "bool",
    "index": "int64",
    "fp8": "bool",
    "observed": "bool",
    "reason": "string",
    "requested": "string",
    "shared_with": "string",
    "params": "int64",
}


def modules_table(modules: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return the view's rows, in the order of the modules."""
    # From outside: a value of another type is no value.
    accepted = {"int64": int, "bool": bool, "string": str}
    typed: dict[str, list[Any]] = {
        name: [value if type(value := m.get(name)) is accepted[kind] else None for m in modules]
        for name, kind in _COLUMNS.items()
    }
    for name in ("in_features", "out_features", "index", "params"):
        typed[name] = [value if value is not None and 0 <= value < 2**62 else None for value in typed[name]]
    shapes = zip(typed["in_features"], typed["out_features"], strict=True)
    typed["call_index"] = [m["call_index"] for m in modules]
    typed["flops_per_token"] = [None if a is None or b is None else min(6 * a * b, 2**62) for a, b in shapes]
    kinds = {**_COLUMNS, "call_index": "int32", "flops_per_token": "int64"}
    return _table(typed, pa.schema([(name, ARROW_TYPES[kind]) for name, kind in kinds.items()]))


def _table(columns: Mapping[str, list[Any]], schema: pa.Schema) -> pa.Table:
    """Return lists as a table. Through JSON: pa.array() of a list imports pandas where it is installed, which takes 0.3 s."""
    rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if not lines:
        return schema.empty_table()
    text = "\n".join(lines).encode("utf-8", "replace")
    options = arrow_json.ReadOptions(use_threads=False, block_size=len(text) + 1)
    return arrow_json.read_json(pa.BufferReader(text), options, arrow_json.ParseOptions(explicit_schema=schema))
