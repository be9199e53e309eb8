"""Real trainings whose loss becomes NaN or Inf at step ``AT``, each for another reason, recorded as a user would."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import fp8debug
from tests.recording.models import Net, batch, net

#: Step of the event, and steps of a training.
AT, STEPS = 8, 12
NAN = float("nan")

Loss = Callable[[Tensor, Tensor, int], Tensor]


def _entropy(out: Tensor, classes: Tensor, step: int) -> Tensor:
    return functional.cross_entropy(out, classes)


def _log_of_zero(out: Tensor, classes: Tensor, step: int) -> Tensor:
    """Return a cross entropy whose probability of the class is 0 at the step."""
    probability = functional.softmax(out, dim=-1)[torch.arange(len(classes)), classes]
    return -torch.log(probability * (0.0 if step >= AT else 1.0)).mean() * (1.0 if step < AT else 0.0)


def _overflow(out: Tensor, classes: Tensor, step: int) -> Tensor:
    """Return the cross entropy, told as Inf from the step on: its gradient stays finite."""
    loss = functional.cross_entropy(out, classes)
    return loss + math.inf if step >= AT else loss


class Event:
    """Event in a training.

    Args:
        loss: of an output, classes and step.
        before: called with the model and the step before the forward pass.
        data: what becomes of the inputs at the step.
        gradients: called with the model and the step after the backward pass; True skips the optimizer's step.
    """

    def __init__(
        self,
        loss: Loss = _entropy,
        before: Callable[[Net, int], None] = lambda model, step: None,
        data: Callable[[Tensor], Tensor] = lambda x: x,
        gradients: Callable[[Net, int], bool] = lambda model, step: False,
    ) -> None:
        self.loss, self.before, self.data, self.gradients = loss, before, data, gradients


def _mask(model: Net, step: int) -> None:
    """Add -inf to a whole row, as an attention mask does, between two Linears."""
    if step == AT:
        model.blocks[1].register_forward_pre_hook(lambda _, args: torch.softmax(args[0] - math.inf, -1))


def _explode(model: Net, step: int) -> bool:
    """Scale the gradients as a learning rate far too high would."""
    if step == AT - 1:
        for parameter in model.parameters():
            parameter.data.fill_(1e38)
    return False


def _nan_gradient(model: Net, step: int) -> bool:
    if step == AT - 1:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.fill_(NAN)
    return False


def _recovering(out: Tensor, classes: Tensor, step: int) -> Tensor:
    loss = functional.cross_entropy(out, classes)
    return loss * NAN if step == AT else loss


EVENTS: dict[str, Event] = {
    "nothing": Event(),
    "loss function": Event(loss=_log_of_zero),
    "mask": Event(before=_mask),
    "weights": Event(gradients=_explode),
    "data": Event(data=lambda x: torch.full_like(x, NAN)),
    "zero tile": Event(),
    "optimizer": Event(gradients=_nan_gradient),
    "overflow": Event(loss=_overflow),
    "one step": Event(loss=_recovering, gradients=lambda model, step: step == AT),
}


def record(path: Path, name: str, *, every: int = 1, recipe: str | None = "blockwise", **options: Any) -> fp8debug.Run:
    """Train under a watch until the end, and return the run.

    Args:
        path: of the run.
        name: of the event.
        every: sampled steps.
        recipe: None for a plain model.
        options: of ``watch``.
    """
    event, model = EVENTS[name], net(recipe)
    if name == "zero tile":
        fp8debug.inject(model, "zero_tile", module="blocks.1.up", step=AT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, path, every=every, **options) as watch:
        for step in range(STEPS):
            event.before(model, step)
            x, classes = batch(step)
            loss = event.loss(model(event.data(x) if step >= AT else x), classes, step)
            loss.backward()
            if not event.gradients(model, step):
                optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return fp8debug.Run(path)
