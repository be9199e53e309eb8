"""torch.compile and CUDA graphs: recorded right, or said in one line with the way out; compiled as often as without a watch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.observer import probe
from tests.recording.models import batch, net

STEPS = 5


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def train(
    recipe: str | None, path: Path | None, *, first: str = "compile", fullgraph: bool = False, told: bool = True, **options: Any
) -> tuple[list[float], int]:
    """Return the losses and the number of compiled graphs.

    ``first`` says what comes first: compile, watch, or ``run``, which is both compiled and run before the watch.
    """
    torch._dynamo.reset()
    model = net(recipe)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled: nn.Module = model
    if first in ("compile", "run"):
        compiled = cast(nn.Module, torch.compile(model, backend=backend, fullgraph=fullgraph))
    if first == "run":
        compiled(batch(0)[0])
    watch = fp8debug.watch(compiled, path, every=2, **options) if path else None
    if first == "watch":
        compiled = cast(nn.Module, torch.compile(model, backend=backend, fullgraph=fullgraph))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        x, classes = batch(step)
        loss = functional.cross_entropy(compiled(x), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch and told:
            watch.step(loss=loss)
    if watch:
        watch.close()
    return losses, len(graphs)


# Dynamo looks at the gradient of an intermediate tensor when it goes on after a break.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("first", ["compile", "watch"])
def test_an_fp8_linear_in_a_graph_is_recorded(first: str, tmp_path: Path) -> None:
    assert train("blockwise", tmp_path / "run", first=first) == train("blockwise", None, first=first)
    run = fp8debug.Run(tmp_path / "run")
    found = run.sql(
        "SELECT step, count(DISTINCT module) AS n, sum(num_tensors) AS t FROM sites WHERE actual GROUP BY step ORDER BY step"
    )
    assert [(row["step"], row["n"]) for row in found.to_pylist()] == [(0, 7), (2, 7), (4, 7)]
    once = run.sql("SELECT DISTINCT num_tensors AS n FROM sites WHERE actual").column("n").to_pylist()
    assert once == [1]


@pytest.mark.parametrize("first", ["compile", "watch", "run"])
def test_compiled_linears_are_recorded_without_a_flag_and_left_out_with_one(
    first: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = train(None, None, first=first, fullgraph=True)
    assert train(None, tmp_path / "auto", first=first, fullgraph=True) == alone
    assert "not recorded" not in capsys.readouterr().err
    run = fp8debug.Run(tmp_path / "auto")
    found = run.sql("SELECT step, count(DISTINCT module) AS n FROM sites GROUP BY step ORDER BY step").to_pylist()
    assert [(row["step"], row["n"]) for row in found] == [(0, 7)], "one region in eight sampled steps"
    assert run.manifest["turns"] == 8 and all(module["observed"] for module in run.modules)
    assert train(None, tmp_path / "run", first=first, fullgraph=True, compiled="as_is") == alone
    text = "7 of 7 modules are not recorded at step 0 (blocks.0.gate is the first): not called outside code under torch.compile"
    way_out = (
        "which is not recorded with compiled='as_is'; without it sampled calls are repeated in eager code,"
        " watch(..., compiled='eager') runs sampled steps without torch.compile"
    )
    assert capsys.readouterr().err.count(f"fp8debug: {text}, {way_out}\n") == 1
    run = fp8debug.Run(tmp_path / "run")
    assert [r["loss"] is not None for r in run.sql("SELECT loss FROM steps").to_pylist()] == [True] * STEPS
    assert text in str(run.sql("SELECT message FROM events WHERE step = 0").to_pylist())


@pytest.mark.parametrize("told", [True, False])
def test_with_the_flag_sampled_steps_run_without_it_and_are_recorded(told: bool, tmp_path: Path) -> None:
    watched, graphs = train(None, tmp_path / "run", told=told, compiled="eager", fullgraph=True)
    alone, num_graphs = train(None, None, fullgraph=True)
    assert graphs == num_graphs and watched == pytest.approx(alone, rel=1e-5)
    run = fp8debug.Run(tmp_path / "run")
    found = run.sql("SELECT step, count(DISTINCT module) AS n FROM sites GROUP BY step ORDER BY step").to_pylist()
    assert [(row["step"], row["n"]) for row in found] == [(0, 7), (2, 7), (4, 7)]
    assert run.sql("SELECT step FROM steps ORDER BY step").column("step").to_pylist() == list(range(STEPS))


def test_the_flag_is_checked_and_ends_with_the_watch(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="compiled must be 'auto', 'repeat', 'as_is' or 'eager', got 'always'"):
        fp8debug.watch(net(), tmp_path / "run", compiled="always")  # type: ignore[arg-type]  # a mistake
    with pytest.raises(UsageError, match="turns must be a whole number, 1 or more, got 0"):
        fp8debug.watch(net(), tmp_path / "run", compiled="repeat", turns=0)
    fp8debug.watch(net(), tmp_path / "run", compiled="eager").close()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_a_step_that_a_cuda_graph_captures_is_left_out_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        for step in range(2):
            with monkeypatch.context() as patch:
                if step == 0:
                    patch.setattr(probe, "is_capturing", lambda: True)
                loss = functional.cross_entropy(model(batch(0)[0]), batch(0)[1])
                loss.backward()
            watch.step(loss=loss)
    said = capsys.readouterr().err
    assert "blocks.0.gate is not recorded in full at step 0: a CUDA graph captures it; capture a step that is not" in said
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT DISTINCT step FROM sites").column("step").to_pylist() == [1]
    assert run.sql("SELECT step FROM steps ORDER BY step").column("step").to_pylist() == [0, 1]
