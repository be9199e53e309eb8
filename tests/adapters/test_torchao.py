"""torchao's Float8Linear: every recipe, true scales in all three GEMMs, and the same training with and without a watch."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug.adapters.torchao import recipe_of_config
from fp8debug.kernels.dispatch import measure
from fp8debug.kernels.reference import quantize
from fp8debug.metrics.rows import Rows
from fp8debug.recipes import Cast
from tests.adapters.linears import CHECKPOINTS, batch, record, rows, same, sites, train
from tests.adapters.watching.test_watch import NINE

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")

#: Slots that a weight's rows fill beside those of ``measure``.
OF_ROWS = {slot.name for slot in Rows().slots}
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: (gemm, tensor) -> cast, written down by hand from torchao's configuration.
CASTS = {
    "tensorwise": {
        ("fprop", "input"): "e4m3fn tensorwise current eps=1e-12",
        ("fprop", "weight"): "e4m3fn tensorwise current eps=1e-12",
        ("dgrad", "grad_output"): "e5m2 tensorwise current eps=1e-12",
        ("dgrad", "weight"): "e4m3fn tensorwise current eps=1e-12",
        ("wgrad", "grad_output"): "e5m2 tensorwise current eps=1e-12",
        ("wgrad", "input"): "e4m3fn tensorwise current eps=1e-12",
    },
    "rowwise": {
        ("fprop", "input"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("fprop", "weight"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("dgrad", "grad_output"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("dgrad", "weight"): "e4m3fn columnwise current pow2_ceil eps=1e-12",
        ("wgrad", "grad_output"): "e4m3fn columnwise current pow2_ceil eps=1e-12",
        ("wgrad", "input"): "e4m3fn columnwise current pow2_ceil eps=1e-12",
    },
    "rowwise_with_gw_hp": {
        ("fprop", "input"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("fprop", "weight"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("dgrad", "grad_output"): "e4m3fn rowwise current pow2_ceil eps=1e-12",
        ("dgrad", "weight"): "e4m3fn tensorwise current pow2_ceil eps=1e-12",
    },
}


def model(recipe: str = "tensorwise", emulate: bool = True, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> nn.Sequential:
    """Return the same model every time, its Linears in torchao's hands."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(dtype)
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate, **changes)
    float8.convert_to_float8_training(net, config=config)
    return net


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_and_results_and_the_training_as_it_was(tmp_path: Path, recipe: str, emulate: bool) -> None:
    expected = train(model(recipe, emulate))
    net = model(recipe, emulate)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert all(entry["fp8"] and entry["kind"] == "Float8Linear" for entry in watch.coverage())
        assert same(train(net, after=lambda loss: watch.step(loss=loss)), expected)
    run = fp8debug.Run(tmp_path / "run")
    found = {(r["gemm"], r["tensor"]): r["cast_name"] for r in rows(run, "module = '2' AND reference = 'operand'")}
    assert found == CASTS[recipe]
    assert sites(run, "2") == set(found) | {site for site in NINE if site[1] in ("output", "grad_input", "grad_weight")}
    assert not [site for site in sites(run, "0") if site[0] == "dgrad"]
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    for row in rows(run, "reference = 'shadow'"):
        assert row["sqnr_db"] > 20 and row["num_tensors"] == 1, row
    assert not run.sql("SELECT * FROM events").to_pylist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recorded_values_are_those_of_our_reference(tmp_path: Path, recipe: str, dtype: torch.dtype) -> None:
    net = model(recipe, dtype=dtype)
    tensors: dict[tuple[str, str], Tensor] = {("fprop", "weight"): net.get_parameter("2.weight").detach().clone()}
    tensors["dgrad", "weight"] = tensors["fprop", "weight"]

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        tensors["fprop", "input"] = tensors["wgrad", "input"] = args[0].detach().reshape(-1, 96)
        output.register_hook(lambda grad: tensors.update({(g, "grad_output"): grad.reshape(-1, 32) for g in ("dgrad", "wgrad")}))

    net[2].register_forward_hook(keep)
    run = record(tmp_path / "run", net, steps=1, dtype=dtype)
    compared = 0
    for row in rows(run, "module = '2' AND reference = 'operand'"):
        cast = Cast.parse(str(row["cast_name"]))
        for name, expected in measure(tensors[row["gemm"], row["tensor"]], cast).items():
            if isinstance(expected, float):
                assert row[name] == pytest.approx(expected, rel=1e-6, abs=1e-12), (row["gemm"], row["tensor"], name)
            elif isinstance(expected, int) and name not in OF_ROWS:  # a count of results is not recorded of an operand
                assert (row[name] or 0) == expected, (row["gemm"], row["tensor"], name)
                compared += 1
    assert compared > 40


