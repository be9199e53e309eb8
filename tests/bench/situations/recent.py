"""Ten more reports, of kernels, loaders, tied weights and optimizers; what is right was written before the trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    TOKENS,
    BlockLinear,
    Cast,
    FusedBlock,
    InInputType,
    Model,
    OwnKernel,
    altered,
    block_of,
    expanded,
    fp8_gemm_nt,
    quantized,
    scaled,
    scales_of,
    train,
    with_fault,
)


@situation(
    "sgl-project/sglang#37140",
    "a conversion by hand takes the format's highest exponent for overflow: 256 to 448 is all written as 448",
    first="incomplete", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F113", "F128"),
    words=("rounds away", "larger", "largest value", "conversion"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def highest_exponent_is_overflow(folder: Path) -> None:
    @altered("fprop", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        codes = data.float()
        return torch.where(codes.abs() >= 256, codes.sign() * LARGEST[E4M3], codes).to(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "AMD-AGI/Primus-Turbo#306",
    "the amax of a tensor is that of its first 8192 elements: whatever is larger behind them clips",
    first="incomplete", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F101", "F113", "F128"),
    words=("scale", "amax", "clip"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def amax_of_the_first_tile(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        amax = x.float().abs().reshape(-1)[:8192].amax()
        return (amax / LARGEST[E4M3]).expand(len(x), -(-x.shape[1] // 128)).contiguous()

    train(with_fault(fault), folder / "sick")


@situation(
    "sgl-project/sglang#30900",
    "scales are made for a maximum of 224, which is another device's: half of the format's range is never used",
    first="silent", codes=("F102", "F113", "F120", "F128"), words=("224", "maximum", "range", "headroom"),
    misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_for_half_the_maximum(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor == "weight":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), 224.0)
            return quantized(x.contiguous(), scales, (1, 128)), scales

    train(Model(Fault), folder / "sick")
    train(Model(), folder / "clean")


@situation(
    "pytorch/FBGEMM#6159",
    "the scales of the last block along K are never applied, as a strict comparison misses the last iteration",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F119", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "optimizer", "eps", "fast accumulation"),
)  # fmt: skip
def last_scale_block_unapplied(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe == "fprop":
            a, b = ((data, torch.cat([scales[:, :-1], torch.ones_like(scales[:, -1:])], 1)) for data, scales in (a, b))
        fp8_gemm_nt(a, b, d)

    train(with_fault(OwnKernel), folder / "sick", kernel=kernel)


@situation(
    "pytorch/ao#4900",
    "the cast writes with a row stride of 1: rows overlap, and most of the buffer is never written",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("grad_output",), codes=("F119", "F121", "F128"),
    words=("never written", "zero", "place", "another tensor"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def rows_that_overlap(folder: Path) -> None:
    @altered("wgrad", "grad_output")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        places = (torch.arange(rows)[:, None] + torch.arange(columns)).reshape(-1)
        written = torch.zeros(data.numel(), dtype=torch.uint8)
        written[places] = data.view(torch.uint8).reshape(-1)
        return written.reshape(data.shape).view(E4M3), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "sgl-project/sglang#35703",
    "rows of a fused weight are put in another order as it is loaded, and its block scales stay in the old one",
    first="incomplete", modules=("blocks.1.gate_up",), gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_in_the_old_order(folder: Path) -> None:
    @altered("fprop", "weight")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return data, scales[torch.arange(len(scales)).reshape(2, -1).t().reshape(-1)]

    model = with_fault(fault, "blocks.1.gate_up", block=FusedBlock)
    with torch.no_grad():  # heads of a trained model differ in size
        weight = model.get_parameter("blocks.1.gate_up.weight")
        weight.mul_(torch.linspace(-1, 1, len(weight)).exp2()[:, None])
    train(model, folder / "sick")
    train(Model(block=FusedBlock), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#3437",
    "two modules share a weight, and delayed wgrads set its gradient in place of adding to it: one use alone counts",
    first="silent", codes=("F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale"),
)  # fmt: skip
def tied_weights_do_not_accumulate(folder: Path) -> None:
    def tied() -> Model:
        model = Model()
        model.blocks[1].down.weight = model.blocks[0].down.weight
        return model

    class Fault(BlockLinear):
        """Keeps the weight gradient back until the end of the backward pass, and sets it then."""

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "wgrad":
                self.late = out.float()
            return out

    model = tied()
    for block in model.blocks:
        block.down.__class__ = Fault

    def backward_dw(step: int, number: int) -> None:
        for block in reversed(model.blocks):
            block.down.weight.grad = block.down.late

    train(model, folder / "sick", after_backward=backward_dw)
    train(tied(), folder / "clean")


@situation(
    "NVIDIA/Megatron-LM#5707",
    "FP8 parameters of an optimizer without parameter buffers: its updates reach the masters, never the forward pass",
    first="right", tensors=("weight",), codes=("F112", "F121", "F135", "F149"),
    words=("refresh", "update", "cached", "older", "as it is now"), misleading=("smooth", "eps", "learning rate"),
)  # fmt: skip
def updates_never_reach_the_forward(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "weight":
                return super().cast(gemm, tensor, x)
            kept: dict[str, Cast] = self.__dict__.setdefault("kept", {})
            if gemm not in kept:
                kept[gemm] = super().cast(gemm, tensor, x)
            return kept[gemm]

    train(Model(Fault), folder / "sick")
    train(Model(), folder / "clean")


@situation(
    "Nerogar/OneTrainer#996",
    "weight decay is applied to BF16 weights apart from the update, where it rounds to nothing",
    first="silent", codes=("F135",), words=("decay", "round"), misleading=("eps", "smooth", "scale_rounding"),
)  # fmt: skip
def weight_decay_rounds_to_nothing(folder: Path) -> None:
    class Decoupled(torch.optim.AdamW):
        """AdamW whose update is rounded at random into BF16, and whose decay is a multiplication of its own."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state.update(step=torch.zeros(()), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
                    state["step"] += 1
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    first, second = state["exp_avg"], state["exp_avg_sq"]
                    first.lerp_(p.grad, 0.1)
                    second.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                    t = float(state["step"])
                    size = (second.float() / (1 - 0.999**t)).sqrt() + 1e-8
                    exact = p.float() - group["lr"] * first.float() / (1 - 0.9**t) / size
                    noise = torch.randint(2**16, p.shape, dtype=torch.int32)
                    p.copy_((exact.view(torch.int32) + noise).bitwise_and(-(2**16)).view(torch.float32))

    model = Model(InInputType).bfloat16()
    train(model, folder / "sick", optimizer=Decoupled(model.parameters(), lr=1e-3, weight_decay=0.1))


@situation(
    "huggingface/transformers#42775",
    "a static activation scale and a cast that does not clamp: what lies beyond is NaN, and the kernel's 0",
    first="misled", modules=DOWN, gemms=("fprop",), tensors=("input", "output"), codes=("F101", "F103", "F113", "F128"),
    words=("clamp", "saturat", "clip", "scale"),
    misleading=("amax_eps", "before its first use", "smooth", "optimizer", "learning rate"),
)  # fmt: skip
def static_cast_without_clamp(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            scales = torch.full((TOKENS, -(-x.shape[1] // 128)), 0.25 / LARGEST[E4M3])
            scaled = x.float() / expanded(scales, x.shape, block_of(x, scales))
            inside = scaled.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(E4M3)
            beyond = torch.full_like(inside.view(torch.uint8), 0x7F).view(E4M3).float()
            return torch.where(scaled.abs() > 464, beyond, inside.float()).to(E4M3), scales

        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            return out.nan_to_num(nan=0.0) if gemm == "fprop" else out

    train(with_fault(Fault), folder / "sick")
