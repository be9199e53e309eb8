"""Linears in blocks of 16 and 32 elements: torch's ``F.scaled_mm`` in both layouts, torchao's MXFP8Linear and NVFP4Linear."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.adapters.interception.scale_layouts import side_of_blocks, unpacked, unswizzled
from fp8debug.kernels.dispatch import measure
from fp8debug.kernels.reference import hadamard, quantize
from fp8debug.recipes import Cast
from fp8debug.types import CONTRACTS_ROWS, Gemm, TensorRole
from tests.adapters import blocks
from tests.adapters.blocks import MX, NV, BlockLinear, packed, swizzled
from tests.adapters.linears import rows, same, sites
from tests.adapters.watching.test_watch import NINE
from tests.training import losses_and_parameters

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_mm_v2"), reason="this torch has no _scaled_mm_v2")
MXFP4 = replace(MX, format="e2m1fn", scale_format="e8m0")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with blocks.kernels():
        yield


def batch(step: int, tokens: int = 64, width: int = 64) -> Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(net: nn.Module, x: Tensor, watch: Any = None) -> list[Any]:
    return losses_and_parameters(net, lambda _: net(x).float().square().mean(), steps=2, watch=watch)


def operands_of(net: nn.Sequential, number: int) -> dict[tuple[str, str], Tensor]:
    """Return what the casts of a Linear read, filled when it runs."""
    found: dict[tuple[str, str], Tensor] = {}
    weight = net[number].get_parameter("weight").detach().clone()
    found["fprop", "weight"] = found["dgrad", "weight"] = weight

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        if ("fprop", "input") not in found:
            found["fprop", "input"] = found["wgrad", "input"] = args[0].detach().clone()
            output.register_hook(lambda grad: found.update({(g, "grad_output"): grad.clone() for g in ("dgrad", "wgrad")}))

    net[number].register_forward_hook(keep)
    return found


def check(run: fp8debug.Run, tensors: dict[tuple[str, str], Tensor], module: str, *, rel: float = 1e-6) -> None:
    """Compare the operands of the first step with our own cast of the same tensors, and the results with the exact GEMM."""
    found = rows(run, f"module = '{module}' AND step = 0")
    assert {(r["gemm"], r["tensor"]) for r in found} == NINE
    for row in found:
        if row["reference"] == "operand":
            expected = measure(tensors[row["gemm"], row["tensor"]], Cast.parse(str(row["cast_name"])))
            for name in ("sqnr_db", "cosine", "gain", "amax", "num_underflow", "num_blocks", "num_subnormal", "scale_inv_max"):
                assert row[name] == pytest.approx(expected[name], rel=rel), (row["gemm"], row["tensor"], name)
        elif row["reference"] == "exact":
            assert row["sqnr_db"] > 45, row
    messages = run.sql("SELECT message FROM events").column("message").to_pylist()
    assert not [m for m in messages if m.startswith(f"{module} is not recorded")]


@pytest.mark.parametrize("is_swizzled", [True, False])
@pytest.mark.parametrize("cast", [MX, NV, MXFP4], ids=["mxfp8", "nvfp4", "mxfp4"])
def test_scaled_mm_in_blocks(tmp_path: Path, cast: Cast, is_swizzled: bool) -> None:
    """144 rows of scales and 3 or 6 columns: neither a whole number of tiles."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        first, second = BlockLinear(96, 144, bias=False), BlockLinear(144, 64, bias=False)
        for linear in (first, second):
            linear.cast, linear.is_swizzled = cast, is_swizzled
        return nn.Sequential(first, nn.GELU(), second).bfloat16()

    x = batch(0, 160, 96)
    x.requires_grad_()
    expected, net = train(build(), x), build()
    tensors = operands_of(net, 0)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert same(train(net, x, watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    check(run, tensors, "0")
    names = {(r["gemm"], r["tensor"]): r["cast_name"] for r in rows(run, "module = '0' AND reference = 'operand'")}
    for (gemm, tensor), name in names.items():
        granularity = cast.granularity if (Gemm(gemm), TensorRole(tensor)) not in CONTRACTS_ROWS else cast.granularity[::-1]
        granularity = {"61x1": "16x1", "23x1": "32x1"}.get(granularity, granularity)
        assert name == str(replace(cast, granularity=granularity))
    assert sites(run, "2") == NINE


def test_layouts_of_scales_and_codes() -> None:
    grid = torch.randint(1, 120, (300, 11), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(unswizzled(swizzled(grid), 300, 11), grid)
    with pytest.raises(ValueError, match="4608 swizzled scales are not those of 300x13 blocks, padded to tiles of 128x4"):
        unswizzled(swizzled(grid), 300, 13)
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    values = unpacked(codes)
    assert torch.equal(packed(values).view(torch.uint8), codes)  # which tells -0 from 0
    data = torch.zeros(64, 96).to(torch.float8_e4m3fn)
    for scales in (torch.ones(64, 3), torch.ones(3, 64), torch.ones(192)):
        assert side_of_blocks(data, scales.to(torch.float8_e8m0fnu), is_swizzled=False).scale_inv is not None
    with pytest.raises(ValueError, match=r"scales \[64, 4\] of data \[64, 96\] in 1x32 blocks are not read"):
        side_of_blocks(data, torch.ones(64, 4).to(torch.float8_e8m0fnu), is_swizzled=False)
    with pytest.raises(ValueError, match=r"with block scales in torch.float8_e4m3fn are not read"):
        side_of_blocks(data, torch.ones(64, 6).to(torch.float8_e4m3fn), is_swizzled=False)


@pytest.fixture(scope="module")
def torchao() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
        return pytest.importorskip("torchao.prototype.moe_training.mxfp8_linear", reason="torchao has no MXFP8Linear")


@pytest.mark.parametrize("mode", ["rceil", "floor", "ceil", "even"])
def test_mxfp8_linear(tmp_path: Path, torchao: Any, mode: str) -> None:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    def linear(k: int, n: int) -> nn.Module:
        how = {"kernel_preference": KernelPreference.EMULATED, "scale_calculation_mode": ScaleCalculationMode(mode)}
        found: nn.Module = torchao.MXFP8Linear(k, n, bias=n == 96, wgrad_with_hp=mode == "even" and n == 32, **how)
        return found

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(linear(64, 96), nn.GELU(), linear(96, 32)).bfloat16()

    x = batch(0)
    x.requires_grad_()
    expected, net = train(build(), x), build()
    tensors = operands_of(net, 0)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        coverage = watch.coverage()
        assert all(entry["fp8"] and entry["kind"] == "MXFP8Linear" for entry in coverage)
        assert same(train(net, x, watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    check(run, tensors, "0")
    rounding = {"rceil": "pow2_ceil", "ceil": "pow2_amax_ceil"}.get(mode, f"pow2_{mode}")
    assert {r["cast_name"] for r in rows(run, "module = '0' AND gemm = 'fprop' AND reference = 'operand'")} == {
        f"e4m3fn 1x32 current {rounding}"
    }
    high = {("wgrad", "grad_output"), ("wgrad", "input")} if mode == "even" else set()
    assert sites(run, "2") == NINE - high


def rht_quantize(x: Tensor, stochastic_rounding: bool, sign_vector: list[int], **more: Any) -> tuple[Tensor, ...]:
    """Do what torchao's kernel does: x by rows, and x transformed along its columns, quantized by columns."""
    mask = sum(1 << i for i, sign in enumerate(sign_vector) if sign < 0)
    cast = replace(NV, rounding="stochastic" if stochastic_rounding else "nearest")
    found: list[Tensor] = []
    for part in (hadamard(x.float(), 0, mask).t().contiguous(), x):
        q = quantize(part, cast)
        top = part.float().abs().amax() / (448 * 6)
        found += [packed(q.data).view(torch.uint8), swizzled((q.scale_inv / top).to(torch.float8_e4m3fn))]
    return tuple(found)


def quantize_2d(x: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
    """Do what torchao's kernel does: 16x16 blocks, their scales repeated for each row, of x and of its transpose."""
    found: list[Tensor] = []
    for part in (x, x.t().contiguous()):
        q = quantize(part, replace(NV, granularity="16x16"))
        scales = (q.scale_inv / (amax / (448 * 6))).repeat_interleave(16, 0).to(torch.float8_e4m3fn)
        found += [packed(q.data).view(torch.uint8), swizzled(scales)]
    return tuple(found)


def test_nvfp4_linear(tmp_path: Path, torchao: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need a GPU; all else is torchao's own: which tensors each GEMM reads, under which signs."""
    from torchao.prototype.moe_training.nvfp4_training import nvfp4_linear
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4Linear

    def amaxes(x: Tensor, sign_vector: list[int]) -> tuple[Tensor, Tensor]:
        mask = sum(1 << i for i, sign in enumerate(sign_vector) if sign < 0)
        return hadamard(x.float(), 0, mask).abs().amax(), x.float().abs().amax()

    monkeypatch.setattr(nvfp4_linear, "triton_rht_amax", amaxes)
    monkeypatch.setattr(nvfp4_linear, "triton_rht_quantize_row_col", rht_quantize)
    monkeypatch.setattr(nvfp4_linear, "triton_weight_quantize_2d", quantize_2d)

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(NVFP4Linear(256, 128), nn.GELU(), NVFP4Linear(128, 256)).bfloat16()

    x = batch(0, 384, 256)
    x.requires_grad_()
    expected, net = train(build(), x), build()
    tensors = operands_of(net, 0)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert same(train(net, x, watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    check(run, tensors, "0", rel=2e-2)  # other random numbers: the kernel rounds the transpose
    names = {(r["gemm"], r["tensor"]): str(r["cast_name"]) for r in rows(run, "module = '0' AND reference = 'operand'")}
    signs: Any = net[0].rht_sign_vector
    mask = sum(1 << i for i, sign in enumerate(signs) if sign < 0)
    assert names["fprop", "weight"].split()[1] == names["dgrad", "weight"].split()[1] == "16x16"
    assert "stochastic" in names["dgrad", "grad_output"] and "stochastic" in names["wgrad", "grad_output"]
    for tensor in ("input", "grad_output"):
        assert names["wgrad", tensor].split()[1] == "16x1" and f"hadamard=16 signs={mask:#06x}" in names["wgrad", tensor]
