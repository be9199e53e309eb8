"""Small models and training loops that the recording tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug


class Gated(nn.Module):
    """SwiGLU with biases in one of its layers."""

    def __init__(self, width: int = 64, hidden: int = 192) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Net(nn.Module):
    """Two gated blocks with residuals and a head: x[..., 64] -> [..., 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Gated(), Gated()])
        self.head = nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        out: Tensor = self.head(x)
        return out


def net(recipe: str | None = "blockwise", overrides: dict[str, Any] | None = None) -> Net:
    """Return the same Net every time, converted."""
    torch.manual_seed(0)
    model = Net()
    if recipe:
        fp8debug.convert(model, recipe, overrides=overrides)
    return model


def batch(step: int, rows: int = 96) -> tuple[Tensor, Tensor]:
    """Return (inputs, classes) of a step."""
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(step))
    return x, x[:, :16].argmax(1)


def train(
    model: nn.Module,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int, Tensor], None] | None = None,
) -> list[float]:
    """Train and return the losses; ``after`` is called once per step with the loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        x, classes = batch(step)
        loss = functional.cross_entropy(model(x), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if after:
            after(step, loss)
    return losses


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return every row of a run's stats in the order of its parts; read without DuckDB."""
    parts = sorted(path.glob("rank=*/stats/*.parquet"))
    return [row for part in parts for row in pq.read_table(part, partitioning=None).to_pylist()]


def record(path: Path, model: nn.Module, steps: int = 6, **options: Any) -> fp8debug.Run:
    """Train under a watch that is told every loss, and return the run."""
    options = {"every": 2, **options}
    with fp8debug.watch(model, path, **options) as watch:
        train(model, steps, after=lambda _, loss: watch.step(loss=loss))
    return fp8debug.Run(path)
