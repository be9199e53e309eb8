"""Memory that kernels leave what they found in, and the second stages of their sums; importable only where Triton is.

A kernel whose programs each leave a part of a sum takes space for the parts and a row of ``slot_rows`` for the sum, and says
what is to be joined. The parts of many kernels are joined in one launch: when the space is used up, or when the rows are wanted.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from fp8debug.kernels.gpu import deferred as tl
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.kernels.gpu.launcher import Kernel, address
from fp8debug.kernels.slot_rows import ROW_WORDS, SlotRow
from fp8debug.kernels.torch_state import NotReplayableError, numbers_of_capture, refuse_replays

#: Rows that are allocated together.
ROWS = 256
#: FP64 numbers of the space for parts: 4 MiB.
SPACE = 1 << 10 if INTERPRETED else 1 << 19
#: Integers that an upload holds at least: what a step of the usual model leaves for its end.
MIN_UPLOAD = 1 << 12
#: Integers that one capture may send, 1 MiB: a layer's repetition sends some 10,000.
MAX_CAPTURED = 1 << 17


#: Integers that kernels take, and what starts them, given where these lie: what ``address`` returns.
Task = tuple[list[int], Callable[[Any], None]]


class HasTasks(Protocol):
    """Owner of work that is started together with that of others."""

    def tasks(self) -> list[Task]:
        """Return what to start."""
        ...

    def begin(self) -> None:
        """Start a new list."""


class PinnedUpload:
    """Pinned memory that integers are sent from; one belongs to a device.

    Args:
        size: integers.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = torch.empty(size, dtype=torch.int64, device="cpu", pin_memory=True)
        self._array = self._memory.numpy()
        self._left = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's

    def is_free(self) -> bool:
        """Return whether what was sent last has left, without waiting for it."""
        return bool(self._left.query())  # type: ignore[no-untyped-call]  # torch's

    def send(self, numbers: list[int], device: torch.device) -> Tensor:
        """Return integers on the device, which is the current one; behind them may lie others."""
        self._array[: len(numbers)] = array("q", numbers)
        found = torch.empty(self.size, dtype=torch.int64, device=device)
        found.copy_(self._memory, non_blocking=True)
        self._left.record()
        return found


class CapturedNumbers:
    """Pinned memory that a capture sends from, each part of it once: a graph reads it at each replay."""

    def __init__(self) -> None:
        self._memory = torch.empty(MAX_CAPTURED, dtype=torch.int64, device="cpu", pin_memory=torch.cuda.is_available())
        self._array, self._used = self._memory.numpy(), 0

    def send(self, numbers: list[int], device: torch.device) -> Tensor:
        """Return integers on the device, which is the current one.

        Raises:
            NotReplayableError: there are more than it holds.
        """
        first, stop = self._used, self._used + len(numbers)
        if stop > MAX_CAPTURED:
            raise NotReplayableError("more is sent to the device than was expected")
        self._array[first:stop], self._used = array("q", numbers), stop
        found = torch.empty(len(numbers), dtype=torch.int64, device=device)
        return found.copy_(self._memory[first:stop], non_blocking=True)


#: Those of each device, the one that was sent first in front.
_UPLOADS: dict[torch.device, deque[PinnedUpload]] = {}


def to_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return integers as int64 on a device, which is the current one, without waiting for it; behind them may lie others."""
    if device.type != "cuda":
        return torch.frombuffer(array("q", numbers), dtype=torch.int64)
    captured = numbers_of_capture()
    if captured is not None:
        return cast("CapturedNumbers", captured).send(numbers, device)
    uploads, upload = _UPLOADS.setdefault(device, deque()), None
    with suppress(IndexError):
        upload = uploads.popleft()  # no other thread has it meanwhile
    if upload is not None and not upload.is_free():  # nor are those behind it
        uploads.appendleft(upload)
        upload = None
    if upload is None or upload.size < len(numbers):
        upload = PinnedUpload(max(MIN_UPLOAD, 1 << (len(numbers) - 1).bit_length()))
    found = upload.send(numbers, device)
    uploads.append(upload)
    return found


def start(tasks: Sequence[Task], device: torch.device) -> None:
    """Start tasks in their order on the current stream; all their integers go in one copy, each's to a multiple of 16 bytes."""
    numbers: list[int] = []
    places: list[int] = []
    for more, _ in tasks:
        places.append(len(numbers))
        numbers += more
        if len(more) % 2:
            numbers.append(0)
    if not tasks:
        return
    sent = to_device(numbers, device) if numbers else torch.empty(0, dtype=torch.int64, device=device)
    first = address(sent)
    for place, (_, run) in zip(places, tasks, strict=True):
        run(first[place:] if INTERPRETED else first + 8 * place)


