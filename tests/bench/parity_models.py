"""Three small decoders, the training's and the rollout's, and the differences that are planted between their paths."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.linear import Fp8Linear

WIDTH, HIDDEN, HEADS, LAYERS, VOCABULARY, EXPERTS = 256, 512, 4, 3, 384, 4
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of [B, heads, T, d]."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def attend_in_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same, with probabilities and values in E4M3 as FP8 attention kernels have them."""
    number = q.shape[-2]
    mask = torch.ones(number, number, dtype=torch.bool).tril()
    scores = (q.float() @ k.float().transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~mask, float("-inf"))
    p = (scores.softmax(-1) * 448).to(torch.float8_e4m3fn).float() / 448
    scale = v.abs().amax().float() / 448
    out: Tensor = (p @ ((v.float() / scale).to(torch.float8_e4m3fn).float() * scale)).to(q.dtype)
    return out


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Attention(nn.Module):
    """Attention with separate or joined projections."""

    def __init__(self, bias: bool, joined: bool) -> None:
        super().__init__()
        self.attend: Attend = attend
        if joined:
            self.qkv_proj = nn.Linear(WIDTH, 3 * WIDTH, bias)
        else:
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(WIDTH, WIDTH, bias) for _ in range(3))
        self.o_proj = nn.Linear(WIDTH, WIDTH, bias)

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "qkv_proj"):
            q, k, v = self.qkv_proj(x).chunk(3, -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        out: Tensor = self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(-2))
        return out


class Gated(nn.Module):
    def __init__(self, hidden: int = HIDDEN, joined: bool = False) -> None:
        super().__init__()
        if joined:
            self.gate_up_proj = nn.Linear(WIDTH, 2 * hidden, bias=False)
        else:
            self.gate_proj, self.up_proj = (nn.Linear(WIDTH, hidden, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1) if hasattr(self, "gate_up_proj") else (self.gate_proj(x), self.up_proj(x))
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Gated(256) for _ in range(EXPERTS))
        self.flips = 0

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        p = self.gate(flat).float().softmax(-1)
        chosen = p.topk(2, -1).indices
        if self.flips:
            chosen = chosen.clone()
            chosen[: self.flips, 1] = p[: self.flips].topk(3, -1).indices[:, 2]
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1).nonzero().ravel()
            if rows.numel():
                out.index_add_(0, rows, expert(flat[rows]) * p[rows, number, None].to(x.dtype))
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, kind: str, joined: bool) -> None:
        super().__init__()
        norm = nn.LayerNorm if kind == "gpt" else RMSNorm
        self.input_layernorm, self.post_attention_layernorm = norm(WIDTH), norm(WIDTH)
        self.self_attn = Attention(kind == "gpt", joined)
        self.mlp: nn.Module = {"gpt": Gelu, "moe": Experts, "llama": lambda: Gated(joined=joined)}[kind]()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """tokens [B, T] -> logits [B, T, V]."""

    def __init__(self, kind: str, joined: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block(kind, joined) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH) if kind == "gpt" else RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.lm_head(self.norm(x))
        return out


KINDS = ("llama", "gpt", "moe")


