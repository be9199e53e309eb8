"""The first cause, not the loudest victim: where the first NaN came from, and which findings follow from another."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fp8debug.rules import Findings, Severity, triage
from fp8debug.rules.reading.nonfinite import NonfiniteOrigin, first_poison
from tests.rules.sick_runs import CLIPPED, CULPRIT, FIRES, FLUSHED, INPUT, NAN, OUTLIER, WEIGHT
from tests.rules.sick_wholeruns import enlarged
from tests.synthetic import MODULES, Override, Slots, build

NAMES = [name for name, _, _ in MODULES]
SICK_LOSS = {step: {"loss": NAN} for step in range(40, 100)}


def every(row: Slots) -> int:
    return int(row["numel"])


def poisoned(where: dict[str, Any], step: int = 40, **slots: Any) -> Override:
    return Override(**{**where, "steps": (step, step + 1)}, actual=None, slots=slots or {"num_nan": 3})


#: After the first NaN everything is NaN.
RUINED = Override(steps=(50, None), actual=None, slots={"num_nan": every})
DOWNSTREAM = [poisoned({"module": name, "gemm": "fprop", "tensor": "input"}) for name in NAMES[5:]]


def origin(path: Path, *overrides: Override, **plan: Any) -> NonfiniteOrigin | None:
    return first_poison(build(path / "run", overrides=overrides, **{"steps": SICK_LOSS, **plan}))


def test_a_healthy_run_has_no_origin(tmp_path: Path) -> None:
    assert origin(tmp_path, steps={}) is None


def test_a_cast_that_makes_it(tmp_path: Path) -> None:
    made = Override(**{**INPUT, "steps": (40, 41)}, slots={"num_actual_nonfinite": 128})
    found = origin(tmp_path, made, *DOWNSTREAM, RUINED)
    assert found is not None
    assert (found.kind, found.step, found.row["module"], found.count) == ("cast", 40, CULPRIT, 128)
    assert found.before == NAMES[3]


@pytest.mark.parametrize("amax", [1e-3, 300.0])
def test_a_backward_gemm_that_loss_scaling_does_not_explain(tmp_path: Path, amax: float) -> None:
    """Operands of 1e-3 cannot overflow in FP16, so that a step which was skipped is no excuse."""
    gemm: dict[str, Any] = {"module": CULPRIT, "gemm": "dgrad", "steps": (40, 41)}
    operands = Override(**gemm, reference="operand", slots={"amax": amax})
    made = Override(**gemm, tensor="grad_input", reference="shadow", slots={"num_actual_nonfinite": 7})
    findings = triage(build(tmp_path / "run", overrides=[operands, made]))
    expected = [("F103", "gemm-nonfinite", CULPRIT, "dgrad", "grad_input")] if amax < 1 else []
    assert [(f.code, f.name, f.module, f.gemm, f.tensor) for f in findings] == expected
    assert all("too small to overflow, so that its kernel is wrong" in f.message for f in findings)


def test_a_gemm_that_makes_it(tmp_path: Path) -> None:
    result: dict[str, Any] = {"module": CULPRIT, "gemm": "fprop", "tensor": "output"}
    overflow = Override(**result, reference="exact", steps=(40, 41), slots={"num_actual_nonfinite": 7})
    run = build(tmp_path / "run", overrides=[overflow, *DOWNSTREAM, RUINED], steps=SICK_LOSS)
    (finding,) = triage(run)
    assert (finding.code, finding.name, finding.severity) == ("F103", "gemm-nonfinite", Severity.ERROR)
    assert (finding.module, finding.gemm, finding.tensor) == (CULPRIT, "fprop", "output")
    assert finding.message.startswith(
        "7 of 262144 sampled elements of the fprop output are NaN or Inf at step 40, and all operands"
    )
    assert finding.victims == (*NAMES[:4], NAMES[5])


@pytest.mark.parametrize("sum_x2", [0.0, 40.0])
def test_a_cached_weight_that_is_not_finite(sum_x2: float, tmp_path: Path) -> None:
    """The second read's sums leave out what is not finite."""
    result: dict[str, Any] = {"module": CULPRIT, "gemm": "fprop", "tensor": "output"}
    overflow = Override(**result, reference="exact", steps=(40, 41), slots={"num_actual_nonfinite": 7})
    read = {"num_reread": 4096, "reread_sum_x2": sum_x2, "reread_sum_err2": 1e-3 * sum_x2}
    weight = Override(**{**WEIGHT, "gemm": "fprop", "steps": (40, 41)}, slots=read)
    (finding,) = triage(build(tmp_path / "run", overrides=[overflow, weight, *DOWNSTREAM, RUINED], steps=SICK_LOSS))
    expected = ("gemm-nonfinite", "output") if sum_x2 else ("nonfinite-cached-weight", "weight")
    assert (finding.name, finding.tensor, finding.module) == (*expected, CULPRIT)
    assert "cached FP8 copy" in finding.message or sum_x2


