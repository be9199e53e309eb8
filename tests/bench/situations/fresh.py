"""Fifteen reports that the rules had not been written for: what is right was written before the tool was tried on any of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    DOWN,
    E4M3,
    LARGEST,
    Block,
    BlockLinear,
    Cast,
    Model,
    altered,
    batch,
    cross_entropy,
    quantized,
    rollouts,
    scaled,
    train,
    with_fault,
)


@situation(
    "NVIDIA/TransformerEngine#3070",
    "the padding of MXFP8's scales is read by the GEMM: NaN from finite operands, where a dimension is no multiple of 128",
    first="right", codes=("F103", "F108", "F128"), modules=DOWN, gemms=("fprop",), tensors=("output",),
    words=("gemm", "kernel"), misleading=("amax_eps",),
)  # fmt: skip
def padded_scales(folder: Path) -> None:
    class Fault(BlockLinear):
        def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
            out = super().product(gemm, a, b, shape)
            if gemm == "fprop":
                out[-(shape[0] % 128 or 128) :, :4] = float("nan")
            return out

    train(with_fault(Fault), folder / "sick", steps=6, every=2)


@situation(
    "NVIDIA-NeMo/Megatron-Bridge#4082",
    "FP32 master weights are not loaded with the checkpoint: the first optimizer step writes the random initialization back",
    first="incomplete", quiet=True, words=("weight",),
)  # fmt: skip
def stale_masters(folder: Path) -> None:
    model = fp8debug.convert(Model(nn.Linear), "blockwise", overrides={"head": None})
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(60):  # what the checkpoint holds
        tokens, classes = batch(step)
        cross_entropy(model(tokens), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    small = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def overwrite(step: int) -> None:
        if step == 1:
            with torch.no_grad():
                for p, master in zip(model.parameters(), masters, strict=True):
                    p.copy_(master)

    train(model, folder / "sick", optimizer=small, before=overwrite, steps=30)


@situation(
    "marin-community/marin#7659",
    "gradient accumulation keeps the amax of the last microbatch alone: the delayed scale clips the others",
    first="incomplete", codes=("F101", "F113"), modules=("blocks.0.gate", "blocks.0.up", "blocks.0.down"), gemms=("fprop",),
    tensors=("input",), words=("scale",), misleading=("eps",),
)  # fmt: skip
def amax_of_last_microbatch(folder: Path) -> None:
    calls = [0]

    class Fault(BlockLinear):
        last = 0.0

        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            if (gemm, tensor) != ("fprop", "input"):
                return super().cast(gemm, tensor, x)
            amax = float(x.abs().max())
            scales = torch.full((x.shape[0], -(-x.shape[1] // 128)), (self.last or amax) / LARGEST[E4M3])
            if calls[0] % 4 == 3:  # microbatches differ, as long and short sequences do
                self.last = amax
            return quantized(x.contiguous(), scales, (1, 128)), scales

    class Uneven(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            size = 1.0 if calls[0] % 4 == 3 else 3.0
            x = self.embed(tokens) * size
            for block in self.blocks:
                x = x + block.down(functional.silu(block.gate(x)) * block.up(x))
            out: Tensor = self.head(self.norm(x))
            return out

    model = Uneven()
    for block in model.blocks:
        for name in ("gate", "up", "down"):
            block.get_submodule(name).__class__ = Fault
    train(model, folder / "sick", micro=4, after_backward=lambda step, micro: calls.__setitem__(0, micro + 1))


@situation(
    "HYGON-AI/sglang-das#120",
    "the FP8 path of the rollout engine returns before the bias is added",
    first="incomplete", codes=("F122",), modules=("blocks.0.gate",), words=("bias",),
)  # fmt: skip
def bias_dropped(folder: Path) -> None:
    def drop(engine: Model) -> None:
        gate: Any = engine.blocks[0].gate
        gate.bias = None

    rollouts(folder / "sick", drop, bias=True)
    rollouts(folder / "clean", lambda engine: None, bias=True)


@situation(
    "huggingface/trl#5312",
    "the sleep mode of the rollout engine restores old weights: no module is synchronized",
    first="right", codes=("F122",), words=("synchron",), misleading=("scale",),
)  # fmt: skip
def nothing_synchronized(folder: Path) -> None:
    kept: list[dict[str, Tensor]] = []

    def restore(engine: Any) -> None:
        if not kept:
            kept.append({k: v.clone() for k, v in engine.state_dict().items()})
        engine.load_state_dict(kept[0])

    rollouts(folder / "sick", restore)


@situation(
    "modular/modular#6600",
    "the checkpoint's global scale is a divisor and is multiplied by: every weight of the engine is off by one factor",
    first="misled", codes=("F122",), words=("times", "factor"), misleading=("synchron",),
)  # fmt: skip
def reciprocal_scale(folder: Path) -> None:
    def scale(engine: Any) -> None:
        for block in engine.blocks:
            for linear in (block.gate, block.up, block.down):
                linear.weight.mul_(6.0)

    rollouts(folder / "sick", scale)


@situation(
    "kekzl/imp#89",
    "a static scale is calibrated on synthetic warm-up tokens: real activations clip",
    first="right", codes=("F101", "F113"), modules=DOWN, gemms=("fprop",), tensors=("input",), words=("scale",),
    misleading=("eps", "smooth"),
)  # fmt: skip
def scale_of_warm_up(folder: Path) -> None:
    calibrated: list[float] = []

    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        if not calibrated:
            calibrated.append(float(x.abs().max()) / 8)  # of tokens that are all the same
        return torch.full((x.shape[0], -(-x.shape[1] // 128)), calibrated[0] / LARGEST[E4M3])

    train(with_fault(fault), folder / "sick")


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, classes: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return functional.cross_entropy(logits.float(), classes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return torch.zeros_like(logits), None


@situation(
    "NVIDIA/Megatron-LM#1750",
    "the fused cross entropy writes zeros over its gradient: grad_norm 0, nothing is learned, nothing is NaN",
    first="silent", quiet=True, words=("gradient", "grad_output"),
)  # fmt: skip
def no_gradient(folder: Path) -> None:
    def loss_of(out: Any, classes: Tensor) -> Tensor:
        loss: Tensor = _NoGradient.apply(out, classes)
        return loss

    train(Model(), folder / "sick", loss_of=loss_of)
    train(Model(), folder / "clean")


@situation(
    "sgl-project/sglang#18818",
    "scales are read from a file and never passed on: the cast runs with scale 1, far above small activations",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F102", "F113", "F128"), words=("scale",),
    misleading=("smooth", "eps"),
)  # fmt: skip
def unit_scale(folder: Path) -> None:
    class Small(Block):
        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(x)
            out: Tensor = x + self.down(functional.silu(self.gate(h)) * self.up(h) * 1e-2) * 1e2
            return out

    fault = scaled("fprop", "input")(lambda x: torch.ones(x.shape[0], -(-x.shape[1] // 128)))
    train(with_fault(fault, block=Small), folder / "sick")
    train(Model(block=Small), folder / "clean")


@situation(
    "NVIDIA/TransformerEngine#825",
    "the amax history of a cached FP8 weight rolls in microbatches that do not cast it: its scale moves, its data do not",
    first="silent", modules=DOWN, tensors=("weight",), codes=("F112", "F113"), words=("scale", "microbatch", "cache"),
    misleading=("eps",),
)  # fmt: skip
def scale_of_cached_weight(folder: Path) -> None:
    micro = [0]

    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            data, scales = super().cast(gemm, tensor, x)
            return (data, scales * 2.0) if tensor == "weight" and micro[0] >= 2 else (data, scales)

    train(
        with_fault(Fault), folder / "sick", micro=4, steps=12,
        before=lambda step: micro.__setitem__(0, 0), after_backward=lambda step, number: micro.__setitem__(0, number + 1),
    )  # fmt: skip


@situation(
    "kekzl/imp#91",
    "amax is taken over a buffer wider than the tensor, whose rest is old memory: the scale is far too large",
    first="right", modules=DOWN, gemms=("fprop",), tensors=("input",), codes=("F102", "F113", "F128", "F129"),
    words=("scale",), misleading=("smooth",),
)  # fmt: skip
def amax_of_junk(folder: Path) -> None:
    @scaled("fprop", "input")
    def fault(x: Tensor) -> Tensor:
        junk = 3e4 * (1 + torch.rand(1, generator=torch.Generator().manual_seed(x.shape[1])).item())
        return torch.full((x.shape[0], -(-x.shape[1] // 128)), junk / LARGEST[E4M3])

    train(with_fault(fault), folder / "sick")


@situation(
    "guoqingbao/xinfer#358",
    "a fused weight has a scale for each shard, and the first one is used for all of it",
    first="right", modules=("blocks.0.up",), gemms=("fprop",), tensors=("weight",), codes=("F113", "F119", "F128"),
    words=("scale",), misleading=("eps", "stale", "optimizer"),
)  # fmt: skip
def scale_of_first_shard(folder: Path) -> None:
    fault = altered("fprop", "weight")(lambda x, data, scales: (data, scales[:1].expand_as(scales).contiguous()))

    def unequal(model: Model) -> Model:
        with torch.no_grad():  # the shards of a trained model differ in size
            for block in model.blocks:
                weight: Any = block.up.weight
                weight[128:256] *= 2.7
                weight[256:] *= 0.3
        return model

    train(unequal(with_fault(fault, "blocks.0.up")), folder / "sick")
    train(unequal(Model()), folder / "clean")


@situation(
    "NVIDIA/Megatron-LM#6660",
    "the gradient buffer is added to itself with every microbatch: gradients grow as 2^N",
    first="silent", tensors=("grad_weight",), gemms=("wgrad",), words=("sum", "accumul"), misleading=("eps", "smooth"),
)  # fmt: skip
def doubled_gradients(folder: Path) -> None:
    def record(path: Path, *, sick: bool) -> None:
        model = Model()

        def double(step: int, number: int) -> None:
            if sick and number < 3:
                for p in model.parameters():
                    if p.grad is not None:
                        p.grad.mul_(2)

        train(model, path, micro=4, steps=12, after_backward=double)

    record(folder / "sick", sick=True)
    record(folder / "clean", sick=False)


@situation(
    "NVIDIA/TransformerEngine#524",
    "the transposed FP8 weight is cached over the optimizer step: dgrad multiplies by last step's, fprop by this one's",
    first="right", modules=("blocks.0.down", "blocks.1.down"), gemms=("dgrad",), tensors=("weight",), codes=("F112", "F128"),
    words=("cache", "stale", "older", "step"), misleading=("eps", "smooth"),
)  # fmt: skip
def stale_transpose(folder: Path) -> None:
    class Fault(BlockLinear):
        def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
            made = super().cast(gemm, tensor, x)
            if (gemm, tensor) != ("dgrad", "weight"):
                return made
            kept: list[Cast] = self.__dict__.setdefault("kept", [])
            if not kept:
                kept.append(made)
            return kept[0]

    train(with_fault(Fault), folder / "sick", lr=4e-3)


class _Routed(nn.Module):
    """Top-1 experts: the router is in high precision."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(linear(width, width, bias=bias) for _ in range(4))
        self.jitter = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        h = self.norm(x)
        logits = self.router(h)
        chosen = (logits + self.jitter * torch.randn(logits.shape, generator=torch.Generator().manual_seed(3))).argmax(-1)
        parts = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                parts = parts.index_put((rows.nonzero()[:, 0],), expert(h[rows]).to(x.dtype))
        out: Tensor = x + parts * logits.softmax(-1).gather(1, chosen[:, None])
        return out


@situation(
    "NVIDIA-NeMo/Automodel#2797",
    "router logits of training and rollout differ by rounding: top-k flips, and tokens pass through other experts",
    first="silent", codes=("F122",), modules=(*(f"blocks.0.experts.{i}" for i in range(4)), "blocks.0.router"),
    words=("rout",), misleading=("synchron",),
)  # fmt: skip
def routing_differs(folder: Path) -> None:
    def jitter(engine: Any) -> None:
        for block in engine.blocks:
            block.jitter = 1.0

    rollouts(folder / "sick", jitter, block=_Routed)
    rollouts(folder / "clean", lambda engine: None, block=_Routed)
