"""Small models of twelve kinds, each with its task: ``model(step)`` is the loss of one batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS, ROWS, LENGTH = 64, 8, 16


class Program(nn.Module):
    """A model and its data.

    Args:
        width: of the model.
        dropout: probability.
        label_noise: share of the targets that are random.
        seed: of the data.

    Attributes:
        high_precision: globs of Linears that a user leaves out of FP8.
    """

    high_precision: tuple[str, ...] = ()

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__()
        self.width, self.dropout, self.label_noise, self.seed = width, dropout, label_noise, seed

    def draw(self, step: int) -> torch.Generator:
        """Return the generator of a batch."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + step)

    def words(self, draw: torch.Generator, length: int = LENGTH) -> Tensor:
        """Return ``[ROWS, length]`` words: a chain in which the next word follows from the last, but for the noise."""
        words = torch.randint(WORDS, (ROWS, length), generator=draw)
        is_noise = torch.rand(ROWS, length, generator=draw) < self.label_noise
        for place in range(1, length):
            words[:, place] = torch.where(is_noise[:, place], words[:, place], (words[:, place - 1] * 5 + 3) % WORDS)
        return words

    def noisy(self, labels: Tensor, num_classes: int, draw: torch.Generator) -> Tensor:
        """Return labels of which a share is random."""
        others = torch.randint(num_classes, labels.shape, generator=draw)
        return torch.where(torch.rand(labels.shape, generator=draw) < self.label_noise, others, labels)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of ``[..., classes]``; labels of -100 do not count."""
    return functional.cross_entropy(logits.float().flatten(0, -2), labels.flatten())


class Attention(nn.Module):
    """Heads of 16 over a fused qkv."""

    def __init__(self, width: int, *, causal: bool, bias: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, width // 16, 16).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.proj(y.transpose(1, 2).reshape(rows, length, width))
        return out


class Mlp(nn.Module):
    """Two Linears around an activation."""

    def __init__(self, width: int, hidden: int, act: Callable[[Tensor], Tensor] = functional.gelu) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act = nn.Linear(width, hidden), nn.Linear(hidden, width), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out


class GatedMlp(nn.Module):
    """SwiGLU with both inputs in one Linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    """Norm, mixing, norm, MLP, with residuals and dropout."""

    def __init__(
        self, width: int, mix: nn.Module, mlp: nn.Module, dropout: float, norm: Callable[[int], nn.Module] = nn.LayerNorm
    ) -> None:
        super().__init__()
        self.ln_1, self.mix, self.ln_2, self.mlp, self.drop = norm(width), mix, norm(width), mlp, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.mix(self.ln_1(x)))
        out: Tensor = x + self.drop(self.mlp(self.ln_2(x)))
        return out


class SharedExperts(nn.Module):
    """One expert that all tokens take beside four of which each takes two; the gates are sigmoids, normalized."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4, bias=False)
        self.shared = GatedMlp(width, 2 * width)
        self.experts = nn.ModuleList(GatedMlp(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        gates, places = self.router(flat).float().sigmoid().topk(2)
        gates = gates / gates.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, turn = (places == number).nonzero(as_tuple=True)
            if len(rows):
                out = out.index_add(0, rows, (gates[rows, turn, None] * expert(flat[rows])).to(out.dtype))
        result: Tensor = self.shared(x) + out.reshape(x.shape)
        return result


class MixtureOfExperts(Program):
    """A decoder of shared and routed experts."""

    high_precision = ("*router", "lm_head")

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(
            Layer(width, Attention(width, causal=True, bias=False), SharedExperts(width), dropout, nn.RMSNorm)
        )
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, WORDS, bias=False)

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 1)
        return cross_entropy(self.lm_head(self.norm(self.layers(self.embed(words[:, :-1])))), words[:, 1:])


class EncoderDecoder(Program):
    """torch's own ``nn.Transformer`` over padded sequences: padding rows are zeros and have no loss."""

    high_precision = ("*out_proj", "head")

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS + 1, width, padding_idx=WORDS)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        self.body = nn.Transformer(width, width // 16, 1, 1, 4 * width, dropout, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, WORDS)

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        source = self.words(draw)
        lengths = torch.randint(4, LENGTH + 1, (ROWS, 1), generator=draw)
        is_padding = torch.arange(LENGTH) >= lengths
        target = self.noisy((source.flip(1) + 1) % WORDS, WORDS, draw).masked_fill(is_padding, WORDS)
        source = source.masked_fill(is_padding, WORDS)
        before = torch.cat([torch.zeros(ROWS, 1, dtype=torch.int64), target[:, :-1]], 1)
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH).isinf()
        y = self.body(
            self.embed(source) + self.positions, self.embed(before) + self.positions, tgt_mask=causal,
            src_key_padding_mask=is_padding, memory_key_padding_mask=is_padding, tgt_is_causal=True,
        )  # fmt: skip
        return cross_entropy(self.head(y), target.masked_fill(is_padding, -100))


