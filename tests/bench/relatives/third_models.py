"""Programs of the third set: a stack of one file over ``scaled_mm``, scales that are powers of two, and models of other fields.

The models take any Linear: a mixer, a recurrent cell, a graph network, a state-space model, a recommender, an autoencoder of
Gaussian codes, a diffusion transformer, two towers, a decoder whose layers share their weights, one with shared experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.bench.relatives.plain import Grouped, Make, Swiglu, multiplied_codes
from tests.bench.relatives.stack import E4M3, E5M2, VOCABULARY, Cast, OwnLinear, pow2_up, train
from tests.bench.situations.stack import LARGEST, expanded, library, scales_of

WIDTH, HIDDEN = 128, 256
#: (GEMM, tensor, data, scale_inv) -> data, scale_inv
Spoil = Callable[[str, str, Tensor, Tensor], Cast]


def to_fp8(x: Tensor, kind: torch.dtype) -> Cast:
    """Return data and scale_inv under one scale."""
    scale_inv = x.detach().float().abs().max().clamp(min=1e-12) / LARGEST[kind]
    return (x.float() / scale_inv).clamp(-LARGEST[kind], LARGEST[kind]).to(kind), scale_inv


def as_it_is(gemm: str, tensor: str, data: Tensor, scale: Tensor) -> Cast:
    """Return a cast without a fault."""
    return data, scale


def multiplied(gemm: str, first: tuple[str, Tensor, Tensor], second: tuple[str, Tensor, Tensor], spoil: Spoil) -> Tensor:
    """Return ``first @ second.t()`` in BF16."""
    (a, a_scale), (b, b_scale) = spoil(gemm, *first), spoil(gemm, *second)
    return multiplied_codes(a, a_scale, b, b_scale)


class _OneFile(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spoil: Spoil) -> Tensor:
        a, b = to_fp8(x, E4M3), to_fp8(weight, E4M3)
        ctx.save_for_backward(*a, *b)
        ctx.spoil, ctx.types = spoil, (x.dtype, weight.dtype)
        return multiplied("fprop", ("input", *a), ("weight", *b), spoil).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (a, a_scale, b, b_scale), spoil = ctx.saved_tensors, ctx.spoil
        g, g_scale = to_fp8(grad, E5M2)
        dgrad = multiplied("dgrad", ("grad_output", g, g_scale), ("weight", b.t(), b_scale), spoil)
        wgrad = multiplied("wgrad", ("grad_output", g.t(), g_scale), ("input", a.t(), a_scale), spoil)
        return dgrad.to(ctx.types[0]), wgrad.to(ctx.types[1]), None


class OneFileLinear(nn.Linear):
    """A Linear whose autograd function knows no module, as in training scripts of one file.

    Attributes:
        spoil: the fault of its casts.
        change: the fault of its output.
    """

    spoil: Spoil = staticmethod(as_it_is)
    change: Callable[[Tensor], Tensor] = staticmethod(lambda out: out)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., out_features]``."""
        out: Tensor = _OneFile.apply(x.reshape(-1, x.shape[-1]), self.weight, self.spoil)
        out = out.reshape(*x.shape[:-1], len(self.weight))
        return out if self.bias is None else out + self.bias


class PowerLinear(OwnLinear):
    """A Linear over DeepGEMM's signature whose scales are powers of two, as on Blackwell."""

    def cast(self, gemm: str, tensor: str, x: Tensor) -> Cast:
        """Return data and scale_inv of an operand ``[rows, contracted]``."""
        x, block = x.contiguous(), self.block(tensor, x)
        scales = pow2_up(scales_of(x, block, LARGEST[E4M3], self.eps))
        data = (x.float() / expanded(scales, x.shape, block)).clamp(-448, 448).to(E4M3)
        fault = (self.cast_faults or {}).get((gemm, tensor))
        return fault(x, data, scales, self) if fault else (data, scales)


def faulty(model: nn.Module, name: str, spoil: Spoil) -> Any:
    """Plant a fault in one Linear of the one-file stack, and return the model."""
    vars(model.get_submodule(name))["spoil"] = spoil
    return model


def begun(seed: int) -> None:
    """Set the library and the random numbers."""
    library()
    torch.manual_seed(seed)


