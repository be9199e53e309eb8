"""What watch() records, how it counts steps, what it refuses, and what coverage says."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, cast

import duckdb
import pytest
import torch
from torch import nn
from torch.nn import functional

import fp8debug
from fp8debug.errors import AttachError, RecordError, UsageError
from fp8debug.kernels.dispatch import measure
from fp8debug.metrics import METRICS
from tests.recording.models import batch, net, record, train

NINE = {
    ("fprop", "input"),
    ("fprop", "weight"),
    ("fprop", "output"),
    ("dgrad", "grad_output"),
    ("dgrad", "weight"),
    ("dgrad", "grad_input"),
    ("wgrad", "grad_output"),
    ("wgrad", "input"),
    ("wgrad", "grad_weight"),
}


def parameter(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_parameter(name).detach().clone()


def rows(run: fp8debug.Run, where: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = run.sql(
        f"SELECT * FROM sites WHERE {where} ORDER BY step, call_index, gemm, tensor, cast_name"
    ).to_pylist()
    return found


def test_nine_sites_of_every_linear_at_sampled_steps(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(overrides={"head": None}))
    found = run.sql("SELECT DISTINCT step, module, gemm, tensor FROM sites WHERE actual").to_pylist()
    for step in (0, 2, 4):
        for module in (f"blocks.{i}.{part}" for i in (0, 1) for part in ("gate", "up", "down")):
            sites = {(r["gemm"], r["tensor"]) for r in found if (r["step"], r["module"]) == (step, module)}
            # the first block's input is data, which wants no gradient
            first = module in ("blocks.0.gate", "blocks.0.up")
            assert sites == (NINE - {s for s in NINE if s[0] == "dgrad"} if first else NINE)
    assert {r["step"] for r in found} == {0, 2, 4} and not [r for r in found if r["module"] == "head"]


def test_operands_agree_with_measure(tmp_path: Path) -> None:
    model = net()
    x, _ = batch(0)
    weight = parameter(model, "blocks.0.gate.weight")
    run = record(tmp_path / "run", model, steps=1)
    casts = fp8debug.get_recipe("blockwise").casts
    # Of results, of a second look, of random rounding.
    beside = ("damage", "choice", "gradient_sum", "reread", "rows", "noise")
    others = {name for metric in map(METRICS.get, beside) for name in (*(s.name for s in metric.slots), *metric.derived)}
    for tensor, value in (("input", x), ("weight", weight)):
        cast = casts["fprop", tensor]  # type: ignore[index]  # enums are strings
        assert cast is not None
        where = f"module = 'blocks.0.gate' AND gemm = 'fprop' AND tensor = '{tensor}' AND actual"
        (row,) = rows(run, where)
        assert row["cast_name"] == str(cast) and row["reference"] == "operand"
        for name, expected in measure(value, cast).items():
            if name == "num_damage_rows":  # of results
                assert row[name] is None
            elif name in others:
                continue
            elif isinstance(expected, float):
                assert row[name] == pytest.approx(expected, rel=1e-6, abs=1e-12), name
            else:
                assert row[name] == expected, name


def test_results_against_shadow_and_exact(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(), steps=1, shadow_rows=32)
    for row in rows(run, "module = 'blocks.1.down' AND tensor IN ('output', 'grad_input', 'grad_weight')"):
        low, high = (24, 36) if row["reference"] == "shadow" else (100, 200)
        assert low < row["sqnr_db"] < high, row
        sampled = {"output": 32 * 64, "grad_input": 32 * 192, "grad_weight": 64 * 32}
        assert row["numel"] == sampled[str(row["tensor"])]
        assert row["num_underflow"] is None and row["scale_inv_max"] is None
    full = record(tmp_path / "full", net(), steps=1, shadow="full")
    (whole,) = rows(full, "module = 'blocks.1.down' AND tensor = 'output' AND reference = 'shadow'")
    (sample,) = rows(run, "module = 'blocks.1.down' AND tensor = 'output' AND reference = 'shadow'")
    assert whole["numel"] == 96 * 64
    assert abs(whole["sqnr_db"] - sample["sqnr_db"]) < 1.5


def test_damage_is_the_sum_over_rows_of_the_squared_product(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Tanh())
    fp8debug.convert(model, "blockwise")
    x, weight = torch.randn(40, 64), parameter(model, "0.weight")
    grads: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    with fp8debug.watch(model, tmp_path / "run", shadow="full") as watch:
        output = model[0](x)
        output.register_hook(grads.append)
        outputs.append(output.detach())
        model[1](output).square().mean().backward()
        watch.step()
    shadow = (x.bfloat16().float() @ weight.bfloat16().float().t()).bfloat16().float()
    expected = ((outputs[0].double() - shadow.double()) * grads[0].double()).sum(1).square().sum().item()
    (row,) = rows(fp8debug.Run(tmp_path / "run"), "damage IS NOT NULL")
    assert row["damage"] == pytest.approx(expected, rel=1e-6) and row["num_damage_rows"] == 40
    assert (row["tensor"], row["reference"]) == ("output", "shadow")


def test_what_if_casts_stand_beside_the_running_one(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(), what_if=("tensorwise_delayed", "mxfp8"))
    where = "module = 'blocks.0.up' AND gemm = 'fprop' AND tensor = 'input' AND step = 4"
    found = rows(run, where)
    assert {(r["cast_name"], r["actual"]) for r in found} == {
        ("e4m3fn 1x128 current", True),
        ("e4m3fn tensorwise delayed(1024,max)", False),
        ("e4m3fn 1x32 current pow2_ceil", False),
    }
    assert len({r["amax"] for r in found}) == 1  # the same live tensor
    assert [r["cast_name"] for r in found if r["log2_hist"] is not None] == ["e4m3fn 1x128 current"]
    assert sum(next(r["log2_hist"] for r in found if r["actual"])) == 96 * 64


def test_delayed_what_if_uses_the_amaxes_of_earlier_sampled_steps(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 8))
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=("tensorwise_delayed",)) as watch:
        for scale in (1.0, 4.0, 2.0):
            model(torch.full((4, 32), scale)).sum().backward()
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    found = rows(run, "cast_name LIKE '%delayed%' AND tensor = 'input' AND gemm = 'fprop'")
    assert [r["headroom"] for r in found] == pytest.approx([1.0, 4.0, 0.5])
    assert [r["scale_log2_ratio"] for r in found] == pytest.approx([0.0, -2.0, 1.0], abs=1e-6)
    assert [r["overflow_rate"] for r in found] == [0.0, 1.0, 0.0]


def test_a_model_without_fp8_is_tried_under_a_recipe(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net(None), plain_recipe="rowwise")
    assert not rows(run, "actual")
    sites = run.sql("SELECT DISTINCT gemm, tensor FROM sites WHERE module = 'blocks.1.up'").to_pylist()
    assert {(s["gemm"], s["tensor"]) for s in sites} == NINE
    (row,) = rows(run, "module = 'blocks.1.up' AND tensor = 'output' AND step = 2")
    assert row["reference"] == "shadow" and 24 < row["sqnr_db"] < 36 and row["damage"] is not None
    assert "rowwise" in str(row["cast_name"])


def test_a_model_converted_to_bf16_is_tried_as_if_it_were_not_converted(tmp_path: Path) -> None:
    keys = "step, module, gemm, tensor, cast_name, reference, actual, numel, sum_err2, num_underflow"
    tables = []
    for recipe in ("bf16", None):
        run = record(tmp_path / str(recipe), net(recipe), steps=3)
        tables.append(run.sql(f"SELECT {keys} FROM sites ORDER BY {keys}").to_pylist())
        assert not run.sql("SELECT * FROM events WHERE kind = 'skipped'").num_rows
    assert tables[0] == tables[1] and {row["module"] for row in tables[0]} > {"blocks.1.down", "head"}
    model = net("bf16")
    with fp8debug.watch(model, tmp_path / "later", every=1) as watch:
        train(model, 1, after=lambda _, loss: watch.step(loss=loss))
        fp8debug.convert(model, "blockwise")  # from now on its own probe sees it
        train(model, 1, after=lambda _, loss: watch.step(loss=loss))
    ran = fp8debug.Run(tmp_path / "later").sql("SELECT DISTINCT step, cast_name LIKE '%1x128%' AND actual AS ran FROM sites")
    assert {row["step"] for row in ran.to_pylist() if row["ran"]} == {1}


def test_microbatches_are_merged_and_a_weight_is_described_once(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        for part in range(3):
            x, classes = batch(part)
            functional.cross_entropy(model(x), classes).backward()
        optimizer.step()
        watch.step()
    run = fp8debug.Run(tmp_path / "run")
    found = {r["tensor"]: r for r in rows(run, "module = 'blocks.0.up' AND actual AND reference = 'operand'")}
    assert (found["input"]["numel"], found["input"]["num_tensors"]) == (3 * 96 * 64, 3)
    assert (found["weight"]["numel"], found["weight"]["num_tensors"]) == (192 * 64, 1)


def test_call_index_is_the_order_of_execution(tmp_path: Path) -> None:
    run = record(tmp_path / "run", net())
    order = run.sql("SELECT DISTINCT module, call_index FROM sites ORDER BY call_index").to_pylist()
    expected = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("gate", "up", "down")]
    assert [r["module"] for r in order] == [*expected, "head"]
    assert [m["fqn"] for m in run.modules] == [*expected, "head"]


def test_steps_hold_what_the_trainer_says(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    with fp8debug.watch(model, tmp_path / "run", every=2, optimizer=optimizer) as watch:
        for step in range(3):
            functional.cross_entropy(model(batch(step)[0]), batch(step)[1]).backward()
            optimizer.step()
            watch.step(loss=torch.tensor(1.5 + step), grad_norm=2.0, loss_scale=1024.0, tokens=96)
    found = fp8debug.Run(tmp_path / "run").sql("SELECT * FROM steps ORDER BY step").to_pylist()
    assert [(r["step"], r["loss"], r["sampled"]) for r in found] == [(0, 1.5, True), (1, 2.5, False), (2, 3.5, True)]
    assert {(r["grad_norm"], r["lr"], r["loss_scale"], r["tokens"]) for r in found} == {(2.0, 0.25, 1024.0, 96)}
    assert all(r["seconds"] > 0 for r in found)


def test_steps_are_counted_from_any_optimizer_of_the_model(tmp_path: Path) -> None:
    model, other = net(), nn.Linear(2, 2)
    stray = torch.optim.SGD(other.parameters(), lr=1.0)
    watch = fp8debug.watch(model, tmp_path / "run", every=2)

    def after(step: int, loss: torch.Tensor) -> None:
        stray.step()  # not of this model: no step
        with torch.no_grad():
            model(batch(0)[0])  # an evaluation: no step, no statistics

    train(model, 5, after=after)
    watch.close()
    run = fp8debug.Run(tmp_path / "run")
    found = run.sql("SELECT step, sampled, lr FROM steps ORDER BY step").to_pylist()
    assert [(r["step"], r["sampled"]) for r in found] == [(i, i % 2 == 0) for i in range(5)]
    assert {r["lr"] for r in found} == {1e-3}
    assert rows(run, "module = 'head' AND tensor = 'input' AND gemm = 'fprop' AND actual AND step = 2")[0]["num_tensors"] == 1


def test_an_exception_keeps_what_was_recorded(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(ZeroDivisionError), fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        train(model, 2, after=lambda _, loss: watch.step(loss=loss))
        functional.cross_entropy(model(batch(2)[0]), batch(2)[1]).backward()
        raise ZeroDivisionError("in the loop")
    run = fp8debug.Run(tmp_path / "run")
    assert {r["step"] for r in rows(run, "actual")} == {0, 1, 2}
    assert "ended by ZeroDivisionError: in the loop" in [r["message"] for r in run.sql("SELECT message FROM events").to_pylist()]


def test_first_nan_is_an_event(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 8))
    fp8debug.convert(model, "blockwise")
    x = torch.randn(4, 32)
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        for step in range(3):
            x[0, 0] = math.nan if step else 1.0
            model(x).sum().backward()
            watch.step()
    events = fp8debug.Run(tmp_path / "run").sql("SELECT step, message FROM events WHERE kind = 'nonfinite'").to_pylist()
    assert {"step": 1, "message": "fprop input: first NaN or Inf, in the high-precision tensor: 1"} in events
    assert {e["step"] for e in events} == {1}


def test_files_are_readable_by_duckdb_alone(tmp_path: Path) -> None:
    record(tmp_path / "run", net())
    query = f"SELECT count(*), min(amax), bool_and(typeof(log2_hist) = 'BIGINT[]') FROM '{tmp_path}/run/rank=*/stats/*.parquet'"
    count, amax, listed = duckdb.connect().execute(query).fetchall()[0]
    assert count > 300 and amax > 0 and listed


def test_manifest_says_what_ran(tmp_path: Path) -> None:
    record(tmp_path / "run", net("blockwise", {"blocks.1.*": "tensorwise_delayed", "head": None}), exclude=("*.zzz",))
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text())
    assert manifest["recipe"]["name"] == "blockwise" and manifest["what_if"] == ["tensorwise_delayed", "tensorwise_current"]
    modules = {m["fqn"]: m for m in manifest["modules"]}
    assert modules["blocks.1.up"]["casts"]["dgrad.grad_output"]["format"] == "e5m2"
    head = modules["head"]
    assert (head["fp8"], head["requested"], head["reason"]) == (False, "bf16", "left in high precision on request")
    assert {"kind": "override", "pattern": "blocks.1.*", "matched": 3} in manifest["filters"]
    assert {"kind": "exclude", "pattern": "*.zzz", "matched": 0} in manifest["filters"]


def test_coverage_says_why_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Odd(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input)

    model = nn.Sequential(nn.Linear(64, 64), Odd(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    fp8debug.convert(model, "blockwise", overrides={"3": None})
    with fp8debug.watch(model, tmp_path / "run", exclude=("2",)) as watch:
        model(torch.randn(4, 64)).sum().backward()
        watch.step()
        found = {c["fqn"]: (c["fp8"], c["observed"], c["reason"]) for c in watch.coverage()}
    assert found == {
        "0": (True, True, None),
        "1": (
            False,
            False,
            (
                "not converted: Odd has a forward of its own, which Fp8Linear's would replace; use nn.Linear there, or"
                " leave it in high precision with overrides={FQN: None}"
            ),
        ),
        "2": (True, False, "excluded"),
        "3": (False, False, "left in high precision on request"),
    }


def test_a_module_never_called_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run") as watch:
        model.blocks[0](torch.randn(4, 64)).sum().backward()
        watch.step()
    assert "never called in a sampled step, no statistics: blocks.1.gate, blocks.1.up, blocks.1.down and 1 more" in (
        capsys.readouterr().err
    )


def test_wrappers_leave_no_trace_in_names(tmp_path: Path) -> None:
    inner = net()
    wrapped = nn.Module()
    wrapped.add_module("_orig_mod", inner)
    watch = fp8debug.watch(wrapped, tmp_path / "run")
    assert watch.coverage()[0]["fqn"] == "blocks.0.gate"
    watch.close()
    watch = fp8debug.watch([net(), net()], tmp_path / "two")
    assert [c["fqn"] for c in watch.coverage()][::7] == ["0.blocks.0.gate", "1.blocks.0.gate"]
    watch.close()


def test_resume_goes_on_in_the_same_run(tmp_path: Path) -> None:
    model = net()
    record(tmp_path / "run", model, steps=4)
    with fp8debug.watch(model, tmp_path / "run", every=2, resume_from=4) as watch:
        train(model, 2, after=lambda _, loss: watch.step(loss=loss))
    found = fp8debug.Run(tmp_path / "run").sql("SELECT step FROM steps ORDER BY step").to_pylist()
    assert [r["step"] for r in found] == [0, 1, 2, 3, 4, 5]


class Loop:
    """A trainer of a program's own."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 4)


