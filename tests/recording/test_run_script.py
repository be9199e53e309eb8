"""``fp8debug run`` and ``python -m fp8debug.run``: an unmodified script is recorded and behaves as before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8debug

SCRIPT = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(100, 64)
for _ in range(7):
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(sys.argv[1:], repr(loss.item()), __name__)
"""

OWN_WATCH = """
import fp8debug, torch
model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), "blockwise")
with fp8debug.watch(model, "own") as watch:
    model(torch.randn(4, 64)).sum().backward()
    watch.step(loss=1.0)
"""


def start(folder: Path, *words: str, by: str = "fp8debug.run") -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", *by.split(), *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("by", ["fp8debug.run", "fp8debug_cli.main run"])
def test_an_unmodified_script_is_recorded(by: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = subprocess.run([sys.executable, "train.py", "a", "--every"], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = start(tmp_path, "--out", "out", "--every", "3", "train.py", "a", "--every", by=by)
    assert done.returncode == 0, done.stderr
    assert done.stdout == alone.stdout  # the same loss to the last digit
    assert "recording Sequential into out" in done.stderr
    run = fp8debug.Run(tmp_path / "out")
    steps = run.sql("SELECT step, sampled, loss, lr FROM steps ORDER BY step").to_pylist()
    assert [s["step"] for s in steps] == list(range(7))
    assert [s["step"] for s in steps if s["sampled"]] == [0, 3, 6]
    assert repr(steps[-1]["loss"]) in alone.stdout and {s["lr"] for s in steps} == {0.1}
    assert run.table(columns=["sqnr_db"], module="2", tensor="input").num_rows


def test_a_script_that_watches_itself_is_left_to_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(OWN_WATCH)
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "own" / "manifest.json").exists() and not (tmp_path / "out").exists()


def test_a_script_that_fails_keeps_its_traceback_and_its_record(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("    optimizer.zero_grad()", "    if _ == 3: raise KeyError('mine')"))
    done = start(tmp_path, "--out", "out", "train.py")
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr
    assert fp8debug.Run(tmp_path / "out").steps_range == (0, 3)


def test_a_script_without_a_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('hello')")
    done = start(tmp_path, "train.py")
    assert done.stdout == "hello\n" and "nothing recorded: no module with a Linear ran forward" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nope.py",), "error: no script nope.py; expected the path of a Python file"),
        (("--every", "0", "train.py"), "error: --every must be at least 1, got 0"),
        (("--out", "taken", "train.py"), "error: taken already holds a run; choose another --out or delete it"),
    ],
)
def test_mistakes_are_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "manifest.json").write_text("{}")
    done = start(tmp_path, *words)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message + "\n")
