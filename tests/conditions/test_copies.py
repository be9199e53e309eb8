"""A copy or pickle of a watched model works, trains nothing, and is not recorded: what averaged weights and checkpoints do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from tests.adapters import linears
from tests.recording import models

Made = tuple[nn.Module, Callable[[int], Tensor]]


def ours(recipe: str | None) -> Made:
    return models.net(recipe), lambda step: models.batch(step)[0]


def scaled_mm() -> Made:
    torch.manual_seed(0)
    return linears.model(), linears.batch


KINDS: dict[str, Callable[[], Made]] = {
    "fp8": partial(ours, "blockwise"),
    "all in bf16": partial(ours, "bf16"),
    "plain": partial(ours, None),
    "scaled_mm": scaled_mm,
}


def train(make: Callable[[], Made], path: Path | None) -> list[float]:
    model, batch = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = fp8debug.watch(model, path, every=1) if path else None
    losses = []
    for step in range(2):
        loss = model(batch(step)).float().square().mean()
        loss.backward()
        twin = copy.deepcopy(model)
        twin(batch(step)).float().square().mean().backward()
        if path:
            torch.save(model, path / "whole.pt")
            loaded = torch.load(path / "whole.pt", weights_only=False)
            assert torch.equal(loaded(batch(step)), twin(batch(step)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if watch:
            watch.step(loss=loss)
    if watch:
        watch.close()
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_watched_model_works_and_is_not_recorded(kind: str, tmp_path: Path) -> None:
    assert train(KINDS[kind], tmp_path / "run") == train(KINDS[kind], None)
    run = fp8debug.Run(tmp_path / "run")
    rows = run.sql("SELECT DISTINCT num_tensors FROM sites WHERE reference = 'operand' AND tensor <> 'weight'")
    assert rows.to_pylist() == [{"num_tensors": 1}]
