"""A small mixture of experts whose names say nothing, for tests of what goes by structure."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Expert(nn.Module):
    """A gated expert."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, hidden, bias=False)
        self.b = nn.Linear(width, hidden, bias=False)
        self.c = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(functional.silu(self.a(x)) * self.b(x))
        return out


class Mixture(nn.Module):
    """Top-k choice among experts; ``dense`` runs every expert on every token and masks afterwards."""

    def __init__(self, width: int, hidden: int, num: int, top: int, *, dense: bool = False) -> None:
        super().__init__()
        self.select = nn.Linear(width, num, bias=False)
        self.parts = nn.ModuleList([Expert(width, hidden) for _ in range(num)])
        self.top, self.dense = top, dense

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights = self.select(flat).softmax(-1)
        values, places = weights.topk(self.top)
        out = torch.zeros_like(flat)
        for number, part in enumerate(self.parts):
            share = (values * (places == number)).sum(-1)
            if self.dense:
                out = out + share[:, None] * part(flat)
            else:
                rows = share.nonzero()[:, 0]
                out = out.index_add(0, rows, share[rows, None] * part(flat[rows]))
        return out.reshape(x.shape)


class Layer(nn.Module):
    """Linear and Mixture, each with a residual."""

    def __init__(self, width: int, mixture: Mixture) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)
        self.moe = mixture

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x)
        out: Tensor = x + self.moe(self.norm(x))
        return out


class Routed(nn.Module):
    """Layers of a Linear and a Mixture, and a head: x[..., width] -> [..., classes]."""

    def __init__(
        self, width: int = 64, num: int = 4, top: int = 1, classes: int = 16, *, dense: bool = False, depth: int = 2
    ) -> None:
        super().__init__()
        mixtures = (Mixture(width, 2 * width, num, top, dense=dense) for _ in range(depth))
        self.layers = nn.ModuleList(Layer(width, mixture) for mixture in mixtures)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out
