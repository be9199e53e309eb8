"""A NaN that begins between two sampled steps: its module and step are known, and nothing of the training changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.observer import place_of_first
from fp8debug.rules import Findings
from tests.recording.models import Net, net, train

AT, EVERY = 7, 5


def record(path: Path, model: nn.Module, **options: Any) -> tuple[Findings, list[float]]:
    with fp8debug.watch(model, path, every=EVERY, **options) as watch:
        losses = train(model, 12, after=lambda _, loss: watch.step(loss=loss))
    return fp8debug.triage(path), losses


def poison_at(model: nn.Module, module: str, spoil: Any) -> None:
    """Call ``spoil`` before that module's forward of step AT."""
    steps = [0]

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> Any:
        steps[0] += 1
        return spoil(args[0]) if steps[0] == AT + 1 else None

    model.get_submodule(module).register_forward_pre_hook(before)


@pytest.mark.parametrize("module", ["blocks.0.up", "blocks.1.down"])
def test_the_module_that_makes_it_is_named_with_its_step(module: str, tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "zero_tile", module=module, step=AT)
    findings, losses = record(tmp_path / "run", model)
    assert losses[AT] != losses[AT]
    finding = findings[0]
    assert (finding.code, finding.name, finding.module, finding.steps) == ("F103", "gemm-nonfinite", module, (AT, AT))
    assert "which was not sampled, and input and weight were finite" in finding.message
    events = fp8debug.Run(tmp_path / "run").sql("SELECT step, module FROM events WHERE kind = 'nonfinite'").to_pylist()
    assert events[0] == {"step": AT, "module": module}
    fallbacks = fp8debug.recommend(tmp_path / "run", findings)
    assert {f.module for f in fallbacks} == {module}


def test_one_from_outside_accuses_no_linear(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    poison_at(model, "blocks.1.down", lambda x: torch.full_like(x, float("nan")))
    findings, _ = record(tmp_path / "run", model)
    assert [(f.code, f.name, f.module, f.steps[0]) for f in findings] == [("F125", "nonfinite-from-outside", "blocks.1.down", AT)]
    assert findings[0].message.startswith(
        "first NaN/Inf: the forward input of blocks.1.down at step 7; no Linear produced it; blocks.1.up, computed before it"
    )


def test_one_in_the_weights_was_made_a_step_earlier(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})

    def spoil(x: Tensor) -> None:
        model.get_parameter("blocks.1.up.weight").data[0, 0] = float("nan")

    poison_at(model, "blocks.0.gate", spoil)
    findings, _ = record(tmp_path / "run", model)
    assert [(f.code, f.name, f.module) for f in findings] == [("F125", "nonfinite-loss-unseen", "blocks.1.up")]
    assert "first NaN/Inf: the weight of blocks.1.up at step 7, which held it when the step began" in findings[0].message


def test_who_does_not_look_blames_nobody(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "zero_tile", module="blocks.0.up", step=AT)
    findings, _ = record(tmp_path / "run", model, check_finite=False)
    assert [(f.code, f.name, f.module) for f in findings] == [("F125", "nonfinite-loss-unseen", None)]
    assert not fp8debug.Run(tmp_path / "run").sql("SELECT 1 AS one FROM steps WHERE nonfinite_module IS NOT NULL").num_rows


def test_the_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = train(net(), 12)
    findings, watched = record(tmp_path / "run", net(), check_finite=True)
    assert watched == plain
    assert findings == []


def test_an_evaluation_between_two_steps_is_not_looked_at(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=EVERY) as watch:
        for _ in range(8):
            with torch.no_grad():
                model(torch.full((4, 64), float("nan")))
            train(model, 1, after=lambda _, loss: watch.step(loss=loss))
    assert not fp8debug.Run(tmp_path / "run").sql("SELECT 1 AS one FROM steps WHERE nonfinite_module IS NOT NULL").num_rows


def test_the_place_of_the_first_is_one_number() -> None:
    fine = torch.tensor([True, True, True])
    assert place_of_first([fine, fine]).item() == -1
    assert place_of_first([fine, torch.tensor([False, True, False]), torch.tensor([True, True, False])]).item() == 4 + 1
    assert place_of_first([torch.tensor([True, False, False]), fine]).item() == 2
    assert place_of_first([fine, fine, torch.tensor([True, True, False])]).item() == 8


def test_a_net_of_the_tests_has_what_these_expect() -> None:
    assert {"blocks.0.up", "blocks.1.down"} <= dict(Net().named_modules()).keys()
