"""``speed.json`` in a run's folder: what each of its GEMMs takes in BF16 and in FP8 on one GPU; written by ``fp8debug speed``.

docs/speed.md lists its keys. It lies beside ``manifest.json``, never in a rank's folder, and is replaced as a whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fp8debug.errors import RunError, UsageError
from fp8debug.recipes import Recipe, get_recipe
from fp8debug.store.file_checks import read_json
from fp8debug.types import Gemm

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

SPEED_FILE = "speed.json"
#: 1: first version. A reader refuses newer ones.
SPEED_VERSION = 1

SIZES = ("tokens", "in_features", "out_features")
GEMMS = tuple(gemm.value for gemm in Gemm)
#: A Linear's three sizes stay below what a GPU's memory could hold.
_MAX_SIZE = 2**31 - 1
#: A GEMM that takes a thousand seconds was not measured.
_MAX_US = 1e9


def write_speed(folder: Path, document: Mapping[str, Any]) -> Path:
    """Write the file whole or not at all; return its path."""
    target = folder / SPEED_FILE
    half = folder / f".{SPEED_FILE}.{os.getpid()}"
    try:
        half.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        half.replace(target)
    finally:
        half.unlink(missing_ok=True)
    return target


def read_speed(folder: Path) -> dict[str, Any] | None:
    """Return the document, None where speed was not measured.

    Raises:
        RunError: it is damaged or of a newer version.
    """
    path = folder / SPEED_FILE
    try:
        found = read_json(path, folder)
        if found["schema"] > SPEED_VERSION:
            raise RunError(f"{path} has version {found['schema']}, newer than {SPEED_VERSION}; install a newer fp8debug")
        times = [shape["gemms"][gemm][key] for shape in found["shapes"] for gemm in GEMMS for key in ("bf16_us", "fp8_us")]
        if not all(isinstance(us, int | float) and 0 <= us < _MAX_US for us in times):
            raise ValueError("a shape without its times")
        names = [shape["modules"] for shape in found["shapes"]]
        if not all(isinstance(fqns, list) and fqns and all(isinstance(fqn, str) for fqn in fqns) for fqns in names):
            raise ValueError("a shape without its modules")
    except FileNotFoundError:
        return None
    except RunError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} cannot be read ({error!r:.80}); delete it, or measure again with fp8debug speed") from None
    return dict(found)


def measured_costs(run: Run) -> dict[str, dict[str, float]] | None:
    """Return by module and GEMM the share of the measured FP8 speed-up that BF16 for that GEMM gives back.

    A GEMM that FP8 does not make faster gives nothing back: 0.

    Returns:
        shares that sum to 1 over all GEMMs that gain; None where speed was not measured for every FP8 module of the run.

    Raises:
        RunError: ``speed.json`` is damaged.
    """
    document = read_speed(run.path)
    if document is None:
        return None
    saved = {
        fqn: {gemm: max(0.0, shape["gemms"][gemm]["bf16_us"] - shape["gemms"][gemm]["fp8_us"]) for gemm in GEMMS}
        for shape in document["shapes"]
        for fqn in shape["modules"]
    }
    running = {m["fqn"] for m in run.modules if m.get("fp8")}
    if not running <= saved.keys():
        return None
    total = sum(saved[fqn][gemm] for fqn in running for gemm in GEMMS)
    return {fqn: {gemm: us / total if total else 0.0 for gemm, us in saved[fqn].items()} for fqn in running}


def cost_basis(run: Run) -> str | None:
    """Return in words what the costs of candidates are shares of; None where speed was not measured."""
    document = read_speed(run.path)
    if document is None:
        return None
    if measured_costs(run) is None:
        known = {fqn for shape in document["shapes"] for fqn in shape["modules"]}
        lacking = next(m["fqn"] for m in run.modules if m.get("fp8") and m["fqn"] not in known)
        return f"{SPEED_FILE} lacks {lacking}: costs are shares of the FLOPs; run fp8debug speed again"
    return f"costs are shares of the time that FP8 saves on {document.get('device')} ({SPEED_FILE})"


def shapes_of(run: Run, *, tokens: int | None = None, recipe: str | None = None) -> list[dict[str, Any]]:
    """Return the distinct Linear shapes of a run, as ``speed.measure_shapes`` takes them.

    Args:
        run: the run.
        tokens: rows of each call; by default those of the recorded inputs.
        recipe: measured in place of the modules' own; a module in BF16 is measured under the run's what-if recipe.

    Raises:
        UsageError: no such recipe, or neither tokens nor recorded inputs.
        RunError: the manifest names no Linear with its sizes.
    """
    recorded = {} if tokens else _recorded_tokens(run)
    tried = get_recipe(recipe or str(run.manifest.get("plain_recipe") or "blockwise"))
    shapes: dict[Hashable, dict[str, Any]] = {}
    for module in run.modules:
        if not (module.get("in_features") and module.get("out_features")):
            continue
        rows = tokens or recorded.get(module["fqn"])
        if rows is None:  # never called in a sampled step
            continue
        own = recipe is None and module.get("casts") is not None
        values = {"name": module.get("recipe") or "", "casts": module["casts"], "fast_accum": module.get("fast_accum") or ()}
        used = Recipe.from_dict(values) if own else tried
        key = rows, module["in_features"], module["out_features"], tuple(used.casts.values()), used.fast_accum
        entry = {"modules": [], **dict(zip(SIZES, key, strict=False)), "recipe": used.to_dict()}
        shapes.setdefault(key, entry)["modules"].append(module["fqn"])
    if not shapes:
        if any(m.get("in_features") for m in run.modules):
            raise UsageError(f"{run.name} has no recorded input that tells the number of tokens; give it with --tokens")
        raise RunError(f"{run.name} has no manifest that lists Linear modules with their sizes; use --shapes FILE")
    return list(shapes.values())


def _recorded_tokens(run: Run) -> dict[str, int]:
    """Return by module the rows of a call: elements of its input over in_features, the median of the sampled steps."""
    query = (
        "SELECT module, numel, num_tensors FROM sites WHERE gemm = 'fprop' AND tensor = 'input' AND reference = 'operand'"
        " AND numel > 0 AND num_tensors > 0"
    )
    widths = {m["fqn"]: m.get("in_features") for m in run.modules}
    found: dict[str, list[float]] = {}
    for row in run.sql(query).to_pylist():
        if widths.get(row["module"]):
            found.setdefault(row["module"], []).append(row["numel"] / row["num_tensors"] / widths[row["module"]])
    return {module: max(1, round(median(rows))) for module, rows in found.items()}


def load_shapes(path: Path, *, tokens: int | None = None, recipe: str | None = None) -> list[dict[str, Any]]:
    """Return the shapes of a JSON file: a list of ``{"tokens", "in_features", "out_features"}``, each with an optional "name".

    Args:
        path: the file.
        tokens: for entries that do not say.
        recipe: name of the recipe to measure; blockwise by default.

    Raises:
        UsageError: it cannot be read or an entry is no shape; the message says which and why.
    """
    try:
        entries = read_json(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from None
    example = '[{"name": "mlp.up", "tokens": 8192, "in_features": 4096, "out_features": 14336}]'
    if not isinstance(entries, list) or not entries:
        raise UsageError(f"{path} holds no list of shapes; expected for instance {example}")
    used = get_recipe(recipe or "blockwise").to_dict()
    shapes = []
    for number, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise UsageError(f"{path}, entry {number}: expected an object such as {example[1:-1]}, got {str(entry)[:60]!r}")
        unknown = sorted(set(entry) - {*SIZES, "name"})
        if unknown:
            raise UsageError(f"{path}, entry {number}: unknown key {unknown[0]!r}; known are name, {', '.join(SIZES)}")
        values = {"tokens": tokens, **entry}
        for size in SIZES:
            value = values.get(size)
            if type(value) is not int or not 1 <= value <= _MAX_SIZE:
                got = "none" if value is None else repr(value)[:40]
                raise UsageError(f"{path}, entry {number}: {size} must be a whole number of at least 1, got {got}")
        name = str(entry.get("name") or f"{values['in_features']} to {values['out_features']}")
        shapes.append({"modules": [name], **{size: values[size] for size in SIZES}, "recipe": used})
    return shapes
