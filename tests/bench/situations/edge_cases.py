"""Reports of edges: ragged shapes, empty groups, shared weights, recomputation, rare races; what is right was written first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    E4M3,
    LARGEST,
    Block,
    BlockLinear,
    Cast,
    Model,
    OwnKernel,
    TwoExperts,
    expanded,
    fp8_gemm_nt,
    quantized,
    train,
    values,
)


@situation(
    "PaddlePaddle/PaddleFleet#1523",
    "the results of a weight's cast are unpacked in the wrong order: fprop gets dgrad's transposed copy, and dgrad fprop's",
    first="incomplete", gemms=("fprop",), tensors=("weight",), codes=("F112", "F119", "F121", "F128"),
    words=("transpos", "place", "layout"), misleading=("smooth", "eps", "optimizer", "learning rate", "refresh"),
)  # fmt: skip
def transpose_unpacked_first(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, x.t() if tensor == "weight" else x)

    train(Model(Fault, hidden=128), folder / "sick")
    train(Model(hidden=128), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#2007",
    "the fused kernel of bias gradient and cast computes neither amax nor scale: gradients are cast under a scale of one",
    first="right", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F101", "F102", "F113", "F128"),
    words=("scale",), misleading=("smooth", "optimizer", "learning rate", "lower the eps", "loss scal"),
)  # fmt: skip
def fused_bias_kernel_has_no_scale(folder: Path) -> None:
    class Fault(BlockLinear):
        has_fault = True

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor != "grad_output" or not self.has_fault:
                return data, scales
            one = torch.ones_like(scales)
            return quantized(x.contiguous(), one, (1, 128)), one

    class Sound(Fault):
        has_fault = False

    train(Model(Fault, bias=True), folder / "sick")
    train(Model(Sound, bias=True), folder / "clean")


@situation(
    "vllm-project/vllm#49596",
    "the kernel takes rows over scale blocks for the size of a block, 112 in place of 128: its last rows get the next scale",
    first="right", modules=("blocks.1.up",), gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def block_size_from_the_shape(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        data, scales = b
        if recipe == "wgrad":
            fp8_gemm_nt(a, b, d)
            return
        spread = scales.repeat_interleave(len(data) // len(scales), 0).repeat_interleave(128, 1)
        d.copy_(values(a) @ (data.float() * spread[:, : data.shape[1]]).t())

    def made() -> Model:
        model = Model(OwnKernel, hidden=448)
        with torch.no_grad():  # blocks of a trained model differ in size
            weight = model.get_parameter("blocks.1.up.weight")
            weight.mul_(torch.linspace(-1, 1, len(weight)).exp2()[:, None])
        return model

    train(made(), folder / "sick", kernel=kernel)
    train(made(), folder / "clean")


@situation(
    "huggingface/kernels-community#1153",
    "the store of a tile has no mask for columns: what hangs over a row's end overwrites, at times, the next row's first ones",
    first="right", modules=("blocks.0.gate", "blocks.0.up"), gemms=("fprop",), tensors=("output",), codes=("F108", "F128"),
    words=("kernel", "overw", "rows"), misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def tile_hangs_over_the_row(folder: Path) -> None:
    random = torch.Generator().manual_seed(7)

    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        over = -d.shape[1] % 64
        if recipe == "fprop" and over:
            loses = torch.rand(len(d) - 1, generator=random) < 0.25
            d[1:, :over] = torch.where(loses[:, None], d[:-1, :over].clone(), d[1:, :over])

    train(Model(OwnKernel, hidden=416), folder / "sick", kernel=kernel)
    train(Model(OwnKernel, hidden=416), folder / "clean")


class _Experts(TwoExperts):
    """Two experts, the first of which has no tokens in every other step."""


@situation(
    "pytorch/pytorch#172439",
    "an expert without tokens gets a weight gradient: what the buffer held, as the kernel writes nothing for an empty group",
    first="silent", modules=tuple(f"blocks.{i}.first.{name}" for i in range(2) for name in ("gate", "up", "down")),
    gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F116", "F128", "F134", "F149"),
    words=("no token", "without token", "empty", "never written", "no rows"),
    misleading=("smooth", "eps", "optimizer", "fast accumulation"),
)  # fmt: skip
def gradient_of_an_empty_group(folder: Path) -> None:
    held: dict[torch.Size, Tensor] = {}

    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        fp8_gemm_nt(a, b, d)
        if recipe == "wgrad" and not a[0].shape[1]:
            d.copy_(held.get(d.shape, d))
        elif recipe == "wgrad":
            held[d.shape] = d.clone()

    def before(step: int) -> None:
        _Experts.offset = 100 if step % 2 else 0

    train(Model(OwnKernel, block=_Experts), folder / "sick", before=before, kernel=kernel)
    train(Model(OwnKernel, block=_Experts), folder / "clean", before=before)


class _Twice(nn.Module):
    """A gated MLP whose square Linear is applied twice."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.inner = nn.RMSNorm(width), nn.RMSNorm(width)
        self.mix = linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mix(self.inner(functional.silu(self.mix(self.norm(x))).to(x.dtype)))
        return out


