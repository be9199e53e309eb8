"""Fp8Linear and convert(): arithmetic, gradients, state, and what they refuse."""

from __future__ import annotations

import copy
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp8debug
from fp8debug import Cast, Fp8Linear, get_recipe, list_recipes
from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.kernels.dispatch import dequantize, quantize
from fp8debug.types import OPERANDS, Gemm
from tests.recording.models import Net, batch, net, train


def layer(recipe: str = "blockwise", bias: bool = True, dtype: torch.dtype = torch.float32) -> Fp8Linear:
    torch.manual_seed(1)
    return Fp8Linear(200, 72, bias=bias, recipe=recipe).to(dtype)


def faithful(x: torch.Tensor, cast: Cast | None) -> torch.Tensor:
    return x.float() if cast is None else dequantize(quantize(x, cast), cast)


@pytest.mark.parametrize("recipe", list_recipes())
@pytest.mark.parametrize("bias", [True, False])
def test_three_gemms_of_six_quantized_operands(recipe: str, bias: bool) -> None:
    linear, casts = layer(recipe, bias), get_recipe(recipe).casts
    x, grad_output = torch.randn(150, 200, requires_grad=True), torch.randn(150, 72)
    output = linear(x)
    output.backward(grad_output)
    tensors = {"input": x.detach(), "weight": linear.weight.detach(), "grad_output": grad_output}
    (a, b), (c, d), (e, f) = ([faithful(tensors[t], casts[g, t]) for t in OPERANDS[g]] for g in Gemm)
    expected = a @ b.t() + (linear.bias if bias else 0)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad, c @ d, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(linear.weight.grad, e.t() @ f, rtol=1e-5, atol=1e-4)
    if bias:
        assert linear.bias is not None
        torch.testing.assert_close(linear.bias.grad, grad_output.sum(0))


def test_shapes_and_dtypes_are_those_of_linear() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((200,), (3, 200), (2, 5, 200), (0, 200)):
            x = torch.randn(*shape, dtype=dtype, requires_grad=True)
            output = layer()(x)
            assert output.shape == (*shape[:-1], 72) and output.dtype == dtype
            output.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape and x.grad.dtype == dtype


def test_fp32_and_bf16_masters_keep_their_gradient_dtype() -> None:
    for master in (torch.float32, torch.bfloat16):
        linear = layer(dtype=master)
        linear(torch.randn(40, 200, dtype=torch.bfloat16)).sum().backward()
        assert linear.weight.grad is not None and linear.weight.grad.dtype == master


def test_autocast_gives_its_dtype() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer()(torch.randn(40, 200))
    assert output.dtype == torch.bfloat16
    output.sum().backward()


def test_gradients_accumulate_over_microbatches() -> None:
    linear, x = layer(), torch.randn(2, 40, 200)
    for part in x:
        linear(part).sum().backward()
    parts = [torch.autograd.grad(linear(part).sum(), linear.weight)[0] for part in x]
    torch.testing.assert_close(linear.weight.grad, parts[0] + parts[1])


def test_no_gradient_that_nobody_wants() -> None:
    linear = layer()
    linear(torch.randn(40, 200)).sum().backward()  # an input without gradient
    linear.weight.requires_grad_(False)
    linear.weight.grad = None
    x = torch.randn(40, 200, requires_grad=True)
    linear(x).sum().backward()
    assert linear.weight.grad is None and x.grad is not None
    with torch.no_grad():
        assert not linear.eval()(x).requires_grad
    torch.testing.assert_close(linear(x).detach(), linear.train()(x).detach(), rtol=0, atol=0)


def test_bf16_recipe_is_nn_linear_to_the_bit() -> None:
    linear, x = layer("bf16"), torch.randn(40, 200)
    assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))


def test_state_dict_is_that_of_linear() -> None:
    plain, fp8 = nn.Linear(64, 32), fp8debug.convert(nn.Linear(64, 32), "blockwise")
    fp8(torch.randn(8, 64)).sum().backward()
    assert list(fp8.state_dict()) == list(plain.state_dict())
    fp8.load_state_dict(plain.state_dict())
    assert torch.equal(fp8.weight, plain.weight)  # type: ignore[arg-type]  # a Linear's


