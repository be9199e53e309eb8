"""Counters by which the last programs of a launch know that they are the last; importable only where Triton is.

They are zero between the launches of a stream. A launch that is captured in a graph keeps counters of its own for good: the graph
may be replayed on any stream, beside anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

#: Counters of a launch: one of all its programs, and one each of so many groups.
NUM_TICKETS = 33
#: Launches that may be captured without a kernel that clears their counters, by device.
NUM_SPARE = 256

_OF_STREAM: dict[tuple[torch.device, int], Tensor] = {}
_SPARE: dict[torch.device, Iterator[int]] = {}
_BLOCKS: list[Tensor] = []  # of spare counters: graphs that nobody counts may use them


def tickets(device: torch.device) -> int:
    """Return the address of the counters of the next launch on the current stream, int32 ``[33]``."""
    if torch.cuda.is_current_stream_capturing():
        spare = next(_SPARE.get(device, iter(())), None)
        return spare or torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device).data_ptr()  # the graph's memory, and its op
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    own = _OF_STREAM.get(key)
    if own is None:
        own = _OF_STREAM[key] = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
    if device not in _SPARE:
        _BLOCKS.append(torch.zeros(NUM_SPARE, NUM_TICKETS, dtype=torch.int32, device=device))
        first, size = _BLOCKS[-1].data_ptr(), 4 * NUM_TICKETS
        _SPARE[device] = iter(range(first, first + NUM_SPARE * size, size))
    return own.data_ptr()
