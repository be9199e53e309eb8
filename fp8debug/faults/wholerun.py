"""Faults of a whole run: ranks that disagree, inference that differs, outliers with depth, loss scale, learning rate."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Ordinary, Target, distort, quantized, undo_all
from fp8debug.kernels.dispatch import Operand
from fp8debug.linear import Fp8Linear
from fp8debug.observer.attributes import stored
from fp8debug.recipes import Cast
from fp8debug.types import Quantized, TensorRole


def this_rank() -> int:
    """Return the global rank of this process."""
    is_set_up = distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if is_set_up else int(os.environ.get("RANK", "0"))


def _rank_scale(where: Target) -> Callable[[], None]:
    ratio, role = float(where.options["ratio"]), TensorRole(where.options["tensor"])

    def change(x: Tensor, cast: Cast, ordinary: Ordinary, options: dict[str, Any]) -> Operand:
        q, cast = quantized(ordinary(x, cast))
        if this_rank() != int(options["rank"]):
            return q, cast
        return Quantized((q.data.float() / ratio).to(q.data.dtype), q.scale_inv * ratio), cast

    return distort(where, change, *(key for key in where.linear.recipe.casts if key[1] is role))


def _stale_inference(where: Target) -> Callable[[], None]:
    linear, weight, factor = where.linear, where.weight, float(where.options["factor"])
    kept: list[Tensor] = []

    def remember(_: nn.Module, args: object) -> None:
        if where.active and not kept:
            kept.append(weight.detach() * factor)

    def infer(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if kept and linear.recipe.is_high_precision and not torch.is_grad_enabled():
            return functional.linear(args[0], kept[0].to(args[0].dtype), linear.bias)
        return None

    hooks = [linear.register_forward_pre_hook(remember), linear.register_forward_hook(infer)]
    return undo_all(*(hook.remove for hook in hooks))


def _depth_outliers(where: Target) -> Callable[[], None]:
    shape = where.weight.shape
    parts = where.name.split(".")
    fp8 = {name: m for name, m in where.model.named_modules() if isinstance(m, Fp8Linear)}
    fp8 = {name: m for name, m in fp8.items() if (w := stored(m, "weight")) is not None and w.shape == shape}
    families = []
    for place in (place for place, part in enumerate(parts) if part.isdecimal()):
        head, tail = parts[:place], parts[place + 1 :]
        split = {name: name.split(".") for name in fp8}
        families.append([n for n, s in split.items() if s[:place] == head and s[place + 1 :] == tail and s[place].isdecimal()])
    layers = max(families, key=len, default=[])
    if len(layers) < 4:
        raise UsageError(f"{where.name} has no twins in at least 4 numbered layers; this fault grows with the layer")
    undo = []
    for depth, name in enumerate(layers, 1):
        options = {"log2_factor": where.options["log2_step"] * depth, "spacing": where.options["spacing"]}
        target = replace(where, module=fp8[name], name=name, options=options)
        undo.append(FAULTS.get("swiglu_outlier").plant(target))

    def undo_all() -> None:
        while undo:
            undo.pop()()

    return undo_all


def _loss_scale(where: Target) -> Callable[[], None]:
    parameter = next(p for p in where.model.parameters() if p.requires_grad)
    calls = [0]

    def overflow(grad: Tensor) -> Tensor | None:
        if not where.active:
            return None
        calls[0] += 1
        return torch.full_like(grad, float("inf")) if calls[0] % int(where.options["period"]) == 0 else None

    hook = parameter.register_hook(overflow)  # type: ignore[no-untyped-call]  # torch's
    undo: Callable[[], None] = hook.remove
    return undo


def _no_gradient(where: Target) -> Callable[[], None]:
    def zero(grad: Tensor) -> Tensor | None:
        return torch.zeros_like(grad) if where.active else None

    def after(_: nn.Module, args: object, output: Any) -> None:
        logits = getattr(output, "logits", output[0] if isinstance(output, tuple) and output else output)
        if isinstance(logits, Tensor) and logits.requires_grad:
            logits.register_hook(zero)  # type: ignore[no-untyped-call]  # torch's

    return where.model.register_forward_hook(after).remove


def _learning_rate(where: Target) -> Callable[[], None]:
    factor = float(where.options["factor"])
    own = {id(p) for p in where.model.parameters()}
    nominal: dict[int, list[Any]] = {}

    def raise_rate(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if where.active and any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
            nominal[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factor

    def restore(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for group, lr in zip(optimizer.param_groups, nominal.pop(id(optimizer), ()), strict=False):
            group["lr"] = lr

    hooks = [register_optimizer_step_pre_hook(raise_rate), register_optimizer_step_post_hook(restore)]
    return undo_all(*(hook.remove for hook in hooks))


for _fault in (
    Fault(
        name="rank_scale",
        code="F114",
        description="one rank takes its amax over another group: its scale differs (TransformerEngine #335, Megatron-LM #442)",
        options={"rank": 1, "ratio": 2.0, "tensor": "weight"},
        plant=_rank_scale,
    ),
    Fault(
        name="stale_inference",
        code="F122",
        description="inference in high precision holds the weight of that step, times a factor (verl #7519)",
        options={"factor": 8.0},
        plant=_stale_inference,
    ),
    Fault(
        name="depth_outliers",
        code="F124",
        description="outlier channels in the inputs of a module's twins, larger with each layer (Ling 2.0, 5.1.1)",
        options={"log2_step": 1.5, "spacing": 128},
        plant=_depth_outliers,
    ),
    Fault(
        name="loss_scale_loop",
        code="F126",
        description="gradients overflow every other step, so that a gradient scaler halves its scale again and again",
        options={"period": 2},
        needs_module=False,
        plant=_loss_scale,
    ),
    Fault(
        name="no_gradient",
        code="F143",
        description="the loss gives a gradient of zeros, as a fused loss kernel that overwrites it (Megatron-LM #1750)",
        options={},
        needs_module=False,
        plant=_no_gradient,
    ),
    Fault(
        name="lr_too_high",
        code="F127",
        description="the optimizer steps with many times the learning rate, as without its warm-up: all of it diverges",
        options={"factor": 300.0},
        needs_module=False,
        plant=_learning_rate,
    ),
):
    FAULTS.add(_fault.name, _fault)
