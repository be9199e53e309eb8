"""Faults of the optimizer's step: weights on a coarse grid, moments and counts of steps that are lost, early clipping."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fp8debug.errors import UsageError
from fp8debug.faults.base import FAULTS, Fault, Target, undo_all
from fp8debug.observer.optimizer_hooks import after_any_optimizer, before_any_optimizer


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


def _own_states(where: Target, optimizer: torch.optim.Optimizer) -> list[tuple[Tensor, dict[str, Any]]]:
    """Return the model's parameters that an optimizer holds, with their states."""
    own = {id(p) for p in where.model.parameters()}
    return [(p, optimizer.state[p]) for group in optimizer.param_groups for p in group["params"] if id(p) in own]


def _standing_count(where: Target) -> Callable[[], None]:
    """Round Adam's count of steps to few bits after each step, as a dtype that holds no larger odd number does."""
    bits = int(where.options["bits"])
    lost: dict[Tensor, list[Any]] = {}  # parameter -> the state, and how many steps it lacks

    def keep(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, state in _own_states(where, optimizer) if where.active else ():
            if "step" not in state:
                raise UsageError(f"standing_count needs an optimizer with the state step, got {type(optimizer).__name__}")
            count = float(state["step"])
            mantissa, exponent = math.frexp(count)
            kept = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
            lost.setdefault(parameter, [state, 0.0])[1] += count - kept
            _set_count(state, kept)

    def restore() -> None:
        for state, missing in lost.values():
            _set_count(state, float(state["step"]) + missing)
        lost.clear()

    return undo_all(after_any_optimizer(keep), restore)


def _set_count(state: dict[str, Any], count: float) -> None:
    if isinstance(state["step"], Tensor):
        state["step"].fill_(count)
    else:
        state["step"] = type(state["step"])(count)


def _lost_second_moment(where: Target) -> Callable[[], None]:
    """Put the second moment through a format without small values, once, as saving and loading a checkpoint does."""
    smallest = 2.0 ** -float(where.options["log2_smallest"])
    is_over = [False]

    def reload(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        states = [] if is_over[0] or not where.active else _own_states(where, optimizer)
        for _, state in states:
            if "exp_avg_sq" not in state:
                raise UsageError(f"lost_second_moment needs an Adam that has stepped before, got {type(optimizer).__name__}")
            state["exp_avg_sq"].masked_fill_(state["exp_avg_sq"] <= smallest / 2, 0.0)
            is_over[0] = True

    return before_any_optimizer(reload)


def _emptied_moments(where: Target) -> Callable[[], None]:
    """Begin with an empty state of the optimizer, once, as a resume without its checkpoint does."""
    is_over = [False]

    def empty(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        for parameter, _ in [] if is_over[0] or not where.active else _own_states(where, optimizer):
            del optimizer.state[parameter]
            is_over[0] = True

    return before_any_optimizer(empty)


def _clipped_while_scaled(where: Target) -> Callable[[], None]:
    """Clip to a norm what backward passes left in ``grad``, before the program divided it by its loss scale.

    The norm of a pass is noted as it ends; over that of the gradient that the optimizer gets, of one pass, it is the loss scale.
    Clipping by the norm before the division multiplies the gradients by the same factor as then, so that it may come later.
    """
    limit = float(where.options["limit"])
    norms: dict[int, Tensor] = {}

    def note(parameter: Tensor) -> None:
        if parameter.grad is not None:
            norms[id(parameter)] = torch.linalg.vector_norm(parameter.grad.float())

    def clip(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in norms and p.grad is not None]
        if where.active and held:
            total = torch.linalg.vector_norm(torch.stack([norms[id(p)] for p in held]))
            for p in held:
                p.grad.mul_((limit / total.to(p.device)).clamp(max=1.0))
        norms.clear()

    trained = [p for p in where.model.parameters() if p.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(note) for p in trained]  # type: ignore[no-untyped-call]  # torch's
    return undo_all(before_any_optimizer(clip), *(hook.remove for hook in hooks))


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
    Fault(
        name="standing_count",
        code="F135",
        description="Adam counts its steps in a number of few bits, 8 for BF16, which stands from some step on, and with it the"
        " bias correction (torch.set_default_dtype)",
        options={"bits": 3},
        needs_module=False,
        plant=_standing_count,
    ),
    Fault(
        name="lost_second_moment",
        code="F127",
        description="the second moment goes through a checkpoint in FP16, below whose smallest value, 2^-24, it is 0"
        " (ultralytics #24085); gradients of small models need a larger smallest value",
        options={"log2_smallest": 8.0},
        needs_module=False,
        plant=_lost_second_moment,
    ),
    Fault(
        name="emptied_moments",
        code="F150",
        description="the optimizer's state is empty when a run is resumed at that step: it was not loaded (a class of bug)",
        needs_module=False,
        plant=_emptied_moments,
    ),
    Fault(
        name="clipped_while_scaled",
        code="F126",
        description="gradients are clipped to a norm before they are divided by the loss scale (allennlp #5426)",
        options={"limit": 1.0},
        needs_module=False,
        plant=_clipped_while_scaled,
    ),
):
    FAULTS.add(_fault.name, _fault)
