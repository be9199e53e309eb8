"""Two optimizers of one process: parts of one model, or models that train against each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.rules.reading.losses import has_other_loss

WIDTH, ROWS, STEPS = 32, 64, 6

Step = Callable[[], None]


def mlp(columns: int = WIDTH, *, hidden: int = 64, out: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(nn.Linear(columns, hidden), nn.ReLU(), nn.Linear(hidden, out))


def adam(*parts: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for part in parts for p in part.parameters()], lr=1e-3)


def noise() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def gan(is_shared: bool = False) -> tuple[nn.Module, Step]:
    """Each step of the discriminator is followed by one of the generator; the images are made once, or twice."""
    model = nn.ModuleDict({"g": mlp(), "d": mlp(out=1)})
    of_g, of_d = adam(model["g"]), adam(model["d"])

    def step() -> None:
        fake = model["g"](noise())
        update(
            of_d, (nn.functional.softplus(-model["d"](noise() + 1)) + nn.functional.softplus(model["d"](fake.detach()))).mean()
        )
        update(of_g, nn.functional.softplus(-model["d"](fake if is_shared else model["g"](noise()))).mean())

    return model, step


def critics(num: int) -> tuple[nn.Module, Step]:
    """Several steps of the critic for one of the generator."""
    model = nn.ModuleDict({"g": mlp(), "d": mlp(out=1)})
    of_g, of_d = adam(model["g"]), adam(model["d"])

    def step() -> None:
        for _ in range(num):
            update(of_d, (model["d"](model["g"](noise()).detach()) - model["d"](noise())).mean())
        update(of_g, -model["d"](model["g"](noise())).mean())

    return model, step


def soft_actor_critic() -> tuple[nn.Module, Step]:
    """Three optimizers in a ring: critic, actor, temperature."""
    model = nn.ModuleDict({"actor": mlp(), "critic": mlp(2 * WIDTH, out=1)})
    log_alpha = nn.Parameter(torch.zeros(1))
    of_actor, of_critic, of_alpha = adam(model["actor"]), adam(model["critic"]), torch.optim.Adam([log_alpha], lr=1e-3)

    def step() -> None:
        state = noise()
        update(of_critic, (model["critic"](torch.cat([state, noise()], 1)) - state[:, :1]).square().mean())
        action = model["actor"](state)
        entropy = action.square().mean()
        update(of_actor, (log_alpha.exp().detach() * entropy - model["critic"](torch.cat([state, action], 1))).mean())
        update(of_alpha, -(log_alpha.exp() * entropy.detach()).mean())

    return model, step


def actor_alone() -> tuple[nn.Module, Step]:
    """Only the actor is watched; the critic is a model of the program."""
    actor, critic = mlp(), mlp(out=1)
    of_actor, of_critic = adam(actor), adam(critic)

    def step() -> None:
        state = noise()
        value = critic(state)
        advantage = (state[:, :1] - value).detach()
        update(of_actor, -(actor(state).log_softmax(1)[:, :1] * advantage).mean())
        update(of_critic, (value - state[:, :1]).square().mean())

    return actor, step


def two_optimizers(every: int, is_first: bool = False) -> tuple[nn.Module, Step]:
    """One model, one loss: matrices by one optimizer, the head by another one, which may step in some steps alone."""
    model = nn.ModuleDict({"body": mlp(), "head": nn.Linear(WIDTH, WIDTH)})
    of_body, of_head = torch.optim.SGD(model["body"].parameters(), lr=1e-2), adam(model["head"])
    count = [0]

    def step() -> None:
        count[0] += 1
        model["head"](model["body"](noise())).square().mean().backward()
        for part, optimizer in ((model["head"], of_head), (model["body"], of_body))[:: 1 if is_first else -1]:
            if optimizer is of_body or count[0] % every == 0:
                nn.utils.clip_grad_norm_(part.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return model, step


def in_backward() -> tuple[nn.Module, Step]:
    """An optimizer for each parameter, which steps as soon as its gradient is there."""
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=1e-2) for p in model.parameters()}

    def apply(p: Tensor) -> None:
        optimizers[p].step()  # type: ignore[index]  # a parameter
        optimizers[p].zero_grad()  # type: ignore[index]

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)

    def step() -> None:
        model(noise()).square().mean().backward()

    return model, step


def side_by_side() -> tuple[nn.Module, Step]:
    """The same model in FP8 and in BF16, to compare their losses."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizers = {model: adam(model), other: adam(other)}

    def step() -> None:
        x = noise()
        for each, optimizer in optimizers.items():
            update(optimizer, (each(x) - x).square().mean())

    return model, step


