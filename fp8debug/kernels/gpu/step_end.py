# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,misc"
# ^ Triton ships no types, and a kernel's arguments are known to its own compiler only.
"""Joins what kernels found in a step to a table's state on the GPU; importable only where Triton is.

Starts what writes into the host's pinned memory, in place of copies; importable only where Triton is.

A small kernel costs the thread that starts it less than a copy does. What it wrote is there for the host once an event that was
recorded after it has come, as with a copy. Of a copy torch's allocator knows, and does not give pinned memory to anybody else
while it is under way; of a kernel it does not, so that who calls this keeps the memory until the event has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8debug.kernels.gpu.launcher import Kernel, PlanCache, address, eager
from fp8debug.kernels.gpu.scratch import HasTasks, current_stream, discard, flush, num_losses
from fp8debug.kernels.slot_rows import RowLayout
from fp8debug.kernels.torch_state import refuse_replays

#: Numbers of a row that a layout may name, of each kind: as many as the exponent histogram has bins.
NUM_LANES = 64
LANES = tl.constexpr(NUM_LANES)
#: Columns of an item: address of the words, row of the table, number of the layout.
ITEM = tl.constexpr(3)


@triton.jit
def join_kernel(
    items, maps, counts, sums, maxima, minima, counts_width, sums_width, maxima_width, minima_width
):  # fmt: skip
    """Program i joins item i. ``maps [layouts, 4, 64]``: the table's column for each number of a row of words, or -1."""
    at = items + tl.program_id(0) * ITEM
    words = tl.load(at).to(tl.pointer_type(tl.int64))
    row = tl.load(at + 1)
    n = tl.arange(0, LANES)
    columns = maps + tl.load(at + 2) * (4 * LANES) + n

    column = tl.load(columns)
    to = counts + row * counts_width + column
    tl.store(to, tl.load(to, column >= 0, 0) + tl.load(words + n, column >= 0, 0), column >= 0)

    column = tl.load(columns + LANES)
    to = sums + row * sums_width + column
    found = tl.load(words.to(tl.pointer_type(tl.float64)) + n, column >= 0, 0.0)
    tl.store(to, tl.load(to, column >= 0, 0.0) + found, column >= 0)

    reals = words.to(tl.pointer_type(tl.float32)) + n
    column = tl.load(columns + 2 * LANES)
    to = maxima + row * maxima_width + column
    tl.store(to, tl.maximum(tl.load(to, column >= 0, 0.0), tl.load(reals, column >= 0, 0.0)), column >= 0)

    column = tl.load(columns + 3 * LANES)
    to = minima + row * minima_width + column
    tl.store(to, tl.minimum(tl.load(to, column >= 0, 0.0), tl.load(reals, column >= 0, 0.0)), column >= 0)


pass

#: The kinds of numbers that rows of words hold: (kind, merge rule) of the state, in the kernel's order.
KINDS = (("int64", "sum"), ("float64", "sum"), ("float32", "max"), ("float32", "min"))
#: Those of all watches: pools are shared by those on one device.
_JOINERS: WeakSet[Joiner] = WeakSet()


