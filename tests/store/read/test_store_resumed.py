"""A run and its resumed parts count as one, in one folder or in several."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8debug.errors import UsageError
from fp8debug.rules import triage
from fp8debug.rules.reading.traces import sampled_steps
from fp8debug.store.read.resumed import JoinedRun, open_runs
from fp8debug.store.read.run import Run
from fp8debug.store.write.writer import RunWriter
from tests.rules.sick_runs import CLIPPED, CULPRIT, INPUT
from tests.synthetic import Override, Plan, manifest_of, stats_rows, steps_row, write


def resumed(path: Path, plan: Plan, start: int, resume: bool = True) -> None:
    """Write the steps of a plan from ``start`` on."""
    writer = RunWriter(path, manifest=manifest_of(plan), rank_manifest={"device": "cpu"}, resume=resume)
    for step in range(start, plan.num_steps):
        if step % plan.every == 0:
            rows = stats_rows(plan, step)
            names = {name for row in rows for name in row}
            writer.stats({name: [row.get(name) for row in rows] for name in names})
        writer.steps(steps_row(plan, step, is_sampled=step % plan.every == 0))
    writer.close()


SICK = Plan(overrides=[Override(**{**INPUT, "steps": (70, None)}, slots=CLIPPED)], with_results=False)


def test_a_run_resumed_into_its_own_folder_is_one(tmp_path: Path) -> None:
    write(tmp_path / "run", Plan(num_steps=60, with_results=False))
    resumed(tmp_path / "run", SICK, 50)
    run = Run(tmp_path / "run")
    assert run.steps_range == (0, 99)
    assert run.sql("SELECT count(*) AS num FROM steps").to_pylist() == [{"num": 100}]
    (finding,) = triage(run)
    assert (finding.code, finding.module, finding.steps) == ("F101", CULPRIT, (70, 90))


def test_the_last_step_is_that_of_the_last_writing_as_its_rows_have_it(tmp_path: Path) -> None:
    write(tmp_path / "run", Plan(num_steps=60, with_results=False))
    resumed(tmp_path / "run", Plan(num_steps=40, with_results=False), 20)
    run = Run(tmp_path / "run")
    rows = run.sql("SELECT min(step) AS first, max(step) AS last FROM raw_steps").to_pylist()
    assert rows == [{"first": 0, "last": 39}] and run.steps_range == (0, 39)


def test_folders_of_one_run_are_one(tmp_path: Path) -> None:
    write(tmp_path / "first", Plan(num_steps=60, with_results=False))
    resumed(tmp_path / "second", SICK, 50, resume=False)
    run = open_runs([tmp_path / "second", tmp_path / "first"])
    assert isinstance(run, JoinedRun)
    assert (run.name, run.steps_range, run.starts) == ("second", (0, 99), [0, 50])
    assert run.sql("SELECT count(*) AS num, count(DISTINCT step) AS steps FROM steps").to_pylist() == [{"num": 100, "steps": 100}]
    assert sampled_steps(run) == list(range(0, 100, 10))
    (finding,) = triage([tmp_path / "first", tmp_path / "second"])
    assert (finding.code, finding.steps) == ("F101", (70, 90))


def test_what_changed_at_the_resumption_is_told(tmp_path: Path) -> None:
    write(tmp_path / "first", Plan(num_steps=50, with_results=False))
    plan = Plan(with_results=False, manifest={"environment": {"torch": "none", "NVTE_X": "1"}},
                steps={step: {"loss": 4.0 + 0.05 * (step - 52)} for step in range(52, 100)})  # fmt: skip
    resumed(tmp_path / "second", plan, 50, resume=False)
    found = triage([tmp_path / "first", tmp_path / "second"]).classification
    assert found is not None
    assert (found["class"], found["cause"]) == ("divergence", "configuration")
    assert "environment.NVTE_X: None -> 1" in found["what"]


def test_two_runs_are_not_one(tmp_path: Path) -> None:
    write(tmp_path / "a", Plan(num_steps=3))
    write(tmp_path / "b", Plan(num_steps=3))
    with pytest.raises(UsageError, match="both begin at step 0: these are two runs, not a run and its resumed part"):
        open_runs([tmp_path / "a", tmp_path / "b"])
    assert type(open_runs([tmp_path / "a"])) is Run
