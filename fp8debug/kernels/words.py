"""Where kernels leave what they found of one tensor: rows of 24 words of device memory, handed out without an allocation each.

A :class:`Layout` says how the slots of one kind of observation lie in a row. The rows of a step are joined to the table together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: 8-byte words of a row, and rows that are allocated together.
WORDS, ROWS = 24, 256
#: Counters of programs that are done, one for each kernel that needs some; zero between launches.
TICKETS = 8


class Group(NamedTuple):
    """Slots of one kind and merge rule in a row, next to each other from a byte on, each of some numbers."""

    names: tuple[str, ...]
    dtype: torch.dtype
    start: int
    merge: str = "sum"
    size: int = 1

    @property
    def kind(self) -> tuple[str, str]:
        """(kind, merge rule), as a table groups its slots."""
        return str(self.dtype).removeprefix("torch."), self.merge

    def of(self, words: Tensor) -> Tensor:
        """Return the group's numbers ``[..., len(names)]`` of rows ``[..., 24]``."""
        first = self.start // self.dtype.itemsize
        return words.view(self.dtype)[..., first : first + self.size * len(self.names)]


class Layout:
    """How the slots of one kind of observation lie in a row.

    Args:
        groups: see :class:`Group`.
    """

    def __init__(self, *groups: Group) -> None:
        self.groups = groups
        self.names = frozenset(name for group in groups for name in group.names)
        self.starts = tuple(group.start for group in groups)

    def slots(self, words: Tensor) -> dict[tuple[str, ...], Tensor]:
        """Return a row's numbers by the names of their slots."""
        return {group.names: group.of(words) for group in self.groups}


#: A tensor of its own with the exponent histogram.
HISTOGRAM = Layout(Group(("log2_hist",), torch.int64, 0, size=64))


class Pool:
    """Rows and counters of one stream of a device.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: list[Tensor] = []
        self._address = 0
        self.tickets = torch.zeros(TICKETS, dtype=torch.int32, device=device)
        self.tickets_address: Any = self.tickets.data_ptr() if device.type == "cuda" else self.tickets

    def take(self) -> tuple[Tensor, int]:
        """Return an uninitialized row, int64 ``[24]``, and its address."""
        if not self._rows:
            block = torch.empty(ROWS, WORDS, dtype=torch.int64, device=self._device)
            self._rows = list(block.unbind(0))
            self._address = block.data_ptr() + ROWS * WORDS * 8
        self._address -= WORDS * 8
        return self._rows.pop(), self._address


_POOLS: dict[tuple[torch.device, int], Pool] = {}


def pool(device: torch.device) -> Pool:
    """Return the pool of the device's current stream."""
    key = device, torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0
    found = _POOLS.get(key)
    if found is None:
        found = Pool(device)
        if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():  # else its memory is the graph's
            _POOLS[key] = found
    return found
