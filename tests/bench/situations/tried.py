"""Eight more reports, of formats, refits, shared buffers and resumes; what is right was written before the trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    E5M2,
    LARGEST,
    UP,
    BlockLinear,
    Cast,
    Model,
    altered,
    batch,
    quantized,
    scales_of,
    train,
    values,
    with_fault,
)


@situation(
    "NVIDIA/TransformerEngine#3342",
    "the fused backward pass reads gradients that were cast to E5M2 as E4M3: far too small, each in another way",
    first="misled", gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F113", "F120", "F128"),
    words=("e5m2", "other format", "another format"), misleading=("scale layout", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def e5m2_read_as_e4m3(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor != "grad_output":
                return super().cast(gemm, tensor, x)
            x = x.contiguous()
            scales = scales_of(x, (1, 128), LARGEST[E5M2])
            return quantized(x, scales, (1, 128), E5M2).view(E4M3), scales

    train(Model(Fault), folder / "sick")


@situation(
    "verl-project/verl#7224",
    "after a refit the scales of a rollout's weight stay zero, as the loader wrote them into an older tensor",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("weight",), codes=("F103", "F113", "F121", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_are_zero_after_a_refit(folder: Path) -> None:
    class Fault(BlockLinear):
        has_refit = False

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return data, scales * 0 if self.has_refit and tensor == "weight" else scales

    model = with_fault(Fault)
    with torch.no_grad(), fp8debug.watch(model, folder / "sick", inference=True) as watch:
        for number in range(12):
            Fault.has_refit = number >= 6
            model(batch(number)[0])
            watch.step()


@situation(
    "NVIDIA/Megatron-LM#5487",
    "after an evaluation the gradient buffer still holds the BF16 weights that were gathered in it: gradients are added to them",
    first="silent", codes=("F127", "F134", "F149"), words=("gradient",), misleading=("smooth", "eps", "scale_rounding"),
)  # fmt: skip
def gradients_on_top_of_weights(folder: Path) -> None:
    model = Model()

    def before(step: int) -> None:
        if step == 12:
            for p in model.parameters():
                p.grad = p.detach().bfloat16().float()

    train(model, folder / "sick", before=before)


@situation(
    "ROCm/TransformerEngine#665",
    "the transposed cast does not shuffle the codes for the GEMM that expects them so: wgrad's input has them in other places",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("order", "place", "permut", "layout", "rows"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def codes_are_not_shuffled(folder: Path) -> None:
    @altered("wgrad", "input")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        rows, columns = data.shape
        tiles = data.float().reshape(rows // 16, 16, columns // 32, 2, 16)
        return tiles.permute(0, 2, 3, 1, 4).reshape(rows, columns).to(data.dtype), scales

    train(with_fault(fault), folder / "sick")


@situation(
    "AMD-AGI/Primus-Turbo#427",
    "a workspace that is not padded to 256 rows: in dgrad the scales of the last rows are those of the next group",
    first="right", modules=DOWN, gemms=("dgrad",), tensors=("grad_output",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_of_the_next_group(folder: Path) -> None:
    @altered("dgrad", "grad_output")
    def fault(x: Tensor, data: Tensor, scales: Tensor) -> Cast:
        return data, torch.cat([scales[:256], scales[: len(scales) - 256]])

    train(with_fault(fault), folder / "sick")


@situation(
    "NVIDIA/TransformerEngine#1004",
    "communication overwrites the norm's output that was kept for wgrad with the gradient it sends",
    first="misled", modules=UP, gemms=("wgrad",), tensors=("input",), codes=("F112", "F115", "F121", "F128"),
    words=("another tensor", "overw", "buffer"), misleading=("scale layout", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def norm_output_is_overwritten(folder: Path) -> None:
    class Fault(BlockLinear):
        sent: Tensor | None = None

        def product(self, gemm: str, a: Cast, b: Cast, shape: Any) -> Tensor:
            out = super().product(gemm, a, b, shape)
            self.sent = out if gemm == "dgrad" else self.sent
            return out

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) == ("wgrad", "input") and self.sent is not None:
                x = self.sent.t().float()
            return super().cast(gemm, tensor, x)

    train(with_fault(Fault, *UP), folder / "sick")


class _WithoutWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: BlockLinear) -> Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        ctx.save_for_backward(weight)
        first, second = layer.cast("fprop", "input", x), layer.cast("fprop", "weight", weight)
        return layer.product("fprop", first, second, (len(x), len(weight)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,), layer = ctx.saved_tensors, ctx.layer
        first, second = layer.cast("dgrad", "grad_output", grad), layer.cast("dgrad", "weight", weight.t())
        return layer.product("dgrad", first, second, ctx.shape), None, None


@situation(
    "NVIDIA/TransformerEngine#3234",
    "a Linear whose weight is one of a group computes no weight gradient: weight.grad stays None, and the weight where it began",
    first="silent", modules=UP, codes=("F135", "F143", "F149"), words=("gradient",),
    misleading=("smooth", "eps", "scale_rounding", "master"),
)  # fmt: skip
def no_weight_gradient(folder: Path) -> None:
    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = _WithoutWgrad.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
            return out.reshape(*x.shape[:-1], -1)

    train(with_fault(Fault, *UP), folder / "sick")


@situation(
    "NVIDIA/Megatron-LM#6666",
    "on a reload the parameters are made of the FP8 values in the checkpoint, not of the masters: rounded before they are cast",
    first="silent", tensors=("weight",), codes=("F137", "F150"), words=("round", "grid"),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def rounded_by_a_reload(folder: Path) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer)
    masters: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, BlockLinear):
                masters.append((module.weight, module.weight.clone()))
                module.weight.copy_(values(module.cast("fprop", "weight", module.weight)))

    def after_backward(step: int, micro: int) -> None:
        with torch.no_grad():
            for weight, master in masters:  # the optimizer steps with its masters
                weight.copy_(master)
        masters.clear()

    train(model, folder / "sick", steps=24, every=2, optimizer=optimizer, resume_from=24, after_backward=after_backward)
