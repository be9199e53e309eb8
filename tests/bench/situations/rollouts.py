"""Inference engines that compute other than the training does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import (
    Block,
    Model,
    batch,
    rollouts,
    train,
)


@situation(
    1, "PrimeIntellect-ai/prime-rl#2438", "the rollout engine caches one weight, which later updates leave behind", "wrong",
    codes=("F122",), modules=("head",), words=("weight",),
)  # fmt: skip
def stale_head_in_rollout(folder: Path) -> None:
    first = Model(nn.Linear).head.weight.detach()
    rollouts(folder / "sick", lambda engine: engine.head.weight.copy_(first), steps=32)


@situation(
    2, "HYGON-AI/sglang-das#120",
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
    2, "huggingface/trl#5312",
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
    2, "modular/modular#6600",
    "the checkpoint's global scale is a divisor and is multiplied by: every weight of the engine is off by one factor",
    first="misled", codes=("F122",), words=("times", "factor"), misleading=("synchron",),
)  # fmt: skip
def reciprocal_scale(folder: Path) -> None:
    def scale(engine: Any) -> None:
        for block in engine.blocks:
            for linear in (block.gate, block.up, block.down):
                linear.weight.mul_(6.0)

    rollouts(folder / "sick", scale)


class _Routed(nn.Module):
    """Top-1 experts: the router is in high precision.

    Attributes:
        jitter: what is added to the router's logits.
        power: how often the router's weight of a token multiplies its expert's result.
    """

    power = 1

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
        out: Tensor = x + parts * logits.softmax(-1).gather(1, chosen[:, None]) ** self.power
        return out


@situation(
    2, "NVIDIA-NeMo/Automodel#2797",
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


@situation(
    11, "verl-project/verl#7519",
    "the rollout engine matches names by a part of them: its list of routers excludes gate and up projections, which run in BF16",
    first="silent", codes=("F122",), modules=("blocks.0.gate", "blocks.0.up"), words=("bf16", "high precision", "fp8", "format"),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def gate_and_up_excluded_in_rollout(folder: Path) -> None:
    def spoil(engine: Any) -> None:
        for block in engine.blocks:
            for name in ("gate", "up"):
                made = getattr(block, name)
                plain = nn.Linear(made.in_features, made.out_features, bias=False)
                plain.weight.copy_(made.weight)
                setattr(block, name, plain)

    rollouts(folder / "sick", spoil)


@situation(
    11, "InternLM/xtuner#2044",
    "training casts the FP32 masters, the rollout engine casts them as they were exported, in BF16: other codes near the ties",
    first="silent", codes=("F122",), tensors=("weight",), words=("bf16", "rounded"),
    misleading=("smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def cast_after_an_export_in_bf16(folder: Path) -> None:
    def spoil(engine: Any) -> None:
        for p in engine.parameters():
            p.copy_(p.bfloat16())

    rollouts(folder / "sick", spoil)


@situation(
    12, "vllm-project/vllm#33088",
    "the rollout engine averages the partial results of a row-parallel Linear over two ranks, which are to be summed",
    first="right", codes=("F122",), modules=("blocks.0.down",), words=("factor", "times", "0.5", "half", "sum"),
    misleading=("synchron", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def partial_results_are_averaged(folder: Path) -> None:
    def average(engine: Any) -> None:
        for block in engine.blocks:
            block.down.register_forward_hook(lambda module, args, out: out / 2)

    rollouts(folder / "sick", average)
    rollouts(folder / "clean", lambda engine: None)


class _Rotary(nn.Module):
    """Causal attention of two heads under rotary position embeddings, whose frequencies are a buffer."""

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
        self.out = linear(width, width, bias=bias)
        self.num_freq = width // 4
        self.register_buffer("inv_freq", self.frequencies().bfloat16())

    def frequencies(self) -> Tensor:
        """Return the frequencies as they are meant, FP32."""
        out: Tensor = 10000.0 ** (-torch.arange(self.num_freq) / self.num_freq)
        return out

    def turned(self, x: Tensor) -> Tensor:
        """Return ``[heads, tokens, width of a head]`` turned by position."""
        angles = torch.arange(x.shape[1])[:, None] * self.inv_freq.float()  # type: ignore[operator]  # a buffer
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(0, 1) for one in self.qkv(self.norm(x)).float().chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(0, 1).flatten(-2).to(x.dtype))
        return out


@situation(
    12, "NVIDIA-NeMo/Automodel#2549",
    "casting the model rounds the rotary frequencies to BF16 in training, the other engine keeps them in FP32",
    first="silent", codes=("F122",), modules=("blocks.0.out",), words=("between", "attention", "no linear", "buffer", "position"),
    misleading=("synchron", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def rotary_frequencies_in_bf16(folder: Path) -> None:
    def keep(engine: Any) -> None:
        for block in engine.blocks:
            block.inv_freq = block.frequencies()

    rollouts(folder / "sick", keep, block=_Rotary)
    rollouts(folder / "clean", lambda engine: None, block=_Rotary)


@situation(
    13, "d8ahazard/sd_dreambooth_extension#1415",
    "the average of the weights that inference uses is kept in BF16: what a step adds to it rounds away, and it stands still",
    first="false alarm", codes=("F122",), words=("older", "synchron", "stand", "earlier"),
    misleading=("smooth", "eps", "learning rate"),
)  # fmt: skip
def average_in_bf16(folder: Path) -> None:
    for name, dtype in (("sick", torch.bfloat16), ("clean", torch.float32)):
        averages: dict[str, Tensor] = {}
        model = Model(nn.Linear)
        fp8debug.convert(model, "blockwise", overrides={"head": None})
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)

        def after(step: int, watch: Any, model: Any = model, averages: Any = averages, dtype: Any = dtype) -> None:
            for key, value in model.state_dict().items():
                average = averages.setdefault(key, value.to(dtype, copy=True))
                average.mul_(0.99).add_(value.to(dtype), alpha=0.01)
            if (step + 1) % 100 == 0:

                def average_of(tokens: Tensor) -> Tensor:
                    other = copy.deepcopy(model)
                    other.load_state_dict(averages)
                    with torch.no_grad():
                        out: Tensor = other(tokens)
                    return out

                watch.compare_inference(batch(999)[0], inference=average_of)

        train(model, folder / name, steps=400, every=50, optimizer=optimizer, after=after)


class _Cached(nn.Module):
    """Causal attention of two heads; a rollout engine keeps keys and values in FP8 under one scale each.

    Attributes:
        scales: of keys and values in the engine; None in training, which does not cast them.
    """

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
        self.out = linear(width, width, bias=bias)
        self.scales: tuple[float, float] | None = None

    def parts(self, x: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values ``[tokens, width]``."""
        out: Sequence[Tensor] = self.qkv(self.norm(x)).float().chunk(3, -1)
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        q, k, v = self.parts(x)
        if self.scales is not None:
            k, v = (
                (one / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
                for one, scale in zip((k, v), self.scales, strict=True)
            )
        q, k, v = (one.unflatten(-1, (2, -1)).transpose(0, 1) for one in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = x + self.out(mixed.transpose(0, 1).flatten(-2).to(x.dtype))
        return out


@situation(
    14, "ai-dynamo/modelexpress#783",
    "a refit replaces the scales of keys and values, and the attention kernel goes on with those of the engine's dummy weights",
    first="silent", codes=("F122",), modules=("blocks.0.out",), words=("between", "attention", "no linear"),
    misleading=("synchron", "smooth", "eps", "optimizer", "learning rate"),
)  # fmt: skip
def cache_scales_of_the_dummy_weights(folder: Path) -> None:
    def refit(engine: Any, *, is_stale: bool) -> None:
        x = engine.embed(batch(998)[0])
        for block in engine.blocks:
            _, k, v = block.parts(x)
            shrink = 1e-3 / float(block.qkv.weight.abs().amax()) if is_stale else 1.0
            block.scales = (float(k.abs().amax()) * shrink / 448, float(v.abs().amax()) * shrink / 448)
            x = block(x)

    rollouts(folder / "sick", lambda engine: refit(engine, is_stale=True), block=_Cached)
    rollouts(folder / "clean", lambda engine: refit(engine, is_stale=False), block=_Cached)


class _Timed(Block):
    """A block conditioned on the noise level of each token, by its place on a schedule of some points."""

    points = 15

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(len(x)) % 13
        angles = 1000 * torch.linspace(1, 0, self.points)[places][:, None] * 10000.0 ** (-torch.arange(64) / 64)
        return super().forward(x + torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))


@situation(
    15, "verl-project/verl-omni#280",
    "the rollout engine's schedule has a point less than the trainer's: it conditions the model on other noise levels",
    first="silent", codes=("F122",), modules=("blocks.0.gate", "blocks.0.up"), tensors=("input",),
    words=("between", "no linear", "before it", "outside", "its input"),
    misleading=("synchron", "smooth", "eps", "optimizer", "learning rate", "scale"),
)  # fmt: skip
def rollout_on_another_schedule(folder: Path) -> None:
    def shorten(engine: Any) -> None:
        for block in engine.blocks:
            block.points = 14

    rollouts(folder / "sick", shorten, block=_Timed)
    rollouts(folder / "clean", lambda engine: None, block=_Timed)


@situation(
    16, "ROCm/ATOM#2028",
    "the rollout engine converts weights to its own FP8 format again with every refit, and doubles their scales each time",
    first="right", codes=("F122",), words=("times", "factor"),
    misleading=("synchron", "smooth", "amax_eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_double_with_every_refit(folder: Path) -> None:
    num = [0]

    def convert(engine: Any) -> None:
        num[0] += 1
        for block in engine.blocks:
            for linear in (block.gate, block.up, block.down):
                linear.weight.mul_(2.0 ** num[0])

    rollouts(folder / "sick", convert)


@situation(
    16, "vllm-project/vllm#43694",
    "the engine's experts apply the router's weights to their results, though their inputs have had them: twice in all",
    first="incomplete", codes=("F122",),
    modules=(*(f"blocks.0.experts.{i}" for i in range(4)), "blocks.1.router", *(f"blocks.1.experts.{i}" for i in range(4))),
    words=("between", "no linear", "before it", "outside", "its input", "rout"),
    misleading=("synchron", "smooth", "amax_eps", "optimizer", "learning rate"),
)  # fmt: skip
def routing_weights_are_applied_twice(folder: Path) -> None:
    def twice(engine: Any) -> None:
        for block in engine.blocks:
            block.power = 2

    rollouts(folder / "sick", twice, block=_Routed)
    rollouts(folder / "clean", lambda engine: None, block=_Routed)


@situation(
    17, "modelscope/ms-swift#8427",
    "the rollout engine's probabilities are those of logits divided by the temperature, the trainer's are of logits as they are",
    first="incomplete", codes=("F122",), words=("temperature", "times", "factor"),
    misleading=("synchron", "smooth", "amax_eps", "optimizer", "learning rate", "dequantized"),
)  # fmt: skip
def logits_without_the_temperature(folder: Path) -> None:
    rollouts(folder / "sick", lambda engine: engine.register_forward_hook(lambda module, args, out: out / 0.6))
    rollouts(folder / "clean", lambda engine: None)


class _Dropped(Block):
    """A block whose results lose some elements while it trains."""

    rate = 0.1

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(super().forward(x) - x, self.rate, self.training)


@situation(
    17, "Human-Agent-Society/reef#536",
    "the trainer's adapter leaves the framework's dropout of 0.1 on, which the model does not have: other logits than rollouts'",
    first="silent", codes=("F122",), words=("dropout", "random", "between", "no linear", "before it", "outside", "its input"),
    misleading=("synchron", "smooth", "amax_eps", "optimizer", "learning rate"),
)  # fmt: skip
def dropout_in_the_trainer_alone(folder: Path) -> None:
    class Clean(_Dropped):
        rate = 0.0

    rollouts(folder / "sick", lambda engine: engine.eval(), block=_Dropped)
    rollouts(folder / "clean", lambda engine: engine.eval(), block=Clean)


@situation(
    17, "PrimeIntellect-ai/prime-rl#3112",
    "the trainer rounds scales to powers of two, as another device needs them, and the rollout engine does not: coarser casts",
    first="silent", codes=("F122",), words=("power", "scale", "recipe"),
    misleading=("synchron", "smooth", "amax_eps", "optimizer", "learning rate"),
)  # fmt: skip
def scales_of_another_device(folder: Path) -> None:
    def exact(engine: Any) -> None:
        fp8debug.convert(engine, "blockwise", overrides={"head": None})

    rollouts(folder / "sick", exact, recipe="blockwise_pow2")
    rollouts(folder / "clean", lambda engine: None, recipe="blockwise_pow2")