class Mixer(nn.Module):
    """Images of 16 patches: Linears over the patches, then over the channels."""

    def __init__(self, linear: Make, *, depth: int = 2, seed: int = 31) -> None:
        super().__init__()
        begun(seed)
        self.stem = linear(48, WIDTH, bias=False)
        self.blocks: Any = nn.ModuleList()
        for _ in range(depth):
            block = nn.Module()
            block.norm1, block.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            block.patches_in, block.patches_out = linear(16, 64, bias=False), linear(64, 16, bias=False)
            block.channels_in, block.channels_out = linear(WIDTH, HIDDEN, bias=False), linear(HIDDEN, WIDTH, bias=False)
            self.blocks.append(block)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits ``[images, 16]``."""
        x = self.stem(images.to(self.head.weight.dtype))
        for b in self.blocks:
            x = x + b.patches_out(functional.gelu(b.patches_in(b.norm1(x).transpose(1, 2)))).transpose(1, 2)
            x = x + b.channels_out(functional.gelu(b.channels_in(b.norm2(x))))
        out: Tensor = self.head(self.norm(x).mean(1))
        return out


class Recurrent(nn.Module):
    """A gated recurrent cell that is called once for each of 12 tokens."""

    def __init__(self, linear: Make, *, seed: int = 32) -> None:
        super().__init__()
        begun(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.read, self.write = linear(WIDTH, 3 * WIDTH, bias=False), linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, 12, VOCABULARY]``."""
        read, state, states = self.read(self.embed(tokens)), torch.zeros(len(tokens), WIDTH), []
        for now in read.unbind(1):
            r, z, n = now.chunk(3, -1)
            hr, hz, hn = self.write(state).chunk(3, -1)
            z = torch.sigmoid(z + hz)
            state = (1 - z) * torch.tanh(n + torch.sigmoid(r + hr) * hn) + z * state
            states.append(state)
        out: Tensor = self.head(self.norm(torch.stack(states, 1)))
        return out


class Graph(nn.Module):
    """Messages over the edges of a graph of 96 nodes, of which some have no edge.

    Attributes:
        mean: whether messages are averaged, not summed.
    """

    mean = True

    def __init__(self, linear: Make, *, depth: int = 2, seed: int = 33) -> None:
        super().__init__()
        begun(seed)
        self.enter = nn.Linear(32, WIDTH)
        self.message: Any = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.update: Any = nn.ModuleList(linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.norms: Any = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(depth))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, graph: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits ``[96, 8]`` of nodes ``[96, 32]`` and edges ``[2, number]``."""
        nodes, (source, target) = graph
        x = self.enter(nodes)
        degree = torch.zeros(len(nodes)).index_add(0, target, torch.ones(len(target))).clamp(min=1)[:, None]
        for message, update, norm in zip(self.message, self.update, self.norms, strict=True):
            sent = functional.relu(message(norm(x)))
            got = torch.zeros_like(x).index_add(0, target, sent[source])
            x = x + update(got / degree if self.mean else got)
        out: Tensor = self.head(x)
        return out


def graphs(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return a graph with one hub and eight nodes that nothing points to, and the classes of its nodes."""
    random = torch.Generator().manual_seed(8000 + number)
    classes = torch.randint(8, (96,), generator=random)
    templates = torch.randn(8, 32, generator=torch.Generator().manual_seed(12))
    source = torch.randint(96, (400,), generator=random)
    target = torch.where(torch.arange(400) < 90, 3, torch.randint(88, (400,), generator=random))
    return (templates[classes] + torch.randn(96, 32, generator=random), torch.stack([source, target])), classes