class T5(Program):
    """T5 of transformers: no scale in attention, embeddings of unit size, a relative position table, a tied head."""

    high_precision = ("*lm_head",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        from transformers import T5Config, T5ForConditionalGeneration

        self.body = T5ForConditionalGeneration(
            T5Config(vocab_size=WORDS, d_model=width, d_kv=16, d_ff=2 * width, num_layers=1, num_heads=width // 16,
                     dropout_rate=dropout, feed_forward_proj="gated-gelu", decoder_start_token_id=0, pad_token_id=0)
        )  # fmt: skip

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        source = self.words(draw)
        out: Tensor = self.body(input_ids=source, labels=self.noisy(source.roll(1, 1), WORDS, draw)).loss
        return out


class Llama(Program):
    """Llama of transformers with grouped queries and tied embeddings."""

    high_precision = ("*lm_head",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        from transformers import LlamaConfig, LlamaForCausalLM

        self.body = LlamaForCausalLM(
            LlamaConfig(vocab_size=WORDS, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
                        num_attention_heads=width // 16, num_key_value_heads=2, attention_dropout=dropout,
                        max_position_embeddings=LENGTH, tie_word_embeddings=True)
        )  # fmt: skip

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 1)
        return cross_entropy(self.body(input_ids=words[:, :-1]).logits, words[:, 1:])


class VisionTransformer(Program):
    """Patches, a class token, mean-free images and a classifier over one token of each."""

    high_precision = ("head",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.patch = nn.Linear(48, width)
        self.layers = nn.Sequential(
            *(Layer(width, Attention(width, causal=False), Mlp(width, 4 * width), dropout) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)
        self.register_buffer("means", torch.randn(16, 16, 48, generator=torch.Generator().manual_seed(seed)))

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        labels = torch.randint(16, (16,), generator=draw)
        images = self.get_buffer("means")[labels] + torch.randn(16, 16, 48, generator=draw)
        h = torch.cat([self.cls_token.expand(16, -1, -1), self.patch(images)], 1) + self.positions
        return cross_entropy(self.head(self.norm(self.layers(h))[:, 0]), self.noisy(labels, 16, draw))


class SelectiveScan(nn.Module):
    """Mamba's block: a short convolution, input-dependent steps, a diagonal recurrence in FP32, a gate."""

    def __init__(self, width: int, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        inner = 2 * width
        self.state, self.rank = state, rank
        self.in_proj, self.out_proj = nn.Linear(width, 2 * inner, bias=False), nn.Linear(inner, width, bias=False)
        self.conv = nn.Conv1d(inner, inner, 4, groups=inner, padding=3)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.a_log = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(inner, 1))
        self.skip = nn.Parameter(torch.ones(inner))
        with torch.no_grad():
            self.dt_proj.bias.uniform_(math.log(0.001), math.log(0.1)).exp_().expm1_().log_()

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.in_proj(x).chunk(2, -1)
        x = functional.silu(self.conv(x.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(x).split([self.rank, self.state, self.state], -1)
        dt = functional.softplus(self.dt_proj(dt)).float()
        decay = torch.exp(dt[..., None] * -self.a_log.float().exp())
        drive = dt[..., None] * b.float()[:, :, None] * x.float()[..., None]
        h, outputs = torch.zeros_like(drive[:, 0]), []
        for place in range(x.shape[1]):
            h = decay[:, place] * h + drive[:, place]
            outputs.append((h * c.float()[:, place, None]).sum(-1))
        y = torch.stack(outputs, 1).to(x.dtype) + self.skip * x
        out: Tensor = self.out_proj((y * functional.silu(gate)).to(x.dtype))
        return out


class Mamba(Program):
    """Selective scans without attention or MLP."""

    high_precision = ("*x_proj", "*dt_proj", "lm_head")

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS, width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(3))
        self.mixers = nn.ModuleList(SelectiveScan(width) for _ in range(2))
        self.lm_head = nn.Linear(width, WORDS, bias=False)

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 1)
        x = self.embed(words[:, :-1])
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            x = x + functional.dropout(mixer(norm(x)), self.dropout)
        return cross_entropy(self.lm_head(self.norms[-1](x)), words[:, 1:])


class RewardModel(Program):
    """A decoder whose head has one output at the last token, trained on pairs: the gradient of all other tokens is small or 0."""

    high_precision = ("score",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(
            *(Layer(width, Attention(width, causal=True), GatedMlp(width, 2 * width), dropout, nn.RMSNorm) for _ in range(2))
        )
        self.norm, self.score = nn.RMSNorm(width), nn.Linear(width, 1, bias=False)

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        words = self.words(draw)
        counts = (words < WORDS // 2).sum(1)
        rewards = self.score(self.norm(self.layers(self.embed(words)))[:, -1])[:, 0].float()
        better = torch.sign((counts[:4] - counts[4:]).float() + 0.5)
        flips = torch.rand(4, generator=draw) < self.label_noise
        return -functional.logsigmoid((rewards[:4] - rewards[4:]) * torch.where(flips, -better, better)).mean()


class MultiToken(Program):
    """A decoder with three heads for the next three tokens, the later ones over a block of their own (Medusa, DeepSeek's MTP)."""

    high_precision = ("heads.*",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.Sequential(
            *(Layer(width, Attention(width, causal=True), Mlp(width, 4 * width), dropout) for _ in range(2))
        )
        self.extra = nn.ModuleList(Mlp(width, width, functional.silu) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(width, WORDS, bias=False) for _ in range(3))

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 3)
        h = self.layers(self.embed(words[:, :LENGTH]))
        hidden = [h, *(h + extra(h) for extra in self.extra)]
        losses = [
            cross_entropy(f(x), words[:, n : n + LENGTH]) for n, (f, x) in enumerate(zip(self.heads, hidden, strict=True), 1)
        ]
        return losses[0] + 0.3 * (losses[1] + losses[2])


class TiedDecoder(Program):
    """GPT-2's shape: learned positions, biases, residual projections that start small, a head tied to the embedding."""

    high_precision = ("head",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.layers = nn.Sequential(
            *(Layer(width, Attention(width, causal=True), Mlp(width, 4 * width), dropout) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(6) if name.endswith(("proj.weight", "fc2.weight")) else 0.02)
        self.head.weight = self.wte.weight

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 1)
        h = functional.dropout(self.wte(words[:, :-1]) + self.wpe.weight, self.dropout)
        return cross_entropy(self.head(self.norm(self.layers(h))), words[:, 1:])


class Adapter(nn.Module):
    """A frozen Linear and a trained product of rank 16 beside it, which starts from 0."""

    def __init__(self, base: nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(base.in_features, 16, bias=False), nn.Linear(16, base.out_features, bias=False)
        self.dropout = dropout
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + 2.0 * self.lora_b(self.lora_a(functional.dropout(x, self.dropout)))
        return out


class Lora(Program):
    """A frozen decoder with adapters at its qkv and MLP; only they train."""

    high_precision = ("*lora_a", "*lora_b", "head")

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed = nn.Embedding(WORDS, width)
        self.layers: Any = nn.Sequential(
            *(Layer(width, Attention(width, causal=True), Mlp(width, 2 * width), 0.0) for _ in range(2))
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.requires_grad_(False)
        layer: Any
        for layer in self.layers:
            layer.mix.qkv = Adapter(layer.mix.qkv, dropout)
            layer.mlp.fc1, layer.mlp.fc2 = Adapter(layer.mlp.fc1, dropout), Adapter(layer.mlp.fc2, dropout)

    def forward(self, step: int) -> Tensor:
        words = self.words(self.draw(step), LENGTH + 1)
        return cross_entropy(self.head(self.norm(self.layers(self.embed(words[:, :-1])))), words[:, 1:])


class DiffusionLayer(nn.Module):
    """DiT's block: shift, scale and gate of a condition, all 0 at first, so that the block begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.mix, self.mlp, self.modulation = Attention(width, causal=False), Mlp(width, 4 * width), nn.Linear(width, 6 * width)
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        a, b, c, d, e, f = self.modulation(functional.silu(condition))[:, None].chunk(6, -1)
        x = x + c * self.mix(self.norm_1(x) * (1 + a) + b)
        out: Tensor = x + f * self.mlp(self.norm_2(x) * (1 + d) + e)
        return out


class Diffusion(Program):
    """A denoiser with zero-initialized modulation and output."""

    high_precision = ("out", "time.*")

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.patch, self.time = nn.Linear(32, width), Mlp(width, width, functional.silu)
        self.layers = nn.ModuleList(DiffusionLayer(width) for _ in range(2))
        self.out = nn.Linear(width, 32)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        waves = torch.sin(torch.rand(ROWS, 1, 1, generator=draw) * 3 + torch.arange(16 * 32).view(16, 32) * 0.05)
        noise = torch.randn(waves.shape, generator=draw)
        level = torch.rand(ROWS, 1, 1, generator=draw)
        angles = level[:, 0] * torch.exp(torch.linspace(0, 5, self.width // 2))
        condition = self.time(torch.cat([angles.sin(), angles.cos()], -1))
        h = self.patch((1 - level) * waves + level * noise)
        for layer in self.layers:
            h = layer(h, condition)
        out: Tensor = (self.out(h).float() - noise).square().mean()
        return out


class TwoTowers(Program):
    """CLIP's loss: two encoders, unit vectors, a learned temperature; logits of one batch against each other."""

    high_precision = ("*project",)

    def __init__(self, width: int, dropout: float, label_noise: float, seed: int) -> None:
        super().__init__(width, dropout, label_noise, seed)
        self.embed, self.patch = nn.Embedding(WORDS, width), nn.Linear(48, width)
        self.text, self.image = (
            nn.Sequential(*(Layer(width, Attention(width, causal=False), Mlp(width, 2 * width), dropout) for _ in range(2)))
            for _ in range(2)
        )
        self.text_project, self.image_project = nn.Linear(width, 32, bias=False), nn.Linear(width, 32, bias=False)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.register_buffer("pictures", torch.randn(WORDS, 48, generator=torch.Generator().manual_seed(seed)))

    def forward(self, step: int) -> Tensor:
        draw = self.draw(step)
        words = torch.randint(WORDS, (16, 16), generator=draw)
        images = self.get_buffer("pictures")[self.noisy(words, WORDS, draw)] + 0.5 * torch.randn(16, 16, 48, generator=draw)
        text = functional.normalize(self.text_project(self.text(self.embed(words)).mean(1)).float(), dim=-1)
        image = functional.normalize(self.image_project(self.image(self.patch(images)).mean(1)).float(), dim=-1)
        logits = self.log_scale.float().exp().clamp(max=100) * text @ image.t()
        pairs = torch.arange(16)
        return (functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.t(), pairs)) / 2


ARCHITECTURES: dict[str, type[Program]] = {
    "moe_shared": MixtureOfExperts,
    "encoder_decoder": EncoderDecoder,
    "t5": T5,
    "llama": Llama,
    "vit": VisionTransformer,
    "mamba": Mamba,
    "reward": RewardModel,
    "multi_token": MultiToken,
    "tied": TiedDecoder,
    "lora": Lora,
    "diffusion": Diffusion,
    "two_towers": TwoTowers,
}