@pytest.mark.parametrize("comes_back", [False, True])
def test_an_overflow_of_a_divergence_is_no_gemms(comes_back: bool, tmp_path: Path) -> None:
    result: dict[str, Any] = {"module": CULPRIT, "gemm": "fprop", "tensor": "output"}
    overflow = Override(**result, reference="exact", steps=(40, 41), slots={"num_actual_nonfinite": 7})

    def loss_at(step: int) -> float:
        low = 2.0 if comes_back and step >= 30 else 25.0
        return NAN if step >= 40 else low + (5.5 - low) * math.exp(-step / 8)

    row = enlarged(2.0)(40, CULPRIT)
    steps = {step: {"loss": loss_at(step)} for step in range(100)}
    plan: dict[str, Any] = {"overrides": [overflow, *DOWNSTREAM, RUINED], "steps": steps, "updates": lambda step, module: row}
    found = {f.name for f in triage(build(tmp_path / "run", **plan))}
    assert found & {"updates-out-of-size", "diverges-at-start"}
    assert ("gemm-nonfinite" in found) is comes_back, "it came back, so that this NaN has a cause of its own"


def test_one_that_came_from_outside_the_linears(tmp_path: Path) -> None:
    """A norm before the layer: its input is NaN, and all that the Linears before it computed is finite."""
    made_later = Override(module=NAMES[5], gemm="dgrad", steps=(40, 41), slots={"num_actual_nonfinite": 9})
    overrides = [poisoned(INPUT), *DOWNSTREAM, made_later, RUINED]
    findings = triage(build(tmp_path / "run", overrides=overrides, steps=SICK_LOSS))
    assert [(f.code, f.name, f.severity) for f in findings] == [("F125", "nonfinite-from-outside", Severity.ERROR)]
    assert (findings[0].module, findings[0].gemm, findings[0].tensor) == (CULPRIT, "fprop", "input")
    assert findings[0].to_dict()["origin"] == "outside"
    assert findings[0].message == (
        f"first NaN/Inf: the forward input of {CULPRIT} at step 40 (3 elements); no Linear produced it; {NAMES[3]}, computed"
        " before it, was finite; the loss is NaN from step 40 on"
    )
    assert findings[0].victims == (*NAMES[:4], NAMES[5]), "no cast of theirs is accused"
    assert findings.classification is not None
    assert (findings.classification["class"], findings.classification["cause"]) == ("divergence", "not-fp8")


def test_one_that_came_with_the_data(tmp_path: Path) -> None:
    found = origin(tmp_path, poisoned({"gemm": "fprop", "tensor": "input"}), RUINED)
    assert found is not None
    assert (found.kind, found.row["module"], found.before) == ("outside", NAMES[0], None)


