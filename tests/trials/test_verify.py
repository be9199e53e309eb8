"""``verify`` on real trainings in this process: planted faults, failures, interruptions."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.fallback import positional_prior
from fp8debug.run.arms import Arm
from fp8debug.store.write.writer import RunWriter
from fp8debug.trials import Script, arms_of, ledger, verify_run
from fp8debug.trials.gap import assess
from fp8debug.trials.ledger import Trial, read_trial
from fp8debug.trials.script import Ending
from fp8debug.trials.verify import inference_gaps, statements
from tests.trials.laboratory import Laboratory, healthy, planted

FAULTS = {
    "zero_tile": planted("zero_tile", "layers.3", step=4),
    "stale_scale": planted("stale_scale", "layers.2", step=4),
    "swiglu_outlier": planted("swiglu_outlier", "layers.3", step=4, spacing=64, log2_factor=20),
}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def verify(laboratory: Laboratory, run: fp8debug.Run, **options: Any) -> dict[str, Any]:
    """Verify what is recommended for a run of the laboratory."""
    candidates = [entry.to_dict() for entry in fp8debug.recommend(run, fp8debug.triage(run))]
    arms = arms_of(["candidates", "fp8_tensors", "prior"], candidates, positional_prior(run), None)
    trials = laboratory.trials()
    try:
        return verify_run(trials, arms, run_name=run.name, save_as=laboratory.folder / "verify.json", **options)
    finally:
        trials.close()


def by_name(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in found["arms"]}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_candidates_close_the_gap_of_a_planted_fault_and_the_prior_does_not(fault: str, tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, FAULTS[fault])
    found = verify(laboratory, laboratory.record(), repeats=1)
    arms = by_name(found)
    assert (found["verdict"], arms["candidates"]["closed"]) == ("closed", "yes")
    assert arms["prior"]["closed"] != "yes" and arms["fp8_tensors"]["closed"] != "yes"
    if fault == "zero_tile":
        assert arms["fp8"]["num_diverged"] == 1 and "the gap is infinite" in found["statements"][0]
        assert arms["candidates"]["above_bf16"]["value"] < 0.05
    else:
        assert arms["candidates"]["share"]["value"] == pytest.approx(1, abs=0.2)
        assert arms["prior"]["share"]["value"] < 0.3
    assert "the candidates close it" in found["statements"]
    assert json.loads((tmp_path / "verify.json").read_text()) == found  # strict JSON, NaN losses and all


def test_a_healthy_run_has_nothing_to_close(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, healthy)
    trials = laboratory.trials()
    found = verify_run(trials, arms_of([], [], [], None), repeats=3, last=12, run_name="run", save_as=tmp_path / "verify.json")
    assert found["verdict"] == "nothing_to_close" and list(by_name(found)) == ["bf16", "fp8"]
    assert len(laboratory.trained) == 2 * 3 and found["complete"]
    trials.close()


def arms() -> list[Arm]:
    return arms_of(["fp8_tensors"], [], [], None)


def test_trainings_are_done_once(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, steps=6)
    options: dict[str, Any] = {"repeats": 1, "run_name": "run", "save_as": tmp_path / "verify.json"}
    said: list[str] = []
    trials = laboratory.trials()
    verify_run(trials, arms(), report=lambda done, total, what: said.append(f"{done}/{total} {what}"), **options)
    assert said == [f"{i}/3 {name}, repeat 1 of 1" for i, name in enumerate(("bf16", "fp8", "fp8_tensors"))]
    assert len(laboratory.trained) == 3
    with pytest.raises(UsageError, match="another fp8debug trains in"):
        laboratory.trials()
    trials.close()
    trials = laboratory.trials()
    assert verify_run(trials, arms(), **{**options, "repeats": 2})["repeats"] == 2
    assert laboratory.trained[3:] == [("bf16", 1), ("fp8", 1), ("fp8_tensors", 1)]
    trials.close()
    trials = laboratory.trials(fresh=True)
    verify_run(trials, arms(), **options)
    assert len(laboratory.trained) == 9
    trials.close()
    laboratory.steps = 7
    with pytest.raises(UsageError, match=r"another experiment: steps differ \(6, now 7\); choose another --out, or .* --fresh"):
        laboratory.trials()
    laboratory.steps = 6
    (tmp_path / "train.py").write_text("changed")
    with pytest.raises(UsageError, match="another experiment: the script's content differs;"):
        laboratory.trials()
    (tmp_path / "trials" / "trials.json").write_text("{")
    with pytest.raises(UsageError, match=r"trials.json cannot be read .* start over with --fresh"):
        laboratory.trials()


def test_an_arm_that_fails_is_named_and_the_others_are_kept(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, steps=6)
    trials = laboratory.trials()
    real = trials._train

    def failing(arm: Arm, repeat: int, out: Path) -> Ending:
        if arm.name == "fp8_tensors":
            laboratory.trained.append((arm.name, repeat))
            return Ending(1, 0.1, False, "Traceback\nValueError: mine")
        return real(arm, repeat, out)

    trials._train = failing
    found = verify_run(trials, arms(), repeats=2, run_name="run", save_as=tmp_path / "verify.json")
    arm = by_name(found)["fp8_tensors"]
    assert arm["problem"] == "the script failed with exit code 1: ValueError: mine" and "Traceback" in arm["stderr"]
    assert found["verdict"] == "nothing_to_close" and found["gap"] is not None
    assert laboratory.trained.count(("fp8_tensors", 0)) == 1 and ("fp8_tensors", 1) not in laboratory.trained
    trials.close()


def test_what_a_training_says_of_its_end(tmp_path: Path) -> None:
    script = Laboratory(tmp_path, steps=6).trials().script
    refused = "Loading\nfp8debug: this arm cannot be trained: 0 is a TELinear, whose casts an arm cannot change\n[rank0] exit"
    none, empty = tmp_path / "none", tmp_path / "empty"
    for folder in (none, empty):
        folder.mkdir()
    (empty / "manifest.json").write_text("{}")

    def problem(out: Path, ending: Ending) -> str | None:
        return read_trial(Arm(name="bf16", compute="bf16"), 0, out, ending, script).problem

    assert problem(none, Ending(2, 0.1, False, refused)) == "0 is a TELinear, whose casts an arm cannot change"
    assert problem(none, Ending(0, 0.1, False, "")) == (
        "the script trained no model with a Linear: no forward ran with gradients on"
    )
    read = "a run that is being written can be read after its first sampled step"
    words = f"no step of it can be read: {empty} holds no recorded step yet; {read}"
    assert problem(empty, Ending(0, 0.1, False, "")) == words
    assert problem(empty, Ending(1, 0.1, False, "ValueError: mine")) == "the script failed with exit code 1: ValueError: mine"


def test_what_was_done_before_an_interruption_can_be_read(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, steps=6)
    trials = laboratory.trials()
    real = trials._train

    def interrupted(arm: Arm, repeat: int, out: Path) -> Ending:
        if arm.name == "fp8_tensors":
            raise KeyboardInterrupt
        return real(arm, repeat, out)

    trials._train = interrupted
    with pytest.raises(KeyboardInterrupt):
        verify_run(trials, arms(), repeats=1, run_name="run", save_as=tmp_path / "verify.json")
    document = json.loads((tmp_path / "verify.json").read_text())
    assert not document["complete"] and document["verdict"] == "incomplete"
    assert [len(arm["losses"]) for arm in document["arms"]] == [1, 1, 0] and document["gap"]["value"] is not None
    trials.close()


def test_repeats_must_be_positive(tmp_path: Path) -> None:
    trials = Laboratory(tmp_path).trials()
    with pytest.raises(UsageError, match="repeats must be at least 1, got 0"):
        verify_run(trials, arms(), repeats=0, run_name="run", save_as=tmp_path / "verify.json")
    trials.close()


def test_a_window_longer_than_the_script_is_cut_and_said(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, steps=6)
    trials = laboratory.trials()
    trials.script = replace(trials.script, steps=50)
    found = verify_run(trials, arms(), repeats=1, run_name="run", save_as=tmp_path / "verify.json")
    assert found["num_steps"] == 6 and found["statements"][-1] == "the script ended after 6 of the 50 steps asked for"
    trials.close()


def test_a_script_without_a_loss_is_told_what_to_do(tmp_path: Path) -> None:
    def lossless(arm: Arm, repeat: int, out: Path) -> Ending:
        writer = RunWriter(out, manifest={})
        writer.steps({"step": 0, "sampled": False})
        writer.close()
        return Ending(0, 0.1, False, "")

    trials = Laboratory(tmp_path).trials()
    trials._train = lossless
    trial = trials.run(Arm(name="fp8"), 0)
    assert trial.problem and trial.problem.startswith("no loss was recorded: the script calls neither loss.backward()")
    trials.close()


def test_a_crash_after_nan_is_a_divergence_and_one_before_is_a_failure(tmp_path: Path) -> None:
    def crashing(arm: Arm, repeat: int, out: Path) -> Ending:
        writer = RunWriter(out, manifest={})
        for step, loss in enumerate((2.0, 1.9, float("nan") if arm.name == "fp8" else 1.8)):
            writer.steps({"step": step, "sampled": False, "loss": loss})
        writer.close()
        (out / "arm.json").write_text("{}")
        return Ending(1, 0.1, False, "ValueError: loss is nan")

    trials = Laboratory(tmp_path).trials()
    trials._train = crashing
    diverged, failed = trials.run(Arm(name="fp8"), 0), trials.run(Arm(name="bf16", compute="bf16"), 0)
    assert diverged.problem is None and diverged.diverged
    assert failed.problem == "the script failed with exit code 1: ValueError: loss is nan" and len(failed.losses) == 3
    trials.close()
    again = Laboratory(tmp_path).trials()
    assert again.known(Arm(name="fp8"), 0) and again.run(Arm(name="fp8"), 0).diverged, "NaN goes through the file"
    again.close()


def test_a_folder_that_is_not_ours_is_never_deleted(tmp_path: Path) -> None:
    trials = Laboratory(tmp_path, steps=2).trials()
    precious = tmp_path / "trials" / "fp8-0" / "precious"
    precious.parent.mkdir()
    precious.write_text("")
    with pytest.raises(UsageError, match="fp8-0 is there already and no training of ours; choose another --out"):
        trials.run(Arm(name="fp8"), 0)
    assert precious.exists()
    trials.close()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("owner", "name"), [(Path, "mkdir"), (Path, "touch"), (Path, "rename"), (shutil, "rmtree")])
def test_a_training_killed_at_a_change_of_its_folder_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, after: bool
) -> None:
    trials = Laboratory(tmp_path, steps=2).trials()
    out = tmp_path / "trials" / "fp8-0"
    first = trials.run(Arm(name="fp8"), 0)
    change = getattr(owner, name)

    def killed(*args: Any, **options: Any) -> None:
        if after:
            change(*args, **options)
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(owner, name, killed)
        ledger._renew(out)
    trials._known.clear()
    assert trials.run(Arm(name="fp8"), 0).losses == first.losses
    assert [path.name for path in out.parent.iterdir() if path.is_dir()] == ["fp8-0"]
    trials.close()


def held(arm: str, repeat: int, losses: list[float], problem: str | None = None) -> Trial:
    return Trial(arm=arm, repeat=repeat, losses=(2.0,), held_losses=tuple(losses), problem=problem)


def noisy(repeat: int, shift: float = 0.0) -> list[float]:
    """Return losses of 16 batches that differ far more from each other than by the shift."""
    return [3 + math.sin(17 * repeat + 5 * step) + shift + 1e-4 * math.cos(repeat + 3 * step) * bool(shift) for step in range(16)]


@pytest.mark.parametrize("repeats", [1, 3])
def test_inference_in_the_other_precision_is_judged_batch_by_batch(repeats: int) -> None:
    done = [held("bf16", r, noisy(r)) for r in range(repeats)] + [held("fp8", r, noisy(r)) for r in range(repeats)]
    done += [held("fp8_inference", r, noisy(r, 0.05)) for r in range(repeats)]
    done += [held("bf16_inference", r, noisy(r, 0.001)) for r in range(repeats)]
    sick, fine = inference_gaps(done)
    assert (sick["weights"], sick["inference"], sick["counts"]) == ("BF16", "FP8", True)
    assert sick["above"]["value"] == pytest.approx(0.05, abs=1e-3) and sick["loss"] - sick["own_loss"] == pytest.approx(
        0.05, abs=1e-3
    )
    assert sick["statement"].startswith("FP8 inference of the weights that BF16 trained changes their loss by +0.05")
    assert fine["counts"] is False and fine["statement"].endswith(": no difference that counts"), "below 0.25 % of the loss"


def test_inference_that_fails_or_is_not_finite() -> None:
    nan = float("nan")
    (lost,) = inference_gaps([held("bf16", 0, [2.0, 2.0]), held("fp8_inference", 0, [2.0, nan])])
    assert lost["counts"] is True and lost["loss"] is None and "has a loss that is not finite" in lost["statement"]
    (both,) = inference_gaps([held("bf16", 0, [nan]), held("fp8_inference", 0, [2.0])])
    assert both["counts"] is None and "cannot be judged" in both["statement"]
    (failed,) = inference_gaps([held("bf16", 0, [2.0]), held("fp8_inference", 0, [], problem="the script failed")])
    assert failed["problem"] == "the script failed" and failed["statement"] is None
    assert inference_gaps([held("bf16", 0, [2.0]), held("fp8", 0, [2.0])]) == []


def test_held_steps_bring_the_arms_of_inference(tmp_path: Path) -> None:
    assert [arm.name for arm in arms_of([], [], [], None)] == ["bf16", "fp8"]
    arms = arms_of([], [], [], None, held=8)
    assert [(a.name, a.compute, a.held, a.inference) for a in arms] == [
        ("bf16", "bf16", 8, None),
        ("fp8", "fp8", 8, None),
        ("fp8_inference", "bf16", 8, "fp8"),
        ("bf16_inference", "fp8", 8, "bf16"),
    ]
    writer = RunWriter(tmp_path, manifest={"modules": []})
    for step in range(6):
        writer.steps({"step": step, "sampled": False, "loss": float(step)})
    writer.close()
    (tmp_path / "train.py").touch()
    (tmp_path / "arm.json").touch()
    ending, script = Ending(0, 1.0, False, ""), Script(path=tmp_path / "train.py", steps=4)
    trial = read_trial(arms[2], 0, tmp_path, ending, script)
    assert (trial.losses, trial.held_losses, trial.problem) == ((0.0, 1.0, 2.0, 3.0), (4.0, 5.0), None)
    short = read_trial(arms[2], 0, tmp_path, ending, replace(script, steps=6))
    assert short.problem == "the script ended after 6 steps, before any with held weights; lower --steps or let it run longer"


def course(arm: str, repeat: int, *, spikes_at: int | None = None) -> Trial:
    """Return a training whose loss falls, and spikes at a step."""
    losses = [3.0 - 0.01 * step + (5.0 if step == spikes_at else 0.0) for step in range(100, 160)]
    return Trial(arm=arm, repeat=repeat, losses=tuple(losses), first_step=100)


def said(*trials: Trial) -> list[str]:
    curves: dict[str, dict[int, Any]] = {}
    for trial in trials:
        curves.setdefault(trial.arm, {})[trial.repeat] = trial.losses
    return statements(assess(curves, None), trials, 60)


def test_a_spike_that_bf16_has_too_is_not_fp8s_doing() -> None:
    sick = [course("fp8", repeat, spikes_at=140 + repeat) for repeat in range(2)]
    both = said(*sick, course("bf16", 0, spikes_at=141), course("bf16", 1))
    assert both[1] == (
        "the loss of FP8 leaves its course in 2 of 2 repeats, first at step 140; that of BF16 in 1 of 2 repeats, first at step"
        " 141: it would have left it without FP8"
    )
    alone = said(*sick, course("bf16", 0), course("bf16", 1))
    assert alone[1].endswith("first at step 140; that of BF16 in none of 2: FP8's doing")
    assert not any("course" in line for line in said(course("fp8", 0), course("bf16", 0, spikes_at=141)))
