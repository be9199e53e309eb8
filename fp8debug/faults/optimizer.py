"""Faults of the optimizer's step: weights that lie on a coarse grid, and a second moment that underflows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Target, undo_all
from fp8debug.observer.optimizer_hooks import after_any_optimizer


def _holds(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    return any(p is parameter for group in optimizer.param_groups for p in group["params"])


def _coarse_weight(where: Target) -> Callable[[], None]:
    weight, bits = where.weight, int(where.options["mantissa_bits"])
    if bits > 22:
        raise UsageError(f"mantissa_bits of coarse_weight is at most 22, of FP32 23 are stored, got {bits}")

    def on_grid(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if where.active and _holds(optimizer, weight):
            with torch.no_grad():
                mantissa, exponent = torch.frexp(weight.float())
                rounded = (mantissa * 2 ** (bits + 1)).round() / 2 ** (bits + 1)
                weight.copy_(rounded * torch.exp2(exponent.float()))

    # Before a step too: a weight that was never rounded has a way to go before it reaches the grid.
    return undo_all(register_optimizer_step_pre_hook(on_grid).remove, after_any_optimizer(on_grid))


def _moment_underflow(where: Target) -> Callable[[], None]:
    weight, most = where.weight, torch.finfo(torch.float8_e4m3fn).max
    kept: list[Tensor] = []

    def remember(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if where.active and _holds(optimizer, weight):
            kept[:] = [weight.detach().clone()]

    def step_again(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        if not kept or not _holds(optimizer, weight):
            return
        before, state = kept.pop(), optimizer.state[weight]
        if "exp_avg_sq" not in state:
            raise UsageError(f"moment_underflow needs an Adam with the state exp_avg_sq, got {type(optimizer).__name__}")
        group = next(group for group in optimizer.param_groups if any(p is weight for p in group["params"]))
        (beta1, beta2), second, num = group["betas"], state["exp_avg_sq"], float(state["step"])
        scale_inv = second.amax().clamp(min=1e-30) / most * 2.0 ** float(where.options["log2_outlier"])
        second.copy_((second / scale_inv).to(torch.float8_e4m3fn).to(second.dtype) * scale_inv)
        root = (second / (1 - beta2**num)).sqrt() + group["eps"]
        with torch.no_grad():
            weight.copy_(before - group["lr"] * (state["exp_avg"] / (1 - beta1**num) / root))

    return undo_all(register_optimizer_step_pre_hook(remember).remove, after_any_optimizer(step_again))


for _fault in (
    Fault(
        name="coarse_weight",
        code="F135",
        description="the optimizer writes into a weight of few mantissa bits, 7 for BF16, without an FP32 copy: most updates"
        " round away (Automodel #3444, ao #1124)",
        options={"mantissa_bits": 3},
        plant=_coarse_weight,
    ),
    Fault(
        name="moment_underflow",
        code="F127",
        description="Adam keeps the second moment in E4M3 with one scale, which an outlier elsewhere in its state sets:"
        " small ones become 0, and the update explodes (torchtitan #742, COAT #3)",
        options={"log2_outlier": 14.0},
        plant=_moment_underflow,
    ),
):
    FAULTS.add(_fault.name, _fault)