def of_nodes(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the mean loss over nodes, images or sequences."""
    return functional.cross_entropy(logits.float(), classes)


class Scan(nn.Module):
    """A selective state-space layer: a gate, a decay and a state of 4 for each channel."""

    def __init__(self, linear: Make) -> None:
        super().__init__()
        self.in_proj, self.out_proj = linear(WIDTH, 2 * WIDTH, bias=False), linear(WIDTH, WIDTH, bias=False)
        self.x_proj = linear(WIDTH, 16, bias=False)
        self.decay, self.skip = nn.Parameter(torch.arange(1, 5).float().log()), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[sequences, length, WIDTH]``."""
        u, gate = self.in_proj(x).chunk(2, -1)
        u = functional.silu(u)
        b, c, step, _ = self.x_proj(u).split(4, -1)
        step = functional.softplus(step)
        state, said = torch.zeros(len(x), WIDTH, 4), []
        for t in range(x.shape[1]):
            state = state * torch.exp(-step[:, t, None] * self.decay.exp()) + u[:, t, :, None] * (step * b)[:, t, None]
            said.append((state * c[:, t, None]).sum(-1))
        out: Tensor = self.out_proj((torch.stack(said, 1) + u * self.skip) * functional.silu(gate))
        return out


class StateSpace(nn.Module):
    """A language model of selective scans, with dropout."""

    def __init__(self, linear: Make, *, depth: int = 2, dropout: float = 0.0, seed: int = 34) -> None:
        super().__init__()
        begun(seed)
        self.embed, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(dropout)
        self.layers: Any = nn.ModuleList(Scan(linear) for _ in range(depth))
        self.norms: Any = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(depth + 1))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, length, VOCABULARY]``."""
        x = self.embed(tokens)
        for layer, norm in zip(self.layers, self.norms, strict=False):
            x = x + self.dropout(layer(norm(x)))
        out: Tensor = self.head(self.norms[-1](x))
        return out


def short(number: int) -> tuple[Tensor, Tensor]:
    """Return tokens and classes ``[16, 12]`` of a noisy map."""
    random = torch.Generator().manual_seed(12000 + number)
    tokens = torch.randint(VOCABULARY, (16, 12), generator=random)
    noise = torch.randint(VOCABULARY, tokens.shape, generator=random)
    return tokens, torch.where(torch.rand(tokens.shape, generator=random) < 0.9, (tokens * 9 + 4) % VOCABULARY, noise)


class Recommender(nn.Module):
    """Numbers through one MLP, categories through embeddings, both through another to one logit."""

    def __init__(self, linear: Make, *, sparse: bool = False, seed: int = 35) -> None:
        super().__init__()
        begun(seed)
        self.tables: Any = nn.ModuleList(nn.EmbeddingBag(100, WIDTH, mode="sum", sparse=sparse) for _ in range(3))
        self.bottom = nn.Sequential(linear(16, WIDTH), nn.ReLU(), linear(WIDTH, WIDTH), nn.ReLU())
        self.top = nn.Sequential(linear(4 * WIDTH, HIDDEN), nn.ReLU(), linear(HIDDEN, WIDTH), nn.ReLU())
        self.click = nn.Linear(WIDTH, 1)

    def forward(self, features: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits ``[samples]`` of numbers ``[samples, 16]`` and categories ``[samples, 3, 2]``."""
        numbers, categories = features
        parts = [self.bottom(numbers), *(table(categories[:, i]) for i, table in enumerate(self.tables))]
        clicks: Tensor = self.click(self.top(torch.cat(parts, -1)))
        return clicks[:, 0].float()


def clicks(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return features of 128 samples and whether each was clicked."""
    random = torch.Generator().manual_seed(13000 + number)
    numbers, categories = torch.randn(128, 16, generator=random), torch.randint(100, (128, 3, 2), generator=random)
    clicked = numbers[:, 0] + numbers[:, 1] + (categories[:, 0, 0] % 2).float() + 0.5 * torch.randn(128, generator=random)
    return (numbers, categories), (clicked > 0.5).float()


def of_clicks(logits: Tensor, clicked: Tensor) -> Tensor:
    """Return the mean loss over samples."""
    return functional.binary_cross_entropy_with_logits(logits, clicked)


class Gaussian(nn.Module):
    """An autoencoder of 64 values with a Gaussian code of 16."""

    def __init__(self, linear: Make, *, seed: int = 36) -> None:
        super().__init__()
        begun(seed)
        self.encoder = nn.Sequential(linear(64, HIDDEN), nn.SiLU(), linear(HIDDEN, 32))
        self.decoder = nn.Sequential(linear(16, HIDDEN), nn.SiLU(), linear(HIDDEN, 64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the reconstruction, mean and log variance."""
        mean, log_variance = self.encoder(x).float().chunk(2, -1)
        return self.decoder(mean + (log_variance / 2).exp() * torch.randn_like(mean)), mean, log_variance


def vectors(number: int) -> tuple[Tensor, Tensor]:
    """Return 256 vectors of eight directions with noise, twice."""
    basis = torch.randn(8, 64, generator=torch.Generator().manual_seed(13))
    random = torch.Generator().manual_seed(14000 + number)
    x = torch.randn(256, 8, generator=random) @ basis / 3 + 0.1 * torch.randn(256, 64, generator=random)
    return x, x


def evidence(out: tuple[Tensor, Tensor, Tensor], x: Tensor, weight: float = 0.02) -> Tensor:
    """Return the reconstruction's mean square and the divergence from a normal code, which ``weight`` multiplies."""
    made, mean, log_variance = out
    divergence = 0.5 * (mean**2 + log_variance.exp() - 1 - log_variance).mean()
    return functional.mse_loss(made.float(), x) + weight * divergence


class Denoiser(nn.Module):
    """A diffusion transformer of 16 patches whose layers begin as the identity, by modulations that begin at zero."""

    def __init__(self, linear: Make, *, depth: int = 2, seed: int = 37) -> None:
        super().__init__()
        begun(seed)
        self.patch, self.time = linear(48, WIDTH, bias=False), nn.Linear(32, WIDTH)
        self.layers: Any = nn.ModuleList()
        for _ in range(depth):
            layer = nn.Module()
            layer.attn, layer.mlp = Grouped(linear, is_causal=False), Swiglu(linear)
            modulate: Any = linear(WIDTH, 6 * WIDTH, bias=False)
            nn.init.zeros_(modulate.weight)
            layer.modulate = modulate
            self.layers.append(layer)
        self.norm, self.out = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 48)

    def forward(self, noisy: tuple[Tensor, Tensor]) -> Tensor:
        """Return the noise ``[images, 16, 48]`` of images and times ``[images]``."""
        x, time = noisy
        waves = time[:, None] * torch.exp(torch.linspace(0, 5, 16))
        told = functional.silu(self.time(torch.cat([waves.sin(), waves.cos()], -1)))
        x = self.patch(x)
        for layer in self.layers:
            a, b, c, d, e, f = layer.modulate(told)[:, None].chunk(6, -1)
            x = x + c * layer.attn(self.norm(x) * (1 + a) + b)
            x = x + f * layer.mlp(self.norm(x) * (1 + d) + e)
        out: Tensor = self.out(self.norm(x))
        return out


