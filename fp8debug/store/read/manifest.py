"""A manifest as readers may rely on it: what it holds under the names that we know has the type that we write.

What has another type is left out and said, so that no rule, page or exporter meets a list where it expects a name. Names that we
do not know are kept as they are: a newer version, or a user, may have put them there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import json as arrow_json

from fp8debug.errors import UsageError
from fp8debug.recipes import Cast
from fp8debug.store.file_checks import read_json
from fp8debug.store.schema import ARROW_TYPES

#: More modules than a model has.
MAX_MODULES = 1_000_000

_TOP: dict[str, Any] = {
    **dict.fromkeys(("name", "created", "ended", "fp8debug_version", "plain_recipe", "device", "hostname", "gemms_note"), str),
    **dict.fromkeys(("modules", "gemms", "filters", "outside", "writings", "argv", "what_if", "include", "exclude"), list),
    **dict.fromkeys(("resumed", "parameters"), list),
    **dict.fromkeys(("recipe", "environment", "mesh", "git"), dict),
    **dict.fromkeys(("schema_version", "rank", "world_size", "every", "turns", "shadow_rows", "pid"), int),
}
#: Lists of objects: an entry that is none is left out.
_OBJECTS: dict[str, dict[str, Any]] = {
    "modules": {
        **dict.fromkeys(("fqn", "kind", "reason", "requested", "shared_with", "recipe", "weight_dtype", "recomputed"), str),
        **dict.fromkeys(("in_features", "out_features", "index", "params", "selects"), int),
        **dict.fromkeys(("bias", "fp8", "observed", "called"), bool),
        "casts": dict,
        "fast_accum": list,
    },
    "gemms": {**dict.fromkeys(("fqn", "kind", "precision", "weight"), str), "flops": int, "fp8": bool, "ops": list},
    "filters": {"kind": str, "pattern": str, "matched": int},
    "outside": dict.fromkeys(("fqn", "kind", "reason"), str),
    "parameters": {"role": str, "first": str, "num_tensors": int, "num_params": int},
    "writings": {"first_part": int, "created": str},
    "resumed": {
        **dict.fromkeys(("against", "setting", "before", "now", "module"), str),
        **dict.fromkeys(("step", "num_modules"), int),
        "sites": list,
        "is_notable": bool,
    },
}
_WORDS = {str: "text", list: "a list", dict: "an object", int: "a whole number", bool: "true or false", float: "a number"}


def read_manifest(path: Path, root: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return a manifest, None where it is missing or cannot be read; what is wrong with it is added to ``problems``."""
    try:
        value = read_json(path, root)
        if not isinstance(value, dict):
            raise ValueError("not a JSON object")
    except FileNotFoundError:
        problems.append(f"{path} is missing")
    except (OSError, ValueError) as error:
        problems.append(f"{path} cannot be read: {(str(error) or type(error).__name__).splitlines()[0]}")
    else:
        return checked(value, path, problems)
    return None


def checked(manifest: Mapping[str, Any], path: Path, problems: list[str]) -> dict[str, Any]:
    """Return a manifest without what has another type than ours; each kind of fault is one sentence in ``problems``."""
    wrong = _Wrong()
    found = wrong.without(manifest, _TOP, "")
    for name, kinds in _OBJECTS.items():
        if found.get(name) is not None:
            found[name] = _checked_objects(found[name], kinds, f"{name}[]", wrong)
    if found.get("modules") is not None:
        found["modules"] = [module for module in found["modules"] if module.get("fqn") is not None]
    good: set[str] = set()
    for module in found.get("modules") or ():
        if "casts" in module and not _are_casts(module["casts"], good):
            module["casts"] = None
            wrong.note("modules[].casts", "no casts that we know")
        for size in ("in_features", "out_features", "params", "index", "selects"):
            if not 0 <= (module.get(size) or 0) < 2**62:
                module[size] = None
    if isinstance(found.get("recipe"), dict):
        found["recipe"] = wrong.without(found["recipe"], {"name": str, "casts": dict}, "recipe.")
    problems.extend(f"{path}: {sentence}; it is left out" for sentence in wrong.sentences())
    return found


class _Wrong:
    """Values of a manifest that are left out, by the place where each kind of them lies."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}

    def note(self, place: str, what: str, number: int = 1) -> None:
        """Count values at a place; the last one names what they are."""
        self._found[place] = what, self._found.get(place, ("", 0))[1] + number

    def without(self, values: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return an object without the values of another type than theirs."""
        kept = {}
        for key, value in values.items():
            expected = kinds.get(key)
            if value is None or expected is None or _fits(value, expected):
                kept[key] = value
            else:
                self.note(where + key, f"{_word(type(value))}, expected {_WORDS[expected]}")
        return kept

    def sentences(self) -> Iterator[str]:
        """Yield a sentence for each place."""
        for place, (what, number) in self._found.items():
            yield f"{place} is {what}" + (f" in {number} places" if number > 1 else "")


def _checked_objects(entries: Sequence[Any], kinds: Mapping[str, Any], place: str, wrong: _Wrong) -> list[dict[str, Any]]:
    """Return the objects of a list, each without what has another type."""
    objects = [entry for entry in entries[:MAX_MODULES] if isinstance(entry, dict)]
    if len(objects) < len(entries):
        wrong.note(place, "no object", len(entries) - len(objects))
    return [wrong.without(entry, kinds, f"{place}.") for entry in objects]


def _fits(value: Any, expected: type) -> bool:
    if expected is bool:
        return isinstance(value, bool)
    return isinstance(value, expected) and not (expected is int and isinstance(value, bool))


def _word(kind: type) -> str:
    return _WORDS.get(kind, kind.__name__)


def _are_casts(casts: Any, good: set[str]) -> bool:
    """Return whether these are casts; ``good`` holds those that were seen to be, as text: hundreds of modules share a few."""
    try:
        for cast in casts.values() if casts is not None else ():
            text = repr(cast)
            if cast is not None and text not in good:
                Cast.from_dict(cast)
                good.add(text)
    except (UsageError, TypeError, AttributeError):
        return False
    return True


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
