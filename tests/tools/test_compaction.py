"""Thinning a run changes no verdict, touches no run that goes on, and can be cut short at any moment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import RecordError, RunError, UsageError
from fp8debug.rules import Findings, triage
from fp8debug.store.read.run import Run
from fp8debug.store.write import rewrite
from fp8debug.store.write.lock import Lock
from fp8debug.tools.compaction import Keep, compact_run, conclusions, kept_steps
from fp8debug_cli.main import status
from tests.rules import sick_runs, sick_sites, sick_wholeruns
from tests.shortened import shortened
from tests.store.recording import PRELUDE, names_below, record
from tests.synthetic import MODULES, build

KEEP = Keep(every=4, around=2)
FIRES: dict[str, dict[str, Any]] = {**sick_runs.FIRES, **sick_sites.FIRES, **sick_wholeruns.FIRES}
#: One of each kind, in longer runs: a site that turns sick, a NaN, a fault from the first step on, the loss alone, single ranks,
#: nothing.
SICK: dict[str, dict[str, Any]] = {**{code: FIRES[code] for code in ("F101", "F103", "F112", "F114", "F125")}, "healthy": {}}


@pytest.mark.parametrize("code", SICK)
def test_triage_says_the_same_before_and_after(tmp_path: Path, code: str) -> None:
    path = tmp_path / "run"
    before = triage(build(path, **{"num_steps": 100, "every": 4, **SICK[code]}))
    assert code == "healthy" or code in {finding.code for finding in before}
    done = compact_run(path, KEEP)
    after = triage(path)
    assert conclusions(after) == conclusions(before)
    assert done.verdict == before.verdict and done.every > 1
    run = Run(path)
    assert run.problems == [] and run.manifest["compacted"][0]["rows"] == list(done.num_rows)
    assert run.sql("SELECT count(*) AS n FROM raw").to_pylist()[0]["n"] == done.num_rows[1] < done.num_rows[0]
    size = sum(part.stat().st_size for part in path.glob("rank=*/stats/*.parquet"))
    assert size == done.num_bytes[1] < done.num_bytes[0]
    assert not {name for name in names_below(path) if "lock" in name or "compact" in name}


@pytest.mark.parametrize("code", shortened(sorted(FIRES.keys() - SICK.keys()), 4))
def test_no_fault_is_judged_otherwise_once_thinned(tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Findings] = []

    def heard(*args: Any, **kwargs: Any) -> Findings:
        verdicts.append(triage(*args, **kwargs))
        return verdicts[-1]

    monkeypatch.setattr("fp8debug.tools.compaction.triage", heard)
    build(tmp_path / "run", **FIRES[code])
    done = compact_run(tmp_path / "run", Keep(every=2, around=1))
    assert code in {finding.code for finding in verdicts[0]}
    assert conclusions(triage(tmp_path / "run")) == conclusions(verdicts[0])
    assert done.num_rows[1] < done.num_rows[0]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compaction") / "run"
    build(path, num_steps=60, every=2, modules=MODULES[:1], with_results=False)
    return path


@pytest.fixture
def copy(healthy: Path, tmp_path: Path) -> Path:

    return Path(shutil.copytree(healthy, tmp_path / "run"))


def contents(path: Path) -> dict[str, bytes]:
    return {name: (path / name).read_bytes() for name in names_below(path)}


def test_a_dry_run_changes_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(copy)
    assert status(["compact", str(copy), "--keep", "every=10,around=1", "-n"]) == 0
    said_of_it = capsys.readouterr().out
    assert said_of_it.startswith(f"{copy}: 4 of 30 sampled steps would stay whole (every=10), 24 of 180 rows, ")
    assert said_of_it.endswith("; triage says the same: ok\n") and contents(copy) == before
    assert status(["compact", str(copy), "--keep", "every=10", "--keep", "around=1"]) == 0
    assert "4 of 30 sampled steps stay whole" in capsys.readouterr().out
    assert Run(copy).sql("SELECT DISTINCT step FROM raw ORDER BY step").to_pydict()["step"] == [0, 20, 40, 58]
    assert Run(copy).sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 60}]


def test_the_swap_may_be_cut_short_anywhere(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CutError(BaseException):
        pass

    def cut(path: Path) -> bool:
        raise CutError

    before = conclusions(triage(copy))
    with monkeypatch.context() as patch:
        patch.setattr(rewrite, "finish", cut)
        with pytest.raises(CutError):
            compact_run(copy, KEEP)
    assert (copy / rewrite.WHOLE).is_dir() and conclusions(triage(copy)) == before
    compact_run(copy, Keep(every=1))  # thins nothing itself
    assert not (copy / rewrite.WHOLE).exists() and conclusions(triage(copy)) == before
    assert Run(copy).sql("SELECT count(DISTINCT step) AS n FROM raw").to_pylist()[0]["n"] < 30
    assert [note["every"] for note in Run(copy).manifest["compacted"]] == [4]


def test_a_process_killed_while_it_makes_the_copy_leaves_the_run_alone(copy: Path) -> None:
    before = contents(copy)
    code = (
        "import signal\nfrom fp8debug.tools import compaction\nfrom fp8debug.store.write import rewrite as staged\n"
        "staged.write_part = lambda table, path: os.kill(os.getpid(), signal.SIGKILL)\n"
        "compaction.compact_run(path)\n"
    )
    killed = subprocess.run([sys.executable, "-c", PRELUDE + code, str(copy)], capture_output=True, text=True, timeout=120)
    assert killed.returncode < 0, killed.stderr
    assert {name: data for name, data in contents(copy).items() if name in before} == before
    done = compact_run(copy, KEEP)
    assert done.every == 4 and not (copy / rewrite.HALF).exists()


def test_a_run_that_goes_on_is_not_touched(tmp_path: Path, copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = record(tmp_path / "live", range(40))
    before = contents(tmp_path / "live")
    assert status(["compact", str(tmp_path / "live")]) == 2
    assert "live/rank=00000 is being written by process" in capsys.readouterr().err
    assert contents(tmp_path / "live") == before
    opened.close()

    lock = Lock(copy)  # another compact
    with pytest.raises(RecordError, match="a run that goes on is not touched"):
        compact_run(copy)
    lock.release()


def test_a_run_that_changed_meanwhile_is_not_swapped(copy: Path) -> None:
    half = rewrite.stage(copy, lambda rows: rows["step"].is_null())
    (copy / "rank=00000" / "stats-00007.arrows").write_bytes(b"a process that began meanwhile")
    with pytest.raises(RecordError, match="changed while it was rewritten"):
        rewrite.swap(copy, half, {})


def test_where_a_verdict_hangs_on_every_step_nothing_goes(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(copy)

    def by_rows(findings: Any) -> Any:
        return next(counted)

    counted = iter(range(100))
    monkeypatch.setattr("fp8debug.tools.compaction.conclusions", by_rows)
    done = compact_run(copy, KEEP)
    assert done.every == 1 and done.num_steps == (30, 30) and contents(copy) == before


def test_which_steps_stay() -> None:
    steps = list(range(0, 400, 10))
    assert kept_steps(steps, [], Keep(every=10, around=0)) == [0, 100, 200, 300]
    assert kept_steps(steps, [155], Keep(every=40, around=1)) == [0, 150, 160, 170, 390]
    assert kept_steps(steps, [150], Keep(every=40, around=1)) == [0, 140, 150, 160, 390]
    assert kept_steps(steps, [], Keep(every=40, around=0, before=375)) == [0, 380, 390]
    with pytest.raises(UsageError, match="keep every >= 1"):
        Keep(every=0)


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["compact", str(tmp_path), "--keep", "most=3"]) == 2
    assert capsys.readouterr().err == "error: --keep takes every=K, around=N or before=STEP, got 'most=3'\n"
    with pytest.raises(RunError, match="is not a run: it has no rank="):
        compact_run(tmp_path)
    assert status(["plan", "560", "--ranks", "1024", "--budget", "50GB"]) == 0
    said_of_it = capsys.readouterr()
    assert "one in 890, on 32 ranks: 49.9 GB in 1,000,000 steps" in said_of_it.out
    assert said_of_it.err == "let 32 of 1024 ranks record\n"
    assert status(["plan", "0"]) == 2 and status(["plan", "5", "--budget", "many"]) == 2


def test_a_manifest_keeps_a_note_of_each_time(copy: Path) -> None:
    compact_run(copy, Keep(every=2, around=0))
    compact_run(copy, Keep(every=4, around=0))
    notes = json.loads((copy / "manifest.json").read_text())["compacted"]
    assert [note["steps"] for note in notes] == [[30, 15], [15, 4]]
