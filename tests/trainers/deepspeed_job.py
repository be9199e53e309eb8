"""DeepSpeed's own engine, unwatched and watched.

python -m torch.distributed.run --nproc_per_node 2 tests/trainers/deepspeed_job.py FOLDER

Two ranks and gloo on a CPU, two microbatches a step, under three kinds of ZeRO: the last takes weights away between passes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from torch.nn import functional

import fp8debug
from tests import ranks
from tests.recording.models import batch, net

STEPS = 3


def trained(stage: int, path: Path | None) -> list[Any]:
    model = net()
    config = {
        "train_micro_batch_size_per_gpu": 96,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), config=config)
    watch = fp8debug.watch(engine, path, every=1) if path else None
    losses = []
    for number in range(2 * STEPS):
        x, classes = batch(2 * number + dist.get_rank())
        loss = functional.cross_entropy(engine(x).float(), classes)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if watch is not None:
        watch.close()
    return [losses, float(engine.get_global_grad_norm() or 0)]


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo")
    ranks.try_all(folder, ("1", "2", "3"), lambda stage: [trained(int(stage), to) for to in (None, folder / stage)])
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
