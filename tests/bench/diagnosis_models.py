"""The models and the training of ``diagnosis.py``: a decoder, a mixture of experts, an encoder with biases; any width."""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.errors import UsageError

WORDS, LENGTH, ROWS = 64, 32, 8
#: Faults of one step, before which the run is resumed.
OF_ONE_STEP = ("lost_second_moment", "emptied_moments")


class Mixer(nn.Module):
    """Self-attention, causal or not, with or without biases."""

    def __init__(self, width: int, *, causal: bool, bias: bool) -> None:
        super().__init__()
        self.causal = causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (f(x).view(batch, length, width // 32, 32).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return out


class Swish(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.back = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.back(functional.silu(self.left(x)) * self.right(x))
        return out


class Gelu(nn.Module):
    """Two Linears with biases around a GELU."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(functional.gelu(self.first(x)))
        return out


class Experts(nn.Module):
    """Top-2 of four SwiGLU experts, chosen by a Linear that stays in high precision; one of them may see few tokens."""

    def __init__(self, width: int, hidden: int, num: int = 4) -> None:
        super().__init__()
        self.choose = nn.Linear(width, num, bias=False)
        self.parts = nn.ModuleList(Swish(width, hidden) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        values, places = self.choose(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, part in enumerate(self.parts):
            share = (values * (places == number)).sum(-1)
            rows = share.nonzero()[:, 0]
            out = out.index_add(0, rows, (share[rows, None] * part(flat[rows])).to(out.dtype))
        return out.reshape(x.shape)


class Layer(nn.Module):
    """A residual layer of a Mixer and a feed-forward part, norms first."""

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        encoder = kind == "encoder"
        norm = nn.LayerNorm if encoder else nn.RMSNorm
        self.before, self.between = norm(width), norm(width)
        self.mix = Mixer(width, causal=not encoder, bias=encoder)
        self.feed: nn.Module = {"gpt": Swish, "moe": Experts, "encoder": Gelu}[kind](width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.before(x))
        out: Tensor = x + self.feed(self.between(x))
        return out


class Model(nn.Module):
    """words[batch, length] -> logits[batch, length, WORDS]."""

    def __init__(self, kind: str, width: int, depth: int, *, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.numbers, self.places = nn.Embedding(WORDS + 1, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Layer(kind, width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.predict = nn.Linear(width, WORDS, bias=kind == "encoder")

    def forward(self, words: Tensor) -> Tensor:
        x = self.numbers(words) + self.places.weight
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute and torch.is_grad_enabled() else layer(x)
        out: Tensor = self.predict(self.norm(x))
        return out


@dataclass(frozen=True, kw_only=True)
class Case:
    """One labelled run; ``fault`` None is a clean one.

    Attributes:
        kind: gpt, moe or encoder.
        width: of the model; the hidden width is twice that.
        recipe: of the run.
        seed: of weights and data, and of what else ``plan`` chooses.
        fault: name of the fault.
        place: which of the modules that can bear the fault bears it, a share of their number.
        options: of the fault.
    """

    kind: str
    width: int
    recipe: str
    seed: int
    fault: str | None = None
    place: float = 0.5
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return "/".join(map(str, (self.fault or "clean", self.kind, self.width, self.recipe, self.seed)))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a case leaves open, drawn from its key: how it is trained and sampled."""

    every: int
    num_microbatches: int
    lr: float
    warmup: int
    clip: float | None
    recompute: bool
    dtype: torch.dtype
    loss_scale: bool
    depth: int
    steps: int
    at: int


def plan(case: Case) -> Plan:
    """Return how the case is trained: a function of its key alone."""
    draw = random.Random(case.key)
    slow = case.fault == "lr_too_high"
    needs_many = case.fault in ("bf16_gradient_sum",)
    every = draw.choice((1, 2, 3))
    at = 0 if slow else every * draw.randint(6 // every, 12 // every) + draw.randint(0, every - 1)
    if case.fault == "data_spike":
        at = 24 + draw.randint(0, 5)
    if case.fault in OF_ONE_STEP:
        at -= at % every  # a step between samples leaves no trace of its own
    if case.fault == "clipped_while_scaled":
        at = 0
    return Plan(
        every=every,
        num_microbatches=draw.choice((4, 6)) if needs_many else draw.choice((1, 1, 2)),
        lr=draw.choice((1e-3, 3e-3)),
        warmup=0 if slow else draw.choice((0, 5)),
        clip=None if draw.choice((None, 1.0)) is None or case.fault == "clipped_while_scaled" else 1.0,
        recompute=draw.random() < 0.25,
        dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16)),
        loss_scale=case.fault in ("loss_scale_loop", "clipped_while_scaled") or draw.random() < 0.2,
        depth=5 if case.fault == "depth_outliers" else 2,
        steps=max(16, at + (14 if case.fault == "loss_scale_loop" else 5 * every)),
        at=at,
    )


def batch(step: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return (words, next words): a noisy chain in which the next word mostly follows from the last."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    words = torch.randint(WORDS, (ROWS, LENGTH + 1), generator=generator)
    follow = torch.rand(ROWS, LENGTH, generator=generator) < 0.8
    for place in range(LENGTH):
        words[:, place + 1] = torch.where(follow[:, place], (words[:, place] * 5 + 3) % WORDS, words[:, place + 1])
    return words[:, :-1], words[:, 1:]


def build(case: Case) -> tuple[Model, str | None]:
    """Return the converted model with the fault planted, and the module that bears it.

    Raises:
        UsageError: the fault does not go with the model or the recipe.
    """
    torch.manual_seed(case.seed)
    chosen = plan(case)
    model = Model(case.kind, case.width, chosen.depth, recompute=chosen.recompute).to(chosen.dtype)
    overrides: dict[str, Any] = {"predict": None}
    if case.kind == "moe":
        overrides["*.choose"] = None
    fp8debug.convert(model, case.recipe, overrides)
    if case.fault is None:
        return model, None
    found = next(f for f in fp8debug.list_faults() if f.name == case.fault)
    module = None
    if found.needs_module:
        names = bearers(model, case.fault)
        if not names:
            raise UsageError(f"no module of {case.kind} can bear {case.fault}")
        module = names[int(case.place * len(names))]
    fp8debug.inject(model, case.fault, module=module, step=chosen.at, **case.options)
    return model, module


def bearers(model: nn.Module, fault: str) -> list[str]:
    """Return the FQNs of the Linears that can bear the fault."""
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    converted = [name for name, m in linears.items() if isinstance(m, fp8debug.Fp8Linear)]
    if fault == "router_in_fp8":
        return [name for name in linears if name.endswith(".choose")]
    if fault in ("unasked_fp8", "last_layers_in_fp4"):
        return ["predict"]
    if fault == "starved_expert":
        return [name for name in converted if ".parts." in name]
    if fault == "depth_outliers":
        return [name for name in converted if name.startswith("layers.0.") and ".parts." not in name]
    return converted


def train(case: Case, path: Path) -> str | None:
    """Train the case into a run directory; return the module that bears the fault."""
    chosen = plan(case)
    model, module = build(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=chosen.lr)
    ranked = distributed.is_initialized()
    scale = 2.0**12
    with ExitStack() as watches:
        for step in range(chosen.steps):
            if step == 0 or (step == chosen.at and case.fault in OF_ONE_STEP):
                watches.close()
                beginning = fp8debug.watch(model, path, every=chosen.every, optimizer=optimizer, resume_from=step or None)
                watch = watches.enter_context(beginning)
            for group in optimizer.param_groups:
                group["lr"] = chosen.lr * min(1.0, (step + 1) / (chosen.warmup + 1))
            total = torch.zeros(())
            for micro in range(chosen.num_microbatches):
                seed = (case.seed * 8 + micro) * 2 + (distributed.get_rank() if ranked else 0)
                words, after = batch(step, seed)
                loss = functional.cross_entropy(model(words).float().flatten(0, 1), after.flatten())
                ((loss / chosen.num_microbatches) * (scale if chosen.loss_scale else 1.0)).backward()
                total += loss.detach() / chosen.num_microbatches
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            if ranked:
                for grad in grads:
                    distributed.all_reduce(grad)
                    grad /= distributed.get_world_size()
            noted: dict[str, Any] = {"loss": total, "tokens": ROWS * LENGTH * chosen.num_microbatches}
            finite = True
            if chosen.loss_scale:
                noted["loss_scale"] = scale
                finite = all(bool(grad.isfinite().all()) for grad in grads)
                for grad in grads:
                    grad /= scale
                scale = scale if finite else scale / 2
            noted["grad_norm"] = nn.utils.clip_grad_norm_(model.parameters(), chosen.clip or float("inf"))
            if finite:
                optimizer.step()
            optimizer.zero_grad()
            if case.fault == "stale_inference" and step % 4 == 3:
                watch.compare_inference(batch(10_000 + step, case.seed)[0])
            watch.step(**noted)
    return module
