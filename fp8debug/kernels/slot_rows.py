"""Results of kernels for one tensor: rows of ``ROW_WORDS`` words of device memory.

A :class:`RowLayout` says how the slots of one kind of observation lie in a row. The rows of a step are joined to the table
together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

#: 8-byte words of a row; an even number, so that every row begins at a multiple of 16 bytes.
ROW_WORDS = 26


class SlotRow(NamedTuple):
    """A row of a block of rows, and its address; the tensor is made when it is asked for, which few rows are."""

    block: Tensor
    number: int
    address: int

    @property
    def numbers(self) -> Tensor:
        """The row's tensor, int64 ``[ROW_WORDS]``."""
        return self.block[self.number]


class SlotGroup(NamedTuple):
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
        """Return the group's numbers ``[..., len(names)]`` of rows ``[..., ROW_WORDS]``."""
        first = self.start // self.dtype.itemsize
        return words.view(self.dtype)[..., first : first + self.size * len(self.names)]


class RowLayout:
    """Layout of the slots of one kind of observation in a row.

    Args:
        groups: see :class:`SlotGroup`.
    """

    def __init__(self, *groups: SlotGroup) -> None:
        self.groups = groups
        self.names = frozenset(name for group in groups for name in group.names)
        self.starts = tuple(group.start for group in groups)

    def slots(self, words: Tensor | SlotRow) -> dict[tuple[str, ...], Tensor]:
        """Return a row's numbers by the names of their slots."""
        words = words.numbers if isinstance(words, SlotRow) else words
        return {group.names: group.of(words) for group in self.groups}


#: The slots of a part of a contribution: one by its name, several of one kind and merge rule by their names, or all that a kernel
#: filled by their layout in a row.
SlotKey = str | tuple[str, ...] | RowLayout
#: Contribution of one tensor under one cast, in parts: a row by its layout, else the numbers of some slots, ``[len(names)]``, or
#: ``[parts, len(names)]`` that the slots' rule joins.
Slots = dict[SlotKey, Tensor | SlotRow]


def by_name(found: Mapping[str, Tensor]) -> Slots:
    """Return slots that torch ops filled, each by its name, as a contribution."""
    return dict(found.items())


#: A tensor of its own with the exponent histogram.
HISTOGRAM = RowLayout(SlotGroup(("log2_hist",), torch.int64, 0, size=64))
