"""Jobs of several ranks: how a test starts one, what its script does on each rank, and how a rank ends."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[1]


def launch(script: str, folder: Path, ranks: int = 2, *, on_gpus: bool = False) -> Path:
    """Run a script of this repository under torchrun, with the folder as its argument, and return the folder.

    What it says on stderr is in the folder's file ``said``. Unless it is written for GPUs as well, it sees none.
    """
    words = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--rdzv_backend", "c10d"]
    command = [sys.executable, *words, "--rdzv_endpoint", "localhost:0", str(ROOT / script), str(folder)]
    hidden = {} if on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **hidden}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "said").write_text(done.stderr)
    return folder


def found_by(folder: Path, name: str, ranks: int = 2) -> list[Any]:
    """Return what each rank found under a condition, alone and watched."""
    found = [json.loads((folder / f"{rank}.json").read_text())[name] for rank in range(ranks)]
    assert all(isinstance(one, list) for one in found), found
    return found


def try_all(folder: Path, names: Iterable[str], both: Callable[[str], Any]) -> dict[str, Any]:
    """Try each condition on this rank, and write what was found: of one that fails its error, which the test then shows."""
    found: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        try:
            found[name] = both(name)
        except Exception as error:  # the other ranks may be gone too
            traceback.print_exc()
            found[name] = f"{type(error).__name__}: {error}"
        print(f"rank {dist.get_rank()}: {name} after {time.perf_counter() - start:.1f} s", file=sys.stderr)
        write(folder, found)
    return found


def write(folder: Path, found: dict[str, Any]) -> None:
    """Write what this rank found."""
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def end() -> None:
    """Leave the process group."""
    gc.collect()  # what still holds the group when it is destroyed leaves gloo threads that may abort the exit, pytorch#190489
    dist.barrier()
    dist.destroy_process_group()
