"""An error of ours in any hook, at the end of a step or in the writer: the same loss to the bit, and one line of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.adapters.watching import row_batch, step_writer
from fp8debug.observer.observer import Observer
from fp8debug.observer.table import Table
from fp8debug.store import columns as packed
from fp8debug.store.write import batch, writer
from tests.store.recording import python
from tests.training import losses_of, watched

NUM_STEPS = 6


def train(path: Path | None, during: Callable[[int], None] = lambda step: None, **options: Any) -> list[float]:
    """Train a small model, watched at every second step into ``path``; return the losses."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16))
    fp8debug.convert(model, "blockwise")

    def loss_of(step: int) -> Tensor:
        during(step)
        loss: Tensor = model(torch.randn(8, 32)).square().mean()
        return loss

    with watched(model, path, every=2, **options) as watch:
        return losses_of(model, loss_of, steps=NUM_STEPS, watch=watch)


def failing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("the moon is full\nand more")


@pytest.fixture(scope="module")
def alone() -> list[float]:
    return train(None)


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (Table, "merge", "0 is not watched any more: RuntimeError: the moon is full"),
        (Table, "snapshot", "recording stopped: RuntimeError: the moon is full"),
        (Observer, "start_step", "recording stopped: RuntimeError: the moon is full"),
        (Observer, "next_call_index", None),
        (step_writer, "stats_batch", "recording stopped: RuntimeError: the moon is full\nand more"),
        (writer, "row_batch", "recording stopped: RuntimeError: the moon is full\nand more"),
    ],
)
def test_an_exception_of_ours(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], alone: list[float], owner: Any, name: str, said: str | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if name == "row_batch":  # called by a thread, later than the step; rows of numbers alone do without it
            patch.setattr(packed.OneRow, "message", lambda *_: None)
            make = batch.row_batch
            patch.setattr(writer, name, lambda *of: make(*of) if of[1]["step"] in range(3) else failing())
            assert train(tmp_path / "run") == alone
        else:
            assert train(tmp_path / "run", lambda step: patch.setattr(owner, name, failing) if step == 3 else None) == alone
    err = capfd.readouterr().err
    if said is not None:
        assert err.count(said) == 1, err
    assert err.count("the moon is full") == (2 if name in ("merge", "next_call_index") else 1), err  # two modules
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT max(loss) AS loss FROM steps").to_pylist()[0]["loss"] == max(alone[:3])
    if name != "row_batch":  # without it no event can be made either
        kinds = run.sql("SELECT kind FROM events WHERE message LIKE '%the moon is full%'").to_pydict()["kind"]
        assert len(kinds) == (2 if name in ("merge", "next_call_index") else 1)


def test_a_second_watch_of_a_folder_that_is_being_written_trains_on(tmp_path: Path, alone: list[float]) -> None:
    first = writer.RunWriter(tmp_path / "run", manifest={})
    code = "from tests.adapters.watching.test_failures import train\nprint(repr(train(path)))\n"
    done = python(code, tmp_path / "run")
    first.close()
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{alone!r}\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"fp8debug: not recorded: {tmp_path}/run is written by another process that runs")


def test_a_slow_disk_drops_steps_and_gives_their_memory_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, alone: list[float]
) -> None:
    monkeypatch.setitem(writer.MAX_WAITING, "stats", 1)
    go, real = threading.Event(), row_batch.stats_batch

    def slow(*args: Any) -> Any:
        go.wait(60)
        return real(*args)

    monkeypatch.setattr(step_writer, "stats_batch", slow)
    assert train(tmp_path / "run", lambda step: go.set() if step == NUM_STEPS - 1 else None) == alone
    assert "fp8debug: a step was not recorded: " in capfd.readouterr().err
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT DISTINCT step FROM raw ORDER BY step").to_pydict()["step"] == [0]
    assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": NUM_STEPS}]
    assert run.sql("SELECT message FROM events").to_pydict()["message"] == [
        "2 writings were dropped because the disk was too slow"
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_forked_while_a_watch_runs_neither_writes_nor_observes(tmp_path: Path) -> None:
    code = (
        "import torch, fp8debug\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(32, 32))\n"
        "fp8debug.convert(model, 'blockwise')\n"
        "watch = fp8debug.watch(model, path, every=1)\n"
        "def step():\n"
        "    model(torch.ones(8, 32)).sum().backward()\n"
        "    watch.step(loss=1.0)\n"
        "step()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert model[0].probe is None and not watch._observer.has_rows\n"
        "    step(); step(); watch.close(); sys.exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "step()\n"
        "watch.close()\n"
    )
    done = python(code, tmp_path / "run")
    assert done.returncode == 0 and done.stderr.count("\n") == done.stderr.count("fp8debug: will record ") == 1, done.stderr
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT step, sampled FROM steps ORDER BY step").to_pylist() == [{"step": s, "sampled": True} for s in (0, 1)]


def test_a_wrong_number_in_note_does_not_reach_the_forward_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    fp8debug.convert(model, "blockwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8debug.watch(model, tmp_path / "run", every=1, optimizer=optimizer) as watch:
        for step in range(3):
            model(torch.ones(8, 32)).sum().backward()
            optimizer.step()
            watch.note(loss="high" if step == 1 else 1.0)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "stopped" in line]
    assert line == "fp8debug: recording stopped: UsageError: loss must be a number or a scalar tensor, got 'high'"
    assert fp8debug.Run(tmp_path / "run").sql("SELECT loss FROM steps ORDER BY step").to_pydict()["loss"] == [1.0, None, 1.0]
