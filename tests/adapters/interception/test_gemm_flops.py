"""Coverage is of all GEMM FLOPs: what is multiplied outside the Linears is counted, named, and in nobody's way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8debug
from fp8debug_cli.coverage import command
from fp8debug_cli.triage import command as triage
from tests.adapters.linears import multiply
from tests.training import losses_of, watched

E4 = torch.float8_e4m3fn


class Conv1D(nn.Module):
    """GPT-2's: a Linear with its weight the other way round."""

    def __init__(self, n_out: int, n_in: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(n_in, n_out) * 0.1), nn.Parameter(torch.zeros(n_out))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 32, 32) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("tk,ekn->tn", x, self.w) + torch.baddbmm(torch.zeros(1), x[None].expand(4, -1, -1), self.w).sum(0)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(1, -1, 2, 16).transpose(1, 2)
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
            return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(-1, 32)


class Head(torch.autograd.Function):
    """An FP8 GEMM whose gradient is none of this file's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight, (E4, E4), False).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class ScaledHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 48) * 0.1)  # [in, out]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Head.apply(x, self.weight)
        return out


class Net(nn.Module):
    """All of it once, 32 wide, and a head whose weight is multiplied by in chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.conv, self.experts, self.attention = nn.Linear(32, 32), Conv1D(32, 32), Experts(), Attention()
        self.lm_head, self.unused = nn.Linear(32, 64, bias=False), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(self.experts(self.conv(self.up(x))))
        return torch.stack([(chunk @ self.lm_head.weight.t()).logsumexp(-1).mean() for chunk in h.chunk(4)]).mean()


def trained(path: Path | None, model: nn.Module, every: int = 1, steps: int = 3) -> list[float]:
    def loss_of(step: int) -> Tensor:
        loss: Tensor = model(torch.randn(16, 32, generator=torch.Generator().manual_seed(step))).square().mean()
        return loss

    with watched(model, path, every=every) as watch:
        return losses_of(model, loss_of, steps=steps, watch=watch)


def net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return fp8debug.convert(kind(), "blockwise")


def counted(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(gemm["fqn"], gemm["weight"]): gemm for gemm in fp8debug.Run(path).gemms}


def test_all_gemms_of_a_forward_pass_are_counted_by_module(tmp_path: Path) -> None:
    losses = trained(tmp_path / "run", net())
    assert losses == trained(None, net())
    gemms = counted(tmp_path / "run")
    m, k = 16, 32
    flops = {place: gemm["flops"] for place, gemm in gemms.items()}
    assert flops == {
        ("up", ""): 2 * m * k * k,
        ("conv", ""): 2 * m * k * k,
        ("experts", ""): flops["experts", ""],
        ("attention", ""): 2 * 2 * m * m * k,
        ("Net", "lm_head.weight"): 2 * m * k * 64,
    }
    assert flops["experts", ""] >= 2 * 4 * m * k * k  # how einsum multiplies is torch's affair
    assert [g["fqn"] for g in gemms.values() if g["fp8"]] == ["up"]
    assert gemms["conv", ""]["precision"] == "float32" and gemms["conv", ""]["ops"] == ["addmm"]


def test_coverage_names_what_is_behind_the_rest(tmp_path: Path) -> None:
    trained(tmp_path / "run", net())
    table = CliRunner().invoke(command, [str(tmp_path / "run")]).output
    gemms = counted(tmp_path / "run")
    share = 100 * gemms["up", ""]["flops"] / sum(gemm["flops"] for gemm in gemms.values())
    head, outside, *_ = table.splitlines()
    assert head == f"run: 1 of 4 Linears in FP8, {share:.1f} % of the FLOPs of all GEMMs"
    assert (
        outside.startswith("outside these Linears (attention, matmuls of other modules and functions): Net ")
        and "Conv1D" in outside
        and "Attention" in outside
    )
    modules = {module["fqn"]: module for module in fp8debug.Run(tmp_path / "run").modules}
    assert modules["up"]["fp8"] and modules["up"]["called"]
    assert not modules["lm_head"]["fp8"] and modules["lm_head"]["called"] is False
    assert modules["lm_head"]["reason"] == ("never called in a sampled step: Net multiplies by its weight itself, in float32")
    assert modules["unused"]["reason"].startswith("never called in a sampled step: what multiplies by its weight elsewhere")


