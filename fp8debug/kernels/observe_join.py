"""Joins what kernels found in a step to a table's state on the GPU; importable only where Triton is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fp8debug.kernels.observe_pool import Listed, current_stream, discard, flush, num_losses
from fp8debug.kernels.triton_join import NUM_LANES, join_kernel
from fp8debug.kernels.triton_run import Kernel, address
from fp8debug.kernels.words import Layout

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
        self._numbers: dict[Layout, int] = {}
        self._maps: list[list[int]] = []
        self._map: Tensor | None = None
        self._num_losses = num_losses(self._device)
        self._raw, self._stream = current_stream(self._device)  # the last stream that used the state
        types = torch.int64, torch.int32, torch.int64, torch.float64, torch.float32, torch.float32, None, None, None, None
        self._kernel = Kernel(join_kernel, self._device.index, types, (), num_warps=2)
        _JOINERS.add(self)

    def number(self, layout: Layout) -> int:
        """Return the number of a layout in an item."""
        found = self._numbers.get(layout)
        if found is None:
            found = self._numbers[layout] = len(self._numbers)
            self._maps += [self._map_of(layout, kind) for kind in KINDS]
            maps = torch.tensor(self._maps, dtype=torch.int32, device="cpu")
            self._map = maps.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else maps
        return found

    def join_to(self, state: Mapping[tuple[str, str], Tensor]) -> None:
        """Join what follows to this state."""
        self._state = [state[kind] for kind in KINDS]

    def __call__(self, items: list[int], first: Sequence[Listed] = ()) -> None:
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
        raw, stream = current_stream(self._device, self._raw, self._stream)
        if raw != self._raw and stream is not None and self._stream is not None:
            stream.wait_stream(self._stream)
        self._raw, self._stream = raw, stream
        flush(self._device, first, [(items, partial(self._start, len(items) // 3))] if items else [])

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

    def _map_of(self, layout: Layout, kind: tuple[str, str]) -> list[int]:
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
