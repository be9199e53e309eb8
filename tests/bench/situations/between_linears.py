"""Attention and norms: what a model computes between its Linears in low precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.bench.situations import situation
from tests.bench.situations.stack import UP, Model, train

#: Sequences of a batch of 320 tokens, and the tokens of each; the first ``PADDING`` of every second sequence are padding.
SEQUENCES, LENGTH, PADDING = 8, 40, 6


class _Padded(nn.Module):
    """Causal attention of two heads over sequences that are padded on the left, with a mask that is added to BF16 scores."""

    masked = -torch.inf

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.RMSNorm(width), linear(width, 3 * width, bias=bias)
        self.out = linear(width, width, bias=bias)

    def mask(self) -> Tensor:
        """Return what is added to the scores ``[sequences, 1, queries, keys]``."""
        late = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        padded = torch.zeros(SEQUENCES, 1, 1, LENGTH, dtype=torch.bool)
        padded[1::2, ..., :PADDING] = True
        return torch.zeros(SEQUENCES, 1, LENGTH, LENGTH, dtype=torch.bfloat16).masked_fill(late | padded, self.masked)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        parts = self.qkv(self.norm(x)).unflatten(0, (SEQUENCES, LENGTH)).unflatten(-1, (6, -1)).transpose(1, 2)
        q, k, v = (one.bfloat16() for one in parts.chunk(3, 1))
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 + self.mask()
        mixed = scores.float().softmax(-1).to(v.dtype) @ v
        out: Tensor = x + self.out(mixed.transpose(1, 2).flatten(-2).flatten(0, 1).to(x.dtype))
        return out


@situation(
    13, "pytorch/pytorch#103749",
    "attention over padded sequences: the mask of -Inf leaves a query of padding no key at all, and its softmax is 0 / 0",
    first="right", modules=("blocks.0.out",), gemms=("fprop",), tensors=("input",), codes=("F125",),
    words=("attention", "no linear", "outside"), misleading=("smooth", "amax_eps", "learning rate", "loss scal", "optimizer"),
)  # fmt: skip
def masked_whole(folder: Path) -> None:
    class Clean(_Padded):
        masked = torch.finfo(torch.bfloat16).min

    train(Model(block=_Padded), folder / "sick", steps=12, every=2)
    train(Model(block=Clean), folder / "clean", steps=12, every=2)


class _HalfNorm(nn.RMSNorm):
    """A norm that squares its input in the input's dtype, FP16; in FP32 where ``upcasts``."""

    upcasts = False

    def forward(self, x: Tensor) -> Tensor:
        half = x.half()
        squares = half.float().square() if self.upcasts else half.square()
        out: Tensor = half * torch.rsqrt(squares.float().mean(-1, keepdim=True) + 1e-6).to(half.dtype)
        return out.float() * self.weight


@situation(
    13, "pytorch/pytorch#133085",
    "RMSNorm squares its input in FP16: what is larger than 256 becomes Inf there, and its token leaves the norm as zeros",
    first="silent", modules=("blocks.1.gate", *UP), gemms=("fprop",), tensors=("input",), words=("norm", "fp16"),
    misleading=("smooth", "amax_eps", "learning rate", "loss scal", "optimizer", "scale_rounding"),
)  # fmt: skip
def squares_of_a_norm_overflow(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        norm = _HalfNorm(128)
        norm.upcasts = name == "clean"
        model.blocks[1].norm = norm
        with torch.no_grad():  # some tokens have one outlier in the residual stream, as a long training leaves them
            model.embed.weight[:12, 17] = 300.0
        train(model, folder / name, steps=16, every=2)
