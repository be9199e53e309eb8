"""One job of four ranks that trains under every kind of parallelism, unwatched and watched; ``test_parallel`` reads what it left.

python -m torch.distributed.run --nproc_per_node 4 tests/conditions/job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import fp8debug
from tests.recording.models import Gated, Net, batch, net

STEPS = 3
Losses = list[float]


def loop(model: nn.Module, watch: Any, number: Callable[[int], int], parts: int = 1) -> Losses:
    """Train; ``number`` says which batch a step is on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for part in range(parts):
            x, classes = batch(number(step) * parts + part)
            last = part == parts - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            loss = functional.cross_entropy(model(x), classes)
            loss.backward()
            total += loss.item() / parts
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        if watch:
            watch.step(loss=total)
    return losses


def own(step: int) -> int:
    return step * dist.get_world_size() + dist.get_rank()


def trained(path: Path | None, build: Callable[[], nn.Module], *words: Any, first: bool = False, **options: Any) -> Losses:
    """Build, watch when there is a path, train; ``first`` watches the model before it is wrapped."""
    torch.manual_seed(0)
    model = build()
    watch = fp8debug.watch(model, path, every=1, **options) if path else None
    losses = loop(model, watch, *words)
    if watch:
        watch.close()
    return losses


def ddp(path: Path | None) -> Losses:
    return trained(path, lambda: DistributedDataParallel(net()), own)


def ddp_accumulating(path: Path | None) -> Losses:
    return trained(path, lambda: DistributedDataParallel(net()), own, 2)


def sharded(reshard: bool) -> Callable[[Path | None], Losses]:
    def build() -> nn.Module:
        model = net()
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return model

    return lambda path: trained(path, build, own)


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def two_by_two(recipe: str | None) -> Callable[[Path | None], Losses]:
    """Two replicas, sharded by FSDP2, of two ranks that share each block."""

    def build() -> nn.Module:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = net(recipe, {"head": None} if recipe else None)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], PLAN)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        return model

    return lambda path: trained(path, build, lambda step: step * 2 + dist.get_rank() // 2)


class Stage(nn.Module):
    """Half of a Net, under the names that the whole one has."""

    def __init__(self, whole: Net, number: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): whole.blocks[number]})
        self.head = whole.head if number else None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = x + block(x)
        return x if self.head is None else self.head(x)


def pipeline(path: Path | None) -> Losses:
    """Two pipelines of two stages, four microbatches a step; the last stage knows the loss."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number, group = dist.get_rank() % 2, pairs[dist.get_rank() // 2]
    model = Stage(net(), number)
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 4, loss_fn=functional.cross_entropy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fp8debug.watch(model, path, every=1) if path else None
    found = []
    for step in range(STEPS):
        x, classes = batch(step)
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(x)
        else:
            schedule.step(target=classes, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        loss = sum(float(one) for one in losses) / 4 if losses else None
        found.append(loss or float(sum(p.detach().double().sum() for p in model.parameters())))
        if watch:
            watch.step(loss=loss)
    if watch:
        watch.close()
    return found


def tensor_parallel_is_right(folder: Path) -> dict[str, float]:
    """Return how far gradients of a split block lie from those of the whole one, with a cast whose blocks the split keeps."""
    cast = fp8debug.get_recipe("mxfp8")
    torch.manual_seed(0)
    whole = fp8debug.convert(Gated(64, 128), cast)
    split = fp8debug.convert(Gated(64, 128), cast)
    split.load_state_dict(whole.state_dict())
    parallelize_module(split, init_device_mesh("cpu", (4,)), PLAN)
    x = batch(0)[0].requires_grad_()
    y = batch(0)[0].requires_grad_()
    whole(x).square().sum().backward()
    split(y).square().sum().backward()
    assert x.grad is not None and y.grad is not None
    found = {"grad_input": float((x.grad - y.grad).norm() / x.grad.norm())}
    for name, parameter in whole.named_parameters():
        other = split.get_parameter(name).grad
        assert isinstance(other, DTensor) and parameter.grad is not None
        found[name] = float((other.full_tensor() - parameter.grad).norm() / parameter.grad.norm())
    return found


CONDITIONS: dict[str, Callable[[Path | None], Losses]] = {
    "ddp": ddp,
    "ddp_accumulating": ddp_accumulating,
    "fsdp2": sharded(True),
    "fsdp2_unsharded": sharded(False),
    "tensor_parallel": two_by_two("blockwise"),
    "tensor_parallel_plain": two_by_two(None),
    "pipeline": pipeline,
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    wanted = sys.argv[2:] or list(CONDITIONS)
    for name, train in CONDITIONS.items():
        if name not in wanted:
            continue
        try:
            found[name] = [train(None), train(folder / name)]
        except Exception as error:  # the other ranks may be gone too; the test shows it
            found[name] = f"{type(error).__name__}: {error}"
    found["right"] = tensor_parallel_is_right(folder)
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
