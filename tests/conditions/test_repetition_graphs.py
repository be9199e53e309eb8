"""Repetitions that CUDA graphs replay: the bits of a run without a watch, and the rows of repetitions in eager code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import fp8debug
from fp8debug.adapters.interception import regions
from fp8debug.adapters.interception.repetition_graphs import Repetition, RepetitionGraphs, _Graph
from fp8debug.observer.observer import Replayable
from fp8debug.observer.table import Table
from tests.adapters.linears import ScaledLinear
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_linear import rows
from tests.shortened import shortened

BLOCKS, WIDTH, STEPS, EVERY = 3, 64, 13, 2
pytestmark = [*COMPILES, pytest.mark.filterwarnings("ignore::UserWarning")]


class RowwiseLinear(ScaledLinear):
    rowwise = True


class Block(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module], dropout: float) -> None:
        super().__init__()
        self.up, self.down, self.dropout = make(WIDTH, 2 * WIDTH), make(2 * WIDTH, WIDTH), nn.Dropout(dropout)
        self.register_buffer("shift", torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.dropout(self.down(torch.relu(self.up(x) + 0.1)))) + cast(Tensor, self.shift)


class Program(NamedTuple):
    """A way to train; ``graphs`` of blocks are expected."""

    make: Callable[[int, int], nn.Module] = ScaledLinear
    dropout: float = 0.0
    torchao: str = ""
    microbatches: int = 1
    mode: str | None = None
    whole: bool = False
    graphs: int = BLOCKS
    swaps: bool = False
    grows: bool = False
    what_if: tuple[str, ...] = ("tensorwise_delayed", "tensorwise_current")


PROGRAMS = {
    "any Linear": Program(),
    "rowwise": Program(make=RowwiseLinear),
    "nn.Linear": Program(make=nn.Linear),
    "torchao": Program(make=nn.Linear, torchao="tensorwise"),
    "torchao, rowwise": Program(make=nn.Linear, torchao="rowwise"),
    "dropout": Program(dropout=0.25),
    "the whole model": Program(whole=True, graphs=1),
    "under CUDA graphs of its own": Program(mode="reduce-overhead"),
    "microbatches": Program(microbatches=2, graphs=0),
    "weights that are replaced": Program(swaps=True, graphs=0),
    "modules that are watched later": Program(grows=True, graphs=0),
    "no what-ifs": Program(what_if=()),
}


class Trained(NamedTuple):
    losses: list[float]
    gradients: list[Tensor]
    state: Tensor
    num_graphs: int


def train(program: Program, path: Path | None, device: str) -> Trained:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(program.make, program.dropout) for _ in range(BLOCKS))).to(device, torch.bfloat16)
    if program.torchao:
        float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")
        config = float8.Float8LinearConfig.from_recipe_name(program.torchao)
        float8.convert_to_float8_training(model, config=config)
    for region in [model] if program.whole else model:
        region.compile(mode=program.mode, backend="inductor" if device == "cuda" else "aot_eager")
    watch: Any = None
    if path is not None:
        watch = fp8debug.watch(model, path, every=EVERY, compiled="repeat", turns=1, shadow_rows=1 << 20, what_if=program.what_if)
    losses, gradients, num_graphs = [], list[Tensor](), 0
    for step in range(STEPS):
        for part in range(program.microbatches):
            generator = torch.Generator().manual_seed(step + 100 * part)
            x = torch.randn(48, WIDTH, generator=generator).to(device, torch.bfloat16)
            torch.compiler.cudagraph_mark_step_begin()
            loss = model(x.requires_grad_()).float().square().mean()
            loss.backward()
        losses.append(loss.item())
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)
                    p.grad = None
                if program.swaps and step == 6:
                    p.data = p.data.clone()
        if watch is not None:
            if program.grows and step == 6:
                watch._observer.num_modules += 1
            watch.step(loss=loss)
            if step == STEPS - 2:
                num_graphs = sum(region.graph is not None for region in watch._regions._graphs._regions.values())
    if watch is not None:
        watch.close()
    state = torch.cuda.get_rng_state() if device == "cuda" else torch.get_rng_state()
    return Trained(losses, gradients, state, num_graphs)


def compare(program: Program, path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    alone, replayed = train(program, None, device), train(program, path / "replayed", device)
    monkeypatch.setattr(RepetitionGraphs, "_accumulators_of", lambda self, device, name: None)
    eager = train(program, path / "eager", device)
    for other in (replayed, eager):
        assert other.losses == alone.losses and torch.equal(other.state, alone.state)
        assert all(torch.equal(a, b) for a, b in zip(other.gradients, alone.gradients, strict=True))
    assert (replayed.num_graphs, eager.num_graphs) == (program.graphs, 0)
    found, wanted = rows(path / "replayed"), rows(path / "eager")
    assert {row["step"] for row in found} == set(range(0, STEPS, EVERY))
    assert len(found) == len(wanted)
    for row, expected in zip(found, wanted, strict=True):
        differing = {name for name in row if row[name] != expected[name] and row[name] == row[name]}
        if "delayed" in row["cast_name"]:  # the replays' amax histories begin at the capture
            differing &= {"numel", "num_zero", "num_nan", "num_inf", "amax", "amin"}
        assert not differing, (row["step"], row["module"], row["gemm"], row["tensor"], row["cast_name"], row["reference"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_those_without_a_watch_and_rows_those_of_eager_code(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compare(PROGRAMS[name], tmp_path, monkeypatch, "cuda")


class RunAgain:
    """In place of a CUDA graph on a CPU: it runs the repetition from the graph's inputs, the first time when it is captured."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run, self._is_first = run, True
        run()

    def replay(self) -> None:
        if not self._is_first:
            self._run()
        self._is_first = False


