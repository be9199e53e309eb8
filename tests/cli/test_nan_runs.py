"""Runs that became NaN or Inf through every command: an error everywhere, no traceback, no number that is not there."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

import fp8debug
from tests.cli import nan_runs
from tests.cli.said import Said
from tests.shortened import shortened

#: Event, sampled steps, recipe -> name, module, gemm, tensor and origin of the finding.
HEAD = ("head", "dgrad", "grad_output", "outside")
CASES: dict[tuple[str, int, str | None], tuple[Any, ...]] = {
    ("loss function", 1, "blockwise"): ("nonfinite-from-outside", *HEAD),
    ("loss function", 10, "blockwise"): ("nonfinite-from-outside", *HEAD),
    ("loss function", 1, None): ("nonfinite-from-outside", *HEAD),
    ("mask", 1, "blockwise"): ("nonfinite-from-outside", "blocks.1.gate", "fprop", "input", "outside"),
    ("mask", 10, "rowwise"): ("nonfinite-from-outside", "blocks.1.gate", "fprop", "input", "outside"),
    ("mask", 2, None): ("nonfinite-from-outside", "blocks.1.gate", "fprop", "input", "outside"),
    ("data", 1, "blockwise"): ("nonfinite-from-outside", "blocks.0.gate", "fprop", "input", "outside"),
    ("data", 1, None): ("nonfinite-from-outside", "blocks.0.gate", "fprop", "input", "outside"),
    ("weights", 1, "blockwise"): ("nonfinite-overflow", "blocks.0.gate", "fprop", "output", "gemm"),
    ("weights", 1, None): ("nonfinite-overflow", "blocks.0.gate", "fprop", "output", "gemm"),
    ("optimizer", 1, "blockwise"): ("nonfinite-weight", "blocks.0.gate", "fprop", "weight", "outside"),
    ("optimizer", 2, "blockwise"): ("nonfinite-loss-unseen", "blocks.0.gate", "fprop", "weight", None),
    ("overflow", 1, "blockwise"): ("nonfinite-from-outside", None, None, None, "outside"),
    ("overflow", 10, "blockwise"): ("nonfinite-loss-unseen", None, None, None, None),
    ("one step", 1, "blockwise"): ("nonfinite-from-outside", *HEAD),
    ("zero tile", 1, "blockwise"): ("zero-tile-nan", "blocks.1.up", "fprop", "input", "cast"),
    ("zero tile", 10, "blockwise"): ("gemm-nonfinite", "blocks.1.up", "fprop", "output", "gemm"),
}
#: Every command that reads a run, with the exit code of a run that is an error.
LINES: dict[str, int] = {
    "triage RUNS/nan": 1,
    "triage RUNS/nan --fail-on error": 1,
    "triage RUNS/nan --baseline RUNS/good": 1,
    "triage RUNS/good --baseline RUNS/nan": 0,
    "triage RUNS/nan --format json --baseline RUNS/good": 1,
    "triage RUNS/nan --format csv": 1,
    "triage RUNS/nan --format github": 1,
    "triage RUNS/nan --format sarif": 1,
    "triage RUNS/nan --format html --baseline RUNS/good": 1,
    "show RUNS/nan --limit 0": 0,
    "show RUNS/nan --format csv": 0,
    "show RUNS/nan --format json": 0,
    "coverage RUNS/nan": 0,
    "coverage RUNS/nan --format json": 0,
    "diff RUNS/good RUNS/nan": 0,
    "diff RUNS/good RUNS/nan --exit-code": 1,
    "diff RUNS/good RUNS/good RUNS/nan --exit-code": 1,
    "diff RUNS/nan RUNS/good --format json": 0,
    "diff RUNS/nan RUNS/nan --format csv": 0,
    "diff RUNS/good RUNS/good RUNS/nan --format json": 0,
    "fallback RUNS/nan": 0,
    "fallback RUNS/nan --to json": 0,
    "calibrate RUNS/nan": 0,
    "calibrate RUNS/nan -o -": 0,
    "compact RUNS/nan --dry-run": 0,
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    nan_runs.record(folder / "good", "nothing")
    nan_runs.record(folder / "nan", "mask")
    return folder


@pytest.mark.parametrize(("event", "every", "recipe"), shortened(CASES, 3), ids=lambda value: str(value))
def test_the_first_tensor_is_named(tmp_path: Path, event: str, every: int, recipe: str | None) -> None:
    findings = fp8debug.triage(nan_runs.record(tmp_path / "run", event, every=every, recipe=recipe))
    first = findings[0]
    found = (first.name, first.module, first.gemm, first.tensor, first.origin)
    assert found == CASES[event, every, recipe], first.message
    assert (findings.verdict, first.severity, first.steps[0]) == ("error", "error", nan_runs.AT)
    assert findings.to_dict()["findings"][0]["origin"] == first.origin
    assert first.module not in first.victims
    asks = [text for text in (first.message, first.cure) if "every=1" in text or "check_finite" in text]
    assert every > 1 or not asks
    assert findings.classification is not None
    is_back = event == "one step"
    assert findings.classification["class"] == ("loss-spike" if is_back else "divergence")
    if first.origin == "outside":
        assert findings.classification["cause"] == "not-fp8"


@pytest.mark.parametrize(("line", "code"), shortened(LINES.items(), 2))
def test_every_command(capsys: pytest.CaptureFixture[str], runs: Path, line: str, code: int) -> None:
    said = Said(capsys, runs, line)
    assert said.code == code, said.err
    assert "Traceback" not in said.err and "fault of fp8debug" not in said.err
    if "json" in line or "sarif" in line:
        json.loads(said.out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert "within the noise" not in said.out or "good RUNS/good" in line


def test_what_people_read(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    header, kind, *_ = Said(capsys, runs, "triage RUNS/nan").out.splitlines()
    assert header.startswith("nan: error, 1 finding, steps 0 to 1")
    assert kind.startswith("class: (b) divergence: first NaN/Inf: the forward input of blocks.1.gate at step 8")
    text = Said(capsys, runs, "diff RUNS/good RUNS/nan").out
    assert "infinite gap: beyond the noise" in text and f"from step {nan_runs.AT} on" in text
    assert f"first blocks.1.gate fprop input at step {nan_runs.AT}: elements that are NaN or Inf 0 -> " in text
    assert ": NaN " in Said(capsys, runs, "triage RUNS/good --baseline RUNS/nan").out.replace("steps 8 to 11: ", ": ")


def test_a_nan_tensor_has_no_amax_of_0(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    """No element of it is finite; a dash would say that nothing was recorded."""
    site = "--module blocks.1.gate --gemm fprop --tensor input --reference operand --actual"
    line = f"show RUNS/nan {site} --steps 7:9 --columns amax,sqnr_db"
    rows = [row.split() for row in Said(capsys, runs, line).out.splitlines()]
    assert float(rows[1][-2]) > 0 and rows[2][-2:] == ["NaN", "NaN"]
    (before, nan) = csv.DictReader(io.StringIO(Said(capsys, runs, f"{line} --format csv").out))
    assert float(before["amax"]) > 0 and nan["amax"] == ""
