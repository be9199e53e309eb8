"""Parameters that no watched GEMM has: how each way of leaving one out is told, and where the first NaN was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from fp8debug.rules import Finding, Severity, triage
from tests.rules import sick_wholeruns as sick
from tests.synthetic import Override, build

NORM, EMBEDDING, BIAS, BUFFER = "blocks.1.mlp.norm.weight", "embed.weight", "blocks.0.mlp.up.bias", "blocks.0.load_buffer"
UNHELD: dict[str, Any] = {"optimizer": None, "num_moved": None, "num_sampled": None, "amax": None, "amax_before": 1.0}
UNKNOWN = (
    "grad_amax",
    "num_grad",
    "sum_grad2",
    "num_intended",
    "num_lost",
    "sum_intended2",
    "sum_intended_update",
    "sum_moment2",
)
WITHOUT: dict[str, Any] = {**dict.fromkeys(UNKNOWN), "has_grad": False, "num_moved": 0}
ZERO: dict[str, Any] = {"grad_amax": 0.0, "num_grad": 0, "num_moved": 0, "num_intended": 0}
STANDS: dict[str, Any] = {"num_moved": 0, "num_lost": 64, "sum_update2": 0.0, "sum_intended_update": 0.0}
IN_BF16: dict[str, Any] = {**STANDS, "dtype": "bfloat16", "sum_spacing_log2": -4.0 * 64}


def found(path: Path, name: str, columns: dict[str, Any], **plan: Any) -> list[Finding]:
    return list(
        triage(build(path / "run", **{"updates": lambda step, module: {}, "parameters": sick.told(name, **columns), **plan}))
    )


@pytest.mark.parametrize(
    ("columns", "kind", "words"),
    [
        (UNHELD, "parameter-left-out", "has gradients at 10 sampled steps, and no optimizer that steps has it: it stands"),
        (WITHOUT, "parameter-without-gradient", "has no gradient at any of 10 sampled steps, though AdamW has it"),
        (ZERO, "parameter-gradient-zero", "is 0 everywhere at all 10 sampled steps"),
    ],
    ids=["unheld", "without", "zero"],
)
@pytest.mark.parametrize(("name", "severity"), [(NORM, Severity.WARNING), (EMBEDDING, Severity.INFO)])
def test_a_parameter_that_is_not_trained(
    tmp_path: Path, name: str, severity: Severity, columns: dict[str, Any], kind: str, words: str
) -> None:
    (finding,) = found(tmp_path, name, columns)
    assert (finding.code, finding.name, finding.module, finding.severity) == (
        "F151",
        kind,
        name.removesuffix(".weight"),
        severity,
    )
    assert words in finding.message and f"{name} (float32[64])" in finding.message
    alike = ", while 3 of 3 parameters of the same role in other layers are trained"
    assert finding.message.endswith(alike) is (name == NORM)


def test_two_layers_of_four_are_no_odd_one(tmp_path: Path) -> None:
    def two(step: int, name: str) -> dict[str, Any]:
        return UNHELD if name in (NORM, "blocks.2.mlp.norm.weight") else {}

    findings = found(tmp_path, "", {}, parameters=two)
    (finding,) = findings
    assert finding.severity is Severity.INFO
    assert {finding.module, *finding.also} == {"blocks.1.mlp.norm", "blocks.2.mlp.norm"}


def test_a_part_of_the_model_without_gradients_is_one_thing(tmp_path: Path) -> None:
    """As an expert without tokens has none; its Linears are told of by other rules."""

    def update(step: int, module: str) -> dict[str, Any]:
        return {"num_grad": 0, "sum_grad2": 0.0, "num_moved": 0, "num_intended": 0} if module.startswith("blocks.1.") else {}

    assert "F151" not in {f.code for f in found(tmp_path, NORM, WITHOUT, updates=update)}


@pytest.mark.parametrize(("name", "severity"), [(NORM, Severity.INFO), (BIAS, Severity.INFO), (EMBEDDING, Severity.WARNING)])
def test_updates_of_a_parameter_that_are_rounded_away_are_f135s(tmp_path: Path, name: str, severity: Severity) -> None:
    (finding,) = found(tmp_path, name, IN_BF16)
    assert (finding.code, finding.name, finding.severity) == ("F135", "updates-rounded-away", severity)
    assert finding.module == name.rpartition(".")[0] and f"all of the updates of {name} are rounded away" in finding.message


def test_a_parameter_in_fp32_that_never_moves_is_f135s(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, NORM, STANDS)
    assert (finding.code, finding.name, finding.severity) == ("F135", "weight-not-updated", Severity.WARNING)
    assert f"no element of {NORM} moved in 10 sampled steps" in finding.message


@pytest.mark.parametrize(
    "columns", [{**IN_BF16, "keeps_precision": True}, {**IN_BF16, "lr": 0.0}, {**IN_BF16, "sum_intended_update": 64 * 3e-4**2}],
    ids=["an FP32 copy", "a learning rate of 0", "stochastic rounding"],
)  # fmt: skip
def test_rounding_that_does_no_harm_is_silent(tmp_path: Path, columns: dict[str, Any]) -> None:
    assert found(tmp_path, EMBEDDING, columns) == []


def test_sums_over_weights_are_as_without_parameters(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"updates": sick.rounded(0.97, 0.03)}
    alone = triage(build(tmp_path / "alone", **plan))
    beside = triage(build(tmp_path / "beside", parameters=sick.told(""), **plan))
    assert [f.to_dict() for f in alone] == [f.to_dict() for f in beside]


def nan_from(step: int) -> dict[int, dict[str, Any]]:
    return {at: {"loss": math.nan} for at in range(step, 100)}


def test_the_first_nan_in_an_embedding_comes_before_the_linear_that_reads_it(tmp_path: Path) -> None:
    poisoned = [Override(gemm="fprop", tensor="input", steps=(40, None), slots={"num_nan": 256})]
    columns = sick.told(EMBEDDING, range(40, 100), nonfinite_before="nan", amax_before=None, nonfinite="nan", amax=None)
    findings = triage(build(tmp_path / "run", parameters=columns, overrides=poisoned, steps=nan_from(40)))
    first = findings[0]
    assert (first.code, first.name, first.module, first.steps) == ("F151", "nonfinite-parameter", "embed", (40, 40))
    assert first.severity is Severity.ERROR and first.origin == "outside"
    assert first.message == (
        "embed.weight (float32[64]) holds NaN when step 40 begins, and was finite at step 30; all watched weights are finite"
        " there: what reads it passes it on"
    )
    assert {f.code for f in findings} == {"F125", "F151"}


def test_an_update_that_makes_nan_of_a_finite_gradient(tmp_path: Path) -> None:
    columns = sick.told(EMBEDDING, range(40, 41), nonfinite="nan", amax=None, sum_update2=None)
    (finding,) = triage(build(tmp_path / "run", parameters=columns, updates=lambda step, module: {}))
    assert (finding.name, finding.steps, finding.severity) == ("nonfinite-parameter", (40, 40), Severity.WARNING)
    assert "holds NaN after the optimizer's step 40, of a finite gradient: the update made it" in finding.message


@pytest.mark.parametrize("where", ["weights", "earlier", "gradient"])
def test_a_nan_that_comes_from_elsewhere_is_not_a_parameters(tmp_path: Path, where: str) -> None:
    columns = {"nonfinite_before": "nan", "amax_before": None}
    plan: dict[str, Any] = {"steps": nan_from(40)}
    if where == "weights":  # all are NaN: the gradients of a step between were
        plan["overrides"] = [Override(tensor="weight", steps=(40, None), slots={"num_nan": 256})]
    elif where == "earlier":
        plan["overrides"] = [Override(gemm="fprop", tensor="input", steps=(30, None), slots={"num_nan": 256})]
    else:
        columns = {"nonfinite": "nan", "amax": None, "grad_nonfinite": "nan", "grad_amax": None}
    findings = triage(build(tmp_path / "run", parameters=sick.told(EMBEDDING, range(40, 50), **columns), **plan))
    assert "F151" not in {f.code for f in findings}


def test_a_buffer_of_16_bits_that_is_written_and_stands(tmp_path: Path) -> None:
    (finding,) = found(tmp_path, BUFFER, {"num_moved": 0})
    assert (finding.name, finding.severity, finding.module) == ("buffer-not-updated", Severity.INFO, "blocks.0")
    assert f"the buffer {BUFFER} (bfloat16[64]) is written 100 times between 10 sampled steps and no element" in finding.message
    assert found(tmp_path / "fp32", BUFFER, {"num_moved": 0, "dtype": "float32"}) == []


def test_a_run_without_a_census_says_so(tmp_path: Path) -> None:
    skipped = dict(triage(build(tmp_path / "run")).skipped)
    assert skipped["F151"].startswith("not recorded: other parameters")


def test_updates_that_are_nan_are_no_rounding(tmp_path: Path) -> None:
    sick_columns = {**IN_BF16, "sum_intended_update": None, "sum_intended2": None, "num_moved": 64}
    assert found(tmp_path, EMBEDDING, sick_columns) == []
    assert list(triage(build(tmp_path / "weights", updates=lambda step, module: sick_columns))) == []