def captured(self: RepetitionGraphs, one: Repetition, accumulators: Any) -> Any:
    """Do what a capture does, but for CUDA's part of it."""
    leaves, spec = _pytree.tree_flatten((one.args, one.kwargs))
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    grads = [None if x is None else x.clone() for x in one.grads]
    args, kwargs = _pytree.tree_unflatten(leaves, spec)
    found = Replayable({}, [])

    def run() -> None:
        with self._observer.recording_to(accumulators.table) as again:
            accumulators.table.begin()
            one.run(args, kwargs, grads)
            accumulators.table.join()
        found.filled.update(again.filled)
        found.checked[:] = again.checked

    inputs = [x for x in (*leaves, *grads) if isinstance(x, Tensor)]
    return _Graph(cast(Any, RunAgain(run)), inputs, found, one.first, [])


@pytest.mark.parametrize(
    "name",
    shortened(
        [
            "any Linear",
            "nn.Linear",
            "dropout",
            "the whole model",
            "microbatches",
            "weights that are replaced",
            "modules that are watched later",
        ],
        {"dropout", "microbatches", "modules that are watched later"},
    ),
)
def test_the_same_where_a_cpu_runs_what_a_graph_would(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(RepetitionGraphs, "_captured", captured)
    compare(PROGRAMS[name], tmp_path, monkeypatch, "cpu")


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have repetitions on a CPU go the way of those on a GPU, but for the capture itself."""
    cpu = torch.device("cpu")
    kept: dict[int, Any] = {}

    def accumulators_of(self: RepetitionGraphs, device: torch.device, name: str) -> Any:
        if self._is_ended:
            return None
        nothing = dict.fromkeys(("recover", "begin_replay", "retire", "release", "close"), lambda *graph: None)
        found = kept.setdefault(id(self), SimpleNamespace(table=self._observer.table(cpu).apart(), **nothing))
        self._accumulators[cpu] = found
        return found

    monkeypatch.setattr(regions._Region, "gpu", cpu)
    monkeypatch.setattr(regions, "_allocated", lambda region: 0)
    monkeypatch.setattr(RepetitionGraphs, "_has_room", lambda self, region, device: True)
    monkeypatch.setattr(RepetitionGraphs, "_accumulators_of", accumulators_of)


@pytest.mark.gpu
def test_after_a_capture_that_failed_the_program_runs_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, join = PROGRAMS["dropout"], Table.join

    def joined(self: Table) -> None:
        join(self)
        if torch.cuda.is_current_stream_capturing():
            torch.ones(1, device="cuda").item()  # nothing can wait for a graph that is being captured

    alone = train(program, None, "cuda")
    monkeypatch.setattr(Table, "join", joined)
    check_failed(train(program, tmp_path / "run", "cuda"), alone, tmp_path / "run")


def check_failed(found: Trained, alone: Trained, path: Path) -> None:
    assert found.losses == alone.losses and torch.equal(found.state, alone.state) and not found.num_graphs
    assert all(torch.equal(a, b) for a, b in zip(found.gradients, alone.gradients, strict=True))
    steps = [(row["step"], row["module"]) for row in rows(path)]
    assert (2, "2.up") not in steps and (2, "0.up") in steps and {step for step, _ in steps} == set(range(0, STEPS, EVERY))
    found_events = fp8debug.Run(path).sql("SELECT step, module FROM events WHERE message LIKE '%no CUDA graph could be made%'")
    assert found_events.to_pylist() == [{"step": 2, "module": "2"}]


def test_where_a_capture_fails_the_others_run_as_eager_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: RepetitionGraphs, one: Repetition, accumulators: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    alone = train(PROGRAMS["any Linear"], None, "cpu")
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(RepetitionGraphs, "_captured", fail)
    check_failed(train(PROGRAMS["any Linear"], tmp_path / "run", "cpu"), alone, tmp_path / "run")
