"""torchtitan's own Trainer and its Llama, unwatched and watched.

python -m torch.distributed.run --nproc_per_node 2 tests/trainers/titan_job.py FOLDER [CONDITION ...]

Two ranks and gloo on a CPU, which the package does not know as a device, so that a few of its questions are answered here; FP8
by its Float8LinearConverter, emulated. Nothing of its training is replaced but attention and the data: random numbers.
"""

# ruff: noqa: E402  # the device is asked for when the package is imported

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"
for name, value in {
    "get_device_name": lambda *args: "cpu",
    "get_device_properties": lambda *args: SimpleNamespace(total_memory=1 << 30, name="cpu"),
    "memory_stats": lambda *args: {},
    "reset_peak_memory_stats": lambda *args: None,
    "empty_cache": lambda *args: None,
}.items():
    setattr(torch.cpu, name, value)

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.quantization import Float8LinearConverter
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import fp8debug
from tests import ranks

STEPS, SEQUENCES, TOKENS, WORDS, ACCUMULATED = 3, 2, 64, 2048, 2


class Letters(BaseTokenizer):  # type: ignore[misc]  # a class without types
    """Is not asked anything."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):  # type: ignore[misc]  # a class without types
        """Nothing to set."""

    def __init__(self, config: Any, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return WORDS


class Numbers(BaseDataLoader):  # type: ignore[misc]  # a class without types
    """The same sequences every time, others on each rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]  # a class without types
        """Nothing to set."""

    def __init__(self, config: Any, *, dp_rank: int = 0, **kwargs: Any) -> None:
        self.seed = dp_rank

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            ids = torch.randint(0, WORDS, (SEQUENCES, TOKENS + 1), generator=generator)
            yield {"input": ids[:, :-1].contiguous()}, ids[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def config_of(folder: Path, parallel: dict[str, Any], checkpointing: Any, *, is_compiled: bool = False) -> Any:
    converter = Float8LinearConverter.Config(emulate=True, filter_fqns=["lm_head"])
    spec = model_registry("debugmodel", converters=[converter])
    for _, _, holder, place in list(spec.model.traverse(FlexAttention.Config)):
        setattr(holder, place, ScaledDotProductAttention.Config())  # the others want a GPU
    del spec.model.layers[2:]
    degrees = {"data_parallel_shard_degree": 1, "spmd_backend": "partial_dtensor", **parallel}
    batch = SEQUENCES * (2 if degrees["data_parallel_shard_degree"] == 2 else 1)
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(),
        model_spec=spec,
        tokenizer=Letters.Config(),
        dataloader=Numbers.Config(),
        dump_folder=str(folder),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=SEQUENCES,
            global_batch_size=batch * ACCUMULATED,
            seq_len=TOKENS,
            steps=STEPS,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(**degrees),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=checkpointing,
        compile=CompileConfig(enable=is_compiled),
    )


class Listening:
    """Log of the trainer's steps."""

    def __init__(self, trainer: Any) -> None:
        self.found: list[list[float]] = []
        own = trainer.metrics_processor.log

        def log(step: int, average: float, largest: float, norm: float, extra_metrics: Any = None) -> None:
            self.found.append([step, float(average), norm])
            own(step, average, largest, norm, extra_metrics=extra_metrics)

        trainer.metrics_processor.log = log
        trainer.metrics_processor.should_log = lambda step: True


def trained(folder: Path, make: Callable[[Path], Any], run: Path | None) -> list[Any]:
    torch.manual_seed(0)
    trainer = make(folder).build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo multiplies by nothing
    log = Listening(trainer)
    if run is not None:
        with fp8debug.watch(trainer, run, every=1, shadow_rows=32):
            trainer.train()
    else:
        trainer.train()
    trainer.close()
    weights = sum(
        float(getattr(p, "to_local", lambda p=p: p)().detach().double().sum()) for p in trainer.model_parts[0].parameters()
    )
    return [*log.found, weights]


CONDITIONS: dict[str, Callable[[Path], Any]] = {
    "selective": lambda folder: config_of(folder, {"data_parallel_shard_degree": 2}, SelectiveAC.Config()),
    "full": lambda folder: config_of(folder, {"data_parallel_shard_degree": 2}, FullAC.Config()),
}


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    dist_utils.set_pg_timeouts = lambda **kwargs: None  # of a device, and of a newer torch
    names = sys.argv[2:] or list(CONDITIONS)
    ranks.try_all(folder, names, lambda name: [trained(folder / "logs", CONDITIONS[name], to) for to in (None, folder / name)])
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
