"""Experts in MXFP8: torchao's, emulated on a CPU, and the layouts of scales that torch's grouped GEMM reads on Blackwell."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8debug
from fp8debug.adapters.interception.listener import DECODERS
from fp8debug.kernels.dispatch import measure
from fp8debug.recipes import Cast
from tests.adapters.linears import rows, same, sites
from tests.adapters.watching.test_watch import NINE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
    library = pytest.importorskip("torchao.prototype.moe_training.mxfp8_grouped_mm", reason="torchao has no MXFP8 experts")
ENDS = [32, 32, 128, 192]  # one expert without tokens


class Experts(nn.Module):
    """Gated experts over one batch of tokens sorted by expert, as torchtitan has them."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"w1": (96, 64), "w2": (64, 96), "w3": (96, 64)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(4, *shape) * 0.1))

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        w1, w2, w3 = (getattr(self, name).transpose(-2, -1) for name in ("w1", "w2", "w3"))
        h = functional.silu(torch._grouped_mm(x, w1, offs=offs)) * torch._grouped_mm(x, w3, offs=offs)
        return torch._grouped_mm(h.nan_to_num(0), w2, offs=offs).nan_to_num(0)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.experts = nn.Linear(64, 64, bias=False), Experts()

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = self.experts(self.inner(x), offs)
        return out


def build(**changes: Any) -> Model:
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.quantization import quantize_
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    net = Model().bfloat16()
    config = MXFP8TrainingOpConfig(kernel_preference=KernelPreference.EMULATED, **changes)
    quantize_(net, config, filter_fn=lambda module, fqn: fqn == "experts")
    return net


def train(net: nn.Module, watch: Any = None) -> list[Any]:
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05), []
    for step in range(2):
        x = torch.randn(ENDS[-1], 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss = net(x, torch.tensor(ENDS, dtype=torch.int32)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None:
            watch.step(loss=loss)
    return [losses, [getattr(p, "_data", p).detach().clone() for p in net.parameters()]]


def test_emulated_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = library._compute_fwd_emulated
    expected, net = train(build()), build()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert library._compute_fwd_emulated is not before
        weight = net.experts.get_parameter("w1")
        lines = getattr(weight, "_data", weight).detach().reshape(-1, 64).clone()
        assert same(train(net, watch), expected)
    assert library._compute_fwd_emulated is before
    assert "not recorded" not in capsys.readouterr().err
    run = fp8debug.Run(tmp_path / "run")
    for name in ("w1", "w2", "w3"):
        assert sites(run, f"experts.{name}") == NINE
    for row in rows(run, "reference = 'operand'"):
        turned = row["gemm"] == "wgrad" or (row["gemm"], row["tensor"]) == ("dgrad", "weight")
        assert row["cast_name"] == f"e4m3fn {'32x1' if turned else '1x32'} current pow2_ceil"
        assert row["sqnr_db"] > 29 and row["num_saturated"] == 0, row
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    for row in rows(run, "reference = 'shadow'"):
        assert 26 < row["sqnr_db"] < 36, row
    (row,) = rows(run, "step = 0 AND module = 'experts.w1' AND gemm = 'fprop' AND tensor = 'weight'")
    for name, value in measure(lines, Cast.parse(str(row["cast_name"]))).items():
        if name in ("sqnr_db", "num_underflow", "num_blocks", "scale_inv_min", "cosine"):
            assert row[name] == pytest.approx(value, rel=1e-6), name


def test_a_wgrad_in_high_precision_has_no_row(tmp_path: Path) -> None:
    net = build(wgrad_with_hp=True)
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=()) as watch:
        train(net, watch)
    assert sites(fp8debug.Run(tmp_path / "run"), "experts.w1") == {site for site in NINE if site[0] != "wgrad"}


def test_layouts_of_the_grouped_op() -> None:
    """Against torchao's own references of the layouts."""
    kernels = pytest.importorskip("torchao.prototype.moe_training.kernels.mxfp8.quant")
    read, random = DECODERS[torch.ops.aten._scaled_grouped_mm], torch.Generator().manual_seed(0)
    offs = torch.tensor([96, 96, 320, 384], dtype=torch.int32)

    def scales(*shape: int) -> Tensor:
        return torch.randint(90, 140, shape, dtype=torch.uint8, generator=random)

    def factors(exponents: Tensor) -> Tensor:
        return torch.exp2(exponents.float() - 127)

    a, w = scales(384, 8), scales(4, 160, 8)
    first, second = torch.zeros(384, 256).to(torch.float8_e4m3fn), torch.zeros(4, 256, 160).to(torch.float8_e4m3fn)
    tiles = (kernels.torch_to_blocked_2d_M_groups(a, offs)[0], kernels.torch_to_blocked_per_group_3d(w))
    args: dict[str, Any] = {"self": first, "mat2": second, "offs": offs}
    args |= {f"scale_{end}": tile.view(torch.float8_e8m0fnu) for end, tile in zip("ab", tiles, strict=True)}
    seen: Any = read(args, torch.zeros(384, 160))
    assert torch.equal(seen.scale_first, factors(a)) and torch.equal(seen.scale_second, factors(w))
    assert str(seen.cast) == "e4m3fn 1x32 current pow2_ceil"

    g, x = scales(160, 12), scales(200, 12)  # of grad_output and input, along 384 tokens
    tiles = tuple(kernels.torch_to_blocked_2d_K_groups(s, offs // 32)[0] for s in (g, x))
    args = {"self": torch.zeros(160, 384).to(torch.float8_e4m3fn), "mat2": torch.zeros(384, 200).to(torch.float8_e4m3fn)}
    args |= {"offs": offs, **{f"scale_{end}": tile.view(torch.float8_e8m0fnu) for end, tile in zip("ab", tiles, strict=True)}}
    seen = read(args, torch.zeros(4, 160, 200))
    assert torch.equal(seen.scale_first, factors(g)) and torch.equal(seen.scale_second, factors(x))
    if (newer := getattr(torch.ops.aten, "_scaled_grouped_mm_v2", None)) is not None:
        lists = {f"{name}_{end}": [value] for end in "ab" for name, value in (("recipe", 3), ("swizzle", 1))}
        again: Any = DECODERS[newer]({**args, **lists, **{f"scale_{end}": [args[f"scale_{end}"]] for end in "ab"}}, seen.result)
        assert torch.equal(again.scale_first, seen.scale_first)
    with pytest.raises(ValueError, match="that contracts 96 elements is not read"):
        read({**args, "self": torch.zeros(160, 96).to(torch.float8_e4m3fn)}, seen.result)
