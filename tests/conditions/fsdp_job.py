"""A job under FSDP2, unwatched and watched, whose modules overwrite parameters' memory between GEMMs; ``test_fsdp`` reads it.

python -m torch.distributed.run --nproc_per_node 2 tests/conditions/fsdp_job.py FOLDER [CONDITION ...]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import fp8debug
from tests import ranks
from tests.adapters.interception.test_matrices import Mlp
from tests.adapters.linears import ScaledLinear
from tests.recording.models import Gated, batch, net

STEPS, PARTS = 2, 2


class Matrices(nn.Module):
    """Blocks with weights [in, out] in modules of no known class."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Mlp(), Mlp()]), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x[..., :32]
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def linears_of(kind: type[nn.Linear]) -> nn.Module:
    model = net(None)
    for block in model.blocks:
        for name, old in list(block.named_children()):
            assert isinstance(old, nn.Linear)
            made = kind(old.in_features, old.out_features, bias=False)
            made.load_state_dict({"weight": old.weight})
            block.set_submodule(name, made)
    return model.bfloat16()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "scaled_mm": partial(linears_of, ScaledLinear),
    "matrices": lambda: Matrices().bfloat16(),
    "fp8_linear": lambda: net("blockwise").bfloat16(),
}
#: FSDP2 with its parameters gathered for each pass or for the whole step; None is the model on one rank.
SHARDED: dict[str, bool | None] = {"alone": None, "resharded": True, "unsharded": False}
#: Checkpointing recomputes a block in its backward pass, which gathers the parameters once more.
HOW = ("plain", "checkpointed")
CONDITIONS = {"-".join((model, sharded, how)): (model, sharded, how) for model, sharded, how in product(MODELS, SHARDED, HOW)}


def train(path: Path | None, name: str, sharded: str, how: str) -> list[float]:
    """Train with gradient accumulation and return losses and a sum of the weights."""
    torch.manual_seed(0)
    model: Any = MODELS[name]()
    if how == "checkpointed":
        apply_activation_checkpointing(model, checkpoint_wrapper, check_fn=lambda m: isinstance(m, Gated | Mlp))
    if (reshard := SHARDED[sharded]) is not None:
        for block in model.blocks:
            fully_shard(block, reshard_after_forward=reshard)
        fully_shard(model, reshard_after_forward=reshard)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watch = fp8debug.watch(model, path, every=1, what_if=(), ranks="all") if path else None
    found = []
    for step in range(STEPS):
        for part in range(PARTS):
            x, classes = batch((step * PARTS + part) * dist.get_world_size() + dist.get_rank())
            loss = functional.cross_entropy(model(x.to(next(model.parameters()).dtype)).float(), classes)
            loss.backward()
            found.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if watch:
            watch.step(loss=found[-1])
    if watch:
        watch.close()
    return found


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    both = lambda name: [train(None, *CONDITIONS[name]), train(folder / name, *CONDITIONS[name])]  # noqa: E731  # of one line
    ranks.write(folder, ranks.try_all(folder, sys.argv[2:] or CONDITIONS, both))
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
