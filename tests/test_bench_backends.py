"""The bench that compares what a watch costs on each backend: the models that it times, and what it prints, without a GPU."""

from __future__ import annotations

import argparse
import gc
import sys
from pathlib import Path

import pytest
import torch

import fp8debug
from tests.adapters.linears import sites
from tests.adapters.watching.test_watch import NINE
from tests.bench import backends, overhead, replay
from tests.bench.overhead import Case, Found, Job, num_rows

LINEARS = {f"0.{part}" for part in ("q", "k", "v", "o", "gate", "up", "down")}
KINDS = {"native": "Fp8Linear", "torchao": "Float8Linear", "scaled_mm": "ScaledLinear"}


@pytest.mark.parametrize("recipe", [f"{b}:{r}" for b in KINDS for r in backends.RECIPES[b]])
def test_each_backend_trains_the_layers_and_is_recorded(tmp_path: Path, recipe: str) -> None:
    backend = recipe.partition(":")[0]
    if lacks := backends.missing([backend]):
        pytest.skip(lacks)
    job = Job(Case(layers=1, width=128, tokens=64, recipe=recipe), "cpu")
    before = job.model.get_parameter("0.down.weight").detach().clone()
    job.optimizer.param_groups[0]["lr"] = 100.0
    losses: list[float] = []
    with fp8debug.watch(job.model, tmp_path / "run", every=1) as watch:

        def after(loss: torch.Tensor) -> None:
            watch.step(loss=loss)
            losses.append(loss.item())

        job.after = after
        for _ in range(2):
            job.step()
        kinds = {entry["fqn"]: (entry["kind"], entry["fp8"]) for entry in watch.coverage()}
    assert kinds == dict.fromkeys(LINEARS, (KINDS[backend], True))
    assert losses[1] != losses[0] and not torch.equal(job.model.get_parameter("0.down.weight"), before)
    run = fp8debug.Run(tmp_path / "run")
    for name in LINEARS:
        assert sites(run, name) == NINE, name
    (rows,) = run.sql("SELECT count(*) FROM stats WHERE step = 1").column(0).to_pylist()
    assert num_rows(tmp_path / "run") == rows


def test_what_is_not_installed_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None)
    assert not backends.missing(["native", "scaled_mm"])
    for arguments in (["--backends", "native", "torchao"], ["--backends", "te", "torchao"], ["--peer", "te"]):
        monkeypatch.setattr(sys, "argv", ["overhead.py", *arguments])
        with pytest.raises(SystemExit) as stopped:
            overhead.main()
        message = str(stopped.value)
        assert "\n" not in message and ("torchao needs torchao: pip install torchao" in message) == ("torchao" in arguments)
        assert ("te needs transformer_engine and nvdlfw_inspect: pip install" in message) == ("te" in arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["overhead.py", "--backends", "scaled_mm"], ["replay.py"]])
def test_without_a_gpu_it_says_so(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match="this bench times a GPU, and torch finds none"):
        (replay if command == ["replay.py"] else overhead).main()


@pytest.mark.parametrize("every", [None, 2])
def test_only_steps_that_are_not_sampled_are_replayed(every: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replayed: list[int] = []
    monkeypatch.setattr(replay.Loop, "_replay", lambda loop: replayed.append(0))
    options = argparse.Namespace(layers=1, width=128, tokens=64, device="cpu")
    loop = replay.Loop(options, "blockwise", True, every, tmp_path / "run")
    for _ in range(4):
        loop.step()
    assert len(replayed) == (4 if every is None else 2)
    if every is not None:
        loop.watch.close()
        steps = fp8debug.Run(tmp_path / "run").sql("SELECT step, count(*) AS rows FROM stats GROUP BY step ORDER BY step")
        assert steps.to_pylist() == [{"step": step, "rows": 24 * len(LINEARS)} for step in (0, 2)]


def test_rows_of_every_backend_and_of_one_that_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Case] = []

    def in_process(case: Case, blocks: int) -> Found:
        asked.append(case)
        if case.recipe == "torchao:rowwise":
            raise RuntimeError("torchao:rowwise failed:\nno such kernel")
        ms = {"bf16": 40.0, "te:bf16": 44.0}.get(case.recipe, 20.0) + (0 if case.every is None else 20.0 / case.every)
        return Found(ms, 4.0 if case.every is None else 5.0, *((0.5, 0.25, 336) if case.every and not case.by_peer else ()))

    monkeypatch.setattr(overhead, "in_process", in_process)
    with pytest.raises(SystemExit, match=r"^failed: torchao$"):
        overhead.compare(Case(2, 4096, 8192, "bf16"), ["native", "torchao", "scaled_mm", "te"], 3, [10, 1])
    text = capsys.readouterr().out
    blocks = {block.splitlines()[0]: [" ".join(row.split()) for row in block.splitlines()[1:]] for block in text.split("\n\n")}
    unwatched = "FP8, unwatched 20.00 ms 4.00 GiB 2.00 x BF16's speed"
    tail = "step(): 0.50 ms sampled, 0.25 ms else; 336 rows"
    watched = [
        f"watched, every 10 22.00 ms 5.00 GiB +10.00 % +25.00 % memory {tail}",
        f"watched, every 1 40.00 ms 5.00 GiB +100.00 % +25.00 % memory {tail}",
    ]
    for name in ("native, blockwise", "torchao, tensorwise", "scaled_mm, tensorwise", "scaled_mm, rowwise"):
        assert blocks[name] == [unwatched, *watched], name
    assert blocks["torchao, rowwise"] == ["torchao:rowwise failed:", "no such kernel"]
    (te,) = (rows for name, rows in blocks.items() if name.startswith("Transformer Engine"))
    assert te[0] == "BF16 44.00 ms 4.00 GiB" and te[1] == unwatched.replace("2.00 x", "2.20 x")
    assert te[2:4] == watched
    assert te[4:] == [
        "the same layers under LogFp8TensorStats and LogTensorStats",
        *(row.removesuffix(f" {tail}") for row in watched),
    ]
    assert {case._replace(recipe="", every=None, by_peer=False) for case in asked} == {Case(2, 4096, 8192, "")}


def test_turns_of_a_watched_and_an_unwatched_model(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[bool, int]] = []

    class Small(Job):
        def __init__(self, case: Case) -> None:
            super().__init__(case, "cpu")
            self.is_watched = case.every is not None

        def milliseconds(self, steps: int, blocks: int) -> float:
            self.step()
            taken.append((self.is_watched, steps))
            return 10.0 + self.is_watched * len(taken)

    monkeypatch.setattr(overhead, "Job", Small)
    ratios = overhead.in_turns(Case(1, 128, 64, "native:blockwise", every=2 * overhead.TURN), 2)
    one = [(False, overhead.TURN), (True, overhead.TURN)]
    assert taken == one * 5, "one to be warm, and two blocks of two turns each"
    assert ratios == [(14 + 16) / 20, (18 + 20) / 20]


def test_how_long_a_step_held_the_training(tmp_path: Path) -> None:
    job = Job(Case(1, 128, 64, "native:blockwise", every=2), "cpu")
    with overhead.watching(Case(1, 128, 64, "native:blockwise", every=2), job, tmp_path / "run") as calls:
        for _ in range(4):
            job.step()
        num_callbacks = len(gc.callbacks)
    assert len(calls[True]) == len(calls[False]) == 2 and all(ms > 0 for times in calls.values() for ms in times)
    assert len(gc.callbacks) == num_callbacks - 1
    assert num_rows(tmp_path / "run") == 24 * len(LINEARS)
