"""The device side of a recording: one row of slots per (site, cast, reference), merged in place without synchronizing.

int64 counts, float64 sums and float32 extremes live in one piece of memory, a part for each (kind, merge rule). A snapshot
is what one kernel writes of it into pinned memory; it is read when it has arrived, and nobody waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fp8debug.interruptions import is_ours
from fp8debug.kernels.backend import gpu
from fp8debug.kernels.dispatch import new_joiner, new_value_counts, on_device, takes_kernels
from fp8debug.kernels.slot_rows import HISTOGRAM, RowLayout, SlotKey, SlotRow, Slots
from fp8debug.kernels.torch_state import is_own_capture, refuse_replays
from fp8debug.metrics import Slot, slots
from fp8debug.observer.host_copy import new_event

Group = tuple[str, str]  # (kind, merge rule)
#: Rows that are joined together, by kernels and by torch ops: what a hook or the end of a step takes for them must stay far below
#: a millisecond, with torch ops a few. Of the former twice as many wait where no hook asks that has little to do itself.
MAX_JOINED, MAX_WAITING = 128, 64
#: Rows for which it is worth the launches to join them before the end of the step does.
MIN_JOINED = 32
#: Copies of the table in pinned memory: one is under way, one is written, and two wait for a writer that is held up. To make
#: another takes 1.5 ms, for which training would wait.
NUM_PINNED = 4
#: Index tensors of rows that are kept.
MAX_INDICES = 1024
_NEUTRAL = {"sum": 0.0, "max": float("-inf"), "min": float("inf")}
_REDUCTION = {"sum": "sum", "max": "amax", "min": "amin"}


class SlotPlace(NamedTuple):
    """Location of a slot: its group, and its columns in that group's tensor."""

    group: Group
    start: int
    stop: int


def layout() -> tuple[dict[str, SlotPlace], dict[Group, int]]:
    """Return where each slot of the metrics registered so far lies, and how many columns each group has."""
    places: dict[str, SlotPlace] = {}
    widths: dict[Group, int] = {}
    merged = Slot(name="num_tensors", merge="sum", kind="int64", unit="1", doc="observations merged into the row")
    for slot in [merged, *slots().values()]:
        group = (slot.kind, slot.merge)
        start = widths.get(group, 0)
        widths[group] = start + slot.size
        places[slot.name] = SlotPlace(group, start, start + slot.size)
    return places, widths


class GroupSpan(NamedTuple):
    """Location of a group in a table's memory: its first byte, the bytes of a number, and the numbers of a row."""

    begin: int
    itemsize: int
    width: int


