"""What coverage says of a model: what ran, how often, what was not seen, what is against common practice, what is outside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fp8debug
from fp8debug.adapters.scaled_mm import ScaledMm
from fp8debug_cli.coverage import command
from tests.adapters.linears import Matmul, ScaledLinear, batch, rows
from tests.adapters.linears import model as scaled


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.weights = nn.Parameter(torch.zeros(4, 32, 48))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.router(x).sum(-1, keepdim=True)
        return out


class Mixed(nn.Module):
    """A convolution, attention, experts, Linears and a head; one Linear is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 1)
        self.attention = nn.MultiheadAttention(64, 2)
        self.up = nn.Linear(64, 32)
        self.moe = Experts()
        self.unused = nn.Linear(32, 32)
        self.embed, self.norm = nn.Linear(32, 32), nn.Linear(32, 32)
        self.lm_head = nn.Linear(32, 48)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(self.embed(self.moe(self.up(x)))))
        return out


def covered(path: Path) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the rows of ``fp8debug coverage`` by module, and what it prints for people."""
    rows = CliRunner().invoke(command, [str(path), "--format", "json"])
    table = CliRunner().invoke(command, [str(path)])
    assert rows.exit_code == table.exit_code == 0, rows.output
    return {row["module"]: row for row in json.loads(rows.output)}, table.output


def test_of_a_mixed_model(tmp_path: Path) -> None:
    net = Mixed()
    fp8debug.convert(net, "blockwise", overrides={"up": None})
    with fp8debug.watch(net, tmp_path / "run", every=1, include=("*", "nothing.*")) as watch:
        for _ in range(2):
            net(torch.randn(8, 64)).sum().backward()
            net(torch.randn(8, 64)).sum().backward()
            watch.step()
    rows, table = covered(tmp_path / "run")
    assert rows["lm_head"]["gemms"] == "2.0/2.0/2.0"
    assert rows["lm_head"]["note"] == "an output head in FP8, against common practice"
    assert rows["embed"]["note"] == "an embedding in FP8, against common practice"
    assert rows["norm"]["note"] == "a normalisation in FP8, against common practice"
    assert rows["moe.router"]["note"] == "a router in FP8, against common practice"
    assert rows["unused"]["reason"].startswith("never called in a sampled step: ") and not rows["unused"]["fp8"]
    assert (rows["up"]["fp8"], rows["up"]["reason"]) == (False, "left in high precision on request")
    assert "include 'nothing.*': 0 modules" in table
    assert "not watched: conv (Conv1d): a convolution: only Linears are watched" in table
    assert "not watched: attention (MultiheadAttention): attention and its fused projections" in table
    assert rows["moe.weights"]["reason"].startswith("no FP8 GEMM observed")


def test_gemms_that_were_not_seen(tmp_path: Path) -> None:
    net = scaled()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        for _ in range(3):
            loss = net(torch.randn(8, 64).bfloat16()).sum()
        loss.backward()
        watch.step()
    rows, _ = covered(tmp_path / "run")
    assert rows["2"]["gemms"] == "3.0/1.0/1.0"
    assert (
        rows["2"]["note"]
        == "2 of 3 fprop without a wgrad: no backward pass followed or the weight was frozen, or it was not seen"
    )
    assert rows["0"]["gemms"] == "3.0/0.0/1.0"  # data want no gradient


def test_forward_passes_without_a_backward_pass(tmp_path: Path) -> None:
    """A discriminator: a rollout, a pass whose input needs no gradient, one with frozen weights, and one of both gradients."""
    net = fp8debug.convert(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)), "blockwise")
    x = torch.randn(128, 64)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        with torch.no_grad():
            net(x)
        net(x)
        net(x).sum().backward()
        net(x.clone().requires_grad_()).sum().backward()
        net.requires_grad_(False)
        net(x.clone().requires_grad_()).sum().backward()
        watch.step()
    rows, _ = covered(tmp_path / "run")
    note = "1 of 4 fprop without a wgrad: no backward pass followed; 1 of 4 fprop without a wgrad: the weight was frozen"
    assert [(rows[name]["gemms"], rows[name]["note"]) for name in ("0", "2")] == [("4.0/2.0/2.0", note), ("4.0/3.0/2.0", note)]


def test_an_input_that_needs_no_gradient(tmp_path: Path) -> None:
    net = fp8debug.convert(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16)), "blockwise")
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(torch.randn(128, 64)).sum().backward()
        net(torch.randn(128, 64, requires_grad=True)).sum().backward()
        watch.step()
    rows, _ = covered(tmp_path / "run")
    assert (rows["0"]["gemms"], rows["2"]["note"]) == ("2.0/1.0/2.0", None)
    assert rows["0"]["note"] == "1 of 2 fprop without a dgrad: the input needed no gradient"


def test_a_foreign_library_is_named(tmp_path: Path) -> None:
    class Foreign(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(16, 16))

    Foreign.__module__ = "transformer_engine.pytorch.module.linear"
    net = nn.Sequential(nn.Linear(16, 16), Foreign())
    with fp8debug.watch(net, tmp_path / "run") as watch:
        net[0](torch.randn(4, 16)).sum().backward()
        watch.step()
    assert (
        "not watched: 1 (Foreign): a module of Transformer Engine, of a kind that no adapter reads"
        in covered(tmp_path / "run")[1]
    )


def test_a_model_whose_forward_nobody_sees_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """model.compile() takes the hooks of the root along; nothing is recorded then, and that is said."""
    net = scaled()
    net.forward = lambda x: net[2].forward(net[0].forward(x))  # type: ignore[method-assign]  # no hooks
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net.forward(torch.randn(8, 64).bfloat16()).sum().backward()
        watch.step(loss=1.0)
    assert "never called in a sampled step, no statistics: 0, 2" in capsys.readouterr().err


def test_a_second_watch_says_what_was_not_called_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = scaled()
    for number, called in enumerate((net, net[0])):
        with fp8debug.watch(net, tmp_path / str(number), every=1) as watch:
            called(torch.randn(8, 64).bfloat16()).sum().backward()
            watch.step(loss=1.0)
        said = "never called in a sampled step, no statistics: 2" in capsys.readouterr().err
        assert said == (number == 1)


def test_a_filter_that_is_a_name_is_of_that_module_alone(tmp_path: Path) -> None:
    def watched(**options: Any) -> set[str]:
        net = nn.ModuleDict({"w[0]": nn.Linear(16, 16), "w0": nn.Linear(16, 16), "w1": nn.Linear(16, 16)})
        with fp8debug.watch(net, tmp_path / str(options), **options) as watch:
            return {m["fqn"] for m in watch.coverage() if m["reason"] != "excluded" and m["reason"] != "not in include"}

    assert watched(include=["w[0]"]) == {"w[0]"}
    assert watched(exclude=["w[0]"]) == {"w0", "w1"}
    assert watched(include=["w[01]"]) == {"w0", "w1"}


@pytest.mark.parametrize("method", ["recipe", "attach"])
def test_a_module_that_an_adapter_fails_at_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str
) -> None:
    """A library whose configuration is not as we know it: said once, and recorded is all the rest."""
    net, own = scaled(), getattr(ScaledMm, method)

    def fails(self: ScaledMm, module: nn.Module, *more: Any) -> Any:
        if module is net[0]:
            raise KeyError("float4")
        return own(self, module, *more)

    monkeypatch.setattr(ScaledMm, method, fails)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        for _ in range(2):
            net(torch.randn(8, 64).bfloat16()).sum().backward()
            watch.step()
    reasons = {"recipe": "its recipe cannot be read: KeyError: 'float4'", "attach": "it cannot be watched: KeyError: 'float4'"}
    said = capsys.readouterr().err
    assert said.count(reasons[method]) == 1
    rows, _ = covered(tmp_path / "run")
    assert rows["0"]["reason"] == reasons[method] and rows["2"]["gemms"] == "1.0/1.0/1.0"
    recorded = fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT module FROM sites ORDER BY module")["module"].to_pylist()
    assert recorded == (["0", "2"] if method == "recipe" else ["2"])


class OfRank(ScaledLinear):
    """Holds its weight as a DTensor, and multiplies by the rank's part of it."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        out: Tensor = Matmul.apply(x.reshape(-1, x.shape[-1]), weight.to_local(), self)
        return out


def test_a_weight_that_is_split_over_ranks_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store: Any = vars(dist)["HashStore"]
    dist.init_process_group("gloo", store=store(), rank=0, world_size=1)
    try:
        torch.manual_seed(0)
        linear = OfRank(64, 96, bias=False).bfloat16()
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
        net = nn.Sequential(linear)
        with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
            net(batch(0)).sum().backward()
            watch.step()
    finally:
        dist.destroy_process_group()
    why = "its weight is a DTensor, and plain tensors in high precision alone are recorded"
    assert f"0 is not recorded in full at step 0: {why}" in capsys.readouterr().err
    assert not rows(fp8debug.Run(tmp_path / "run"))