@situation(
    "pytorch/pytorch#180952",
    "a pipeline that splits the weight gradient off counts one of two uses of a shared weight twice",
    first="silent", modules=("blocks.0.mix", "blocks.1.mix"), codes=("F134", "F149"), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "bf16"),
)  # fmt: skip
def one_use_counted_twice(folder: Path) -> None:
    class Fault(BlockLinear):
        num = 0

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "wgrad":
                self.num += 1
                return out * 2 if self.num % 2 == 0 else out
            return out

    train(Model(Fault, block=_Twice), folder / "sick")
    train(Model(block=_Twice), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#3215",
    "at times the kernel that casts and transposes leaves a tile of a gradient at the largest code: finite, and far too large",
    first="right", modules=("blocks.1.up", "blocks.0.down", "blocks.0.gate"), gemms=("dgrad",), tensors=("grad_output",),
    codes=("F113", "F117", "F128"), words=("cast", "race", "backend", "single elements", "kernel"),
    misleading=("smooth", "eps", "optimizer", "learning rate", "loss scal"),
)  # fmt: skip
def tile_at_the_largest_code(folder: Path) -> None:
    hit = {9: "blocks.1.up", 16: "blocks.0.down", 21: "blocks.0.gate"}
    now = {"step": 0}

    class Fault(BlockLinear):
        name = ""

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if (gemm, tensor) == ("dgrad", "grad_output") and hit.get(now["step"]) == self.name:
                codes = data.view(torch.uint8).clone()
                codes[64:96, 32:64] = 0x7E
                data = codes.view(E4M3)
            return data, scales

    model = Model(Fault)
    for name, module in model.named_modules():
        if isinstance(module, Fault):
            module.name = name
    train(model, folder / "sick", before=lambda step: now.update(step=step))
    train(Model(), folder / "clean")


class _Recomputed(Block):
    """A block whose forward pass is recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


@situation(
    "NVIDIA/TransformerEngine#1568",
    "the backward pass recomputes under the default recipe, delayed scaling with a scale of one, not the forward pass's",
    first="silent", codes=("F115",), words=("recompute",), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def recomputed_under_the_default_recipe(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if gemm != "fprop" or torch._C._current_graph_task_id() == -1:
                return data, scales
            one, limit = torch.ones_like(scales), LARGEST[E4M3]
            block = (128, 128) if tensor == "weight" else (1, 128)
            return (x.contiguous().float() / expanded(one, x.shape, block)).clamp(-limit, limit).to(E4M3), one

    train(Model(Fault, block=_Recomputed), folder / "sick")
    train(Model(block=_Recomputed), folder / "clean")
