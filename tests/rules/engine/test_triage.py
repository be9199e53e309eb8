"""What triage makes of many sites: the culprit first, one finding per cause, victims apart, a stable document."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import RunError, UnknownNameError
from fp8debug.rules import RULES, Finding, Findings, Severity, triage
from tests.rules.sick_runs import CLIPPED, CULPRIT, DELAYED, FIRES, FLOOR, FLUSHED, INPUT, WEIGHT, share
from tests.synthetic import MODULES, Override, build

NAMES = [name for name, _, _ in MODULES]


def test_errors_come_first_then_the_first_step_then_execution(tmp_path: Path) -> None:
    overrides = [
        Override(**{**INPUT, "module": NAMES[5], "steps": (30, None)}, slots=CLIPPED),
        Override(**{**WEIGHT, "module": NAMES[1], "steps": (60, None)}, slots={"gain": 2.0}),
        Override(**{**INPUT, "module": NAMES[0], "steps": (60, None)}, slots=FLUSHED),
        Override(**{**INPUT, "module": NAMES[2], "steps": (0, None)}, slots={**FLOOR, "num_saturated": 20}),
    ]
    findings = triage(build(tmp_path / "run", overrides=overrides))
    assert [(f.code, f.module, str(f.severity)) for f in findings] == [
        ("F101", NAMES[5], "error"),
        ("F102", NAMES[0], "error"),
        ("F113", NAMES[1], "error"),
        ("F104", NAMES[2], "warning"),
    ]
    assert findings.verdict == "error"


def test_the_backward_pass_runs_from_the_last_layer(tmp_path: Path) -> None:
    sick: dict[str, Any] = {"module": "blocks.*", "gemm": "dgrad", "tensor": "grad_output", "steps": (40, None)}
    findings = triage(build(tmp_path / "run", overrides=[Override(**sick, slots=CLIPPED)]))
    assert findings[0].module == NAMES[-1]


def test_one_wrong_cast_everywhere_is_one_finding(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", overrides=[Override(gemm="fprop", reference="operand", slots=FLOOR)]))
    assert [(f.code, f.module, f.also) for f in findings] == [("F104", NAMES[0], tuple(NAMES[1:]))]
    assert len(findings[0].sites) == 2 * len(NAMES)


def test_a_shared_input_ties(tmp_path: Path) -> None:
    twins = (("attn.q", 256, 256), ("attn.k", 256, 256), ("attn.v", 256, 256), ("mlp.up", 256, 1024))
    sick = Override(gemm="fprop", tensor="input", module="attn.*", steps=(40, None), slots=CLIPPED)
    findings = triage(build(tmp_path / "run", modules=twins, overrides=[sick]))
    assert [(f.module, f.also) for f in findings] == [("attn.q", ("attn.k", "attn.v"))]


def test_sites_of_a_module_join_in_the_worst(tmp_path: Path) -> None:
    overrides = [
        Override(**INPUT, slots=CLIPPED),
        Override(**{**INPUT, "gemm": "wgrad", "steps": (20, None)}, slots={**CLIPPED, "num_saturated": share(0.2)}),
    ]
    findings = triage(build(tmp_path / "run", overrides=overrides))
    assert [(f.module, f.gemm, f.steps) for f in findings] == [(CULPRIT, "fprop", (20, 90))]


def test_victims_of_a_nan_stand_under_their_culprit(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", **FIRES["F103"]))
    assert findings[0].victims == tuple(name for name in NAMES if name != CULPRIT)
    assert findings[0].message == (
        "128 finite elements of the fprop input became NaN or Inf at step 40: 1 of 2048 blocks was all zero; whether"
        f" codes or scales are NaN there is not in the statistics, and the tensors of dump=['{CULPRIT}:fprop:input@40'] tell"
    )


def test_a_victim_of_nan_is_not_accused(tmp_path: Path) -> None:
    poisoned = Override(steps=(50, None), slots={**CLIPPED, "num_nan": 5, "num_actual_nonfinite": 9}, reference="operand")
    plan = {**FIRES["F103"], "overrides": [*FIRES["F103"]["overrides"], poisoned]}
    assert [(f.code, f.module) for f in triage(build(tmp_path / "run", **plan))] == [("F103", CULPRIT)]


def test_ranks_that_show_it_are_named(tmp_path: Path) -> None:
    sick = Override(**INPUT, slots=CLIPPED)
    assert triage(build(tmp_path / "run", world_size=2, overrides=[sick]))[0].ranks == (0, 1)


def test_select_and_ignore(tmp_path: Path) -> None:
    overrides = [Override(**INPUT, slots=CLIPPED), Override(**WEIGHT, slots={"gain": 2.0})]
    run = build(tmp_path / "run", overrides=overrides)
    assert [f.code for f in triage(run)] == ["F101", "F113"]
    assert [f.code for f in triage(run, select=["F11"])] == ["F113"]
    assert [f.code for f in triage(run, select=["stale-scale-saturation"])] == ["F101"]
    assert [f.code for f in triage(run, ignore=["F113"])] == ["F101"]
    with pytest.raises(UnknownNameError, match=r"unknown rule 'F199': did you mean 'F1\d\d'"):
        triage(run, select=["F199"])


def test_a_column_that_was_not_recorded_skips_its_rules(tmp_path: Path) -> None:
    run = build(tmp_path / "run", overrides=[Override(slots={"headroom": None}, actual=None, reference="operand")])
    findings = triage(run)
    assert list(findings) == []
    skipped = set(findings.skipped)
    assert {("F102", "not recorded: headroom"), ("F119", "not recorded: headroom")} <= skipped
    assert "F101" not in {code for code, _ in skipped}  # the share that clips judges alone


def test_a_run_without_losses_cannot_have_a_spike(tmp_path: Path) -> None:
    run = build(tmp_path / "run", steps={step: {"loss": None} for step in range(100)})
    assert ("F125", "not recorded: loss") in triage(run).skipped


def test_a_run_without_a_manifest_is_judged(tmp_path: Path) -> None:
    build(tmp_path / "run", **FIRES["F101"])
    (tmp_path / "run" / "manifest.json").unlink()
    findings = triage(tmp_path / "run")
    assert [f.code for f in findings] == ["F101"]
    assert ("F110", "the manifest does not say which modules run in FP8") in findings.skipped


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunError):
        triage(tmp_path)


def test_the_json_document_is_the_documented_one(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "exp1", **FIRES["F101"]), select=["F101", "F113"], ignore=["F113"])
    assert json.loads(findings.to_json()) == {
        "schema": 1,
        "run": "exp1",
        "steps": [0, 99],
        "verdict": "error",
        "lost": [],
        "classification": {
            "class": "loss-fine",
            "title": "no loss problem",
            "cause": "findings",
            "what": f"the loss is fine so far; 1 finding, first {CULPRIT} (F101 stale-scale-saturation) since step 40",
            "evidence": [
                "if downstream metrics are off all the same, training and inference differ: record both paths on the same tokens"
                " and compare them: fp8debug parity TRAIN ROLLOUT"
            ],
            "step": None,
            "module": CULPRIT,
            "code": "F101",
            "bf16": None,
        },
        "findings": [
            {
                "code": "F101",
                "name": "stale-scale-saturation",
                "severity": "error",
                "module": CULPRIT,
                "gemm": "fprop",
                "tensor": "input",
                "cast": DELAYED,
                "steps": [40, 90],
                "ranks": [0],
                "value": pytest.approx(0.76, abs=1e-5),
                "threshold": 0.01,
                "unit": "1",
                "message": "76 % of the fprop input clips at step 40: its amax is 14 times what the delayed scale can hold",
                "cure": "scaling='current' for this operand; else a shorter history or a margin; else BF16 for this GEMM",
                "also": [],
                "victims": [],
                "origin": None,
            }
        ],
        "not_watched": [],
        "skipped": [],
        "thresholds": {"F101": RULES.get("F101").thresholds},
    }


def test_json_has_no_bare_nan() -> None:
    finding = Finding(code="F1", name="n", severity=Severity.INFO, steps=(0, 0), value=float("inf"), message="", cure="")
    document = json.loads(Findings([finding], run="r").to_json())
    assert document["findings"][0]["value"] is None
    assert document["verdict"] == "info"
    assert json.loads(Findings(run="r").to_json())["verdict"] == "ok"


def test_csv_has_the_keys_of_the_json(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", **FIRES["F103"]))
    (row,) = csv.DictReader(io.StringIO(findings.to_csv()))
    assert set(row) == (set(findings[0].to_dict()) - {"steps"}) | {"first_step", "last_step"}
    assert row["victims"].split() == list(findings[0].victims)
    assert (row["first_step"], row["last_step"]) == ("40", "40")


def test_a_baseline_gives_loss_and_configuration(tmp_path: Path) -> None:
    build(tmp_path / "bf16", recipe="bf16", what_if=["blockwise"], seed=1)
    findings = triage(build(tmp_path / "run"), tmp_path / "bf16")
    assert findings.baseline is not None
    assert findings.baseline["run"] == "bf16"
    assert findings.baseline["steps"] == [80, 99]
    assert abs(findings.baseline["loss_gap"]) < 0.1
    assert findings.baseline["configuration"]["recipe"] == ["bf16", "blockwise"]
    assert json.loads(findings.to_json())["baseline"]["run"] == "bf16"


def test_progress_is_told_of_every_rule(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    triage(build(tmp_path / "run", num_steps=3), progress=lambda *state: seen.append(state))
    assert seen[0] == (0, len(RULES), "F101")
    assert [done for done, _, _ in seen] == list(range(len(RULES)))
