"""From a finished step to columns of the ``stats`` table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fp8debug.metrics import METRICS
from fp8debug.observer import FinishedStep, RowInfo
from fp8debug.sharding import Piece
from fp8debug.table import Snapshot
from fp8debug.types import Gemm, Reference, TensorRole

#: Rows that are described before others may run.
_PIECE = 256


class Described:
    """The columns that say what rows are; they are the same objects as long as the rows are, so that no step makes them anew.

    Args:
        breathe: called now and then, to let other threads have the interpreter.
    """

    def __init__(self, breathe: Callable[[], None] = lambda: None) -> None:
        self._breathe = breathe
        self._order: list[int] = []
        self._infos: list[RowInfo] = []
        self._first_call = 0
        self._rows = np.zeros(0, dtype=np.intp)
        self._columns: dict[str, Any] = {}
        self._operand = np.zeros(0, dtype=bool)

    def __call__(
        self, filled: Mapping[int, RowInfo], first_call: int = 0
    ) -> tuple[np.ndarray[Any, Any], dict[str, Any], np.ndarray[Any, Any]]:
        """Return the rows in their order, the columns, not to be changed, and which rows are an operand's.

        Args:
            filled: what rows are, by their numbers.
            first_call: what a rank's places in execution order begin with.
        """
        order = list(filled)
        self._breathe()
        infos = list(filled.values())
        self._breathe()
        if (first_call, order) != (self._first_call, self._order) or infos != self._infos:
            self._rows = np.array(sorted(order), dtype=np.intp)
            self._describe([filled[row] for row in self._rows.tolist()], first_call)
            self._order, self._infos, self._first_call = order, infos, first_call
        return self._rows, self._columns, self._operand

    def _describe(self, infos: list[RowInfo], first_call: int) -> None:
        columns: dict[str, list[Any]] = {name: [] for name in _DESCRIPTION}
        operand: list[bool] = []
        for start in range(0, len(infos), _PIECE):
            self._breathe()
            modules, call_indices, keys, places = zip(*infos[start : start + _PIECE], strict=True)
            gemms, tensors, casts, references, actual = zip(*keys, strict=True)
            pieces = [p or Piece(t is TensorRole.WEIGHT, 0) for p, t in zip(places, tensors, strict=True)]
            operand += [reference is Reference.OPERAND for reference in references]
            described = (
                modules, [gemm._value_ for gemm in gemms], [tensor._value_ for tensor in tensors], casts,
                [reference._value_ for reference in references], actual, [first_call + at for at in call_indices],
                [piece.replicated for piece in pieces], [piece.shard for piece in pieces],
            )  # fmt: skip
            for column, values in zip(columns.values(), described, strict=True):
                column += values
        self._columns, self._operand = columns, np.array(operand, dtype=bool)


_DESCRIPTION = ("module", "gemm", "tensor", "cast_name", "reference", "actual", "call_index", "replicated", "shard")


def stats_columns(
    finished: FinishedStep,
    snapshot: Snapshot,
    filled: Mapping[int, RowInfo],
    described: Described,
    first_call: int = 0,
    breathe: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return equally long columns; a slot without data is masked.

    A slot is without data where its metric does not apply to the row, where the metric's count is 0, and where an extreme
    is still at its neutral element.

    Args:
        finished: the step.
        snapshot: of a table.
        filled: what the table's rows are, by their numbers.
        described: what knows their description from the step before.
        first_call: what a rank's places in execution order begin with.
        breathe: called now and then, to let other threads have the interpreter.
    """
    rows, names, operand = described(filled, first_call)
    breathe()
    values = snapshot.read(rows)
    columns: dict[str, Any] = {"step": np.full(len(rows), finished.step), **names, "num_tensors": values["num_tensors"]}
    for metric in METRICS:
        breathe()
        absent = (values[metric.present] == 0) & (metric.present != "numel")
        if not metric.of_results:
            absent = absent | ~operand
        for slot in metric.slots:
            breathe()
            found = values[slot.name]
            if slot.size > 1:
                missing = absent | ~(found.sum(1) > 0)
                columns[slot.name] = np.ma.masked_array(found, np.broadcast_to(missing[:, None], found.shape))
            else:
                mask = absent | (~np.isfinite(found) if slot.kind == "float32" else False)
                columns[slot.name] = np.ma.masked_array(found, mask)
    return columns


def first_nonfinite(
    columns: dict[str, Any], seen: set[tuple[str, str, str]], breathe: Callable[[], None] = lambda: None
) -> list[tuple[str, str]]:
    """Return (module, message) for each site that shows its first NaN or Inf in these rows; ``seen`` is updated."""
    found = []
    num_nonfinite = np.ma.filled(columns["num_nan"] + columns["num_inf"], 0)
    made_here = np.ma.filled(columns["num_actual_nonfinite"], 0)
    for row in np.flatnonzero((num_nonfinite > 0) | (made_here > 0)):
        breathe()
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