def unwritable(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "run"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: fp8debug.watch(nn.ReLU(), p / "r"), AttachError, "ReLU has no nn.Linear or Fp8Linear in it"),
        (lambda p: fp8debug.watch("model", p / "r"), AttachError, "cannot watch str: expected an nn.Module or a list"),
        (lambda p: fp8debug.watch([], p / "r"), AttachError, "cannot watch an empty list"),
        (lambda p: fp8debug.watch(Loop(), p / "r"), AttachError, "; its attribute model is one: watch(trainer.model, ...)"),
        (lambda p: fp8debug.watch(net(), unwritable(p)), RecordError, "cannot write to"),
        (lambda p: fp8debug.watch(net(), p / "r", every=0), UsageError, "every and shadow_rows must be at least 1"),
        (lambda p: fp8debug.watch(net(), p / "r", shadow=cast(Any, "half")), UsageError, "shadow must be 'sample' or 'full'"),
        (lambda p: fp8debug.watch(net(), p / "r", what_if=("blok",)), UsageError, "unknown recipe 'blok'"),
        (lambda p: fp8debug.watch(net(), p / "r", include=("nope",)), AttachError, "none of 7 Linear modules is left to watch"),
        (lambda p: fp8debug.watch(net(), p / "r", dump="a:b"), UsageError, "unknown gemm of dump 'a:b' 'b'"),
        (lambda p: fp8debug.watch(net(), p / "r", dump="hed"), UsageError, "dump 'hed' matches nothing: did you mean 'head'?"),
        (
            lambda p: fp8debug.watch(net(), p / "r", dump=cast(Any, None)),
            UsageError,
            "expected a name or a list of names, got None",
        ),
        (lambda p: fp8debug.watch(net(), p / "r", dump_steps=0), UsageError, "dump_steps must be a whole number of at least 1"),
        (lambda p: fp8debug.watch(net(), cast(Any, None)), UsageError, "expected the path of a run's folder, got None"),
        (
            lambda p: fp8debug.watch(net(), p / "r", optimizer=cast(Any, 1)),
            UsageError,
            "must be a torch.optim.Optimizer, got int",
        ),
        (lambda p: fp8debug.watch(net(), p / "r", resume_from=-1), UsageError, "resume_from is the number of the first step"),
    ],
)
def test_mistakes_are_said_at_watch(call, error, message, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=re.escape(message)) as raised:
        call(tmp_path)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "r" / "manifest.json").exists()


