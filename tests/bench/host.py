"""What a watch costs the host, without a GPU: ``python tests/bench/host.py [--linears 28] [--steps 600]``.

Fp8Linears of 1024 x 1024 whose tensors pass for a GPU's: hooks choose, prepare and start what they would there, under a driver
that launches nothing (``tests/kernels/hopper.py``), and cuBLAS multiplies nothing. What is left is Python's and torch's
part of a step; a real launch comes on top. Every step is watched, and by lot its rows are thrown away, made, or made and written:
the writer's thread does so in the next step, whose time tells what that costs. No times are asserted.

Microseconds a Linear: the training thread's processor time of the forward pass, the backward pass, ``Watch.step()`` and all
three, medians, and the quarter of steps that took least; then by the clock a forward call of one Linear, median and longest.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import quantiles
from typing import Any
from unittest.mock import patch

os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is one, it takes no part

import torch
import triton
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from fp8debug.adapters.watching.step_writer import StepWriter
from fp8debug.kernels.gpu.device import INTERPRETED
from fp8debug.linear import Fp8Linear
from fp8debug.observer.observer import FinishedStep
from fp8debug.store.columns import Message
from fp8debug.store.write.worker import Worker
from fp8debug.store.write.writer import RunWriter
from tests.kernels import hopper

WIDTH = 1024
WARM_UP = 60
FATES = ("thrown away", "made", "written")


@contextmanager
def standing_in() -> Iterator[list[None]]:
    """Have tensors of the CPU pass for a GPU's, and start nothing; the list has an item for each launch."""
    launches: list[None] = []

    def multiplied(a: Tensor, b: Tensor, *more: Any) -> Tensor:
        return a.new_empty(a.shape[0], b.shape[1], dtype=more[-3])

    with ExitStack() as stack:
        stack.enter_context(hopper.recorded())
        for name in ("check", "__call__", "launch"):
            stack.enter_context(patch.object(hopper.Planned, name, lambda *_: launches.append(None)))
        stack.enter_context(patch.object(triton, "__version__", "3.6.0"))  # whose kernels are started at least cost
        stack.enter_context(patch.object(torch.Tensor, "is_cuda", property(lambda _: True), create=True))
        stack.enter_context(patch.object(torch._C, "_cuda_getDevice", lambda: None, create=True))
        stack.enter_context(patch.object(torch, "_scaled_mm_v2", multiplied))
        yield launches


class Fates:
    """What becomes of each step's rows.

    Attributes:
        of: by the step's number.
        pauses: of the writer's thread, by fate.
    """

    def __init__(self) -> None:
        self.of: dict[int, str] = {}
        self.pauses: dict[str, int] = defaultdict(int)
        self._take, self._put, self._breathe = StepWriter.__call__, RunWriter._put, Worker.breathe

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Have them happen."""
        fates = self

        def take(sink: StepWriter, finished: FinishedStep) -> None:
            if fates.of.get(finished.step) != "thrown away":
                return fates._take(sink, finished)
            for snapshot, _ in finished.tables:
                snapshot.discard()
            return None

        def put(writer: RunWriter, table: str, found: Any) -> None:
            step = found.step if isinstance(found, Message) else found["step"][0].as_py()
            if fates.of.get(step) != "made":
                fates._put(writer, table, found)

        def breathe(worker: Worker) -> None:
            before = worker._breathed
            fates._breathe(worker)
            if worker._breathed != before:
                fates.pauses[fates.of[max(fates.of)]] += 1

        with (
            patch.object(StepWriter, "__call__", take),
            patch.object(RunWriter, "_put", put),
            patch.object(Worker, "breathe", breathe),
        ):
            yield


class Loop:
    """A model in training, whose steps are timed.

    Attributes:
        times: by fate of the step before, seconds of the three parts of a step.
        calls: likewise, of each Linear's forward call.
    """

    def __init__(self, num_linears: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(num_linears)]
        self.model = fp8debug.convert(nn.Sequential(*layers), "blockwise")
        self.x = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.times: dict[str, list[tuple[float, ...]]] = defaultdict(list)
        self.calls: dict[str, list[float]] = defaultdict(list)

    def run(self, steps: int, fates: dict[int, str] | None = None, end: Callable[[], None] = lambda: None) -> None:
        """Train; with ``fates`` draw one for each step."""
        forward, before = Fp8Linear.forward, "unwatched"

        def timed(linear: Fp8Linear, x: Tensor) -> Tensor:
            start = time.perf_counter()
            found = forward(linear, x)
            calls.append(time.perf_counter() - start)
            return found

        with patch.object(Fp8Linear, "forward", timed):
            for step in range(steps + WARM_UP):
                calls: list[float] = []
                clock = [time.thread_time()]
                y = self.model(self.x)
                clock.append(time.thread_time())
                torch.autograd.backward(y, y)
                clock.append(time.thread_time())
                self.model.zero_grad()
                if fates is not None:
                    fates[step] = random.choice(FATES)
                clock.append(time.thread_time())
                end()
                clock.append(time.thread_time())
                if step >= WARM_UP:
                    self.times[before].append((clock[1] - clock[0], clock[2] - clock[1], clock[4] - clock[3]))
                    self.calls[before] += calls
                before = "unwatched" if fates is None else fates[step]


def told(loop: Loop, fate: str, num_linears: int) -> str:
    """Return a line of figures."""
    parts = [*zip(*loop.times[fate], strict=True), [sum(one) for one in loop.times[fate]]]
    medians = [quantiles(part, n=4)[1] * 1e6 / num_linears for part in parts]
    quarter = quantiles(parts[-1], n=4)[0] * 1e6 / num_linears
    calls = sorted(loop.calls[fate])
    figures = " ".join(f"{figure:9.1f}" for figure in (*medians, quarter, calls[len(calls) // 2] * 1e6))
    return f"{fate:12s} {len(parts[0]):6d} {figures} {calls[-1] * 1e3:9.2f} ms"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--linears", type=int, default=28)
    parser.add_argument("--steps", type=int, default=600)
    asked = parser.parse_args()
    if INTERPRETED:
        sys.exit("this bench starts no kernels: unset TRITON_INTERPRET")
    measure(asked.linears, asked.steps)


def measure(num_linears: int, steps: int) -> None:
    """Train unwatched, then watched, and print a table."""
    torch.set_num_threads(1)
    random.seed(0)
    fates = Fates()
    num_launches = []
    with tempfile.TemporaryDirectory() as folder, standing_in() as launches:
        loop = Loop(num_linears)
        loop.run(steps // 4)
        num_launches.append(len(launches) / (steps // 4 + WARM_UP) / num_linears)
        launches.clear()
        with fates.drawn(), fp8debug.watch(loop.model, Path(folder) / "run", every=1, check_finite=False) as watch:
            loop.run(steps, fates.of, lambda: watch.step(loss=1.0))
        num_launches.append(len(launches) / (steps + WARM_UP) / num_linears)
    if watch._writer.stopped or watch._writer.num_dropped:
        sys.exit(f"not recorded in full: {watch._writer.stopped or watch._writer.num_dropped}")
    print("rows            steps   forward  backward    step()       all   quarter   forward of one, longest")
    for fate in ("unwatched", *FATES):
        print(told(loop, fate, num_linears))
    drawn = Counter(fates.of.values())
    print(f"kernels a Linear: {num_launches[0]:.1f} unwatched, {num_launches[1]:.1f} watched")
    print("pauses of the writer a step:", ", ".join(f"{fate} {fates.pauses[fate] / drawn[fate]:.1f}" for fate in FATES[1:]))


if __name__ == "__main__":
    main()
