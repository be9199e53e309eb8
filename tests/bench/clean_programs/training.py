"""Train one clean program as its key says: schedule, decay, clipping, noise, precision, sampling."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn

import fp8debug
from tests.bench.clean_programs.architectures import ARCHITECTURES
from tests.bench.clean_programs.stacks import LOW_BIT_STACKS, STACKS

#: Steps of a long run, and of the others; and how many of them are sampled, about.
LONG, SHORT = 2000, (32, 64)
SAMPLES = 9
#: Stacks whose GEMMs return BF16, whatever their operands.
BF16_RESULTS = ("scaled_mm", "deep_gemm")
#: Runs drawn in torchao's rowwise_with_gw_hp under autocast over FP32 weights: its wgrad multiplies FP32 by BF16 there, which
#: torch refuses with and without a watch. They have BF16 weights instead.
NOT_UNDER_AUTOCAST = ("llama/torchao_rowwise", "multi_token/torchao_rowwise")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is drawn from a run's key.

    Attributes:
        decay: weight decay; with ``to_zero`` so large that weights without a gradient lose 1 % a step.
        precision: ``fp32``, ``autocast`` (FP32 weights, BF16 around the GEMMs), or ``master`` (BF16 weights, written from the
            FP32 copies that the optimizer holds).
    """

    steps: int
    every: int
    optimizer: str
    lr: float
    warmup: int
    schedule: str
    decay: float
    dropout: float
    clip: float | None
    label_noise: float
    microbatches: int
    precision: str
    width: int
    seed: int


def training_of(key: str, *, is_long: bool) -> Training:
    """Return how the run of a key is trained: a function of the key alone."""
    draw = Random(key)
    steps = LONG if is_long else draw.randint(*SHORT)
    lr = draw.choice((5e-4, 1e-3, 2e-3))
    training = Training(
        steps=steps,
        every=steps // (16 if is_long else SAMPLES),
        optimizer=draw.choice(("adamw", "adamw", "adamw", "adam", "sgd", "adafactor")),
        lr=lr,
        warmup=draw.choice((0, 5, 20)),
        schedule=draw.choice(("constant", "cosine", "linear")),
        decay=draw.choice((0.0, 0.1, 0.01 / lr)),
        dropout=draw.choice((0.0, 0.1, 0.3)),
        clip=draw.choice((None, 1.0, 0.1)),
        label_noise=draw.choice((0.0, 0.1, 0.4)),
        microbatches=draw.choice((1, 1, 1, 2)) if not is_long else 1,
        precision=draw.choice(("autocast", "master") if key.endswith(BF16_RESULTS) else ("fp32", "fp32", "autocast", "master")),
        width=32 if is_long else draw.choice((32, 64)),
        seed=draw.randint(0, 10_000),
    )
    return replace(training, precision="master") if key in NOT_UNDER_AUTOCAST else training


def keys() -> dict[str, bool]:
    """Return the 120 runs: every architecture in every stack; True for those of 2,000 steps."""
    found = {}
    for row, architecture in enumerate(ARCHITECTURES):
        for column, stack in enumerate(STACKS):
            found[f"{architecture}/{stack}"] = row % 2 == 1 and column == (3 * row + 2) % len(STACKS)
    return found


def low_bit_keys() -> dict[str, bool]:
    """Return 60 short runs: every architecture in every format of few bits, in MXFP8 and in fnuz."""
    return {f"{architecture}/{stack}": False for architecture in ARCHITECTURES for stack in LOW_BIT_STACKS}


def _rate(training: Training, step: int) -> float:
    """Return the learning rate of a step."""
    if step < training.warmup:
        return training.lr * (step + 1) / (training.warmup + 1)
    share = (step - training.warmup) / max(1, training.steps - training.warmup)
    factor = {"constant": 1.0, "cosine": (1 + math.cos(math.pi * share)) / 2, "linear": 1 - share}[training.schedule]
    return training.lr * factor


def _optimizer(training: Training, params: list[Any]) -> torch.optim.Optimizer:
    if training.optimizer == "sgd":
        return torch.optim.SGD(params, lr=training.lr, momentum=0.9, weight_decay=min(training.decay, 0.1))
    if training.optimizer == "adafactor":
        return torch.optim.Adafactor(params, lr=training.lr, weight_decay=training.decay)
    kind = torch.optim.AdamW if training.optimizer == "adamw" else torch.optim.Adam
    decay = training.decay if training.optimizer == "adamw" else min(training.decay, 0.01)
    return kind(params, lr=training.lr, betas=(0.9, 0.95), weight_decay=decay)


class Masters:
    """FP32 copies of BF16 weights, which the optimizer holds in their place."""

    def __init__(self, model: nn.Module) -> None:
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.copies = [nn.Parameter(p.detach().float().clone()) for p in self.weights]

    def take_gradients(self) -> None:
        """Move the gradients from the weights to the copies."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            copy.grad = None if weight.grad is None else weight.grad.float()
            weight.grad = None

    def write_weights(self) -> None:
        """Write the copies to the weights."""
        with torch.no_grad():
            for weight, copy in zip(self.weights, self.copies, strict=True):
                weight.copy_(copy)


def losses_of(key: str, path: Path, *, is_long: bool, steps: int | None = None) -> Iterator[float]:
    """Train and record the run of a key; yield the loss of each step."""
    training = training_of(key, is_long=is_long)
    architecture, stack = key.split("/")
    torch.manual_seed(training.seed)
    model = ARCHITECTURES[architecture](training.width, training.dropout, training.label_noise, training.seed)
    watched = {**STACKS, **LOW_BIT_STACKS}[stack](model, Random(key + " stack"))
    masters = None
    if training.precision == "master":
        model.bfloat16()
        masters = Masters(model)
    params = masters.copies if masters else [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(training, params)
    use_autocast = training.precision != "fp32"
    with fp8debug.watch(model, path, every=training.every, **watched) as watch:
        for step in range(steps or training.steps):
            for group in optimizer.param_groups:
                group["lr"] = _rate(training, step)
            total = 0.0
            for micro in range(training.microbatches):
                with torch.autocast("cpu", torch.bfloat16) if use_autocast else contextlib.nullcontext():
                    loss = model(step * training.microbatches + micro) / training.microbatches
                loss.backward()
                total += loss.item()
            if masters:
                masters.take_gradients()
            norm = nn.utils.clip_grad_norm_(params, training.clip or math.inf)
            optimizer.step()
            optimizer.zero_grad()
            if masters:
                masters.write_weights()
            watch.step(loss=total, grad_norm=norm, lr=optimizer.param_groups[0]["lr"])
            yield total


def described(key: str, *, is_long: bool) -> dict[str, Any]:
    """Return the drawn settings of a key as JSON values."""
    return asdict(training_of(key, is_long=is_long))
