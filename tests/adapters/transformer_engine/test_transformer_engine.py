"""Transformer Engine by a stand-in on a CPU: every module, every recipe, every operand as the GEMM read it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor, nn
from torch.utils import checkpoint

import fp8debug
from fp8debug.adapters.transformer_engine.modules import is_fused
from fp8debug_cli.coverage import command
from tests.adapters.linears import rows, same, sites
from tests.adapters.transformer_engine import engine as te
from tests.adapters.transformer_engine.engine_tensors import (
    CurrentScalingQuantizerRef,
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8TensorStorage,
    HybridQuantizer,
    IdentityQuantizer,
    NVFP4QuantizerRef,
)
from tests.adapters.watching.test_watch import NINE
from tests.training import losses_and_parameters

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.usefixtures("engine")
engine = te.engine


def nvfp4_reference(role: Any) -> Any:
    is_weight = role.tensor_type == "weight"
    return NVFP4QuantizerRef(quant_tile_shape=(16, 16) if is_weight else (1, 16), with_rht=not is_weight)


def current_reference(role: Any) -> Any:
    return CurrentScalingQuantizerRef(DType.kFloat8E5M2 if role.tensor_type == "grad_output" else DType.kFloat8E4M3)


CUSTOM = {
    "nvfp4_reference": te.CustomRecipe(nvfp4_reference),
    "current_reference": te.CustomRecipe(current_reference),
    "custom_delayed": te.CustomRecipe(lambda role: te.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")),
}
RECIPES = {
    **CUSTOM,
    "block": te.Float8BlockScaling(),
    "block_fp32": te.Float8BlockScaling(pow2=False, amax_epsilon=1e-12),
    "current": te.Float8CurrentScaling(),
    "delayed": te.DelayedScaling(),
    "mxfp8": te.MXFP8BlockScaling(),
    "mxfp8_swizzled": te.MXFP8BlockScaling(is_swizzled=True),
    "nvfp4": te.NVFP4BlockScaling(),
    "nvfp4_swizzled": te.NVFP4BlockScaling(is_swizzled=True),
}


def complaints(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().err.splitlines() if "will record" not in line]


class Block(nn.Module):
    """What a TransformerLayer is made of: norm and projection, a plain one, norm and MLP."""

    def __init__(self, activation: str = "gelu") -> None:
        super().__init__()
        self.qkv = te.LayerNormLinear(64, 96)
        self.proj = te.Linear(96, 64)
        self.mlp = te.LayerNormMLP(64, 160, activation)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.proj(self.qkv(x))
        out: Tensor = x + self.mlp(x)
        return out


def model(activation: str = "gelu") -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(activation)).bfloat16()


def batch(step: int) -> Tensor:
    return torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def train(net: nn.Module, recipe: Any, watch: Any = None, steps: int = 3) -> list[Any]:
    def loss_of(step: int) -> Tensor:
        with te.autocast(recipe):
            loss: Tensor = net(batch(step)).float().square().mean()
        return loss

    return losses_and_parameters(net, loss_of, steps=steps, lr=0.05, watch=watch)


def record(path: Path, net: nn.Module, recipe: Any, steps: int = 2, **options: Any) -> fp8debug.Run:
    with fp8debug.watch(net, path, **{"every": 1, "shadow": "full", "what_if": (), **options}) as watch:
        train(net, recipe, watch, steps)
    return fp8debug.Run(path)


@pytest.mark.parametrize("name", RECIPES)
def test_every_module_and_the_training_as_it_was(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES[name]
    expected, net = train(model(), recipe), model()
    originals = [dict(vars(space)) for space in te.SPACES.values()]
    with fp8debug.watch(net, tmp_path / "run", every=2, shadow="full", what_if=("tensorwise_delayed", "mxfp8")) as watch:
        assert same(train(net, recipe, watch), expected)
    assert [dict(vars(space)) for space in te.SPACES.values()] == originals
    run = fp8debug.Run(tmp_path / "run")
    for module in ("0.qkv", "0.proj", "0.mlp.fc1", "0.mlp.fc2"):
        assert sites(run, module) == NINE, module
    for row in rows(run, "reference = 'exact'"):
        assert row["sqnr_db"] > 45, row
    for row in rows(run, "reference = 'operand'"):
        least = 15 if "e2m1fn" in row["cast_name"] else 24 if "e5m2" in row["cast_name"] else 30
        assert least < row["sqnr_db"] < 40 or row["step"] == 0, row
        assert row["scale_log2_ratio"] is not None
    assert not run.sql("SELECT * FROM events").to_pylist() and not complaints(capsys)


def test_linears_of_one_module_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES["block"]
    expected, net = train(model(), recipe, steps=6), model()
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=(), turns=4) as watch:
        assert same(train(net, recipe, watch, steps=6), expected)
    run = fp8debug.Run(tmp_path / "run")
    names = ["0.qkv", "0.proj", "0.mlp.fc1", "0.mlp.fc2"]
    for step in range(1, 6):
        found = {(row["module"], row["gemm"], row["tensor"]) for row in rows(run, f"step = {step}")}
        assert found == {(names[-step % 4], *site) for site in NINE}
    assert not run.sql("SELECT * FROM events").to_pylist() and not complaints(capsys)


def test_casts_are_those_in_force(tmp_path: Path) -> None:
    for name, recipe in RECIPES.items():
        run = record(tmp_path / name, model(), recipe, steps=1)
        entry = next(m for m in run.modules if m["fqn"] == "0.proj")
        assert entry["fp8"] and entry["kind"] == "Linear" and entry["recipe"] == f"te_{type(recipe).__name__}"
        names = {(r["gemm"], r["tensor"]): r["cast_name"] for r in rows(run, "module = '0.proj' AND reference = 'operand'")}
        word = {"block": "pow2_ceil", "block_fp32": "eps=1e-12", "mxfp8": "pow2_ceil", "mxfp8_swizzled": "pow2_ceil"}.get(
            name, ""
        )
        if "block" in name:
            assert names["fprop", "weight"] == names["dgrad", "weight"] == f"e4m3fn 128x128 current {word}"
            assert names["fprop", "input"] == names["dgrad", "grad_output"] == f"e4m3fn 1x128 current {word}"
            assert names["wgrad", "input"] == names["wgrad", "grad_output"] == f"e4m3fn 128x1 current {word}"
        elif "nvfp4" in name:
            scales = "current scale=e4m3fn tensor_scale=tensor"
            assert names["fprop", "weight"] == names["dgrad", "weight"] == f"e2m1fn 16x16 {scales}"
            assert names["fprop", "input"] == f"e2m1fn 1x16 {scales}"
            assert names["wgrad", "input"] == f"e2m1fn 16x1 {scales} hadamard=16"
            rounding = "" if name == "nvfp4_reference" else " stochastic"
            assert names["dgrad", "grad_output"] == f"e2m1fn 1x16 {scales}{rounding}"
            assert names["wgrad", "grad_output"] == f"e2m1fn 16x1 {scales}{rounding} hadamard=16"
        elif "mxfp8" in name:
            assert names["fprop", "weight"] == "e4m3fn 1x32 current pow2_ceil"
            assert names["dgrad", "weight"] == names["wgrad", "input"] == "e4m3fn 32x1 current pow2_ceil"
        else:
            scaling = {"delayed": "delayed(16,max)", "custom_delayed": "delayed(4,most_recent)"}.get(name, "current")
            assert names["fprop", "weight"] == names["wgrad", "input"] == f"e4m3fn tensorwise {scaling}"
            assert names["wgrad", "grad_output"] == f"e5m2 tensorwise {scaling}"


def in_fp8(*gemms: str) -> Any:
    """Return a recipe whose other GEMMs run in high precision."""
    readers = {"input": ("fprop", "wgrad"), "weight": ("fprop", "dgrad"), "grad_output": ("dgrad", "wgrad")}

    def qfactory(role: Any) -> Any:
        row, column = (
            Float8BlockQuantizer(block_scaling_dim=2 if role.tensor_type == "weight" else 1)
            if gemm in gemms
            else IdentityQuantizer()
            for gemm in readers[role.tensor_type]
        )
        return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=column)

    return te.CustomRecipe(qfactory)


@pytest.mark.parametrize("gemms", [("fprop", "dgrad"), ("dgrad", "wgrad"), ("fprop", "wgrad"), ("wgrad",), ()])
def test_single_gemms_in_high_precision(gemms: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As under the recipe that ``fallback --to te-recipe`` writes: what is cast has its rows, the rest its result alone."""
    expected, net = train(model(), in_fp8(*gemms)), model()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        assert same(train(net, in_fp8(*gemms), watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    for module in ("0.qkv", "0.proj", "0.mlp.fc1", "0.mlp.fc2"):
        found = {(r["gemm"], r["tensor"]) for r in rows(run, f"module = '{module}' AND reference = 'operand'")}
        assert found == {site for site in NINE if site[0] in gemms and site[1] in ("input", "weight", "grad_output")}, module
    assert ("no FP8 GEMM observed" in " ".join(complaints(capsys))) == (not gemms)
    assert not run.sql("SELECT * FROM events WHERE message NOT LIKE '%no FP8 GEMM observed%'").to_pylist()


def test_an_override_of_the_backward_pass_is_shown(tmp_path: Path) -> None:
    for backward in ("high_precision", "dequantized"):
        run = record(tmp_path / backward, model(), te.NVFP4BlockScaling(backward_override=backward), steps=1)
        entry = next(m for m in run.modules if m["fqn"] == "0.proj")
        assert entry["recipe"] == f"te_NVFP4BlockScaling backward={backward}"
        found = CliRunner().invoke(command, [str(tmp_path / backward), "--format", "json"])
        notes = {row["module"]: row["note"] for row in json.loads(found.output)}
        expected = f"backward override {backward} (NVTE_BACKWARD_OVERRIDE): dgrad and wgrad run in high precision"
        assert notes["0.proj"] == expected + (", on dequantized operands" if backward == "dequantized" else "")


def test_fused_operands_are_those_that_the_library_quantized(tmp_path: Path) -> None:
    """The norm and the activation worked out once more quantize to what ran: at most a tie here and there differs."""
    for activation in ("gelu", "swiglu"):
        run = record(tmp_path / activation, model(activation), te.Float8BlockScaling(pow2=False), steps=1)
        for module in ("0.qkv", "0.mlp.fc1", "0.mlp.fc2"):
            for row in rows(run, f"module = '{module}' AND reference = 'operand'"):
                assert row["sqnr_db"] > 31 and row["headroom"] == pytest.approx(1, abs=1e-5), row
                assert row["num_saturated"] == 0 and row["gain"] == pytest.approx(1, abs=2e-3), row


def test_debug_tools_of_the_library_end_its_fusions() -> None:
    class DebugQuantizedTensor:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def get_tensor(self, is_transposed: bool) -> Any:
            return self.inner

    module: Any = te.LayerNormMLP(64, 160)
    with te.autocast(te.DelayedScaling()):
        storage = te.cast(batch(0).reshape(-1, 64), module.begin()["input"][0])
    for by in ("norm", "activation", "gradient"):
        assert is_fused(storage, by, module) and not is_fused(DebugQuantizedTensor(storage), by, module)


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(count, 64, 96)
        self.splits = [64 // count] * count

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.experts(x.reshape(-1, 64)[: sum(self.splits)], self.splits)
        return out


@pytest.mark.parametrize("name", ["block", "delayed", "mxfp8"])
def test_experts_have_rows_of_their_own(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        net = Experts(4)
        net.splits = [16, 0, 32, 16]
        return net.bfloat16()

    expected, net = train(made(), RECIPES[name]), made()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert same(train(net, RECIPES[name], watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    inputs = rows(run, "step = 2 AND gemm = 'fprop' AND tensor = 'input' AND reference = 'operand'")
    assert [(r["module"], r["numel"]) for r in inputs] == [(f"experts.gemm_{i}", 64 * n) for i, n in enumerate((16, 0, 32, 16))]
    assert inputs[1]["sqnr_db"] is None and all(r["sqnr_db"] > 30 for r in (inputs[0], *inputs[2:]))
    assert sites(run, "experts.gemm_2") == NINE
    for row in rows(run, "reference = 'exact' AND numel > 0 AND sum_x2 > 0"):
        assert row["sqnr_db"] > 45, row
    assert not run.sql("SELECT * FROM events").to_pylist() and not complaints(capsys)


def test_many_experts_are_watched_in_part(tmp_path: Path) -> None:
    run = record(tmp_path / "run", Experts(16).bfloat16(), te.Float8BlockScaling(), steps=1)
    assert {r["module"] for r in rows(run)} == {f"experts.gemm_{i}" for i in range(0, 16, 2)}
    other = next(m for m in run.modules if m["fqn"] == "experts.gemm_1")
    assert (other["observed"], other["reason"]) == (False, "one of 16 experts, of which 8 are watched")


def test_high_precision_is_said_and_nothing_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        net(batch(0)).float().square().mean().backward()
        watch.step()
    run = fp8debug.Run(tmp_path / "run")
    assert not rows(run) and not any(m["fp8"] for m in run.modules)
    (said,) = complaints(capsys)
    assert (
        said
        == "fp8debug: no FP8 GEMM observed in any of 4: they run in high precision, or in kernels that fp8debug cannot intercept"
    )
    assert "no FP8 GEMM observed" in run.modules[0]["reason"]


def test_what_has_no_high_precision_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An activation that is not worked out, gradients added to others, sums in the tensor core."""
    net = model("clamped_swiglu")
    block: Any = net[0]
    proj = block.proj
    proj.is_split = False
    proj.weight.main_grad = torch.zeros(64, 96)
    run = record(tmp_path / "run", net, te.Float8CurrentScaling(), steps=1)
    said = capsys.readouterr().err
    assert "0.mlp.fc2 is not watched any more: ValueError: what the activation 'clamped_swiglu' gives is not worked out" in said
    assert sites(run, "0.mlp.fc1") >= {("fprop", "input"), ("fprop", "output"), ("fprop", "weight")}
    assert "0.proj is recorded, but wgrad's result is added to what was there: the exact GEMM" in said
    assert next(m for m in run.modules if m["fqn"] == "0.proj")["fast_accum"] == ["fprop"]
    shadow = rows(run, "module = '0.proj' AND tensor = 'grad_weight'")
    assert [r["reference"] for r in shadow] == ["shadow"] and 24 < shadow[0]["sqnr_db"] < 40


def test_frozen_weights_and_checkpointing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block: Any = model()[0]
            block.proj.weight.requires_grad_(False)
            self.block = block

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = checkpoint.checkpoint(self.block, x, use_reentrant=False)
            return out

    recipe = te.Float8BlockScaling()
    expected, net = train(Checkpointed(), recipe), Checkpointed()
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert same(train(net, recipe, watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "block.proj") == {s for s in NINE if s[0] != "wgrad"}
    assert sites(run, "block.qkv") == NINE
    assert all(r["num_tensors"] == 1 for r in rows(run))
    assert "block.mlp.fc1 is not recorded in full: fc1's result is gone" in capsys.readouterr().err


def test_an_input_that_is_cast_later_and_a_gradient_that_is_summed_in_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def made() -> nn.Module:
        net = model()
        block: Any = net[0]
        block.proj.keeps_input, block.proj.tp_size = True, 2
        return net

    recipe, net = te.Float8BlockScaling(), made()
    expected = train(made(), recipe)
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full") as watch:
        assert same(train(net, recipe, watch), expected)
    run = fp8debug.Run(tmp_path / "run")
    assert sites(run, "0.proj") == NINE and not complaints(capsys)
    for row in rows(run, "module = '0.proj' AND reference = 'exact'"):
        assert row["sqnr_db"] > 45, row


def test_errors_of_ours_and_of_theirs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, net = te.Float8BlockScaling(), model()
    expected = train(model(), recipe)
    monkeypatch.setattr("fp8debug.adapters.transformer_engine.probe.side_of_storage", lambda *a: 1 / 0)
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        with pytest.raises(RuntimeError), te.autocast(recipe):
            net(torch.randn(2, 32, 63).bfloat16())
        with pytest.raises(fp8debug.errors.AttachError, match="watched already"):
            fp8debug.watch(net, tmp_path / "other")
        assert same(train(net, recipe, watch), expected)
        assert same(train(copy.deepcopy(net), recipe), train(copy.deepcopy(net), recipe)), "a copy is not watched"
    assert capsys.readouterr().err.count("is not watched any more: ZeroDivisionError") == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())
    assert all(space.general_gemm is te.general_gemm for space in te.SPACES.values())


@pytest.mark.parametrize("recipe", [te.DelayedScaling(), te.CustomRecipe(lambda role: te.DelayedScaling())])
def test_a_delayed_scale_that_its_history_does_not_give(recipe: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    with fp8debug.watch(net, tmp_path / "run", every=1) as watch:
        train(net, recipe, watch)
        assert not complaints(capsys)
        block: Any = net[0]
        block.proj.fp8_meta["scaling_fwd"].scale[0] *= 4
        train(net, recipe, watch, steps=1)
    assert "0.proj is recorded, but a delayed scale of it is 4 times what its amax history allows" in capsys.readouterr().err
    last = rows(fp8debug.Run(tmp_path / "run"), "step = 3 AND module = '0.proj' AND gemm = 'fprop' AND tensor = 'input'")
    assert last[0]["headroom"] > 2 and last[0]["num_saturated"] > 0


def test_the_script_for_a_gpu_says_what_it_needs(tmp_path: Path) -> None:
    if torch.cuda.is_available() and find_spec("transformer_engine") is not None:
        pytest.skip("it would run here")
    command = [sys.executable, str(ROOT / "tests/adapters/transformer_engine/te_on_gpu.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "needs a GPU and Transformer Engine" in done.stderr


class Fp8Parameter(Float8TensorStorage, Tensor):  # type: ignore[misc]  # the library's has ``values`` too
    """A parameter that is there in FP8 only, as ``fp8_model_init`` makes it: a wrapper in BF16's name."""

    @staticmethod
    def __new__(cls, made: Float8TensorStorage) -> Any:
        assert made._data is not None
        return Tensor._make_wrapper_subclass(cls, made._data.shape, dtype=torch.bfloat16, requires_grad=True)

    def __init__(self, made: Float8TensorStorage) -> None:
        self.adopt(made)

    def adopt(self, made: Float8TensorStorage) -> None:
        self.__dict__.update(vars(made))

    def dequantize(self) -> Tensor:
        return self.values(False).bfloat16()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            found = cls(args[0])
            return found.requires_grad_(False)
        return func(*(a.dequantize() if isinstance(a, cls) else a for a in args), **(kwargs or {}))


class MasterSgd(torch.optim.Optimizer):
    """SGD on FP32 master weights, from which parameters in FP8 are made: ``master_param`` as FusedAdam's state has it."""

    def __init__(self, params: Any, wrong: float = 0.0) -> None:
        super().__init__(params, {"wrong": wrong})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                master = self.state[p].setdefault("master_param", p.dequantize().float())
                master -= 0.01 * p.grad.float()
                p.adopt(Float8CurrentScalingQuantizer()(master * (1 + group["wrong"])))


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_a_parameter_in_fp8_is_compared_with_the_master_weight(wrong: float, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = te.Linear(64, 96).bfloat16()
    parameter = Fp8Parameter(Float8CurrentScalingQuantizer()(module.weight.detach().float()))
    del module.weight
    module.weight = parameter  # type: ignore[assignment]  # as torch takes one of the library's
    net = nn.Sequential(module)
    optimizer = MasterSgd([parameter], wrong)
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with fp8debug.watch(net, tmp_path / "run", every=1, what_if=()) as watch:
        for _ in range(3):
            with te.autocast(te.Float8CurrentScaling()):
                net(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step()
    found = rows(fp8debug.Run(tmp_path / "run"), "tensor = 'weight' AND reference = 'operand' AND gemm = 'fprop'")
    assert [row["step"] for row in found] == [1, 2], "the optimizer has no master weight before its first step"
    assert all((row["sqnr_db"] > 28) is (wrong == 0) for row in found)
    assert all(row["gain"] == pytest.approx(1 + wrong, rel=0.01) for row in found)
