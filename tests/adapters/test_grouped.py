"""Grouped GEMMs of experts: torch's own ops with a kernel for the CPU that these tests bring, as torch has none there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import checkpoint

import fp8debug
from tests.adapters import blocks
from tests.adapters.linears import rows, same, sites
from tests.adapters.watching.test_watch import NINE
from tests.training import losses_and_parameters

E4M3 = torch.float8_e4m3fn
#: wgrad's operands have a scale for each row of each expert, which no cast of ours describes.
SEVEN = NINE - {("wgrad", "grad_output"), ("wgrad", "input")}


def multiply(self: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor) -> Tensor:
    ends, parts, start = offs.tolist(), [], 0
    for e, end in enumerate(ends):
        if mat2.dim() == 3:
            part = (self[start:end].float() * scale_a[start:end, None]) @ (mat2[e].float() * scale_b[e][None])
        else:
            a = self[:, start:end].float() * scale_a.reshape(len(ends), -1)[e][:, None]
            part = a @ (mat2[start:end].float() * scale_b.reshape(len(ends), -1)[e][None])
        parts.append(part.bfloat16())
        start = end
    if mat2.dim() == 2:
        return torch.stack(parts)
    left = torch.full((self.shape[0] - start, mat2.shape[-1]), float("nan"), dtype=torch.bfloat16)
    return torch.cat((*parts, left))


def first_version(self: Tensor, mat2: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Any = None, *_: Any, **__: Any) -> Tensor:
    return multiply(self, mat2, scale_a, scale_b, offs)


def second_version(self: Tensor, mat2: Tensor, a: blocks.Scales, b: blocks.Scales, offs: Any, *_: Any, **__: Any) -> Tensor:
    return multiply(self, mat2, a.values[0], b.values[0], offs)


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm", first_version, "CPU")
    library.impl("_scaled_grouped_mm_v2", blocks.of_two_sides(second_version), "CPU")
    yield
    library._destroy()


def to_fp8(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return data and decode factors, one for each line along ``dim``."""
    scale = 448 / x.float().abs().amax(dim, keepdim=True).clamp(min=1e-12)
    return (x.float() * scale).clamp(-448, 448).to(E4M3), scale.reciprocal()


def grouped(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], offs: Tensor, version: int) -> Tensor:
    if version == 1:
        return torch._scaled_grouped_mm(a[0], b[0], a[1], b[1], offs, out_dtype=torch.bfloat16, use_fast_accum=True)
    newer: Any = functional
    kind = newer.ScalingType.RowWise
    found: Tensor = newer.scaled_grouped_mm(a[0], b[0], a[1], kind, b[1], kind, offs=offs, output_dtype=torch.bfloat16)
    return found


def per_group(x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    """Return data and a decode factor for each column of each group of rows."""
    data, scales, start = torch.zeros_like(x, dtype=E4M3), [], 0
    for end in offs.tolist():
        part, scale = to_fp8(x[start:end], 0) if end > start else (data[:0], torch.ones(1, x.shape[1]))
        data.view(torch.uint8)[start:end] = part.view(torch.uint8)
        scales.append(scale[0])
        start = end
    return data, torch.cat(scales)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_t: Tensor, offs: Tensor, version: int) -> Tensor:
        ctx.save_for_backward(x, weight_t, offs)
        ctx.version = version
        (data, scale), (w, w_scale) = to_fp8(x, 1), to_fp8(weight_t, 1)
        return grouped((data, scale[:, 0]), (w, w_scale[:, 0]), offs, version)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_t, offs = ctx.saved_tensors
        (data, scale), (w, w_scale) = to_fp8(grad, 1), to_fp8(weight_t.transpose(1, 2), 1)
        dgrad = grouped((data, scale[:, 0]), (w, w_scale[:, 0]), offs, ctx.version)
        (g, g_scale), (a, a_scale) = per_group(grad, offs), per_group(x, offs)
        wgrad = grouped((g.t(), g_scale), (a, a_scale), offs, ctx.version)
        return dgrad.nan_to_num(0), wgrad.transpose(1, 2), None, None


