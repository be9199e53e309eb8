"""Every command of docs/triage.md works, and its TOML is what the tool reads."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8debug.rules.engine.config import load_settings
from fp8debug_cli.main import status
from tests.rules.sick_runs import FIRES
from tests.synthetic import Plan, write

PAGE = (Path(__file__).parents[2] / "docs" / "triage.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^\$ fp8debug (.+)$", PAGE, re.MULTILINE)
SMALL = (("up", 64, 128), ("blocks.1.mlp.up", 64, 128), ("down", 128, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    write(folder / "runs" / "healthy", Plan(num_steps=60, modules=SMALL, with_results=False))
    write(folder / "runs" / "sick", Plan(num_steps=60, modules=SMALL, with_results=False, **FIRES["F101"]))
    return folder


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_works(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> None:
    monkeypatch.chdir(folder)
    code = status([word.strip("'") for word in command.split()])
    said = capsys.readouterr()
    assert code == (1 if command.startswith("triage") else 0), said.err
    assert "error:" not in said.err


def test_the_page_has_commands() -> None:
    assert len(COMMANDS) >= 6


def test_the_settings_of_the_page(tmp_path: Path) -> None:
    (toml,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(toml, encoding="utf-8")
    found = load_settings(start=tmp_path)
    assert (found.ignore, found.fail_on, found.thresholds) == (("F110",), "error", {"F101": {"max_rate": 0.02}})


def test_every_class_and_cause_is_explained() -> None:
    source = (Path(__file__).parents[2] / "fp8debug" / "rules" / "classification.py").read_text(encoding="utf-8")
    told = set(re.findall(r'(?:kind|cause)="([\w-]+)"', source)) | set(re.findall(r'cause = "([\w-]+)"', source))
    assert {"loss-spike", "divergence", "mismatch"} <= told
    assert [word for word in told if f"`{word}`" not in PAGE] == []
