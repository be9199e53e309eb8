"""From a finished step to columns of the ``stats`` table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fp8debug.metrics import METRICS
from fp8debug.observer import FinishedStep, RowInfo
from fp8debug.sharding import Piece
from fp8debug.table import Snapshot
from fp8debug.types import Gemm, Reference, TensorRole


class Described:
    """The columns that say what rows are; they are the same objects as long as the rows are."""

    def __init__(self) -> None:
        self._infos: list[RowInfo] = []
        self._columns: dict[str, Any] = {}
        self._operand = np.zeros(0, dtype=bool)

    def __call__(self, infos: list[RowInfo]) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        """Return the columns, not to be changed, and which rows are an operand's."""
        if infos != self._infos:
            self._columns, self._operand = _described(infos)
            self._infos = infos
        return self._columns, self._operand


def stats_columns(
    finished: FinishedStep,
    snapshot: Snapshot,
    rows: list[int],
    infos: list[RowInfo],
    described: Described | None = None,
    breathe: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return equally long columns; a slot without data is masked.

    A slot is without data where its metric does not apply to the row, where the metric's count is 0, and where an extreme
    is still at its neutral element.

    Args:
        finished: the step.
        snapshot: of a table.
        rows: of the table.
        infos: what they are.
        described: what knows their description from the step before.
        breathe: called now and then, to let other threads have the interpreter.
    """
    values = snapshot.read(rows)
    names, operand = (described or Described())(infos)
    columns: dict[str, Any] = {"step": np.full(len(rows), finished.step), **names, "num_tensors": values["num_tensors"]}
    for metric in METRICS:
        breathe()
        absent = (values[metric.present] == 0) & (metric.present != "numel")
        if not metric.of_results:
            absent = absent | ~operand
        for slot in metric.slots:
            found = values[slot.name]
            if slot.size > 1:
                missing = absent | ~(found.sum(1) > 0)
                columns[slot.name] = np.ma.masked_array(found, np.repeat(missing[:, None], slot.size, axis=1))
            else:
                mask = absent | (~np.isfinite(found) if slot.kind == "float32" else False)
                columns[slot.name] = np.ma.masked_array(found, mask)
    return columns


def _described(infos: list[RowInfo]) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    modules, call_indices, keys, places = zip(*infos, strict=True)
    gemms, tensors, casts, references, actual = zip(*keys, strict=True)
    operand = np.array([reference is Reference.OPERAND for reference in references])
    pieces = [p or Piece(t is TensorRole.WEIGHT, 0) for p, t in zip(places, tensors, strict=True)]
    columns = {
        "module": list(modules),
        "gemm": [gemm._value_ for gemm in gemms],
        "tensor": [tensor._value_ for tensor in tensors],
        "cast_name": list(casts),
        "reference": [reference._value_ for reference in references],
        "actual": list(actual),
        "call_index": list(call_indices),
        "replicated": [piece.replicated for piece in pieces],
        "shard": [piece.shard for piece in pieces],
    }
    return columns, operand


def first_nonfinite(columns: dict[str, Any], seen: set[tuple[str, str, str]]) -> list[tuple[str, str]]:
    """Return (module, message) for each site that shows its first NaN or Inf in these rows; ``seen`` is updated."""
    found = []
    num_nonfinite = np.ma.filled(columns["num_nan"] + columns["num_inf"], 0)
    made_here = np.ma.filled(columns["num_actual_nonfinite"], 0)
    for row in np.flatnonzero((num_nonfinite > 0) | (made_here > 0)):
        site = columns["module"][row], columns["gemm"][row], columns["tensor"][row]
        num_before, num_made = num_nonfinite[row], made_here[row]
        if site not in seen:
            seen.add(site)
            where = f"made by the cast or GEMM: {num_made}" if num_made else f"in the high-precision tensor: {num_before}"
            found.append((site[0], f"{site[1]} {site[2]}: first NaN or Inf, {where}"))
    return found


def unsampled_nonfinite(finished: FinishedStep) -> dict[str, str]:
    """Take ``first_nonfinite`` out of a step's scalars; return what the steps table holds of it, nothing where all was finite."""
    code = int(finished.scalars.pop("first_nonfinite", -1))
    if code < 0:
        return {}
    origin = "weight" if code & 2 else "outside" if code & 1 else "gemm"
    return {"nonfinite_module": finished.checked[code >> 2], "nonfinite_origin": origin}


def by_execution(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what :func:`first_nonfinite` found with the forward pass first, and the backward pass from its end."""
    forward = [one for one in found if one[1].startswith(Gemm.FPROP.value)]
    return forward + [one for one in reversed(found) if one not in forward]
