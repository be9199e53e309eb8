"""From a finished step to a record batch of the ``stats`` table.

The rows of a step are mostly those of the step before, so what they are stays, and their numbers are written over: a few calls
of NumPy for each kind of number. What is made a column at a time takes a hundred calls, and at each one the training's thread
and the writer's may have to wait for the interpreter in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8debug.metrics import METRICS
from fp8debug.observer import FinishedStep, RowInfo
from fp8debug.sharding import Piece
from fp8debug.store.batch import record_batch
from fp8debug.store.packed import Lists, columns_over
from fp8debug.store.schema import arrow_schema
from fp8debug.table import Group, Place, Snapshot
from fp8debug.types import Gemm, Reference, TensorRole

#: Rows that are described before others may run.
_PIECE = 256


class _Known(NamedTuple):
    """A sheet, and what it was made for."""

    places: Mapping[str, Place]
    first_call: int
    order: list[int]
    infos: list[RowInfo]
    sheet: Sheet


class Described:
    """The sheets of the step before, one for each device's table; a sheet serves as long as its rows are the same.

    Args:
        rank: global rank.
        breathe: called now and then, to let other threads have the interpreter.
    """

    def __init__(self, rank: int = 0, breathe: Callable[[], None] = lambda: None) -> None:
        self._rank, self._breathe = rank, breathe
        self._known: dict[int, _Known] = {}

    def sheet(self, filled: Mapping[int, RowInfo], places: Mapping[str, Place], first_call: int = 0) -> Sheet:
        """Return the sheet for such rows.

        Args:
            filled: what rows are, by their numbers.
            places: where slots lie in the rows' table; the same object at every step.
            first_call: what a rank's places in execution order begin with.
        """
        order = list(filled)
        self._breathe()
        infos = list(filled.values())
        known = self._known.get(id(places))
        if known is None or known[:4] != (places, first_call, order, infos):
            rows = sorted(order)
            described = self._describe([filled[row] for row in rows], first_call)
            sheet = Sheet(rows, described, places, self._rank, self._breathe)
            known = self._known[id(places)] = _Known(places, first_call, order, infos, sheet)
        return known.sheet

    def _describe(self, infos: list[RowInfo], first_call: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in _DESCRIPTION}
        for start in range(0, len(infos), _PIECE):
            self._breathe()
            modules, call_indices, keys, places = zip(*infos[start : start + _PIECE], strict=True)
            gemms, tensors, casts, references, actual = zip(*keys, strict=True)
            pieces = [p or Piece(t is TensorRole.WEIGHT, 0) for p, t in zip(places, tensors, strict=True)]
            described = (
                modules, [gemm._value_ for gemm in gemms], [tensor._value_ for tensor in tensors], casts,
                [reference._value_ for reference in references], actual, [first_call + at for at in call_indices],
                [piece.replicated for piece in pieces], [piece.shard for piece in pieces],
            )  # fmt: skip
            for column, values in zip(columns.values(), described, strict=True):
                column += values
        return columns


_DESCRIPTION = ("module", "gemm", "tensor", "cast_name", "reference", "actual", "call_index", "replicated", "shard")


class _Kind(NamedTuple):
    """The slots of one number that a group of a table has.

    Attributes:
        at: where they lie in the group's memory, ``[slots, rows]``.
        values: the numbers, ``[slots, rows]``.
        places: theirs among all slots of one number.
    """

    at: npt.NDArray[np.intp]
    values: npt.NDArray[Any]
    places: slice


class Sheet:
    """A record batch of ``stats`` whose numbers each step writes over.

    A slot is without data where its metric does not apply to the row, where the metric's count is 0, and where an extreme
    is still at its neutral element.

    Args:
        rows: their numbers in the table.
        described: the columns that say what they are.
        places: where slots lie in the table.
        rank: global rank.
        breathe: called now and then, to let other threads have the interpreter.
    """

    def __init__(
        self,
        rows: list[int],
        described: Mapping[str, list[Any]],
        places: Mapping[str, Place],
        rank: int,
        breathe: Callable[[], None],
    ) -> None:
        self._described, self._breathe = described, breathe
        self._rows = np.array(rows, dtype=np.intp)
        self._step = np.zeros((1, len(rows)), dtype=np.int64)
        schema = arrow_schema("stats")
        fixed = record_batch(schema, {"rank": rank, "step": 0, **described}, breathe)
        arrays = dict(zip(schema.names, fixed.columns, strict=True))
        arrays.update(self._new_slots(places, self._new_tests()), step=columns_over(self._step)[0])
        self._batch = pa.record_batch([arrays[name] for name in schema.names], schema=schema)

    def _new_tests(self) -> dict[str, int]:
        """Return by slot which test tells whether a row has data, and note these tests."""
        is_operand = np.array([reference == Reference.OPERAND.value for reference in self._described["reference"]], dtype=bool)
        tests: list[tuple[str, bool]] = [("numel", True)]
        tested = {"num_tensors": 0}
        for metric in METRICS:
            test = metric.present, metric.of_results
            if test not in tests:
                tests.append(test)
            tested.update({slot.name: tests.index(test) for slot in metric.slots})
        #: Rows that a metric applies to; of these, by a count that is not numel's, those that have data.
        self._applies = np.array([is_operand | of_results for _, of_results in tests], dtype=bool)
        self._passed = self._applies.copy()
        self._counted = [(i, present) for i, (present, _) in enumerate(tests) if present != "numel"]
        return tested

    def _new_slots(self, places: Mapping[str, Place], tested: Mapping[str, int]) -> dict[str, pa.Array]:
        """Return an array for each slot, and note how they are filled."""
        num_rows = len(self._rows)
        widths: dict[Group, int] = {}
        for place in places.values():
            widths[place.group] = max(widths.get(place.group, 0), place.stop)
        names_of: dict[Group, list[str]] = {}
        for name in tested:
            if places[name].stop - places[name].start == 1:
                names_of.setdefault(places[name].group, []).append(name)
        single = [name for names in names_of.values() for name in names]
        self._place_of = {name: i for i, name in enumerate(single)}
        self._tested = np.array([tested[name] for name in single], dtype=np.intp)
        self._valid = np.zeros((len(single), num_rows), dtype=bool)
        self._bits = np.zeros((len(single), -(-num_rows // 8)), dtype=np.uint8)
        self._kinds: dict[Group, _Kind] = {}
        self._values: list[npt.NDArray[Any]] = []
        self._lists: list[tuple[Group, npt.NDArray[np.intp], int, Lists]] = []
        arrays: dict[str, pa.Array] = {}
        for group, names in names_of.items():
            at = self._rows * widths[group] + np.array([[places[name].start] for name in names], dtype=np.intp)
            values, first = np.zeros(at.shape, dtype=group[0]), len(self._values)
            self._kinds[group] = _Kind(at, values, slice(first, first + len(names)))
            self._values += list(values)
            arrays.update(zip(names, columns_over(values, self._bits[first : first + len(names)]), strict=True))
        for name, test in tested.items():
            group, start, stop = places[name]
            if name not in arrays:
                lists = Lists(num_rows, stop - start, group[0])
                at = self._rows[:, None] * widths[group] + np.arange(start, stop)
                self._lists.append((group, at, test, lists))
                arrays[name] = lists.array
        return arrays

    def fill(self, step: int, parts: Mapping[Group, npt.NDArray[Any]]) -> pa.RecordBatch:
        """Return the batch of a step, which holds until the next one is filled in.

        Args:
            step: its number.
            parts: the table's groups, ``[rows of the table, columns]``.
        """
        self._step.fill(step)
        memory = {group: part.reshape(-1) for group, part in parts.items()}
        for group, kind in self._kinds.items():
            memory[group].take(kind.at, out=kind.values, mode="clip")
        for i, present in self._counted:
            np.logical_and(self._applies[i], self._values[self._place_of[present]], out=self._passed[i])
        self._passed.take(self._tested, axis=0, out=self._valid, mode="clip")
        for (dtype, merge), kind in self._kinds.items():
            valid, values = self._valid[kind.places], kind.values
            if dtype == "float32":
                valid &= np.isfinite(values)
            elif dtype == "float64":
                valid &= ~np.isnan(values)
                if merge != "sum":
                    valid &= values != (-np.inf if merge == "max" else np.inf)
        self._bits[:] = np.packbits(self._valid, axis=1, bitorder="little")
        for group, at, test, lists in self._lists:
            found = memory[group].take(at)
            lists.fill(found, self._passed[test] & (found.sum(1) > 0))
        return self._batch.slice(0)  # Arrow keeps with an array how many null it has: of the slice it counts them

    def numbers(self, name: str) -> npt.NDArray[Any]:
        """Return a slot's numbers as last filled in, FP64 ``[rows]``, NaN where there is no data."""
        place = self._place_of[name]
        return np.where(self._valid[place], self._values[place], np.nan)

    def columns(self) -> dict[str, Any]:
        """Return what was last filled in by column: what rows are, and slots of one number as :meth:`numbers` does."""
        return {**self._described, **{name: self.numbers(name) for name in self._place_of}}

    def first_nonfinite(self, seen: set[tuple[str, str, str]]) -> list[tuple[str, str]]:
        """Return (module, message) for each site that shows its first NaN or Inf in these rows; ``seen`` is updated."""
        found = []
        num_nan, num_inf, made_here = (
            self._values[self._place_of[name]] for name in ("num_nan", "num_inf", "num_actual_nonfinite")
        )
        num_nonfinite = num_nan + num_inf
        for row in np.flatnonzero(num_nonfinite | made_here).tolist():
            self._breathe()
            module, gemm, tensor = (self._described[name][row] for name in ("module", "gemm", "tensor"))
            num_before, num_made = num_nonfinite[row], made_here[row]
            if (module, gemm, tensor) not in seen:
                seen.add((module, gemm, tensor))
                where = f"made by the cast or GEMM: {num_made}" if num_made else f"in the high-precision tensor: {num_before}"
                found.append((module, f"{gemm} {tensor}: first NaN or Inf, {where}"))
        return found


def stats_batch(finished: FinishedStep, snapshot: Snapshot, sheet: Sheet) -> pa.RecordBatch:
    """Return the rows of a step as a batch that holds until the next one; the snapshot is given back."""
    batch = sheet.fill(finished.step, snapshot.parts())
    snapshot.discard()
    return batch


def unsampled_nonfinite(finished: FinishedStep) -> dict[str, str]:
    """Take ``first_nonfinite`` out of a step's scalars; return what the steps table holds of it, nothing where all was finite."""
    code = int(finished.scalars.pop("first_nonfinite", -1))
    if code < 0:
        return {}
    origin = "weight" if code & 2 else "outside" if code & 1 else "gemm"
    return {"nonfinite_module": finished.checked[code >> 2], "nonfinite_origin": origin}


def by_execution(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what :meth:`Sheet.first_nonfinite` found with the forward pass first, and the backward pass from its end."""
    forward = [one for one in found if one[1].startswith(Gemm.FPROP.value)]
    return forward + [one for one in reversed(found) if one not in forward]
