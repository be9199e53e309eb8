"""Attention, norms, pooling and the loss: what a model computes between its Linears in low precision."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations import situation
from tests.bench.situations.stack import UP, VOCABULARY, Block, Model, batch, cross_entropy, train

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


class _Normalized(torch.autograd.Function):
    """RMSNorm whose backward pass may write the gradient of its input into that of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, is_in_place: bool) -> Tensor:
        factor = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, factor)
        ctx.is_in_place = is_in_place
        return (x * factor).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, factor = ctx.saved_tensors
        into, unit = grad * weight, x * factor
        into_weight = (grad * unit).sum(0)
        into = factor * (into - unit * (into * unit).mean(-1, keepdim=True))
        return (grad.copy_(into) if ctx.is_in_place else into.to(grad.dtype)), into_weight, None


class _Sandwich(nn.Module):
    """A gated MLP between two norms, the second of which the residual stream adds."""

    is_in_place = True

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.after = nn.RMSNorm(width), nn.RMSNorm(width)
        self.gate, self.up = (linear(width, hidden, bias=bias) for _ in range(2))
        self.down = linear(hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        h = _Normalized.apply(x, self.norm.weight, self.is_in_place)
        mixed = self.down(functional.silu(self.gate(h)) * self.up(h)).to(x.dtype)
        out: Tensor = x + _Normalized.apply(mixed, self.after.weight, self.is_in_place)
        return out


@situation(
    14, "linkedin/Liger-Kernel#376",
    "a norm's backward pass writes into the gradient that it gets, which the residual stream before it still needs",
    first="silent", quiet=True, words=("residual", "in place", "overwrit", "between the linears", "between linears"),
)  # fmt: skip
def norm_overwrites_the_gradient(folder: Path) -> None:
    class Clean(_Sandwich):
        is_in_place = False

    train(Model(block=_Sandwich), folder / "sick")
    train(Model(block=Clean), folder / "clean")


class _Balanced(nn.Module):
    """Two of four experts for each token, chosen by the router's scores and a bias that balances their loads."""

    dtype = torch.bfloat16

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(linear(width, width, bias=bias) for _ in range(4))
        start = torch.tensor([0.75, 0.625, 0.75, 0.625], dtype=self.dtype)  # of a checkpoint
        self.register_buffer("expert_bias", start)
        self.loads = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        h = self.norm(x)
        scores = self.router(h).sigmoid()
        chosen = (scores + self.expert_bias).topk(2, -1).indices
        self.loads = torch.bincount(chosen.flatten(), minlength=4).float()
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1).nonzero()[:, 0]
            if len(rows):
                part = expert(h[rows]).to(x.dtype) * scores[rows, number : number + 1]
                out = out.index_add(0, rows, part)
        return out

    def balance(self) -> None:
        """Move the bias of each expert by 0.001 against its load."""
        bias: Any = self.expert_bias
        bias.add_(1e-3 * (self.loads.mean() - self.loads).sign())


@situation(
    14, "NVIDIA/Megatron-LM#1482",
    "casting the model casts the router's balancing bias to BF16, in which steps of 0.001 round away: loads stay uneven",
    first="silent", quiet=True, words=("expert_bias", "buffer", "balanc"),
)  # fmt: skip
def expert_bias_in_bf16(folder: Path) -> None:
    class Clean(_Balanced):
        dtype = torch.float32

    for name, block in (("sick", _Balanced), ("clean", Clean)):
        model = Model(block=block)

        def balance(step: int, watch: Any, model: Any = model) -> None:
            for one in model.blocks:
                one.balance()

        train(model, folder / name, steps=96, every=8, after=balance)


class _Context(Block):
    """A block that adds the mean over all tokens to each of them; the sum is FP16, or FP32 where ``upcasts``."""

    upcasts = False

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.upcasts else x.half()
        mean = h.sum(0).float() / len(x)
        return super().forward(x + mean)


