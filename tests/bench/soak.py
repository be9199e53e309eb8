"""A long watched run on a CPU: ``python tests/bench/soak.py [--steps 20000] [--out FOLDER]``; exits with 1 when anything leaks.

A tiny model trains twice from one seed, watched with every step sampled, and unwatched. Looked at: the loss, bit by bit; memory
and open files over the second half of the run; the sizes of the parts; every row that must be there.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from fp8debug.adapters.watching import Watch
from fp8debug.store import writer

#: Resident memory may grow by so much a step over the second half; a leak of one row of numbers a step is 20 times that.
MAX_BYTES_PER_STEP = 64


def losses(steps: int, each: Callable[[int, nn.Module, torch.Tensor], None]) -> str:
    """Train a tiny model; return all losses as one hexadecimal digest of their bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    fp8debug.convert(model, "blockwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = np.zeros(steps, dtype=np.float32)
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        loss = model(torch.randn(4, 16, generator=draw)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step] = loss.item()
        each(step, model, loss)
    return found.tobytes().hex()


def soak(steps: int, run: Path, part_rows: int) -> dict[str, Any]:
    """Train watched and unwatched; return what was seen, and under ``wrong`` what must not be."""
    writer.PART_ROWS = part_rows
    watches: list[Watch] = []
    memory, handles, held = [], [], np.zeros(steps)

    def watched(step: int, model: nn.Module, loss: torch.Tensor) -> None:
        if step == 0:  # from the second step on, so that the model is the one that is watched
            watches.append(fp8debug.watch(model, run, every=1, what_if=(), resume_from=1))
            return
        began = time.thread_time()
        watches[0].step(loss=loss)
        held[step] = time.thread_time() - began
        if step % max(1, steps // 40) == 0:
            gc.collect()
            memory.append((step, resident()))
            handles.append(len(list(Path("/proc/self/fd").iterdir())))

    began = time.perf_counter()
    digest = losses(steps, watched)
    watches[0].close()
    took = time.perf_counter() - began
    alone = losses(steps, lambda step, model, loss: None)
    opened = fp8debug.Run(run)
    counts = opened.sql("SELECT step, count(*) AS n FROM raw GROUP BY step ORDER BY step").to_pydict()
    parts = sorted(run.glob("rank=*/stats/*.parquet"))
    rows = [opened_rows(part) for part in parts]
    second = memory[len(memory) // 2 :]
    slope = float(np.polyfit([at for at, _ in second], [size for _, size in second], 1)[0])
    per_step = counts["n"][0]
    wrong = []
    if digest != alone:
        wrong.append("the losses differ")
    if counts["step"] != list(range(1, steps)) or set(counts["n"]) != {per_step}:
        wrong.append("rows are missing or twice")
    if opened.sql("SELECT count(*) AS n FROM steps").to_pylist()[0]["n"] != steps - 1 or opened.problems:
        wrong.append(f"steps are missing, or files: {opened.problems}")
    if slope > MAX_BYTES_PER_STEP and steps >= 5000:  # a shorter run is still filling pools of the allocator
        wrong.append(f"memory grows by {slope:.0f} bytes a step")
    if len(set(handles[1:])) > 2 or max(handles[1:]) - min(handles[1:]) > 1:  # a part being written is one
        wrong.append(f"open files: {handles}")
    if any(not part_rows <= count < part_rows + per_step for count in rows[:-1]):
        wrong.append(f"rows of parts: {rows}")
    return {
        "steps": steps,
        "rows_per_step": per_step,
        "rows": sum(rows),
        "parts": len(parts),
        "bytes_per_row": round(sum(part.stat().st_size for part in parts) / sum(rows), 1),
        "seconds": round(took, 1),
        "memory_mb": [round(size / 1e6, 1) for _, size in memory[:: max(1, len(memory) // 8)]],
        "memory_bytes_per_step": round(slope, 1),
        "open_files": sorted(set(handles)),
        "step_call_cpu_ms": round(float(np.median(held[held > 0])) * 1e3, 3),
        "wrong": wrong,
    }


def resident() -> int:
    """Return the bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def opened_rows(part: Path) -> int:
    """Return the rows of a part."""
    import pyarrow.parquet as pq

    return int(pq.read_metadata(part).num_rows)


def main() -> int:
    """Soak, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", help="the run's folder; a temporary one by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(options.steps, Path(options.out or folder) / "run", part_rows=max(1000, options.steps * 2))
    print(json.dumps(found, indent=1))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
