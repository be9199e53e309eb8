"""FP8 in compiled modules of no Linear's name: recorded as in eager code, or named as what nobody looked at."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.rules.engine.triage import triage
from fp8debug.types import NOT_REPEATED_CODE
from tests.adapters.linears import sites
from tests.adapters.projections import PRODUCTS, Projection
from tests.adapters.watching.test_watch import NINE
from tests.conditions.compiled import COMPILES
from tests.conditions.test_compiled_linear import assert_same_rows, rows
from tests.conditions.test_compiled_regions import BLOCKS, WIDTH, Block, Net, assert_same, train
from tests.shortened import shortened

pytestmark = COMPILES
NAMES = {f"blocks.{i}.{name}" for i in range(BLOCKS) for name in ("up", "down")}


def net(product: str) -> Net:
    torch.manual_seed(0)
    return Net(partial(Projection, product=product), is_checkpointed=False).bfloat16()


def trained(model: nn.Module, path: Path | None = None, steps: int = 4, **options: Any) -> list[float]:
    """Return the losses."""
    watch = fp8debug.watch(model, path, every=2, what_if=(), **options) if path is not None else None
    losses = []
    for step in range(steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.01)
                    parameter.grad = None
        if watch is not None:
            watch.step(loss=loss)
    if watch is not None:
        watch.close()
    return losses


def classified(run: fp8debug.Run) -> Mapping[str, Any]:
    """Return the class of a run."""
    found = triage(run).classification
    assert found is not None
    return found


@pytest.mark.parametrize("whole", ["", "wrapped"], ids=["blocks", "model"])
def test_an_op_that_compiles_what_it_runs_is_recorded_within_compiled_code(whole: str, tmp_path: Path) -> None:
    assert_same(train("compiled op", tmp_path / "run", whole=whole), train("compiled op", whole=whole))
    train("op", tmp_path / "eager", backend=None)
    assert_same_rows(tmp_path / "run", tmp_path / "eager")
    run = fp8debug.Run(tmp_path / "run")
    assert {m["fqn"] for m in run.modules if m["fp8"] and m["observed"] and m["kind"] == "Projection"} == NAMES


@pytest.mark.parametrize("whole", [True, False], ids=["model", "blocks"])
@pytest.mark.parametrize("product", shortened(PRODUCTS, {"function", "compiled op"}))
def test_samples_that_run_without_torch_compile_are_those_of_eager_code(product: str, whole: bool, tmp_path: Path) -> None:
    model = net(product)
    for region in [model] if whole else model.blocks:
        region.compile(backend="aot_eager")
    losses = trained(model, tmp_path / "run", compiled="eager")
    assert losses == trained(net("function"), tmp_path / "eager")
    assert_same_rows(tmp_path / "run", tmp_path / "eager")
    assert sites(fp8debug.Run(tmp_path / "run"), "blocks.1.up") == NINE


def test_an_op_that_compiles_what_it_runs_is_named_in_eager_code(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert trained(net("compiled op"), tmp_path / "run") == trained(net("compiled op"))
    assert "run sampled steps without torch.compile to record them" in capfd.readouterr().err
    run = fp8debug.Run(tmp_path / "run")
    assert rows(tmp_path / "run") == [] and {m["fqn"] for m in run.modules if m["fp8"]} == NAMES
    assert "FP8 ran in blocks.0.up and 7 more, which is not recorded" in classified(run)["what"]


class Broken(Block):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def test_a_run_whose_compiled_code_is_not_recorded_is_not_said_to_have_no_fp8(tmp_path: Path) -> None:
    model = nn.Sequential(Broken(Projection), nn.Linear(WIDTH, WIDTH, bias=False)).bfloat16()
    model.compile(backend="aot_eager")
    trained(model, tmp_path / "run")
    run = fp8debug.Run(tmp_path / "run")
    events = run.sql("SELECT module, code FROM events WHERE kind = 'skipped' AND code IS NOT NULL").to_pylist()
    assert events == [{"module": "Sequential", "code": NOT_REPEATED_CODE}]
    why = "Sequential ran in compiled code, which is not recorded"
    assert classified(run)["cause"] == "not-judged" and f"no cast was judged: {why}" in classified(run)["what"]
    assert ("F101", f"no FP8 operand was recorded: the run has what-if rows only, and {why}") in triage(run).skipped


def test_a_run_without_any_row_is_not_said_to_have_no_fp8(tmp_path: Path) -> None:
    model = net("function")
    step = torch.compile(lambda x: model(x), backend="aot_eager")
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        for _ in range(2):
            step(torch.randn(16, WIDTH).bfloat16()).float().square().mean().backward()
            watch.step(loss=1.0)
    assert "no cast was judged: nothing was recorded" in classified(fp8debug.Run(tmp_path / "run"))["what"]


def test_compiled_modules_with_fp8_in_them_take_turns(tmp_path: Path) -> None:
    model = net("function")
    for block in model.blocks:
        block.compile(backend="aot_eager")
    losses = trained(model, tmp_path / "run", steps=9, turns=2)
    alone = net("function")
    for block in alone.blocks:
        block.compile(backend="aot_eager")
    assert losses == trained(alone, steps=9)
    by_step: dict[int, set[str]] = {}
    for row in rows(tmp_path / "run"):
        by_step.setdefault(row["step"], set()).add(row["module"].split(".")[1])
    even, odd = {"0", "2"}, {"1", "3"}
    assert by_step == {0: even | odd, 2: odd, 4: even, 6: odd, 8: even}


def test_a_compiled_module_that_multiplies_by_none_of_its_matrices_is_repeated_in_one_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(16, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            if not torch.compiler.is_compiling():
                print("repeated")
            return x + self.bias

    model = nn.Sequential(Table(), Block(partial(nn.Linear, bias=False))).bfloat16()
    for region in model:
        region.compile(backend="aot_eager", fullgraph=True)
    trained(model, tmp_path / "run", steps=6, compiled="repeat", turns=1)
    assert capfd.readouterr().out == "repeated\n"
    assert {row["step"] for row in rows(tmp_path / "run")} == {0, 2, 4}