class _Unwrap(torch.autograd.Function):
    """What torchao does to a parameter in a wrapper of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Experts(nn.Module):
    """Gated experts over one batch of tokens sorted by expert, as torchtitan has them."""

    def __init__(self, version: int = 1) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(4, *s) * 0.1) for s in ((96, 64), (64, 96), (96, 64)))
        self.version = version

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w1, w2, w3 = (_Unwrap.apply(w.transpose(1, 2)) for w in (self.w1, self.w2, self.w3))
        h = functional.silu(_Grouped.apply(x, w1, offs, self.version))
        h = (h * _Grouped.apply(x, w3, offs, self.version)).nan_to_num(0)
        out: Tensor = _Grouped.apply(h, w2, offs, self.version)
        return out.nan_to_num(0)


class Model(nn.Module):
    def __init__(self, version: int = 1, *, is_checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.experts, self.is_checkpointed = nn.Linear(64, 64), Experts(version), is_checkpointed

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        x = self.inner(x)
        if self.is_checkpointed:
            out: Tensor = checkpoint.checkpoint(self.experts, x, offs, use_reentrant=False)
            return out
        out = self.experts(x, offs)
        return out


def train(net: nn.Module, watch: Any = None, steps: int = 2, starves: int = 99) -> list[Any]:
    """Train; from step ``starves`` on the third expert has no tokens either."""

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        ends = [16, 16, 40 if step < starves else 16, 56]
        offs = torch.tensor(ends, dtype=torch.int32)  # one expert without tokens, eight rows of nobody
        loss: Tensor = net(x, offs).float().square().mean()
        return loss

    return losses_and_parameters(net, loss_of, steps=steps, lr=0.05, watch=watch)


@pytest.mark.parametrize("version", [1, 2] if hasattr(functional, "scaled_grouped_mm") else [1])
def test_each_weight_of_all_experts(tmp_path: Path, version: int, capsys: pytest.CaptureFixture[str]) -> None:
    expected, net = train(Model(version).bfloat16()), Model(version).bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert same(train(net, watch), expected)
    assert "not" not in capsys.readouterr().err.replace("not converted", "")
    run = fp8debug.Run(tmp_path / "run")
    for name in ("w1", "w2", "w3"):
        assert sites(run, f"experts.{name}") == SEVEN
    for row in rows(run, "reference = 'operand'"):
        assert 30 < row["sqnr_db"] < 40 and row["headroom"] == pytest.approx(1, abs=1e-5), row
        assert (
            row["cast_name"]
            == f"e4m3fn {'columnwise' if (row['gemm'], row['tensor']) == ('dgrad', 'weight') else 'rowwise'} current"
        )
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    for row in rows(run, "reference = 'shadow'"):
        assert 26 < row["sqnr_db"] < 36 and row["num_actual_nonfinite"] == 0, row
    (row,) = rows(run, "step = 0 AND module = 'experts.w2' AND gemm = 'fprop' AND tensor = 'output' AND reference = 'shadow'")
    assert row["damage"] > 0
    events = [e["message"] for e in run.sql("SELECT message FROM events").to_pylist()]
    assert [e for e in events if "experts.w1" in e] == ["experts.w1 is recorded; of 4 experts 1 had no tokens at step 0"]
    entry = next(m for m in run.modules if m["fqn"] == "experts.w1")
    assert (entry["kind"], entry["in_features"], entry["out_features"], entry["fp8"]) == ("Experts", 64, 96, True)
    assert entry["fast_accum"] == (["fprop", "dgrad"] if version == 1 else [])


def test_weights_of_one_module_take_turns(tmp_path: Path) -> None:
    expected, net = train(Model().bfloat16(), steps=4), Model().bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=(), turns=3) as watch:
        assert same(train(net, watch, steps=4), expected)
    run = fp8debug.Run(tmp_path / "run")
    for step, module in ((1, "w3"), (2, "w2"), (3, "w1")):
        found = {(row["module"], row["gemm"], row["tensor"]) for row in rows(run, f"step = {step}")}
        assert found == {(f"experts.{module}", *site) for site in SEVEN}


def test_an_expert_that_loses_its_tokens_is_found(tmp_path: Path) -> None:
    net = Model().bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=()) as watch:
        train(net, watch, steps=7, starves=4)
    (finding,) = fp8debug.triage(tmp_path / "run", select=("F116",))
    assert (finding.module, finding.steps) == ("experts.w1", (4, 6))
    assert finding.message.startswith("expert 2 of it had 24 tokens a step and none at 3 sampled steps from step 4 on; 3 others")


def test_sampled_rows_estimate_the_whole(tmp_path: Path) -> None:
    found = {}
    for shadow in ("full", "sample"):
        net = Model().bfloat16()
        with fp8debug.watch(net, tmp_path / shadow, every=1, shadow=shadow, shadow_rows=24) as watch:
            train(net, watch, 1)
        run = fp8debug.Run(tmp_path / shadow)
        where = "module = 'experts.w1' AND reference = 'shadow'"
        found[shadow] = {(r["gemm"], r["tensor"]): (r["numel"], r["sqnr_db"]) for r in rows(run, where)}
    assert found["sample"]["fprop", "output"][0] == 24 * 96 and found["sample"]["wgrad", "grad_weight"][0] == 4 * 96 * 24
    for site, (_, sqnr) in found["full"].items():
        assert abs(sqnr - found["sample"][site][1]) < 1.5


def test_what_is_not_to_be_had_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpointing hides what the functions save; nothing is asked of it, as that would be an error of the training's."""
    expected, net = train(Model(is_checkpointed=True).bfloat16()), Model(is_checkpointed=True).bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        assert same(train(net, watch), expected)
    assert "experts.w1 is not recorded: its GEMMs run under activation checkpointing" in capsys.readouterr().err


def test_experts_in_high_precision_are_in_coverage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Dense(Experts):
        def forward(self, x: Tensor, offs: Tensor) -> Tensor:
            return functional.grouped_mm(x, self.w1.transpose(1, 2), offs=offs)[:, :64]

    net = Model().bfloat16()
    net.experts = Dense().bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        train(net, watch, 1)
    run = fp8debug.Run(tmp_path / "run")
    entry = next(m for m in run.modules if m["fqn"] == "experts.w1")
    assert not entry["fp8"] and not entry["observed"] and entry["reason"].startswith("no FP8 GEMM observed")
    assert "experts.w1" not in capsys.readouterr().err
