"""Eight more reports, of gradients, gathered scales and FP8 masters; what is right was written before the trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    UP,
    VOCABULARY,
    Block,
    BlockLinear,
    Cast,
    Model,
    OwnKernel,
    fp8_gemm_nt,
    quantized,
    scaled,
    scales_of,
    train,
    values,
    with_fault,
)


class _Fused(BlockLinear):
    """A Linear whose wgrad goes to ``main_grad``; autograd gets a placeholder from a buffer that all share."""

    placeholder = torch.zeros(0)

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        out = super().product(gemm, a, b, shape)
        if gemm != "wgrad":
            return out
        main: Tensor = self.__dict__.setdefault("main_grad", torch.zeros(tuple(shape)))
        main += out
        return type(self).placeholder[: out.numel()].reshape(out.shape)


@situation(
    "NVIDIA/Megatron-LM#6565",
    "a shared placeholder that is not zeroed is added to the gradient which the fused wgrad has accumulated already",
    first="silent", codes=("F134", "F149"), tensors=("grad_weight",), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "bf16"),
)  # fmt: skip
def stale_placeholder(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(_Fused)
        layers = [module for module in model.modules() if isinstance(module, _Fused)]
        random = torch.Generator().manual_seed(1)
        _Fused.placeholder = torch.randn(128 * 384, generator=random) * 1e-3 * (name == "sick")

        def add(step: int, micro: int, layers: Sequence[_Fused] = layers) -> None:
            for layer in layers:  # what data parallelism's hook does for weights with zero_out_wgrad
                assert layer.weight.grad is not None
                layer.weight.grad = layer.weight.grad + layer.__dict__.pop("main_grad")

        train(model, folder / name, after_backward=add)


@situation(
    "vllm-project/vllm#53668",
    "the fused SwiGLU and cast maps the maximum of a block to [1, 2) instead of the format's: eight binades are not used",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F101", "F102", "F104", "F113"),
    words=("headroom", "range", "scale"), misleading=("smooth", "outlier", "history", "optimizer"),
)  # fmt: skip
def maximum_below_two(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        return scales_of(x, (1, 128), 1.0).log2().floor().exp2()

    train(with_fault(fault), folder / "sick")
    train(Model(), folder / "clean")


@situation(
    "vllm-project/vllm#54683",
    "each rank casts its tokens under a scale of its own, and the kernel reads the gathered codes under the first rank's",
    first="misled", modules=UP, gemms=("fprop",), tensors=("input",), codes=("F113", "F119", "F128"), words=("scale",),
    misleading=("smooth", "eps", "optimizer", "history", "nearest even"),
)  # fmt: skip
def scale_of_the_first_rank(folder: Path) -> None:
    class Fault(BlockLinear):
        ranks = 1

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            local = [(part, (part.abs().amax() / LARGEST[E4M3]).expand(len(part), 1)) for part in x.chunk(self.ranks)]
            codes = torch.cat([quantized(part, scales, (1, part.shape[1])).view(torch.uint8) for part, scales in local])
            scales = local[0][1][:1].expand(len(x), -(-x.shape[1] // 128)).contiguous()
            return codes.view(E4M3), scales

    class Gathered(Fault):
        ranks = 4

    train(with_fault(Gathered, *UP), folder / "sick")
    train(with_fault(Fault, *UP), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#1121",
    "a model that is made with FP8 parameters: its masters begin as the FP8 values, not as the initialization",
    first="silent", tensors=("weight",), codes=("F111", "F137", "F150"), words=("grid", "fp8 values"),
    misleading=("smooth", "eps", "optimizer", "learning rate", "enable", "turn on"),
)  # fmt: skip
def masters_of_fp8_values(folder: Path) -> None:
    model = Model()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BlockLinear):
                module.weight.copy_(values(module.cast("fprop", "weight", module.weight)))
    train(model, folder / "sick")
    train(Model(), folder / "clean")


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, writes_all: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.writes_all = writes_all
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        into_gate, into_up = grad * up * share * (1 + gate * (1 - share)), grad * gate * share
        if not ctx.writes_all:  # every row is stored at the first; the others hold what the memory held
            for into in (into_gate, into_up):
                into[0], into[1:] = into[-1].clone(), float("nan")
        return into_gate, into_up, None


class _GatedBlock(Block):
    writes_all = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(_SwiGLU.apply(self.gate(h), self.up(h), self.writes_all))
        return out


class _LastGatedBlock(_GatedBlock):
    writes_all = False


@situation(
    "ByteDance-Seed/Triton-distributed#180",
    "the backward kernel of SwiGLU stores the gradients of all rows in the first: the others were never written, and are NaN",
    first="misled", modules=(*UP, "blocks.1.gate"), gemms=("dgrad", "wgrad"), tensors=("grad_output",),
    codes=("F117", "F125"), words=("outside", "no linear"), misleading=("smooth", "eps", "learning rate", "loss scale"),
)  # fmt: skip
def rows_stored_in_the_first(folder: Path) -> None:
    for name, block in (("sick", _LastGatedBlock), ("clean", _GatedBlock)):
        model = Model(block=_GatedBlock)
        model.blocks[1].__class__ = block
        train(model, folder / name, steps=8, every=2)


@situation(
    "pytorch/ao#4229",
    "the scales of wgrad's second operand have the right values in the orientation that the kernel does not expect",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("grad_weight",), codes=("F108", "F113", "F119", "F128"),
    words=("scale", "layout", "kernel"), misleading=("smooth", "optimizer", "fast accumulation", "eps"),
)  # fmt: skip
def scales_in_the_other_orientation(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        scales = b[1].t().contiguous().reshape(b[1].shape) if recipe == "wgrad" else b[1]
        fp8_gemm_nt(a, (b[0], scales), d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)
    train(Model(), folder / "clean")


class _ChunkedHead(nn.Module):
    """Norm, and a head that computes loss and gradients in chunks of tokens, its weight's gradient summed in one dtype."""

    def __init__(self, model: Model, chunks: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.body, self.chunks, self.dtype = model, chunks, dtype
        model.head = BlockLinear(128, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the features before the head ``[tokens, width]``."""
        model, x = self.body, self.body.embed(tokens)
        for block in model.blocks:
            x = block(x)
        out: Tensor = model.norm(x)
        return out

    def loss(self, features: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss, with the gradients of head and features taken chunk by chunk."""
        head, total = self.body.head, features.new_zeros(())
        parts: list[Tensor] = []
        summed = torch.zeros_like(head.weight, dtype=self.dtype)
        for x, target in zip(features.detach().chunk(self.chunks), classes.chunk(self.chunks), strict=True):
            x.requires_grad_()
            loss = functional.cross_entropy(head(x).float(), target, reduction="sum") / len(classes)
            into_x, into_weight = torch.autograd.grad(loss, (x, head.weight))
            summed += into_weight.to(self.dtype)
            total += loss.detach()
            parts.append(into_x)
        head.weight.grad = summed.float()
        surrogate = (features * torch.cat(parts)).sum()
        return surrogate - surrogate.detach() + total


@situation(
    "linkedin/Liger-Kernel#1391",
    "the gradient of the head is accumulated over chunks of tokens in BF16: rounded after each of them",
    first="silent", modules=("body.head",), gemms=("wgrad",), tensors=("grad_weight",), codes=("F123",),
    words=("bf16", "fp32"), misleading=("eps", "smooth", "scale layout"),
)  # fmt: skip
def chunks_accumulated_in_bf16(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        model = _ChunkedHead(Model(), 32, dtype)
        train(model, folder / name, steps=6, every=1, loss_of=model.loss)


@situation(
    "aws-neuron/neuronx-distributed-inference#35",
    "the scales of all experts are averaged into one when their weights are fused, and the codes stay as they were",
    first="misled", modules=("blocks.1.gate", *UP), gemms=("fprop", "dgrad"), tensors=("weight",),
    codes=("F113", "F119", "F121", "F128"), words=("scale",), misleading=("smooth", "eps", "optimizer", "history"),
)  # fmt: skip
def scales_of_experts_averaged(folder: Path) -> None:
    class Averaged(BlockLinear):
        experts: Sequence[BlockLinear] = ()

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor != "weight" or not self.experts:
                return data, scales
            each = [expert.weight if gemm == "fprop" else expert.weight.t() for expert in self.experts]
            return data, torch.stack([scales_of(weight, (128, 128), LARGEST[E4M3]) for weight in each]).mean(0)

    for name in ("sick", "clean"):
        model = with_fault(Averaged, *UP, "blocks.1.gate")
        block = model.blocks[1]
        with torch.no_grad():
            block.gate.weight *= 2.0
        Averaged.experts = (block.gate, block.up) if name == "sick" else ()
        train(model, folder / name)
