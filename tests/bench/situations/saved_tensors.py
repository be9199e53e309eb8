"""Activations of the backward pass that were recomputed, offloaded or overwritten."""

from __future__ import annotations

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
    UP,
    Block,
    BlockLinear,
    Cast,
    Model,
    expanded,
    train,
    with_fault,
)


class _Dropout(Block):
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
    4, "allenai/OLMo-core#828",
    "a recomputed forward pass draws another dropout mask: gradients of another sample than the loss's",
    first="silent", codes=("F115",), words=("recompute",), misleading=("eps", "smooth", "bf16"),
)  # fmt: skip
def recomputed_dropout(folder: Path) -> None:
    class Fault(_Dropout):
        keeps = False

    train(Model(block=Fault), folder / "sick")
    train(Model(block=_Dropout), folder / "clean")


@situation(
    4, "NVIDIA/Megatron-LM#7538",
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

    class Again(_Dropout):
        again = True

    train(Model(Fault, block=Again), folder / "sick")


@situation(
    7, "NVIDIA/Megatron-LM#7398",
    "in the first iteration an offloaded input is read back before it has arrived: wgrad gets that of the microbatch before",
    first="incomplete", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F112", "F115", "F121", "F128"),
    words=("another tensor", "older", "stale"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def offloaded_input_read_too_early(folder: Path) -> None:
    class Fault(BlockLinear):
        staging: Tensor | None = None
        num = 0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) == ("wgrad", "input"):
                self.num += 1
                if self.num == 2 and self.staging is not None:
                    return super().cast(gemm, tensor, self.staging)
                self.staging = x.clone()
            return super().cast(gemm, tensor, x)

    train(with_fault(Fault), folder / "sick", micro=2)


@situation(
    7, "modelscope/ms-swift#10157",
    "offloading takes a square activation and its transpose for one tensor: wgrad reads the input untransposed",
    first="right", modules=DOWN, gemms=("wgrad",), tensors=("input",), codes=("F119", "F121", "F128"),
    words=("transpos", "place", "order", "layout"), misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def transpose_taken_for_its_tensor(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            return super().cast(gemm, tensor, x.t() if (gemm, tensor) == ("wgrad", "input") else x)

    train(with_fault(Fault, hidden=320), folder / "sick")


@situation(
    8, "NVIDIA/TransformerEngine#1004",
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


class _Recomputed(Block):
    """A block whose forward pass is recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return out


@situation(
    10, "NVIDIA/TransformerEngine#1568",
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


class _StoredSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, in_fp8: bool) -> Tensor:
        ctx.save_for_backward(*(one.to(E4M3) if in_fp8 else one for one in (gate, up)))
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = (one.to(grad.dtype) for one in ctx.saved_tensors)
        share = torch.sigmoid(gate)
        return grad * up * share * (1 + gate * (1 - share)), grad * gate * share, None


class _StoredBlock(Block):
    """A block that keeps the input of SwiGLU for the backward pass, in FP8 or as it is."""

    in_fp8 = True

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        out: Tensor = x + self.down(_StoredSwiGLU.apply(self.gate(h), self.up(h), self.in_fp8))
        return out


@situation(
    12, "NVIDIA/Megatron-LM#1753",
    "the input of SwiGLU is kept in FP8 for the backward pass by a conversion without a scale: what lies beyond 448 is lost",
    first="silent", modules=("blocks.1.gate", *UP), gemms=("dgrad", "wgrad"), tensors=("grad_output",),
    codes=("F103", "F117", "F125"), words=("outside", "no linear", "activation"),
    misleading=("smooth", "eps", "learning rate", "loss scal", "optimizer"),
)  # fmt: skip
def activation_stored_without_a_scale(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(block=_StoredBlock)
        for block in model.blocks:
            block.in_fp8 = name == "sick"
        with torch.no_grad():  # the outliers of a long training: one channel is hundreds of times as large as the others
            model.blocks[1].up.weight[17] *= 600
            model.blocks[1].down.weight[:, 17] /= 600
        train(model, folder / name, steps=12, every=2)


@situation(
    15, "NVIDIA/TransformerEngine#24",
    "the layer that is recomputed as a whole runs in FP8 in the forward pass, and outside the FP8 context when it is repeated",
    first="silent", codes=("F110", "F111", "F115", "F128"), words=("recompute", "repeat"),
    misleading=("eps", "smooth", "optimizer", "learning rate"),
)  # fmt: skip
def repeated_outside_fp8(folder: Path) -> None:
    class Whole(Block):
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return out

    class Fault(BlockLinear):
        def forward(self, x: Tensor) -> Tensor:
            if torch._C._current_graph_task_id() == -1:
                return super().forward(x)
            return functional.linear(x.bfloat16(), self.weight.bfloat16())

    train(Model(Fault, block=Whole), folder / "sick")
    train(Model(block=Whole), folder / "clean")
