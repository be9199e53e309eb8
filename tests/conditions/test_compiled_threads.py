"""Threads beside the one that trains a compiled model under a watch: they compute, draw and train what they do without one."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.adapters.interception import region_threads
from fp8debug.adapters.interception.region_threads import RegionThreads
from fp8debug.adapters.interception.repetition_graphs import RepetitionGraphs
from tests.adapters.linears import ScaledLinear
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_linear import rows
from tests.conditions.test_compiled_programs import WIDTH, Block

pytestmark = [*COMPILES, pytest.mark.filterwarnings("ignore::UserWarning")]


def compiled(kind: str) -> nn.Sequential:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(ScaledLinear if kind == "scaled" else nn.Linear) for _ in range(2))).bfloat16()
    if kind == "native":
        fp8debug.convert(model, "blockwise")
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def batch(seed: int) -> Tensor:
    return torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(seed)).bfloat16()


def loss_of(model: nn.Module, seed: int) -> Tensor:
    return cast(Tensor, model(batch(seed))).float().square().mean()


@pytest.mark.parametrize("kind", ["native", "scaled"])
def test_two_threads_run_forward_passes_of_one_step(kind: str, tmp_path: Path) -> None:
    def train(path: Path | None) -> list[Tensor]:
        model = compiled(kind)
        for seed in (0, 1):
            loss_of(model, seed)  # Dynamo compiles in one thread
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        watch = None if path is None else fp8debug.watch(model, path, every=1, turns=1, what_if=())
        found = []
        with ThreadPoolExecutor(2) as pool:
            for step in range(6):
                losses = list(pool.map(lambda seed: loss_of(model, seed), (step, step + 100)))
                (losses[0] + losses[1]).backward()
                optimizer.step()
                optimizer.zero_grad()
                found += [loss.detach() for loss in losses]
                if watch is not None:
                    watch.step(loss=losses[0])
        if watch is not None:
            watch.close()
        return [*found, *(p.detach() for p in model.parameters())]

    for seen, alone in zip(train(tmp_path / "run"), train(None), strict=True):
        assert torch.equal(seen, alone)
    assert {row["step"] for row in rows(tmp_path / "run")} == set(range(6))


def during_repetitions(monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
    run = RepetitionGraphs.run

    def running(self: RepetitionGraphs, repetition: Any) -> None:
        repeat = repetition.run

        def repeated(*args: Any) -> None:
            repeat(*args)
            then()

        run(self, repetition._replace(run=repeated))

    monkeypatch.setattr(RepetitionGraphs, "run", running)


def test_a_thread_that_evaluates_waits_for_a_repetition_and_none_begins_inside_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = compiled("scaled")
    loss_of(model, 0).backward()
    with torch.no_grad():
        expected = model(batch(7))
    expected_grads = [cast(Tensor, p.grad).clone() for p in model.parameters()]
    model.zero_grad()
    threads: list[threading.Thread] = []
    others: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            others.append(model(batch(7)))

    def start() -> None:
        threads.append(threading.Thread(target=evaluate))
        threads[-1].start()
        threads[-1].join(0.2)
        assert threads[-1].is_alive()  # it waits: the repetition is not over

    over, leave = threading.Event(), RegionThreads.leave

    def leave_when_over(self: RegionThreads) -> None:
        if threading.current_thread() in threads:
            over.wait(30)
        leave(self)

    monkeypatch.setattr(RegionThreads, "leave", leave_when_over)
    during_repetitions(monkeypatch, start)
    with fp8debug.watch(model, tmp_path / "run", every=1, turns=1, what_if=()) as watch:
        loss_of(model, 0).backward()
        over.set()
        for thread in threads:
            thread.join()
        for parameter, grad in zip(model.parameters(), expected_grads, strict=True):
            assert torch.equal(cast(Tensor, parameter.grad), grad)
        watch.step()
        assert len(threads) == 1  # it is in its call when the other block is to be repeated
        assert all(torch.equal(found, expected) for found in others)

        inside, may_end = threading.Event(), threading.Event()

        class Waiting(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                inside.set()
                may_end.wait(30)
                return x.clone()

        monkeypatch.setattr(model[1], "_compiled_call_impl", lambda x: Waiting.apply(x))
        other = threading.Thread(target=evaluate)
        other.start()
        assert inside.wait(30)
        monkeypatch.undo()
        loss_of(model, 0).backward()
        may_end.set()
        other.join()
        watch.step()
    assert {row["step"] for row in rows(tmp_path / "run")} == {0}
    assert capsys.readouterr().err.count("another thread was in a call of a compiled module") == 1


def test_a_thread_that_prepares_batches_draws_the_numbers_that_it_draws_without_a_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> None:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)

    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    model, seen = compiled("scaled"), []
    loss_of(model, 0).backward()
    during_repetitions(monkeypatch, lambda: seen.append(draw()))
    with fp8debug.watch(model, tmp_path / "run", every=1, turns=1, what_if=()) as watch:
        start()
        for _ in range(3):
            loss_of(model, 0).backward()
            seen.append(draw())
            watch.step()
    assert len(seen) == 9  # two of three while a block was repeated
    start()
    assert seen == [draw() for _ in range(9)]


def test_a_repetition_is_left_out_where_another_thread_is_in_a_call_and_a_call_waits_no_longer_than_its_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = RegionThreads()
    with ThreadPoolExecutor(1) as pool:
        with threads.repeating() as is_alone:
            assert is_alone
            assert threads.is_repeating
            assert not pool.submit(lambda: threads.is_repeating).result()
            monkeypatch.setattr(region_threads, "PATIENCE_S", 0.05)
            pool.submit(threads.enter).result(10)  # a repetition that waits for that thread would never end
        with threads.repeating() as is_alone:
            assert not is_alone
        pool.submit(threads.leave).result()
        pool.submit(threads.leave).result()  # of a call whose beginning an exception ended
        with threads.repeating() as is_alone, threads.repeating() as is_alone_too:
            assert is_alone
            assert not is_alone_too
