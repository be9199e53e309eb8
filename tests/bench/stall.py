"""How long a watch holds the training thread: ``python tests/bench/stall.py [--layers 2 8] [--steps 40] [--loop reads runs]``.

The model of ``tests/bench/step.py``, every step watched with the defaults; on a CPU a small one, whose hooks are torch ops.
Milliseconds by the host's clock, with nothing waited for around a call: ``Watch.step()``; ``optimizer``, what a watch does after
the optimizer's step; and the hooks, of which ``quantize`` holds the cast that training needs anyway. ``reads``: a loop that reads
the loss of every step, so that no launch waits for the GPU; ``runs``: one that waits for nothing, where launches block once
CUDA's queue is full, watched or not. ``launch``: one of torch's right before ``Watch.step()``. ``less gc``: the longest without
what Python's garbage collector took. The first five steps are left out. No times are asserted.

On a GPU the same model then trains without a watch, for what such a loop makes of any code: ``forward`` is a call of an
Fp8Linear, ``launches`` as many small kernels as ``Watch.step()`` starts kernels and copies, by torch's profiler, in its place.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from fp8debug.linear import Fp8Linear
from fp8debug.observer.observer import Observer
from fp8debug.observer.probe import Probe
from tests.bench.step import Job, Layer

WARM_UP = 5
HOOKS = ("begin", "quantize", "fprop", "backward")
SMALL = {"width": 128, "hidden": 256, "tokens": 256}


class SmallJob(Job):
    """The same on a CPU."""

    def __init__(self, options: argparse.Namespace, recipe: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Layer(options.width, options.hidden) for _ in range(options.layers))).bfloat16()
        self.x = torch.randn(4, options.tokens // 4, options.width, dtype=torch.bfloat16)
        fp8debug.convert(self.model, recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)


class Clock:
    """Seconds of calls by name, and how much of each the garbage collector took."""

    def __init__(self) -> None:
        self.spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self._collected = self._since = 0.0

    def collector(self, phase: str, info: dict[str, int]) -> None:
        now = time.perf_counter()
        self._collected += 0.0 if phase == "start" else now - self._since
        self._since = now

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hear of the garbage collector's turns."""
        gc.callbacks.append(self.collector)
        try:
            yield
        finally:
            gc.callbacks.remove(self.collector)

    def timed(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            collected, start = self._collected, time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self.spans[name].append((time.perf_counter() - start, self._collected - collected))

        return call


class Timed:
    """Stands for a watch in the loop."""

    def __init__(self, watch: Any, clock: Clock, job: Job) -> None:
        self._watch, self.rows, one = watch, 0, torch.zeros(1, device=job.x.device)
        self._launch, self._step = clock.timed("launch", one.zero_), clock.timed("Watch.step()", watch.step)

    def step(self, loss: torch.Tensor) -> None:
        self.rows = sum(len(filled) for _, filled in self._watch._observer._filled.values())
        self._launch()
        self._step(loss=loss)


class Counted(Timed):
    """The same for a step whose launches are counted."""

    launches = 0

    def step(self, loss: torch.Tensor) -> None:
        with torch.profiler.profile(acc_events=True) as found:
            super().step(loss)
        starts = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
        self.launches = sum(event.count for event in found.key_averages() if event.key.startswith(starts)) - 1


class Launches:
    """Stands for a watch, and starts as many kernels."""

    def __init__(self, count: int, clock: Clock, job: Job) -> None:
        self._count, self._one = count, torch.zeros(1, device=job.x.device)
        self.step = clock.timed("launches", self._start)

    def _start(self, loss: torch.Tensor) -> None:
        for _ in range(self._count):
            self._one.zero_()


def run(
    options: argparse.Namespace, job: Job, watch: Any, clock: Clock, of: type, names: tuple[str, ...], reads: bool
) -> None:  # fmt: skip
    """Train, and leave the times of all but the first steps; of methods of a class too."""
    patches = [patch.object(of, name, clock.timed(name, getattr(of, name))) for name in names]
    with ExitStack() as stack:
        for one in patches:
            stack.enter_context(one)
        for step in range(WARM_UP + options.steps):
            if step == WARM_UP:
                clock.spans.clear()
            job.step(watch)
            if reads:
                torch.cuda.synchronize()


def measure(options: argparse.Namespace, loop: str) -> None:
    """Print what one loop of one model takes."""
    clock, is_gpu = Clock(), torch.cuda.is_available()
    job = (Job if is_gpu else SmallJob)(options, options.recipe)
    reads, launches = loop == "reads" and is_gpu, 0
    with clock.collecting(), tempfile.TemporaryDirectory() as folder:
        with fp8debug.watch(job.model, Path(folder, "run"), every=1) as watch:
            timed = Timed(watch, clock, job)
            with patch.object(Observer, "flush_many", clock.timed("optimizer", Observer.flush_many)):
                run(options, job, timed, clock, Probe, HOOKS, reads)
            show(options, loop, clock, ("Watch.step()", "optimizer", *HOOKS, "launch"), timed.rows)
            if is_gpu:
                counted = Counted(watch, clock, job)
                job.step(counted)
                launches = counted.launches
        if is_gpu:
            run(options, job, Launches(launches, clock, job), clock, Fp8Linear, ("forward",), reads)
            show(options, loop, clock, ("forward", "launches"), launches)


def show(options: argparse.Namespace, loop: str, clock: Clock, names: tuple[str, ...], rows: int) -> None:
    """Print a row of each name."""
    for name in names:
        spans = sorted(clock.spans[name])
        median, p99, longest = (1e3 * spans[int(share * (len(spans) - 1))][0] for share in (0.5, 0.99, 1.0))
        less = 1e3 * max(seconds - collected for seconds, collected in spans)
        row = f"{options.layers:6} {rows:6} {loop:5} {name:12} {len(spans):7}"
        print(f"{row} {median:8.3f} {p99:8.3f} {longest:8.3f} {less:8.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--loop", nargs="+", choices=("reads", "runs"), default=["reads", "runs"])
    sizes = {"width": 4096, "hidden": 14336, "tokens": 8192} if torch.cuda.is_available() else SMALL
    for name, default in (*sizes.items(), ("steps", 40)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="blockwise")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}, torch {torch.__version__}")
    print(f"layers   rows loop  {'ms':12}   calls   median      p99  longest  less gc")
    for layers in options.layers:
        for loop in options.loop:
            measure(argparse.Namespace(**{**vars(options), "layers": layers}), loop)


if __name__ == "__main__":
    main()