def test_delayed_scaling_saves_its_history_and_loads_without_one(tmp_path) -> None:  # type: ignore[no-untyped-def]
    first = net("tensorwise_delayed")
    train(first, 3)
    torch.save(first.state_dict(), tmp_path / "model.pt")
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert [k for k in state if "_extra_state" in k] == [
        f"{name}._extra_state" for name, m in first.named_modules() if isinstance(m, Fp8Linear)
    ]
    second = net("tensorwise_delayed")
    second.load_state_dict(state)
    x, _ = batch(9)
    assert torch.equal(first(x * 3), second(x * 3))  # the same stale scales
    bare = {k: v for k, v in state.items() if "_extra_state" not in k}
    third = net("tensorwise_delayed")
    third.load_state_dict(bare)
    assert not torch.equal(first(x * 3), third(x * 3))
    net("blockwise").load_state_dict(state)  # a recipe without history ignores it


def test_the_extra_state_of_another_library_is_unexpected_as_with_linear() -> None:
    state = {**net("tensorwise_delayed").state_dict(), "head._extra_state": torch.zeros(3)}
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "head._extra_state"'):
        net("tensorwise_delayed").load_state_dict(state)
    assert net("tensorwise_delayed").load_state_dict(state, strict=False).unexpected_keys == ["head._extra_state"]


def test_a_pass_without_values_has_the_shape_of_linear() -> None:
    assert net("blockwise").to("meta")(torch.empty(3, 5, 64, device="meta")).shape == (3, 5, 16)


def test_delayed_scaling_uses_the_past() -> None:
    linear = layer("tensorwise_delayed", bias=False)
    x = torch.randn(64, 200)
    linear(x)
    clipped = linear(x * 64)
    assert clipped.norm() < 8 * linear(x).norm()


def test_an_evaluation_leaves_no_trace_in_the_history() -> None:
    x, outputs = torch.randn(64, 200), []
    for evaluate in (False, True):
        linear = layer("tensorwise_delayed")
        linear(x)
        if evaluate:
            with torch.no_grad():
                linear(x * 100)
        outputs.append(linear(x * 3).detach())
    assert torch.equal(*outputs)


def test_convert_keeps_objects_parameters_and_hooks() -> None:
    model = Net()
    linear, weight, seen = model.head, model.head.weight, []
    model.head.register_forward_hook(lambda *_: seen.append(1))
    assert fp8debug.convert(model, "blockwise") is model
    assert model.head is linear and model.head.weight is weight and isinstance(model.head, Fp8Linear)
    model(torch.randn(4, 64))
    assert seen == [1]


def test_an_override_that_is_a_name_stands_for_it_alone() -> None:
    model = nn.ModuleDict({"w[0]": nn.Linear(16, 16), "w0": nn.Linear(16, 16)})
    fp8debug.convert(model, "blockwise", overrides={"w[0]": None})
    assert type(model["w[0]"]) is nn.Linear and isinstance(model["w0"], fp8debug.Fp8Linear)


def test_overrides_the_last_one_wins() -> None:
    model = net("blockwise", {"blocks.0.*": "tensorwise_current", "blocks.0.down": None, "head": get_recipe("rowwise")})
    names = {name: m.recipe.name for name, m in model.named_modules() if isinstance(m, Fp8Linear)}
    assert names == {
        "blocks.0.gate": "tensorwise_current",
        "blocks.0.up": "tensorwise_current",
        **{f"blocks.1.{part}": "blockwise" for part in ("gate", "up", "down")},
        "head": "rowwise",
    }
    assert type(model.get_submodule("blocks.0.down")) is nn.Linear