def current_stream(
    device: torch.device, raw: int = -1, stream: torch.cuda.Stream | None = None
) -> tuple[int, torch.cuda.Stream | None]:
    """Return the address of a device's current stream and the stream, which is the given one if the address is; 0 of the CPU."""
    if device.type != "cuda":
        return 0, None
    here = _raw_stream(device)
    return (raw, stream) if here == raw else (here, torch.cuda.current_stream(device))


@dataclass(frozen=True, eq=False)
class SecondStage:
    """A second stage: its kernel, whose program i takes the i-th of ``size`` integers, and their number.

    One is known by its identity: Triton's kernels work their hash out anew each time that they are asked.
    """

    kernel: Any
    size: int
    constants: tuple[int, ...]
    warps: int


#: The statistics of a cast, those of a GEMM's result, and those of a cast whose codes were given.
OPERANDS = SecondStage(tl.operands_kernel, tl.OPERAND_ITEM.value, (16 if INTERPRETED else 256,), 8)
RESULTS = SecondStage(tl.results_kernel, tl.RESULT_ITEM.value, (), 4)
FOREIGN = SecondStage(tl.described_kernel, tl.FOREIGN_ITEM.value, (), 4)


class Pool:
    """Rows and space of one stream of a device.

    Args:
        device: where they lie.
        stream: the stream; None on the CPU.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream = stream
        self.is_touched = False  # a row was taken since the pools of the device were flushed
        self._device = device
        self._block = torch.empty(0, ROW_WORDS, dtype=torch.int64, device=device)
        self._held: list[Tensor] = []  # full blocks that waiting items write to, whoever else lets go of them
        self._num_taken = self._num_rows = self._address = 0
        self._space: Tensor | None = None
        self._start = self._used = self._size = 0
        self._waiting: dict[SecondStage, list[int]] = {OPERANDS: [], RESULTS: [], FOREIGN: []}
        self._kernels = {stage: self._kernel(stage) for stage in self._waiting}

    def _kernel(self, stage: SecondStage) -> Kernel:
        return Kernel(stage.kernel, self._device.index, (torch.int64,), stage.constants, num_warps=stage.warps)

    def allocate(self) -> SlotRow:
        """Return an uninitialized row."""
        if self._num_taken == self._num_rows:
            self._new_block()
        number = self._num_taken
        self._num_taken = number + 1
        self.is_touched = True
        return SlotRow(self._block, number, self._address + 8 * ROW_WORDS * number)

    def _new_block(self) -> None:
        block = torch.empty(ROWS, ROW_WORDS, dtype=torch.int64, device=self._device)
        if any(self._waiting.values()):
            self._held.append(self._block)
        self._block, self._num_taken, self._num_rows, self._address = block, 0, ROWS, block.data_ptr()

    def space(self, count: int) -> tuple[Any, int]:
        """Return space for so many FP64 numbers as a kernel takes it, and its address; until the next :meth:`flush`."""
        if self._used + count > self._size:
            self._make_space(count)
        first, self._used = self._used, self._used + count
        at = self._start + 8 * first
        return (self._space[first : self._used] if INTERPRETED and self._space is not None else at), at

    def _make_space(self, count: int) -> None:
        self.flush()
        if count > self._size:
            self._space, self._size = None, 0
            self._space = torch.empty(max(count, SPACE), dtype=torch.float64, device=self._device)
            self._start, self._size = self._space.data_ptr(), self._space.numel()

    def defer(self, stage: SecondStage, count: int, rest: tuple[int, ...], rows: int = 1) -> tuple[Any, list[SlotRow]]:
        """Return space for parts as a kernel takes it, and the rows that the next :meth:`flush` joins them to.

        Args:
            stage: the second stage.
            count: FP64 numbers of the parts of one row.
            rest: what an item of the stage has but the addresses of parts and row.
            rows: whose parts follow each other.
        """
        parts, start = self.space(rows * count)
        number = self._num_taken
        if number + rows > self._num_rows:
            self._new_block()
            number = 0
        self._num_taken = number + rows
        self.is_touched = True
        waiting, found = self._waiting[stage], []
        for i in range(rows):
            row = SlotRow(self._block, number + i, self._address + 8 * ROW_WORDS * (number + i))
            waiting += (start + 8 * count * i, row.address, *rest)
            found.append(row)
        return parts, found

    def tasks(self) -> list[Task]:
        """Return what joins the parts that wait."""
        return [(waiting, partial(self._launch, stage, len(waiting))) for stage, waiting in self._waiting.items() if waiting]

    def _launch(self, stage: SecondStage, count: int, items: Any) -> None:
        self._kernels[stage]((count // stage.size, 1, 1), items)

    def begin(self) -> None:
        """Wait for nothing any more; the space is free again for what runs on the current stream afterwards."""
        for items in self._waiting.values():
            items.clear()
        self._held.clear()
        self._used = 0
        self._num_taken = self._num_rows  # the next row begins a block: what a step leaves alive is the same for each
        if self._size > SPACE:  # made for one large tensor
            self._space, self._size = None, 0

    def flush(self) -> None:
        """Join what waits, on the current stream. Where that fails, all that waits is lost, as :func:`num_losses` tells."""
        try:
            start(self.tasks(), self._device)
        except BaseException:
            _lose(self._device)
            raise
        finally:
            self.begin()


_POOLS: dict[tuple[torch.device, int], Pool] = {}
_LOSSES: dict[torch.device, int] = {}


def _raw_stream(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


def pool(device: torch.device) -> Pool:
    """Return the pool of the device's current stream."""
    key = device, _raw_stream(device)
    found = _POOLS.get(key)
    if found is None:
        refuse_replays("kernels on more than one stream")  # nobody would join what they leave
        found = Pool(device, torch.cuda.current_stream(device) if device.type == "cuda" else None)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else its memory is the graph's
            _POOLS[key] = found
    return found


