"""The view ``modules``: what the manifest says of each module, every value of its type or null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

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
    arrays = {name: pa.array(typed[name], ARROW_TYPES[kind]) for name, kind in _COLUMNS.items()}
    shapes = zip(typed["in_features"], typed["out_features"], strict=True)
    flops = [None if a is None or b is None else min(6 * a * b, 2**62) for a, b in shapes]
    arrays["call_index"] = pa.array([m["call_index"] for m in modules], pa.int32())
    arrays["flops_per_token"] = pa.array(flops, pa.int64())
    return pa.table(arrays)