def noised(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return noisy images with their times, and the noise."""
    templates = torch.randn(16, 16, 48, generator=torch.Generator().manual_seed(11))
    random = torch.Generator().manual_seed(15000 + number)
    classes, time = torch.randint(16, (24,), generator=random), torch.rand(24, generator=random)
    noise, share = torch.randn(24, 16, 48, generator=random), time[:, None, None]
    return ((1 - share) * templates[classes] + share * noise, time), noise


def squares(out: Tensor, wanted: Tensor) -> Tensor:
    """Return the mean square."""
    return functional.mse_loss(out.float(), wanted)


class Towers(nn.Module):
    """Two MLPs whose outputs of a pair shall point the same way, and a temperature that is learned."""

    def __init__(self, linear: Make, *, seed: int = 38) -> None:
        super().__init__()
        begun(seed)
        self.towers = nn.ModuleDict(
            {name: nn.Sequential(linear(64, HIDDEN), nn.GELU(), linear(HIDDEN, 64)) for name in ("image", "text")}
        )
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:
        """Return logits ``[pairs, pairs]``."""
        image, text = (
            functional.normalize(self.towers[name](x).float(), dim=-1) for name, x in zip(("image", "text"), both, strict=True)
        )
        return image @ text.t() * self.temperature.exp()


def couples(number: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Return 64 pairs of views of one code, and which belongs to which."""
    mapping = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(14))
    random = torch.Generator().manual_seed(16000 + number)
    code = torch.randn(64, 16, generator=random)
    views = [code @ m / 4 + 0.3 * torch.randn(64, 64, generator=random) for m in mapping]
    return (views[0], views[1]), torch.arange(64)


class Repeated(nn.Module):
    """One layer that is applied three times, and a head that is the embedding."""

    def __init__(self, linear: Make, *, seed: int = 39) -> None:
        super().__init__()
        begun(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.attn, self.mlp = Grouped(linear), Swiglu(linear)
        self.norm1, self.norm2, self.norm = (nn.RMSNorm(WIDTH) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(tokens)
        for _ in range(3):
            x = x + self.attn(self.norm1(x))
            x = x + self.mlp(self.norm2(x))
        return functional.linear(self.norm(x), self.embed.weight)


class Shared(nn.Module):
    """A shared expert beside six, of which sigmoids with a bias that is no parameter choose two.

    Attributes:
        bias: moved after each step against the load.
    """

    bias: Tensor

    def __init__(self, linear: Make) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 6, bias=False)
        self.register_buffer("bias", torch.zeros(6))
        self.shared = Swiglu(linear, 128)
        self.experts = nn.ModuleList(Swiglu(linear, 64) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., WIDTH]``."""
        flat = x.reshape(-1, WIDTH)
        scores = self.router(flat).float().sigmoid()
        chosen = (scores + self.bias).topk(2, -1).indices
        shares = scores.gather(1, chosen)
        shares = (shares / shares.sum(-1, keepdim=True)).to(flat.dtype)
        out: Tensor = self.shared(flat)
        load = torch.zeros(6)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            load[number] = len(rows)
            if len(rows):
                out = out.index_add(0, rows, expert(flat[rows]) * shares[rows, place, None])
        if self.training:
            self.bias += 0.01 * (load.mean() - load).sign()
        return out.reshape(x.shape)


def run(model: nn.Module, path: Path, **options: Any) -> None:
    """Train under a watch."""
    train(model, path, **{"steps": 20, "every": 3, **options})


def twins(folder: Path, make: Callable[[bool], tuple[nn.Module, Mapping[str, Any]]], **options: Any) -> None:
    """Train a sick and a healthy model."""
    for name in ("sick", "clean"):
        model, more = make(name == "sick")
        run(model, folder / name, **{**options, **more})
