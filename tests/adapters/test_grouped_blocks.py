"""Experts in MXFP8: torchao's, emulated on a CPU, and the layouts of scales that torch's grouped GEMM reads on Blackwell."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
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
from tests.adapters import blocks
from tests.adapters.linears import rows, same, sites
from tests.adapters.watching.test_watch import NINE
from tests.training import losses_and_parameters, losses_of

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
    def loss_of(step: int) -> Tensor:
        x = torch.randn(ENDS[-1], 64, generator=torch.Generator().manual_seed(step)).bfloat16()
        loss: Tensor = net(x, torch.tensor(ENDS, dtype=torch.int32)).float().square().mean()
        return loss

    losses = losses_of(net, loss_of, steps=2, lr=0.05, watch=watch)
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


def grouped_v2(self: Tensor, mat2: Tensor, a: blocks.Scales, b: blocks.Scales, offs: Any = None, *_: Any, **__: Any) -> Tensor:
    """Multiply expert by expert, each with its own tiles of scales and its own second level."""
    size, parts, start, at = blocks.SIZES[a.kinds[0]], [], 0, [0, 0]
    codes = self.view(torch.uint8), mat2.view(torch.uint8)

    def part(side: int, data: Tensor, e: int) -> Tensor:
        scales, kinds, _ = a if side == 0 else b
        num = -(-len(data) // 128) * -(-(2 * data.shape[1] // size) // 4) * 512
        mine = scales[0].reshape(-1)[at[side] : at[side] + num]
        at[side] += num
        return blocks.decoded(data.contiguous().view(torch.float4_e2m1fn_x2), [mine, *(s[e] for s in scales[1:])], kinds, [1])

    for e, end in enumerate(offs.tolist()):
        if mat2.dim() == 3:
            first, second = codes[0][start:end], codes[1][e].t()
        else:
            first, second = codes[0][:, start // 2 : end // 2], codes[1].t()[:, start // 2 : end // 2]
        parts.append((part(0, first, e) @ part(1, second, e).t()).bfloat16())
        start = end
    return torch.cat(parts) if mat2.dim() == 3 else torch.stack(parts)


@pytest.fixture
def kernel() -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_grouped_mm_v2", blocks.of_two_sides(grouped_v2), "CPU")
    yield
    library._destroy()


def parted(parts: list[Tensor], cast: Cast, dim: int) -> tuple[Tensor, list[Tensor]]:
    """Return codes joined along a dimension and scales, of parts ``[rows, c]`` that were cast one by one."""
    empty = torch.zeros(0, dtype=torch.uint8)
    data, scales, tops = [], [], []
    for x in parts:
        codes, (tiles, *top) = blocks.operand(x, cast, True) if x.numel() else (x, [empty, torch.ones(())])
        data.append(codes.view(torch.uint8) if x.numel() else torch.zeros(len(x), x.shape[1] // 2, dtype=torch.uint8))
        scales.append(tiles.view(torch.uint8))
        tops += top
    joined = torch.stack(data) if dim == 2 else torch.cat(data, dim)
    stored = torch.float8_e4m3fn if cast.scale_format == "e4m3fn" else torch.float8_e8m0fnu
    second = [torch.stack(tops)] if cast.tensor_scale != "none" else []
    return joined.view(torch.float4_e2m1fn_x2), [torch.cat(scales).view(stored), *second]


def multiplied(a: list[Tensor], b: list[Tensor], dims: tuple[int, int], cast: Cast, offs: Tensor) -> Tensor:
    (first, scale_a), (second, scale_b) = parted(a, cast, dims[0]), parted(b, cast, dims[1])
    kinds = [2, 0] if cast.tensor_scale != "none" else [3]
    more = (scale_a, kinds, [1, 0][: len(kinds)], scale_b, kinds, [1, 0][: len(kinds)])
    found: Tensor = torch.ops.aten._scaled_grouped_mm_v2(first, second.transpose(-2, -1), *more, offs)
    return found


def by_tokens(x: Tensor, offs: Tensor) -> list[Tensor]:
    return [x[start:end] for start, end in zip([0, *offs.tolist()], offs.tolist(), strict=False)]


class _Fp4Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, cast: Cast) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.cast = cast
        return multiplied(by_tokens(x, offs), list(weight), (0, 2), cast, offs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, offs = ctx.saved_tensors
        dgrad = multiplied(by_tokens(grad, offs), [w.t() for w in weight], (0, 2), ctx.cast, offs)
        lines = ([part.t() for part in by_tokens(y, offs)] for y in (grad, x))
        return dgrad, multiplied(next(lines), next(lines), (1, 1), ctx.cast, offs), None, None


class Fp4Experts(nn.Module):
    def __init__(self, cast: Cast, width: int) -> None:
        super().__init__()
        self.cast = cast
        self.w1 = nn.Parameter(torch.randn(4, width, 128) * torch.tensor([0.1, 1.0, 8.0, 0.02])[:, None, None])

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = _Fp4Experts.apply(x, self.w1, offs, self.cast)
        return out


class Fp4Model(nn.Module):
    def __init__(self, cast: Cast, width: int = 256) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.experts = nn.Linear(64, 128, bias=False), Fp4Experts(cast, width)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        out: Tensor = self.experts(self.inner(x), offs)
        return out


NEWER = pytest.mark.skipif(not hasattr(torch.ops.aten, "_scaled_grouped_mm_v2"), reason="no _scaled_grouped_mm_v2 in this torch")


@NEWER
def test_square_weights_that_may_be_read_either_way_are_left_out(tmp_path: Path, kernel: None) -> None:
    net = Fp4Model(blocks.NV, 128).bfloat16()
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=()) as watch:
        net(x, torch.tensor([32, 32, 128, 256], dtype=torch.int32)).float().square().mean().backward()
        watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert not sites(run, "experts.w1")
    messages = run.sql("SELECT message FROM events").column("message").to_pylist()
    assert any("its square weights may be read either way" in message for message in messages)


@NEWER
@pytest.mark.parametrize("cast", [blocks.NV, replace(blocks.MX, format="e2m1fn", scale_format="e8m0")], ids=["nvfp4", "mxfp4"])
def test_experts_in_fp4(tmp_path: Path, kernel: None, cast: Cast, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts of 32, 0, 96 and 128 tokens: no whole number of tiles of scales; each with a second level of its own."""
    offs = torch.tensor([32, 32, 128, 256], dtype=torch.int32)

    def trained(net: nn.Module, watch: Any = None) -> list[Any]:
        def loss_of(step: int) -> Tensor:
            x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step)).bfloat16()
            loss: Tensor = net(x, offs).float().square().mean()
            return loss

        return losses_and_parameters(net, loss_of, steps=2, lr=0.05, watch=watch)

    expected, net = trained(Fp4Model(cast).bfloat16()), Fp4Model(cast).bfloat16()
    weight = net.experts.get_parameter("w1").detach().clone()
    x = net.inner(torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()).detach()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert same(trained(net, watch), expected)
    assert "not recorded" not in capsys.readouterr().err
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "experts.w1") == NINE
    turned = {"1x16": "16x1", "1x32": "32x1"}[cast.granularity]
    for row in rows(run, "module = 'experts.w1' AND reference = 'operand'"):
        is_turned = row["gemm"] == "wgrad" or (row["gemm"], row["tensor"]) == ("dgrad", "weight")
        assert row["cast_name"] == str(replace(cast, granularity=turned) if is_turned else cast)
        assert 15 < row["sqnr_db"] < 24, row
    for row in rows(run, "module = 'experts.w1' AND reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    for tensor, parts in (("weight", list(weight)), ("input", by_tokens(x, offs))):
        (row,) = rows(run, f"step = 0 AND module = 'experts.w1' AND gemm = 'fprop' AND tensor = '{tensor}'")
        each: list[dict[str, Any]] = [measure(part, cast) for part in parts]
        for name in ("sum_err2", "num_underflow", "num_blocks", "num_subnormal"):
            assert row[name] == pytest.approx(sum(one[name] or 0 for one in each), rel=1e-5), (tensor, name)
