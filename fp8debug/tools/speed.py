"""Is FP8 worth it, layer by layer? The time of a Linear's three GEMMs in BF16 and in FP8 with their quantization, on this GPU.

A time is the median over replays of a CUDA graph that holds several calls, each on other inputs, so that neither a launch nor
a warm cache counts; its spread is the interquartile range of the replays. Data are normally distributed: products run
faster on zeros. Small K and N lose: quantizing costs bytes, M * K of them, and the GEMM saves operations, M * N * K.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from fp8debug import __version__
from fp8debug.errors import UsageError
from fp8debug.kernels.amax_history import AmaxHistory
from fp8debug.kernels.dispatch import (
    Operand,
    describe,
    finite_amax,
    gemm,
    quantize,
    quantize_observed,
)
from fp8debug.metrics import Source
from fp8debug.recipes import Cast, Recipe
from fp8debug.tools.energy import EnergyMeter
from fp8debug.types import CONTRACTS_ROWS, OPERANDS, Gemm, TensorRole

#: Sets of inputs a graph goes through; replays that are timed, and that are not.
SETS, REPLAYS, WARM_UP = 4, 21, 3
#: A replay should last so long that the clock's resolution does not matter; how often it goes through the sets at most.
LONG_ENOUGH_US, MAX_ROUNDS = 500.0, 32
#: How long a GPU is kept busy for one reading of its energy: drivers renew theirs every 20 to 100 ms.
ENERGY_S = 0.4

Progress = Callable[[int, int, str], None]


def check_device() -> torch.device:
    """Return the GPU to measure on.

    Raises:
        UsageError: there is none, or it has no FP8 units.
    """
    if not torch.cuda.is_available():
        why = "this build of torch has no CUDA" if torch.version.cuda is None else "torch finds no GPU"
        raise UsageError(
            f"speed times GEMMs on FP8 tensor cores, and {why}: a CPU's times say nothing of a GPU's; run it where you train"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    major, minor = torch.cuda.get_device_capability(device)
    if torch.version.hip or (major, minor) < (9, 0):
        name = torch.cuda.get_device_name(device)
        raise UsageError(
            f"speed times FP8 GEMMs of Hopper and later GPUs; {name} runs them in plain torch ops, which always lose"
        )
    return device


def measure_shapes(
    shapes: Sequence[Mapping[str, Any]], *, energy: bool = True, progress: Progress | None = None
) -> dict[str, Any]:
    """Measure shapes and return what ``speed.json`` holds of them (docs/speed.md).

    Args:
        shapes: as ``store.speed_file.shapes_of`` and ``load_shapes`` return them.
        energy: read the board's energy too, where the driver reports it; takes 2.4 s a shape.
        progress: called with shapes done, shapes in all, and what is measured.

    Raises:
        UsageError: no GPU with FP8, a shape that does not fit into its memory, or progress is no function.
    """
    if not callable(progress) and progress is not None:
        raise UsageError(f"progress is a function of (done, all, shape), got {progress!r}")
    device = check_device()
    meter = EnergyMeter.open(device.index) if energy else None
    measured = []
    for done, shape in enumerate(shapes):
        m, k, n = (int(shape[size]) for size in ("tokens", "in_features", "out_features"))
        if progress is not None:
            progress(done, len(shapes), f"{m} x {k} x {n}")
        try:
            gemms = _measure(m, k, n, Recipe.from_dict(shape["recipe"]), device, meter)
        except torch.OutOfMemoryError:
            raise UsageError(f"{shape['modules'][0]}: {SETS} sets of tensors of {m} x {k} x {n} do not fit the GPU") from None
        measured.append({**shape, "gemms": gemms})
    return {
        "device": torch.cuda.get_device_name(device),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"fp8debug": __version__, "torch": torch.__version__, "cuda": str(torch.version.cuda)},
        "dtype": "bfloat16",
        "energy": meter is not None,
        "shapes": measured,
    }


def _measure(
    m: int, k: int, n: int, recipe: Recipe, device: torch.device, meter: EnergyMeter | None
) -> dict[str, dict[str, float | None]]:
    sizes = {TensorRole.INPUT: (m, k), TensorRole.WEIGHT: (n, k), TensorRole.GRAD_OUTPUT: (m, n)}
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        role: [torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(SETS)]
        for role, size in sizes.items()
    }
    return {which.value: _measure_gemm(which, tensors, recipe, meter) for which in Gemm}


def _measure_gemm(
    which: Gemm, tensors: Mapping[TensorRole, list[Tensor]], recipe: Recipe, meter: EnergyMeter | None
) -> dict[str, float | None]:
    first, second = (_Operand(which, role, tensors[role], recipe.casts[which, role]) for role in OPERANDS[which])
    fast = which in recipe.fast_accum

    def multiply(a: Operand, b: Operand) -> Tensor:
        return gemm(which, a, b, dtype=torch.bfloat16, fast_accum=fast)

    plain = Timing(lambda i: multiply(first.x[i], second.x[i]))
    ready = [(first.quantize(i), second.quantize(i)) for i in range(SETS)]
    product = Timing(lambda i: multiply(*ready[i]))
    casting = Timing(lambda i: (first.quantize(i), second.quantize(i)))
    observing = Timing(lambda i: (first.observe(i), second.observe(i)))
    whole = Timing(lambda i: multiply(first.quantize(i), second.quantize(i)))
    timings = (plain, product, casting, observing, whole)
    return {
        "bf16_us": plain.us,
        "quantize_us": casting.us,
        "gemm_us": product.us,
        "fp8_us": whole.us,
        "statistics_us": max(0.0, observing.us - casting.us),
        "spread": max(t.spread for t in timings),
        "bf16_mj": plain.millijoules(meter),
        "fp8_mj": whole.millijoules(meter),
    }


class _Operand:
    """One operand of a GEMM: its tensors and how it is quantized."""

    def __init__(self, which: Gemm, role: TensorRole, x: list[Tensor], cast: Cast | None) -> None:
        self.x = x
        self.cast = cast
        self.contracts_rows = (which, role) in CONTRACTS_ROWS
        self.where = ("speed", which.value, role.value)
        self.history = AmaxHistory(cast, x[0].device) if cast and cast.scaling == "delayed" else None
        if self.history:
            self.history.fill(finite_amax(x[0]))

    def _scale_inv(self, i: int) -> Tensor | None:
        return self.history.next_scale_inv(finite_amax(self.x[i]), "evaluate") if self.history else None

    def quantize(self, i: int) -> Operand:
        if self.cast is None:
            return self.x[i]
        q = quantize(self.x[i], self.cast, self._scale_inv(i), contracts_rows=self.contracts_rows, where=self.where)
        return q, self.cast

    def observe(self, i: int) -> object:
        """Quantize with the statistics of the cast, as a sampled step does."""
        if self.cast is None:
            return self.x[i]
        scale_inv = self._scale_inv(i)
        q, found = quantize_observed(self.x[i], self.cast, scale_inv, contracts_rows=self.contracts_rows, where=self.where)
        return describe(Source(self.x[i]), self.cast, q, found)


class Timing:
    """The time of one call.

    Args:
        call: what is timed, on the inputs of a set.

    Attributes:
        us: median microseconds of a call.
        spread: interquartile range over the median.
    """

    def __init__(self, call: Callable[[int], object]) -> None:
        for i in range(SETS):  # compiles, and fills the allocator
            call(i)
        torch.cuda.synchronize()
        self._capture(call, SETS)
        estimate = min(self._replay() for _ in range(WARM_UP))
        if estimate * SETS < LONG_ENOUGH_US:
            self._capture(call, SETS * min(MAX_ROUNDS, ceil(LONG_ENOUGH_US / (estimate * SETS))))
        times = [self._replay() for _ in range(WARM_UP + REPLAYS)][WARM_UP:]
        self.us = median(times)
        low, _, high = quantiles(times, n=4)
        self.spread = (high - low) / self.us

    def _capture(self, call: Callable[[int], object], count: int) -> None:
        self._graph, self._count = torch.cuda.CUDAGraph(), count
        with torch.cuda.graph(self._graph):
            for i in range(count):
                call(i % SETS)

    def _replay(self) -> float:
        start, stop = (
            torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            for _ in range(2)
        )
        start.record()
        self._graph.replay()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3 / self._count

    def millijoules(self, meter: EnergyMeter | None) -> float | None:
        """Return what a call takes of the board's energy, the GPU kept busy with it; None where the driver does not report it."""
        if meter is None:
            return None
        count = max(1, int(ENERGY_S * 1e6 / (self.us * self._count)))
        torch.cuda.synchronize()
        before = meter.millijoules()
        for _ in range(count):
            self._graph.replay()
        torch.cuda.synchronize()
        return (meter.millijoules() - before) / (count * self._count)