class TableLayout:
    """Memory layout of a table.

    Args:
        num_rows: capacity.

    Attributes:
        places: where the slots lie.
        spans: where the groups lie.
        num_bytes: of all of it.
    """

    def __init__(self, num_rows: int) -> None:
        self._num_rows, self.num_bytes = num_rows, 0
        self.places, widths = layout()
        self.spans: dict[Group, GroupSpan] = {}
        for group, width in widths.items():
            itemsize = getattr(torch, group[0]).itemsize
            self.spans[group] = GroupSpan(self.num_bytes, itemsize, width)
            self.num_bytes += -(-itemsize * num_rows * width // 16) * 16

    def cut(self, memory: Tensor) -> dict[Group, Tensor]:
        """Return the tensor ``[rows, columns]`` of each group in memory of ``num_bytes``."""
        found = {}
        for group, (begin, itemsize, width) in self.spans.items():
            part = memory[begin : begin + itemsize * self._num_rows * width]
            found[group] = part.view(getattr(torch, group[0])).view(self._num_rows, width)
        return found


class HostBuffers(NamedTuple):
    """A table's state on the host: one piece of memory, which NumPy sees too, each group's part of it, and when it has come."""

    memory: Tensor
    state: dict[Group, Tensor]
    view: np.ndarray[Any, np.dtype[np.uint8]]
    done: torch.cuda.Event | None


class Table:
    """Rows of slots on one device.

    Args:
        num_rows: capacity; every row that a step may fill.
        device: where the watched tensors of these rows live.
        num_pinned: copies in pinned memory that are made at once; a table without takes no snapshots.
    """

    def __init__(self, num_rows: int, device: torch.device, num_pinned: int = NUM_PINNED) -> None:
        self.device, self.num_rows, self.layout = device, num_rows, TableLayout(num_rows)
        self._all = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=device)
        self._state = self.layout.cut(self._all)
        for (_, merge), state in self._state.items():
            state.fill_(_NEUTRAL[merge])
        self._neutral = self._all.clone()
        self._waiting: dict[int, Slots] = {}
        self._listed: list[tuple[int, Slots]] = []  # for the joiner
        self._numbers: dict[SlotKey, int] = {}  # of the layout by a key of partials; -1 where the joiner takes none
        self.lost = ""  # why rows that waited were lost; empty when none were
        self._rows_at: dict[tuple[int, ...], Tensor] = {}
        self._columns_at: dict[tuple[int, ...], Tensor] = {}
        self._free = [self._pinned() for _ in range(num_pinned)] if device.type == "cuda" else []
        self._here = None if device.type == "cuda" else self._buffers(self._all)
        self._value_counts: Any = None
        columns = {name: place.start for name, place in self.layout.places.items()}
        has_kernels = takes_kernels(self._all)
        self._joiner = new_joiner(self._state, columns) if has_kernels else None
        self._send = gpu().new_sender(self._all, self._neutral) if has_kernels else self._copy

    @property
    def value_counts(self) -> Any:
        """Counts of values, from which many casts are computed at once (``kernels/gpu/describe/value_counts.py``), at the latest
        when their rows are joined."""
        if self._value_counts is None:
            refuse_replays("what-if casts that no earlier step has recorded")
            self._value_counts = new_value_counts(self.device)
        return self._value_counts

    def apart(self) -> Table:
        """Return another table of these rows, whose memory is never replaced, for what is captured on the current stream."""
        found = Table(self.num_rows, self.device, 0)
        for key in self._numbers:
            found._number(key)
        if self._value_counts is not None:
            found.value_counts.reserve(self._value_counts)
        return found

    def has_room_for(self, other: Table) -> bool:
        """Return whether all that another table has recorded so far fits in this one without memory that is replaced."""
        if self.num_rows != other.num_rows or not other._numbers.keys() <= self._numbers.keys():
            return False
        counts = other._value_counts
        return counts is None or (self._value_counts is not None and bool(self._value_counts.has_room_for(counts)))

    def begin(self) -> None:
        """Set all rows to neutral on the device, to be filled anew by what follows."""
        self._waiting, self._listed = {}, []  # of a capture that failed
        for (_, merge), state in self._state.items():
            state.fill_(_NEUTRAL[merge])
        if self._value_counts is not None:
            self._value_counts.restart()

    def absorb(self, other: Table) -> None:
        """Join another table of the same rows, whose own rows are joined, on the current stream."""
        if self._joiner is not None:
            self._joiner.follow()
        for group, state in self._state.items():
            more = other._state[group]
            if group[1] == "sum":
                state.add_(more)
            else:
                (torch.maximum if group[1] == "max" else torch.minimum)(state, more, out=state)

    def _pinned(self) -> HostBuffers:
        return self._buffers(torch.empty(self.layout.num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True))

    def _buffers(self, memory: Tensor) -> HostBuffers:
        done = new_event() if self.device.type == "cuda" else None
        return HostBuffers(memory, self.layout.cut(memory), memory.numpy(), done)

    def merge(self, rows: Sequence[int], found: Sequence[Slots]) -> None:
        """Join contributions of tensors to rows, each slot by its own rule.

        They wait for the others of the step: a launch for all rows costs as much as one for one.

        Args:
            rows: which.
            found: of each row the contributions by the slot's name, or by the names of several of one group, ``[len(names)]`` or
                in parts that the slots' rule joins, ``[parts, len(names)]``, or by the layout of a row of ``slot_rows``.
        """
        if self._joiner is None:
            for row, partials in zip(rows, found, strict=True):
                self._wait(row, partials)
            return
        if len(self._listed) >= 2 * MAX_JOINED:
            self._join_rows()
        self._listed += zip(rows, found, strict=True)

    def _wait(self, row: int, partials: Slots) -> None:
        """Have torch ops join what no kernel does, a row at most once at a time."""
        before = self._waiting.get(row)
        if before is not None and before.keys().isdisjoint(partials):
            partials = {**before, **partials}
        elif before is not None or len(self._waiting) == MAX_WAITING:
            self._join_waiting()
        self._waiting[row] = partials

    def _number(self, key: SlotKey) -> int:
        """Return by what number the joiner knows what a key of partials names; -1 where it takes none of it."""
        found = self._numbers.get(key)
        if found is None:
            layout = key if isinstance(key, RowLayout) else HISTOGRAM if key == "log2_hist" else None
            found = self._numbers[key] = -1 if layout is None or self._joiner is None else self._joiner.number(layout)
        return found

    def flush_if_full(self, limit: int | None = None) -> None:
        """Join what waits, where it is much; for a hook that has little to do itself."""
        if len(self._listed) >= (MAX_JOINED if limit is None else limit):
            self._join_rows()

    def join(self) -> None:
        """Join what waits to the state.

        Raises:
            MemoryError: some of it was lost.
        """
        self._join_rows()
        self._join_waiting()
        if self.lost:
            raise MemoryError(f"rows that waited to be joined were lost: {self.lost}")

    def _join_rows(self) -> None:
        """Have all rows filled whose casts or sums wait, and join what is listed to the state, as far as the joiner takes it.

        What it does not take waits for torch ops.
        """
        if self._joiner is None:
            return
        first = () if self._value_counts is None else (self._value_counts,)
        with self._whole(), on_device(self._all):
            listed, self._listed = self._listed, []
            for items in self._items(listed):
                self._joiner(items, first)

    def _items(self, listed: list[tuple[int, Slots]]) -> list[list[int]]:
        """Return address, row and number of a layout of what the joiner takes, in lists in which none meets another."""
        numbers = self._numbers
        try:  # almost always all are rows of words, of a step with one pass
            items: list[int] = []
            for row, found in listed:
                for key, value in found.items():
                    items += (value.address, row, numbers[key])  # type: ignore[union-attr]  # a tensor has none: see below
            if 3 * len(set(zip(items[1::3], items[2::3], strict=True))) == len(items):
                return [items]
        except (AttributeError, KeyError):
            pass
        lists: list[list[int]] = [[]]
        placed: set[tuple[int, int]] = set()
        for row, partials in listed:
            for key, value in partials.items():
                number = self._number(key)
                if isinstance(value, Tensor) and (number < 0 or not value.is_contiguous()):
                    self._wait(row, {key: value})
                    continue
                if (row, number) in placed:
                    lists.append([])
                    placed.clear()
                placed.add((row, number))
                lists[-1] += (value.data_ptr() if isinstance(value, Tensor) else value.address, row, number)
        return lists

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Note where not all is joined that was to be."""
        try:
            yield
        except BaseException as error:
            self.lost = "out of memory" if is_ours(error) else f"{type(error).__name__} was raised while it was recorded"
            raise

    def _join_waiting(self) -> None:
        """Join what waits for torch ops."""
        found: dict[RowLayout | tuple[str | tuple[str, ...], torch.Size], tuple[list[int], list[Tensor]]] = {}
        with self._whole():
            waiting, self._waiting = self._waiting, {}
            for row, partials in waiting.items():
                for key, value in partials.items():
                    values = value.numbers if isinstance(value, SlotRow) else value
                    rows, all_values = found.setdefault(key if isinstance(key, RowLayout) else (key, values.shape), ([], []))
                    rows.append(row)
                    all_values.append(values)
            for slots, (rows, all_values) in found.items():
                stacked = torch.stack(all_values)
                if isinstance(slots, RowLayout):
                    for group in slots.groups:
                        self._put(group.names, tuple(rows), group.of(stacked))
                else:
                    self._put((slots[0],) if isinstance(slots[0], str) else slots[0], tuple(rows), stacked)

    def _put(self, names: tuple[str, ...], rows: tuple[int, ...], values: Tensor) -> None:
        """Join numbers of some rows, ``[rows, len(names)]`` or in parts ``[rows, parts, len(names)]``."""
        group, at = self._place(names, rows)
        state = self._state[group]
        if values.ndim == 3:
            values = getattr(values, _REDUCTION[group[1]])(1)
        values = values.reshape(len(rows), -1).to(state.dtype)
        before = state[at]
        if group[1] == "sum":
            state[at] = before + values
        else:
            state[at] = torch.maximum(before, values) if group[1] == "max" else torch.minimum(before, values)

    def _place(self, names: tuple[str, ...], rows: tuple[int, ...]) -> tuple[Group, tuple[Tensor, Tensor]]:
        """Return the group of some slots, and where they lie in its tensor."""
        places = [self.layout.places[name] for name in names]
        columns = tuple(c for place in places for c in range(place.start, place.stop))
        if is_own_capture():  # what is kept would be the graph's memory
            at, columns_at = (gpu().to_device(list(numbers), self.device)[: len(numbers)] for numbers in (rows, columns))
            return places[0].group, (at[:, None], columns_at[None, :])
        for kept, numbers in ((self._rows_at, rows), (self._columns_at, columns)):
            if numbers not in kept:
                if len(kept) == MAX_INDICES:
                    kept.clear()
                kept[numbers] = self._index(numbers)
        return places[0].group, (self._rows_at[rows][:, None], self._columns_at[columns][None, :])

    def _index(self, numbers: tuple[int, ...]) -> Tensor:
        """Return numbers as a tensor on the device, sent there without waiting."""
        index = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        if self.device.type == "cuda":
            index = index.pin_memory().to(self.device, non_blocking=True)
        return index.to(self.device)

    def snapshot(self) -> Snapshot:
        """Start copying the table to the host, set it back to neutral, and return the copy under way.

        On a CPU nothing is copied: another state takes its place.
        """
        self.join()
        if self.device.type == "cuda":
            buffers = self._free.pop() if self._free else self._pinned()
            assert buffers.done is not None
            with on_device(self._all):
                self._send(buffers.memory)
                buffers.done.record()
            return Snapshot(self.layout, buffers, self._free.append)
        assert self._here is not None
        snapshot = Snapshot(self.layout, self._here, self._clear)
        self._here = self._free.pop() if self._free else self._buffers(self._neutral.clone())
        self._all, self._state = self._here.memory, self._here.state
        if self._joiner is not None:
            self._joiner.join_to(self._state)
        return snapshot

    def _copy(self, host: Tensor) -> None:
        """Start copying the state to pinned memory, and set it back to neutral; where no kernel does it."""
        host.copy_(self._all, non_blocking=True)
        self._all.copy_(self._neutral)

    def _clear(self, buffers: HostBuffers) -> None:
        """Set a state on the host back to neutral, for a later step; in the thread that read it, without threads of torch's."""
        np.copyto(buffers.view, self._neutral.numpy())
        self._free.append(buffers)

    def discard(self) -> None:
        """Forget what waits, here and in the kernels' memory; the table is not used any more."""
        self._waiting, self._listed = {}, []
        if self._joiner is not None:
            self._joiner.discard()