class Joiner:
    """Joins rows of words to the state of one device.

    Args:
        state: tensor ``[rows, columns]`` of each (kind, merge rule).
        columns: where the slots lie: first column of each name.
    """

    def __init__(self, state: Mapping[tuple[str, str], Tensor], columns: Mapping[str, int]) -> None:
        self.join_to(state)
        self._device = self._state[0].device
        self._columns = columns
        self._numbers: dict[RowLayout, int] = {}
        self._maps: list[list[int]] = []
        self._map: Tensor | None = None
        self._num_losses = num_losses(self._device)
        self._raw, self._stream = current_stream(self._device)  # the last stream that used the state
        types = torch.int64, torch.int32, torch.int64, torch.float64, torch.float32, torch.float32, None, None, None, None
        self._kernel = Kernel(join_kernel, self._device.index, types, (), num_warps=2)
        _JOINERS.add(self)

    def number(self, layout: RowLayout) -> int:
        """Return the number of a layout in an item."""
        found = self._numbers.get(layout)
        if found is None:
            refuse_replays("statistics that no earlier step has recorded")
            found = self._numbers[layout] = len(self._numbers)
            self._maps += [self._map_of(layout, kind) for kind in KINDS]
            maps = torch.tensor(self._maps, dtype=torch.int32, device="cpu")
            self._map = maps.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else maps
        return found

    def join_to(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Join what follows to this state."""
        self._state = [state[kind] for kind in KINDS]

    def __call__(self, items: list[int], first: Sequence[HasTasks] = ()) -> None:
        """Have the rows filled whose sums wait for their second stage, and join some to the state.

        Args:
            items: address of a row of words, row of the state, number of its layout, of each row that is joined; none meets
                another.
            first: what fills rows and has to be started for that.

        Raises:
            MemoryError: rows taken since this joiner was made were left unfilled; it has to be replaced.
        """
        if num_losses(self._device) != self._num_losses:
            raise MemoryError("statistics that waited for their second stage were lost")
        self.follow()
        flush(self._device, first, [(items, partial(self._start, len(items) // 3))] if items else [])

    def follow(self) -> None:
        """Have what follows on the current stream wait for the stream that used the state before."""
        raw, stream = current_stream(self._device, self._raw, self._stream)
        if raw != self._raw and stream is not None and self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw, self._stream = raw, stream

    def _start(self, count: int, items: Any) -> None:
        assert self._map is not None
        state = (address(tensor) for tensor in self._state)
        widths = (tensor.shape[1] for tensor in self._state)
        self._kernel((count, 1, 1), items, address(self._map), *state, *widths)

    def discard(self) -> None:
        """Forget the rows that are not filled yet, and give the memory of the device's pools back; the last joiner there does."""
        _JOINERS.discard(self)
        if all(other._device != self._device for other in _JOINERS):
            discard(self._device)

    def _map_of(self, layout: RowLayout, kind: tuple[str, str]) -> list[int]:
        """Return the state's column for each number of this kind in a row."""
        found = [-1] * NUM_LANES
        for group in layout.groups:
            if group.kind == kind:
                first = group.start // group.dtype.itemsize
                for i, name in enumerate(group.names):
                    found[first + i * group.size : first + (i + 1) * group.size] = range(
                        self._columns[name], self._columns[name] + group.size
                    )
        return found


@triton.jit
def state_kernel(state, neutral, host, count, BLOCK: tl.constexpr):
    """``count`` words of a state go to the host, and become neutral again."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(host + at, tl.load(state + at, at < count), at < count)
    tl.store(state + at, tl.load(neutral + at, at < count), at < count)


@triton.jit
def number_kernel(value, host):
    """A number goes to the host as FP64."""
    tl.store(host, tl.load(value).to(tl.float64))


#: Words of a program.
BLOCK = 1024
_NUMBERS: PlanCache[Kernel] = PlanCache()
_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class StateSender:
    """Sends a table's state to the host, and sets it back.

    Args:
        state: contiguous, of a multiple of 16 bytes.
        neutral: what it is set back to, as large.
    """

    def __init__(self, state: Tensor, neutral: Tensor) -> None:
        self._state, self._neutral = state.view(torch.int64), neutral.view(torch.int64)
        self._grid = -(-self._state.numel() // BLOCK), 1, 1
        self._kernel = Kernel(state_kernel, state.device.index, (torch.int64,) * 3 + (None,), (BLOCK,), num_warps=4)

    def __call__(self, host: Tensor) -> None:
        """Start it on the state's device, which is the current one, to pinned memory as large as the state."""
        host = host.view(torch.int64)
        self._kernel(self._grid, address(self._state), address(self._neutral), address(host), host.numel())


def send_number(value: Tensor, host: Tensor) -> bool:
    """Write a number to pinned memory, on the value's device, which is the current one.

    Args:
        value: one element.
        host: FP64, one element.

    Returns:
        False where it was not started: the value is no plain tensor of a float, or the program is traced.
    """
    if value.dtype not in _FLOATS or not eager(value):
        return False
    key = value.device.index, value.dtype, value.data_ptr() % 16, host.data_ptr() % 16
    kernel = _NUMBERS.get(key)
    if kernel is None:
        new = Kernel(number_kernel, value.device.index, (value.dtype, torch.float64), (), num_warps=1)
        kernel = _NUMBERS.keep(key, new)
    kernel((1, 1, 1), address(value), address(host))
    return True
