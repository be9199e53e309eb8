"""Low precision on two ranks: torchao's FP8 all-gather under FSDP2, and Hadamard signs of each rank's own.

python -m torch.distributed.run --nproc_per_node 2 tests/conditions/low_bit_job.py FOLDER [CONDITION ...]
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import fp8debug
from tests import ranks
from tests.training import losses_of, watched

STEPS = 2


def gathering(in_fp8: bool, together: bool) -> nn.Module:
    """Return torchao's Linears, each split by its rows; gloo gathers bytes, and knows no FP8."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    class Bytes(_fsdp_collectives.DefaultAllGather):
        def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            both = output_tensor.view(torch.uint8), input_tensor.view(torch.uint8)
            return super().__call__(*both, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    net = nn.Sequential(nn.Linear(64, 96, bias=False), nn.GELU(), nn.Linear(96, 32, bias=False))
    convert_to_float8_training(net, config=Float8LinearConfig(enable_fsdp_float8_all_gather=in_fp8, emulate=True))
    wrapped: list[Any] = [net] if together else [net[0], net[2], net]
    for module in wrapped:
        fully_shard(module).set_custom_all_gather(Bytes())
    return net


def signs_of_each_rank() -> nn.Module:
    """Return Linears in NVFP4 whose Hadamard transforms agree within a rank, and not between them."""
    recipe = fp8debug.get_recipe("nvfp4").replace(gemm="wgrad", hadamard_signs=0xD7E8 + dist.get_rank(), name="own_signs")
    return fp8debug.convert(nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32)), recipe)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gathered": lambda: gathering(True, together=False),
    "gathered together": lambda: gathering(True, together=True),
    "gathered in high precision": lambda: gathering(False, together=False),
    "signs": signs_of_each_rank,
}


def train(path: Path | None, name: str) -> list[float]:
    """Train and return the losses."""
    torch.manual_seed(0)
    net = MODELS[name]()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        loss: Tensor = net(x).square().mean()
        return loss

    with watched(net, path, every=1, what_if=(), ranks="all") as watch:
        return losses_of(net, loss_of, steps=STEPS, optimizer=optimizer, watch=watch)


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    both = lambda name: [train(None, name), train(folder / name, name)]  # noqa: E731  # of one line
    ranks.write(folder, ranks.try_all(folder, sys.argv[2:] or MODELS, both))
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