class Snapshot:
    """A table's rows on their way to the host.

    Args:
        layout: how the table lies in memory.
        buffers: what it is copied to.
        give_back: called with the buffers once they have been read.
    """

    def __init__(
        self,
        layout: TableLayout,
        buffers: HostBuffers,
        give_back: Callable[[HostBuffers], None],
    ) -> None:
        self.layout = layout
        self._buffers: HostBuffers | None = buffers
        self._done = buffers.done  # None: they are there
        self._give_back = give_back

    def is_done(self) -> bool:
        """Return whether the copy has arrived, without waiting for it."""
        return self._done is None or bool(self._done.query())  # type: ignore[no-untyped-call]  # torch's

    def memory(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the table's memory, to be read until :meth:`discard`. Waits if it must."""
        assert self._buffers is not None
        self._wait()
        return self._buffers.view

    def discard(self) -> None:
        """Give the buffers back; the rows are not read any more.

        What a kernel still writes to must not become somebody else's memory: it waits if it must, as when training is over.
        """
        if self._buffers is not None:
            self._wait()
            buffers, self._buffers = self._buffers, None
            self._give_back(buffers)

    def _wait(self) -> None:
        if self._done is not None and not self.is_done():  # to wait is to let go of the interpreter, even where it takes no time
            self._done.synchronize()
