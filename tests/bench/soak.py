"""A long watched run on a CPU: ``python tests/bench/soak.py [--steps 20000] [--out FOLDER]``; exits with 1 when anything leaks.

A tiny model trains twice from one seed, watched with every step sampled, and unwatched. Looked at: the loss, bit by bit; what is
held over the second half of the run (Python objects and blocks, bytes of Arrow, bytes that malloc gave out, open files), each
time with nothing waiting to be written; the sizes of the parts; every row that must be there.

The process's resident memory is printed and not judged: it grows in steps with the first parts, as the allocators keep what a
part was made of. What they gave back at the end when asked to is printed beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import fp8debug
from fp8debug.adapters.watching.handle import Watch
from fp8debug.store.write import writer

#: What may be held more a step, by the slope over the second half of the run: less than one of anything that is kept.
MAX_PER_STEP = {"objects": 0.5, "arrow_bytes": 32.0, "blocks": 0.5, "malloc_bytes": 64.0}
#: A run of fewer steps is still filling the allocators' pools, so that only the first two are judged.
MIN_STEPS = 5000


class _Malloc(ctypes.Structure):
    """``struct mallinfo2`` of glibc 2.33 and newer."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


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
    seen: list[dict[str, int]] = []
    held = np.zeros(steps)

    def watched(step: int, model: nn.Module, loss: torch.Tensor) -> None:
        if step == 0:  # from the second step on, so that the model is the one that is watched
            watches.append(fp8debug.watch(model, run, every=1, what_if=(), resume_from=1))
            return
        began = time.thread_time()
        watches[0].step(loss=loss)
        held[step] = time.thread_time() - began
        if step % max(1, steps // (40 if steps >= MIN_STEPS else 12)) == 0:
            seen.append({"step": step, **holdings(watches[0])})

    began = time.perf_counter()
    digest = losses(steps, watched)
    watches[0].close()
    took = time.perf_counter() - began
    at_end = resident()
    give_back()
    after = resident()
    alone = losses(steps, lambda step, model, loss: None)
    opened = fp8debug.Run(run)
    counts = opened.sql("SELECT step, count(*) AS n FROM raw GROUP BY step ORDER BY step").to_pydict()
    parts = sorted(run.glob("rank=*/stats/*.parquet"))
    rows = [opened_rows(part) for part in parts]
    second = seen[len(seen) // 2 :]
    grows = {name: slope([at["step"] for at in second], [at[name] for at in second]) for name in MAX_PER_STEP}
    handles = [at["open_files"] for at in seen]
    per_step = counts["n"][0]
    wrong = []
    if digest != alone:
        wrong.append("the losses differ")
    if counts["step"] != list(range(1, steps)) or set(counts["n"]) != {per_step}:
        wrong.append("rows are missing or twice")
    if opened.sql("SELECT count(*) AS n FROM steps").to_pylist()[0]["n"] != steps - 1 or opened.problems:
        wrong.append(f"steps are missing, or files: {opened.problems}")
    judged = list(MAX_PER_STEP)[: None if steps >= MIN_STEPS else 2]
    wrong += [f"{name} grow by {grows[name]:.2g} a step" for name in judged if grows[name] > MAX_PER_STEP[name]]
    if max(handles[1:]) - min(handles[1:]) > 1:
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
        "more_a_step": {name: round(more, 3) for name, more in grows.items()},
        "objects": [at["objects"] for at in seen[:: max(1, len(seen) // 8)]],
        "resident_mb": [round(at["resident"] / 1e6) for at in seen[:: max(1, len(seen) // 8)]],
        "resident_at_end_mb": round(at_end / 1e6),
        "resident_given_back_mb": round(after / 1e6),
        "open_files": sorted(set(handles)),
        "step_call_cpu_ms": round(float(np.median(held[held > 0])) * 1e3, 3),
        "wrong": wrong,
    }


def holdings(watch: Watch) -> dict[str, int]:
    """Return what this process holds once everything that waits is written."""
    watch._writer.flush()
    gc.collect()
    return {
        "objects": len(gc.get_objects()),
        "blocks": sys.getallocatedblocks(),
        "arrow_bytes": pa.total_allocated_bytes(),
        "malloc_bytes": malloc_bytes(),
        "open_files": len(list(Path("/proc/self/fd").iterdir())),
        "resident": resident(),
    }


def slope(steps: list[int], values: list[int]) -> float:
    """Return by how much values rise a step: the median of the slopes of all pairs, which one outlier does not move."""
    points = combinations(zip(steps, values, strict=True), 2)
    pairs = [(later - earlier) / (end - start) for (start, earlier), (end, later) in points]
    return float(np.median(pairs))


def malloc_bytes() -> int:
    """Return the bytes that malloc gave out and did not get back; 0 where the C library does not say."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    ask.restype = _Malloc
    found = ask()
    return int(found.uordblks + found.hblkhd)


def give_back() -> None:
    """Have the allocators return what nobody holds to the system."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


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
