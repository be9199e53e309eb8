"""Static scales from a window: the estimate against ``measure`` on dumps, the proposals, and the way back into a model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8debug
from fp8debug.errors import NoMatchError, RunError, UsageError
from fp8debug.formats import FORMATS
from fp8debug.store.calibration_file import load_recipes
from fp8debug.store.dump_files import dumps_of
from fp8debug.tools.calibration import Calibration, Expected, calibrate, expect
from fp8debug.tools.replay import replay
from fp8debug_cli.main import status
from tests.recording.models import batch, net, record
from tests.synthetic import Override, Plan, write


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[fp8debug.Run, Calibration]:
    run = record(tmp_path_factory.mktemp("runs") / "run", net(), steps=3, every=1, what_if=(), dump="*")
    return run, calibrate(run)


def test_the_estimate_agrees_with_measure_on_dumps(recorded: tuple[fp8debug.Run, Calibration]) -> None:
    """Every operand of a training; measured: 0.77 dB at worst (grad_output of the head, few distinct values)."""
    run, found = recorded
    wrong = []
    for module in {site.module for site in found.sites}:
        dumps = dumps_of(run, module)
        for site in (s for s in found.sites if s.module == module):
            own = [d for d in dumps if (d.gemm, d.tensor) == (site.gemm, site.tensor)]
            assert len(own) == site.num_steps == 3
            values: list[dict[str, Any]] = [replay(dump, [site.static.cast])[site.static.cast] for dump in own]
            total = {name: sum(v[name] for v in values) for name in ("sum_err2", "sum_x2", "num_underflow", "numel")}
            assert site.static.sqnr_db is not None
            wrong.append(abs(site.static.sqnr_db + 10 * math.log10(total["sum_err2"] / total["sum_x2"])))
            assert site.static.underflow_rate == pytest.approx(total["num_underflow"] / total["numel"], abs=1e-3)
    assert len(wrong) == 38
    assert max(wrong) < 1.0 and float(np.median(wrong)) < 0.2


LIMITS_DB = {"gauss": 0.1, "laplace": 0.1, "uniform": 0.1, "gated": 0.1, "lognormal": 1.5, "outliers": 1.5}


@pytest.mark.parametrize(("name", "limit_db"), LIMITS_DB.items())
def test_the_estimate_for_known_distributions(name: str, limit_db: float) -> None:
    """Where nothing clips: a few large elements that carry the energy are known by their binade alone."""
    torch.manual_seed(0)
    normal = torch.randn(1 << 17)
    x = {
        "gauss": normal,
        "laplace": torch.distributions.Laplace(0.0, 1.0).sample((1 << 17,)),
        "uniform": torch.rand(1 << 17) - 0.5,
        "gated": torch.nn.functional.silu(torch.randn(1 << 17)) * normal,
        "lognormal": torch.exp(2 * normal),
        "outliers": torch.where(torch.arange(1 << 17) % 4096 == 0, 200 * normal, normal),
    }[name]
    amax = float(x.abs().max())
    for fmt in (FORMATS["e4m3fn"], FORMATS["e5m2"]):
        for factor in (1.0, 1.3, 2.0):
            scale_inv = amax * factor / fmt.max
            measured: dict[str, Any] = fp8debug.measure(x, fp8debug.Cast(format=fmt.name, scaling="static", scale_inv=scale_inv))
            found = expect(fmt, scale_inv, np.array(measured["log2_hist"]), amax, measured["sum_x2"], measured["numel"])
            assert found.sqnr_db == pytest.approx(measured["sqnr_db"], abs=limit_db)
            assert found.underflow_rate == pytest.approx(measured["underflow_nonzero_rate"], abs=2e-3)
            assert found.clip_rate == 0


def test_what_clips_is_counted() -> None:
    x = torch.rand(1 << 16, generator=torch.Generator().manual_seed(0))
    measured: dict[str, Any] = fp8debug.measure(x, fp8debug.Cast(scaling="static", scale_inv=0.75 / 448))
    found = expect(FORMATS["e4m3fn"], 0.75 / 448, np.array(measured["log2_hist"]), 1.0, measured["sum_x2"], measured["numel"])
    assert found.clip_rate == pytest.approx(measured["overflow_rate"], abs=0.01) and found.clip_rate == pytest.approx(
        0.25, abs=0.01
    )
    assert found.sqnr_db == pytest.approx(measured["sqnr_db"], abs=0.3)
    assert found.problem == "0.25 of the elements clip"


def test_beyond_the_histogram_nothing_is_promised() -> None:
    histogram = np.zeros(64, np.int64)
    histogram[-1] = 10
    found = expect(FORMATS["e4m3fn"], 2.0**20, histogram, 2.0**22, 2.0**44 * 10, 10)
    assert found.sqnr_db is None and found.problem == "its values lie outside the exponent histogram"


def test_percentile_margin_and_window(recorded: tuple[fp8debug.Run, Calibration]) -> None:
    run, _ = recorded
    whole, largest, half = (calibrate(run, percentile=p) for p in (99.9, 100, 50))
    double, first = calibrate(run, percentile=100, margin=2.0), calibrate(run, percentile=100, steps="0:1")
    assert whole.steps == (0, 2) and first.steps == (0, 0)
    for one, top, middle, twice, alone in zip(*(c.sites for c in (whole, largest, half, double, first)), strict=True):
        assert top.amax == top.amax_max and middle.amax_min <= middle.amax <= one.amax <= top.amax
        cast, wider = fp8debug.Cast.parse(top.static.cast), fp8debug.Cast.parse(twice.static.cast)
        assert cast.scale_inv == pytest.approx(top.amax / FORMATS[cast.format].max, rel=1e-6)
        assert cast.scale_inv is not None and wider.scale_inv == pytest.approx(2 * cast.scale_inv, rel=1e-6)
        assert top.static.clip_rate == 0 and alone.num_steps == 1


def test_the_file_trains_a_model(recorded: tuple[fp8debug.Run, Calibration], tmp_path: Path) -> None:
    _, found = recorded
    path = tmp_path / "scales.json"
    path.write_text(found.to_json())
    assert load_recipes(path) == found.recipes
    model = fp8debug.convert(net(None), str(path), overrides={"head": None})
    up = model.get_submodule("blocks.0.up")
    assert isinstance(up, fp8debug.Fp8Linear) and not isinstance(model.get_submodule("head"), fp8debug.Fp8Linear)
    cast = up.recipe.casts["fprop", "input"]  # type: ignore[index]  # a Gemm equals its name
    assert cast is not None and cast.scaling == "static" and cast.granularity == "tensorwise"
    reference = net(None)
    x = batch(7)[0]
    error = (model(x) - reference(x)).square().mean() / reference(x).square().mean()
    assert error < 10**-2
    with pytest.raises(NoMatchError):  # of another model
        fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(4, 4)), str(path))


SPREAD = [0] * 64
for place in range(4, 44):
    SPREAD[place] = 1000


def test_a_gemm_is_static_as_a_whole_and_the_proposal_says_what_holds(tmp_path: Path) -> None:
    """grad_output of one GEMM spreads over 40 binades: no tensorwise format holds it, the recorded blocks do."""
    wide = Override(
        module="blocks.1.mlp.up",
        gemm="dgrad",
        tensor="grad_output",
        slots={"log2_hist": lambda row: SPREAD if row["log2_hist"] else None, "amax": 0.4},
    )
    write(tmp_path / "run", Plan(num_steps=30, overrides=[wide]))
    run = fp8debug.Run(tmp_path / "run")
    found = {(s.gemm, s.tensor): s for s in calibrate(run).sites if s.module == "blocks.1.mlp.up"}
    sick, partner, healthy = found["dgrad", "grad_output"], found["dgrad", "weight"], found["fprop", "input"]
    assert "of the nonzero elements become 0" in sick.note and not sick.is_static
    assert sick.static.cast.startswith("e5m2"), "the format with the wider range, though it does not suffice"
    assert sick.proposal is not None and sick.proposal.measured
    assert partner.note.startswith("not static: its grad_output is not") and not partner.is_static
    assert partner.proposal == partner.static, "alone it would hold"
    assert healthy.is_static and healthy.note == "" and healthy.running is not None and healthy.running.measured


def test_no_recorded_cast_holds_says_what_to_record() -> None:
    bad = Expected(cast="e4m3fn tensorwise current", sqnr_db=12.0, clip_rate=0.0, underflow_rate=0.0, measured=True)
    assert bad.problem == "SQNR 12.0 dB"
    from fp8debug.tools.calibration import _note

    assert _note("x", None, [bad]) == (
        "not static: x; no recorded cast holds (finest: tensorwise); a finer one cannot be told from a histogram,"
        " record it as what_if="
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"percentile": 0}, "percentile must be above 0 and at most 100, got 0"),
        ({"margin": 1e6}, "margin is a factor between 1/256 and 256, got 1000000.0"),
        ({"steps": "3:1"}, "the range of steps '3:1' is empty"),
    ],
)
def test_a_mistake_is_one_line(recorded: tuple[fp8debug.Run, Calibration], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        calibrate(recorded[0], **options)
    assert str(raised.value).startswith(message)


def test_a_window_without_a_sampled_step(recorded: tuple[fp8debug.Run, Calibration]) -> None:
    with pytest.raises(RunError, match=r"no exponent histogram of an operand in steps 900:; widen --steps"):
        calibrate(recorded[0], steps="900:")


@pytest.mark.parametrize("text", ["", "[]", '{"kind": "x", "schema": 1}', '{"kind": "fp8debug-scales", "schema": 1}', "[" * 9999])
def test_a_file_that_is_none_of_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(text)
    with pytest.raises(UsageError) as raised:
        load_recipes(tmp_path / "s.json")
    assert "\n" not in str(raised.value) and "s.json" in str(raised.value)


def test_the_commands(recorded: tuple[fp8debug.Run, Calibration], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, target = recorded[0].path, tmp_path / "scales.json"
    assert status(["calibrate", str(run), "-o", str(target), "--percentile", "100"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("run: 38 of 38 operands take a static scale, steps 0 to 2\n")
    assert said.err == f"Wrote {target}\n"
    assert json.loads(target.read_text())["percentile"] == 100
    assert status(["calibrate", str(run), "-o", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "fp8debug-scales"

    (dump,) = [d for d in dumps_of(run, "head", 1) if d.gemm == "fprop" and d.tensor == "input"]
    words = ["measure", str(dump.path), "--cast", "e5m2 tensorwise", "--cast", "mxfp8", "--format", "json"]
    assert status(words) == 0
    ran, *others = json.loads(capsys.readouterr().out)
    (row,) = run_rows(recorded[0], dump.step)
    assert ran["actual"] is True
    assert {name: ran[name] for name in row} == row
    assert [r["cast_name"] for r in others] == ["e5m2 tensorwise current", "e4m3fn 1x32 current pow2_ceil"]
    assert status(["measure", f"{run}/dumps/step=00000001/*", "--columns", "sqnr_db", "--format", "csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + 38
    assert status(["measure", str(dump.path)]) == 0
    assert "head fprop input [96, 64], step 1, rank 0" in capsys.readouterr().out


def run_rows(run: fp8debug.Run, step: int) -> list[dict[str, Any]]:
    columns = ["sqnr_db", "num_subnormal"]
    table = run.table(columns, module="head", gemm="fprop", tensor="input", steps=(step, step + 1), actual=True)
    return table.to_pylist()  # type: ignore[no-any-return]  # pyarrow has no types


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["measure", "NIX"], "NIX does not exist; give a file below RUN/dumps"),
        (["measure", "NIX*"], "no dump at NIX*; they lie below RUN/dumps of a run that was recorded with dump="),
        (["measure", "RUN/manifest.json"], "RUN/manifest.json is no dump of fp8debug: no safetensors header"),
        (["measure", "DUMP", "--cast", "mxfp9"], "unknown recipe 'mxfp9': did you mean 'mxfp8' or 'mxfp4' or 'mxfp6_e3m2'?"),
        (["measure", "DUMP", "--cast", "e4m3 1x128"], "'e4m3 1x128 current' is the name of no cast: unknown format 'e4m3'"),
        (["measure", "DUMP", "--columns", "sqnr"], "unknown column 'sqnr': did you mean 'sqnr_db'?"),
        (["calibrate", "RUN", "--percentile", "0"], "percentile must be above 0 and at most 100, got 0.0"),
    ],
)
def test_a_mistake_on_the_command_line(
    words: list[str], message: str, recorded: tuple[fp8debug.Run, Calibration], capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(recorded[0].path)
    dump = str(dumps_of(run, "head", 1)[0].path)
    assert status([w.replace("RUN", run).replace("DUMP", dump) for w in words]) in (2, 3)
    assert capsys.readouterr().err.replace(run, "RUN").startswith(f"error: {message}")


def test_a_window_with_nan_says_from_which_step_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        for step in range(4):
            x = torch.randn(32, 32)
            if step == 2:
                x[0, 0] = float("nan")
            model(x).square().mean().backward()
            watch.step()
    assert calibrate(tmp_path / "run").first_nonfinite == 2
    assert calibrate(tmp_path / "run", steps=":2").first_nonfinite is None
    capsys.readouterr()
    assert status(["calibrate", str(tmp_path / "run")]) == 0
    warning = "warning: operands hold NaN or Inf from step 2 on; calibrate on healthy steps: --steps :2"
    assert warning in capsys.readouterr().err.splitlines()
    rows = fp8debug.Run(tmp_path / "run").sql(
        "SELECT step, rms, mse FROM sites WHERE gemm = 'fprop' AND tensor = 'output' AND reference = 'shadow' ORDER BY step"
    )
    assert all(row["rms"] > 0 for row in rows.to_pylist())


def test_a_tensor_without_a_finite_element_has_no_mean(tmp_path: Path) -> None:
    model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=()) as watch:
        model(torch.full((4, 32), float("nan"))).sum().backward()
        watch.step()
    query = "SELECT rms, mse, bias FROM sites WHERE tensor IN ('input', 'output')"
    rows = fp8debug.Run(tmp_path / "run").sql(query).to_pylist()
    assert rows and all(value is None for row in rows for value in row.values())