def training(kind: str, seed: int, recipe: str | None = "blockwise") -> Decoder:
    """Return the training's model in BF16 weights, its Linears but the router in FP8; blocks of weights have unequal sizes."""
    torch.manual_seed(seed)
    model = Decoder(kind)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.weight.shape[0] >= 128:
            rows, columns = -(-module.weight.shape[0] // 128), -(-module.weight.shape[1] // 128)
            factors = torch.randn(rows, columns).mul(0.5).exp().repeat_interleave(128, 0).repeat_interleave(128, 1)
            with torch.no_grad():
                module.weight.mul_(factors[: module.weight.shape[0], : module.weight.shape[1]])
    model = model.bfloat16()
    if recipe is not None:
        fp8debug.convert(model, recipe, overrides={"*.mlp.gate": None} if kind == "moe" else None)
    return model.requires_grad_(False)


def rollout(model: Decoder, joined: bool) -> Decoder:
    """Return the engine's copy, with joined projections where asked."""
    if not joined:
        return copy.deepcopy(model)
    engine = Decoder(model.kind, joined=True).bfloat16()
    state, own = model.state_dict(), engine.state_dict()
    parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    for name in own:
        whole = next((p for p in parts if f".{p}." in name), None)
        found = [state[name]] if whole is None else [state[name.replace(whole, part)] for part in parts[whole]]
        own[name].copy_(torch.cat(found))
    fp8debug.convert(engine, "blockwise")
    for (_, a), (_, b) in zip(
        [(n, m) for n, m in model.named_modules() if isinstance(m, RMSNorm)],
        [(n, m) for n, m in engine.named_modules() if isinstance(m, RMSNorm)],
        strict=True,
    ):
        b.eps = a.eps
    return engine.requires_grad_(False)


@dataclass(frozen=True)
class Planted:
    """A difference.

    Attributes:
        module: names of the training's module that are right.
        code: of its cause.
    """

    module: tuple[str, ...]
    code: str


def linears(engine: Decoder) -> list[str]:
    """Return the names of the FP8 Linears in execution order, without joined ones."""
    return [n for n, m in engine.named_modules() if isinstance(m, Fp8Linear) and "qkv" not in n and "gate_up" not in n]


def _chosen(engine: Decoder, random: torch.Generator) -> tuple[str, Fp8Linear]:
    names = linears(engine)
    name = names[int(torch.randint(len(names), (1,), generator=random))]
    module = engine.get_submodule(name)
    assert isinstance(module, Fp8Linear)
    return name, module


def stale(engine: Decoder, random: torch.Generator) -> Planted:
    name, module = _chosen(engine, random)
    size = float(torch.empty(1).uniform_(0.02, 0.3, generator=random))
    noise = torch.randn(module.weight.shape, generator=random) * module.weight.float().std() * size
    module.weight.copy_(module.weight.float() + noise)
    return Planted((name,), "F301")


def scale(engine: Decoder, random: torch.Generator) -> Planted:
    name, module = _chosen(engine, random)
    module.weight.mul_(2.0)
    return Planted((name,), "F302")


def grid(engine: Decoder, random: torch.Generator) -> Planted:
    name, module = _chosen(engine, random)
    weight = module.weight.float()
    rows, columns = weight.shape[0] // 128, weight.shape[1] // 128
    amax = weight.view(rows, 128, columns, 128).abs().amax((1, 3))
    factor = (amax.t().reshape(rows, columns) / amax).repeat_interleave(128, 0).repeat_interleave(128, 1)
    module.weight.copy_(weight * factor)
    return Planted((name,), "F302")


def eps(engine: Decoder, random: torch.Generator) -> Planted:
    names = [n for n, m in engine.named_modules() if isinstance(m, RMSNorm | nn.LayerNorm)]
    name = names[int(torch.randint(len(names), (1,), generator=random))]
    module: Any = engine.get_submodule(name)
    module.eps = float(torch.empty(1).uniform_(0.02, 0.1, generator=random)) * (1.0 if name.startswith("layers.0.i") else 1.5)
    return Planted((name,), "F306")


def ue8m0_weight(engine: Decoder, random: torch.Generator) -> Planted:
    name, module = _chosen(engine, random)
    cast = fp8debug.Cast(format="e4m3fn", granularity="128x128", scaling="current", scale_rounding="pow2_ceil")
    module.weight.copy_(fp8debug.dequantize(fp8debug.quantize(module.weight, cast), cast, torch.float32))
    return Planted((name,), "F303")


def ue8m0_activation(engine: Decoder, random: torch.Generator) -> Planted:
    name, module = _chosen(engine, random)
    module.set_recipe("blockwise_pow2")
    return Planted((name,), "F304")


def head(engine: Decoder, random: torch.Generator) -> Planted:
    module = engine.lm_head
    assert isinstance(module, Fp8Linear)
    module.set_recipe("bf16")
    return Planted(("lm_head",), "F307")


def router(engine: Decoder, random: torch.Generator) -> Planted:
    number = int(torch.randint(LAYERS, (1,), generator=random))
    mlp = engine.get_submodule(f"layers.{number}.mlp")
    assert isinstance(mlp, Experts)
    mlp.flips = int(torch.randint(1, 6, (1,), generator=random))
    return Planted((f"layers.{number}.mlp.gate",), "F305")


def kernel(engine: Decoder, random: torch.Generator) -> Planted:
    number = int(torch.randint(LAYERS, (1,), generator=random))
    attention = engine.get_submodule(f"layers.{number}.self_attn")
    assert isinstance(attention, Attention)
    attention.attend = attend_in_fp8
    return Planted((f"layers.{number}.self_attn", f"layers.{number}.self_attn.o_proj"), "F306")


FAULTS: dict[str, Callable[[Decoder, torch.Generator], Planted]] = {
    "stale copy": stale,
    "scale x2": scale,
    "transposed grid": grid,
    "other eps": eps,
    "UE8M0 weight": ue8m0_weight,
    "UE8M0 activation": ue8m0_activation,
    "head in BF16": head,
    "router flip": router,
    "attention kernel": kernel,
}


def tokens(seed: int) -> Tensor:
    """Return a batch [2, 48]."""
    return torch.randint(VOCABULARY, (2, 48), generator=torch.Generator().manual_seed(1000 + seed))
