"""Too little memory for a sample, no Triton, an old GPU: training goes on, and what is lost or slow is said with its site."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fp8debug
from fp8debug import Fp8Linear
from fp8debug.kernels import dispatch
from fp8debug.observer import probe
from fp8debug.observer.table import Snapshot, Table
from fp8debug.types import Gemm
from tests.recording.models import net, train

MODULE = "blocks.1.down"


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("where", ["fprop", "dgrad"])
def test_a_sample_without_memory_ends_that_sample_alone(
    where: str, error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(net(), 6)
    short_at, result = {2, 3}, probe.Probe._result

    def hungry(self: probe.Probe, which: Gemm, *operands: object, **options: object) -> object:
        if self.module == MODULE and which.value == where and self.observer.step in short_at:
            raise error("CUDA out of memory. Tried to allocate 20.00 GiB")
        return result(self, which, *operands, **options)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(probe.Probe, "_result", hungry)
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        losses = train(model, 6, after=lambda _, loss: watch.step(loss=loss))
    assert losses == expected
    run = fp8debug.Run(tmp_path / "run")
    events = run.sql("SELECT step, kind, module, message FROM events ORDER BY step").to_pylist()
    assert [(e["step"], e["kind"], e["module"]) for e in events] == [(2, "skipped", MODULE), (3, "skipped", MODULE)]
    said = "blocks.1.down is not recorded in full at step 2: out of memory in a sample; training goes on"
    assert events[0]["message"] == said
    assert [line for line in capsys.readouterr().err.splitlines() if "memory" in line] == [f"fp8debug: {said}"], "once"
    query = "SELECT DISTINCT step FROM sites WHERE module = ? AND tensor = 'grad_weight' ORDER BY step"
    steps = {module: [r["step"] for r in run.sql(query, [module]).to_pylist()] for module in (MODULE, "head")}
    assert steps == {MODULE: [0, 1, 4, 5], "head": [0, 1, 2, 3, 4, 5]}, "watched again from the next step on"


DEVICES = [pytest.param("cuda", marks=pytest.mark.gpu), "cpu"]
WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch, fp8debug
torch.manual_seed(0)
model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(128, 256), torch.nn.Linear(256, 64)).to(sys.argv[1]), "blockwise")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(96, 128).to(sys.argv[1])
with fp8debug.watch(model, sys.argv[2], every=1) as watch:
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        watch.step(loss=loss)
        print(loss.item())
"""


@pytest.mark.parametrize("device", DEVICES)
def test_without_triton_everything_works_by_torch_ops(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TRITON, device, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second, third = map(float, done.stdout.split())
    assert first > second > third
    assert len(list((tmp_path / "run").glob("rank=*/stats/part-*.parquet"))) == 1
    planned, *said = [line for line in done.stderr.splitlines() if line.startswith("fp8debug: ")]
    assert planned.startswith("fp8debug: will record ")
    if device == "cpu":
        assert said == []
    else:
        assert any(
            line.startswith("fp8debug: 0 fprop of (e4m3fn 1x128 current) by (e4m3fn 128x128 current) runs in plain torch ops,")
            and "Triton cannot be imported" in line
            for line in said
        )
        assert any(line.startswith("fp8debug: 0 fprop input float32 to (e4m3fn 1x128 current)") for line in said)
        assert len(said) == len(set(said)) < 16


@pytest.mark.gpu
def test_an_older_gpu_runs_in_torch_ops_and_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ampere has neither FP8 units nor Triton's FP8 types."""
    monkeypatch.setattr(dispatch, "_capability", lambda index: (8, 0))
    monkeypatch.setattr(dispatch, "_said", set())
    model = fp8debug.convert(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(2))), "tensorwise_current")
    x = torch.randn(32, 64)
    expected = model(x)
    assert (model.cuda()(x.cuda()).cpu() - expected).abs().max() < 1e-3
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "fp8debug: 0 fprop input float32 to (e4m3fn tensorwise current) runs in plain torch ops, slowly:"
        " the GPU is older than Ada and has no FP8",
        "fp8debug: 0 fprop of (e4m3fn tensorwise current) by (e4m3fn tensorwise current) runs in plain torch ops, slowly:"
        " the GPU is older than Hopper",
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "rowwise", "mxfp8"])
def test_odd_shapes_strides_and_dtypes_train_like_the_reference(
    recipe: str, device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    for m, k, n, dtype in ((1, 7, 3, torch.float32), (33, 130, 17, torch.float16), (5, 257, 129, torch.float64)):
        generator = torch.Generator().manual_seed(m)
        found = []
        x, gradient = torch.randn(k, m, generator=generator), torch.randn(n, m, generator=generator)
        weight = torch.randn(n, k, generator=generator) / k**0.5
        for where in ("cpu", device):
            layer = Fp8Linear(k, n, bias=False, recipe=recipe, dtype=dtype)
            layer.weight.data.copy_(weight)
            layer.to(where)
            input = x.to(dtype).to(where).t().requires_grad_()  # rows are not contiguous
            layer(input).backward(gradient.to(dtype).to(where).t())
            assert layer.weight.grad is not None and input.grad is not None
            found.append([t.double().cpu() for t in (input.grad, layer.weight.grad)])
        for wanted, got in zip(*found, strict=True):
            assert (got - wanted).norm() <= 2e-3 * wanted.norm(), (recipe, dtype)
    said = capsys.readouterr().err.splitlines()
    assert (device == "cpu") == (said == []), said
    assert len(said) == len(set(said)) and all(line.startswith("fp8debug: Fp8Linear ") for line in said)


def test_a_warning_names_the_first_site_that_met_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    for module in ("blocks.0.up", "blocks.1.up"):
        dispatch._say("a reason of this test", (module, "fprop", "input"))
    dispatch._say("another reason of this test")
    assert capsys.readouterr().err.splitlines() == [
        "fp8debug: blocks.0.up fprop input a reason of this test",
        "fp8debug: another reason of this test",
    ]


def test_a_layer_knows_the_name_that_convert_saw() -> None:
    model = net("blockwise", {"head": None})
    assert {name: m.fqn for name, m in model.named_modules() if isinstance(m, Fp8Linear)} == {
        name: name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and name != "head"
    }
    assert Fp8Linear(8, 8).fqn == "Fp8Linear"


def test_a_table_that_cannot_be_joined_loses_its_step_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(net(), 4)
    snapshot, calls = Table.snapshot, []

    def hungry(self: Table) -> Snapshot:
        calls.append(self)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return snapshot(self)

    monkeypatch.setattr(Table, "snapshot", hungry)
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        assert train(model, 4, after=lambda _, loss: watch.step(loss=loss)) == expected
    run = fp8debug.Run(tmp_path / "run")
    assert [r["step"] for r in run.sql("SELECT DISTINCT step FROM sites ORDER BY step").to_pylist()] == [0, 2, 3]
    assert [r["step"] for r in run.sql("SELECT step FROM steps ORDER BY step").to_pylist()] == [0, 1, 2, 3]
    events = run.sql("SELECT step, module, message FROM events").to_pylist()
    assert {e["step"] for e in events} == {1} and len(events) == 7
    assert "head is not recorded at step 1: out of memory; training goes on" in {e["message"] for e in events}
