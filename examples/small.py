"""Shared by the examples of trainers and backends: a small gated network, its data, their options and last line."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional


class Gated(nn.Module):
    """x[..., width] -> logits[..., 16]."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + self.down(functional.silu(self.gate(x)) * self.up(x)))
        return out


class Batches(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Inputs and classes, the same every time."""

    def __init__(self, count: int, width: int = 64) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(256, self.width, generator=torch.Generator().manual_seed(index))
        return x, x[:, :16].argmax(1)


def options_of(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all of them have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=out, help="the run's folder, replaced if it is there")
    parser.add_argument("--steps", type=int, default=20)
    return parser


def fresh(out: str) -> Path:
    """Return a run's folder, without the run of an earlier start."""
    shutil.rmtree(out, ignore_errors=True)
    return Path(out)


def say_where(path: Path) -> None:
    """Print what to look at."""
    print(f"{path}: fp8debug coverage {path}; fp8debug triage {path}")
