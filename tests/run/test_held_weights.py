"""Weights that an arm holds, and the precision of their inference."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.run.arms import Arm, apply_arm
from fp8debug.run.held_weights import HeldWeights
from tests.trials.laboratory import Chain


def chain() -> nn.Module:
    return fp8debug.convert(Chain(), "blockwise")


def delayed() -> nn.Module:
    return fp8debug.convert(Chain(), "tensorwise_delayed")


def plain() -> nn.Module:
    return Chain()


def torchao() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
    net = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 16)).to(torch.bfloat16)
    float8.convert_to_float8_training(net, config=replace(float8.Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True))
    return net


class Training:
    """A few steps of a model in an arm; each forward pass follows a ``hold()`` once ``is_held``."""

    def __init__(self, made: Any, arm: Arm) -> None:
        torch.manual_seed(0)
        self.model = made()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.held = HeldWeights(arm, [self.model])
        self.is_held = False
        self.number = 0
        apply_arm(arm, [self.model])

    def step(self) -> float:
        if self.is_held:
            self.held.hold()
        self.number += 1
        dtype = next(self.model.parameters()).dtype
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(self.number)).to(dtype)
        loss = functional.cross_entropy(self.model(x).float(), x[:, :16].argmax(1))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def weights(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def arm(compute: str, inference: str | None = None) -> Arm:
    return Arm(name="a", compute=compute, recipe="blockwise", held=4, inference=inference)


@pytest.mark.parametrize("made", [chain, delayed, plain, torchao])
@pytest.mark.parametrize(("trained", "inference"), [("bf16", "fp8"), ("fp8", "bf16")])
def test_weights_stay_as_they_were_trained_and_their_inference_changes_its_precision(
    made: Any, trained: str, inference: str
) -> None:
    own, changed = Training(made, arm(trained)), Training(made, arm(trained, inference))
    assert [own.step() for _ in range(5)] == [changed.step() for _ in range(5)]
    trained_weights = own.weights()
    assert all(torch.equal(a, b) for a, b in zip(trained_weights, changed.weights(), strict=True))
    own.is_held = changed.is_held = True
    losses = [(own.step(), changed.step()) for _ in range(4)]
    for training in (own, changed):
        training.held.hold()
        assert all(torch.equal(a, b) for a, b in zip(trained_weights, training.weights(), strict=True))
    assert all(one != other for one, other in losses), "the precision did not change"
    again = Training(made, arm(inference))
    with torch.no_grad():
        for parameter, saved in zip(again.model.parameters(), trained_weights, strict=True):
            parameter.copy_(saved)
    again.number, again.is_held = 5, True
    if made is not delayed:  # whose first scales are those of its history
        assert [again.step() for _ in range(4)] == [other for _, other in losses]


def test_an_inference_needs_held_steps_and_a_name() -> None:
    with pytest.raises(UsageError, match="inference needs at least one step with the weights held, got 0"):
        Arm(name="a", inference="fp8")
    with pytest.raises(UsageError, match="got -1"):
        Arm(name="a", held=-1)
    with pytest.raises(UnknownNameError, match="unknown inference of an arm 'fp4'"):
        Arm(name="a", held=1, inference="fp4")


def test_an_arm_without_held_steps_is_written_as_before() -> None:
    assert set(Arm(name="a").to_dict()) == {"name", "compute", "fallbacks", "recipe"}
    assert Arm(name="a", held=3, inference="bf16").to_dict()["held"] == 3
