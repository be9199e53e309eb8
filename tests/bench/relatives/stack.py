"""Another user's FP8 stack: attention and an MLP, casts in blocks, rows or tensors, GEMMs of DeepGEMM's name or torch's.

A fault is a function in ``cast_faults`` or ``result_faults`` of one layer, which may look at the step in ``NOW``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from tests.bench.situations.stack import LARGEST, expanded, library, scales_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
VOCABULARY, SEQUENCES, LENGTH = 64, 4, 80
#: The optimizer step, and the number of the microbatch in it.
NOW = {"step": 0, "micro": 0}
Cast = tuple[Tensor, Tensor]
#: (tensor before the cast, data, scale_inv, layer) -> data, scale_inv
CastFault = Callable[[Tensor, Tensor, Tensor, Any], Cast]


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: OwnLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        operands = layer.cast("fprop", "input", x), layer.cast("fprop", "weight", weight)
        return layer.product("fprop", *operands, (len(x), len(weight)))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        dgrad = wgrad = None
        if ctx.needs_input_grad[0]:
            operands = layer.cast("dgrad", "grad_output", grad), layer.cast("dgrad", "weight", weight.t())
            dgrad = layer.product("dgrad", *operands, x.shape).to(x.dtype)
        if ctx.needs_input_grad[1]:
            operands = layer.cast("wgrad", "grad_output", grad.t()), layer.cast("wgrad", "input", x.t())
            wgrad = layer.product("wgrad", *operands, weight.shape).to(weight.dtype)
        return dgrad, wgrad, None


class OwnLinear(nn.Linear):
    """A Linear over DeepGEMM's signature, in blocks of 1x128 and 128x128.

    Attributes:
        gradient_format: of grad_output.
        eps: least amax.
        path: GEMM for which the library takes another path.
        cast_faults: by GEMM and tensor.
        result_faults: by GEMM.
    """

    gradient_format = E4M3
    eps = 1e-12
    path: str | None = None
    cast_faults: Mapping[tuple[str, str], CastFault] | None = None
    result_faults: Mapping[str, Callable[[Tensor, Any], Tensor]] | None = None

    def block(self, tensor: str, x: Tensor) -> tuple[int, int]:
        """Return rows and columns that share a scale."""
        return (128, 128) if tensor == "weight" else (1, 128)

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        """Return data and scale_inv of an operand ``[rows, contracted]``."""
        x = x.contiguous()
        kind = self.gradient_format if tensor == "grad_output" else E4M3
        block = self.block(tensor, x)
        scales = scales_of(x, block, LARGEST[kind], self.eps)
        data = (x.float() / expanded(scales, x.shape, block)).clamp(-LARGEST[kind], LARGEST[kind]).to(kind)
        fault = (self.cast_faults or {}).get((gemm, tensor))
        return fault(x, data, scales, self) if fault else (data, scales)

    def multiply(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return ``a @ b.t()`` in BF16."""
        out = torch.empty(tuple(shape), dtype=torch.bfloat16)
        sys.modules["deep_gemm"].fp8_gemm_nt(a, b, out, recipe=gemm if gemm == self.path else None)
        return out

    def product(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return the GEMM's result, with its fault."""
        out = self.multiply(gemm, a, b, shape)
        fault = (self.result_faults or {}).get(gemm)
        return fault(out, self) if fault else out

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        out: Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, self)
        return out.reshape(*x.shape[:-1], len(self.weight)).to(x.dtype)


