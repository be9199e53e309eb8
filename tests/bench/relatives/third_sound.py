"""The third set: sound programs of architectures and habits that the first two sets do not have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fp8debug
from tests.bench.relatives import variant
from tests.bench.relatives.plain import (
    Block,
    Decoder,
    Reward,
    SavedLinear,
    Swiglu,
    Translator,
    images,
    pairs,
    preference,
    sentences,
)
from tests.bench.relatives.stack import NOW, VOCABULARY, OwnLinear, RowLinear, ao, batch, cross_entropy, lora
from tests.bench.relatives.third_models import (
    WIDTH,
    Denoiser,
    Gaussian,
    Graph,
    Mixer,
    OneFileLinear,
    PowerLinear,
    Recommender,
    Recurrent,
    Repeated,
    Shared,
    StateSpace,
    Towers,
    begun,
    clicks,
    couples,
    evidence,
    graphs,
    noised,
    of_clicks,
    of_nodes,
    run,
    short,
    squares,
    vectors,
)


def warm(optimizer: torch.optim.Optimizer, rate: float, steps: int) -> Any:
    """Return a function that raises the learning rate from zero, and lowers it to zero at the end."""

    def before(step: int) -> None:
        share = min(1.0, (step + 1) / 6, (steps - step) / 6)
        for group in optimizer.param_groups:
            group["lr"] = rate * share

    return before


@variant("clean", met=3, clean=True, first="right")
def sound_shared_experts_with_a_balancing_bias(folder: Path) -> None:
    """Sigmoid routing, a shared expert, clipping by norm, a warm-up."""
    model: Any = ao(Decoder(nn.Linear, Shared), "rowwise", keep=("head", "*router"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    clip = lambda step, micro: nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # noqa: E731
    more = {"before": warm(optimizer, 2e-3, 24), "after_backward": clip, "exclude": ("head", "*router")}
    run(model, folder / "sick", steps=24, optimizer=optimizer, **more)


@variant("clean", met=3, clean=True, first="right")
def sound_graph_with_a_hub_and_lone_nodes(folder: Path) -> None:
    """Sums over neighbours, a hub of 90 of them, rows of zeros for nodes without any."""
    model = Graph(RowLinear)
    model.mean = False
    run(model, folder / "sick", data=graphs, loss_of=of_nodes, steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_diffusion_that_begins_as_the_identity(folder: Path) -> None:
    """Modulations begin at zero: no layer has a gradient in the first step; a moving average of the weights is kept."""
    model = fp8debug.convert(Denoiser(nn.Linear), "mxfp8", overrides={"time": None, "out": None})
    mean = copy.deepcopy(model)

    def after(step: int, watch: Any) -> None:
        with torch.no_grad():
            for kept, p in zip(mean.parameters(), model.parameters(), strict=True):
                kept.lerp_(p, 0.05)

    run(model, folder / "sick", data=noised, loss_of=squares, after_step=after, steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_selective_scan_with_dropout(folder: Path) -> None:
    model = StateSpace(OneFileLinear, dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    run(model, folder / "sick", data=short, steps=24, optimizer=optimizer, before=warm(optimizer, 3e-3, 24))


@variant("clean", met=3, clean=True, first="false alarm")
def sound_recurrent_cell_with_label_noise(folder: Path) -> None:
    """A weight that is used twelve times in a step, labels of which a third are noise, clipping by norm."""
    model = Recurrent(OwnLinear)

    def data(number: int) -> tuple[Tensor, Tensor]:
        tokens, classes = short(number)
        random = torch.Generator().manual_seed(number)
        noise = torch.randint(VOCABULARY, classes.shape, generator=random)
        return tokens, torch.where(torch.rand(classes.shape, generator=random) < 0.35, noise, classes)

    clip = lambda step, micro: nn.utils.clip_grad_norm_(model.parameters(), 0.1)  # noqa: E731
    run(model, folder / "sick", data=data, micro=2, after_backward=clip, steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_layer_used_three_times_and_tied_head(folder: Path) -> None:
    run(ao(Repeated(nn.Linear), "tensorwise", keep=()), folder / "sick", steps=24)


class _Several(Decoder):
    """Four heads for the next four tokens over a trunk."""

    def __init__(self, linear: Any) -> None:
        super().__init__(linear)
        self.heads = nn.ModuleList(nn.Linear(WIDTH, VOCABULARY, bias=False) for _ in range(4))
        del self.head

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[sequences, length, 4, VOCABULARY]``."""
        hidden = self.hidden(tokens)
        return torch.stack([head(hidden) for head in self.heads], 2)


