"""Environment of the job: versions, device, the environment variables that change FP8 numerics, the commit, the rank."""

from __future__ import annotations

import os
import platform
import subprocess

import torch
import torch.distributed as dist

from fp8debug.interruptions import is_ours

_PREFIXES = ("NVTE_", "FP8_", "TORCHAO_", "CUBLAS_", "CUBLASLT_", "NCCL_ALGO")


def describe_environment() -> dict[str, str]:
    """Return versions, device and the FP8-relevant environment variables as set."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda or "none",
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    found.update({k: v for k, v in sorted(os.environ.items()) if k.startswith(_PREFIXES)})
    return found


def git_state() -> dict[str, object] | None:
    """Return commit and dirtiness of the working directory's repository, None when there is none or git does not answer."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError) as error:
        if not is_ours(error):
            raise
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=2, check=True)
    return done.stdout.strip()


def rank_and_world() -> tuple[int, int]:
    """Return (global rank, number of ranks) from torch.distributed, or from torchrun's variables before it is set up."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
