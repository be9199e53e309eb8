"""Statistics of casts with one scale for the whole tensor, for many tensors at once; importable only where Triton is.

``ValueCounts.what_if`` reads a BF16 tensor once, whatever the number of casts, and puts the casts on a list;
``ValueCounts.flush`` works out the slots of all that is listed in two launches. What ``what_if`` returns is filled by then,
and not before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8debug.kernels.dispatch import on_device
from fp8debug.kernels.gpu.describe import value_counts_kernel as tb
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, address
from fp8debug.kernels.gpu.quantize.tiling import OPERAND, is_e5m2, is_hopper, is_native, num_sms
from fp8debug.kernels.gpu.scratch import Task, current_stream, start
from fp8debug.kernels.slot_rows import ROW_WORDS, SlotRow, Slots
from fp8debug.kernels.torch_state import refuse_replays
from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.recipes import Cast

#: Tables of 256 KiB that wait to be worked out.
MAX_TABLES = 2 if INTERPRETED else 32
#: The longest amax history that the kernel holds.
MAX_HISTORY = 4096
_ROUNDINGS = {"none": 0, "pow2_ceil": 1, "pow2_floor": 2}
_BLOCK = 256 if INTERPRETED else 8192


def takes(x: Tensor, casts: Iterable[Cast]) -> bool:
    """Return whether the tensor can be counted, of which 8 values at once are sampled, and each cast worked out from counts."""
    for cast in casts:
        if not _is_plain(cast):
            return False
    return _fits(x)


def _is_plain(cast: Cast) -> bool:
    return cast.is_plain and cast.granularity == "tensorwise" and cast.history <= MAX_HISTORY


def _fits(x: Tensor) -> bool:
    if x.dtype is not torch.bfloat16 or not x.is_contiguous() or x.data_ptr() % 16:
        return False
    numel = x.numel()
    return numel % 2 == 0 and 8 <= numel < 2**31 and (INTERPRETED or is_hopper(x.device))


def _identity(x: Tensor) -> tuple[Any, ...] | None:
    """Return what no other tensor has as long as this one's storage lives and is not written to; None where nobody could tell."""
    return None if x.is_inference() else (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x._version)


def _parts(cast: Cast) -> tuple[list[int], list[float], int]:
    """Return what the kernel is told of a cast whatever the tensor: integers, real numbers, and where its scale comes from."""
    scalings = {"current": tb.SCALING_CURRENT, "static": tb.SCALING_STATIC}
    delayed = tb.SCALING_MAX if cast.algo == "max" else tb.SCALING_RECENT
    margin = 2.0**-cast.margin if cast.scaling == "delayed" else 1.0
    reals = [float(cast.amax_eps), margin, cast.scale_inv or 0.0]
    return [is_e5m2(cast), _ROUNDINGS[cast.scale_rounding]], reals, scalings.get(cast.scaling, delayed).value


class _CastState:
    """A cast at one place: what the kernel is told of it, and where its amax history lies.

    Args:
        cast: the cast.
        row: of the history; None where it has none.
    """

    def __init__(self, cast: Cast, row: int | None) -> None:
        ints, self.reals, scaling = _parts(cast)
        self.ints = *ints, scaling, row or 0, cast.history
        self.row = row


