"""DeepGEMM's entry points, by a stand-in with their signatures: a Linear over them is recorded like any other."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.kernels.reference import dequantize, quantize
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.adapters.linears import batch, rows, same, sites, train
from tests.adapters.watching.test_watch import NINE

TILE, BLOCK = Cast(granularity="1x128"), Cast(granularity="128x128")


def cast_of(x: Tensor, scale_inv: Tensor) -> Cast:
    return TILE if scale_inv.shape[0] == x.shape[0] else BLOCK


@pytest.fixture
def deep_gemm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A library whose kernels torch does not see: it computes outside the dispatcher's reach."""
    library = ModuleType("deep_gemm")

    def fp8_gemm_nt(a: Any, b: Any, d: Tensor, c: Tensor | None = None, recipe: Any = None, **options: Any) -> None:
        first, second = (dequantize(Quantized(*pair), cast_of(*pair)) for pair in (a, b))
        d.copy_(first @ second.t() if c is None else first @ second.t() + c)

    library.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]  # a made-up module
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    return library


def product(a: Tensor, b: Tensor, b_cast: Cast, add: Tensor | None = None) -> Tensor:
    d = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
    library: Any = sys.modules["deep_gemm"]
    library.fp8_gemm_nt(tuple(quantize(a.contiguous(), TILE)), tuple(quantize(b.contiguous(), b_cast)), d, add)
    return d


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, add: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, BLOCK, add)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return product(grad, weight.t(), BLOCK), product(grad.t(), x.t(), TILE), None


class DeepLinear(nn.Linear):
    add: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Matmul.apply(x.reshape(-1, x.shape[-1]), self.weight, self.add)
        return out.reshape(*x.shape[:-1], -1)


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(DeepLinear(64, 256, bias=False), nn.GELU(), DeepLinear(256, 160, bias=False)).bfloat16()


def test_all_three_gemms_with_their_blocks(tmp_path: Path, deep_gemm: Any) -> None:
    original, expected = deep_gemm.fp8_gemm_nt, train(model())
    net = model()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert deep_gemm.fp8_gemm_nt is not original
        assert same(train(net, after=lambda loss: watch.step(loss=loss)), expected)
    assert deep_gemm.fp8_gemm_nt is original
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "2") == NINE
    names = {(r["gemm"], r["tensor"]): r["cast_name"].split()[1] for r in rows(run, "module = '2' AND reference = 'operand'")}
    assert names == {
        ("fprop", "input"): "1x128",
        ("fprop", "weight"): "128x128",
        ("dgrad", "grad_output"): "1x128",
        ("dgrad", "weight"): "128x128",
        ("wgrad", "grad_output"): "128x1",
        ("wgrad", "input"): "128x1",
    }
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    assert not run.sql("SELECT * FROM events").to_pylist()


def test_a_result_that_is_added_to_is_refused(tmp_path: Path, deep_gemm: Any, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(DeepLinear(64, 256, bias=False).bfloat16())
    net[0].add = torch.ones(48, 256)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(batch(0))
        watch.step()
    assert "fp8_gemm_nt adds to its result, which is not read" in capsys.readouterr().err
