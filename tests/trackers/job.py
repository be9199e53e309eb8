"""A small FP8 training with a fault planted at step 4: ``python job.py FOLDER TRACKER,TRACKER``; prints what it saw as JSON.

With no tracker named it is the same training under a plain watch.
"""

from __future__ import annotations

import json
import random
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fp8debug
import fp8debug.trackers.live

FAULT, NUM_STEPS, EVERY = 4, 14, 2


def open_runs(folder: Path, names: list[str]) -> Any:
    """Open the runs of a training that uses these trackers; return the SummaryWriter, if there is one."""
    if "wandb" in names:
        import wandb

        wandb.init(project="job", dir=folder, mode="offline")
    if "mlflow" in names:
        import mlflow

        mlflow.start_run(run_name="job")
    if "trackio" in names:
        import trackio

        trackio.init(project="job", name="job", embed=False, auto_log_cpu=False, auto_log_gpu=False)
    if "tensorboard" in names:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder / "tensorboard"))
    return None


def log(names: list[str], step: int, loss: float) -> None:
    """Log as the training itself does: its step axes must stay as they are."""
    if "wandb" in names:
        import wandb

        wandb.log({"loss": loss}, step=step)
    if "trackio" in names:
        import trackio

        trackio.log({"loss": loss})


def close_runs(names: list[str], writer: Any) -> None:
    if writer is not None:
        writer.close()
    if "wandb" in names:
        import wandb

        wandb.finish()
    if "mlflow" in names:
        import mlflow

        mlflow.end_run()
    if "trackio" in names:
        import trackio

        trackio.finish()


def main(folder: Path, names: list[str]) -> dict[str, Any]:
    writer = open_runs(folder, names)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    model = fp8debug.convert(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)), "blockwise")
    fp8debug.inject(model, "wrong_scale", module="2", step=FAULT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[dict[str, Any]] = []
    alarm, step = threading.Event(), 0

    def on_finding(finding: fp8debug.Finding) -> None:
        found.append({**finding.to_dict(), "came_in": step})
        alarm.set()

    live: dict[str, Any] = {"to": names, "on_finding": on_finding} if names else {}
    losses = []
    fp8debug.trackers.live.JUDGE_PATIENCE_S = 240  # on a machine with other work
    with fp8debug.watch(model, folder / "run", every=EVERY, optimizer=optimizer, **live) as watch:
        for step in range(NUM_STEPS):
            if names and step == FAULT + 2 * EVERY:
                alarm.wait(60)  # a step of this model takes a millisecond: two sampled ones, recorded now, are to be enough
            x = torch.randn(64, 64) * random.random() * np.random.rand()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item().hex())
            log(names, step, loss.item())
            watch.step(loss=loss)
    close_runs(names, writer)
    return {"losses": losses, "random": [random.random(), float(np.random.rand()), torch.rand(1).item()], "found": found}


if __name__ == "__main__":
    answer = main(Path(sys.argv[1]), [name for name in sys.argv[2].split(",") if name])
    (Path(sys.argv[1]) / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