def test_one_that_came_with_the_weights(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", overrides=[poisoned({"tensor": "weight"}), RUINED], steps=SICK_LOSS))
    assert [(f.code, f.name, f.origin) for f in findings] == [("F125", "nonfinite-loss-unseen", None)]
    assert (findings[0].module, findings[0].gemm, findings[0].tensor) == (NAMES[0], "fprop", "weight")
    assert findings[0].message == (
        "the loss is NaN from step 40 on; first NaN/Inf: the weight of blocks.0.attn.qkv at step 40 (3 elements), which held it"
        " when the step began; what made it in the step before was not recorded: the last sampled step before is 30"
    )
    assert findings[0].cure == "train again from step 30 or before with every=1: the first NaN then names its layer"


def test_the_backward_pass_comes_after_the_forward_and_runs_from_the_last_layer(tmp_path: Path) -> None:
    gradients = poisoned({"tensor": "grad_output"})
    found = origin(tmp_path / "backward", gradients, RUINED)
    assert found is not None
    assert (found.kind, found.row["module"], found.row["gemm"]) == ("outside", NAMES[-1], "dgrad")
    both = origin(tmp_path / "both", gradients, poisoned(INPUT), RUINED)
    assert both is not None and both.row["module"] == CULPRIT


def test_a_skipped_step_of_mixed_precision_is_not_the_origin(tmp_path: Path) -> None:
    skipped = poisoned({"tensor": "grad_output"}, step=20, num_inf=5)
    assert origin(tmp_path / "skipped", skipped, steps={}) is None
    found = origin(tmp_path / "later", skipped, poisoned(INPUT), RUINED)
    assert found is not None and found.step == 40


def test_a_weight_after_a_step_that_was_recorded(tmp_path: Path) -> None:
    """Nothing is asked for that was done: every step was sampled, and the one before is finite."""
    plan = {"every": 1, "num_steps": 45, "overrides": [poisoned({"tensor": "weight"}), RUINED]}
    losses = {step: {"loss": NAN} for step in range(40, 45)}
    (finding,) = triage(build(tmp_path / "run", steps=losses, **plan))
    assert (finding.name, finding.severity, finding.origin) == ("nonfinite-weight", Severity.ERROR, "outside")
    assert (finding.module, finding.gemm, finding.tensor) == (NAMES[0], "fprop", "weight")
    assert finding.message.endswith(
        "which held it when the step began; no Linear produced it: step 39 was recorded too, and all tensors of Linears read"
        " there are finite"
    )
    assert "every=1" not in finding.cure and "learning rate" in finding.cure


@pytest.mark.parametrize("every_step", [1, 10])
def test_what_was_done_is_not_asked_for(tmp_path: Path, every_step: int) -> None:
    plan = {"every": every_step, "num_steps": 45, "overrides": [poisoned(INPUT)]}
    (finding,) = triage(build(tmp_path / "run", steps={step: {"loss": NAN} for step in range(40, 45)}, **plan))
    assert finding.origin == "outside" and "every=1" not in finding.cure, "step 40 was sampled"


def test_modules_computed_before_it_are_no_victims(tmp_path: Path) -> None:
    """The backward pass of a NaN loss reaches them in the same step; the next step is finite again."""
    backward = poisoned({"gemm": "dgrad", "tensor": "grad_output"})
    for name, sick in (
        ("cast", Override(**{**INPUT, "steps": (40, 41)}, slots={"num_actual_nonfinite": 8})),
        ("outside", poisoned(INPUT)),
    ):
        run = build(tmp_path / name, overrides=[sick, *DOWNSTREAM, backward], steps={40: {"loss": NAN}})
        (finding,) = triage(run)
        assert (finding.module, finding.victims) == (CULPRIT, (NAMES[5],))


def test_a_warning_before_it_does_not_hide_it(tmp_path: Path) -> None:
    """Underflow since the start explains no NaN of the loss function."""
    underflow = Override(**{**INPUT, "steps": (0, None)}, slots={"num_underflow": every})
    findings = triage(build(tmp_path / "run", overrides=[underflow], steps=SICK_LOSS))
    assert findings.verdict == "error"
    lost = next(f for f in findings if f.code == "F125")
    assert (lost.name, lost.origin, lost.severity) == ("nonfinite-from-outside", "outside", Severity.ERROR)


def test_a_nan_of_one_step_is_an_error_and_a_spike(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", steps={50: {"loss": NAN}}))
    assert findings.verdict == "error" and findings.classification is not None
    assert (findings.classification["class"], findings.classification["cause"]) == ("loss-spike", "not-fp8")
    assert findings[0].message.startswith("the loss is NaN at step 50, and finite again from step 51 on; no Linear produced it")


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_a_loss_that_only_overflows(tmp_path: Path, value: float) -> None:
    findings = triage(build(tmp_path / "run", steps={step: {"loss": value} for step in range(90, 100)}))
    assert [(f.code, f.severity, f.origin, f.module) for f in findings] == [("F125", Severity.ERROR, "outside", None)]
    assert f"the loss is {'Inf' if value > 0 else '-Inf'} from step 90 on; no Linear produced it" in findings[0].message


def test_a_plain_model_has_an_origin_too(tmp_path: Path) -> None:
    """Its tensors are recorded under the casts that were only tried."""
    plan = {"recipe": "bf16", "what_if": ["blockwise"], "overrides": [poisoned(INPUT), *DOWNSTREAM, RUINED]}
    (finding,) = triage(build(tmp_path / "run", steps=SICK_LOSS, **plan))
    assert (finding.code, finding.module, finding.tensor, finding.origin) == ("F125", CULPRIT, "input", "outside")


@pytest.fixture
def followed(tmp_path: Path) -> Findings:
    """A wrong scale, and what it does to a layer after it, one before it and one much later."""
    overrides = [
        Override(**{**WEIGHT, "module": NAMES[2]}, slots={"gain": 2.0}),
        Override(**{**INPUT, "module": NAMES[5], "steps": (50, None)}, slots=CLIPPED),
    ]
    return triage(build(tmp_path / "run", overrides=overrides))


def test_a_consequence_stands_under_its_culprit(followed: Findings) -> None:
    assert [(f.code, f.module, f.severity) for f in followed] == [
        ("F113", NAMES[2], Severity.ERROR),
        ("F101", NAMES[5], Severity.INFO),
    ]
    assert followed[0].victims == (NAMES[5],)
    assert followed[1].message.endswith(f"; it follows F113 at {NAMES[2]} and may be its consequence")


@pytest.mark.parametrize(
    ("module", "steps"),
    [(NAMES[5], (90, None)), (NAMES[5], (30, None)), (NAMES[0], (40, None))],
    ids=["long after", "before", "in a layer that ran before"],
)
def test_a_fault_of_its_own_is_none(tmp_path: Path, module: str, steps: tuple[int, None]) -> None:
    overrides = [
        Override(**{**WEIGHT, "module": NAMES[2]}, slots={"gain": 2.0}),
        Override(**{**INPUT, "module": module, "steps": steps}, slots=FLUSHED),
    ]
    findings = triage(build(tmp_path / "run", overrides=overrides))
    assert {(f.code, f.severity) for f in findings} == {("F113", Severity.ERROR), ("F102", Severity.ERROR)}


def test_a_nan_has_its_victims_as_before(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", **FIRES["F103"]))
    assert (finding.module, finding.victims) == (CULPRIT, tuple(name for name in NAMES if name != CULPRIT))


@pytest.mark.parametrize(
    ("module", "last", "growth", "severity"),
    [
        (CULPRIT, 41, 100.0, Severity.INFO),
        (CULPRIT, 41, 4.0, Severity.ERROR),
        (CULPRIT, None, 100.0, Severity.ERROR),
        (NAMES[0], 41, 100.0, Severity.ERROR),
    ],
    ids=["a batch", "a batch as others", "it stays when the batch has gone", "the cast of the batch itself"],
)
def test_a_batch_out_of_size_explains_what_underflows_behind_it(
    module: str, last: int | None, growth: float, severity: Severity, tmp_path: Path
) -> None:
    """Seen with one microbatch of 0 to 255 where the others are standardised: a layer was blamed for the spike."""
    flushed = Override(**{**INPUT, "module": module, "steps": (40, last)}, slots=OUTLIER)
    amax = growth * max(row["amax"] for row in _inputs(tmp_path / "usual"))
    batch = Override(**{**INPUT, "module": NAMES[0], "steps": (40, 41)}, slots={"amax": amax} if module != NAMES[0] else {})
    findings = triage(build(tmp_path / "run", recipe="tensorwise_current", overrides=[flushed, batch]))
    (finding,) = [f for f in findings if f.code == "F105"]
    assert (finding.module, finding.severity) == (module, severity)
    assert ("batch" in finding.cure) is (severity is Severity.INFO)


def _inputs(path: Path) -> list[dict[str, Any]]:
    query = "SELECT amax FROM raw WHERE actual AND tensor = 'input' AND gemm = 'fprop' AND reference = 'operand'"
    rows: list[dict[str, Any]] = build(path, recipe="tensorwise_current").sql(query).to_pylist()
    return rows
