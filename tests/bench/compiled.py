"""What Fp8Linear gains under torch.compile, and what a watch costs there: ``python tests/bench/compiled.py [--rows speed idle]``.

Llama-like blocks (``step.py``) in BF16 with AdamW, each block compiled with ``fullgraph=True``. A time is the median over blocks
of ``--steps`` steps of a block's wall-clock time over its steps, the device idle before and after; no times are asserted. Models
that are compared train in turn in one process, from one seed on one batch, so that a clock that drifts is in both (``idle``
compares one model with itself); where one of two is watched, the line also says how many graphs the watch added and, with
``--deterministic``, whether the losses were equal to the last bit: without it attention's gradient and cuBLAS's sums are not the
same twice.

    speed     Fp8Linear and torchao against BF16, all compiled; ``--sizes 2048 4096``
    idle      a watch that samples nothing, attached for a block of steps between two blocks without one, of one model
    tenth     a watch of every 10th step, compiled code repeated
    each      a watch of every step, compiled code repeated
    eager     Fp8Linear without torch.compile: a watch of every 10th step, and of every step
    small     the same of 2 layers of 2048 tokens
    first     the first step, which compiles: with a watch, whose first step is sampled, and without
    ranks     FSDP2 on two ranks, blocks compiled: a watch of every 10th step

On a CPU ``--sizes tiny`` is the default; it shows that the script runs, and its times say nothing of a GPU. ``--backend
aot_eager`` spares inductor. The short table comes last.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.backends import cuda
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from tests.bench.step import Layer

NOT_SAMPLING = 10**9
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = ("speed", "idle", "tenth", "each", "eager", "small", "first", "ranks")


class Size(NamedTuple):
    """A model and its batch."""

    width: int
    hidden: int
    layers: int
    tokens: int


SIZES = {"2048": Size(2048, 5632, 16, 8192), "4096": Size(4096, 14336, 8, 8192), "tiny": Size(128, 256, 2, 64)}


class Job:
    """A model in training; ``kind`` is bf16, torchao or a recipe of Fp8Linear."""

    def __init__(self, size: Size, kind: str, options: argparse.Namespace, *, compiles: bool = True) -> None:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            self.model = nn.Sequential(*(Layer(size.width, size.hidden) for _ in range(size.layers))).bfloat16()
            self.x = torch.randn(4, size.tokens // 4, size.width, dtype=torch.bfloat16)
        if kind == "torchao":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(self.model)
        elif kind != "bf16":
            fp8debug.convert(self.model, kind)
        for block in self.model if compiles else ():
            block.compile(fullgraph=True, backend=options.backend, mode=options.mode)
        if dist.is_initialized():
            for block in self.model:
                fully_shard(block)
            fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=DEVICE.type == "cuda")
        self.watch: Any = None
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())
        if self.watch is not None:
            self.watch.step()

    def milliseconds(self, steps: int) -> float:
        """Train some steps, and return how long one took."""
        _wait()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        _wait()
        return (time.perf_counter() - start) * 1e3 / steps

    def busy_milliseconds(self, steps: int) -> float:
        """Train some steps, and return how long in one of them the GPU had work."""
        _wait()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
            for _ in range(steps):
                self.step()
            _wait()
        spans = sorted((e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA")
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy += max(0.0, end - max(start, until))
            until = max(until, end)
        return busy / 1e3 / steps


def _wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Line(NamedTuple):
    """A line of the short table; ``value``: ratio of speeds, or what is added to a step's time; ``busy``: to the GPU's."""

    row: str
    size: str
    what: str
    value: str
    details: str
    busy: str = ""


def in_turn(jobs: list[Job], options: argparse.Namespace) -> list[float]:
    """Return each job's milliseconds a step."""
    for job in jobs:
        job.milliseconds(options.steps)  # compiles, and whatever else is slow once
    times: list[list[float]] = [[] for _ in jobs]
    for _ in range(options.blocks):
        for job, found in zip(jobs, times, strict=True):
            found.append(job.milliseconds(options.steps))
    return [median(found) for found in times]


