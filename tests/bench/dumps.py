"""What dumps cost a training step: ``python tests/bench/dumps.py``, on a GPU or with small sizes on a CPU.

Four Linears under the blockwise recipe, every step sampled, no what-if. Prints per way of dumping the median time of a step,
of its host part (until the optimizer and the watch have returned), the slowest step, and what was dropped.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import fp8debug

WAYS: dict[str, tuple[str, ...]] = {
    "none": (),
    "one operand, every step": ("0:fprop:input",),
    "one operand, every tenth step": ("0:fprop:input@::10",),
    "all operands, on finding": ("on-finding",),
}
STEPS, WARM = 40, 10


def seconds(dump: tuple[str, ...], folder: Path) -> tuple[list[float], list[float], int]:
    """Return each step's time, its host part, and the number of dumps that were dropped."""
    is_gpu = torch.cuda.is_available()
    device, width, rows = ("cuda", 4096, 8192) if is_gpu else ("cpu", 128, 128)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4))).bfloat16().to(device)
    fp8debug.convert(model, "blockwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    whole, host = [], []
    with fp8debug.watch(model, folder / "run", every=1, what_if=(), dump=dump) as watch:
        for _ in range(STEPS):
            began = time.perf_counter()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss.detach())
            host.append(time.perf_counter() - began)
            if is_gpu:
                torch.cuda.synchronize()
            whole.append(time.perf_counter() - began)
    dumper: Any = watch._dumper
    return whole, host, dumper.num_dropped if dumper else 0


def main() -> None:
    """Print one line per way."""
    for name, dump in {"(warm-up)": (), **WAYS}.items():
        folder = Path(tempfile.mkdtemp())
        try:
            whole, host, num_dropped = seconds(dump, folder)
        finally:
            shutil.rmtree(folder)
        times = [1e3 * value for value in (median(whole[WARM:]), median(host[WARM:]), max(whole))]
        print(f"{name:32}", *(f"{value:9.1f} ms" for value in times), f"{num_dropped:4} dropped", flush=True)


if __name__ == "__main__":
    main()
