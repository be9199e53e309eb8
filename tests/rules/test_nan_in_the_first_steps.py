"""A NaN within the first steps has an origin, which is told, unless the whole model had left its course before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8debug.rules import triage
from tests.bench.situations.stack import Model, cross_entropy, train
from tests.rules.sick_wholeruns import losses
from tests.synthetic import Override, build


@pytest.mark.parametrize("factors", [(1, 0.9, 1.05, 0.95, 1.15, 1), (1, 1, 1, 1, 3, 1)], ids=["noisy", "one high loss"])
def test_the_weight_that_became_nan_is_named(factors: Sequence[float], tmp_path: Path) -> None:
    model, now = Model(), 0

    def before(step: int) -> None:
        nonlocal now
        now = step
        if step == 5:
            with torch.no_grad():
                model.blocks[1].up.weight[3, 3] = float("nan")

    loss_of = lambda out, classes: cross_entropy(out, classes) * factors[now]  # noqa: E731  # of one line
    train(model, tmp_path / "run", steps=6, every=1, lr=1e-5, before=before, loss_of=loss_of)
    (finding,) = triage(tmp_path / "run")
    assert (finding.code, finding.name, finding.module) == ("F125", "nonfinite-weight", "blocks.1.up"), finding.message
    assert "at step 5 (1 element), which held it when the step began" in finding.message  # and its cast spread it over a block


def test_a_noisy_loss_before_a_nan_is_no_divergence(tmp_path: Path) -> None:
    values = (4.3, 3.8, 4.5, 4.1, 4.9)
    found = triage(build(tmp_path / "run", steps=losses(lambda step: values[step] if step < 5 else float("nan"))))
    assert "F127" not in {finding.code for finding in found}


@pytest.mark.parametrize("values", [(4.3, 9.0, 40.0, 31.0), (4.3, 9.0, 31.0, 40.0)], ids=["falls back", "rises"])
def test_a_loss_that_rises_with_all_modules_before_a_nan_is_a_divergence(values: Sequence[float], tmp_path: Path) -> None:
    grown = [
        Override(tensor="input", reference="operand", actual=None, steps=(step, step + 1), slots={"amax": 2.0**step})
        for step in range(len(values) + 1)
    ]
    steps = losses(lambda step: values[step] if step < len(values) else float("nan"))
    found = triage(build(tmp_path / "run", steps=steps, every=1, num_steps=8, overrides=grown))
    assert "F127" in {finding.code for finding in found}


@pytest.mark.parametrize("is_zero", [True, False], ids=["zero gradient", "gradient"])
def test_an_update_that_is_nan_of_a_finite_gradient_blames_the_optimizer(is_zero: bool, tmp_path: Path) -> None:
    class DividesByNorm(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no closure here
            for p in self.param_groups[0]["params"]:
                size = p.grad.norm() if is_zero else p.grad.norm() * (p.shape != (384, 128))
                p.sub_(1e-3 * p.grad / size)

    model = Model()
    with torch.no_grad():
        for block in model.blocks:
            block.down.weight.mul_(not is_zero)
    train(model, tmp_path / "run", steps=6, every=3, optimizer=DividesByNorm(model.parameters(), lr=1e-3))
    (finding,) = triage(tmp_path / "run")
    assert (finding.code, finding.name, finding.module) == ("F125", "nonfinite-weight", "blocks.0.gate"), finding.message
    gradient = "of a gradient that is 0 everywhere" if is_zero else "of a finite gradient"
    assert f"in step 0 the optimizer (DividesByNorm) made it: its update is NaN or Inf, {gradient}, as for 4 of 7 weights" in (
        finding.message
    )
    assert "learning rate" not in finding.cure and ("is 0: give that division an eps" in finding.cure) is is_zero


def test_a_gradient_that_is_nan_leaves_the_optimizer_alone(tmp_path: Path) -> None:
    model = Model()

    def spoil(step: int, micro: int) -> None:
        model.blocks[0].gate.weight.grad[0] = float("inf")

    train(model, tmp_path / "run", steps=6, every=3, after_backward=spoil)
    assert not any("made it: its update" in finding.message for finding in triage(tmp_path / "run"))
