"""Starts what writes into the host's pinned memory, in place of copies; importable only where Triton is.

A small kernel costs the thread that starts it less than a copy does. What it wrote is there for the host once an event that was
recorded after it has come, as with a copy. Of a copy torch's allocator knows, and does not give pinned memory to anybody else
while it is under way; of a kernel it does not, so that who calls this keeps the memory until the event has come.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8debug.kernels.triton_leaving import number_kernel, state_kernel
from fp8debug.kernels.triton_run import Kernel, address, eager

#: Words of a program.
BLOCK = 1024
_NUMBERS: dict[Any, Kernel] = {}
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
        kernel = _NUMBERS[key] = Kernel(number_kernel, value.device.index, (value.dtype, torch.float64), (), num_warps=1)
    kernel((1, 1, 1), address(value), address(host))
    return True
