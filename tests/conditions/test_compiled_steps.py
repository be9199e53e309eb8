"""Optimizers under torch.compile, alone or in a compiled function that trains: nothing of ours is compiled, steps count."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

import fp8debug
from tests.adapters.linears import ScaledLinear
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_regions import WIDTH, Block
from tests.shortened import shortened

STEPS = 6
pytestmark = COMPILES


def train(kind: str, path: Path | None, gives_optimizer: bool = True) -> tuple[list[float], dict[str, Any]]:
    """Return the losses, what Dynamo counted, and the functions that it compiled."""
    torch._dynamo.reset()
    clear_compilation_metrics()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(ScaledLinear) for _ in range(2))).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    watch = None
    if path is not None:
        watch = fp8debug.watch(model, path, every=2, what_if=(), optimizer=optimizer if gives_optimizer else None)

    def compiled(function: Any) -> Any:
        return torch.compile(function, backend="aot_eager")

    step: Callable[[], Any] = optimizer.step
    if kind == "method":
        step = compiled(optimizer.step)
    elif kind == "function":
        step = compiled(lambda: optimizer.step())

    def update(x: Tensor) -> Tensor:
        loss: Tensor = model(x).float().square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        return loss

    run = compiled(update) if kind == "training" else update
    losses = []
    for number in range(STEPS):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16()
        losses.append(run(x).item())
    if watch is not None:
        watch.close()
    found = {name: dict(counters[name]) for name in ("stats", "graph_break", "recompiles", "recompile_limit")}
    return losses, {**found, "frames": [(frame.co_filename, frame.co_name) for frame in get_compilation_metrics()]}


@pytest.mark.parametrize("gives_optimizer", [True, False], ids=["given", "found"])
@pytest.mark.parametrize("kind", shortened(["training", "method", "function"], 3))
def test_dynamo_compiles_nothing_of_a_watch(
    kind: str, gives_optimizer: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    alone = train(kind, None)
    assert train(kind, tmp_path / "run", gives_optimizer) == alone
    run = fp8debug.Run(tmp_path / "run")
    if kind == "training":
        assert capfd.readouterr().err.count("called by code under torch.compile that is no compiled module") == 1
        assert run.table().num_rows == 0 and all("torch.compile" in module["reason"] for module in run.modules)
    else:
        assert run.sampled_steps == [0, 2, 4]