class RowLinear(OwnLinear):
    """A Linear over ``torch._scaled_mm`` with a scale for each row, gradients in E5M2."""

    gradient_format = E5M2

    def block(self, tensor: str, x: Tensor) -> tuple[int, int]:
        """Return rows and columns that share a scale."""
        return 1, x.shape[1]

    def multiply(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return ``a @ b.t()`` in BF16."""
        (x, first), (y, second) = a, b
        return torch._scaled_mm(
            x, y.t(), scale_a=first, scale_b=second.t().contiguous(), out_dtype=torch.bfloat16, use_fast_accum=False
        )


class TensorLinear(OwnLinear):
    """A Linear over ``torch._scaled_mm`` with one scale for each tensor, gradients in E5M2."""

    gradient_format = E5M2

    def block(self, tensor: str, x: Tensor) -> tuple[int, int]:
        """Return rows and columns that share a scale."""
        return x.shape[0], x.shape[1]

    def multiply(self, gemm: str, a: Cast, b: Cast, shape: Sequence[int]) -> Tensor:
        """Return ``a @ b.t()`` in BF16."""
        (x, first), (y, second) = a, b
        return torch._scaled_mm(
            x, y.t(), scale_a=first.reshape(()), scale_b=second.reshape(()), out_dtype=torch.bfloat16, use_fast_accum=False
        )


class Attention(nn.Module):
    """Causal attention of four heads in high precision, its projections in FP8."""

    def __init__(self, linear: Callable[..., nn.Module], width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(width, width, bias=False) for _ in range(4))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return ``[sequences, heads, length, width of a head]``."""
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[sequences, length, width]``."""
        q, k, v = (p(x).unflatten(-1, (4, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out: Tensor = self.o_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention and an MLP, each with its norm and residual."""

    attention: type[Attention] = Attention

    def __init__(self, linear: Callable[..., nn.Module], width: int, hidden: int) -> None:
        super().__init__()
        self.attn, self.norm1, self.norm2 = self.attention(linear, width), nn.RMSNorm(width), nn.RMSNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("fc1", linear(width, hidden, bias=False))
        self.mlp.add_module("act", nn.GELU())
        self.mlp.add_module("fc2", linear(hidden, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[sequences, length, width]``."""
        x = x + self.attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Transformer(nn.Module):
    """Embedding, layers, norm, and a head in high precision."""

    def __init__(
        self,
        linear: Callable[..., nn.Module] = OwnLinear,
        *,
        width: int = 128,
        hidden: int = 256,
        depth: int = 2,
        seed: int = 3,
        layer: Callable[..., nn.Module] = Layer,
    ) -> None:
        super().__init__()
        library()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers: Any = nn.ModuleList(layer(linear, width, hidden) for _ in range(depth))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return what the head reads."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, length, VOCABULARY]``."""
        out: Tensor = self.lm_head(self.hidden(tokens))
        return out


def batch(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and classes ``[SEQUENCES, LENGTH]`` of a noisy map that can be learned."""
    random = torch.Generator().manual_seed(9000 + number)
    tokens = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=random)
    noise = torch.randint(VOCABULARY, tokens.shape, generator=random)
    return tokens, torch.where(torch.rand(tokens.shape, generator=random) < 0.85, (tokens * 11 + 5) % VOCABULARY, noise)


def cross_entropy(out: Any, classes: Tensor) -> Tensor:
    """Return the mean loss over the tokens that have a class."""
    return functional.cross_entropy(out.float().flatten(0, 1), classes.flatten(), ignore_index=-100)


def train(
    model: nn.Module,
    path: Path,
    *,
    steps: int = 20,
    every: int = 2,
    micro: int = 1,
    lr: float = 2e-3,
    optimizer: torch.optim.Optimizer | None = None,
    loss_of: Callable[[Any, Tensor], Tensor] = cross_entropy,
    data: Callable[[int], tuple[Tensor, Tensor]] = batch,
    divide: bool = True,
    skip_nonfinite: bool = False,
    before: Callable[[int], None] = lambda step: None,
    after_backward: Callable[[int, int], None] = lambda step, micro: None,
    after_step: Callable[[int, Any], None] = lambda step, watch: None,
    **watched: Any,
) -> None:
    """Train under a watch."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    with fp8debug.watch(model, path, every=every, **watched) as watch:
        for step in range(steps):
            NOW["step"] = step
            before(step)
            total = 0.0
            for number in range(micro):
                NOW["micro"] = number
                tokens, classes = data(step * micro + number)
                loss = loss_of(model(tokens), classes) / (micro if divide else 1)
                loss.backward()
                total += loss.item()
                after_backward(step, number)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if not skip_nonfinite or all(bool(g.isfinite().all()) for g in gradients):
                optimizer.step()
            optimizer.zero_grad()
            after_step(step, watch)
            watch.step(loss=total)


def spoiled(
    name: str,
    *,
    casts: dict[tuple[str, str], CastFault] | None = None,
    results: dict[str, Callable[[Tensor, Any], Tensor]] | None = None,
    **made: Any,
) -> Transformer:
    """Return the model with faults in one layer, or in all of its Linears where the name is ``*``."""
    model = Transformer(**made)
    for found, layer in model.named_modules():
        if isinstance(layer, OwnLinear) and name in (found, "*"):
            layer.cast_faults, layer.result_faults = casts or {}, results or {}
    return model


def late(fault: CastFault, first: int = 0, period: int = 1) -> CastFault:
    """Return a fault that begins at a step, and is there at every period-th one."""

    def change(x: Tensor, data: Tensor, scales: Tensor, layer: Any) -> Cast:
        is_now = NOW["step"] >= first and NOW["step"] % period == 0
        return fault(x, data, scales, layer) if is_now else (data, scales)

    return change


def gen(n: Any = 0) -> Any:
    return torch.Generator().manual_seed(n)


def pow2_up(s: Any) -> Any:
    return torch.exp2(torch.ceil(torch.log2(s)))


def pow2_down(s: Any) -> Any:
    return torch.exp2(torch.floor(torch.log2(s)))


def both(folder: Path, make: Any, **kw: Any) -> None:
    """sick and clean: make(True/False) -> model, train kwargs."""
    for name, sick in (("sick", True), ("clean", False)):
        m, more = make(sick)
        train(m, folder / name, **{**kw, **more})


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; SGD for the rest."""

    def __init__(self, ps: Any, lr: Any, low: Any = lambda v: v, scale: Any = 1.0) -> None:
        super().__init__(ps, dict(lr=lr))
        self.low, self.scale = low, scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for g in self.param_groups:
            for p in g["params"]:
                if p.grad is None:
                    continue
                st = self.state[p]
                st["momentum_buffer"] = self.low(st.get("momentum_buffer", torch.zeros_like(p)) * 0.9 + p.grad)
                u = st["momentum_buffer"].float()
                if u.dim() == 2 and min(u.shape) > 64:
                    u = u / (u.norm() + 1e-7)
                    for _ in range(5):
                        a = u @ u.t()
                        u = 3.4445 * u + (-4.775 * a + 2.0315 * a @ a) @ u
                    u = u * max(1, u.shape[0] / u.shape[1]) ** 0.5 * self.scale
                p -= (g["lr"] * u).to(p.dtype)


class Adam8(torch.optim.Optimizer):
    def __init__(self, ps: Any, lr: Any, low_m: Any, low_v: Any, first: Any = 0) -> None:
        super().__init__(ps, dict(lr=lr))
        self.low_m, self.low_v, self.first = low_m, low_v, first

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is None:
                continue
            st = self.state[p]
            m, v = st.get("exp_avg", torch.zeros_like(p)), st.get("exp_avg_sq", torch.zeros_like(p))
            m, v = m * 0.9 + p.grad * 0.1, v * 0.99 + p.grad**2 * 0.01
            if NOW["step"] >= self.first:
                m, v = self.low_m(m), self.low_v(v)
            st["exp_avg"], st["exp_avg_sq"] = m, v
            t = st["step"] = st.get("step", 0) + 1
            p -= self.param_groups[0]["lr"] * (m / (1 - 0.9**t)) / ((v / (1 - 0.99**t)).sqrt() + 1e-8)


def low(kind: Any, block: Any = None) -> Any:
    def f(v: Any) -> Any:
        flat = v.reshape(-1) if block is None else functional.pad(v.reshape(-1), (0, -v.numel() % block)).reshape(-1, block)
        s = flat.abs().amax(-1, keepdim=True).clamp(min=1e-30) / LARGEST[kind]
        return ((flat / s).to(kind).float() * s).reshape(-1)[: v.numel()].reshape(v.shape)

    return f


def same(v: Any) -> Any:
    return v


def lora(base: Any) -> Any:
    class Lora(nn.Module):
        def __init__(self, i: Any, o: Any, bias: Any = False) -> None:
            super().__init__()
            self.base, self.lora_A, self.lora_B = base(i, o, bias=False), nn.Linear(i, 8, bias=False), nn.Linear(8, o, bias=False)
            nn.init.zeros_(self.lora_B.weight)
            self.base.weight.requires_grad_(False)

        def forward(self, x: Tensor) -> Any:
            return self.base(x) + self.lora_B(self.lora_A(x))

    return Lora


def padded(number: Any, first: Any = 0, masked: Any = True) -> Any:
    t, y = batch(number)
    if NOW["step"] >= first:
        t[:, -20:] = 0
        if masked:
            y[:, -20:] = -100
    return t, y


def zero_pad(m: Any) -> Any:
    m.embed.padding_idx = 0
    with torch.no_grad():
        m.embed.weight[0] = 0
    return m


def codes_of(w: Any, block: Any, kind: Any = E4M3, up: Any = False) -> Any:
    s = scales_of(w, block, LARGEST[kind])
    s = pow2_up(s) if up else s
    return (w / expanded(s, w.shape, block)).clamp(-LARGEST[kind], LARGEST[kind]).to(kind).float()


def on_grid(m: Any, block: Any, names: Any = ("layers",)) -> Any:
    with torch.no_grad():
        for n, p in m.named_parameters():
            if p.dim() == 2 and all(k in n for k in names):
                b = (1, p.shape[1]) if block == "row" else block
                s = scales_of(p, b, 448.0)
                p.copy_(codes_of(p, b) * expanded(s, p.shape, b))
    return m


def ao(m: Any, recipe: Any, keep: Any = ("lm_head",)) -> Any:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    return convert_to_float8_training(
        m,
        config=dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True),
        module_filter_fn=lambda mod, n: not any(fnmatch(n, k) for k in keep),
    )


def fixed_scale(get: Any) -> Any:
    def fault(x: Tensor, d: Tensor, s: Any, layer: Any) -> Any:
        s = get(x, s, layer)
        return (x.float() / expanded(s, x.shape, layer.block("weight" if x.shape == layer.weight.shape else "input", x))).clamp(
            -448, 448
        ).to(E4M3), s

    return fault
