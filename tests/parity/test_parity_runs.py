"""Two recorded runs of the same tokens as paths: scale, weight, cast, precision and the first input that differs."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.errors import RunError
from fp8debug.linear import Fp8Linear
from fp8debug.parity import compare_paths
from fp8debug.parity.measures import Measures
from fp8debug.parity.runs import judge_size
from tests.recording.models import batch, net


def record(model: nn.Module, path: Path, rows: int = 96) -> Path:
    with fp8debug.watch(model, path, every=1, what_if=(), inference=True), torch.no_grad():
        model(batch(0, rows)[0])
    return path


def _linear(model: nn.Module) -> Fp8Linear:
    found = model.get_submodule("blocks.1.up")
    assert isinstance(found, Fp8Linear)
    return found


def _scaled(model: nn.Module) -> None:
    _linear(model).weight.mul_(2)


def _stale(model: nn.Module) -> None:
    weight = _linear(model).weight
    weight.add_(torch.randn_like(weight) * weight.std() * 0.2)


def _cast(model: nn.Module) -> None:
    _linear(model).set_recipe("tensorwise_current")


def _precision(model: nn.Module) -> None:
    _linear(model).set_recipe("bf16")


def _kernel(model: nn.Module) -> None:
    model.get_submodule("blocks.0").register_forward_hook(lambda module, args, out: out * 1.05)


@pytest.mark.parametrize(
    ("spoil", "code", "module"),
    [
        (_scaled, "F302", "blocks.1.up"),
        (_stale, "F301", "blocks.1.up"),
        (_cast, "F303", "blocks.1.up"),
        (_kernel, "F306", "blocks.1.gate"),
    ],
)
def test_a_difference_is_found_by_statistics(spoil: Callable[[nn.Module], None], code: str, module: str, tmp_path: Path) -> None:
    train = record(net(), tmp_path / "train")
    model = net()
    with torch.no_grad():
        spoil(model)
    report = compare_paths(train, record(model, tmp_path / "rollout"))
    assert (report[0].code, report[0].module) == (code, module), report[0].message


def _poisoned(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model.get_submodule("blocks.1").up.weight.fill_(float("nan"))  # type: ignore[operator, union-attr]  # a Linear's
    return model


@pytest.mark.parametrize("paths", [("training",), ("rollout",), ("training", "rollout")])
def test_nan_is_never_the_same(paths: tuple[str, ...], tmp_path: Path) -> None:
    """Statistics of finite elements alone would say that a run of NaN differs by nothing."""
    runs = [record(_poisoned(net()) if path in paths else net(), tmp_path / path) for path in ("training", "rollout")]
    report = compare_paths(*runs)
    assert report.verdict == "error" and (report[0].code, report[0].module, report[0].tensor) == ("F308", "blocks.1.up", "output")
    told = "has NaN or Inf in both paths" if len(paths) == 2 else f"in the {paths[0]} has NaN or Inf, and not in the other path"
    assert told in report[0].message
    assert sum("NaN" in finding.message for finding in report) == 1


def test_a_weight_of_another_size_is_told_in_which_direction(tmp_path: Path) -> None:
    train, model = record(net(), tmp_path / "train"), net()
    with torch.no_grad():
        weight = _linear(model).weight
        weight[weight.abs() == weight.abs().max()] *= 0.75
        weight[:8] *= 1.5
    (finding, *_) = compare_paths(train, record(model, tmp_path / "rollout"))
    assert finding.code == "F301"
    told = r"square is [\d.]+ % larger than training's, its largest magnitude [\d.]+ % (smaller|larger)"
    assert re.search(told, finding.message), finding.message


def test_equal_runs_are_silent_also_a_training_beside_inference(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "train", every=1):
        model(batch(0)[0]).sum().backward()
    report = compare_paths(tmp_path / "train", record(net(), tmp_path / "rollout"))
    assert not report and len(report.modules) == 7


def test_a_module_in_high_precision_in_one_run(tmp_path: Path) -> None:
    model = net()
    _precision(model)
    report = compare_paths(record(net(), tmp_path / "train"), record(model, tmp_path / "rollout"))
    assert [(f.code, f.module) for f in report] == [("F307", "blocks.1.up")]


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    many = r"\d{1,3}(,\d{3})+"
    with pytest.raises(RunError, match=rf" got {many} numbers in .* and {many} in .*: record both on the same tokens"):
        compare_paths(record(net(), tmp_path / "train"), record(net(), tmp_path / "rollout", rows=64))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (0.0, "a: input, weight and casts are the same, and the output's size differs by 0.5"),
        (5e-4, "a: weight and casts are the same, the input's size differs by 0.0005, and the output's size differs by 0.5"),
        (None, "a: weight and casts are the same, the input's size was not recorded, and the output's size differs by 0.5"),
    ],
)
def test_an_input_is_called_the_same_where_it_is(given: float | None, says: str) -> None:
    finding = judge_size(Measures(module="a", theirs="a", kind=""), given, 0.5, before=5e-4, is_behind=True)
    assert finding is not None and finding.message == says