def test_a_head_that_runs_elsewhere_is_a_gap_and_one_that_computes_nothing_is_none(tmp_path: Path) -> None:
    trained(tmp_path / "run", net())
    found = {f.module: f for f in fp8debug.triage(fp8debug.Run(tmp_path / "run"), select=("F110",))}
    assert set(found) == {"lm_head"} and not found["lm_head"].also


def test_only_the_first_sampled_step_is_counted(tmp_path: Path) -> None:
    trained(tmp_path / "one", net(), steps=1)
    trained(tmp_path / "three", net(), every=1, steps=3)
    assert counted(tmp_path / "one") == counted(tmp_path / "three")


def test_fp8_gemms_of_a_module_of_any_class_are_listed(tmp_path: Path, capsys: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), ScaledHead())
    losses = trained(tmp_path / "run", model)
    torch.manual_seed(0)
    assert losses == trained(None, nn.Sequential(nn.Linear(32, 32), ScaledHead()))
    modules = {module["fqn"]: module for module in fp8debug.Run(tmp_path / "run").modules}
    assert modules["1"]["fp8"] and modules["1"]["observed"] and modules["1"]["kind"] == "ScaledHead"
    assert "in coverage alone" not in capsys.readouterr().err
    said = CliRunner().invoke(triage, [str(tmp_path / "run")]).output
    assert "no operand ran in FP8" not in said and "which is not recorded" not in said


def test_fp8_gemms_without_a_parameter_of_the_model_are_listed(tmp_path: Path, capsys: Any) -> None:
    class Detached(ScaledHead):
        def __init__(self) -> None:
            super().__init__()
            self.kept = (self.weight,)
            del self._parameters["weight"]

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = Head.apply(x, self.kept[0])
            return out

    model = nn.Sequential(nn.Linear(32, 32), Detached())
    trained(tmp_path / "run", model)
    modules = {module["fqn"]: module for module in fp8debug.Run(tmp_path / "run").modules}
    assert modules["1"]["fp8"] and not modules["1"]["observed"] and modules["1"]["kind"] == "Detached"
    expected = "1 is in coverage alone: FP8 GEMMs run in it (_scaled_mm) and are not recorded: its weight does not lead to"
    assert capsys.readouterr().err.count(expected) == 1
    said = CliRunner().invoke(triage, [str(tmp_path / "run")]).output
    assert "no operand ran in FP8" not in said and "FP8 ran in 1, which is not recorded" in said


def test_a_forward_that_was_replaced_after_conversion_does_not_run_in_fp8(tmp_path: Path) -> None:
    model: Any = fp8debug.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "blockwise")
    model[1].forward = lambda input: nn.functional.linear(input, model[1].weight, model[1].bias)
    trained(tmp_path / "run", model)
    first, second = fp8debug.Run(tmp_path / "run").modules
    assert first["fp8"] and not second["fp8"] and second["reason"].startswith("its forward was replaced on the instance")
    head = CliRunner().invoke(command, [str(tmp_path / "run")]).output.splitlines()[0]
    assert head == "run: 1 of 2 Linears in FP8, 50.0 % of the FLOPs of all GEMMs"


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(3, 5, 3, padding=1), nn.ConvTranspose2d(3, 5, 2, stride=2)], ids=lambda m: type(m).__name__
)
def test_convolutions_are_counted(tmp_path: Path, layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(4))
    model(torch.randn(2, 3, 8, 8))
    with fp8debug.watch(model, tmp_path / "run") as watch:
        loss = model(torch.randn(2, 3, 8, 8)).sum()
        loss.backward()
        watch.step(loss=loss)
    weight: Any = layer.weight
    assert counted(tmp_path / "run")["0", ""]["flops"] == 2 * 2 * 64 * weight.numel()