@contextmanager
def pool_of_graph(device: torch.device) -> Iterator[None]:
    """Have what is captured on a device's current stream take rows of one pool, which is forgotten afterwards.

    Nothing may wait in the device's other pools: the graph would join it at each replay.
    """
    key = device, _raw_stream(device)
    before = _POOLS.get(key)
    _POOLS[key] = Pool(device, torch.cuda.current_stream(device))
    try:
        yield
    finally:
        del _POOLS[key]
        if before is not None:
            _POOLS[key] = before


def flush(device: torch.device, first: Sequence[HasTasks] = (), last: Sequence[Task] = ()) -> None:
    """Join what waits in the pools of a device, which is the current one, on its current stream.

    Other streams that took rows wait for this one, so that their rows are whole until all of ``last`` has read them.

    Args:
        device: the device.
        first: what else to start, before.
        last: what to start afterwards.
    """
    here = _raw_stream(device)
    pools: list[Pool] = []
    others: list[torch.cuda.Stream] = []
    for (where, raw), found in list(_POOLS.items()):
        is_here = raw == here or found.stream is None
        if where == device and (is_here or found.is_touched):
            pools.append(found)
            if found.stream is not None and not is_here:
                others.append(found.stream)
                torch.cuda.current_stream(device).wait_stream(found.stream)
    try:
        start([task for one in (*first, *pools) for task in one.tasks()] + [*last], device)
    except BaseException:
        _lose(device)
        raise
    finally:
        for found in pools:
            found.begin()
            found.is_touched = False
        for stream in others:
            stream.wait_stream(torch.cuda.current_stream(device))
    for one in first:
        one.begin()


def _lose(device: torch.device) -> None:
    _LOSSES[device] = num_losses(device) + 1


def num_losses(device: torch.device) -> int:
    """Return how often rows of a device were left unfilled; who holds one that was taken before must not read it."""
    return _LOSSES.get(device, 0)


def discard(device: torch.device) -> None:
    """Forget what waits in the pools of a device, and the pools; rows that were taken stay, unfilled."""
    for key, found in list(_POOLS.items()):
        if key[0] == device:
            del _POOLS[key]
            if found.is_touched:
                _lose(device)
