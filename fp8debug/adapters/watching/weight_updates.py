"""Weights that a program updates by itself, or by an optimizer that is no ``torch.optim.Optimizer``: when that happened."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

#: Parameters looked at, spread over the model.
NUM_PARAMETERS = 8
#: Bytes looked at from each end of a parameter in the host's memory.
NUM_BYTES = 2048


class WeightUpdates:
    """State of some parameters, and of their gradients, without a look at values on a device, which would wait for it.

    An update in place raises a tensor's version; one through ``p.data`` does not, and changes an address or, in the host's
    memory, bytes. In a distributed job versions alone are compared: sharding moves parameters between its buffers.

    Args:
        roots: the models.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        trained = [p for root in roots for p in root.parameters() if p.requires_grad]
        self._parameters = spread(trained)
        self._is_alone = not (dist.is_available() and dist.is_initialized())

    def weights(self) -> tuple[Any, ...]:
        """Return a value that is equal as long as no parameter was updated."""
        return tuple((p._version, *self._place_of(p)) for p in self._parameters)

    def gradients(self) -> tuple[Any, ...]:
        """Return a value that is equal as long as no gradient was added to, cleared or replaced."""
        return tuple(None if (grad := p.grad) is None else (id(grad), grad._version) for p in self._parameters)

    def _place_of(self, p: Tensor) -> tuple[Any, ...]:
        if not self._is_alone or type(p) not in (nn.Parameter, Tensor) or p.layout != torch.strided or p.is_meta:
            return ()
        address = p.data_ptr()
        size = p.numel() * p.element_size()
        if p.device.type != "cpu" or not size or not p.is_contiguous():
            return (address,)
        length = min(size, NUM_BYTES)
        return address, ctypes.string_at(address, length), ctypes.string_at(address + size - length, length)


def spread(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return at most ``NUM_PARAMETERS`` of some parameters, the first and the last among them."""
    num = min(len(parameters), NUM_PARAMETERS)
    return [parameters[place * (len(parameters) - 1) // max(1, num - 1)] for place in range(num)]


def is_in_backward() -> bool:
    """Return whether autograd runs on this thread: a module's forward pass is then a recomputation."""
    return bool(torch._C._current_graph_task_id() != -1)