def test_a_folder_with_a_run_and_a_model_with_a_watch_are_refused(tmp_path: Path) -> None:
    model = net()
    record(tmp_path / "run", model)
    with pytest.raises(RecordError, match=r"already holds a run; choose another folder or delete it"):
        fp8debug.watch(model, tmp_path / "run")
    with fp8debug.watch(model, tmp_path / "one"), pytest.raises(AttachError, match=r"blocks.0.gate is watched already"):
        fp8debug.watch(model, tmp_path / "two")
    assert not (tmp_path / "two").exists()  # and nothing is left of the attempt
    record(tmp_path / "two", model)  # closed: free again


def test_gradient_checkpointing_is_counted_once(tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    for number, reentrant in enumerate((True, False)):
        model = net()
        with fp8debug.watch(model, tmp_path / f"run{number}") as watch:
            x = torch.randn(8, 64, requires_grad=True)
            hidden = checkpoint(model.blocks[0], x, use_reentrant=reentrant)
            model.head(hidden).sum().backward()
            watch.step()
        run = fp8debug.Run(tmp_path / f"run{number}")
        found = rows(run, "module = 'blocks.0.up' AND actual AND reference = 'operand'")
        assert {(r["gemm"], r["tensor"]): r["num_tensors"] for r in found} == {
            s: 1 for s in NINE if s[1] not in ("output", "grad_input", "grad_weight")
        }
