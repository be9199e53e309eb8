"""A GPT of megatron-core, unwatched and watched, in the order of calls of Megatron-LM's own loop.

python -m torch.distributed.run --nproc_per_node 2 tests/trainers/megatron_job.py FOLDER [CONDITION ...]

Two ranks and gloo on a CPU, FP8 by ``_scaled_mm`` in its own Linears; over NCCL where each rank has a GPU, its layers then made
of Transformer Engine's. megatron-core is the package: models, tensor parallelism, gradient buffers, optimizer, rates, schedules.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor
from torch.overrides import TorchFunctionMode

import fp8debug
from tests import ranks
from tests.adapters.linears import InFp8, Matmul

ON_GPUS = torch.cuda.is_available()
STEPS, MICROBATCHES, SEQUENCES, WORDS = 3, 2, 2, 128
TOKENS, HIDDEN = (128, 512) if ON_GPUS else (32, 128)
DEVICE = torch.device("cuda" if ON_GPUS else "cpu")


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked of CUDA: the package names the device wherever it makes a tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        found = args[0] if func is Tensor.cuda else func(*args, **kwargs)
        return found.replace("torch.", "torch.cuda.") if func is Tensor.type and isinstance(found, str) else found


class _InFp8(InFp8):
    """FP8 product of a Linear of the package."""

    def _forward_impl(self, input: Tensor, weight: Tensor, bias: Any = None, **options: Any) -> Tensor:
        if options["allreduce_dgrad"]:
            input = tensor_parallel.copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
        out: Tensor = Matmul.apply(input.reshape(-1, input.shape[-1]), weight, self)
        out = out.to(input.dtype).reshape(*input.shape[:-1], -1)
        return out if bias is None else out + bias


class Fp8ColumnParallelLinear(_InFp8, ColumnParallelLinear):  # type: ignore[misc]  # a package without types
    """Split by outputs."""


class Fp8RowParallelLinear(_InFp8, RowParallelLinear):  # type: ignore[misc]  # as above
    """Split by inputs."""


def layers() -> Any:
    """Return what a layer is made of."""
    if ON_GPUS:
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec()
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv = mlp.linear_fc1 = Fp8ColumnParallelLinear
    attention.linear_proj = mlp.linear_fc2 = Fp8RowParallelLinear
    return spec


def loss_of(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    total, count = output.float().sum(), torch.tensor(output.numel(), dtype=torch.int, device=DEVICE)
    return total, count, {"lm loss": torch.stack([total.detach(), count.float()])}


def forward_step(data: Iterator[Tensor], model: Any) -> Any:
    ids = next(data)
    places = torch.arange(TOKENS, device=DEVICE).expand_as(ids)
    mask = torch.triu(torch.ones(1, 1, TOKENS, TOKENS, device=DEVICE), diagonal=1).bool()
    return model(ids, places, mask, labels=ids), loss_of


def training(options: dict[str, Any]) -> Any:
    """Return a module like ``megatron.training.training``: its functions find each other by their global names."""
    module: Any = ModuleType("megatron.training.training")
    module.get_args = lambda: SimpleNamespace(iteration=0, cuda_graph_impl="none")
    module.found = []

    def setup_model_and_optimizer(provider: Any, kind: Any) -> Any:
        config = provider.config
        first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        model = provider(pre_process=first, post_process=last).to(DEVICE)
        model = Float16Module(config, model) if ON_GPUS else model
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, min_lr=0.0, bf16=ON_GPUS, clip_grad=1.0), [model])
        rates = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": 8}
        decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 8, "wd_incr_style": "constant"}
        scheduler = OptimizerParamScheduler(optimizer, **rates, lr_decay_style="linear", **decay)
        config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
        return [model], optimizer, scheduler

    def train_step(forward: Any, data: Any, model: Any, optimizer: Any, scheduler: Any, config: Any) -> Any:
        for chunk in model:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run = get_forward_backward_func()
        sizes = {"seq_length": TOKENS, "micro_batch_size": SEQUENCES}
        losses = run(
            forward_step_func=forward, data_iterator=data, model=model, num_microbatches=MICROBATCHES, **sizes, forward_only=False
        )
        _, norm, zeros = optimizer.step()
        scheduler.step(increment=1)
        if not parallel_state.is_pipeline_last_stage():
            return {}, 0, False, False, 0, norm, zeros
        total = torch.stack([one["lm loss"] for one in losses]).sum(0)
        return {"lm loss": total[0] / total[1]}, 0, False, False, 0, norm, zeros

    def train(forward: Any, model: Any, optimizer: Any, scheduler: Any, data: Any, config: Any) -> None:
        for _ in range(STEPS):
            rate = optimizer.param_groups[0]["lr"]
            losses, *_, norm, _ = module.train_step(forward, data, model, optimizer, scheduler, config)
            loss = float(losses["lm loss"]) if losses else float(sum(p.detach().double().sum() for p in model[0].parameters()))
            module.found.append([loss, float(norm), rate])

    module.setup_model_and_optimizer, module.train_step, module.train = setup_model_and_optimizer, train_step, train

    def pretrain() -> list[Any]:
        torch.manual_seed(0)
        if ON_GPUS:
            tensor_parallel.model_parallel_cuda_manual_seed(0)
        sizes = {"num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "pipeline_dtype": torch.float32}
        if ON_GPUS:
            sizes |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
            sizes |= {"fp8": "e4m3", "fp8_recipe": "blockwise"}
        parallel = {
            "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        }
        still = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "use_cpu_initialization": not ON_GPUS}
        config = TransformerConfig(**{**sizes, **parallel, **still, **options}, gradient_accumulation_fusion=False)
        words = {"vocab_size": WORDS, "max_sequence_length": TOKENS, "share_embeddings_and_output_weights": False}
        provider: Any = partial(GPTModel, config=config, transformer_layer_spec=layers(), **words)
        provider.config = config
        seed = torch.Generator().manual_seed(7)
        data = (torch.randint(0, WORDS, (SEQUENCES, TOKENS), generator=seed).to(DEVICE) for _ in range(100))
        model, optimizer, scheduler = module.setup_model_and_optimizer(provider, None)
        module.train(forward_step, model, optimizer, scheduler, data, config)
        return [*module.found, float(sum(p.detach().double().sum() for p in model[0].parameters()))]

    module.pretrain = pretrain
    return module


#: (tensor, pipeline) parallelism, and options of the model.
CONDITIONS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tensor_parallel": (2, 1, {}),
    "pipeline": (1, 2, {}),
}
if ON_GPUS:
    everything = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    CONDITIONS["recomputed"] = (2, 1, everything)
    CONDITIONS["sequence_parallel"] = (2, 1, {"sequence_parallel": True})
    CONDITIONS["data_parallel"] = (1, 1, {})


def both(name: str, folder: Path) -> list[Any]:
    """Train without a watch and with one."""
    tensor, stages, options = CONDITIONS[name]
    parallel_state.initialize_model_parallel(tensor, stages)
    try:
        alone = training(options).pretrain()
        module: Any = training(options)
        with fp8debug.watch(module, folder / name, every=1, shadow_rows=32):
            return [alone, module.pretrain()]
    finally:
        parallel_state.destroy_model_parallel()


def main(folder: Path) -> None:
    if ON_GPUS:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        vars(torch.cuda).update(current_device=lambda: DEVICE, synchronize=lambda: None)
        tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *args: nullcontext()
    dist.init_process_group("nccl" if ON_GPUS else "gloo")
    with nullcontext() if ON_GPUS else OnCpu():
        ranks.try_all(folder, sys.argv[2:] or list(CONDITIONS), lambda name: both(name, folder))
    ranks.end()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
