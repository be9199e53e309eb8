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
from fp8debug.store.run import parse_steps

ANY: Any = fp8debug


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
