"""CUDA graphs of repetitions: what a graph uses lives as long, and what it cannot depend on ends or prevents a capture."""

from __future__ import annotations

import weakref
from typing import Any, cast

import pytest
import torch

from fp8debug.adapters.interception import repetition_graphs
from fp8debug.adapters.interception.listener import Scope
from fp8debug.adapters.interception.repetition_graphs import Repetition, RepetitionGraphs, _Accumulators, places_of
from fp8debug.kernels.torch_state import NotReplayableError, own_capture
from fp8debug.observer.observer import Observer, Settings
from fp8debug.recipes import get_recipe

CPU, META = torch.device("cpu"), torch.device("meta")


def observer() -> Observer:
    settings = Settings(every=1, shadow_rows=8, plain_recipe=get_recipe("blockwise"))
    return Observer(settings, lambda finished: None, lambda module, text, aloud: None)


def repetition(state: Any, *args: Any, device: torch.device = CPU, run: Any = lambda *_: None) -> Repetition:
    return Repetition(1, "block", device, args, {}, (), 0, state, False, run)


class Accumulators:
    """Those of a GPU, which a CPU has not: notes what is done with graphs, in order."""

    def __init__(self) -> None:
        self.done: list[Any] = []

    def release(self) -> None:
        self.done.append("released")

    def retire(self, graph: Any) -> None:
        self.done.append(graph)

    def close(self) -> None:
        self.done.append("closed")


def with_graph() -> tuple[RepetitionGraphs, Accumulators, Any]:
    """Repetitions of a region that has a graph."""
    graphs, accumulators, graph = RepetitionGraphs(observer()), Accumulators(), object()
    graphs.run(repetition(None))
    region = graphs._regions[1]
    region.graph, region.device, region.step = cast(Any, graph), CPU, -1
    graphs._accumulators[CPU] = cast(Any, accumulators)
    return graphs, accumulators, graph


def test_a_graph_that_is_given_up_lives_until_the_device_has_run_it() -> None:
    graphs, accumulators, graph = with_graph()
    ran: list[str] = []
    graphs.run(repetition(None, run=lambda *_: ran.append("eager code")))
    assert accumulators.done == ["released", graph] and ran and graphs._regions[1].graph is None
    assert graphs._regions[1].is_eager


def test_a_second_microbatch_gives_a_graph_up_too() -> None:
    graphs, accumulators, graph = with_graph()
    graphs._regions[1].step = graphs._observer.step_count
    graphs.run(repetition(None))
    assert accumulators.done == ["released", graph]


def test_the_end_waits_for_replays_before_it_gives_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, accumulators, graph = with_graph()
    monkeypatch.setattr(accumulators, "close", lambda: accumulators.done.append(len(graphs._regions)))
    graphs.remove()
    assert accumulators.done == [graph, 1] and not graphs._regions and not graphs._accumulators


def test_an_argument_that_the_host_may_read_keeps_a_region_without_a_graph() -> None:
    x = torch.ones(4)
    assert repetition((), x).key is not None
    assert repetition((), x, device=META).key is None  # it lies elsewhere
    assert repetition((), x.to_sparse()).key is None


def test_a_number_on_the_cpu_that_is_written_to_is_another_state() -> None:
    scale, weights = torch.tensor(0.5), torch.ones(4)
    before = places_of([scale, weights])
    weights.mul_(2)
    assert places_of([scale, weights]) == before
    scale.mul_(2)
    assert places_of([scale, weights]) != before


def test_a_capture_records_on_its_own_device_alone() -> None:
    seen = observer()
    seen.num_modules = 1
    with seen.recording_to(seen.table(CPU)):
        with own_capture(object()), pytest.raises(NotReplayableError, match="another device"):
            seen.filled(META)
        assert seen.filled(CPU)[0] is seen.table(CPU)


def test_a_capture_leaves_no_lines_behind_that_it_has_not_computed() -> None:
    seen = observer()
    seen.num_modules = 1
    with seen.recording_to(seen.table(CPU)):
        seen.sample(1024, CPU)
    assert not seen._spread and not seen._samples


def failing(*_: Any) -> None:
    raise NotReplayableError("stochastic rounding")


def test_an_error_in_a_capture_ends_it_and_not_the_module() -> None:
    failed: list[BaseException] = []
    scope = Scope(None, None, None, failed.append, False)
    scope.guard(failing)
    assert len(failed) == 1
    with own_capture(object()), pytest.raises(NotReplayableError):
        scope.guard(failing)
    assert len(failed) == 1


def test_where_no_accumulators_can_be_made_repetitions_run_as_eager_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("cudaMallocAsync does not yet support createOrIncrefPool")

    said: list[str] = []
    seen = observer()
    seen.num_modules, seen.report = 1, lambda module, text, aloud: said.append(f"{module}: {text}")
    monkeypatch.setattr(repetition_graphs, "_Accumulators", fail)
    monkeypatch.setattr(repetition_graphs, "why_no_kernels", lambda: None)
    graphs, ran = RepetitionGraphs(seen), list[int]()
    monkeypatch.setattr(graphs, "_has_room", lambda region, device: True)
    for step in range(4):
        graphs.run(repetition((), run=lambda *_, step=step: ran.append(step)))
        seen.start_step(step + 1)
    assert ran == [0, 1, 2, 3]
    assert len(said) == 1 and said[0].startswith(
        "block: repeated in eager code, without CUDA graphs: RuntimeError: cudaMallocAsync"
    )


class Event:
    """An event of a device that has come there, that waits for good, or that has failed."""

    def __init__(self, state: str) -> None:
        self.state, self.num_asked = state, 0

    def record(self, stream: Any) -> None:
        if self.state == "failed":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def query(self) -> bool:
        self.num_asked += 1
        return self.state == "failed" or (self.state == "there" and self.num_asked > 2)  # it was never recorded, or came


@pytest.mark.parametrize("state", ["there", "waits", "failed"])
def test_memory_is_given_back_once_the_device_has_run_the_replays(state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition_graphs, "PATIENCE_S", 0.05)
    graphs, _, _ = with_graph()
    accumulators: Any = object.__new__(_Accumulators)
    accumulators._last, accumulators._retired, accumulators._has_run = object(), [], Event(state)
    graphs._accumulators[CPU], kept = accumulators, weakref.ref(accumulators)
    del accumulators
    graphs.remove()
    left = kept()
    assert (left is None) == (state == "there"), "else it is never given back"
    assert left is None or len(left._retired) == 1
