"""Programs of the second set: a stack over torch alone, and models that the first set does not have.

``SavedLinear`` casts each operand once, with one scale, and saves the codes for the backward pass, as Transformer Engine does.
The models take any Linear: a decoder with grouped queries, a mixture of experts, a ViT, a reward model, an encoder-decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import ScalingType

from tests.bench.relatives.stack import E4M3, E5M2, VOCABULARY, Cast, CastFault, OwnLinear, train
from tests.bench.situations.stack import LARGEST, library

WIDTH, HIDDEN = 128, 256
Make = Callable[..., nn.Module]


def multiplied_codes(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor) -> Tensor:
    """Return ``a @ b.t()`` in BF16 of codes ``[M, K]`` and ``[N, K]`` with a scale for each tensor, K padded to 16."""
    short = -a.shape[1] % 16
    if short:
        a, b = (functional.pad(t.contiguous().view(torch.uint8), (0, short)).view(t.dtype) for t in (a, b))
    kind = ScalingType.TensorWise
    out: Tensor = functional.scaled_mm(
        a.contiguous(), b.contiguous().t(), a_scale, kind, b_scale, kind, output_dtype=torch.bfloat16
    )
    return out


class _Saved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SavedLinear) -> Tensor:
        (a, a_scale), (b, b_scale) = layer.cast("input", x), layer.cast("weight", weight)
        ctx.layer, ctx.types = layer, (x.dtype, weight.dtype)
        ctx.save_for_backward(a, a_scale, b, b_scale)
        return layer.product("fprop", ("input", a, a_scale), ("weight", b, b_scale)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (a, a_scale, b, b_scale), layer = ctx.saved_tensors, ctx.layer
        g, g_scale = layer.cast("grad_output", grad)
        dgrad = layer.product("dgrad", ("grad_output", g, g_scale), ("weight", b.t(), b_scale)).to(ctx.types[0])
        if not ctx.needs_input_grad[1]:
            return dgrad, None, None
        wgrad = layer.product("wgrad", ("grad_output", g.t(), g_scale), ("input", a.t(), a_scale)).to(ctx.types[1])
        return dgrad, wgrad, None


class SavedLinear(nn.Linear):
    """A Linear over ``functional.scaled_mm`` with one scale for each tensor, whose operands are cast once.

    Attributes:
        eps: least amax.
        history: number of past steps whose largest amax makes the scale; 0 takes the tensor's own.
        spoil: faults of a cast, by tensor; all GEMMs get them.
        spoil_gemm: faults of an operand of one GEMM, by GEMM and tensor.
        spoil_result: faults of a result, by GEMM.
    """

    eps = 1e-12
    history = 0
    spoil: Mapping[str, CastFault] | None = None
    spoil_gemm: Mapping[tuple[str, str], Callable[[Tensor, Tensor], Cast]] | None = None
    spoil_result: Mapping[str, Callable[[Tensor], Tensor]] | None = None

    def amax(self, tensor: str, x: Tensor) -> Tensor:
        """Return the amax that makes the scale."""
        now = x.detach().float().abs().max().reshape(())
        if not self.history:
            return now
        past = vars(self).setdefault("past", {}).setdefault(tensor, [])
        used = torch.stack(past[-self.history :]).max() if past else now
        past.append(now)
        return used

    def cast(self, tensor: str, x: Tensor) -> Cast:
        """Return data and scale_inv."""
        kind = E5M2 if tensor == "grad_output" else E4M3
        scale = self.amax(tensor, x).clamp(min=self.eps) / LARGEST[kind]
        data = (x.float() / scale).clamp(-LARGEST[kind], LARGEST[kind]).to(kind).contiguous()
        fault = (self.spoil or {}).get(tensor)
        return fault(x, data, scale, self) if fault else (data, scale)

    def product(self, gemm: str, first: tuple[str, Tensor, Tensor], second: tuple[str, Tensor, Tensor]) -> Tensor:
        """Return ``first @ second.t()`` in BF16."""
        pair = []
        for tensor, data, scale in (first, second):
            fault = (self.spoil_gemm or {}).get((gemm, tensor))
            pair.append(fault(data, scale) if fault else (data, scale))
        (a, a_scale), (b, b_scale) = pair
        out = multiplied_codes(a, a_scale, b, b_scale)
        change = (self.spoil_result or {}).get(gemm)
        return change(out) if change else out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        out: Tensor = _Saved.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        out = out.reshape(*x.shape[:-1], len(self.weight))
        return out if self.bias is None else out + self.bias


class Grouped(nn.Module):
    """Attention of four query heads over two key and value heads, causal or over a memory."""

    def __init__(self, linear: Make, *, is_causal: bool = True) -> None:
        super().__init__()
        self.q, self.k = linear(WIDTH, WIDTH, bias=False), linear(WIDTH, WIDTH // 2, bias=False)
        self.v, self.o = linear(WIDTH, WIDTH // 2, bias=False), linear(WIDTH, WIDTH, bias=False)
        self.is_causal = is_causal

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[sequences, 4, length, 32]``."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return ``[sequences, length, WIDTH]``."""
        source = x if memory is None else memory
        q = self.q(x).unflatten(-1, (4, 32)).transpose(1, 2)
        k, v = (p(source).unflatten(-1, (2, 32)).transpose(1, 2).repeat_interleave(2, 1) for p in (self.k, self.v))
        out: Tensor = self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Swiglu(nn.Module):
    """A gated MLP."""

    def __init__(self, linear: Make, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.gate, self.up = linear(WIDTH, hidden, bias=False), linear(WIDTH, hidden, bias=False)
        self.down = linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., WIDTH]``."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Four gated MLPs, two of them for each token; the router is in high precision.

    Attributes:
        send: what happens to tokens on their way to an expert.
        closed: experts that get no token.
    """

    def __init__(self, linear: Make, *, router: Make = nn.Linear) -> None:
        super().__init__()
        self.router = router(WIDTH, 16 if router is not nn.Linear else 4, bias=False)
        self.experts = nn.ModuleList(Swiglu(linear, 128) for _ in range(4))
        self.send: Callable[[Tensor], Tensor] = lambda x: x
        self.closed: Callable[[], tuple[int, ...]] = tuple
        self.logits = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., WIDTH]``."""
        flat = x.reshape(-1, WIDTH)
        logits = self.logits = self.router(flat)[:, :4].float()
        if self.closed():
            logits = logits.index_fill(1, torch.tensor(self.closed()), -1e9)
        shares, chosen = logits.softmax(-1).topk(2, -1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, expert(self.send(flat[rows])) * shares[rows, place, None].to(flat.dtype))
        return out.reshape(x.shape)


