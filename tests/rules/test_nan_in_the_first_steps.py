"""A NaN within the first steps has an origin, which is told, unless the whole model had left its course before it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
