"""The class of the problem comes first, says FP8's doing or not, and never takes a noisy loss for a sick one."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8debug.rules import RULES, Findings, triage
from fp8debug.rules.reading.course_limits import CourseLimits
from fp8debug.rules.reading.losses import divergence, spikes
from fp8debug.rules.reading.movements import movements_before
from tests.rules.sick_runs import CLIPPED, CULPRIT, FIRES, INPUT, NAN, share
from tests.synthetic import MODULES, Override, Plan, build, steps_row

Course = Callable[[int, random.Random], float]
LIMITS = CourseLimits()


def classified(path: Path, **plan: Any) -> dict[str, Any]:
    findings = triage(build(path / "run", **{"with_results": False, **plan}))
    assert findings.classification is not None
    assert json.loads(findings.to_json())["classification"] == findings.classification
    return dict(findings.classification)


def losses_from(step: int, course: Callable[[int], float], num: int = 100) -> dict[int, dict[str, float]]:
    return {s: {"loss": course(s)} for s in range(step, num)}


def test_a_healthy_run_is_none_of_them(tmp_path: Path) -> None:
    found = classified(tmp_path)
    assert (found["class"], found["cause"], found["step"], found["module"]) == ("loss-fine", "healthy", None, None)
    assert found["title"] == "no loss problem"
    run = build(tmp_path / "again", with_results=False)
    num, num_skipped = len(RULES.names()), len(triage(run).skipped)
    assert 0 < num_skipped < num
    what = f"the loss is fine; {num - num_skipped} of {num} rules ran; none found a fault (10 sampled steps, 6 modules)"
    assert found["what"] == what
    assert "fp8debug parity TRAIN ROLLOUT" in found["evidence"][0]


def test_a_few_losses_are_not_called_fine(tmp_path: Path) -> None:
    found = classified(tmp_path, num_steps=10)
    assert (found["cause"], found["title"]) == ("healthy", "no loss problem")
    assert found["what"].startswith("10 losses, all finite, too few to tell a spike or a divergence; ")
    assert classified(tmp_path / "longer", num_steps=11)["what"].startswith("the loss is fine; ")


def test_a_run_without_fp8_is_not_called_free_of_faults(tmp_path: Path) -> None:
    found = classified(tmp_path, recipe="bf16", what_if=["blockwise"])
    assert found["what"].startswith("the loss is fine, and no operand ran in FP8, so no cast was judged; ")
    assert found["what"].endswith(f" of {len(RULES.names())} rules ran; none found a fault (10 sampled steps, 6 modules)")
    assert found["cause"] == "not-judged"


def test_statistics_that_cannot_be_read_are_told(tmp_path: Path) -> None:
    build(tmp_path / "run", with_results=False)
    (part,) = (tmp_path / "run").glob("rank=*/stats/*.parquet")
    part.with_name("part-00001.parquet").write_bytes(part.read_bytes()[:500])
    found = triage(tmp_path / "run").classification
    assert found is not None and found["cause"] == "not-judged"
    assert found["what"].endswith(", and part of the run could not be read")
    assert found["evidence"][1].startswith("not read: ")


def test_what_is_first_seen_after_a_spike_is_not_blamed_for_it(tmp_path: Path) -> None:
    """A learning rate that is too high: the loss spikes at 41, and the sampled step 50 shows what it left behind."""
    clipped = Override(**{**INPUT, "steps": (50, None)}, slots=CLIPPED)
    found = classified(tmp_path, overrides=[clipped], steps={41: {"loss": 9.0}})
    assert (found["class"], found["cause"], found["module"]) == ("loss-spike", "undecided", None)
    assert found["what"].endswith(
        f"Whether FP8 did it is not decided: {CULPRIT} (F101 stale-scale-saturation) is first seen at step 50, the next sampled"
        " step, and may be its consequence"
    )


@pytest.mark.parametrize(("at", "cause"), [(40, "not-fp8"), (41, "undecided")])  # the loss answers to the updates before it
def test_a_spike_after_a_jump_of_the_learning_rate_is_no_casts_doing(tmp_path: Path, at: int, cause: str) -> None:
    clipped = Override(**{**INPUT, "steps": (50, None)}, slots=CLIPPED)
    steps: dict[int, dict[str, float]] = {step: {"lr": 3e-2} for step in range(at, 100)}
    steps[41] = {**steps.get(41, {}), "loss": 9.0}
    findings = triage(build(tmp_path / "run", overrides=[clipped], steps=steps, with_results=False))
    found: Any = findings.classification
    assert (found["class"], found["cause"], found["module"]) == ("loss-spike", cause, None)
    jump = f"Not FP8's doing: the learning rate jumps from 0.0003 to 0.03 at step {at}"
    assert found["what"].endswith(jump) is (cause == "not-fp8")
    (after,) = (f for f in findings if f.code == "F101")
    words = "; it follows the jump of the learning rate at step 40 and may be its consequence"
    assert (after.severity, after.message.endswith(words)) == (("info", True) if cause == "not-fp8" else ("error", False))


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("gemm", "tensor", "cause"), [("dgrad", "grad_output", "not-fp8"), ("fprop", "input", "fp8")])
def test_the_backward_pass_of_a_spike_is_its_consequence(tmp_path: Path, every: int, gemm: str, tensor: str, cause: str) -> None:
    """A bad batch at the sampled step 50: gradients clip from there on. Clipping in the forward pass comes before the loss."""
    clipped = Override(module=CULPRIT, gemm=gemm, tensor=tensor, reference="operand", steps=(50, None), slots=CLIPPED)
    found = classified(tmp_path, every=every, num_steps=60, overrides=[clipped], steps={50: {"loss": 9.0}}, with_results=False)
    assert (found["class"], found["cause"]) == ("loss-spike", cause)
    assert found["module"] == (CULPRIT if cause == "fp8" else None)


def test_an_undecided_spike_has_no_finding_that_decides_it(tmp_path: Path) -> None:
    moved = Override(**{**INPUT, "steps": (50, 60)}, slots={"amax": 60.0})
    findings = triage(build(tmp_path / "run", overrides=[moved], steps={55: {"loss": 6.0}}, with_results=False))
    assert findings.classification is not None and findings.classification["cause"] == "undecided"
    assert [(f.code, f.name) for f in findings] == [("F125", "loss-spike-undecided")]
    early = triage(build(tmp_path / "early", steps={15: {"loss": 16.0}}, with_results=False))
    assert early.classification is not None and early.classification["cause"] == "undecided"
    assert [f.name for f in early] == ["loss-spike-undecided"]


def test_a_finding_under_a_fine_loss(tmp_path: Path) -> None:
    found = classified(tmp_path, **FIRES["F101"])
    assert (found["class"], found["cause"], found["module"], found["code"]) == ("loss-fine", "findings", CULPRIT, "F101")


def test_a_spike_of_the_data(tmp_path: Path) -> None:
    found = classified(tmp_path, steps={55: {"loss": 6.0}})
    assert (found["title"], found["cause"], found["step"]) == ("(a) loss spike", "not-fp8", 55)
    assert found["what"].endswith("Not FP8's doing: look at the batch and the learning rate")
    assert found["evidence"] == [
        "nothing moved before it: no cast's statistics left their past at the sampled steps 40 and 50",
        "would BF16 have left its course too? undecided: no baseline in BF16, and the gradients' noise before it was not"
        " recorded; fp8debug verify trains both",
    ]


def test_a_spike_of_a_sick_cast(tmp_path: Path) -> None:
    found = classified(tmp_path, **FIRES["F101"], steps={55: {"loss": 6.0}})
    assert (found["class"], found["cause"], found["module"], found["code"]) == ("loss-spike", "fp8", CULPRIT, "F101")
    assert found["evidence"] == [
        f"before it moved: {CULPRIT} fprop input: clipping 0 -> 0.76 at step 40",
        "would BF16 have left its course too? unlikely: a cast or GEMM of FP8 is at the origin:"
        f" {CULPRIT} (F101 stale-scale-saturation) was at fault before",
    ]


def test_a_spike_after_a_cast_that_moved_within_its_limits_is_not_decided(tmp_path: Path) -> None:
    moved = Override(**{**INPUT, "steps": (50, 60)}, slots={"amax": 60.0})
    found = classified(tmp_path, overrides=[moved], steps={55: {"loss": 6.0}})
    assert (found["class"], found["cause"]) == ("loss-spike", "undecided")
    assert found["evidence"][0].startswith(f"before it moved: {CULPRIT} fprop input: amax 5.9")


def test_what_moves_after_the_loss_is_its_consequence(tmp_path: Path) -> None:
    """The gradients of a bad batch, and all that follows it."""
    gradients = Override(tensor="grad_output", steps=(50, 60), slots={"amax": 1.0})
    later = Override(gemm="fprop", steps=(60, None), slots={"amax": 900.0})
    run = build(tmp_path / "run", overrides=[gradients, later], with_results=False)
    assert movements_before(run, 50, LIMITS).found == ()
    assert len(movements_before(run, 51, LIMITS).found) == 2 * len(MODULES)
    assert movements_before(run, 20, LIMITS).steps == (), "too little was sampled before"


def test_a_nan_has_an_origin(tmp_path: Path) -> None:
    found = classified(tmp_path, **FIRES["F103"])
    assert (found["title"], found["cause"], found["step"]) == ("(b) divergence", "numerical", 40)
    assert (found["module"], found["code"]) == (CULPRIT, "F103")


def test_a_divergence_of_one_layer(tmp_path: Path) -> None:
    found = classified(tmp_path, **FIRES["F101"], steps=losses_from(45, lambda step: 4.0 + 0.05 * (step - 45)))
    assert (found["class"], found["cause"], found["module"]) == ("divergence", "numerical", CULPRIT)
    assert 40 <= found["step"] <= 60


def test_a_divergence_at_once_and_everywhere(tmp_path: Path) -> None:
    sick = Override(gemm="fprop", tensor="input", slots=CLIPPED, steps=(10, None))
    found = classified(tmp_path, overrides=[sick], steps=losses_from(6, lambda step: 5.5 + 0.2 * step))
    assert (found["class"], found["cause"], found["module"]) == ("divergence", "at-once", None)
    assert "Suspect software, flags, learning rate or warm-up, not a layer" in found["what"]


def test_a_divergence_after_a_change_of_the_configuration(tmp_path: Path) -> None:
    events = [(50, "recipe", None, "FP8 parameters switched on")]
    found = classified(tmp_path, events=events, steps=losses_from(52, lambda step: 4.0 + 0.05 * (step - 52)))
    assert (found["class"], found["cause"]) == ("divergence", "configuration")
    assert "after a change: FP8 parameters switched on at step 50" in found["what"]


def test_casts_that_change_together_are_a_change(tmp_path: Path) -> None:
    changed = Override(gemm="fprop", tensor="weight", steps=(50, None), slots={"cast_name": "e4m3fn tensorwise current"})
    found = classified(tmp_path, overrides=[changed], steps=losses_from(55, lambda step: 4.0 + 0.05 * (step - 55)))
    assert found["cause"] == "configuration"
    assert "the casts of 6 of 6 modules change, first blocks.0.attn.qkv: fprop weight goes from" in found["what"]


def test_a_jump_of_the_learning_rate_is_a_change(tmp_path: Path) -> None:
    steps: dict[int, dict[str, float]] = losses_from(52, lambda step: 4.0 + 0.05 * (step - 52))
    for step in range(50, 100):
        steps.setdefault(step, {})["lr"] = 3e-2
    assert "the learning rate jumps from 0.0003 to 0.03 at step 50" in classified(tmp_path, steps=steps)["what"]


def test_the_limits_of_the_classification_can_be_set(tmp_path: Path) -> None:
    steps: dict[int, dict[str, float]] = {step: {"lr": 3e-2} for step in range(50, 100)}
    for step in range(51, 100):
        steps[step]["loss"] = 9.0 - 4 * 0.99 ** (step - 51)
    run = build(tmp_path / "run", steps=steps, with_results=False)
    for limits, is_told in (({}, True), ({"min_lr_jump": 1000.0}, False)):
        found = triage(run, thresholds={"F125": limits}).classification
        assert found is not None and ("the learning rate jumps" in str(found)) is is_told
    found = triage(run, thresholds={"F125": {"min_level_rise": 100.0, "min_noise": 1e6}}).classification
    assert found is not None and found["class"] == "loss-fine"


def test_a_nan_between_two_sampled_steps_is_not_decided(tmp_path: Path) -> None:
    found = classified(tmp_path, steps=losses_from(55, lambda step: NAN))
    assert (found["class"], found["cause"]) == ("divergence", "undecided")


def test_a_gap_to_a_baseline_is_a_divergence(tmp_path: Path) -> None:
    good = build(tmp_path / "bf16", recipe="bf16", what_if=["blockwise"], with_results=False)
    plan = Plan()
    worse = {s: {"loss": 1.1 * steps_row(plan, s, is_sampled=False)["loss"]} for s in range(40, 100)}
    findings: Findings = triage(build(tmp_path / "run", steps=worse, with_results=False), good)
    found = findings.classification
    assert found is not None and findings.baseline is not None
    assert (found["class"], found["cause"]) == ("divergence", "undecided")
    assert 30 <= findings.baseline["diverges_at"] <= 41
    assert triage(build(tmp_path / "same", with_results=False), good).baseline["diverges_at"] is None  # type: ignore[index]


def test_without_a_loss_nothing_is_claimed(tmp_path: Path) -> None:
    found = classified(tmp_path, steps={step: {"loss": None} for step in range(100)})
    assert (found["class"], found["cause"]) == ("unknown", "no-loss")


def _t4(chance: random.Random) -> float:
    return chance.gauss(0, 1) / math.sqrt(sum(chance.gauss(0, 1) ** 2 for _ in range(4)) / 4)


def _fall(step: int) -> float:
    return 2.0 + 3.5 * math.exp(-step / 60)


CLEAN: dict[str, Course] = {
    "small batches": lambda step, chance: _fall(step) * (1 + 0.2 * chance.gauss(0, 1)),
    "heavy tails": lambda step, chance: _fall(step) * (1 + 0.01 * _t4(chance)),
    "warm-up": lambda step, chance: 10.8 - 8 * min(step / 200, 1) ** 2 + 0.05 * chance.gauss(0, 1),
    "the learning rate drops": lambda step, chance: (3.0 if step < 300 else 2.2) * (1 + 0.02 * chance.gauss(0, 1)),
    "cycles": lambda step, chance: 3 + 0.3 * math.sin(step / 15) + 0.02 * chance.gauss(0, 1),
    "bad batches come and go": lambda step, chance: 3 + 0.03 * chance.gauss(0, 1) + (0.6 if chance.random() < 0.05 else 0),
}


@pytest.mark.parametrize("kind", CLEAN)
def test_a_clean_loss_has_no_spike_and_does_not_diverge(kind: str) -> None:
    steps = list(range(450))
    alarms = 0
    for seed in range(5):
        chance = random.Random(seed)
        losses = [CLEAN[kind](step, chance) for step in steps]
        assert divergence(steps, losses, LIMITS) is None
        alarms += len(list(spikes(steps, losses, LIMITS)))
    assert alarms <= (5 if "bad" in kind else 0), "the first bad batch of a run is a spike, its likes are not"


@pytest.mark.parametrize("at", [12, 40, 555])
def test_a_spike_is_found_at_its_step(at: int) -> None:
    chance = random.Random(0)
    losses = [_fall(step) * (1 + 0.01 * chance.gauss(0, 1)) for step in range(600)]
    losses[at : at + 4] = [loss * factor for loss, factor in zip(losses[at : at + 4], (1.6, 1.4, 1.2, 1.1), strict=True)]
    assert [spike.step for spike in spikes(range(600), losses, LIMITS)] == [at]


def test_a_rate_of_underflow_counts_as_movement(tmp_path: Path) -> None:
    sick = Override(**{**INPUT, "steps": (40, None)}, slots={"num_underflow": share(0.05)})
    (moved,) = movements_before(build(tmp_path / "run", overrides=[sick], with_results=False), 45, LIMITS).found
    assert (moved.module, moved.column, moved.step) == (CULPRIT, "underflow_nonzero_rate", 40)


def test_a_run_that_never_comes_down_and_is_short(tmp_path: Path) -> None:
    found = classified(tmp_path, num_steps=16, every=2, steps=losses_from(0, lambda step: 5.5 + 0.5 * step, num=16))
    assert (found["class"], found["cause"], found["step"], found["code"]) == ("divergence", "at-once", 0, "F127")