@situation(
    15, "motional/nuplan-devkit#91",
    "sums of features overflow in FP16: Inf there, and the loss is NaN",
    first="incomplete", modules=("blocks.1.gate", *UP), gemms=("fprop",), tensors=("input",), codes=("F125",),
    words=("fp16", "overflow", "range"), misleading=("smooth", "amax_eps", "learning rate", "optimizer", "scale_rounding"),
)  # fmt: skip
def sums_overflow_in_fp16(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model(block=_Context)
        for block in model.blocks:
            block.upcasts = name == "clean"
        with torch.no_grad():  # a channel of one sign whose sum over a batch comes near 65504
            model.embed.weight[:, 17] = torch.linspace(20.0, 180.0, VOCABULARY)
        train(model, folder / name, steps=20, every=2)


class _StatisticsPooling(nn.Module):
    """Attentive pooling of mean and standard deviation over each sequence, in FP16, with a least variance."""

    least = 1e-10

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(width), linear(width, hidden, bias=bias)
        self.down = linear(2 * hidden, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[tokens, width]``."""
        h = self.gate(self.norm(x)).relu().half().unflatten(0, (SEQUENCES, LENGTH))
        share = h.softmax(1)
        mean = (share * h).sum(1)
        spread = ((share * h.square()).sum(1) - mean.square()).clamp(min=self.least).sqrt()
        pooled = self.down(torch.cat([mean, spread], -1).float())
        out: Tensor = x + pooled.repeat_interleave(LENGTH, 0).to(x.dtype)
        return out


@situation(
    15, "wenet-e2e/wespeaker#133",
    "the least variance of a pooling, 1e-10, is zero in FP16: the gradient of its root is Inf, and every step is skipped",
    first="misled", modules=("blocks.1.gate",), gemms=("dgrad", "wgrad"), tensors=("grad_output",), codes=("F125", "F126"),
    words=("no linear", "outside", "between"),
    misleading=("smooth", "amax_eps", "learning rate", "optimizer", "lower the loss scale", "scale_rounding"),
)  # fmt: skip
def least_variance_rounds_to_zero(folder: Path) -> None:
    for name, least in (("sick", 1e-10), ("clean", 1e-7)):
        model, scale = Model(block=_StatisticsPooling), 2.0**8
        for block in model.blocks:
            block.least = least
        with torch.no_grad():  # a dead channel
            for block in model.blocks:
                block.gate.weight[5] = 0
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        with fp8debug.watch(model, folder / name, every=3) as watch:
            for step in range(24):
                tokens, classes = batch(step)
                loss = cross_entropy(model(tokens), classes)
                (loss * scale).backward()
                given = [p.grad for p in model.parameters() if p.grad is not None]
                used = scale
                if all(bool(g.isfinite().all()) for g in given):
                    for g in given:
                        g.div_(scale)
                    optimizer.step()
                else:
                    scale /= 2
                optimizer.zero_grad()
                watch.step(loss=loss, loss_scale=used)


@situation(
    15, "deepspeedai/DeepSpeedExamples#754",
    "the loss is computed in the BF16 of the logits: it and its gradient are rounded",
    first="silent", quiet=True, words=("loss is in bf16", "loss in bf16", "loss is bf16", "computed in bf16", "rounded to bf16"),
)  # fmt: skip
def loss_of_bf16_logits(folder: Path) -> None:
    def in_bf16(out: Tensor, classes: Tensor) -> Tensor:
        return functional.cross_entropy(out.bfloat16(), classes)

    train(Model(), folder / "sick", loss_of=in_bf16, steps=40)
    train(Model(), folder / "clean", steps=40)


class _TypesEps(nn.RMSNorm):
    """A norm of BF16 whose eps is, where none is given, that of its input's type: 2^-7."""

    given: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        narrow = x.bfloat16()
        eps = torch.finfo(narrow.dtype).eps if self.given is None else self.given
        out: Tensor = narrow.float() * torch.rsqrt(narrow.float().square().mean(-1, keepdim=True) + eps)
        return out.to(narrow.dtype).float() * self.weight


@situation(
    17, "pytorch/pytorch#189581",
    "RMSNorm's eps is by default BF16's own, 0.0078: small inputs leave it far below a mean square of 1",
    first="silent", quiet=True, words=("epsilon", "eps is", "norm's eps", "mean square", "not normalized"),
)  # fmt: skip
def eps_of_the_norms_type(folder: Path) -> None:
    for name in ("sick", "clean"):
        model = Model()
        with torch.no_grad():
            model.embed.weight.mul_(0.02)  # as language models start
        for owner in (*model.blocks, model):
            owner.norm = _TypesEps(128)
            owner.norm.given = None if name == "sick" else 1e-6
        train(model, folder / name)