@variant("clean", met=3, clean=True, first="right")
def sound_four_heads_over_a_frozen_trunk(folder: Path) -> None:
    model = _Several(PowerLinear)
    for name, p in model.named_parameters():
        p.requires_grad_("heads" in name or "layers.1" in name)

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        losses = [cross_entropy(out[:, : -n or None, n], classes[:, n:]) for n in range(4)]
        return torch.stack(losses).mean()

    trained = [p for p in model.parameters() if p.requires_grad]
    run(model, folder / "sick", loss_of=loss, optimizer=torch.optim.AdamW(trained, lr=2e-3), steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_adapters_merged_for_an_evaluation(folder: Path) -> None:
    """Adapters over a base in FP8; every sixth step they are added to the base, evaluated, and taken out again."""
    model: Any = Decoder(lora(nn.Linear))
    fp8debug.convert(model, "blockwise", overrides=dict.fromkeys(("*lora_A", "*lora_B", "head")))
    adapters = [layer for layer in model.modules() if hasattr(layer, "lora_A")]
    trained = [p for p in model.parameters() if p.requires_grad]

    def after(step: int, watch: Any) -> None:
        if step % 6 == 5:
            kept = [layer.base.weight.detach().clone() for layer in adapters]
            with torch.no_grad():
                for layer in adapters:
                    layer.base.weight += layer.lora_B.weight @ layer.lora_A.weight
                model.eval()(batch(500)[0])
                for layer, weight in zip(adapters, kept, strict=True):
                    layer.base.weight.copy_(weight)
            model.train()

    run(model, folder / "sick", after_step=after, steps=24, optimizer=torch.optim.AdamW(trained, lr=4e-3))


@variant("clean", met=3, clean=True, first="false alarm")
def sound_recommender_with_adagrad(folder: Path) -> None:
    """Sums of embeddings, one logit, Adagrad."""
    model = Recommender(RowLinear)
    run(
        model,
        folder / "sick",
        data=clicks,
        loss_of=of_clicks,
        optimizer=torch.optim.Adagrad(model.parameters(), lr=0.02),
        steps=24,
    )


@variant("clean", met=3, clean=True, first="right")
def sound_autoencoder_whose_divergence_warms_up(folder: Path) -> None:
    """The loss rises on purpose, as the weight of the divergence does."""
    model = fp8debug.convert(Gaussian(nn.Linear), "blockwise")

    def loss(out: Any, x: Tensor) -> Tensor:
        return evidence(out, x, 0.1 * min(1.0, NOW["step"] / 20))

    run(model, folder / "sick", data=vectors, loss_of=loss, steps=30)


@variant("clean", met=3, clean=True, first="right")
def sound_pipeline_of_four_microbatches(folder: Path) -> None:
    """All four forward passes, then the four backward passes, in one step."""
    model = Decoder(SavedLinear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with fp8debug.watch(model, folder / "sick", every=3) as watch:
        for step in range(16):
            NOW["step"] = step
            losses = [cross_entropy(model(tokens), classes) / 4 for tokens, classes in map(batch, range(4 * step, 4 * step + 4))]
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=sum(loss.item() for loss in losses))


@variant("clean", met=3, clean=True, first="right")
def sound_two_towers_with_a_learned_temperature(folder: Path) -> None:
    model: Any = ao(Towers(nn.Linear), "rowwise_with_gw_hp", keep=())

    def after(step: int, watch: Any) -> None:
        with torch.no_grad():
            model.temperature.clamp_(max=4.6)

    run(model, folder / "sick", data=couples, loss_of=of_nodes, after_step=after, steps=24, lr=3e-3)


@variant("clean", met=3, clean=True, first="right")
def sound_student_of_a_frozen_teacher(folder: Path) -> None:
    """A teacher in FP8 that nobody trains, and a student that is to say the same."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            begun(50)
            self.teacher, self.student = Mixer(PowerLinear, seed=51).requires_grad_(False), Mixer(PowerLinear, depth=1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                wanted = self.teacher(x)
            return torch.stack([self.student(x), wanted], 1)

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        student, teacher = (out[:, n].float() for n in range(2))
        return functional.kl_div(student.log_softmax(-1), (teacher * 5).softmax(-1), reduction="batchmean")

    model = Both()
    run(model, folder / "sick", data=images, loss_of=loss, optimizer=torch.optim.AdamW(model.student.parameters(), lr=2e-3))


@variant("clean", met=3, clean=True, first="right")
def sound_bf16_weights_rounded_at_random(folder: Path) -> None:
    """BF16 weights without masters whose updates are rounded stochastically."""
    model = Mixer(OwnLinear).bfloat16()

    class Stochastic(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__(model.parameters(), {"lr": 1e-3})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                m = self.state[p]["exp_avg"] = self.state[p].get("exp_avg", torch.zeros_like(p).float()).lerp(p.grad.float(), 0.1)
                v = self.state[p].get("exp_avg_sq", torch.zeros_like(m))
                v = self.state[p]["exp_avg_sq"] = v.lerp(p.grad.float() ** 2, 0.05)
                count = self.state[p]["step"] = self.state[p].get("step", 0) + 1
                moved = p.float() - 5e-5 * (m / (1 - 0.9**count)) / ((v / (1 - 0.95**count)).sqrt() + 1e-8)
                bits = moved.view(torch.int32) + torch.randint(0, 1 << 16, p.shape, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32))

    run(model, folder / "sick", data=images, loss_of=of_nodes, optimizer=Stochastic(), steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_unequal_microbatches_with_heavy_tails(folder: Path) -> None:
    """Targets with heavy tails under a Huber loss, and microbatches of 16 to 256 rows."""

    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            begun(52)
            self.net = nn.Sequential(RowLinear(64, 256), nn.SiLU(), RowLinear(256, 128), nn.SiLU(), nn.Linear(128, 1))

        def forward(self, x: Tensor) -> Tensor:
            scores: Tensor = self.net(x)
            return scores[:, 0]

    def data(number: int) -> tuple[Tensor, Tensor]:
        x = vectors(number)[0][: (16, 256, 48)[number % 3]]
        random = torch.Generator().manual_seed(number)
        tails = torch.randn(len(x), generator=random) / torch.rand(len(x), generator=random).clamp(min=0.02)
        return x, x[:, :8].sum(-1) + 0.1 * tails

    run(Forecast(), folder / "sick", data=data, loss_of=functional.huber_loss, micro=3, steps=24)


@variant("clean", met=3, clean=True, first="right")
def sound_translator_recomputed_with_dropout(folder: Path) -> None:
    class Recomputed(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            plain = super().forward
            out: Tensor = checkpoint(lambda x: functional.dropout(plain(x, memory), 0.1), x, use_reentrant=False)
            return out

    model: Any = Translator(PowerLinear)
    for layer in [*model.encoder, *model.decoder]:
        layer.__class__ = Recomputed
    run(model, folder / "sick", data=sentences, steps=20)


@variant("clean", met=3, clean=True, first="right")
def sound_policy_with_several_epochs_of_a_batch(folder: Path) -> None:
    """A policy and a value head; a batch is used for three steps, with a clipped ratio."""

    class Policy(Decoder):
        def __init__(self) -> None:
            super().__init__(nn.Linear)
            self.value = nn.Linear(WIDTH, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.hidden(tokens)
            return torch.cat([self.head(hidden), self.value(hidden)], -1)

    model = fp8debug.convert(Policy(), "tensorwise_delayed", overrides={"head": None, "value": None})
    old: dict[str, Tensor] = {}

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        chosen = out[..., :-1].float().log_softmax(-1).gather(-1, classes[..., None])[..., 0]
        if NOW["step"] % 3 == 0:
            old["said"] = chosen.detach()
        gain = (classes % 4 == 0).float()
        better = gain - out[..., -1].detach().float()
        ratio = (chosen - old["said"]).exp()
        gained = torch.minimum(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        return functional.mse_loss(out[..., -1].float(), gain) - gained

    run(model, folder / "sick", data=lambda number: batch(number // 3), loss_of=loss, steps=27, lr=5e-4)


@variant("clean", met=3, clean=True, first="right")
def sound_reward_head_with_margins_in_bf16(folder: Path) -> None:
    """A reward model that is BF16 but for its masters, in the precision in which torch trains it under autocast."""
    model = ao(Reward(nn.Linear, mlp=Swiglu), "rowwise", keep=("head",))

    def loss(rewards: Tensor, _: Tensor) -> Tensor:
        return preference(rewards - 0.5, _) + 0.01 * rewards.pow(2).mean()

    forward = model.forward

    def cast(tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = forward(tokens)
            return out

    vars(model)["forward"] = cast
    run(model, folder / "sick", data=pairs, loss_of=loss, steps=24, exclude=("head",))