def average() -> tuple[nn.Module, Step]:
    """A teacher that follows the student's weights."""
    model = mlp()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = adam(model)

    def step() -> None:
        x = noise()
        update(optimizer, (model(x) - teacher(x + 0.1 * noise())).square().mean())
        for p, mean in zip(model.parameters(), teacher.parameters(), strict=True):
            mean.lerp_(p.detach(), 0.1)

    return model, step


def one_after_the_other() -> tuple[nn.Module, Step]:
    """A tokenizer trains first, then the model."""
    model = nn.ModuleDict({"tokenizer": mlp(out=WIDTH), "model": mlp(hidden=128)})
    optimizers = adam(model["tokenizer"]), adam(model["model"])
    count = [0]

    def step() -> None:
        is_late = count[0] >= STEPS // 2
        count[0] += 1
        update(optimizers[is_late], (model["model"] if is_late else model["tokenizer"])(noise()).square().mean())

    return model, step


def followed(path: Path, made: tuple[nn.Module, Step], *, explicit: bool = False) -> bool:
    model, step = made
    with fp8debug.watch(fp8debug.convert(model, "blockwise"), path, every=100) as watch:
        for _ in range(STEPS):
            step()
            if explicit:
                watch.step()
    return has_other_loss(fp8debug.Run(path))


@pytest.mark.parametrize("explicit", [False, True])
@pytest.mark.parametrize("make", [gan, lambda: gan(True), lambda: critics(3), soft_actor_critic, actor_alone])
def test_models_that_train_against_each_other(make: Callable[[], tuple[nn.Module, Step]], explicit: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert followed(tmp_path / "run", make(), explicit=explicit)


def actor_and_critic(x: Tensor, model: nn.ModuleDict) -> Tensor:
    """One loss, policy + value - entropy, of two models; the advantage has no gradient."""
    logits, value = model["actor"](x), model["critic"](x)
    policy = -(logits.log_softmax(1)[:, :1] * (x[:, :1] - value).detach()).mean()
    entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
    loss: Tensor = policy + 0.5 * (value - x[:, :1]).square().mean() - 0.01 * entropy
    return loss


def common_trunk(x: Tensor, model: nn.ModuleDict) -> Tensor:
    hidden = model["trunk"](x)
    loss: Tensor = model["actor"](hidden).square().mean() + model["critic"](hidden).square().mean() / 2
    return loss


def auxiliary(x: Tensor, model: nn.ModuleDict) -> Tensor:
    """A probe of an inner layer, whose gradient stops there, and a penalty of the weights."""
    hidden = model["trunk"](x)
    penalty = sum(p.square().sum() for part in ("trunk", "actor", "probe") for p in model[part].parameters())
    loss: Tensor = model["actor"](hidden).square().mean() + model["probe"](hidden.detach()).square().mean() + 1e-4 * penalty
    return loss


@pytest.mark.parametrize(
    ("loss_of", "is_separate"), [(actor_and_critic, True), (common_trunk, False), (auxiliary, False)]
)  # fmt: skip
def test_one_loss_that_is_a_sum_of_losses_of_separate_models(
    loss_of: Callable[[Tensor, nn.ModuleDict], Tensor], is_separate: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"trunk": mlp(), "actor": mlp(), "critic": mlp(out=1), "probe": nn.Linear(WIDTH, 1)})
    optimizer = adam(model)
    with fp8debug.watch(fp8debug.convert(model, "blockwise"), tmp_path / "run", every=100) as watch:
        for _ in range(STEPS):
            loss = loss_of(noise(), model)
            update(optimizer, loss)
            watch.step(loss=loss)
    assert has_other_loss(fp8debug.Run(tmp_path / "run")) == is_separate


ALONE: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "two optimizers": lambda: two_optimizers(1),
    "one in every second step": lambda: two_optimizers(2),
    "the same one first": lambda: two_optimizers(2, is_first=True),
    "an optimizer for each parameter": in_backward,
    "a copy in BF16": side_by_side,
    "an average of weights": average,
    "one after the other": one_after_the_other,
}


@pytest.mark.parametrize("case", ALONE)
def test_one_model_that_trains_alone(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert not followed(tmp_path / "run", ALONE[case]())
