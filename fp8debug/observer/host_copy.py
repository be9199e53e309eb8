"""Tensors of a GPU on their way to the host, for which nobody waits while training runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fp8debug.kernels.backend import gpu
from fp8debug.kernels.dispatch import on_device, takes_kernels


class HostCopy:
    """A CUDA tensor on its way to the host, such as the tokens of experts."""

    def __init__(self, value: Tensor) -> None:
        self._host, self._done = _pinned_buffer(value.shape, value.dtype)
        self._host.copy_(value.detach(), non_blocking=True)
        self._done.record(torch.cuda.current_stream(value.device))

    def is_done(self) -> bool:
        """Return whether the copy has arrived, without waiting for it."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]  # torch's

    def result(self) -> Tensor:
        """Return the values; waits if it must."""
        self._done.synchronize()
        return self._host


class HostScalar(HostCopy):
    """A CUDA scalar on its way to the host, such as the loss; where it arrives is the next one's place once it is read."""

    _spare: ClassVar[dict[torch.device, list[tuple[Tensor, torch.cuda.Event]]]] = {}
    _kept: ClassVar[list[Tensor]] = []  # never freed, for nobody but the kernel knows that it writes there

    def __init__(self, value: Tensor) -> None:
        self._number: float | None = None
        self._free = self._spare.setdefault(value.device, [])
        try:
            self._host, self._done = self._free.pop()
        except IndexError:  # of no use to ask before: watches of other threads take from it too
            self._host, self._done = _pinned_buffer((), torch.float64)
            self._kept.append(self._host)
        with on_device(value):
            if not (takes_kernels(value) and gpu().send_number(value, self._host)):
                self._host.copy_(value.detach().view(()), non_blocking=True)
            self._done.record()

    def read(self) -> float:
        """Return the value; waits if it must."""
        if self._number is None:
            self._number = float(self.result())
            self._free.append((self._host, self._done))
        return self._number


def _pinned_buffer(shape: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, torch.cuda.Event]:
    """Return where a CUDA tensor arrives on the host, and what tells when it has."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True), new_event()


def new_event() -> torch.cuda.Event:
    """Return an event, which tells when the stream has come as far as where it is recorded."""
    return torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