@contextlib.contextmanager
def watched(job: Job, every: int, options: argparse.Namespace) -> Iterator[Job]:
    """Watch a job."""
    with tempfile.TemporaryDirectory() as folder:
        job.watch = fp8debug.watch(job.model, Path(folder, "run"), every=every, compiled="repeat", turns=options.turns)
        try:
            yield job
        finally:
            job.watch.close()


def speed(name: str, options: argparse.Namespace) -> Iterator[Line]:
    """Compare compiled models in FP8 with one in BF16."""
    kinds = ["bf16", *options.kinds]
    times = in_turn([Job(SIZES[name], kind, options) for kind in kinds], options)
    for kind, found in zip(kinds[1:], times[1:], strict=True):
        yield Line("speed", name, f"{kind} against bf16", f"{times[0] / found:.3f} x", f"{times[0]:.2f} -> {found:.2f} ms")


def cost(row: str, name: str, size: Size, kind: str, every: int, options: argparse.Namespace) -> Line:
    """Compare a watched model with an unwatched one."""
    compiles = row not in ("eager", "small")
    alone, seen = (Job(size, kind, options, compiles=compiles) for _ in range(2))
    alone.milliseconds(1)
    before = counters["stats"]["unique_graphs"]
    with watched(seen, every, options):
        if compiles:
            seen.milliseconds(every * (2 * options.turns + 1))  # each block is repeated once, then captured, then replayed
        first, second = in_turn([alone, seen], options)
        busy = [job.busy_milliseconds(options.steps) for job in (alone, seen)] if DEVICE.type == "cuda" else []
    added = counters["stats"]["unique_graphs"] - before
    same = torch.equal(torch.stack(alone.losses[: len(seen.losses)]), torch.stack(seen.losses))
    bits = ("losses equal" if same else "LOSSES DIFFER") if options.deterministic else "losses not compared"
    details = f"{first:.2f} -> {second:.2f} ms, {bits}, {added} graphs more"
    added_busy = ""
    if busy:
        added_busy = f"{100 * (busy[1] / busy[0] - 1):+.1f} %"
        details += f", GPU {busy[0]:.2f} -> {busy[1]:.2f} ms ({added_busy})"
    return Line(row, name, f"{kind}, every {every}", f"{100 * (second / first - 1):+.1f} %", details, added_busy)


def idle(name: str, kind: str, options: argparse.Namespace) -> Line:
    """Compare steps of one model under a watch that samples nothing with those before it and after it."""
    job = Job(SIZES[name], kind, options)
    job.milliseconds(options.steps)
    before = counters["stats"]["unique_graphs"]
    times: tuple[list[float], list[float], list[float]] = [], [], []
    for _ in range(options.blocks):
        times[0].append(_settled(job, options))
        with watched(job, NOT_SAMPLING, options):
            times[1].append(_settled(job, options))
        job.watch = None
        times[2].append(_settled(job, options))
    first, seen, second = (median(found) for found in times)
    added = counters["stats"]["unique_graphs"] - before
    alone = median([*times[0], *times[2]])
    details = (
        f"{alone:.2f} -> {seen:.2f} ms, {added} graphs more; without a watch before and after {100 * (second / first - 1):+.1f} %"
    )
    return Line("idle", name, f"{kind}, not sampling", f"{100 * (seen / alone - 1):+.1f} %", details)


def _settled(job: Job, options: argparse.Namespace) -> float:
    """Return a job's milliseconds a step after four that do not count: where a watch has begun, the first is sampled."""
    job.milliseconds(4)
    if job.watch is not None:
        job.watch._writer.flush()  # the rows of that step: its thread shares the interpreter
    gc.collect()
    return job.milliseconds(options.steps)


def first_step(name: str, kind: str, options: argparse.Namespace) -> Line:
    """Compare the first step of a watched model, which is sampled, with that of an unwatched one; both compile."""
    times = []
    for is_watched in (False, True):
        torch._dynamo.reset()
        job = Job(SIZES[name], kind, options)
        with (
            torch._inductor.config.patch(force_disable_caches=True),
            watched(job, 1, options) if is_watched else contextlib.nullcontext(),
        ):
            times.append(job.milliseconds(1) / 1e3)
    details = f"{times[0]:.2f} -> {times[1]:.2f} s"
    return Line("first", name, kind, f"{100 * (times[1] / times[0] - 1):+.1f} %", details)


