"""Helpers of the writer's tests: a few rows, a short run, and programs that record in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fp8debug.store.write.writer import RunWriter

ROOT = Path(__file__).parents[2]


def site_rows(step: int, count: int = 3, **changes: Any) -> dict[str, Any]:
    """Return a small set of columns for ``RunWriter.stats``."""
    return {
        "step": [step] * count,
        "module": [f"m{i}" for i in range(count)],
        "gemm": ["fprop"] * count,
        "tensor": ["input"] * count,
        "cast_name": ["e4m3fn 1x128 current"] * count,
        "reference": ["operand"] * count,
        "actual": [True] * count,
        "call_index": list(range(count)),
        "numel": np.full(count, 100),
        **changes,
    }


def record(path: Path, steps: range, **options: Any) -> RunWriter:
    """Write some steps and leave the writer open."""
    opened = RunWriter(path, manifest={"modules": []}, **options)
    for step in steps:
        opened.stats(site_rows(step))
        opened.steps({"step": step, "loss": 1.0 / (step + 1)})
    opened.flush()
    return opened


#: A program of its own begins with this: the helpers above and the run's folder.
PRELUDE = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.store.recording import record, site_rows
path = Path(sys.argv[1])
"""


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(path)]
    # of a process that forks, Python 3.12 warns when it has threads, and autograd's of a GPU end what torch does in the child
    environment = {**os.environ, "PYTHONWARNINGS": "ignore:This process", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def names_below(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
