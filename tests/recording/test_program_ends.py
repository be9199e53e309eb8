"""A program that an exception ends: triage, coverage and the exit status name the exception and the step."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8debug
from fp8debug.rules import Severity
from fp8debug_cli.main import status
from tests.recording.models import net, train
from tests.shortened import shortened

SCRIPT = """
import sys
import torch
{watch_import}
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
{attach}
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    loss = model(torch.randn(32, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
{end}
"""
OWN = {"watch_import": "import fp8debug", "attach": "fp8debug.watch(fp8debug.convert(model, 'blockwise'), 'run', every=2)"}
UNDER_RUN = {"watch_import": "", "attach": ""}
CRASH = "raise RuntimeError('CUDA error: an illegal memory access\\nmore')"


def ended(folder: Path, form: dict[str, str], end: str) -> fp8debug.rules.Findings:
    (folder / "train.py").write_text(SCRIPT.format(**form, end=end))
    words = [sys.executable, "train.py"] if form is OWN else [sys.executable, "-m", "fp8debug.run", "--out", "run", "train.py"]
    subprocess.run(words, cwd=folder, capture_output=True, check=False, timeout=300)
    return fp8debug.triage(folder / "run")


@pytest.mark.parametrize("form", [OWN, UNDER_RUN], ids=["own watch", "fp8debug run"])
def test_an_exception_is_named(tmp_path: Path, form: dict[str, str]) -> None:
    found = ended(tmp_path, form, CRASH)
    (lost,) = found.lost
    assert (lost["module"], lost["ended"], lost["until"]) == (None, True, None)
    assert lost["reason"] == "RuntimeError: CUDA error: an illegal memory access"
    assert lost["step"] in (5, 6)
    assert found.verdict == "warning" and found.reaches(Severity.WARNING)
    assert found.classification is not None
    assert "the program ended in step" in found.classification["what"]


@pytest.mark.parametrize("end", shortened(["sys.exit()", "sys.exit(0)", "", "raise KeyboardInterrupt"], 3))
def test_an_end_that_is_meant_is_none(tmp_path: Path, end: str) -> None:
    assert ended(tmp_path, UNDER_RUN, end).lost == []


def test_an_error_status_is_named(tmp_path: Path) -> None:
    (lost,) = ended(tmp_path, UNDER_RUN, "sys.exit(3)").lost
    assert lost["reason"] == "SystemExit: 3"


def test_a_resumed_part_takes_the_end_back(tmp_path: Path) -> None:
    path = tmp_path / "run"
    model = net()

    def step_or_fail(step: int, loss: torch.Tensor) -> None:
        watch.step(loss=loss)
        assert step < 2, "the program's own"

    with pytest.raises(AssertionError), fp8debug.watch(model, path, every=2, what_if=()) as watch:
        train(model, 4, after=step_or_fail)
    found = fp8debug.triage(path)
    assert [str(entry["reason"]).partition(":")[0] for entry in found.lost] == ["AssertionError"]
    assert found.classification is not None and found.classification["cause"] == "incomplete"
    with fp8debug.watch(model, path, every=2, what_if=(), resume_from=3) as watch:
        train(model, 3, after=lambda _, loss: watch.step(loss=loss))
    assert fp8debug.triage(path).lost == []


@pytest.mark.parametrize("command", shortened(["triage", "coverage"], 2))
def test_commands_say_it(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    ended(tmp_path, OWN, CRASH)
    assert status([command, str(tmp_path / "run")]) == (command == "triage")
    text = " ".join(capsys.readouterr().out.split())
    assert "warning: the program ended in step" in text and "by RuntimeError: CUDA error" in text
