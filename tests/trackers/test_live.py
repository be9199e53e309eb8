"""A live part that fails, hangs or has nowhere to send to: the training goes on, and a line says so once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.trackers import TRACKERS, TrackerRun, base, live, sending
from fp8debug.trackers.base import Tracker
from tests.training import losses_of


class MemoryRun(TrackerRun):
    """Keeps what it is sent; raises or hangs if it is told to."""

    def __init__(self, does: str = "") -> None:
        self.does = does
        self.seen: list[tuple[Any, ...]] = []
        self.released = threading.Event()

    def _see(self, *what: Any) -> None:
        if self.does == "raises":
            raise ConnectionError("the server is away")
        if self.does == "hangs":
            self.released.wait(60)
        self.seen.append(what)

    def scalars(self, step: int, values: Any) -> None:
        self._see("scalars", step, dict(values))

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        self._see("alert", step, title, text, severity)

    def table(self, name: str, columns: Any, rows: Any, step: int) -> None:
        self._see("table", name, list(columns), list(rows))

    def report(self, path: Path) -> None:
        self._see("report", path.read_text()[:15])

    def close(self) -> None:
        self._see("close")


class Memory(Tracker):
    """A tracker in memory."""

    name, module, package, opening = "memory", "json", "memory", "memory.open()"

    def __init__(self) -> None:
        self.run: MemoryRun | None = None

    def find(self) -> TrackerRun | None:
        return self.run

    def wrap(self, given: object) -> TrackerRun | None:
        return given if isinstance(given, MemoryRun) else None

    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        self.run = MemoryRun()
        return self.run


def _scalars(step: int, run: TrackerRun) -> None:
    run.scalars(step, {})


@pytest.fixture
def memory() -> Iterator[Memory]:
    tracker = TRACKERS.add("memory", Memory())
    assert isinstance(tracker, Memory)
    yield tracker
    TRACKERS.remove("memory")


def train(path: Path, *, fault: bool = False, num_steps: int = 4, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), "blockwise")
    if fault:
        fp8debug.inject(model, "wrong_scale", module="0", step=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(16, 32)
        loss: Tensor = (model(x) - x).square().mean()
        return loss

    with fp8debug.watch(model, path, every=1, optimizer=optimizer, **options) as watch:
        return losses_of(model, loss_of, steps=num_steps, optimizer=optimizer, watch=watch)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train(tmp_path_factory.mktemp("plain") / "run", fault=True)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "will record" not in line]


def test_all_that_fails_is_reported_once_and_changes_nothing(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tracker raises at every call, one hangs, and on_finding raises."""
    monkeypatch.setattr(live, "TRACKER_PATIENCE_S", 1.0)
    hanging = MemoryRun("hangs")

    def on_finding(finding: fp8debug.Finding) -> None:
        raise ValueError(finding.code)

    assert train(tmp_path / "run", fault=True, to=(MemoryRun("raises"), hanging), on_finding=on_finding) == plain
    said = lines(capsys)
    hanging.released.set()
    assert sorted(said) == [
        "fp8debug: memory does not answer: the last values and the report may be missing there",
        "fp8debug: memory: ConnectionError: the server is away; not sent, training goes on",
        "fp8debug: on_finding failed: ValueError: F113",
    ]


def test_a_judge_that_dies_is_reported_once(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_PROGRAM", "import sys; sys.stdin.readline(); sys.exit(3)")
    assert train(tmp_path / "run", fault=True, to=MemoryRun()) == plain
    assert [line.partition("; the recording")[0] for line in lines(capsys)] == [
        "fp8debug: no live findings or tracker values: RuntimeError: the judge ended with code 3"
    ]


def test_a_judge_that_hangs_is_given_up_at_the_end(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str], plain: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(live, "JUDGE_PATIENCE_S", 0.5)
    begun = time.monotonic()
    assert train(tmp_path / "run", fault=True, to=MemoryRun()) == plain
    assert time.monotonic() - begun < 60
    assert [line.partition("; the recording")[0] for line in lines(capsys)] == [
        "fp8debug: no live findings or tracker values: the judge took more than 0 s at the end"
    ]


def test_without_an_open_run_one_line_says_how_to_open_one(
    memory: Memory, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "_PROGRAM", "import sys; sys.stdin.read()")  # what it finds does not matter here
    monkeypatch.setattr(live, "JUDGE_PATIENCE_S", 0.1)
    train(tmp_path / "run", to="memory")
    assert lines(capsys)[0] == "fp8debug: memory: nothing is sent: no run is open here; open one first: memory.open()"


def test_a_run_that_is_opened_later_gets_every_step(memory: Memory) -> None:
    thread = sending.TrackerThread(memory)
    for step in range(3):
        thread.put(partial(_scalars, step))
        thread.look()
    memory.run = MemoryRun()
    thread.look()
    assert memory.run.seen == [], "a look that is not due is not made"
    for _ in range(4):
        thread.look()
    thread.end(30)
    assert [what[1] for what in memory.run.seen] == [0, 1, 2]


def test_jobs_beyond_what_may_wait_are_dropped(
    capsys: pytest.CaptureFixture[str], memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "MAX_WAITING", 2)
    hanging = MemoryRun("hangs")
    thread = sending.TrackerThread(memory, hanging)
    for step in range(50):
        thread.put(partial(_scalars, step))
    assert lines(capsys) == ["fp8debug: memory does not answer; training goes on without it"]
    hanging.released.set()
    thread.end(30)
    assert 2 <= len(hanging.seen) <= 3


def test_what_to_takes_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(16, 16)
    cases = {
        "wandbb": "to= names no tracker: 'wandbb': did you mean 'wandb'?",
        7: "to= takes names (mlflow, tensorboard, trackio, wandb) or an open run of theirs, got int",
    }
    for to, message in cases.items():
        with pytest.raises(UsageError) as caught:
            fp8debug.watch(model, tmp_path / "run", to=to)
        assert str(caught.value) == message
    with pytest.raises(UsageError, match="on_finding must be a function of one Finding, got 'mail'"):
        fp8debug.watch(model, tmp_path / "run", on_finding="mail")  # type: ignore[arg-type]
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        fp8debug.watch(model, tmp_path / "run", to=("trackio",))
    assert str(caught.value) == "trackio is not installed: pip install trackio, or leave 'trackio' out of to="
    assert not (tmp_path / "run").exists()


def test_ranks_other_than_0_are_silent(memory: Memory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory.run = MemoryRun()
    started: list[Path] = []
    monkeypatch.setattr("fp8debug.adapters.watching.attach.start_live", lambda path, *args: started.append(path))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        fp8debug.watch(nn.Linear(16, 16), tmp_path / rank, to="memory").close()
    assert started == [tmp_path / "0"]
