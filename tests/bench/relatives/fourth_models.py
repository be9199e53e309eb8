"""Programs of the fourth set: models that the first three sets do not have.

The models take any Linear: low-rank attention, convolutions as GEMMs, experts of one token each, heads for several tokens, a
generator with its critic, latents that read a long input, a head that is the embedding, a regression.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.relatives.plain import Block, Decoder, Grouped, Make, Swiglu
from tests.bench.relatives.stack import E4M3, VOCABULARY, TensorLinear
from tests.bench.relatives.third_models import begun

WIDTH, HIDDEN = 128, 256


class TensorsOfE4M3(TensorLinear):
    """A Linear with one scale for each tensor, gradients in E4M3 too."""

    gradient_format = E4M3


def _attended(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Return attention of four heads, ``[sequences, length, WIDTH]`` as its operands."""
    q, k, v = (t.unflatten(-1, (4, 32)).transpose(1, 2) for t in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).transpose(1, 2).flatten(2)


class LowRank(nn.Module):
    """Attention whose queries, and whose keys and values, come from a code of 64 values."""

    def __init__(self, linear: Make, *, is_causal: bool = True) -> None:
        super().__init__()
        self.q_down, self.q_up = linear(WIDTH, 64, bias=False), linear(64, WIDTH, bias=False)
        self.kv_down, self.kv_up = linear(WIDTH, 64, bias=False), linear(64, 2 * WIDTH, bias=False)
        self.norm_q, self.norm_kv = nn.RMSNorm(64), nn.RMSNorm(64)
        self.o_proj, self.is_causal = linear(WIDTH, WIDTH, bias=False), is_causal

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[sequences, length, WIDTH]``."""
        q = self.q_up(self.norm_q(self.q_down(x)))
        k, v = self.kv_up(self.norm_kv(self.kv_down(x))).chunk(2, -1)
        said: Tensor = self.o_proj(_attended(q, k, v, self.is_causal))
        return said


class Separate(nn.Module):
    """Attention of four heads whose four projections have the same shape.

    Attributes:
        values: what happens to the values before attention.
    """

    def __init__(self, linear: Make, *, is_causal: bool = True) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.values: Any = lambda v: v
        self.is_causal = is_causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return ``[sequences, length, WIDTH]``."""
        source = x if memory is None else memory
        q, k, v = self.wq(x), self.wk(source), self.values(self.wv(source))
        said: Tensor = self.wo(_attended(q, k, v, self.is_causal))
        return said


class Switch(nn.Module):
    """Eight experts, one for each token, with a balancing loss and the squares of the router's log sums.

    Attributes:
        balance: the loss of the last pass, times ``weight``.
    """

    def __init__(self, linear: Make, *, weight: float = 1e-2) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 8, bias=False)
        self.up = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.down = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(8))
        self.weight, self.balance = weight, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., WIDTH]``."""
        flat = x.reshape(-1, WIDTH)
        logits = self.router(flat).float()
        shares = logits.softmax(-1)
        best, chosen = shares.max(-1)
        out = torch.zeros_like(flat)
        for number, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                made = down(functional.relu(up(flat[rows])))
                out = out.index_add(0, rows, made * best[rows, None].to(flat.dtype))
        load = functional.one_hot(chosen, 8).float().mean(0)
        self.balance = self.weight * (8 * (load * shares.mean(0)).sum() + logits.logsumexp(-1).pow(2).mean())
        return out.reshape(x.shape)


class WithBalance(Decoder):
    """A language model of experts; returns logits, and the sum of what the layers add to the loss."""

    def forward(self, tokens: Tensor) -> Any:
        """Return logits and the balancing loss."""
        return super().forward(tokens), sum(layer.mlp.balance for layer in self.layers)


def with_balance(out: Any, classes: Tensor) -> Tensor:
    """Return the mean loss over tokens and the balancing loss."""
    logits, balance = out
    loss: Tensor = functional.cross_entropy(logits.float().flatten(0, 1), classes.flatten()) + balance
    return loss


class Convolutions(nn.Module):
    """Images ``[images, 8, 8, 8]`` (channels first) through two convolutions of 3 x 3, each one GEMM over its patches."""

    def __init__(self, linear: Make, *, dropout: float = 0.0, seed: int = 61) -> None:
        super().__init__()
        begun(seed)
        self.conv1, self.conv2 = linear(8 * 9, 64, bias=False), linear(64 * 9, WIDTH, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(4, 64), nn.GroupNorm(4, WIDTH)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(WIDTH, 16)

    def convolved(self, x: Tensor, conv: nn.Module, norm: nn.Module, stride: int) -> Tensor:
        """Return ``[images, channels, height, width]``."""
        patches = functional.unfold(x, 3, padding=1, stride=stride).transpose(1, 2)
        made: Tensor = conv(patches)
        side = x.shape[-1] // stride
        out: Tensor = functional.silu(norm(made.transpose(1, 2).unflatten(2, (side, side))))
        return out

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[images, 16]``."""
        x = self.convolved(x, self.conv1, self.norm1, 1)
        x = self.dropout(self.convolved(x, self.conv2, self.norm2, 2))
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def pictures(number: int) -> tuple[Tensor, Tensor]:
    """Return 16 noisy pictures of 16 classes."""
    templates = torch.randn(16, 8, 8, 8, generator=torch.Generator().manual_seed(21))
    random = torch.Generator().manual_seed(21000 + number)
    classes = torch.randint(16, (16,), generator=random)
    return templates[classes] + 1.5 * torch.randn(16, 8, 8, 8, generator=random), classes


