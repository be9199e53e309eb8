"""Recipes that cast too much, too little, or to another format than is meant."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    E4M3,
    E5M2,
    LARGEST,
    BlockLinear,
    Cast,
    Model,
    quantized,
    scales_of,
    train,
)


@situation(
    1, "ROCm/FlyDSL#1020", "softmax weights are cast to FP8 inside attention, where most underflow", "wrong",
    words=("attention", "matmul", "not watched"), quiet=True,
)  # fmt: skip
def attention_loses_mass(folder: Path) -> None:
    class Attention(nn.Module):
        fp8 = False

        def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
            super().__init__()
            self.norm, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
            self.out = linear(width, width, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
            scores = q @ k.t() / 8
            p = torch.exp(scores - scores.amax(-1, keepdim=True))
            total = p.sum(-1, keepdim=True)
            if self.fp8:
                p = p + ((p / 4).to(E4M3).float() * 4 - p).detach()
            out: Tensor = x + self.out(p @ v / total)
            return out

    for name, fp8 in (("sick", True), ("clean", False)):
        Attention.fp8 = fp8
        model = Model(nn.Linear, block=Attention)
        with torch.no_grad():
            for block in model.blocks:
                weight: Any = block.qkv.weight
                weight[:256] *= 3
        train(fp8debug.convert(model, "blockwise", overrides={"head": None}), folder / name)


@situation(
    1, "pytorch/torchtitan#1056", "no fault: torchao with the filter of its README, which leaves the head in BF16", "wrong",
    clean=True,
)  # fmt: skip
def clean_torchao(folder: Path) -> None:
    from dataclasses import replace

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def converted() -> nn.Module:
        model = Model(nn.Linear)
        config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")
        return model

    train(converted(), folder / "clean")
    train(converted(), folder / "sick")


@situation(
    3, "NVIDIA-NeMo/Megatron-Bridge#638",
    "the MX recipe casts gradients to E5M2, as the hybrid one of delayed scaling does",
    first="silent", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F120",), words=("e4m3",), misleading=("smooth",),
)  # fmt: skip
def gradients_in_e5m2(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "grad_output":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), LARGEST[E5M2])
            return quantized(x.contiguous(), scales, (1, 128), E5M2), scales

    train(Model(Fault), folder / "sick")


@situation(
    4, "axolotl-ai-cloud/axolotl#3323",
    "FP8 is asked for and BF16 runs everywhere, without a word",
    first="right", quiet=True, words=("fp8", "bf16"),
)  # fmt: skip
def fp8_asked_for_in_vain(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x.bfloat16(), self.weight.bfloat16()).float()

    train(Model(Fault), folder / "sick")