def on_ranks(name: str, kind: str, options: argparse.Namespace) -> Line | None:
    """Compare a watched model with an unwatched one under FSDP2, in two processes; None where there are not two GPUs."""
    if DEVICE.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_endpoint", "localhost:0"]
    words += ["--rdzv_backend", "c10d", __file__, "--rank-of", kind, "--sizes", name, "--backend", options.backend]
    words += ["--steps", str(options.steps), "--blocks", str(options.blocks), "--turns", str(options.turns)]
    words += ["--mode", options.mode] if options.mode else []
    words += ["--deterministic"] if options.deterministic else []
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    found = [line for line in done.stdout.splitlines() if line.startswith('["ranks"')]
    if not found:
        raise SystemExit(done.stderr[-3000:])
    return Line(*json.loads(found[0]))


def as_rank(options: argparse.Namespace) -> None:
    """Be one of two ranks, and print the line on the first."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    name = options.sizes[0]
    line = cost("ranks", name, SIZES[name], options.rank_of, 10, options)
    if dist.get_rank() == 0:
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()


def lines(row: str, name: str, options: argparse.Namespace) -> Iterator[Line | None]:
    """Yield the lines of a row."""
    size, (ours, *_) = SIZES[name], options.kinds
    if row == "speed":
        yield from speed(name, options)
    elif row == "idle":
        yield from (idle(name, kind, options) for kind in options.kinds)
    elif row in ("tenth", "each"):
        every = {"tenth": 10, "each": 1}[row]
        yield from (cost(row, name, size, kind, every, options) for kind in options.kinds)
    elif row == "eager":
        yield from (cost(row, name, size, ours, every, options) for every in (10, 1))
    elif row == "small":
        yield cost(row, name, size._replace(layers=2, tokens=min(2048, size.tokens)), ours, 1, options)
    else:
        yield from ((first_step if row == "first" else on_ranks)(name, kind, options) for kind in options.kinds)


def main() -> None:
    is_gpu = DEVICE.type == "cuda"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["2048"] if is_gpu else ["tiny"])
    parser.add_argument(
        "--kinds", nargs="+", default=["blockwise", "torchao"], help="torchao, or recipes of Fp8Linear; ours first"
    )
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--mode", help="of torch.compile: reduce-overhead replays CUDA graphs")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="compare losses to the last bit; the gradient of attention is slow then, and differs else",
    )
    parser.add_argument("--turns", type=int, default=1, help="of the watch: sampled steps in which each block is repeated once")
    parser.add_argument("--steps", type=int, default=10, help="of a block; a multiple of 10 where every 10th is sampled")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        for others in (cuda.enable_cudnn_sdp, cuda.enable_flash_sdp, cuda.enable_mem_efficient_sdp):
            others(False)  # their gradients are not the same twice
    if options.rank_of:
        as_rank(options)
        return
    where = torch.cuda.get_device_name() if is_gpu else "CPU"
    table: list[Line] = []
    for row in options.rows:
        for name in options.sizes:
            start = time.perf_counter()
            for line in lines(row, name, options):
                if line is None:
                    print(f"{row:6} {name:5} needs two GPUs", flush=True)
                    continue
                table.append(line)
                print(f"{line.row:6} {line.size:5} {line.what:28} {line.value:>10}  {line.details}", flush=True)
                gc.collect()
                if is_gpu:
                    torch.cuda.empty_cache()
            print(f"{row:6} {name:5} took {time.perf_counter() - start:.0f} s", flush=True)
    how = options.mode or options.backend
    print(f"\n{where}, torch {torch.__version__}, {how}, {options.blocks} blocks of {options.steps} steps")
    for line in table:
        print(f"| {line.row} | {line.size} | {line.what} | {line.value} | {line.busy} |")


if __name__ == "__main__":
    main()
