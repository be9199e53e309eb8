"""A wrong argument of a Python call is one line that says what was expected; never a traceback from inside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.calibration import calibrate as typed_calibrate
from fp8debug.errors import UsageError
from fp8debug.replay import replay as typed_replay
from fp8debug.store.run import parse_steps

ANY: Any = fp8debug
calibrate: Any = typed_calibrate
replay: Any = typed_replay
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
        (lambda: ANY.Cast(format=3), "format must be one of e4m3fn, e5m2, got 3"),
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
        (lambda: parse_steps("3:1"), "the range of steps '3:1' is empty"),
        (lambda: parse_steps((3, 3)), "the range of steps (3, 3) is empty"),
    ],
)
def test_a_mistake_is_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError) as raised:
        call()
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_a_step_after_close(tmp_path: Path) -> None:
    watch = fp8debug.watch(model(), tmp_path / "run")
    watch.close()
    with pytest.raises(UsageError, match=r"is closed; no step can be recorded after close\(\)$"):
        watch.step(loss=1.0)