class ValueCounts:
    """Counts, amax histories and unfinished casts of one device.

    Args:
        device: where the tensors live.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._tables = torch.zeros(MAX_TABLES, tb.TABLE.value, dtype=torch.int32, device=device)
        self._histories = torch.zeros(0, 2, dtype=torch.float32, device=device)
        self._entries: dict[object, _CastState] = {}  # by place and cast
        self._known: PlanCache[tuple[object, list[_CastState]]] = PlanCache()  # by the identity of the mapping of casts
        self._num_histories = 0
        self._seen: dict[object, int] = {}
        self._storages: list[Any] = []  # weak references to those that were counted: no other has their addresses
        self._counting: dict[int, tuple[Kernel, int, int]] = {}
        self._raw, self._stream = current_stream(self._tables.device)  # the last stream that used the memory
        self._finish: dict[int, Kernel] = {}  # by the length of the longest history
        self._exponents = Kernel(tb.exponents_kernel, self._tables.device.index, (torch.int32, torch.int64), (), num_warps=4)
        self._new_list()

    def reserve(self, other: ValueCounts) -> None:
        """Have room for as many amax histories as another has and as many again, none of them used so far."""
        rows, width = other._histories.shape
        self._histories = torch.zeros(2 * rows, width, dtype=torch.float32, device=self.device)
        self._histories[:, 0] = 1.0

    def has_room_for(self, other: ValueCounts) -> bool:
        """Return whether the amax histories of another fit in the memory of these."""
        rows, width = self._histories.shape
        return other._num_histories <= rows and other._histories.shape[1] <= width

    def restart(self) -> None:
        """Start a new list in memory of its own, where nothing is listed."""
        self._new_list()

    def begin(self) -> None:
        """Start a new list, once the tasks of the one before are started."""
        if self._numels:
            self._new_list()

    def _new_list(self) -> None:
        self._numels: list[int] = []  # elements of each table's tensor
        self._num_items = 0
        self._ints: list[int] = []
        self._reals: list[float] = []
        self._busy: set[int] = set()
        self._seen.clear()
        self._let_go()
        self._words = torch.empty(3 * MAX_TABLES, ROW_WORDS, dtype=torch.int64, device=self.device)
        self._hist = torch.empty(MAX_TABLES, NUM_BINS, dtype=torch.int64, device=self.device)
        self._first_word, self._first_hist = self._words.data_ptr(), self._hist.data_ptr()

    def _let_go(self) -> None:
        while self._storages:
            torch.UntypedStorage._free_weak_ref(self._storages.pop())  # type: ignore[no-untyped-call]  # torch's

    __del__ = _let_go

    def _follow(self) -> None:
        """Have what follows on the current stream wait for the stream that used the memory before."""
        raw, stream = current_stream(self._tables.device, self._raw, self._stream)
        if raw != self._raw and stream is not None and self._stream is not None:
            stream.wait_stream(self._stream)
            for memory in (self._tables, self._histories, self._words, self._hist):
                memory.record_stream(stream)
        self._raw, self._stream = raw, stream

    def what_if(self, x: Tensor, casts: Mapping[str, Cast], place: object) -> tuple[dict[str, Slots], SlotRow]:
        """Count a tensor's values, and put casts of it on the list.

        Args:
            x: a tensor that :func:`takes` accepts with these casts.
            casts: tensorwise casts by name; best the same mapping for the same place.
            place: whose amax histories delayed casts use, anything hashable.

        Returns:
            of each cast its slots without the histogram, and the exponent histogram of the tensor, int64 ``[64]``; filled by the
            next :meth:`flush`.
        """
        known = self._known.get(id(casts))
        if known is None or known[0] != place:
            entries = [self._entry(cast, place) for cast in casts.values()]
            known = self._known.keep(id(casts), (place, entries), casts)
        table = self._count(x, known[1])
        numel, words, item = self._numels[table], self._words, self._num_items
        found: dict[str, Slots] = {}
        address = self._first_word + 8 * ROW_WORDS * item
        for name, entry in zip(casts, known[1], strict=True):
            if entry.row is not None:
                self._busy.add(entry.row)
            self._ints += (table, numel, *entry.ints)
            self._reals += entry.reals
            found[name] = {OPERAND: SlotRow(words, item, address)}
            item += 1
            address += 8 * ROW_WORDS
        self._num_items = item
        return found, SlotRow(self._hist, table, self._first_hist + 8 * NUM_BINS * table)

    def _count(self, x: Tensor, entries: list[_CastState]) -> int:
        """Return the table of a tensor's counts; the same tensor, unchanged, is counted once.

        An amax history is used once before a :meth:`flush`, which comes first where it must.
        """
        if self._num_items + len(entries) > 3 * MAX_TABLES or any([entry.row in self._busy for entry in entries]):
            self.flush()
        identity = _identity(x)
        seen = self._seen.get(identity)
        if seen is not None:
            return seen
        to = self._next_table()
        num_words = x.numel() // 2
        counting = self._counting.get(num_words)
        if counting is None:
            counting = self._counting[num_words] = self._new_counting(num_words)
        kernel, tiles, programs = counting
        words = x.detach().view(-1).view(torch.int32) if INTERPRETED else x.data_ptr()
        kernel((programs, 1, 1), words, to, num_words, tiles)
        return self._keep(x, identity)

    def count_alongside(self, x: Tensor, casts: Collection[Cast], read: Callable[[Any], Any]) -> Any:
        """Have a kernel that reads a tensor anyway count it; :meth:`what_if` then starts none for it.

        Args:
            x: a tensor.
            casts: what may be added of it.
            read: starts the kernel, given the address of a table of zeros.

        Returns:
            what ``read`` returns, or None where it was not called: the tensor is counted already, or no cast can be worked out.
        """
        identity = _identity(x)
        if identity is None or identity in self._seen or not any(map(_is_plain, casts)) or not _fits(x):
            return None
        found = read(self._next_table())
        self._keep(x, identity)
        return found

    def _next_table(self) -> Any:
        """Return the next table as a kernel on the current stream takes it."""
        if len(self._numels) == MAX_TABLES:
            self.flush()
        self._follow()
        table = len(self._numels)
        return self._tables[table] if INTERPRETED else self._tables.data_ptr() + 4 * table * tb.TABLE.value

    def _keep(self, x: Tensor, identity: object) -> int:
        """Note that a tensor was counted in the next table, which is returned."""
        table = len(self._numels)
        self._numels.append(x.numel())
        if identity is not None:
            self._seen[identity] = table
            self._storages.append(x.untyped_storage()._weak_ref())
        return table

    def _new_counting(self, num_words: int) -> tuple[Kernel, int, int]:
        tiles = -(-num_words // _BLOCK)
        native = is_native(self.device)
        types, constants = (torch.int32, torch.int32, None, None), (_BLOCK, num_words % _BLOCK == 0, native)
        kernel = Kernel(tb.count_kernel, self._tables.device.index, types, constants, num_warps=tb.COUNT_WARPS)
        return kernel, tiles, min(tiles, num_sms(self.device) * tb.COUNT_PER_SM)

    def _entry(self, cast: Cast, place: object) -> _CastState:
        entry = self._entries.get((place, cast))
        if entry is None:
            entry = self._entries[place, cast] = _CastState(cast, self._new_history(cast) if cast.scaling == "delayed" else None)
        return entry

    def _new_history(self, cast: Cast) -> int:
        """Return the row of a new amax history."""
        row, self._num_histories = self._num_histories, self._num_histories + 1
        wide = max(self._histories.shape[1], 2 + (1 << max(cast.history - 1, 1).bit_length()))
        if row == self._histories.shape[0] or wide > self._histories.shape[1]:
            refuse_replays("amax histories that no earlier step has recorded")
            grown = torch.zeros(max(16, 2 * row), wide, dtype=torch.float32, device=self.device)
            grown[:, 0] = 1.0  # the scale_inv before any amax
            old = self._histories
            grown[: old.shape[0], : old.shape[1]] = old
            self._histories = grown
        return row

    def flush(self) -> None:
        """Work out all that is listed, on the device's current stream, and start a new list."""
        with on_device(self._tables) if self.device.type == "cuda" else nullcontext():
            start(self.tasks(), self.device)
        self.begin()

    def tasks(self) -> list[Task]:
        """Return what works out all that is listed; a new list is to :meth:`begin` once it was started."""
        self._follow()  # another stream may have worked out what is read next
        if not self._numels:
            return []
        packed = array("f", self._reals + self._reals[: len(self._reals) % 2])  # two in eight bytes
        return [([*self._ints, *array("q", packed.tobytes())], self._start)]

    def _start(self, numbers: Any) -> None:
        if self._num_items:
            longest = max(2, self._histories.shape[1] - 2)
            kernel = self._finish.get(longest)
            if kernel is None:
                kernel = self._finish[longest] = self._new_finish(longest)
            ints, skip = numbers, len(self._ints)
            reals = ints[skip:].view(torch.float32) if INTERPRETED else ints + 8 * skip
            kernel((self._num_items, 1, 1), address(self._tables), address(self._histories), ints, reals, address(self._words))
        self._exponents((len(self._numels), 1, 1), address(self._tables), address(self._hist))  # which clears the tables

    def _new_finish(self, longest: int) -> Kernel:
        types = torch.int32, torch.float32, torch.int64, torch.float32, torch.int64
        warps = 4 if INTERPRETED else 16
        return Kernel(
            tb.finish_kernel, self._tables.device.index, types, (1024, longest), num_warps=warps, enable_fp_fusion=False
        )  # fmt: skip
