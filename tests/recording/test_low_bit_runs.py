"""Training in FP4, FP6 and fnuz: it learns, a watch changes no bit of it, and every site has its statistics."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.kernels.reference import Operand
from fp8debug.recipes import Cast
from fp8debug.rules.base import Severity
from fp8debug.tools.calibration import calibrate
from fp8debug.tools.replay import replay
from fp8debug.types import Gemm, Quantized, TensorRole

STEPS = 30
Ordinary = Callable[[Tensor, "Cast | None"], Operand]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 16))


def train(recipe: str, run: Path | None = None, *, fault: Any = None, **options: object) -> list[float]:
    """Return the losses of learning a fixed random teacher; recorded where there is a folder; a fault in the second layer."""
    net = fp8debug.convert(model(), recipe)
    net.get_submodule("2").distortion = fault
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


def test_calibrate_proposes_static_scales_of_the_kind_that_ran(tmp_path: Path) -> None:
    train("tensorwise_fnuz", tmp_path / "fnuz")
    train("nvfp4", tmp_path / "fp4")
    for name, formats in (("fnuz", {"e4m3fnuz", "e5m2fnuz"}), ("fp4", {"e4m3fn", "e5m2"})):
        sites = calibrate(tmp_path / name).sites
        assert {site.static.cast.split()[0] for site in sites} <= formats
        assert all(site.running is not None and site.running.measured for site in sites)
        assert all(site.static.sqnr_db is not None and site.static.sqnr_db > 24 for site in sites)
    assert any(site.is_static for site in calibrate(tmp_path / "fnuz").sites)


def test_the_scale_modes_of_torchao_are_what_ifs_of_one_run(tmp_path: Path) -> None:
    mx = fp8debug.get_recipe("mxfp4")
    modes = ("pow2_floor", "pow2_amax_ceil", "pow2_even")
    train("mxfp4", tmp_path / "run", what_if=tuple(mx.replace(scale_rounding=mode, name=mode) for mode in modes))
    query = """SELECT cast_name, sum(num_saturated) AS clipped, sum(sum_err2) / sum(sum_x2) AS nmse FROM sites
        WHERE reference = 'operand' AND tensor = 'weight' AND gemm = 'fprop' GROUP BY 1"""
    found = {row["cast_name"].split()[3]: row for row in fp8debug.Run(tmp_path / "run").sql(query).to_pylist()}
    assert set(found) == {"pow2_ceil", *modes}
    assert found["pow2_floor"]["clipped"] > found["pow2_even"]["clipped"] >= found["pow2_ceil"]["clipped"] == 0
    assert found["pow2_amax_ceil"]["clipped"] == 0
    assert found["pow2_amax_ceil"]["nmse"] > found["pow2_even"]["nmse"]  # a binade of an FP4 range is much


def zeros(which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Ordinary) -> Operand:
    """Stochastic rounding that returns zeros (TransformerEngine #3281)."""
    made = ordinary(x, cast)
    if (which, role) != (Gemm.DGRAD, TensorRole.GRAD_OUTPUT) or not isinstance(made, tuple):
        return made
    q, cast = made
    return Quantized(torch.zeros_like(q.data.float()).to(q.data.dtype), q.scale_inv), cast


def halved(which: Gemm, role: TensorRole, x: Tensor, cast: Cast | None, ordinary: Ordinary) -> Operand:
    """A scale of the tensor that is half of what it should be."""
    made = ordinary(x, cast)
    if (which, role) != (Gemm.FPROP, TensorRole.INPUT) or not isinstance(made, tuple):
        return made
    return Quantized(made[0].data, made[0].scale_inv / 2), made[1]


@pytest.mark.parametrize(("fault", "gemm", "tensor"), [(zeros, "dgrad", "grad_output"), (halved, "fprop", "input")])
def test_a_sick_nvfp4_run_is_not_silent_and_a_clean_one_is(fault: Any, gemm: str, tensor: str, tmp_path: Path) -> None:
    train("nvfp4", tmp_path / "clean")
    assert [f for f in fp8debug.triage(fp8debug.Run(tmp_path / "clean")) if f.severity > Severity.INFO] == []
    train("nvfp4", tmp_path / "sick", fault=fault)
    found = [f for f in fp8debug.triage(fp8debug.Run(tmp_path / "sick")) if f.severity is Severity.ERROR]
    assert found
    assert any((f.module, f.gemm, f.tensor) == ("2", gemm, tensor) for f in found), found
