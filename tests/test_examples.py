"""The examples run as a user would start them, at small sizes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fp8debug

EXAMPLES = Path(__file__).parents[1] / "examples"
TOUR = Path(__file__).parents[1] / "docs" / "tour.md"
SMALL = ["--width", "64", "--depth", "3", "--length", "32", "--rows", "4"]


def start(name: str, *words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / name), *map(str, words)]
    environment = {**os.environ, "COLUMNS": "200"}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280, env=environment, check=False)


def test_training_records_resumes_and_is_the_same_unwatched(tmp_path: Path) -> None:
    def train(result: str, *words: object) -> list[float]:
        done = start("train_gpt.py", *SMALL, "--result", result, *words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        losses: list[float] = json.loads((tmp_path / result).read_text())["losses"]
        return losses

    whole = train("whole.json", "--steps", 8, "--recipe", "tensorwise_delayed")
    first = train("first.json", "--steps", 4, "--recipe", "tensorwise_delayed", "--out", "run", "--every", 2, "--save", "4.pt")
    words = ("--steps", 8, "--recipe", "tensorwise_delayed", "--out", "run", "--every", 2, "--resume", "4.pt")
    assert first + train("second.json", *words) == whole
    run = fp8debug.Run(tmp_path / "run")
    assert [r["loss"] for r in run.sql("SELECT loss FROM steps ORDER BY step").to_pylist()] == whole
    assert {m["requested"] for m in run.modules if m["fqn"] == "lm_head"} == {"bf16"}
    assert len(train("tied.json", "--steps", 2, "--tied")) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--recipe", "blokwise"), "error: unknown recipe 'blokwise': did you mean 'blockwise'"),
        (("--fault", "zero_tile", "--fault-module", "blocks.9.mlp.up"), "error: module 'blocks.9.mlp.up' matches nothing"),
        (("--fallback", "none.json"), "error: "),
    ],
)
def test_a_mistake_is_one_line(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = start("train_gpt.py", *SMALL, *words, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(message) and done.stderr.count("\n") == 1


def shape(line: str) -> str:
    """Return a line without its numbers, spacing and rules of a table."""
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", " ".join(line.split())).replace("blocks was", "blocks were")


def follow_the_tour(folder: Path) -> None:
    """Run every command of docs/tour.md on the demo's runs, and look for the lines that the page shows, but for numbers."""
    blocks = re.findall(r"^```console\n(.*?)^```", TOUR.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    commands = [part.split("\n", 1) for block in blocks for part in block.split("$ ")[1:]]
    ran = [words for words, _ in commands if words.startswith("fp8debug") and "dashboard" not in words]
    assert len(ran) >= 6
    for words, expected in commands:
        if words not in ran:
            continue
        environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
        command = [sys.executable, "-m", "fp8debug_cli.main", *words.split()[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=False)
        assert done.returncode == 0, done.stderr
        shown = {shape(line) for line in done.stdout.splitlines()}
        assert [line for line in expected.splitlines() if line and shape(line) not in shown] == [], done.stdout


@pytest.mark.slow
def test_the_demo_finds_the_planted_fault_and_cures_it(tmp_path: Path) -> None:
    done = start("demo.py", "--steps", 46, *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "F103  error     blocks.2.mlp.down  fprop input" in done.stdout
    assert "dashboard runs/demo" in done.stdout
    assert "verify runs/demo/sick --seed-arg --seed --script" in done.stdout
    sick, cured = (json.loads((tmp_path / "runs/demo" / f"{n}.result.json").read_text()) for n in ("sick", "cured"))
    assert sick["losses"][-1] != sick["losses"][-1]  # NaN
    assert abs(cured["held_out"] - json.loads((tmp_path / "runs/demo/bf16.result.json").read_text())["held_out"]) < 0.1
    assert fp8debug.triage(tmp_path / "runs/demo/cured") == []
    follow_the_tour(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "precious").write_text("")
    refused = start("demo.py", "--out", "elsewhere", cwd=tmp_path)
    assert refused.returncode == 2 and "elsewhere exists and is no earlier demo" in refused.stderr


def test_the_accumulation_example_finds_the_short_accumulator(tmp_path: Path) -> None:
    for _ in range(2):  # again over its own runs
        done = start("accumulation.py", "--lengths", 4096, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    header, promoted, fast = done.stdout.splitlines()
    assert header.split() == ["K", "sums", "SQNR", "gain", "worst", "error", "triage"]
    assert promoted.split()[:2] == ["4096", "promoted"] and promoted.endswith("  clean")
    assert fast.split()[:2] == ["4096", "fast"] and fast.endswith("  F108 short-accumulator at layer fprop")
    assert "its sums over 4096 terms keep too few bits" in done.stderr