class Block(nn.Module):
    """Attention and an MLP, each with its norm and residual; attention over a memory between them where there is one."""

    def __init__(self, linear: Make, mlp: Make, *, is_causal: bool = True, has_memory: bool = False, attention: Make = Grouped):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attn, self.mlp = attention(linear, is_causal=is_causal), mlp(linear)
        if has_memory:
            self.norm3, self.cross = nn.RMSNorm(WIDTH), attention(linear, is_causal=False)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        """Return ``[sequences, length, WIDTH]``."""
        x = x + self.attn(self.norm1(x))
        if memory is not None:
            x = x + self.cross(self.norm3(x), memory)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Decoder(nn.Module):
    """A causal language model."""

    def __init__(self, linear: Make, mlp: Make = Swiglu, *, depth: int = 2, attention: Make = Grouped, seed: int = 5) -> None:
        super().__init__()
        library()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers: Any = nn.ModuleList(Block(linear, mlp, attention=attention) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the head reads."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        out: Tensor = self.head(self.hidden(tokens))
        return out


class Reward(Decoder):
    """A reward of each sequence, read at its last token."""

    def __init__(self, linear: Make, **made: Any) -> None:
        super().__init__(linear, **made)
        self.head = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return ``[sequences]``."""
        return super().forward(tokens)[:, -1, 0].float()


class Vit(nn.Module):
    """A classifier of images of 16 patches with 48 values each."""

    def __init__(self, linear: Make, *, depth: int = 2, seed: int = 6) -> None:
        super().__init__()
        library()
        torch.manual_seed(seed)
        self.patch = linear(48, WIDTH, bias=False)
        self.place = nn.Parameter(torch.randn(17, WIDTH) * 0.1)
        self.token = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.layers: Any = nn.ModuleList(Block(linear, Swiglu, is_causal=False) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[images, 16]`` of images ``[images, 16, 48]``."""
        x = self.patch(images.to(self.token.dtype))
        x = torch.cat([self.token.expand(len(x), 1, WIDTH), x], 1) + self.place
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(self.norm(x[:, 0]))
        return out


class Translator(nn.Module):
    """An encoder-decoder: the first half of the tokens is its source, the second half what the decoder reads."""

    def __init__(self, linear: Make, *, depth: int = 1, seed: int = 7) -> None:
        super().__init__()
        library()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(40, WIDTH) * 0.5)
        self.encoder: Any = nn.ModuleList(Block(linear, Swiglu, is_causal=False) for _ in range(depth))
        self.decoder: Any = nn.ModuleList(Block(linear, Swiglu, has_memory=True) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.mask: Callable[[Tensor], Tensor] = lambda memory: memory

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, 40, VOCABULARY]``."""
        source, x = (self.embed(half) + self.place for half in tokens.chunk(2, 1))
        for layer in self.encoder:
            source = layer(source)
        source = self.mask(source)
        for layer in self.decoder:
            x = layer(x, source)
        out: Tensor = self.head(self.norm(x))
        return out


def pairs(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens of 12 sequences, of which the first six are better: they end with a low token."""
    random = torch.Generator().manual_seed(5000 + number)
    tokens = torch.randint(VOCABULARY, (12, 40), generator=random)
    tokens[:6, -4:] %= 16
    return tokens, tokens[:0, 0]