class Several(Decoder):
    """Heads for the next three tokens: each has a projection of its own, and all share the last Linear."""

    def __init__(self, linear: Make, mlp: Make = Swiglu, **made: Any) -> None:
        super().__init__(linear, mlp, **made)
        self.future: Any = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, length, 3, VOCABULARY]``."""
        hidden = self.hidden(tokens)
        return torch.stack([self.head(hidden + functional.silu(future(hidden))) for future in self.future], 2)


def several(out: Tensor, classes: Tensor) -> Tensor:
    """Return the mean loss over the heads."""
    losses = [functional.cross_entropy(out[:, : -n or None, n].float().flatten(0, 1), classes[:, n:].flatten()) for n in range(3)]
    return torch.stack(losses).mean()


class Latents(nn.Module):
    """Sixteen latents read 80 tokens by cross-attention, then themselves, and give one class."""

    def __init__(self, linear: Make, *, seed: int = 62) -> None:
        super().__init__()
        begun(seed)
        self.embed, self.latents = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(16, WIDTH) * 0.3)
        self.cross, self.norm1, self.norm2 = Separate(linear, is_causal=False), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.layer: Any = Block(linear, Swiglu, is_causal=False, attention=Separate)
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, 16]``."""
        x = self.latents.expand(len(tokens), -1, -1)
        x = x + self.cross(self.norm1(x), self.norm2(self.embed(tokens)))
        out: Tensor = self.head(self.norm(self.layer(x)).mean(1))
        return out


def counted(number: int) -> tuple[Tensor, Tensor]:
    """Return 24 sequences of 80 tokens, whose class is the group of which they have most."""
    random = torch.Generator().manual_seed(22000 + number)
    classes = torch.randint(16, (24,), generator=random)
    tokens = torch.randint(VOCABULARY, (24, 80), generator=random)
    own = classes[:, None] * 4 + torch.randint(4, tokens.shape, generator=random)
    return torch.where(torch.rand(tokens.shape, generator=random) < 0.3, own, tokens), classes


class TiedHead(nn.Module):
    """A language model whose head is a Linear with the weight of the embedding."""

    def __init__(self, linear: Make, *, depth: int = 1, seed: int = 63) -> None:
        super().__init__()
        begun(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers: Any = nn.ModuleList(Block(linear, Swiglu, attention=Grouped) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x))
        return out


class Regression(nn.Module):
    """Four Linears from 64 numbers to one."""

    def __init__(self, linear: Make, *, seed: int = 64) -> None:
        super().__init__()
        begun(seed)
        self.fc1, self.fc2 = linear(64, HIDDEN, bias=False), linear(HIDDEN, HIDDEN, bias=False)
        self.fc3, self.out = linear(HIDDEN, WIDTH, bias=False), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[samples]``."""
        x = functional.silu(self.fc2(functional.silu(self.fc1(x))))
        out: Tensor = self.out(functional.silu(self.fc3(x)))
        return out[:, 0].float()


def table(number: int) -> tuple[Tensor, Tensor]:
    """Return 192 samples and what they are worth."""
    random = torch.Generator().manual_seed(23000 + number)
    x = torch.randn(192, 64, generator=random)
    return x, x[:, :4].sum(-1) / 2 + x[:, 4] * x[:, 5] + 0.1 * torch.randn(192, generator=random)
