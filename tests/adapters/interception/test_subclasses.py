"""Subclasses of nn.Linear: what FP8 would do to them is recorded, and convert() converts them or says why not."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

import fp8debug
from fp8debug.kernels.dispatch import measure
from tests.adapters.linears import same
from tests.adapters.watching.test_watch import NINE
from tests.training import losses_and_parameters


class Inherits(nn.Linear):
    """Keeps nn.Linear's forward and brings a method of its own."""

    def name(self) -> str:
        return "mine"


class Casts(nn.Linear):
    """Casts its weight to the input's dtype, as nanochat's and modded-nanogpt's do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias if self.bias is None else self.bias.to(x.dtype))


class Lora(nn.Linear):
    """A frozen Linear and a product of two small ones beside it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(4, self.in_features) * 0.1)
        self.b = nn.Parameter(torch.zeros(self.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (x @ self.a.T) @ self.b.T


class Packed(Lora):
    """Keeps its frozen weight as codes in one column, as QLoRA does."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        codes = (self.weight.detach() * 127 + 128).clamp(0, 255).to(torch.uint8)
        self.weight = nn.Parameter(codes.reshape(-1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = ((self.weight.to(x.dtype) - 128) / 127).reshape(self.out_features, self.in_features)
        return nn.functional.linear(x, weight, self.bias) + (x @ self.a.T) @ self.b.T


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def net(kind: type[nn.Linear], bias: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(32, 64, bias=bias), nn.SiLU(), kind(64, 32, bias=bias))


def trained(model: nn.Module, dtype: torch.dtype = torch.float32, watch: Any = None) -> list[Any]:
    def loss_of(step: int) -> Tensor:
        x = torch.randn(3, 16, 32, generator=torch.Generator().manual_seed(step)).to(dtype)
        loss: Tensor = model(x).float().square().mean()
        return loss

    return losses_and_parameters(model, loss_of, steps=2, watch=watch)


def tried(path: Path, module: str) -> set[tuple[str, str]]:
    query = "SELECT DISTINCT gemm, tensor FROM sites WHERE NOT actual AND module = ?"
    return {(row["gemm"], row["tensor"]) for row in fp8debug.Run(path).sql(query, [module]).to_pylist()}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [Inherits, Casts, Lora, Packed])
def test_what_fp8_would_do_is_recorded_and_the_training_is_as_it_was(tmp_path: Path, kind: type[nn.Linear], bias: bool) -> None:
    expected = trained(net(kind, bias))
    with fp8debug.watch(model := net(kind, bias), tmp_path / "run", every=1) as watch:
        assert same(trained(model, watch=watch), expected)
        entries = watch.coverage()
    wanted = {site for site in NINE if not issubclass(kind, Lora) or site[0] != "wgrad"}  # whose weight is frozen
    assert tried(tmp_path / "run", "2") == wanted
    assert [entry["kind"] for entry in entries] == [kind.__name__] * 2 and all(entry["observed"] for entry in entries)
    assert not any(entry["fp8"] for entry in entries)
    assert not fp8debug.Run(tmp_path / "run").sql("SELECT * FROM events").to_pylist()


def test_what_is_tried_is_the_weight_as_its_gemm_read_it(tmp_path: Path) -> None:
    model = net(Casts)
    weight = model.get_parameter("2.weight").detach().bfloat16()
    with fp8debug.watch(model, tmp_path / "run", every=5, what_if=()) as watch:
        trained(model, torch.bfloat16, watch)
    query = "SELECT amax, sum_x2 FROM sites WHERE module = '2' AND gemm = 'fprop' AND tensor = 'weight' AND step = 0"
    (row,) = fp8debug.Run(tmp_path / "run").sql(query).to_pylist()
    expected = measure(weight, fp8debug.Cast(granularity="128x128"))
    assert row["amax"] == expected["amax"] and row["sum_x2"] == pytest.approx(expected["sum_x2"], rel=1e-9)


def test_nothing_is_tried_beside_modules_in_fp8(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Casts(32, 32))
    fp8debug.convert(model, "blockwise", overrides={"1": None})
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        trained(model, watch=watch)
    assert tried(tmp_path / "run", "1") == set()


def test_one_that_inherits_its_forward_is_converted_and_stays_of_its_class(tmp_path: Path) -> None:
    model = net(Inherits)
    parameters, plain = list(model.parameters()), model(torch.ones(4, 32))
    converted: Any = fp8debug.convert(model, "blockwise")[2]  # type: ignore[index]  # a Sequential
    assert isinstance(converted, fp8debug.Fp8Linear) and isinstance(converted, Inherits) and converted.name() == "mine"
    assert type(converted).__name__ == "Fp8Inherits" and type(converted) is type(model[0])
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    output = model(torch.ones(4, 32))
    assert not torch.equal(output, plain)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert type(other[2]) is type(converted) and torch.equal(other(torch.ones(4, 32)), output)
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        trained(model, watch=watch)
        assert [entry["kind"] for entry in watch.coverage()] == ["Fp8Linear"] * 2
    actual = fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT module FROM sites WHERE actual").to_pylist()
    assert len(actual) == 2


def refusals() -> dict[str, tuple[nn.Module, str]]:
    computed = nn.Linear(32, 32)
    register_parametrization(computed, "weight", Doubled())
    replaced: Any = nn.Linear(32, 32)
    replaced.forward = lambda input: input
    attention = nn.MultiheadAttention(32, 2)
    return {
        "own forward": (Casts(32, 32), "(Casts) is not converted: Casts has a forward of its own, which"),
        "computed weight": (computed, "its weight is computed from others (a parametrization); call convert() before"),
        "replaced forward": (replaced, "its forward was replaced on the instance (by refusals.<locals>.<lambda>)"),
        "attention": (
            attention,
            "0.out_proj (NonDynamicallyQuantizableLinear) is not converted: nn.MultiheadAttention",
        ),
    }


@pytest.mark.parametrize("case", refusals())
def test_one_that_cannot_be_converted_is_named_once_with_the_reason(case: str, capsys: Any) -> None:
    module, expected = refusals()[case]
    kind = type(module)
    fp8debug.convert(model := nn.Sequential(module, nn.Linear(32, 32)), "blockwise")
    (line,) = capsys.readouterr().err.splitlines()
    assert expected in line and type(module) is kind and isinstance(model[1], fp8debug.Fp8Linear)
    fp8debug.convert(nn.Sequential(refusals()[case][0]), "blockwise", overrides={"*": None})
    assert capsys.readouterr().err == ""  # nobody asked for it


def test_modules_of_other_classes_are_named_once(capsys: Any) -> None:
    class Conv1D(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), Conv1D(), Conv1D(), nn.Embedding(32, 32), nn.LayerNorm(32))

    fp8debug.convert(model(), "blockwise")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fp8debug: 1, 2 (Conv1D) are not converted: convert() converts nn.Linear alone")
    fp8debug.convert(model(), "bf16", overrides={"0": "blockwise"})
    assert capsys.readouterr().err == ""  # nobody asked for it


def test_coverage_has_the_reason(tmp_path: Path) -> None:
    fp8debug.convert(model := nn.Sequential(nn.Linear(32, 32), Casts(32, 32)), "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        trained(model, watch=watch)
        reasons = [entry["reason"] for entry in watch.coverage()]
    assert reasons[0] is None and reasons[1].startswith("not converted: Casts has a forward of its own")


def test_modules_that_accelerate_hooked_run_in_fp8_inside_its_hooks(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", exc_type=ImportError)
    model = net(nn.Linear)
    accelerate.cpu_offload(model, execution_device="cpu")
    fp8debug.convert(model, "blockwise")
    assert model[0].weight.is_meta  # the hook fetches it for each call
    twin = fp8debug.convert(net(nn.Linear), "blockwise")
    x = torch.randn(8, 32)
    with fp8debug.watch(model, tmp_path / "run", every=1) as watch:
        output = model(x.requires_grad_())
        output.sum().backward()
        watch.step()
    assert torch.equal(output, twin(x))
    actual = fp8debug.Run(tmp_path / "run").sql("SELECT DISTINCT module FROM sites WHERE actual").to_pylist()
    assert {row["module"] for row in actual} == {"0", "2"}
    accelerate.hooks.remove_hook_from_submodules(model)
    assert isinstance(model[0], fp8debug.Fp8Linear) and "forward" in model[0].__dict__
