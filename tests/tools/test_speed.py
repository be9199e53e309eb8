"""``fp8debug speed``: which shapes it times, the file it leaves, what ``recommend`` makes of it; the timing itself on a GPU."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import fp8debug
from fp8debug.errors import RunError, UsageError
from fp8debug.recipes import get_recipe
from fp8debug.store.speed_file import GEMMS, SPEED_VERSION, load_shapes, measured_costs, read_speed, shapes_of, write_speed
from fp8debug_cli.main import status
from fp8debug_cli.speed_plot import to_html, to_svg
from tests.synthetic import MODULES, Override, build

UP, DOWN = "blocks.1.mlp.up", "blocks.1.mlp.down"


def timed(shapes: list[dict[str, Any]], gain_us: float = 5.0) -> dict[str, Any]:
    """A document as ``measure_shapes`` returns it: wgrad gains twice as much as fprop, dgrad nothing."""
    times = {"fprop": gain_us, "dgrad": -1.0, "wgrad": 2 * gain_us}
    gemms = {
        gemm: {"bf16_us": 20.0, "quantize_us": 8.0, "gemm_us": 12.5 - gain, "fp8_us": 20.0 - gain, "statistics_us": 3.0,
               "spread": 0.01, "bf16_mj": None, "fp8_mj": None}
        for gemm, gain in times.items()
    }  # fmt: skip
    return {
        "schema": SPEED_VERSION,
        "device": "NVIDIA made up",
        "time": "2026-01-01T00:00:00Z",
        "versions": {"fp8debug": "0", "torch": "0", "cuda": "0"},
        "dtype": "bfloat16",
        "energy": False,
        "shapes": [{**shape, "gemms": gemms} for shape in shapes],
    }


def test_the_distinct_shapes_of_a_run_with_the_recorded_tokens(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20, recipes={"blocks.0.mlp.down": "rowwise"})
    shapes = shapes_of(run)
    found = [(s["tokens"], s["in_features"], s["out_features"], s["recipe"]["name"], s["modules"]) for s in shapes]
    assert [f[:3] for f in found] == [(1024, 256, 768), (1024, 256, 256), (1024, 256, 1024), (1024, 1024, 256), (1024, 1024, 256)]
    assert found[2][4] == ["blocks.0.mlp.up", "blocks.1.mlp.up"]
    assert fp8debug.Recipe.from_dict(shapes[3]["recipe"]).casts == get_recipe("rowwise").casts
    assert {s["tokens"] for s in shapes_of(run, tokens=77)} == {77}
    assert {s["recipe"]["name"] for s in shapes_of(run, recipe="mxfp8")} == {"mxfp8"}


def test_microbatches_are_calls_and_a_bf16_run_is_tried_under_its_what_if(tmp_path: Path) -> None:
    microbatches = Override(slots={"num_tensors": 4}, actual=None)
    assert {s["tokens"] for s in shapes_of(build(tmp_path / "a", num_steps=10, overrides=[microbatches]))} == {256}
    manifest = {"plain_recipe": "tensorwise_current"}
    plain = build(tmp_path / "b", num_steps=10, recipe="bf16", what_if=["mxfp8"], manifest=manifest)
    assert {(s["recipe"]["name"], s["tokens"]) for s in shapes_of(plain)} == {("tensorwise_current", 1024)}
    with pytest.raises(UsageError, match=r"c has no recorded input that tells the number of tokens; give it with --tokens"):
        shapes_of(build(tmp_path / "c", num_steps=10, overrides=[Override(slots={"num_tensors": 0})]))


def test_costs_are_shares_of_the_measured_gain(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20)
    assert measured_costs(run) is None
    write_speed(run.path, timed(shapes_of(run)))
    costs = measured_costs(run)
    assert costs is not None and set(costs) == {name for name, _, _ in MODULES}
    each = 1 / (len(MODULES) * 15)
    assert costs[UP] == pytest.approx({"fprop": 5 * each, "dgrad": 0.0, "wgrad": 10 * each})
    assert sum(cost for of in costs.values() for cost in of.values()) == pytest.approx(1)
    assert [f.name for f in tmp_path.rglob("*speed*")] == ["speed.json"]
    partial = timed(shapes_of(run))
    partial["shapes"].pop()
    write_speed(run.path, partial)
    assert measured_costs(run) is None, "a module without a time: FLOPs for all"
    slow = timed(shapes_of(run), gain_us=-5.0)
    write_speed(run.path, slow)
    costs = measured_costs(run)
    assert costs is not None and {cost for of in costs.values() for cost in of.values()} == {0.0}


def test_recommend_counts_measured_time(tmp_path: Path) -> None:
    result = Override(module=UP, gemm="wgrad", tensor="grad_weight", reference="exact", slots={"sqnr_db": 20.0})
    run = build(tmp_path / "run", overrides=[result])
    findings = fp8debug.triage(run)
    (by_flops,) = fp8debug.recommend(run, findings)
    write_speed(run.path, timed(shapes_of(run)))
    (by_time,) = fp8debug.recommend(run, findings)
    assert (by_time.module, by_time.gemms, by_time.reasons) == (UP, ("wgrad",), ("F108",))
    assert by_time.cost == pytest.approx(10 / (len(MODULES) * 15)) != by_flops.cost


def test_fallback_says_what_its_costs_are_shares_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = Override(module=UP, gemm="wgrad", tensor="grad_weight", reference="exact", slots={"sqnr_db": 20.0})
    run = build(tmp_path / "run", overrides=[result])
    shapes = shapes_of(run)
    said = []
    for document in (None, timed(shapes), timed(shapes[:-1])):
        if document:
            write_speed(run.path, document)
        assert status(["fallback", str(run.path)]) == 0
        said.append([line for line in capsys.readouterr().out.splitlines() if "costs are" in line])
    assert said == [
        [],
        ["costs are shares of the time that FP8 saves on NVIDIA made up (speed.json)"],
        ["speed.json lacks blocks.0.mlp.down: costs are shares of the FLOPs; run fp8debug speed again"],
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"schema": 2, "shapes": []}', "has version 2, newer than 1; install a newer fp8debug"),
        ('{"schema": 1, "shapes": [{"modules": ["a"], "gemms": {}}]}', "cannot be read (KeyError('fprop'))"),
        ('{"schema": 1, "shapes": 7}', "delete it, or measure again with fp8debug speed"),
    ],
)
def test_a_damaged_file_is_said(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(text)
    with pytest.raises(RunError, match=re.escape(message)) as raised:
        read_speed(tmp_path)
    assert "\n" not in str(raised.value) and str(tmp_path / "speed.json") in str(raised.value)


def test_the_file_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_speed(tmp_path, timed([]))
    before = (tmp_path / "speed.json").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_speed(tmp_path, timed(load_shapes(shapes_file(tmp_path, [SHAPE]))))
    assert (tmp_path / "speed.json").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["shapes.json", "speed.json"]


SHAPE = {"name": "up", "tokens": 8192, "in_features": 4096, "out_features": 14336}


def shapes_file(folder: Path, content: object) -> Path:
    path = folder / "shapes.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_shapes_come_from_a_file_too(tmp_path: Path) -> None:
    file = shapes_file(tmp_path, [SHAPE, {"in_features": 64, "out_features": 32}])
    first, second = load_shapes(file, tokens=128, recipe="rowwise")
    assert first == {"modules": ["up"], "tokens": 8192, "in_features": 4096, "out_features": 14336,
                     "recipe": get_recipe("rowwise").to_dict()}  # fmt: skip
    assert (second["modules"], second["tokens"]) == (["64 to 32"], 128)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read {}: No such file or directory"),
        ("tokens: 1", "{} is not JSON: Expecting value"),
        ({"tokens": 1}, '{} holds no list of shapes; expected for instance [{{"name": "mlp.up"'),
        ([], "{} holds no list of shapes"),
        ([7], "{}, entry 0: expected an object such as"),
        ([SHAPE, {**SHAPE, "K": 5}], "{}, entry 1: unknown key 'K'; known are name, tokens, in_features, out_features"),
        ([{"in_features": 1, "out_features": 1}], "{}, entry 0: tokens must be a whole number of at least 1, got none"),
        ([{**SHAPE, "out_features": 0}], "{}, entry 0: out_features must be a whole number of at least 1, got 0"),
        ([{**SHAPE, "out_features": True}], "{}, entry 0: out_features must be a whole number of at least 1, got True"),
        ([{**SHAPE, "in_features": 2.5}], "{}, entry 0: in_features must be a whole number of at least 1, got 2.5"),
    ],
)
def test_a_bad_file_of_shapes_is_one_line(
    content: object, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "shapes.json" if content is None else shapes_file(tmp_path, content)
    assert status(["speed", "--shapes", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: " + message.format(file)) and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give either a run or --shapes FILE"),
        (["RUN", "--shapes", "x"], "give either a run or --shapes FILE"),
        (["RUN", "--recipe", "blokwise"], "unknown recipe 'blokwise': did you mean 'blockwise'"),
        (["RUN", "--recipe", "bf16"], "recipe 'bf16' quantizes nothing; BF16 is measured beside every recipe"),
        (["RUN", "--tokens", "0"], "Invalid value for '--tokens'"),
        (["RUN", "--plot", "x.png"], "--plot writes .svg or .html, not 'x.png'"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["speed", *words]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_on_a_cpu_it_says_why_it_cannot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tmp_path / "run", num_steps=10)
    assert status(["speed", str(tmp_path / "run")]) == 2
    assert re.fullmatch(
        r"error: speed times GEMMs on FP8 tensor cores, and (this build of torch has no CUDA|torch finds no GPU):"
        r" a CPU's times say nothing of a GPU's; run it where you train\n",
        capsys.readouterr().err,
    )
    assert not (tmp_path / "run" / "speed.json").exists()


def test_the_command_prints_saves_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shapes: list[dict[str, Any]], **_: object) -> dict[str, Any]:
        return {key: value for key, value in timed(shapes).items() if key != "schema"}

    monkeypatch.setattr("fp8debug.tools.speed.measure_shapes", measure)
    run = build(tmp_path / "run", num_steps=10)
    from fp8debug_cli.speed import command

    done = CliRunner().invoke(command, [str(run.path), "--plot", str(tmp_path / "times.svg")])
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    title = "blocks.0.mlp.up and 1 more, 1024 x 256 x 1024 fprop 20.0 8.0 7.5 15.0 +5.0 1.33 3.0 - -"
    assert title.split() in lines
    assert "all 60.0 24.0 23.5 46.0 +14.0 1.30 9.0 - -".split() in lines
    assert "all GEMMs of a step, each module once: 0.36 ms in BF16, 0.276 ms in FP8" in done.stdout
    assert "energy: not reported" in done.stderr and f"Wrote {run.path / 'speed.json'}" in done.stderr
    svg = (tmp_path / "times.svg").read_text()
    assert svg.count("<rect") == 1 + 3 + 4 * 3 * 3 and "blocks.0.attn.qkv, 1024 x 256 x 768 wgrad" in svg
    as_json = CliRunner().invoke(command, [str(run.path), "--format", "json"])
    assert json.loads(as_json.stdout) == read_speed(run.path) == timed(shapes_of(run))
    (run.path / "speed.json").unlink()
    if os.geteuid():
        run.path.chmod(0o500)
        refused = CliRunner().invoke(command, [str(run.path)])
        run.path.chmod(0o700)
        assert refused.exit_code == 0 and "not saved with the run" in refused.stderr


def test_a_name_from_outside_is_no_markup() -> None:
    document = timed([{"modules": ["<script>"], "tokens": 1, "in_features": 2, "out_features": 3, "recipe": {}}])
    assert "<script>" not in to_svg(document) and "&lt;script&gt;" in to_svg(document)
    pytest.importorskip("plotly", reason="an .html plot needs plotly")
    page = to_html(document)
    assert "Plotly.newPlot" in page and '"offsetgroup":"fp8"' in page.replace(" ", "")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "rowwise"])
def test_times_on_a_gpu_are_plausible(recipe: str, tmp_path: Path) -> None:
    """A large GEMM gains, a small one loses, and the parts make up the whole."""
    from fp8debug.tools.speed import measure_shapes

    large, small = (
        {"tokens": m, "in_features": k, "out_features": n, "modules": [name], "recipe": get_recipe(recipe).to_dict()}
        for name, m, k, n in (("large", 8192, 4096, 8192), ("small", 1024, 256, 256))
    )
    found = measure_shapes([large, small])
    write_speed(tmp_path, {"schema": SPEED_VERSION, **found})
    assert read_speed(tmp_path) == {"schema": SPEED_VERSION, **found}
    times = {shape["modules"][0]: shape["gemms"] for shape in found["shapes"]}
    for gemm in GEMMS:
        for of in (times["large"][gemm], times["small"][gemm]):
            assert of["fp8_us"] == pytest.approx(of["quantize_us"] + of["gemm_us"], rel=0.35)
            assert of["statistics_us"] > 0 and of["spread"] < 0.5
        assert times["small"][gemm]["fp8_us"] > times["small"][gemm]["bf16_us"]
        if found["energy"]:
            assert times["large"][gemm]["bf16_mj"] > 10 * times["small"][gemm]["bf16_mj"] > 0
    assert sum(of["fp8_us"] for of in times["large"].values()) < sum(of["bf16_us"] for of in times["large"].values())
