"""Training in FP4, FP6 and fnuz: it learns, a watch changes no bit of it, and every site has its statistics."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.tools.replay import replay
from fp8debug.types import Gemm, TensorRole

STEPS = 30


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 16))


def train(recipe: str, run: Path | None = None, **options: object) -> list[float]:
    """Return the losses of learning a fixed random teacher; recorded where there is a folder."""
    net = fp8debug.convert(model(), recipe)
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(64, 16, generator=generator)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    watch = fp8debug.watch(net, run, every=5, optimizer=optimizer, **options) if run else None  # type: ignore[arg-type]
    losses = []
    for _ in range(STEPS):
        x = torch.randn(128, 64, generator=generator)
        loss: Tensor = nn.functional.mse_loss(net(x), torch.tanh(x @ teacher / 8))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return losses


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "tensorwise_fnuz"])
def test_it_learns_unchanged_by_a_watch_and_every_site_has_statistics(recipe: str, tmp_path: Path) -> None:
    what_if = "mxfp4" if recipe == "nvfp4" else "nvfp4"
    losses = train(recipe, tmp_path / "run", what_if=(what_if,), dump=("*@5",))
    assert losses == train(recipe)
    assert losses[-1] < losses[0] * 0.7
    reference = train("bf16")
    assert losses[-1] < reference[-1] * 1.6
    run = fp8debug.Run(tmp_path / "run")
    query = "SELECT module, gemm, tensor, cast_name, actual, avg(sqnr_db) AS sqnr, min(numel) AS n, avg(underflow_rate) AS u"
    rows = run.sql(f"{query} FROM sites WHERE reference = 'operand' GROUP BY ALL").to_pylist()
    casts = fp8debug.get_recipe(recipe).casts
    sites = {(r["module"], r["gemm"], r["tensor"]) for r in rows if r["actual"]}
    # The first layer's input wants no gradient: it has no dgrad.
    assert len(sites) == 3 * 6 - 2
    for row in rows:
        if not row["actual"]:
            continue
        cast = casts[Gemm(row["gemm"]), TensorRole(row["tensor"])]
        assert row["cast_name"] == str(cast) and row["n"] > 0
        assert cast is not None and row["sqnr"] > cast.gaussian.sqnr_db - 4, row
    assert {r["cast_name"] for r in rows if not r["actual"]} == {str(c) for c in fp8debug.get_recipe(what_if).casts.values()}
    dumps = sorted((tmp_path / "run").rglob("*.safetensors"))
    assert dumps
    for path in dumps:
        found = replay(path, "nvfp4")
        ran = next(iter(found))
        stored = run.sql(f"SELECT sqnr_db FROM sites WHERE step = 5 AND cast_name = '{ran}'").to_pylist()
        assert any(found[ran]["sqnr_db"] == pytest.approx(row["sqnr_db"], rel=1e-6) for row in stored)
