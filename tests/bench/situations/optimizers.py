"""Updates and master weights: rounded away, never applied, made of the wrong buffer."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.bench.situations import situation
from tests.bench.situations.stack import (
    E4M3,
    VOCABULARY,
    BlockLinear,
    Cast,
    InInputType,
    Model,
    copy_plain_run,
    cross_entropy,
    train,
    values,
)


@situation(
    1, "NVIDIA-NeMo/Automodel#3444", "weights in BF16 without FP32 masters: small updates are rounded away", "wrong",
    words=("update", "master"), misleading=("amax_eps",),
)  # fmt: skip
def updates_rounded_away(folder: Path) -> None:
    train(Model(InInputType).bfloat16(), folder / "sick", lr=6e-6)
    train(Model(InInputType), folder / "clean", lr=6e-6)


@situation(
    1, "pytorch/torchtitan#742", "the optimizer's second moment in FP8 with one scale: updates explode", "wrong",
    quiet=True,
)  # fmt: skip
def moments_in_fp8(folder: Path) -> None:
    class Adam(torch.optim.Optimizer):
        def __init__(self, parameters: Any, *, low: bool) -> None:
            super().__init__(parameters, {"lr": 2e-3})
            self.low = low

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                m, v = state.get("m", torch.zeros_like(p)), state.get("v", torch.zeros_like(p))
                m, v = 0.9 * m + 0.1 * p.grad, 0.95 * v + 0.05 * p.grad**2
                if self.low:
                    scale = v.abs().max().clamp(min=1e-30) / 448
                    v = (v / scale).to(E4M3).to(p.dtype) * scale
                state["m"], state["v"] = m, v
                p -= self.param_groups[0]["lr"] * m / (v.sqrt() + 1e-8)

    for name, low in (("sick", True), ("clean", False)):
        model = Model()
        train(model, folder / name, every=2, steps=32, optimizer=Adam(model.parameters(), low=low))


@situation(
    5, "Azure/MS-AMP#112",
    "the optimizer leaves weights that are kept as scaled tensors as they are",
    first="silent", codes=("F135", "F149"), words=("move", "stand", "update"),
    misleading=("eps", "smooth", "master", "stochastic", "bf16"),
)  # fmt: skip
def weights_left_as_they_are(folder: Path) -> None:
    class LeavesOut(torch.optim.Optimizer):
        """Sign descent with momentum, which writes the update of a scaled tensor into a copy."""

        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for group in self.param_groups:
                for p in group["params"]:
                    moment = self.state[p].setdefault("moment", torch.zeros_like(p))
                    moment.lerp_(p.grad, 0.1)
                    target = p.clone() if any(p is one for one in scaled) else p
                    target.sub_(group["lr"] * moment.sign())

    model = Model()
    scaled = [p for module in model.modules() if isinstance(module, BlockLinear) for p in module.parameters()]
    train(model, folder / "sick", optimizer=LeavesOut(model.parameters(), lr=2e-3))
    copy_plain_run(folder / "clean")


@situation(
    6, "NVIDIA/Megatron-LM#5707",
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
    copy_plain_run(folder / "clean")


@situation(
    6, "Nerogar/OneTrainer#996",
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
    7, "NVIDIA/Megatron-LM#2272",
    "FP8 parameters are made from a buffer that the gradients share: from the second step on the weights are gradients",
    first="incomplete", gemms=("fprop",), tensors=("weight",), codes=("F112", "F119", "F121", "F128"),
    words=("another tensor", "older", "not the weight"), misleading=("smooth", "eps", "learning rate"),
)  # fmt: skip
def weights_from_the_gradient_buffer(folder: Path) -> None:
    class Fault(BlockLinear):
        buffer: Tensor | None = None

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if tensor == "weight" and self.buffer is not None:
                x = self.buffer.t() if gemm == "dgrad" else self.buffer
            return super().cast(gemm, tensor, x)

    model = Model(Fault)

    def share(step: int, number: int) -> None:
        for layer in model.modules():
            if isinstance(layer, Fault):
                layer.buffer = layer.weight.grad.clone()  # type: ignore[union-attr]  # after a backward pass

    train(model, folder / "sick", after_backward=share)


@situation(
    9, "NVIDIA/TransformerEngine#1121",
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
    copy_plain_run(folder / "clean")


class _HalfEmbedding(nn.Embedding):
    """An embedding in FP16; tokens below ``unused`` are masked."""

    unused = 5

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.clamp(min=self.unused)).float()


@situation(
    11, "google-deepmind/optax#1754",
    "Adam's eps rounds to zero in FP16: 0 / 0 in the rows of the embedding that no token of the batch reads",
    first="incomplete", modules=("embed", "blocks.0.gate", "blocks.0.up"), words=("embed.weight",),
    misleading=("smooth", "amax", "scale_rounding", "learning rate", "loss scal"),
)  # fmt: skip
def epsilon_rounds_to_zero(folder: Path) -> None:
    for name, eps in (("sick", 1e-8), ("clean", 1e-4)):
        model = Model()
        embed = _HalfEmbedding(VOCABULARY, 128).half()
        with torch.no_grad():
            embed.weight.copy_(model.embed.weight)
        model.embed = embed

        def unmask(step: int, embed: _HalfEmbedding = embed) -> None:
            embed.unused = 5 if step < 8 else 0

        rest = [p for p in model.parameters() if p is not embed.weight]
        groups: list[dict[str, Any]] = [{"params": [embed.weight], "eps": eps}, {"params": rest}]
        optimizer = torch.optim.AdamW(groups, lr=2e-3)
        train(
            model, folder / name, every=2, optimizer=optimizer, before=unmask,
            loss_of=lambda out, classes: cross_entropy(out, classes) * 2.0**12,
        )  # fmt: skip


class _AdamW(torch.optim.Optimizer):
    """AdamW whose count of steps is a tensor of one dtype: that which new tensors have by default."""

    def __init__(self, parameters: Any, lr: float, dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=torch.zeros((), dtype=self.dtype), exp_avg=torch.zeros_like(p))
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["step"] += 1
                correction1, correction2 = 1 - beta1 ** state["step"].float(), 1 - beta2 ** state["step"].float()
                state["exp_avg"].lerp_(p.grad, 1 - beta1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 1 - beta2)
                size = (state["exp_avg_sq"] / correction2).sqrt() + group["eps"]
                p.sub_(lr / correction1 * state["exp_avg"] / size)


@situation(
    12, "pytorch/ao#4915",
    "Adam counts its steps in BF16, where 256 + 1 is 256: the bias correction stays where it was, and updates are too small",
    first="silent", words=("step counter", "counts", "bias correction"),
    misleading=("smooth", "scale_rounding", "stochastic", "master", "learning rate"),
)  # fmt: skip
def count_of_steps_saturates(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        model = Model()
        train(model, folder / name, steps=400, every=20, optimizer=_AdamW(model.parameters(), 5e-4, dtype))


@situation(
    13, "pytorch/pytorch#149205",
    "sharding replaces parameters after the optimizer took them: it steps with tensors that the model no longer has",
    first="silent", modules=("blocks.1.gate", "blocks.1.up", "blocks.1.down"), codes=("F135", "F149"), words=("optimizer",),
    misleading=("smooth", "eps", "master", "stochastic", "learning rate"),
)  # fmt: skip
def parameters_replaced(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        if name == "sick":
            for module in model.blocks[1].modules():
                if isinstance(module, BlockLinear):
                    module.weight = nn.Parameter(module.weight.detach().clone())
        train(model, folder / name, optimizer=optimizer)


@situation(
    13, "pytorch/pytorch#79888",
    "the scheduler knows the groups of its first step alone: layers that are unfrozen later keep their first learning rate",
    first="silent", modules=("blocks.1.gate", "blocks.1.up", "blocks.1.down"), words=("learning rate",),
    misleading=("smooth", "amax", "scale_rounding", "bf16", "loss scal"),
)  # fmt: skip
def learning_rate_of_a_late_group(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        late = list(model.blocks[1].requires_grad_(False).parameters())
        first = [p for p in model.parameters() if not any(p is one for one in late)]
        optimizer = torch.optim.AdamW(first, lr=4e-3)

        def before(step: int, name: str = name, late: Any = late, optimizer: Any = optimizer) -> None:
            if step == 8:
                optimizer.add_param_group({"params": late, "lr": 4e-3})
                for p in late:
                    p.requires_grad_(True)
            for group in optimizer.param_groups[: 1 if name == "sick" else None]:
                group["lr"] = 4e-3 * 0.5 * (1 + math.cos(math.pi * step / 48))

        train(model, folder / name, steps=48, every=3, optimizer=optimizer, before=before)


@situation(
    14, "vllm-project/speculators#765",
    "a model that is wholly in BF16: its norms' weights start from 1 and stay there, as no update reaches half of a spacing",
    first="silent", modules=("blocks.0.norm", "blocks.1.norm", "norm"), codes=("F135",), words=("bf16", "bfloat16"),
    misleading=("smooth", "amax", "scale_rounding", "loss scal", "learning rate"),
)  # fmt: skip
def norm_weights_stay_one(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(InInputType)
        with torch.no_grad():
            model.embed.weight.mul_(0.02)  # as language models start, so that its updates are not lost
        train(model.bfloat16() if name == "sick" else model, folder / name, lr=1e-3)


def _orthogonal(x: Tensor) -> Tensor:
    """Return the nearest semi-orthogonal matrix by five Newton-Schulz iterations in BF16."""
    wide = x.bfloat16() if len(x) <= x.shape[1] else x.bfloat16().t()
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        gram = wide @ wide.t()
        wide = 3.4445 * wide + (-4.775 * gram + 2.0315 * gram @ gram) @ wide
    out: Tensor = (wide if len(x) <= x.shape[1] else wide.t()).float()
    return out


class _NorMuon(torch.optim.Optimizer):
    """Momentum that is orthogonalized, and normalized by row, for matrices of Linears; sign descent for the rest.

    Attributes:
        eps: what the norm of the normalized update is at least.
    """

    def __init__(self, matrices: Any, rest: Any, eps: float) -> None:
        groups = [{"params": list(matrices), "lr": 5e-3}, {"params": list(rest), "lr": 2e-3}]
        super().__init__(groups, {})
        self.eps = eps

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for number, group in enumerate(self.param_groups):
            for p in group["params"]:
                state = self.state[p]
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                if number:
                    p.sub_(group["lr"] * momentum.sign())
                    continue
                update = _orthogonal(momentum.lerp(p.grad, 0.05))
                by_row = state.setdefault("by_row", torch.zeros(len(p), 1))
                by_row.lerp_(update.square().mean(1, keepdim=True), 0.05)
                normalized = update / (by_row.sqrt() + 1e-10)
                normalized *= update.norm() / normalized.norm().clamp(min=self.eps)
                p.sub_(group["lr"] * normalized)


@situation(
    14, "microsoft/dion#24",
    "output projections start from zero, so the first gradients before them are zero: the optimizer divides 0 by 0 for them",
    first="misled", modules=tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("gate", "up")), codes=("F125",),
    words=("optimizer", "update"), misleading=("smooth", "amax", "scale_rounding", "learning rate", "loss scal"),
)  # fmt: skip
def normalized_update_of_zeros(folder: Path) -> None:
    for name, eps in (("sick", 0.0), ("clean", 1e-8)):
        model = Model()
        with torch.no_grad():
            for block in model.blocks:
                block.down.weight.zero_()
        matrices = [module.weight for module in model.modules() if isinstance(module, BlockLinear)]
        rest = [p for p in model.parameters() if not any(p is one for one in matrices)]
        train(model, folder / name, optimizer=_NorMuon(matrices, rest, eps))


@situation(
    15, "tianweiy/CausVid#19",
    "the whole model is cast to BF16, weights too, and trained with the learning rate of FP32: it hardly converges",
    first="right", codes=("F135",), words=("update", "master"), misleading=("amax_eps", "smooth", "scale_rounding"),
)  # fmt: skip
def whole_model_in_bf16(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        model = Model(InInputType).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-6, betas=(0.0, 0.999))
        train(model, folder / name, optimizer=optimizer)


class _QuantizedMoment(torch.optim.Optimizer):
    """AdamW whose first moment is kept in 8 bits: 64 elements of a row share a scale and a least value.

    Attributes:
        is_masked: elements that never had a gradient are left alone.
    """

    def __init__(self, parameters: Any, lr: float, *, is_masked: bool) -> None:
        super().__init__(parameters, {"lr": lr})
        self.is_masked = is_masked

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, moment=self.stored(torch.zeros_like(p)), exp_avg_sq=torch.zeros_like(p))
                state["step"] += 1
                codes, scale, least = state["moment"]
                first = (codes.float() * scale + least).view_as(p).lerp(p.grad, 0.1)
                state["moment"] = self.stored(first)
                second = state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                size = (second / (1 - 0.999 ** state["step"])).sqrt() + 1e-8
                update = first / (1 - 0.9 ** state["step"]) / size
                p.sub_(group["lr"] * (update * (second != 0) if self.is_masked else update))

    @staticmethod
    def stored(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes of 8 bits ``[blocks, 64]``, their scales and their least values."""
        blocks = x.reshape(-1, 64)
        least, most = blocks.aminmax(dim=1, keepdim=True)
        scale = ((most - least) / 255).clamp(min=1e-30)
        return ((blocks - least) / scale).round().to(torch.uint8), scale, least


@situation(
    16, "unslothai/unsloth-zoo#962",
    "the 8-bit first moment of an element without a gradient does not come back as zero, and is divided by eps alone",
    first="silent", modules=("blocks.0.down", "blocks.1.down"), words=("optimizer", "update"),
    misleading=("smooth", "amax", "scale_rounding", "learning rate", "loss scal", "bf16"),
)  # fmt: skip
def moment_of_zero_is_not_zero(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        with torch.no_grad():  # a dead channel in each block: its gradients are zeros
            for block in model.blocks:
                block.gate.weight[5] = 0
                block.down.weight[:, 5] = 0
        optimizer = _QuantizedMoment(model.parameters(), 1e-3, is_masked=name == "clean")
        train(model, folder / name, optimizer=optimizer)
