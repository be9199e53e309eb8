"""The fourth set: sound programs of habits that the first three sets do not have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

import fp8debug
from tests.bench.relatives import variant
from tests.bench.relatives.fourth_faults import Lion
from tests.bench.relatives.fourth_models import (
    HIDDEN,
    WIDTH,
    Convolutions,
    Latents,
    LowRank,
    Regression,
    Separate,
    Several,
    Switch,
    TiedHead,
    WithBalance,
    counted,
    pictures,
    several,
    table,
    with_balance,
)
from tests.bench.relatives.plain import Block, Decoder, SavedLinear, Swiglu
from tests.bench.relatives.stack import NOW, Muon, OwnLinear, RowLinear, TensorLinear, ao, batch, cross_entropy
from tests.bench.relatives.third_models import OneFileLinear, PowerLinear, begun, of_nodes, run, squares
from tests.bench.relatives.third_sound import warm


@variant("clean", met=4, clean=True, first="right")
def sound_lion_that_decays_to_zero(folder: Path) -> None:
    """Warm-up, a decay of the rate to zero, and a weight decay that pulls what has no use to zero."""
    model = Decoder(TensorLinear, attention=LowRank)

    class Decayed(Lion):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                p *= 1 - 40 * self.param_groups[0]["lr"]
            super().step()

    optimizer = Decayed(model.parameters(), 1e-3)
    run(model, folder / "sick", steps=30, optimizer=optimizer, before=warm(optimizer, 1e-3, 30))


@variant("clean", met=4, clean=True, first="right")
def sound_convolutions_with_dropout_and_wrong_labels(folder: Path) -> None:
    """Half of the channels are dropped, a fifth of the labels is wrong."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        x, classes = pictures(number)
        random = torch.Generator().manual_seed(number)
        wrong = torch.randint(16, classes.shape, generator=random)
        return x, torch.where(torch.rand(classes.shape, generator=random) < 0.2, wrong, classes)

    model = Convolutions(RowLinear, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    run(model, folder / "sick", data=data, loss_of=of_nodes, steps=24, optimizer=optimizer, micro=2)


@variant("clean", met=4, clean=True, first="right")
def sound_average_of_weights_swapped_in(folder: Path) -> None:
    """Every fifth step the average of the weights is evaluated in the model itself, and the weights come back."""
    model = fp8debug.convert(Latents(nn.Linear), "rowwise", overrides={"head": None})
    mean = copy.deepcopy(model.state_dict())

    def after(step: int, watch: Any) -> None:
        with torch.no_grad():
            for name, value in model.state_dict().items():
                mean[name].lerp_(value, 0.1)
            if step % 5 == 4:
                own = copy.deepcopy(model.state_dict())
                model.load_state_dict(mean)
                model.eval()(counted(900)[0])
                model.load_state_dict(own)
                model.train()

    run(model, folder / "sick", data=counted, loss_of=of_nodes, after_step=after, steps=24)


@variant("clean", met=4, clean=True, first="right")
def sound_gradients_clipped_by_the_size_of_rows(folder: Path) -> None:
    """Each row's gradient is clipped to a hundredth of the row's own size, after all microbatches."""
    model = Regression(PowerLinear)

    def after(step: int, micro: int) -> None:
        if micro == 1:
            for p in model.parameters():
                if p.dim() == 2 and p.grad is not None:
                    size, grown = (t.norm(dim=1, keepdim=True) for t in (p.detach(), p.grad))
                    p.grad *= (0.01 * size.clamp(min=1e-3) / grown.clamp(min=1e-6)).clamp(max=1)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    run(
        model,
        folder / "sick",
        data=table,
        loss_of=functional.smooth_l1_loss,
        micro=2,
        after_backward=after,
        optimizer=optimizer,
        steps=24,
    )


@variant("clean", met=4, clean=True, first="right")
def sound_layers_thawed_one_after_another(folder: Path) -> None:
    """The head learns first; the upper layer joins at step 8, the lower at step 16, each with a smaller rate."""
    model: Any = ao(Decoder(nn.Linear, attention=Separate), "tensorwise", keep=("head",))
    parts = [[*model.head.parameters(), *model.norm.parameters()], [*model.layers[1].parameters()]]
    parts.append([*model.layers[0].parameters(), *model.embed.parameters()])
    groups = [{"params": part, "lr": 2e-3 * 0.5**n} for n, part in enumerate(parts)]

    def before(step: int) -> None:
        for number, part in enumerate(parts):
            for p in part:
                p.requires_grad_(step >= 8 * number)

    optimizer = torch.optim.AdamW(groups)
    run(model, folder / "sick", before=before, optimizer=optimizer, steps=24, exclude=("head",))


@variant("clean", met=4, clean=True, first="right")
def sound_layer_frozen_and_thawed_again(folder: Path) -> None:
    """One layer rests from step 6 to 14, as an alternating scheme does."""
    model: Any = Decoder(RowLinear)

    def before(step: int) -> None:
        model.layers[0].requires_grad_(not 6 <= step < 14)

    run(model, folder / "sick", before=before, steps=24)


@variant("clean", met=4, clean=True, first="right")
def sound_experts_recomputed(folder: Path) -> None:
    """Layers of experts are recomputed by the older kind of checkpoint, which runs them without gradients first."""

    class Recomputed(Block):
        def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
            out: Tensor = checkpoint(super().forward, x, use_reentrant=True)
            return out

    model: Any = Decoder(OneFileLinear, lambda linear: Switch(linear))
    for layer in model.layers:
        layer.__class__ = Recomputed
    run(model, folder / "sick", steps=20)


@variant("clean", met=4, clean=True, first="right")
def sound_muon_for_matrices_and_adam_for_the_rest(folder: Path) -> None:
    model: Any = TiedHead(nn.Linear)
    fp8debug.convert(model, "blockwise", overrides={"head": None})
    matrices = [p for n, p in model.named_parameters() if "layers" in n and p.dim() == 2]
    rest = [p for n, p in model.named_parameters() if not ("layers" in n and p.dim() == 2)]
    first, second = Muon(matrices, 0.02, scale=0.2), torch.optim.AdamW(rest, lr=2e-3)
    with fp8debug.watch(model, folder / "sick", every=3) as watch:
        for step in range(24):
            NOW["step"] = step
            tokens, classes = batch(step)
            loss = cross_entropy(model(tokens), classes)
            loss.backward()
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
            watch.step(loss=loss.item())


@variant("clean", met=4, clean=True, first="right")
def sound_sequences_that_grow(folder: Path) -> None:
    """A curriculum: 8 tokens, then 16, 32 and 80, with a short warm-up after each."""
    model = Several(SavedLinear)

    def data(number: int) -> tuple[Tensor, Tensor]:
        length = (8, 16, 32, 80)[min(number // 7, 3)]
        tokens, classes = batch(number)
        return tokens[:, :length], classes[:, :length]

    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step % 7 + 1) / 3)

    run(model, folder / "sick", data=data, loss_of=several, optimizer=optimizer, before=before, steps=28)


@variant("clean", met=4, clean=True, first="right")
def sound_generator_and_critic(folder: Path) -> None:
    """Two losses and two optimizers in turns; the critic has a penalty on its outputs."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            begun(71)
            make = lambda i, o: RowLinear(i, o, bias=False)  # noqa: E731
            self.generator = nn.Sequential(make(32, HIDDEN), nn.SiLU(), make(HIDDEN, 64))
            self.critic = nn.Sequential(make(64, HIDDEN), nn.LeakyReLU(0.2), make(HIDDEN, WIDTH), nn.LeakyReLU(0.2))
            self.judge = nn.Linear(WIDTH, 1)

        def judged(self, x: Tensor) -> Tensor:
            said: Tensor = self.judge(self.critic(x))
            return said[:, 0].float()

    model = Pair()
    makes = torch.optim.Adam(model.generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    judges = torch.optim.Adam([*model.critic.parameters(), *model.judge.parameters()], lr=5e-4, betas=(0.5, 0.9))
    basis = torch.randn(8, 64, generator=torch.Generator().manual_seed(31))
    with fp8debug.watch(model, folder / "sick", every=3) as watch:
        for step in range(24):
            NOW["step"] = step
            random = torch.Generator().manual_seed(31000 + step)
            real = torch.randn(128, 8, generator=random) @ basis / 3
            made = model.generator(torch.randn(128, 32, generator=random))
            good, bad = model.judged(real), model.judged(made.detach())
            critic = functional.softplus(-good).mean() + functional.softplus(bad).mean() + 1e-3 * good.pow(2).mean()
            critic.backward()
            judges.step()
            model.zero_grad()
            loss = functional.softplus(-model.judged(made)).mean()
            loss.backward()
            makes.step()
            model.zero_grad()
            watch.step(loss=loss.item() + critic.item())


@variant("clean", met=4, clean=True, first="right")
def sound_teacher_that_follows_its_student(folder: Path) -> None:
    """A teacher whose weights are an average of the student's gives the targets of masked inputs."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            begun(72)
            self.student = Latents(OwnLinear)
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.predict = OwnLinear(16, 16, bias=False)

        def forward(self, tokens: Tensor) -> Tensor:
            random = torch.Generator().manual_seed(int(tokens.sum()))
            masked = torch.where(torch.rand(tokens.shape, generator=random) < 0.3, torch.zeros_like(tokens), tokens)
            with torch.no_grad():
                wanted = self.teacher(tokens).float()
            said = self.predict(self.student(masked)).float()
            return 2 - 2 * functional.cosine_similarity(said, wanted, dim=-1)

    model = Pair()

    def after(step: int, watch: Any) -> None:
        with torch.no_grad():
            for kept, p in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                kept.lerp_(p, 0.02)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    options: Any = {"loss_of": lambda out, _: out.mean(), "optimizer": optimizer, "after_step": after}
    run(model, folder / "sick", data=counted, steps=24, **options)


@variant("clean", met=4, clean=True, first="right")
def sound_idle_experts_and_a_large_z_loss(folder: Path) -> None:
    """Eight experts of which a bias of the router leaves four idle, and a weight of one tenth on the router's squares."""
    model: Any = WithBalance(nn.Linear, lambda linear: Switch(linear, weight=0.1))
    fp8debug.convert(model, "tensorwise_delayed", overrides={"head": None, "*router": None})
    with torch.no_grad():
        for layer in model.layers:
            layer.mlp.router.weight[4:] = 0.0
            layer.mlp.router.weight[:4] *= 8
    run(model, folder / "sick", loss_of=with_balance, steps=24)


@variant("clean", met=4, clean=True, first="right")
def sound_critic_with_spectral_norm(folder: Path) -> None:
    """Weights are divided by their largest singular value at each forward pass."""
    model: Any = Regression(nn.Linear)
    fp8debug.convert(model, "rowwise", overrides={"out": None})
    for layer in (model.fc1, model.fc2, model.fc3):
        spectral_norm(layer)
    run(model, folder / "sick", data=table, loss_of=squares, steps=24)


@variant("clean", met=4, clean=True, first="right")
def sound_tied_head_in_fp8_on_purpose(folder: Path) -> None:
    """A small model whose head is the embedding and runs in rows of FP8, with a loss on the squares of log sums."""
    model = TiedHead(RowLinear, depth=2)

    def loss(out: Tensor, classes: Tensor) -> Tensor:
        return cross_entropy(out, classes) + 0.01 * out.float().logsumexp(-1).pow(2).mean()

    run(model, folder / "sick", loss_of=loss, steps=24, lr=1e-3)


@variant("clean", met=4, clean=True, first="right")
def sound_targets_that_change_their_task(folder: Path) -> None:
    """At step 12 a second task begins: other labels, so that the loss jumps back to where it began."""

    def data(number: int) -> tuple[Tensor, Tensor]:
        tokens, classes = batch(number)
        return tokens, (classes * 3 + 1) % 64 if number >= 12 else classes

    run(ao(Decoder(nn.Linear, Swiglu), "rowwise", keep=("head",)), folder / "sick", data=data, steps=24, exclude=("head",))