@pytest.mark.parametrize("recipe", RECIPES[:2])
def test_codes_and_scales_equal_ours_to_the_last_bit(recipe: str) -> None:
    """A BF16 tensor with outliers, a row of zeros and values far below the eps of torchao."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import LinearMMConfig

    x = torch.randn(33, 48, generator=torch.Generator().manual_seed(3)) * torch.logspace(-14, 6, 33)[:, None]
    x[5] = 0
    config = float8.Float8LinearConfig.from_recipe_name(recipe)
    cast = recipe_of_config(config).casts["fprop", "input"]  # type: ignore[index]  # enums are strings
    assert cast is not None
    theirs = hp_tensor_to_float8_dynamic(
        x.bfloat16(),
        config.cast_config_input.target_dtype,
        LinearMMConfig(),
        scaling_granularity=config.cast_config_input.scaling_granularity,
        axiswise_dim=-1 if recipe == "rowwise" else None,
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )
    ours = quantize(x.bfloat16(), cast)
    assert torch.equal(ours.data.view(torch.uint8), theirs._data.view(torch.uint8))
    scale_inv = theirs._scale.reciprocal().reshape(ours.scale_inv.shape)
    zero = torch.tensor([row == 5 for row in range(33)])[:, None].expand_as(ours.scale_inv) if recipe == "rowwise" else None
    if zero is not None:  # 448 / eps there, where ours is 1: the data are zeros
        scale_inv = scale_inv.where(~zero, 1.0)
    assert torch.equal(ours.scale_inv, scale_inv)


def test_tokens_of_one_row_and_a_module_called_with_three_dimensions(tmp_path: Path) -> None:
    net = model("rowwise")
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(batch(0)[:1, :1]).sum().backward()
        watch.step()
    assert sites(fp8debug.Run(tmp_path / "run"), "2") == NINE


@pytest.mark.parametrize("kind", ["plain", "selective"])
def test_checkpointed_blocks(tmp_path: Path, kind: str) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint(self.net, x, **CHECKPOINTS[kind])
            return out

    expected = train(Checkpointed())
    net = Checkpointed()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        assert same(train(net, after=lambda loss: watch.step(loss=loss)), expected)
    run = fp8debug.Run(tmp_path / "run")
    found = rows(run, "module = 'net.2' AND reference = 'shadow'")
    assert {(row["gemm"], row["num_tensors"]) for row in found} == {("fprop", 1), ("dgrad", 1), ("wgrad", 1)}
    lost = "its input in high precision is gone before wgrad"
    gone = {e["module"] for e in run.sql(f"SELECT * FROM events WHERE message LIKE '%{lost}%'").to_pylist()}
    recorded = {row["module"] for row in rows(run, "gemm = 'wgrad' AND tensor = 'input'")}
    assert gone | recorded == {"net.0", "net.2"}  # recorded, or said


def test_a_weight_that_is_gathered_in_fp8_is_compared_with_the_tensor_inside(tmp_path: Path) -> None:
    """FP8 all-gather hands the Linear a weight of another class, around the one in high precision."""
    found = {}
    for name in (False, True):
        net = model("tensorwise", enable_fsdp_float8_all_gather=name)
        with fp8debug.watch(net, tmp_path / str(name), every=1) as watch:
            net(batch(0)).sum().backward()
            watch.step()
        run = fp8debug.Run(tmp_path / str(name))
        assert run.sql("SELECT message FROM events WHERE kind <> 'recording'").to_pylist() == []
        found[name] = rows(run, "reference = 'operand' AND actual")
    assert len(found[True]) == 10 and found[True] == found[False]


def test_a_filter_leaves_modules_plain_and_coverage_says_so(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 30))
    config = float8.Float8LinearConfig(emulate=True)
    float8.convert_to_float8_training(net, module_filter_fn=lambda m, fqn: m.out_features % 16 == 0, config=config)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        first, second = watch.coverage()
        net(batch(0, torch.float32)).sum().backward()
        watch.step()
    assert first["fp8"] and not second["fp8"] and first["recipe"] == "torchao_tensorwise"
    assert second["reason"] == "not converted (30 is not a multiple of 16, as most FP8 GEMMs want it)"
