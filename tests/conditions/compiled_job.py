"""A job of two ranks whose blocks are compiled, unwatched and watched; ``test_compiled_ranks`` reads it.

python -m torch.distributed.run --nproc_per_node 2 tests/conditions/compiled_job.py FOLDER [CONDITION ...]
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import fp8debug
from tests import ranks
from tests.conditions.test_compiled_programs import WIDTH, Net, Program, without_bias

STEPS, PARTS, EVERY = 3, 2, 2
#: How the model is split: ``outside`` wraps the compiled blocks, ``inside`` is compiled with them.
CONDITIONS = (
    "ddp outside",
    "ddp inside",
    "ddp inside, wrapped",
    "fsdp with checkpoints",
    "fsdp of torchao in mixed precision",
    "fsdp of delayed scaling",
)


def train(path: Path | None, name: str, *, compiles: bool = True) -> list[Any]:
    """Train with gradient accumulation; return losses, sums of the weights, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    is_native = name.endswith("delayed scaling")
    is_mixed = name.endswith("mixed precision")
    program = Program(checkpointed="full" if name.endswith("checkpoints") else "")
    model: Any = Net(program._replace(make=without_bias) if is_native or is_mixed else program)
    if is_native:
        model = fp8debug.convert(model, "tensorwise_delayed")
    elif is_mixed:
        float8 = importlib.import_module("torchao.float8")
        float8.convert_to_float8_training(model, config=float8.Float8LinearConfig.from_recipe_name("rowwise"))
    else:
        model = model.bfloat16()
    blocks = list(model.blocks)
    if compiles and "inside" not in name:
        for block in blocks:
            block.compile(backend="aot_eager", fullgraph=True)
    called = model
    if name.startswith("ddp"):
        called = DistributedDataParallel(model)
        if compiles and name == "ddp inside":
            called.compile(backend="aot_eager")
        elif compiles and name == "ddp inside, wrapped":
            called = torch.compile(called, backend="aot_eager")
    else:
        types = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if is_mixed else MixedPrecisionPolicy()
        )
        for i, block in enumerate(blocks):
            fully_shard(block, mp_policy=types, reshard_after_forward=i > 0)
        fully_shard(model, mp_policy=types)
    watch = fp8debug.watch(model, path, every=EVERY, what_if=(), ranks="all", compiled="repeat") if path else None
    found: list[Any] = []
    for step in range(STEPS):
        for part in range(PARTS):
            given = torch.Generator().manual_seed(1 + step + 10 * part + 100 * dist.get_rank())
            x = torch.randn(16, WIDTH, generator=given)
            loss = called(x if is_native or is_mixed else x.bfloat16()).float().square().mean()
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
