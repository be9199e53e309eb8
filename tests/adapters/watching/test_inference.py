"""compare_inference by module: F122 names the module at which training and inference part, and why."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.rules import Finding, Findings, Severity
from tests.recording.models import batch, net

STEPS = 6


def judged(path: Path, model: nn.Module, spoil: Callable[[nn.Module], Any]) -> Findings:
    """Train, and compare with a copy of the model in which something is spoiled."""

    def rollout(x: Tensor) -> Tensor:
        engine = copy.deepcopy(model)
        with torch.no_grad():
            engine = spoil(engine) or engine
            out: Tensor = engine(x)
        return out

    with fp8debug.watch(model, path, every=2) as watch:
        for step in range(STEPS):
            x, classes = batch(step)
            loss = nn.functional.cross_entropy(model(x), classes)
            loss.backward()
            watch.compare_inference(batch(1000)[0], inference=rollout)
            watch.step(loss=loss)
    return fp8debug.triage(path, select=("F122",))


def scaled(name: str, factor: float) -> Callable[[nn.Module], None]:
    def spoil(engine: nn.Module) -> None:
        engine.get_parameter(f"{name}.weight").mul_(factor)

    return spoil


def stale(*names: str) -> Callable[[nn.Module], None]:
    def spoil(engine: nn.Module) -> None:
        for number, name in enumerate(names):
            weight = engine.get_parameter(f"{name}.weight")
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.copy_(noise * weight.std() * 3)

    return spoil


LINEARS = [f"blocks.{i}.{name}" for i in (0, 1) for name in ("gate", "up", "down")] + ["head"]


def test_equal_paths_have_no_finding(tmp_path: Path) -> None:
    assert list(judged(tmp_path / "run", net("blockwise"), lambda engine: None)) == []
    events = fp8debug.Run(tmp_path / "run").sql("SELECT step FROM events WHERE kind = 'inference' ORDER BY step")
    assert events["step"].to_pylist() == list(range(STEPS))


def only(findings: Findings) -> Finding:
    (finding,) = findings
    assert finding.code == "F122"
    return finding


@pytest.mark.parametrize("name", ["blocks.0.up", "blocks.1.down", "head"])
def test_a_stale_weight_is_named(name: str, tmp_path: Path) -> None:
    finding = only(judged(tmp_path / "run", net("blockwise"), stale(name)))
    assert (finding.module, finding.gemm, finding.tensor) == (name, "fprop", "weight")
    assert "its weight is not training's" in finding.message and "synchronize" in finding.cure


@pytest.mark.parametrize(("name", "factor"), [("blocks.1.up", 8.0), ("head", 0.25)])
def test_a_scale_is_named_with_its_factor(name: str, factor: float, tmp_path: Path) -> None:
    finding = only(judged(tmp_path / "run", net("blockwise"), scaled(name, factor)))
    assert (finding.module, finding.tensor) == (name, "weight")
    assert f"its weight is {factor:g} times training's" in finding.message and "scale" in finding.cure


def test_weights_that_nobody_synchronized_are_no_single_module(tmp_path: Path) -> None:
    finding = only(judged(tmp_path / "run", net("blockwise"), stale(*LINEARS)))
    assert finding.module is None
    assert "the weights of 7 of 7 modules differ, first blocks.0.gate: they were not synchronized" in finding.message


@pytest.mark.parametrize(
    ("dtype", "decay", "severity", "words"),
    [
        (torch.float32, 0.9, Severity.INFO, "move with training's from one comparison to the next"),
        (torch.bfloat16, 0.9999, Severity.WARNING, "they stand, as"),
        (torch.float32, 1.0, Severity.WARNING, "they stand, as all of their elements did not move"),
    ],
    ids=["an average", "an average in BF16", "the first step's"],
)
def test_an_average_of_the_weights_that_moves_is_told_from_weights_that_stand(
    dtype: torch.dtype, decay: float, severity: Severity, words: str, tmp_path: Path
) -> None:
    model = net("blockwise")
    averages = {name: p.detach().to(dtype, copy=True) for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

    def rollout(x: Tensor) -> Tensor:
        engine = copy.deepcopy(model)
        engine.load_state_dict(averages, strict=False)
        with torch.no_grad():
            out: Tensor = engine(x)
        return out

    with fp8debug.watch(model, tmp_path / "run", every=4) as watch:
        for step in range(12):
            x, classes = batch(step)
            loss = nn.functional.cross_entropy(model(x), classes)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            for name, p in model.named_parameters():
                averages[name].mul_(decay).add_(p.detach().to(dtype), alpha=1 - decay)
            if step % 4 == 3:
                watch.compare_inference(batch(1000)[0], inference=rollout)
            watch.step(loss=loss)
    finding = only(fp8debug.triage(tmp_path / "run", select=("F122",)))
    assert (finding.severity, finding.module) == (severity, None)
    assert words in finding.message and "weights of" in finding.message


def test_an_engine_of_other_names_is_judged_as_a_whole(tmp_path: Path) -> None:
    model = net("blockwise")
    finding = only(judged(tmp_path / "run", model, lambda engine: nn.Sequential(engine, nn.LayerNorm(16))))
    assert finding.module is None and finding.message.endswith("predict another class)")


def test_what_lies_between_modules_is_told_by_the_first_input_that_differs(tmp_path: Path) -> None:
    def spoil(engine: nn.Module) -> None:
        engine.get_submodule("blocks.1.down").register_forward_pre_hook(lambda module, args: (args[0] * 21.0,))

    finding = only(judged(tmp_path / "run", net("blockwise"), spoil))
    assert (finding.module, finding.gemm, finding.tensor) == ("blocks.1.down", "fprop", "input")
    assert "it is the first whose input differs (by 4e+02 of its square): what differs lies between " in finding.message


@pytest.mark.parametrize("part", ["blocks.1.up", "blocks.1", "head"])
def test_an_engine_may_call_parts_of_its_model_before_the_whole(part: str, tmp_path: Path) -> None:
    """As to calibrate a scale; modules of another model that it calls are no part of the comparison."""
    other, model = nn.Linear(4, 4), net("blockwise")

    def spoil(engine: nn.Module) -> None:
        other(torch.zeros(2, 4))
        called = engine.get_submodule(part)
        width = next(m.in_features for m in called.modules() if isinstance(m, nn.Linear))
        called(torch.randn(8, width, generator=torch.Generator().manual_seed(1)))
        stale("blocks.0.up")(engine)

    finding = only(judged(tmp_path / "run", model, spoil))
    assert (finding.module, finding.tensor) == ("blocks.0.up", "weight") and "its weight is not training's" in finding.message


def test_no_hook_is_left(tmp_path: Path) -> None:
    model = net("blockwise")
    judged(tmp_path / "run", model, lambda engine: None)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not nn.modules.module._global_forward_pre_hooks


class _Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(tokens if mask is None else tokens * mask)
        return out


class _OneMapping(_Keywords):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]  # another call
        out: Tensor = self.head(batch["tokens"])
        return out


@pytest.mark.parametrize("make", [_Keywords, _OneMapping])
def test_a_batch_may_be_a_mapping(make: type[_Keywords], tmp_path: Path) -> None:
    model = fp8debug.convert(make(), "tensorwise_current")
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        watch.compare_inference({"tokens": torch.randn(8, 16)})
        watch.step()
    steps = fp8debug.Run(tmp_path / "run").sql("SELECT inference_kl FROM steps").to_pylist()
    assert steps[0]["inference_kl"] >= 0
