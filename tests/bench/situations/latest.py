"""Ten more reports of further classes, met after F149 had been written; what is right was written before the trial."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    Block,
    BlockLinear,
    Cast,
    FusedBlock,
    Model,
    OwnKernel,
    expanded,
    fp8_gemm_nt,
    quantized,
    scales_of,
    train,
    with_fault,
)


@situation(
    "sgl-project/sglang#39637",
    "a compute tile spans several quantization blocks: the kernel never moves on from the first block's scale along K",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F113", "F128"),
    words=("kernel", "scale"), misleading=("smooth", "optimizer", "fast accumulation"),
)  # fmt: skip
def scale_never_moves_on(folder: Path) -> None:
    def kernel(a: Cast, b: Cast, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        if recipe == "fprop":
            a, b = ((data, scales[:, :1].expand_as(scales)) for data, scales in (a, b))
        fp8_gemm_nt(a, b, d)

    model = with_fault(OwnKernel)
    with torch.no_grad():  # blocks of a trained model differ in size
        weight = model.get_parameter("blocks.1.down.weight")
        weight.mul_(torch.linspace(-1, 1, weight.shape[1]).exp2())
    train(model, folder / "sick", kernel=kernel)


class _Recomputed(Block):
    """A block with dropout whose forward pass is recomputed in the backward pass."""

    keeps, again = True, False

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            h = functional.dropout(self.norm(x), 0.1)
            out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h))
            return out

        out: Tensor = checkpoint(run, x, use_reentrant=self.again, preserve_rng_state=self.keeps)
        return out


@situation(
    "allenai/OLMo-core#828",
    "a recomputed forward pass draws another dropout mask: gradients of another sample than the loss's",
    first="silent", codes=("F115",), words=("recompute",), misleading=("eps", "smooth", "bf16"),
)  # fmt: skip
def recomputed_dropout(folder: Path) -> None:
    class Fault(_Recomputed):
        keeps = False

    train(Model(block=Fault), folder / "sick")
    train(Model(block=_Recomputed), folder / "clean")


@situation(
    "NVIDIA/Megatron-LM#7538",
    "the recomputation runs outside the autocast: the forward pass is in FP8, the recomputed one in BF16",
    first="silent", codes=("F110", "F111", "F115", "F128"), words=("recompute", "bf16", "high precision", "fp8"),
    misleading=("eps", "smooth", "optimizer"),
)  # fmt: skip
def recomputed_in_bf16(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() == -1:
                return super().forward(x)
            return functional.linear(x.bfloat16(), self.weight.bfloat16())

    class Again(_Recomputed):
        again = True

    train(Model(Fault, block=Again), folder / "sick")


@situation(
    "intel/auto-round#1611",
    "the scale of a weight comes from its greatest value, not from its greatest magnitude",
    first="incomplete", modules=DOWN, gemms=("fprop", "dgrad"), tensors=("weight",), codes=("F101", "F104", "F113", "F128"),
    words=("clip", "saturat", "scale"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def greatest_value_for_magnitude(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "weight":
                return super().cast(gemm, tensor, x)
            scales = scales_of(x.clamp(min=0), (128, 128), LARGEST[E4M3])
            return quantized(x.contiguous(), scales, (128, 128)), scales

    model = with_fault(Fault)
    with torch.no_grad():  # a few large weights, of either sign, as in a trained model
        weight = model.get_parameter("blocks.1.down.weight")
        weight[::37, ::29] *= -4.0 * weight[::37, ::29].sign()
    train(model, folder / "sick")


@situation(
    "IST-DASLab/FP-Quant#16",
    "the bias is added by the product and once more after it",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("output",), codes=("F108", "F128"), words=("bias",),
    misleading=("smooth", "optimizer"),
)  # fmt: skip
def bias_added_twice(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out if self.bias is None else out + self.bias

    model = with_fault(Fault, bias=True)
    with torch.no_grad():
        bias = model.get_parameter("blocks.1.down.bias")
        bias.copy_(torch.linspace(-1, 1, len(bias)))
    train(model, folder / "sick")


@situation(
    "deepspeedai/DeepSpeed#7839",
    "gradients are not emptied after a step: each step gets the sum of all steps before it",
    first="silent", codes=("F134", "F149"), words=("gradient",), misleading=("eps", "smooth", "scale_rounding"),
)  # fmt: skip
def gradients_never_emptied(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    vars(optimizer)["zero_grad"] = lambda set_to_none=True: None
    train(model, folder / "sick", optimizer=optimizer)
    train(Model(), folder / "clean")


@situation(
    "vllm-project/tpu-inference#1926",
    "the cast cuts mantissas off in place of rounding them: every value is a little too small",
    first="silent", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F113", "F118", "F120", "F128"),
    words=("truncat", "cut", "toward zero", "towards zero", "rounds down"),
    misleading=("e4m3fn forward", "smooth", "format='e4m3fn'"),
)  # fmt: skip
def cast_that_truncates(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            scales = scales_of(x, (1, 128), LARGEST[E4M3])
            scaled = x.float() / expanded(scales, x.shape, (1, 128))
            spacing = torch.exp2(torch.frexp(scaled)[1].clamp(min=-5) - 4.0)
            return ((scaled / spacing).trunc() * spacing).to(E4M3), scales

    train(with_fault(Fault), folder / "sick")


@situation(
    "flashinfer-ai/flashinfer#2809",
    "the gate's scales are never read: the rows of a fused weight's first half are multiplied with those of the second",
    first="incomplete", modules=("blocks.1.gate_up",), gemms=("fprop",), tensors=("weight", "output"),
    codes=("F108", "F113", "F119", "F128"), words=("scale", "kernel"), misleading=("smooth", "eps", "optimizer"),
)  # fmt: skip
def scales_of_the_gate_unread(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            if gemm == "fprop":
                data, scales = b
                b = data, torch.cat([scales[len(scales) // 2 :]] * 2)
            return super().product(gemm, a, b, shape)

    model = with_fault(Fault, "blocks.1.gate_up", block=FusedBlock)
    with torch.no_grad():
        weight = model.get_parameter("blocks.1.gate_up.weight")
        weight[: len(weight) // 2] *= 3
    train(model, folder / "sick")
    train(Model(block=FusedBlock), folder / "clean")


@situation(
    "axolotl-ai-cloud/axolotl#3323",
    "FP8 is asked for and BF16 runs everywhere, without a word",
    first="right", quiet=True, words=("fp8", "bf16"),
)  # fmt: skip
def fp8_asked_for_in_vain(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            return functional.linear(x.bfloat16(), self.weight.bfloat16()).float()

    train(Model(Fault), folder / "sick")


@situation(
    "NVIDIA/Model-Optimizer#1397",
    "an all-zero block of a weight gets a scale beyond its format: a NaN byte in the scales",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight", "output"), codes=("F103",), words=("scale", "zero", "eps"),
    misleading=("smooth", "optimizer", "learning rate"),
)  # fmt: skip
def zero_block_of_a_weight(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            if tensor == "weight":
                blocks = x.abs().unfold(0, 128, 128).unfold(1, 128, 128).amax((2, 3))
                scales = torch.where(blocks == 0, torch.nan, scales)
            return data, scales

    model = with_fault(Fault)
    weight = model.get_parameter("blocks.1.down.weight")
    with torch.no_grad():
        weight[:128, :128] = 0
    train(
        model, folder / "sick", steps=6, every=1, before=lambda step: None, optimizer=torch.optim.SGD(model.parameters(), lr=0.0)
    )