def test_converting_again_changes_the_recipe() -> None:
    model = fp8debug.convert(net(), "rowwise", overrides={"head": None})
    assert model.get_submodule("blocks.0.up").recipe.name == "rowwise"  # type: ignore[union-attr]
    assert model.get_submodule("head").recipe.is_high_precision  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: net("blockwise", {"blocks.0.dwon": None}),
            NoMatchError,
            "override 'blocks.0.dwon' matches nothing: did you mean 'blocks.0.down'",
        ),
        (lambda: net("blokwise"), UnknownNameError, "unknown recipe 'blokwise': did you mean 'blockwise'"),
        (lambda: fp8debug.convert(nn.ReLU(), "blockwise"), UsageError, "ReLU has no nn.Linear to convert"),
        (lambda: fp8debug.convert(Net(), 3), UsageError, "expected a Recipe or its name, got int"),  # type: ignore[arg-type]
        (
            lambda: layer()(torch.randn(4, 100)),
            UsageError,
            "expected input[..., 200], got float32[4, 100] at in_features=200, out_features=72",
        ),
    ],
)
def test_mistakes_are_said_in_one_line(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_a_copy_works_and_is_not_watched(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = net()
    with fp8debug.watch(model, tmp_path / "run"):
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "whole.pt")
    assert all(m.probe is None for m in twin.modules() if isinstance(m, Fp8Linear))
    loaded = torch.load(tmp_path / "whole.pt", weights_only=False)
    x, _ = batch(0)
    assert torch.equal(twin(x), model(x)) and torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "tensorwise_delayed", "mxfp8"])
def test_a_whole_converted_model_loads_with_weights_only(recipe: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = fp8debug.convert(nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32)), recipe)
    model(torch.randn(32, 32))
    torch.save(model, tmp_path / "whole.pt")
    with torch.serialization.safe_globals([nn.Sequential]):  # as a script that saves whole models names its own classes
        loaded = torch.load(tmp_path / "whole.pt", weights_only=True)
    x = torch.randn(32, 32)
    assert torch.equal(loaded(x), model(x))
    assert loaded.get_submodule("0").recipe == model.get_submodule("0").recipe


def test_extra_repr_names_the_recipe() -> None:
    assert repr(layer()) == "Fp8Linear(in_features=200, out_features=72, bias=True, recipe=blockwise)"


# Two first passes in a row without gradients, as reentrant checkpoints have them, read one history: not in the list.
@pytest.mark.parametrize(("reentrant", "num_microbatches"), [(False, 1), (False, 2), (True, 1)])
def test_a_recomputed_forward_pass_takes_the_scales_of_the_first(reentrant: bool, num_microbatches: int) -> None:
    def grads(recompute: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        fp8debug.convert(model, "tensorwise_delayed")
        found: list[torch.Tensor] = []
        for step in range(4):
            inputs = [(4.0**step * (1 + i) * torch.randn(8, 32)).requires_grad_() for i in range(num_microbatches)]
            outputs = [checkpoint(model, x, use_reentrant=reentrant) if recompute else model(x) for x in inputs]
            for output in outputs[::-1]:
                output.square().mean().backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    assert all(torch.equal(a, b) for a, b in zip(grads(False), grads(True), strict=True))


@pytest.mark.parametrize(("recipe", "watched"), [("blockwise", False), ("tensorwise_delayed", True), ("nvfp4", True)])
def test_an_exported_model_computes_the_same_and_leaves_the_model_as_it_was(recipe: str, watched: bool, tmp_path: Path) -> None:
    def trained(watch_too: bool, exports: bool) -> list[float]:
        model, (x, _) = net(recipe), batch(9)
        with fp8debug.watch(model, tmp_path / "run", every=2) if watch_too else nullcontext():
            losses = train(model, steps=2)
            if exports:
                with torch.no_grad():
                    expected = model(x)
                    program = torch.export.export(model, (x,), strict=False)
                    assert torch.equal(program.module()(x), expected)
                    torch.export.save(program, tmp_path / "model.pt2")
                    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), expected)
            return losses + train(model, steps=2)

    assert trained(watched, exports=True) == trained(False, exports=False)


def test_a_fault_is_not_exported() -> None:
    model = net()
    fp8debug.inject(model, "stale_scale", module="head")
    with pytest.raises(UsageError, match=r"torch\.export under a fault"):
        torch.export.export(model, (batch(0)[0],), strict=False)
