"""What tests of the kernels share; they run on a GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fp8debug.metrics import METRICS, Pair, Slot
from fp8debug.metrics.scale_spread import ScaleSpread

_LEFT_OUT = {slot.name for slot in ScaleSpread.slots}


def of_kernels(statistics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what kernels of FP8 fill, of the reference's statistics of an operand."""
    return {name: value for name, value in statistics.items() if name not in _LEFT_OUT}


class Largest:
    """A metric that no kernel knows, of operands alone or of results too.

    Args:
        slot: its name.
        of_results: whether results have it.
        read: what of an observation.
    """

    name = "largest"
    present = "numel"
    derived: dict[str, object] = {}  # noqa: RUF012  # read only

    def __init__(self, slot: str, read: Callable[[Pair], Tensor], *, of_results: bool) -> None:
        self.slots = (Slot(name=slot, merge="max", kind="float32", unit="x", doc="largest value"),)
        self.of_results = of_results
        self._read = read

    def partial(self, pair: Pair) -> dict[str, Tensor]:
        return {self.slots[0].name: self._read(pair).amax()}


@contextmanager
def by_kernels_with(metric: Largest, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let tensors on a CPU take a module's way of those on a GPU, by the interpreter, with one more metric registered."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(module, "takes_kernels", lambda x: True)
        monkeypatch.setattr(module, "on_device", lambda x: nullcontext())
    METRICS.add(metric.name, metric)  # type: ignore[arg-type]  # derived is empty
    yield
    METRICS.remove(metric.name)
