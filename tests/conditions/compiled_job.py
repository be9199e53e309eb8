"""A job of two ranks whose blocks are compiled, unwatched and watched; ``test_compiled_ranks`` reads it.

python -m torch.distributed.run --nproc_per_node 2 tests/conditions/compiled_job.py FOLDER [CONDITION ...]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8debug
from tests import ranks
from tests.conditions.test_compiled_programs import WIDTH, Net, Program

STEPS, PARTS, EVERY = 3, 2, 2
#: How the model is split; ``outside`` wraps the compiled blocks, ``inside`` is compiled with them.
CONDITIONS = ("ddp outside", "ddp inside", "fsdp", "fsdp of delayed scaling")


def train(path: Path | None, name: str, *, compiles: bool = True) -> list[Any]:
    """Train with gradient accumulation; return losses, sums of the weights, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    is_native = name.endswith("delayed scaling")
    model: Any = Net(Program(make=lambda a, b: nn.Linear(a, b, bias=False)) if is_native else Program())
    model = fp8debug.convert(model, "tensorwise_delayed") if is_native else model.bfloat16()
    blocks = list(model.blocks)
    if compiles and name != "ddp inside":
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    called = model
    if name.startswith("ddp"):
        called = DistributedDataParallel(model)
        if compiles and name == "ddp inside":
            called.compile(backend="aot_eager")
    else:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    watch = fp8debug.watch(model, path, every=EVERY, what_if=(), ranks="all", compiled="repeat") if path else None
    found: list[Any] = []
    for step in range(STEPS):
        for part in range(PARTS):
            given = torch.Generator().manual_seed(1 + step + 10 * part + 100 * dist.get_rank())
            x = torch.randn(16, WIDTH, generator=given)
            loss = called(x if is_native else x.bfloat16()).float().square().mean()
            loss.backward()
            found.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(p.grad, alpha=0.01)
                p.grad = None
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    found += [getattr(p, "_local_tensor", p).double().sum().item() for p in model.parameters()]
    return [found, counters["stats"]["unique_graphs"], len(counters["graph_break"]), len(counters["recompile_limit"])]


def both(folder: Path, name: str) -> list[Any]:
    """Return what a run alone, a watched one and an eager watched one found."""
    at = folder / name.replace(" ", "-")
    return [train(None, name), train(at, name), train(at.with_suffix(".eager"), name, compiles=False)]


def main() -> None:
    """Run all conditions on this rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(sys.argv[1])
    ranks.try_all(folder, sys.argv[2:] or CONDITIONS, lambda name: both(folder, name))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
