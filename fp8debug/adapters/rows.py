"""From a finished step to columns of the ``stats`` table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from fp8debug.metrics import METRICS
from fp8debug.observer import FinishedStep, RowInfo
from fp8debug.sharding import Piece
from fp8debug.store.packed import numbers_or, packed, packed_lists
from fp8debug.table import Group, Place, Snapshot
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
        self._packing: _Packing | None = None

    def packing(self, places: Mapping[str, Place]) -> _Packing:
        """Return how a table's slots become columns, made once."""
        if self._packing is None or self._packing.places is not places:
            self._packing = _Packing(places)
        return self._packing

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


class _Packing:
    """Which columns of a table's groups hold which slots, and when a slot of a row has data.

    Args:
        places: of the table.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = places
        #: (count slot that is 0 when there is no data, whether results have the metric too).
        self.tests: list[tuple[str, bool]] = [("numel", True)]
        #: Names, columns in the group, and tests.
        self.groups: dict[Group, tuple[list[str], list[int], list[int]]] = {}
        self.lists: list[tuple[str, int]] = []
        self._add("num_tensors", 0)
        for metric in METRICS:
            test = metric.present, metric.of_results
            if test not in self.tests:
                self.tests.append(test)
            for slot in metric.slots:
                self._add(slot.name, self.tests.index(test))

    def _add(self, name: str, test: int) -> None:
        place = self.places[name]
        if place.stop - place.start > 1:
            self.lists.append((name, test))
        else:
            names, columns, tests = self.groups.setdefault(place.group, ([], [], []))
            names.append(name)
            columns.append(place.start)
            tests.append(test)

    def valid(self, groups: Mapping[Group, np.ndarray[Any, Any]], operand: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return which rows pass each test, ``[tests, rows]``."""
        found = np.ones((len(self.tests), len(operand)), dtype=bool)
        for passes, (present, of_results) in zip(found, self.tests, strict=True):
            if present != "numel":
                place = self.places[present]
                passes &= groups[place.group][:, place.start] != 0
            if not of_results:
                passes &= operand
        return found


def stats_columns(
    finished: FinishedStep,
    snapshot: Snapshot,
    filled: Mapping[int, RowInfo],
    described: Described,
    first_call: int = 0,
    breathe: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return columns, those of slots as Arrow arrays; a slot without data is null.

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
    packing, groups = described.packing(snapshot.places), snapshot.take(rows, breathe)
    breathe()
    columns: dict[str, Any] = {"step": finished.step, **names}
    passed = packing.valid(groups, operand)
    for group, (slots, at, tests) in packing.groups.items():
        breathe()
        values, valid = groups[group].T[at], passed[tests]
        if values.dtype == np.float32:
            valid &= np.isfinite(values)
        elif values.dtype == np.float64:
            valid &= ~np.isnan(values)
            if group[1] != "sum":
                valid &= values != (-np.inf if group[1] == "max" else np.inf)
        columns.update(zip(slots, packed(values, valid), strict=True))
    for name, test in packing.lists:
        breathe()
        place = packing.places[name]
        lists = groups[place.group][:, place.start : place.stop]
        columns[name] = packed_lists(lists, passed[test] & (lists.sum(1) > 0))
    return columns


def numbers_of_slots(columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return what :func:`stats_columns` did with the slots of one number as NumPy's, NaN where there is no data."""
    return {
        name: numbers_or(column.cast(pa.float64(), safe=False), np.nan) if isinstance(column, pa.Array) else column
        for name, column in columns.items()
        if not isinstance(column, pa.ListArray)
    }


def first_nonfinite(
    columns: dict[str, Any], seen: set[tuple[str, str, str]], breathe: Callable[[], None] = lambda: None
) -> list[tuple[str, str]]:
    """Return (module, message) for each site that shows its first NaN or Inf in these rows; ``seen`` is updated."""
    found = []
    num_nonfinite = numbers_or(columns["num_nan"], 0) + numbers_or(columns["num_inf"], 0)
    made_here = numbers_or(columns["num_actual_nonfinite"], 0)
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
