"""Helpers of the kernels' tests, which run on a GPU, or on the CPU by Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from fp8debug.metrics import METRICS, Pair, Slot
from fp8debug.metrics.expression import evaluate
from fp8debug.metrics.scale_spread import ScaleSpread

#: What the standard deviation of block scales is made of.
NEEDED = ("num_scales", "scale_inv_sum_log2", "scale_inv_sum2_log2")


def assert_same_spread(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Compare the standard deviation of block scales, which is the difference of large sums; logarithms are good to 2^-22."""
    values = [{name: float(slots[name]) for name in NEEDED} for slots in (found, wanted)]
    if all(map(math.isfinite, values[1].values())):
        value, want = (evaluate(ScaleSpread.derived["scale_inv_std_log2"].expression, slots) for slots in values)
        assert value == want if value is None or want is None else abs(value - want) <= 2e-6, (value, want)


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
