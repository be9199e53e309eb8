"""The training loop of tests that compare a watched training with one alone: no bit of what it returns may differ."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fp8debug


def watched(net: nn.Module, path: Path | None, **options: Any) -> AbstractContextManager[Any]:
    """Return a watch that records into the folder, or a context of None where there is none."""
    return nullcontext() if path is None else fp8debug.watch(net, path, **options)


def losses_of(
    net: nn.Module,
    loss_of: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float = 0.1,
    optimizer: torch.optim.Optimizer | None = None,
    watch: Any = None,
) -> list[float]:
    """Train, by SGD unless an optimizer is given, and return the losses.

    Args:
        net: what is trained.
        loss_of: takes the step.
        steps: how many.
        lr: of SGD.
        optimizer: in its place.
        watch: under which it trains.
    """
    optimizer = optimizer or torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=lr)
    losses = []
    for step in range(steps):
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.step(loss=loss)
    return losses


def losses_and_parameters(net: nn.Module, loss_of: Callable[[int], Tensor], **options: Any) -> list[Any]:
    """Train as :func:`losses_of` does, and return the losses and copies of the parameters."""
    return [losses_of(net, loss_of, **options), [p.detach().clone() for p in net.parameters()]]
