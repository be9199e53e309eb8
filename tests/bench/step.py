"""Time whole training steps on a GPU, watched and not: ``python tests/bench/step.py [--layers 2] [--offset 3] [--profile]``.

Llama-like blocks in BF16, hidden 4096, SwiGLU 14336, 8192 tokens, AdamW. A time is the median over blocks of ten steps of the
wall-clock time of a block, the device idle before and after it, divided by ten; no times are asserted. With every 10th step
watched it is the first of a block, which the host starts while the GPU has nothing else to do, as in a loop that reads the loss
in every step; ``--offset 3`` puts it behind seven others, as in a loop that waits for nothing. ``--profile`` prints where a
watched step's time goes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug

BLOCK = 10


class Layer(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (f(y).view(batch, length, width // 128, 128).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm2(x)
        out: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return out


class Job:
    """A model in training."""

    def __init__(self, options: argparse.Namespace, recipe: str | None) -> None:
        torch.manual_seed(0)
        with torch.device("cuda"):
            self.model = nn.Sequential(*(Layer(options.width, options.hidden) for _ in range(options.layers))).bfloat16()
            self.x = torch.randn(4, options.tokens // 4, options.width, dtype=torch.bfloat16)
        if recipe:
            fp8debug.convert(self.model, recipe)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)

    def step(self, watch: Any = None) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        if watch is not None:
            watch.step(loss=loss)

    def milliseconds(self, blocks: int, watch: Any = None) -> float:
        times = []
        for _ in range(blocks):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(BLOCK):
                self.step(watch)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e3 / BLOCK)
        return sorted(times)[len(times) // 2]


def measure(options: argparse.Namespace, recipe: str | None, every: int | None) -> tuple[float, float]:
    """Return (milliseconds a step, peak device memory in GiB)."""
    gc.collect()  # the last job's cycles
    torch.cuda.empty_cache()
    job = Job(options, recipe)
    torch.cuda.reset_peak_memory_stats()
    if every is None:
        job.milliseconds(1)
        return job.milliseconds(options.blocks), torch.cuda.max_memory_allocated() / 2**30
    with tempfile.TemporaryDirectory() as folder, fp8debug.watch(job.model, Path(folder, "run"), every=every) as watch:
        job.milliseconds(1, watch)
        for _ in range(options.offset):
            job.step(watch)
        found = job.milliseconds(options.blocks, watch)
        if options.profile and every == 1:
            profile(job, watch)
        return found, torch.cuda.max_memory_allocated() / 2**30


def profile(job: Job, watch: Any) -> None:
    """Print what a watched step spends its time on."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(2):
            job.step(watch)
        torch.cuda.synchronize()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("layers", 2), ("width", 4096), ("hidden", 14336), ("tokens", 8192), ("blocks", 5), ("offset", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", default="blockwise")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    rows: list[tuple[str, str | None, int | None]] = [
        ("BF16", None, None),
        (f"FP8 {options.recipe}", options.recipe, None),
        ("attached, not sampling", options.recipe, 10**9),
        ("watched every 10th step", options.recipe, 10),
        ("watched every step", options.recipe, 1),
    ]
    bf16 = plain = 0.0
    for name, recipe, every in rows:
        time_ms, memory = measure(options, recipe, every)
        bf16, plain = (time_ms if recipe is None else bf16), (time_ms if recipe and every is None else plain)
        against = f"{bf16 / time_ms:6.3f} x BF16's speed"
        if every is not None:
            against += f", {100 * (time_ms / plain - 1):+7.2f} % over unwatched"
        print(f"{name:28} {time_ms:9.2f} ms {memory:7.2f} GiB {against}", flush=True)


if __name__ == "__main__":
    main()
