"""A wrong argument of a Python call is one line that says what was expected; never a traceback from inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.store.read.run import parse_steps
from fp8debug.tools.calibration import calibrate as typed_calibrate
from fp8debug.tools.replay import replay as typed_replay
from fp8debug.tools.speed import measure_shapes as typed_measure_shapes
from tests.recording.models import net, record

ANY: Any = fp8debug
calibrate: Any = typed_calibrate
replay: Any = typed_replay
measure_shapes: Any = typed_measure_shapes
QUANTIZED = fp8debug.Quantized(torch.ones(2).to(torch.float8_e4m3fn), torch.ones(1, 1))


def model() -> nn.Module:
    return fp8debug.convert(nn.Sequential(nn.Linear(16, 16)), "blockwise")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ANY.measure([1.0], ANY.Cast()), "expected a tensor, got list; make one with torch.tensor(...)"),
        (lambda: ANY.measure(torch.ones(2), None), "expected a Cast such as fp8debug.Cast(granularity='1x128'), got None"),
        (lambda: ANY.measure(torch.ones(2), ANY.Cast(), "ab"), "amax_history is a list of numbers, oldest first, got 'ab'"),
        (lambda: ANY.Cast(history=3.5), "history must be a whole number, got 3.5"),
        (lambda: ANY.Cast(margin="a"), "margin must be a whole number, got 'a'"),
        (lambda: ANY.Cast(amax_eps=None), "amax_eps must be a number, got None"),
        (lambda: ANY.Cast(scaling="static", scale_inv="x"), "scale_inv must be a number, got 'x'"),
        (lambda: ANY.Cast(format=3), "format must be one of e4m3fn, e5m2, e4m3fnuz, e5m2fnuz, e2m3fn, e3m2fn, e2m1fn, got 3"),
        (lambda: ANY.get_recipe(None), "recipe must be one of bf16, "),
        (lambda: ANY.convert(None, "blockwise"), "expected an nn.Module to convert, got NoneType"),
        (lambda: ANY.convert(model(), "blockwise", ["a"]), "overrides is a dictionary from FQN globs to recipes, got ['a']"),
        (
            lambda: ANY.convert(model(), "nix.json"),
            "cannot read nix.json: No such file or directory",
        ),
        (
            lambda: ANY.inject(model(), "stale_scale", "0", step=-1),
            "step is the number of the first step at which",
        ),
        (lambda: ANY.inject(model(), "stale_scale", 0), "the name of a fault and the FQN of a module are strings"),
        (lambda: ANY.inject(None, "stale_scale", "0"), "expected a model with Fp8Linear modules, got NoneType"),
        (lambda: ANY.quantize([1.0], ANY.Cast()), "expected a tensor, got list; make one with torch.tensor(...)"),
        (
            lambda: ANY.quantize(torch.ones(2), "rowwise"),
            "expected a Cast such as fp8debug.Cast(granularity='1x128'), got 'rowwise'",
        ),
        (lambda: ANY.quantize(torch.eye(4).to_sparse(), ANY.Cast()), "expected a dense tensor, got sparse_coo"),
        (lambda: ANY.dequantize(torch.ones(2), ANY.Cast(), torch.float32), "expected a Quantized(data, scale_inv), got Tensor"),
        (
            lambda: ANY.dequantize(QUANTIZED, ANY.Cast(), "float32"),
            "dtype must be a torch.dtype such as torch.float32, got 'float32'",
        ),
        (lambda: ANY.dequantize(QUANTIZED, None), "expected a Cast such as"),
        (lambda: ANY.Run(None), "expected the path of a run's folder, got None"),
        (lambda: ANY.triage(None), "expected a run, its folder, or the folders of its parts, got NoneType"),
        (lambda: ANY.triage([], select=101), "rules are selected by codes or names, such as ('F10', 'wrong-scale'); got 101"),
        (lambda: ANY.triage([], thresholds=[1]), 'thresholds are given as {"F101": {"max_rate": 0.02}}, got [1]'),
        (lambda: ANY.recommend(None, []), "expected the path of a run's folder, got None"),
        (lambda: ANY.recommend("run", "F101"), "findings are what fp8debug.triage(run) returns, got str"),
        (lambda: ANY.recommend("run", None), "findings are what fp8debug.triage(run) returns, got NoneType"),
        (lambda: ANY.recommend("run", [], budget=True), "expected a share such as 10% or 0.1, got True"),
        (lambda: ANY.apply(None, []), "expected a model with Fp8Linear modules, got NoneType"),
        (lambda: ANY.apply(model(), None), "expected a fallback list: what recommend() returns, or a JSON object"),
        (lambda: ANY.apply(model(), ["0"]), "not an entry of a fallback list: 0; expected one such as"),
        (lambda: ANY.apply(model(), "[" * 9999), "cannot read fallbacks from"),
        (lambda: ANY.apply(model(), '[{"module": "0", "cost": "x"}]'), "not an entry of a fallback list: {'module': '0', "),
        (lambda: ANY.apply(model(), [], optimizer="adam"), "optimizer must be a torch.optim.Optimizer, got str"),
        (lambda: ANY.Fallback(module=None, gemms=("fprop",)), "a fallback needs the name of a module, gemms, and a Cast or None"),
        (lambda: ANY.Fallback(module="a", gemms=("fprop",), cast="mxfp8"), "a fallback needs the name of a module, gemms"),
        (lambda: ANY.Guard(after=True), "a guard needs after >= 1"),
        (lambda: ANY.Guard(budget="10%%"), "budget of a guard is a share such as 10% or 0.1, got '10%%'"),
        (lambda: calibrate("run", percentile="99"), "percentile must be a number, got '99'"),
        (lambda: calibrate("run", margin=None), "margin must be a number, got None"),
        (lambda: replay(None), "expected a dump's file, got None"),
        (lambda: ANY.Cast(history=10**30), "history holds 1 to 1048576 amaxes, got 1000000"),
        (
            lambda: ANY.Recipe(None, {}),
            "a recipe is a name, casts {(gemm, tensor): Cast or None} and a tuple of GEMMs; got Recipe(",
        ),
        (
            lambda: ANY.Recipe("x", {"fprop": None, 1: None}),
            "recipe 'x' needs a cast or None for each of the six operands; check 'fprop'",
        ),
        (lambda: ANY.get_recipe("rowwise").replace(fast_accum=1), "fast_accum is True, False, or None for no change, got 1"),
        (lambda: ANY.quantize(torch.ones(2), ANY.Cast(), 0.5), "scale_inv is a tensor with one number, got 0.5"),
        (lambda: ANY.dequantize(ANY.Quantized([1], None), ANY.Cast()), "data and scale_inv are tensors, got list and NoneType"),
        (
            lambda: ANY.dequantize(QUANTIZED, ANY.Cast(granularity="128x1")),
            "data [2] under e4m3fn 128x1 current has scale_inv [1, 2], got [1, 1]",
        ),
        (
            lambda: ANY.convert(model(), "blockwise", {None: None}),
            "overrides is a dictionary from FQN globs to recipes, got {None",
        ),
        (lambda: ANY.inject(model(), "stale_scale", "0", ratio=0), "ratio of stale_scale is a positive number such as 64, got 0"),
        (
            lambda: ANY.inject(model(), "stale_scale", "0", ratio="2"),
            "ratio of stale_scale is a positive number such as 64, got '2'",
        ),
        (lambda: ANY.inject(model(), "zero_tile", "0", rows=0.5), "rows of zero_tile is a whole number of at least 1, such as 1"),
        (
            lambda: ANY.inject(model(), "padding_rows", "0", log2_factor=1e9),
            "log2_factor of padding_rows is a power of two that FP32 holds, at most 127, got 1000000000.0",
        ),
        (
            lambda: ANY.inject(model(), "rank_scale", "0", rank=-1),
            "rank of rank_scale is a whole number of at least 0, such as 1",
        ),
        (
            lambda: ANY.inject(model(), "wrong_scale", "0", tensor="weights"),
            "unknown tensor of wrong_scale 'weights': did you mean",
        ),
        (lambda: ANY.Run("a\0b"), "expected the path of a run's folder, got 'a\\x00b'"),
        (lambda: ANY.watch(model(), ""), "expected the path of a run's folder, got ''"),
        (lambda: ANY.watch(model(), "run", include=[1]), "expected a name or a list of names, got [1]"),
        (lambda: ANY.watch(model(), "run", check_finite="yes"), "check_finite must be True, False or None, got 'yes'"),
        (lambda: ANY.triage([], progress=3), "progress is a function of (done, all, code), got 3"),
        (lambda: measure_shapes([], progress=3), "progress is a function of (done, all, shape), got 3"),
        (lambda: ANY.recommend("run", [], fill="yes"), "fill is True or False, got 'yes'"),
        (lambda: ANY.Fallback(module="a", gemms="fprop", cost="1"), "cost of a fallback is a number of at least 0; 'a' has '1'"),
        (lambda: ANY.Fallback(module="a", gemms="fprop", reasons=3), "reasons of a fallback are codes of findings; 'a' has 3"),
        (
            lambda: ANY.Guard(budget=torch.ones(2, 2)),
            "budget of a guard is a share such as 10% or 0.1, got tensor([[1., 1.], [1., 1.]])",
        ),
        (lambda: parse_steps("3:1"), "the range of steps '3:1' is empty"),
        (lambda: parse_steps((3, 3)), "the range of steps (3, 3) is empty"),
    ],
)
def test_a_mistake_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_what_a_run_is_asked_is_looked_at(tmp_path: Path) -> None:
    run: Any = record(tmp_path / "run", net(), steps=1)
    for call, message in (
        (lambda: run.sql(None), "a query is one SELECT as text, got None"),
        (lambda: run.table(columns=[1]), "columns is a list of names, got [1]"),
        (lambda: run.table(module=3), "module is a glob over module names, got 3"),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert str(raised.value) == message


def test_a_name_that_looks_like_a_glob_stands_for_itself(tmp_path: Path) -> None:
    model = fp8debug.convert(nn.Sequential(nn.ModuleDict({"w[0]": nn.Linear(16, 16), "w0": nn.Linear(16, 16)})), "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        x = torch.randn(4, 16)
        for module in model[0].values():  # type: ignore[index]  # a Sequential
            x = module(x)
        x.sum().backward()
        watch.step(loss=1.0)
    run = fp8debug.Run(tmp_path / "run")
    for glob, name in (("0.w[0]", "0.w[0]"), ("0.w0", "0.w0"), ("0.w[[]*", "0.w[0]")):
        assert run.table(["module"], module=glob).column("module").unique().to_pylist() == [name]


def test_a_message_is_cut_in_its_middle() -> None:
    with pytest.raises(UsageError) as raised:
        ANY.convert(model(), "blockwise", "x" * 5000 + "\nend")
    assert str(raised.value).startswith("overrides is a dictionary") and str(raised.value).endswith("nend'")
    assert len(str(raised.value)) < 1000


def test_a_path_that_no_file_system_takes() -> None:
    with pytest.raises(fp8debug.Fp8DebugError, match="cannot be read: File name too long"):
        fp8debug.Run("a" * 5000)


def test_a_step_after_close(tmp_path: Path) -> None:
    watch = fp8debug.watch(model(), tmp_path / "run")
    watch.close()
    with pytest.raises(UsageError, match=r"is closed; no step can be recorded after close\(\)$"):
        watch.step(loss=1.0)
