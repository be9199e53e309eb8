"""From a finished step to a record batch of the ``stats`` table.

The rows of a step are mostly those of the step before, so what they are stays, and their numbers are written over: a dozen calls
of NumPy for all. A call lets go of the interpreter where it has much to do, and then the training's thread and the writer's may
have to wait for each other, which costs more than the work; so what is small is done by bytes, which keep it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from fp8debug.metrics import METRICS
from fp8debug.observer.observer import FinishedStep, RowInfo
from fp8debug.observer.sharding import TensorShard
from fp8debug.observer.table import Group, Snapshot, TableLayout
from fp8debug.store.columns import Lists, columns_over
from fp8debug.store.schema import arrow_schema
from fp8debug.store.write.batch import record_batch
from fp8debug.types import Gemm, Reference, TensorRole

#: Counts of what is not finite; the first numbers of a batch.
NONFINITE = ("num_nan", "num_inf", "num_actual_nonfinite")
#: Rows that are described before others may run.
_PIECE = 256
#: Rows of the batches that are kept, about 3 KB each; where modules take turns, those of one round are.
MAX_KEPT_ROWS = 64 * 1024


class _CachedBatch(NamedTuple):
    """A batch, and what it was made for."""

    layout: TableLayout
    first_call: int
    infos: list[RowInfo]
    batch: RowBatch


class BatchCache:
    """The batches of earlier steps, by the numbers of their rows; a batch serves as long as what its rows are stays.

    Args:
        rank: global rank.
        breathe: called now and then, to let other threads have the interpreter.
    """

    def __init__(self, rank: int = 0, breathe: Callable[[], None] = lambda: None) -> None:
        self._rank, self._breathe = rank, breathe
        self._known: dict[tuple[int, tuple[int, ...]], _CachedBatch] = {}  # the one that was used last at the end
        self._num_rows = 0

    def row_batch(self, filled: Mapping[int, RowInfo], layout: TableLayout, first_call: int = 0) -> RowBatch:
        """Return the batch for such rows.

        Args:
            filled: what rows are, by their numbers.
            layout: how the rows' table lies in memory; the same object at every step.
            first_call: what a rank's places in execution order begin with.
        """
        key, infos = (id(layout), tuple(filled)), list(filled.values())
        self._breathe()
        known = self._known.pop(key, None)
        self._num_rows -= 0 if known is None else len(infos)
        if known is None or known[:3] != (layout, first_call, infos):
            rows = sorted(filled)
            described = self._describe([filled[row] for row in rows], first_call)
            known = _CachedBatch(layout, first_call, infos, RowBatch(rows, described, layout, self._rank, self._breathe))
        self._known[key] = known
        self._num_rows += len(infos)
        while self._num_rows > MAX_KEPT_ROWS and len(self._known) > 1:
            self._num_rows -= len(self._known.pop(next(iter(self._known))).infos)
        return known.batch

    def _describe(self, infos: list[RowInfo], first_call: int) -> dict[str, list[Any]]:
        columns: dict[str, list[Any]] = {name: [] for name in _DESCRIPTION}
        for start in range(0, len(infos), _PIECE):
            self._breathe()
            modules, call_indices, keys, places = zip(*infos[start : start + _PIECE], strict=True)
            gemms, tensors, casts, references, actual = zip(*keys, strict=True)
            pieces = [p or TensorShard(t is TensorRole.WEIGHT, 0) for p, t in zip(places, tensors, strict=True)]
            described = (
                modules, [gemm._value_ for gemm in gemms], [tensor._value_ for tensor in tensors], casts,
                [reference._value_ for reference in references], actual, [first_call + at for at in call_indices],
                [piece.replicated for piece in pieces], [piece.shard for piece in pieces],
            )  # fmt: skip
            for column, values in zip(columns.values(), described, strict=True):
                column += values
        return columns


_DESCRIPTION = ("module", "gemm", "tensor", "cast_name", "reference", "actual", "call_index", "replicated", "shard")


class _Gather:
    """Numbers of one size that lie somewhere in a table's memory, brought together by one call.

    Args:
        itemsize: bytes of a number.
    """

    def __init__(self, itemsize: int) -> None:
        self._kind = np.dtype(f"i{itemsize}")
        self._at: list[npt.NDArray[np.intp]] = []
        self._size = 0

    def add(self, at: npt.NDArray[np.intp]) -> slice:
        """Note where some numbers lie, counted in numbers of this size; return where they come to lie."""
        self._at.append(at.reshape(-1))
        start, self._size = self._size, self._size + at.size
        return slice(start, self._size)

    def close(self) -> npt.NDArray[Any]:
        """Return the memory that they come to lie in."""
        self._places = np.concatenate([np.zeros(0, dtype=np.intp), *self._at])
        self._values = np.zeros(self._size, dtype=self._kind)
        return self._values

    def fill(self, memory: npt.NDArray[np.uint8]) -> None:
        """Bring them together."""
        memory.view(self._kind).take(self._places, out=self._values, mode="clip")


class RowBatch:
    """A record batch of ``stats`` whose numbers each step writes over.

    A slot is without data where its metric does not apply to the row, where the metric's count is 0, and where an extreme
    is still at its neutral element.

    Args:
        rows: their numbers in the table.
        described: the columns that say what they are.
        layout: how the table lies in memory.
        rank: global rank.
        breathe: called now and then, to let other threads have the interpreter.
    """

    def __init__(
        self,
        rows: list[int],
        described: Mapping[str, list[Any]],
        layout: TableLayout,
        rank: int,
        breathe: Callable[[], None],
    ) -> None:
        self._described, self._breathe = described, breathe
        self._rows, self._layout = np.array(rows, dtype=np.intp), layout
        step = np.zeros((1, len(rows)), dtype=np.int64)
        self._step = step.view(np.uint8)[0].data
        schema = arrow_schema("stats")
        fixed = record_batch(schema, {"rank": rank, "step": 0, **described}, breathe)
        arrays = dict(zip(schema.names, fixed.columns, strict=True))
        arrays.update(self._new_slots(self._new_tests()), step=columns_over(step)[0])
        self._batch = pa.record_batch([arrays[name] for name in schema.names], schema=schema)

    def _new_tests(self) -> dict[str, int]:
        """Return by slot which test tells whether a row has data, and note these tests."""
        is_operand = np.array([reference == Reference.OPERAND.value for reference in self._described["reference"]], dtype=bool)
        used = {("numel", True), *((metric.present, metric.of_results) for metric in METRICS)}
        tests = sorted(used, key=lambda test: (test[0] != "numel", test))
        #: Rows that a metric applies to; of these, by a count that is not numel's, those that have data.
        self._passed = np.array([is_operand | of_results for _, of_results in tests], dtype=bool)
        self._counts = [present for present, _ in tests if present != "numel"]
        self._counted = self._passed[len(tests) - len(self._counts) :]
        self._applies = self._counted.astype(np.int64)
        of_metrics = {slot.name: tests.index((metric.present, metric.of_results)) for metric in METRICS for slot in metric.slots}
        return {"num_tensors": tests.index(("numel", True)), **of_metrics}

    def _new_slots(self, tested: Mapping[str, int]) -> dict[str, pa.Array]:
        """Return an array for each slot, and note how they are filled."""
        num_rows, spans, places = len(self._rows), self._layout.spans, self._layout.places
        groups = sorted(spans, key=lambda group: (-spans[group].itemsize, group[0] != "int64", group[1] != "sum"))
        names_of: dict[Group, list[str]] = {group: [] for group in groups}
        lists = [name for name in tested if places[name].stop - places[name].start > 1]
        for name in sorted(tested.keys() - lists, key=lambda name: (name not in NONFINITE, name)):
            names_of[places[name].group].append(name)
        self._gathers = {itemsize: _Gather(itemsize) for itemsize in sorted({span.itemsize for span in spans.values()})}
        single = {group: self._add(names) for group, names in names_of.items()}
        counts, of_lists = self._add(self._counts), [self._add([name]) for name in lists]
        memory = {itemsize: gather.close() for itemsize, gather in self._gathers.items()}

        names = [name for of_group in names_of.values() for name in of_group]
        self._place_of = {name: i for i, name in enumerate(names)}
        self._tested = np.array([tested[name] for name in names], dtype=np.intp)
        self._valid = np.zeros((len(names), num_rows), dtype=bool)
        bits = np.zeros((len(names), -(-num_rows // 8)), dtype=np.uint8)
        self._bits = bits.reshape(-1).data
        self._num_there = memory[8][counts].reshape(len(self._counts), num_rows)
        self._nonfinite = memory[8][: len(NONFINITE) * num_rows]
        self._values: list[npt.NDArray[Any]] = []
        self._sums: list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]] = []
        self._extremes: list[tuple[npt.NDArray[Any], npt.NDArray[np.bool_]]] = []
        num_counts = sum(len(names_of[group]) for group in groups if group[0] == "int64")
        self._floats = self._valid[num_counts:]
        self._is_number = np.zeros_like(self._floats)
        arrays: dict[str, pa.Array] = {}
        for group, at in single.items():
            first, stop = len(self._values), len(self._values) + len(names_of[group])
            values = memory[spans[group].itemsize][at].view(group[0]).reshape(stop - first, num_rows)
            self._values += list(values)
            arrays.update(zip(names_of[group], columns_over(values, bits[first:stop]), strict=True))
            if group[0] != "int64" and stop > first:
                kind = self._sums if group == ("float64", "sum") else self._extremes
                kind.append((values, self._is_number[first - num_counts : stop - num_counts]))
        self._lists: list[tuple[npt.NDArray[Any], int, Lists]] = []
        for name, at in zip(lists, of_lists, strict=True):
            group, start, stop = places[name]
            values = memory[spans[group].itemsize][at].view(group[0]).reshape(num_rows, stop - start)
            self._lists.append((values, tested[name], Lists(num_rows, stop - start, group[0])))
            arrays[name] = self._lists[-1][2].array
        return arrays

    def _add(self, names: list[str]) -> slice:
        """Have slots of one size brought together, ``[slots, rows]`` or of one list ``[rows, size]``."""
        found = slice(0)
        for i, name in enumerate(names):
            group, start, stop = self._layout.places[name]
            begin, itemsize, width = self._layout.spans[group]
            at = self._gathers[itemsize].add(begin // itemsize + self._rows[:, None] * width + np.arange(start, stop))
            found = slice(at.start if i == 0 else found.start, at.stop)
        return found

    def fill(self, step: int, memory: npt.NDArray[np.uint8]) -> pa.RecordBatch:
        """Return the batch of a step, which holds until the next one is filled in.

        Args:
            step: its number.
            memory: the table's.
        """
        self._step[:] = struct.pack("=q", step) * len(self._rows)
        for gather in self._gathers.values():
            gather.fill(memory)
        np.logical_and(self._num_there, self._applies, out=self._counted)
        self._passed.take(self._tested, axis=0, out=self._valid, mode="clip")
        for values, is_number in self._sums:
            np.equal(values, values, out=is_number)
        for values, is_number in self._extremes:
            np.isfinite(values, out=is_number)
        np.logical_and(self._floats, self._is_number, out=self._floats)
        self._bits[:] = np.packbits(self._valid, axis=1, bitorder="little").reshape(-1).data
        for values, test, lists in self._lists:
            lists.fill(values, self._passed[test] & values.any(1))
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
        if self._nonfinite.tobytes() == bytes(self._nonfinite.nbytes):
            return []
        found = []
        num_nan, num_inf, made_here = (self._values[self._place_of[name]] for name in NONFINITE)
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


def stats_batch(finished: FinishedStep, snapshot: Snapshot, batch: RowBatch) -> pa.RecordBatch:
    """Return the rows of a step as a batch that holds until the next one; the snapshot is given back."""
    batch = batch.fill(finished.step, snapshot.memory())
    snapshot.discard()
    return batch


def checked_nonfinite(finished: FinishedStep) -> dict[str, str]:
    """Take ``first_nonfinite`` out of a step's scalars; return what the steps table holds of it, nothing where all was finite."""
    code = int(finished.scalars.pop("first_nonfinite", -1))
    if code < 0:
        return {}
    origin = "weight" if code & 2 else "outside" if code & 1 else "gemm"
    module, gemm = finished.checked[code >> 2]
    return {"nonfinite_module": module, "nonfinite_origin": origin, "nonfinite_gemm": gemm.value}


def by_execution(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return what :meth:`RowBatch.first_nonfinite` found with the forward pass first, and the backward pass from its end."""
    forward = [one for one in found if one[1].startswith(Gemm.FPROP.value)]
    return forward + [one for one in reversed(found) if one not in forward]
