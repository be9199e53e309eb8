"""Would BF16 have left its course too: the gradients' noise from Adam's moments, and the verdict with and without a baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8debug.rules import triage
from fp8debug.rules.reading.bf16_verdict import batch_noise, gradient_noise
from fp8debug.rules.reading.course_limits import CourseLimits
from tests.rules import sick_wholeruns as sick
from tests.rules.sick_runs import CLIPPED, INPUT
from tests.synthetic import Override, build

SPIKE = {55: {"loss": 6.0}}


def moments(q: float, **more: Any) -> Callable[[int, str], Mapping[str, Any]]:
    """Return updates whose gradients have this noise of the batch over their signal."""

    def of(step: int, module: str) -> Mapping[str, Any]:
        t = step + 1
        signal, noise = (1 - 0.9**t) ** 2, 0.1 * (1 - 0.9 ** (2 * t)) / 1.9
        return {"sum_moment2": 8192 * 1e-8 * (signal + q * noise) / (1 + q), **more}

    return of


@pytest.mark.parametrize("q", [0.05, 1.0, 20.0])
@pytest.mark.parametrize("num_steps", [5, 200])
def test_the_noise_of_gradients_from_adams_moment(q: float, num_steps: int) -> None:
    """Against the moment of a gradient that is known: 200,000 elements of signal 1 and noise sqrt(q)."""
    draw = torch.Generator().manual_seed(0)
    moment = torch.zeros(200_000)
    for _ in range(num_steps):
        gradient = 1 + math.sqrt(q) * torch.randn(len(moment), generator=draw)
        moment = 0.9 * moment + 0.1 * gradient
    ratio = float(moment.square().sum() / gradient.square().sum())
    assert batch_noise(ratio, 0.9, num_steps) == pytest.approx(q, rel=0.05)


def test_a_moment_of_nothing_but_noise_and_of_none() -> None:
    assert batch_noise(0.05, 0.9, 1000) == math.inf
    assert batch_noise(1.0, 0.9, 1000) == pytest.approx(0.0, abs=1e-9)


def verdict(path: Path, baseline: Any = None, **plan: Any) -> tuple[str, str]:
    found = triage(build(path / "run", **plan), baseline).classification
    assert found is not None
    bf16: dict[str, str] = found["bf16"]
    assert found["evidence"][-1] == f"would BF16 have left its course too? {bf16['verdict']}: {bf16['why']}"
    return bf16["verdict"], bf16["why"]


def test_noise_of_the_batch_far_above_that_of_fp8(tmp_path: Path) -> None:
    found, why = verdict(tmp_path, steps=SPIKE, updates=moments(2.0))
    assert found == "likely"
    assert why == (
        "of the gradients' energy 67 % is noise of the batch and at most 1.8 % noise of FP8, and updates are 0.015 of their"
        " weights (steps 20 to 50)"
    )


def test_gradients_without_noise_leave_it_open(tmp_path: Path) -> None:
    found, why = verdict(tmp_path, steps=SPIKE, updates=moments(0.01))
    assert found == "undecided" and why.endswith("; fp8debug verify trains both")


def test_a_cast_at_fault_before_makes_it_unlikely(tmp_path: Path) -> None:
    clipped = Override(**{**INPUT, "steps": (40, None)}, slots=CLIPPED)
    found, why = verdict(tmp_path, steps=SPIKE, updates=moments(2.0), overrides=[clipped])
    assert found == "unlikely" and "F101" in why


def test_updates_out_of_size_diverge_in_bf16_too(tmp_path: Path) -> None:
    def updates(step: int, module: str) -> Mapping[str, Any]:
        return sick.enlarged(4.0)(step, module) if step >= 40 else moments(2.0)(step, module)

    rise = {step: {"loss": 3.0 + 0.1 * (step - 40)} for step in range(41, 100)}
    found, why = verdict(tmp_path, steps=rise, updates=updates)
    assert found == "likely" and why.startswith("at step 40 the optimizer changed weights by 4")


def test_a_baseline_in_bf16_measures_it(tmp_path: Path) -> None:
    def baseline(name: str, **plan: Any) -> Any:
        return build(tmp_path / name, recipe="bf16", what_if=["blockwise"], **plan)

    same = baseline("same", steps=SPIKE)
    assert verdict(tmp_path / "1", same, steps=SPIKE) == (
        "yes", "the loss of same, which has no FP8, leaves its course at step 55",
    )  # fmt: skip
    assert verdict(tmp_path / "2", baseline("smooth"), steps=SPIKE)[0] == "no"
    assert verdict(tmp_path / "3", baseline("later", steps={90: {"loss": 6.0}}), steps=SPIKE)[0] == "undecided"
    assert verdict(tmp_path / "4", baseline("short", num_steps=40), steps=SPIKE)[0] == "undecided"
    in_fp8 = build(tmp_path / "in_fp8", steps=SPIKE)
    assert verdict(tmp_path / "5", in_fp8, steps=SPIKE, updates=moments(2.0))[0] == "likely", "it says nothing of BF16"


def test_a_loss_on_its_course_has_no_verdict(tmp_path: Path) -> None:
    found = triage(build(tmp_path / "run", updates=moments(2.0))).classification
    assert found is not None and found["bf16"] is None


def test_nothing_is_concluded_where_no_adam_ran(tmp_path: Path) -> None:
    run = build(tmp_path / "run", updates=moments(2.0, beta1=None))
    assert gradient_noise(run, 55, CourseLimits()) is None
    assert gradient_noise(build(tmp_path / "adam", updates=moments(2.0)), 0, CourseLimits()) is None
