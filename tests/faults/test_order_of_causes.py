"""A learning rate, a bad batch and a fault of FP8, planted in runs that train: each is attributed, and in the right order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug.rules import Findings, Severity
from tests.bench.diagnosis_models import Case
from tests.bench.diagnosis_models import train as trained
from tests.recording.models import net, train
from tests.shortened import shortened

STEPS, EVERY, CULPRIT = 48, 4, "blocks.1.down"


def judged(path: Path, *faults: tuple[str, int, dict[str, Any]], recipe: str = "blockwise") -> Findings:
    """Train with these faults (name, step, options) and judge the run."""
    model = net(recipe, {"head": None})
    known = {fault.name: fault for fault in fp8debug.list_faults()}
    for name, step, options in faults:
        fp8debug.inject(model, name, module=CULPRIT if known[name].needs_module else None, step=step, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fp8debug.watch(model, path, every=EVERY, optimizer=optimizer) as watch:
        train(model, STEPS, optimizer, after=lambda _, loss: watch.step(loss=loss))
    return fp8debug.triage(path)


LEARNING_RATE = ("lr_too_high", 30, {"factor": 100.0})
BATCH = ("data_spike", 34, {"factor": 8.0})
#: Step 34 lies between the sampled steps 32 and 36; step 36 is one.
SAMPLED_BATCH = ("data_spike", 36, {"factor": 8.0})
CAST_BEFORE, CAST_AFTER = (("stale_scale", step, {"ratio": 4096.0}) for step in (20, 40))


@pytest.mark.parametrize("recipe", shortened(["blockwise", "tensorwise_delayed"], 2))
def test_a_learning_rate_that_jumps_is_not_fp8s_doing(tmp_path: Path, recipe: str) -> None:
    """What clips after it, under delayed scaling, is its consequence."""
    found = judged(tmp_path / "run", LEARNING_RATE, recipe=recipe)
    assert found.classification is not None
    assert (found.classification["class"], found.classification["cause"]) == ("divergence", "not-fp8"), found.classification
    assert (found[0].code, found[0].name, found[0].module) == ("F127", "updates-out-of-size", None)
    assert 28 <= found[0].steps[0] <= 36
    assert found.classification["bf16"]["verdict"] == "likely", found.classification["bf16"]


@pytest.mark.parametrize("batch", [BATCH, SAMPLED_BATCH], ids=["between two sampled steps", "at a sampled step"])
def test_a_bad_batch_is_not_fp8s_doing(tmp_path: Path, batch: tuple[str, int, dict[str, Any]]) -> None:
    found = judged(tmp_path / "run", batch)
    assert found.classification is not None
    assert (found.classification["class"], found.classification["cause"]) == ("loss-spike", "not-fp8"), found.classification
    assert found.classification["step"] == batch[1]
    assert [f.code for f in found if f.severity > Severity.INFO] == []
    assert found.classification["bf16"]["verdict"] == "likely", found.classification["bf16"]


def test_a_cast_at_fault_before_is_fp8s_doing(tmp_path: Path) -> None:
    found = judged(tmp_path / "run", CAST_BEFORE)
    assert found.classification is not None
    assert (found[0].code, found[0].module, found[0].steps[0]) == ("F101", CULPRIT, 20)
    assert found.classification["cause"] in ("findings", "fp8", "numerical")


def test_a_cast_at_fault_after_a_bad_batch_did_not_cause_it(tmp_path: Path) -> None:
    found = judged(tmp_path / "run", BATCH, CAST_AFTER)
    assert found.classification is not None
    assert (found.classification["class"], found.classification["cause"]) == ("loss-spike", "not-fp8"), found.classification
    assert (found.classification["step"], found.classification["module"]) == (34, None)
    assert (found[0].code, found[0].module, found[0].steps[0]) == ("F101", CULPRIT, 40), "it is found all the same"


def test_a_cast_at_fault_before_a_learning_rate_comes_first(tmp_path: Path) -> None:
    found = judged(tmp_path / "run", CAST_BEFORE, LEARNING_RATE)
    assert [f.code for f in found if f.severity is Severity.ERROR][:2] == ["F101", "F127"], [f.message for f in found]
    assert found[0].steps[0] == 20 and found[1].steps[0] >= 28


def test_a_cast_at_fault_after_a_learning_rate_comes_second(tmp_path: Path) -> None:
    found = judged(tmp_path / "run", LEARNING_RATE, CAST_AFTER)
    assert found.classification is not None
    assert found.classification["cause"] == "not-fp8", found.classification
    assert found[0].code == "F127", [f.message for f in found]


def test_what_clips_after_a_lost_second_moment_does_not_hide_it(tmp_path: Path) -> None:
    """Of a divergence within F127's first steps; under delayed scaling values clip in some modules two samples later."""
    case = Case(kind="gpt", width=128, recipe="tensorwise_delayed", seed=0, fault="lost_second_moment")
    trained(case, tmp_path / "run")
    found = fp8debug.triage(tmp_path / "run")
    assert (found[0].code, found[0].module) == ("F127", None), [f.message for f in found]
    assert "the optimizer step 9 changes the weight" in found[0].message
    assert any(f.code == "F105" and f.severity > Severity.INFO for f in found[1:]), "which hid it"
