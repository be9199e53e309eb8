"""Sample of a GEMM's result that is compared with the shadow and the exact GEMM; the same on every device.

Rows of the output (fprop, dgrad) or columns of the input (wgrad) are sampled, and of the result's other dimension, where it is
wide, a share: of every ``SHARE_BLOCK`` neighbours a group of ``SHARE_GROUP``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

#: Of so many neighbouring columns of a result (rows of grad_weight), so many next to each other are compared: 32 bytes in BF16.
SHARE_BLOCK, SHARE_GROUP = 128, 16
#: Narrower results are compared in their whole width.
MIN_WIDE = 1024
#: Sampled columns of an input lie in groups of at most so many, of which there are at least ``MIN_GROUPS``.
MAX_GROUP, MIN_GROUPS = 16, 16
#: Sampled columns of an input are kept until its backward pass: of a wide one they are one in so many, and of what was asked for
#: a quarter at least and half at most.
MAX_KEPT, MIN_KEPT = 32, 4
#: Of the sampled rows or columns the exact GEMM has one in so many, at least as many as this: it measures an accumulator's loss,
#: of which each row holds thousands of samples, and no rows that differ.
EXACT_SHARE, MIN_EXACT = 4, 64
_HASH, _BITS = 2654435761, 32


class Sample(NamedTuple):
    """Sampled rows and columns of a result.

    Attributes:
        lines: int64, which rows of the output or columns of the input; None is all.
        shift: which group of each block of the other dimension; None is all of it, whatever its width.
        size: how many of ``lines`` lie next to each other from a multiple of this on.
        start: the first of ``lines``.
    """

    lines: Tensor | None = None
    shift: int | None = None
    size: int = 1
    start: int = 0

    def share(self, count: int, device: torch.device) -> Tensor | slice:
        """Return which of ``count`` lines of the result's other dimension are compared."""
        if not self.is_share(count):
            return slice(None)
        assert self.shift is not None
        blocks = torch.arange(count // SHARE_BLOCK, dtype=torch.int64, device=device)
        starts = blocks * SHARE_BLOCK + (blocks + self.shift) % (SHARE_BLOCK // SHARE_GROUP) * SHARE_GROUP
        groups = starts[:, None] + torch.arange(SHARE_GROUP, dtype=torch.int64, device=device)
        rest = torch.arange(count // SHARE_BLOCK * SHARE_BLOCK, count, dtype=torch.int64, device=device)
        return torch.cat([groups.reshape(-1), rest])

    def few(self, x: Tensor, count: int) -> Tensor:
        """Return the first ``count`` of the sampled columns of x, a view where they lie next to each other."""
        if self.lines is None:
            return x[:, :count]
        if self.size >= count:
            return x[:, self.start : self.start + count]
        return x.index_select(1, self.lines[:count])

    def copy_of_few(self, x: Tensor, count: int) -> Tensor:
        """Return a copy of what :meth:`few` returns; on a GPU one launch."""
        if self.lines is not None and self.size >= count:
            return torch.narrow_copy(x, 1, self.start, count)
        return self.few(x, count).clone()

    def is_share(self, count: int) -> bool:
        """Return whether of so many lines only a share is compared."""
        return self.shift is not None and count >= MIN_WIDE

    def num_shared(self, count: int) -> int:
        """Return how many of ``count`` lines are compared: the share and all after the last whole block."""
        return count // SHARE_BLOCK * SHARE_GROUP + count % SHARE_BLOCK if self.is_share(count) else count


def num_exact(num_sampled: int) -> int:
    """Return how many of the sampled rows or columns of a result the exact GEMM works out: the first ones."""
    return min(num_sampled, max(MIN_EXACT, num_sampled // EXACT_SHARE))


def num_columns(count: int, length: int) -> int:
    """Return how many columns are sampled of an input with ``length``, where ``count`` were asked for."""
    if length < MIN_WIDE:
        return min(count, length)
    return max(count // MIN_KEPT, min(count - count // 2, length // MAX_KEPT))


def spread_lines(count: int, length: int, size: int, device: torch.device) -> Tensor:
    """Return ``count`` of ``length`` lines, evenly spread in groups of ``size``; every ``EXACT_SHARE``-th group comes first."""
    groups, units = count // size, length // size
    firsts = range(min(EXACT_SHARE, groups))
    order = torch.cat([torch.arange(first, groups, EXACT_SHARE, dtype=torch.int64, device=device) for first in firsts])
    return ((order * units // groups * size)[:, None] + torch.arange(size, dtype=torch.int64, device=device)).reshape(-1)


def size_of_groups(count: int, length: int) -> int:
    """Return how many of ``count`` sampled columns lie next to each other, of an input with ``length``."""
    size = MAX_GROUP
    while size > 1 and (count % size or length % size or count // size < MIN_GROUPS):
        size //= 2
    return size


def shift_of(step: int, length: int) -> int:
    """Return by how much the sample of a step is moved on: a hash of the step, below ``length``, even for every tenth step."""
    return (step * _HASH % (1 << _BITS)) * length >> _BITS
