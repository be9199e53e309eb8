"""``--follow``: what a run that grows adds is printed as it comes, once, and the command ends with the run."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8debug.store.write.writer import RunWriter
from fp8debug_cli import following
from tests.cli.said import Said
from tests.synthetic import Override, Plan, manifest_of, stats_rows, steps_row

PLAN = Plan(
    num_steps=25,
    every=10,
    with_results=False,
    overrides=[Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input", steps=(10, None), slots={"gain": 2.0})],
)


def growing(path: Path, looks: list[int], world_size: int = 1, plan: Plan = PLAN) -> Iterator[None]:
    """Write a step of every rank at each look, the second rank a step behind; then close."""
    yield  # at the first look there is no run yet
    options: dict[str, Any] = {"world_size": world_size, "manifest": manifest_of(plan), "rank_manifest": {"device": "cpu"}}
    writers = [RunWriter(path, rank=rank, **options) for rank in range(world_size)]
    for number in range(plan.num_steps + world_size - 1):
        for rank, writer in enumerate(writers):
            step = number - rank
            if 0 <= step < plan.num_steps:
                is_sampled = step % plan.every == 0
                rows = stats_rows(plan, step, rank) if is_sampled else []
                if rows:
                    writer.stats({name: [row.get(name) for row in rows] for name in {key for row in rows for key in row}})
                writer.steps(steps_row(plan, step, is_sampled=is_sampled))
                writer.flush()
        looks.append(number)
        yield
    for writer in writers:
        writer.close()
    while True:
        yield


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """Let the run grow by a step whenever the command would sleep."""
    looks: list[int] = []
    steps = growing(tmp_path / "run", looks, getattr(request, "param", 1))
    monkeypatch.setattr(following, "sleep", lambda _: next(steps))
    return looks


@pytest.mark.parametrize("looks", [1, 2], indirect=True)
def test_every_step_is_shown_once(capsys: pytest.CaptureFixture[str], tmp_path: Path, looks: list[int]) -> None:
    told = "show RUNS/run --follow --module blocks.1.* --tensor weight --gemm fprop --format csv"
    followed = Said(capsys, tmp_path, told)
    assert followed.code == 0 and followed.err == "waiting for RUNS/run\n" and len(looks) >= PLAN.num_steps
    assert followed.out == Said(capsys, tmp_path, told.replace(" --follow", "")).out
    rows = list(csv.DictReader(io.StringIO(followed.out)))
    assert [(row["step"], row["module"]) for row in rows] == [
        (step, f"blocks.1.mlp.{name}") for step in ("0", "10", "20") for name in ("up", "down")
    ]


def test_a_step_is_shown_while_the_run_goes_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[int, str]] = []
    grow = growing(tmp_path / "run", looks)

    def sleep(seconds: float) -> None:
        text = capsys.readouterr().out
        if text:
            shown.append((looks[-1], text))
        next(grow)

    monkeypatch.setattr(following, "sleep", sleep)
    assert Said(capsys, tmp_path, "show RUNS/run --follow --steps 10: --module *.down --gemm fprop --tensor input").code == 0
    assert [(look, text.splitlines()[1].split()[0]) for look, text in shown] == [(11, "10"), (21, "20")]
    assert all(text.splitlines()[0].split()[:2] == ["step", "module"] for _, text in shown)


def test_findings_come_with_the_step_that_makes_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, looks: list[int]
) -> None:
    followed = Said(capsys, tmp_path, "triage RUNS/run --follow")
    alone = Said(capsys, tmp_path, "triage RUNS/run")
    assert (followed.code, followed.out) == (alone.code, alone.out) and followed.code == 1
    lines = followed.err.splitlines()
    assert lines[:2] == ["waiting for RUNS/run", "step 0: ok"]
    place = next(place for place, line in enumerate(lines) if "blocks.1.mlp.up fprop input" in line)
    assert lines[place - 1].startswith(("step 10: ", "step 20: ")) and lines[place].startswith("  F")
    assert sum("blocks.1.mlp.up fprop input" in line for line in lines) == 1


def test_a_finding_of_a_step_that_is_being_written_stands_under_its_own_number(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(PLAN, every=1, num_steps=6, overrides=[replace(PLAN.overrides[0], steps=(3, None))])
    steps = growing(tmp_path / "run", [], plan=plan)
    monkeypatch.setattr(following, "sleep", lambda _: next(steps))
    lines = Said(capsys, tmp_path, "triage RUNS/run --follow").err.splitlines()
    heads = [line for line in lines if line.startswith("step")]
    place = next(place for place, line in enumerate(lines) if "blocks.1.mlp.up fprop input" in line)
    assert "since step 3" in lines[place] or "at step 3" in lines[place], lines[place]
    assert lines[place - 1].startswith("steps 2 to 3: "), heads


def test_what_cannot_be_followed_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = Said(capsys, tmp_path, "show RUNS/run --follow --format json")
    assert (said.code, said.err) == (2, "error: --follow prints a table or CSV: a JSON array ends with its run\n")
    said = Said(capsys, tmp_path, "triage RUNS/run --follow --engine spark")
    assert (said.code, said.err) == (2, "error: --follow reads with DuckDB: leave out --engine spark\n")
