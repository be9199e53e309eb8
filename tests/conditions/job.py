"""One job that trains under every kind of parallelism, unwatched and watched; ``test_parallel`` reads what it left.

python -m torch.distributed.run --nproc_per_node 4 tests/conditions/job.py FOLDER [CONDITION ...]

Four ranks and gloo on a CPU; over NCCL where each rank has a GPU of its own, and then Transformer Engine's Linear too.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
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
from tests import ranks
from tests.adapters.linears import ScaledLinear
from tests.recording import models
from tests.recording.models import Gated, Net

STEPS = 3
WORLD = int(os.environ.get("WORLD_SIZE", torch.cuda.device_count() if torch.cuda.device_count() > 1 else 4))
ON_GPUS = torch.cuda.device_count() >= WORLD
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if ON_GPUS else torch.device("cpu")
Losses = list[float]


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, classes = models.batch(step)
    return x.to(DEVICE), classes.to(DEVICE)


def net(recipe: str | None = "blockwise", overrides: dict[str, Any] | None = None) -> Net:
    """Return the model; on GPUs in BF16, for which all conditions share their kernels."""
    model = models.net(recipe, overrides)
    return model.bfloat16() if ON_GPUS else model


def linears_of(make: Callable[[nn.Linear], nn.Module]) -> Net:
    """Return a Net in BF16, the Linears of its blocks made by ``make``."""
    model = net(None).bfloat16()
    for block in model.blocks:
        for name, linear in list(block.named_children()):
            assert isinstance(linear, nn.Linear)
            block.set_submodule(name, made := make(linear))
            made.load_state_dict(linear.state_dict(), strict=False)
    return model


def scaled_mm() -> nn.Module:
    return linears_of(lambda old: ScaledLinear(old.in_features, old.out_features, bias=old.bias is not None).bfloat16())


def torchao() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    model = net(None).bfloat16()
    config = replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=not ON_GPUS)
    convert_to_float8_training(model, module_filter_fn=lambda module, fqn: fqn != "head", config=config)
    return model


class InTe(nn.Module):
    """Runs a model in Transformer Engine's FP8."""

    def __init__(self, inner: Net) -> None:
        super().__init__()
        self.blocks, self.inner = inner.blocks, inner

    def forward(self, x: Tensor) -> Tensor:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8CurrentScaling

        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            out: Tensor = self.inner(x)
        return out


def transformer_engine() -> nn.Module:
    import transformer_engine.pytorch as te

    def make(old: nn.Linear) -> nn.Module:
        has_bias = old.bias is not None
        made: nn.Module = te.Linear(old.in_features, old.out_features, bias=has_bias, params_dtype=torch.bfloat16, device=DEVICE)
        return made

    return InTe(linears_of(make))


#: Models by the backend of their FP8 GEMMs.
MODELS: dict[str, Callable[[], nn.Module]] = {"": net, "_scaled_mm": scaled_mm}
if find_spec("torchao") is not None:
    MODELS["_torchao"] = torchao
if ON_GPUS and find_spec("transformer_engine") is not None:
    MODELS["_te"] = transformer_engine


def loop(model: nn.Module, watch: Any, number: Callable[[int], int], parts: int = 1) -> Losses:
    """Train; ``number`` says which batch a step is on this rank."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for part in range(parts):
            x, classes = batch(number(step) * parts + part)
            x = x.to(next(model.parameters()).dtype)
            last = part == parts - 1
            if isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last
            loss = functional.cross_entropy(model(x).float(), classes)
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
    model = build().to(DEVICE)
    watch = fp8debug.watch(model, path, every=1, **options) if path else None
    losses = loop(model, watch, *words)
    if watch:
        watch.close()
    return losses


def ddp(make: Callable[[], nn.Module], parts: int = 1) -> Callable[[Path | None], Losses]:
    return lambda path: trained(path, lambda: DistributedDataParallel(make().to(DEVICE)), own, parts)


def sharded(make: Callable[[], Any], reshard: bool) -> Callable[[Path | None], Losses]:
    def build() -> nn.Module:
        model: nn.Module = make().to(DEVICE)
        assert isinstance(model.blocks, nn.ModuleList)
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
        return model

    return lambda path: trained(path, build, own)


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def two_by_two(recipe: str | None) -> Callable[[Path | None], Losses]:
    """Replicas, sharded by FSDP2, of two ranks that share each block."""

    def build() -> nn.Module:
        mesh = init_device_mesh(DEVICE.type, (WORLD // 2, 2), mesh_dim_names=("dp", "tp"))
        model = net(recipe, {"head": None} if recipe else None).to(DEVICE)
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
    """Pipelines of two stages, four microbatches a step; the last stage knows the loss."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    number, group = dist.get_rank() % 2, pairs[dist.get_rank() // 2]
    model = Stage(net(), number).to(DEVICE)
    stage = PipelineStage(model, number, 2, DEVICE, group=group)
    schedule = ScheduleGPipe(stage, 4, loss_fn=lambda logits, classes: functional.cross_entropy(logits.float(), classes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fp8debug.watch(model, path, every=1) if path else None
    found = []
    for step in range(STEPS):
        x, classes = batch(step)
        x = x.to(next(model.parameters()).dtype)
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
    whole = fp8debug.convert(Gated(64, 32 * WORLD), cast).to(DEVICE)
    split = fp8debug.convert(Gated(64, 32 * WORLD), cast).to(DEVICE)
    split.load_state_dict(whole.state_dict())
    parallelize_module(split, init_device_mesh(DEVICE.type, (WORLD,)), PLAN)
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
    **{f"ddp{name}": ddp(make) for name, make in MODELS.items()},
    **{f"fsdp2{name}": sharded(make, True) for name, make in MODELS.items()},
    "ddp_accumulating": ddp(net, 2),
    "fsdp2_unsharded": sharded(net, False),
    "tensor_parallel": two_by_two("blockwise"),
    "tensor_parallel_plain": two_by_two(None),
    "pipeline": pipeline,
}


def main(folder: Path) -> None:
    if ON_GPUS:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    wanted = sys.argv[2:] or list(CONDITIONS)
    found = ranks.try_all(folder, wanted, lambda name: [CONDITIONS[name](None), CONDITIONS[name](folder / name)])
    if len(wanted) == len(CONDITIONS):
        found["right"] = tensor_parallel_is_right(folder)
    ranks.write(folder, found)
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