def preference(rewards: Tensor, _: Tensor) -> Tensor:
    """Return the mean loss of Bradley and Terry."""
    return -functional.logsigmoid(rewards[:6] - rewards[6:]).mean()


def images(number: int) -> tuple[Tensor, Tensor]:
    """Return 24 noisy images of 16 classes."""
    templates = torch.randn(16, 16, 48, generator=torch.Generator().manual_seed(11))
    random = torch.Generator().manual_seed(6000 + number)
    classes = torch.randint(16, (24,), generator=random)
    return templates[classes] + torch.randn(24, 16, 48, generator=random), classes


def of_classes(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean loss over images."""
    return functional.cross_entropy(logits.float(), classes)


def sentences(number: int) -> tuple[Tensor, Tensor]:
    """Return 6 sources with what the decoder reads, and the mapped source, which it has to say."""
    random = torch.Generator().manual_seed(7000 + number)
    source = torch.randint(1, VOCABULARY, (6, 40), generator=random)
    said = (source * 5 + 3) % VOCABULARY
    return torch.cat([source, torch.cat([torch.ones_like(said[:, :1]), said[:, :-1]], 1)], 1), said


def spoil(
    model: nn.Module,
    name: str,
    casts: Mapping[Any, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    gemms: Mapping[tuple[str, str], Any] | None = None,
) -> Any:
    """Plant faults in one Linear of either stack, and return the model."""
    layer: Any = model.get_submodule(name)
    if isinstance(layer, OwnLinear):
        layer.cast_faults, layer.result_faults = casts or {}, results or {}
    else:
        layer.spoil, layer.spoil_gemm, layer.spoil_result = casts or {}, gemms or {}, results or {}
    return model


def fit(model: nn.Module, path: Path, *, steps: int = 16, every: int = 3, **options: Any) -> None:
    """Train under a watch, for fewer steps than the first set."""
    train(model, path, steps=steps, every=every, **options)
