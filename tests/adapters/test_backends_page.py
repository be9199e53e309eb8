"""docs/backends.md promises what a test shows, and the example runs."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import pytest

from tests.example import run_example

ROOT = Path(__file__).parents[2]


def test_each_cell_is_a_test_or_the_word_no() -> None:
    lines = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| backend |"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[begin + 2 :]))
    cells = [cell.strip() for line in table for cell in line.split("|")[2:-1]]
    folders = [ROOT / "tests" / name for name in ("adapters", "conditions")]
    sources = {path.stem: path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py")}
    assert len(table) > 5 and len(cells) == 4 * len(table)
    for cell in cells:
        if cell != "no":
            named = re.fullmatch(r"`(\w+)::(\w+)`", cell)
            assert named is not None, cell
            assert f"def {named[2]}(" in sources.get(named[1], ""), cell


@pytest.mark.filterwarnings("default")  # torchao's own
@pytest.mark.parametrize("backend", ["fp8debug", "torchao"])
def test_the_example(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(backend)
    run = run_example("backends.py", backend, "--steps", "6", folder=tmp_path, monkeypatch=monkeypatch)
    assert run is not None and {m["fqn"]: m["fp8"] for m in run.modules} == {
        "gate": True,
        "up": True,
        "down": True,
        "head": False,
    }
    assert sorted(set(run.table(columns=["step"], module="down")["step"].to_pylist())) == [0, 5]
    said = capsys.readouterr()
    assert said.out == "run: fp8debug coverage run; fp8debug triage run\n" and "not watched" not in said.err


def test_what_the_example_needs_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run_example("backends.py", "te", folder=tmp_path, monkeypatch=monkeypatch, code=2) is None
    assert capsys.readouterr().err == "error: this example needs a GPU and pip install 'fp8debug[te]'\n"
