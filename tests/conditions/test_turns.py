"""Modules that take turns: a sampled step after the first one records one part of the model, whatever runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8debug
from tests.adapters.linears import ScaledLinear, same
from tests.adapters.watching.test_watch import NINE
from tests.conditions.compiled import COMPILES
from tests.recording import models

WIDTH, LAYERS, TURNS, EVERY, STEPS = 32, 6, 3, 2, 9
#: The layers that each sampled step records: neighbours together.
EXPECTED = {0: {0, 1, 2, 3, 4, 5}, 2: {4, 5}, 4: {2, 3}, 6: {0, 1}, 8: {4, 5}}
pytestmark = COMPILES
KINDS = ["native", "plain", "scaled_mm", "torchao", "compiled"]


class Net(nn.Module):
    def __init__(self, kind: str, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        make = ScaledLinear if kind == "scaled_mm" else nn.Linear
        self.layers = nn.ModuleList(make(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x))
        out: Tensor = self.norm(x)
        return out


def network(kind: str, is_checkpointed: bool = False) -> nn.Module:
    model: nn.Module = Net(kind, is_checkpointed).bfloat16()
    if kind in ("native", "compiled"):
        fp8debug.convert(model, "blockwise")
    if kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    if kind == "compiled":
        torch._dynamo.reset()
        for layer in model.layers:  # type: ignore[union-attr]  # a ModuleList
            layer.compile(backend="aot_eager", fullgraph=True)
    return model


def train(
    kind: str,
    path: Path | None,
    *,
    turns: int | None = TURNS,
    first: int = 0,
    microbatches: int = 1,
    checkpointed: bool = False,
    device: str = "cpu",
) -> list[Any]:
    model = network(kind, checkpointed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = path and fp8debug.watch(model, path, every=EVERY, what_if=(), turns=turns, resume_from=first or None)
    losses = []
    for step in range(first, first + STEPS):
        for part in range(microbatches):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(10 * step + part)).bfloat16().to(device)
            x.requires_grad_()  # so that the first layer has all nine sites
            loss = model(x).float().square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch:
            watch.step(loss=loss)
    if watch:
        watch.close()
    return [losses, [p.detach().clone() for p in model.parameters()]]


def recorded(path: Path) -> dict[int, set[int]]:
    """Return the layers that have rows, by step."""
    found: dict[int, set[int]] = {}
    for row in fp8debug.Run(path).sql("SELECT DISTINCT step, module FROM sites").to_pylist():
        found.setdefault(row["step"], set()).add(int(row["module"].rpartition(".")[2]))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_each_module_is_recorded_in_one_of_so_many_sampled_steps(
    kind: str, checkpointed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if checkpointed and kind == "compiled":
        pytest.skip("compiled layers in checkpoints: test_compiled_linear")
    watched = train(kind, tmp_path / "run", microbatches=2, checkpointed=checkpointed)
    assert same(watched, train(kind, None, microbatches=2, checkpointed=checkpointed))
    assert "not " not in capsys.readouterr().err
    assert recorded(tmp_path / "run") == EXPECTED
    run = fp8debug.Run(tmp_path / "run")
    assert run.manifest["turns"] == TURNS and run.sampled_steps_of("layers.2") == [0, 4]
    assert all(module["observed"] for module in run.modules)
    assert run.sql("SELECT count(*) AS n FROM events WHERE kind = 'skipped'").to_pylist() == [{"n": 0}]
    for table in ("updates", "parameters"):  # of the whole model: once in so many sampled steps
        steps = [row["step"] for row in run.sql(f"SELECT DISTINCT step FROM {table} ORDER BY step").to_pylist()]
        assert steps == [0, 6], table
    later = run.sql("SELECT DISTINCT module, gemm, tensor FROM sites WHERE step > 0").to_pylist()
    assert len(later) == LAYERS * len(NINE)
    query = "SELECT module, min(call_index) AS least, max(call_index) AS most FROM sites GROUP BY 1 ORDER BY 1"
    order = run.sql(query).to_pylist()
    assert [(row["least"], row["most"]) for row in order] == [(at, at) for at in range(LAYERS)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["native", "plain", "scaled_mm", "compiled"])
def test_each_module_is_recorded_in_turn_on_a_gpu(kind: str, tmp_path: Path) -> None:
    watched = train(kind, tmp_path / "run", microbatches=2, device="cuda")
    assert same(watched, train(kind, None, microbatches=2, device="cuda"))
    assert recorded(tmp_path / "run") == EXPECTED


def test_rows_are_those_of_a_run_in_which_all_are_recorded(tmp_path: Path) -> None:
    columns = "step, module, gemm, tensor, cast_name, reference, num_tensors, numel, num_underflow, num_saturated, sum_err2"
    query = f"SELECT {columns} FROM raw ORDER BY 1, 2, 3, 4, 5, 6"
    found = {}
    for turns in (None, TURNS):
        train("native", tmp_path / str(turns), turns=turns)
        found[turns] = fp8debug.Run(tmp_path / str(turns)).sql(query).to_pylist()
    assert found[TURNS] == [row for row in found[None] if int(row["module"][-1]) in EXPECTED[row["step"]]]


def test_a_run_that_goes_on_records_all_at_first_and_keeps_the_order(tmp_path: Path) -> None:
    train("native", tmp_path / "run")
    train("native", tmp_path / "run", first=9)
    later = {step: layers for step, layers in recorded(tmp_path / "run").items() if step >= STEPS}
    assert later == {10: set(range(LAYERS)), 12: {0, 1}, 14: {4, 5}, 16: {2, 3}}


@pytest.mark.parametrize("kind", ["native", "scaled_mm", "compiled"])
def test_modules_that_wait_are_searched_for_nan(kind: str, tmp_path: Path) -> None:
    model = network(kind)
    with fp8debug.watch(model, tmp_path / "run", every=EVERY, what_if=(), turns=TURNS) as watch:
        for step in range(3):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
            if step == 2:  # records layers 4 and 5
                with torch.no_grad():
                    next(model.parameters())[3, 5] = float("nan")
            model(x).float().square().mean().backward()
            watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert recorded(tmp_path / "run")[2] == {4, 5}
    found = run.sql("SELECT step, nonfinite_module, nonfinite_gemm FROM steps WHERE nonfinite_module IS NOT NULL").to_pylist()
    assert found == [{"step": 2, "nonfinite_module": "layers.0", "nonfinite_gemm": "fprop"}]


def test_both_passes_of_a_repetition_are_recorded_whoever_has_the_turn(tmp_path: Path) -> None:
    """A compiled module has a turn of its own."""
    model = network("native")
    with fp8debug.watch(model, tmp_path / "run", every=EVERY, what_if=(), turns=TURNS) as watch:
        for step in range(3):
            probe: Any = model.get_submodule("layers.0").probe
            observer = watch._observer
            assert probe.takes_step is (step == 0)
            with observer.repeating(frozenset(), first=0):
                assert probe.takes_step is (step != 1)
            with observer.repeating(frozenset(), adds={}):
                assert probe.takes_step is (step != 1)
            model(torch.randn(16, WIDTH).bfloat16()).float().square().mean().backward()
            watch.step()


def test_fewer_rows_are_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = []
    for turns in (None, TURNS):
        train("native", tmp_path / str(turns), turns=turns)
        planned.append(fp8debug.Run(tmp_path / str(turns)).manifest["planned"]["rows_per_step"])
    assert planned[0] == TURNS * planned[1]
    assert f"will record {planned[1]} rows" in capsys.readouterr().err


@pytest.mark.parametrize("fault, code", [(None, None), ("zero_tile", "F103"), ("wrong_scale", "F113"), ("stale_weight", "F112")])
def test_faults_are_named_and_sound_runs_are_not(fault: str | None, code: str | None, tmp_path: Path) -> None:
    model = models.net("blockwise", {"head": None})
    if fault is not None:
        fp8debug.inject(model, fault, module="blocks.1.down", step=20)
    with fp8debug.watch(model, tmp_path / "run", every=1, what_if=(), turns=4) as watch:
        models.train(model, 48, after=lambda _, loss: watch.step(loss=loss))
    findings = fp8debug.triage(tmp_path / "run")
    assert [(f.code, f.module) for f in findings[:1]] == ([] if code is None else [(code, "blocks.1.down")])
