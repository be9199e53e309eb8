"""Arms of ``verify`` and ``bisect`` on torchao's Float8Linear: out of FP8 as a whole or by GEMM, emulated, or refused."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8debug.errors import NoMatchError, UsageError
from fp8debug.run.arms import Arm, apply_arm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
    float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed")


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False)).to(torch.bfloat16)


def model(recipe: str = "tensorwise", emulate: bool = True) -> Any:
    net = plain()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    float8.convert_to_float8_training(net, config=config)
    return net


def results(net: nn.Module) -> list[Tensor]:
    """Return the output and all gradients of a step."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).requires_grad_()
    output = net(x)
    output.float().square().mean().backward()
    assert x.grad is not None
    return [output.detach(), x.grad, *(p.grad for p in net.parameters() if p.grad is not None)]


def same(one: Iterable[Tensor], other: Iterable[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def entry(module: str, *gemms: str, **more: Any) -> dict[str, Any]:
    return {"module": module, "gemms": list(gemms or ("fprop", "dgrad", "wgrad")), "tensor": "*", "cast": None, **more}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp"])
def test_the_bf16_arm_is_the_model_unconverted(recipe: str) -> None:
    net = model(recipe)
    assert not same(results(net), results(plain()))
    assert apply_arm(Arm(name="bf16", compute="bf16"), [net]) == {"fp8": 0, "linears": 2}
    net.zero_grad()
    assert same(results(net), results(plain()))


def test_a_whole_module_and_single_gemms_leave_fp8() -> None:
    first = model()
    assert apply_arm(Arm(name="a", fallbacks=(entry("0"),)), [first]) == {"fp8": 1, "linears": 2}
    assert type(first[0]) is nn.Linear and type(first[2]).__name__ == "Float8Linear"

    x = torch.randn(32, 96).to(torch.bfloat16)
    reference: Any = plain()[2]
    sick, cured = model()[2], model()
    assert not torch.equal(sick(x), reference(x))
    assert apply_arm(Arm(name="a", fallbacks=(entry("2", "fprop"),)), [cured])["fp8"] == 2
    assert torch.equal(cured[2](x), reference(x))
    gradients: list[Any] = []
    for layer in (sick, cured[2]):
        inner = x.clone().requires_grad_()
        layer(inner).backward(torch.ones(32, 32, dtype=torch.bfloat16))
        gradients.append((inner.grad, layer.weight.grad))
    assert same(gradients[0], gradients[1]), "dgrad and wgrad stay as they were"


def test_fp8_tensors_are_emulated_gemms() -> None:
    emulated, real = model(emulate=True), model(emulate=False)
    for net in (emulated, real):
        assert apply_arm(Arm(name="t", compute="fp8_tensors"), [net]) == {"fp8": 2, "linears": 2}
    expected = results(model())
    assert same(results(real), expected) and same(results(emulated), expected)
    assert real[0].config.emulate and all(gemm.emulate for gemm in real[0].linear_mm_config)


@pytest.mark.parametrize(
    ("bad", "asked"),
    [
        ({"cast": "e4m3fn tensorwise current"}, "e4m3fn tensorwise current"),
        ({"tensor": "weight"}, "one operand in BF16"),
        ({"until_step": 5}, "BF16 in some steps"),
    ],
)
def test_what_torchao_cannot_do_is_refused(bad: dict[str, Any], asked: str) -> None:
    net = model()
    message = rf"2 is a Float8Linear of torchao: .* asks for {re.escape(asked)}; give --fallbacks FILE"
    with pytest.raises(UsageError, match=message):
        apply_arm(Arm(name="a", fallbacks=(entry("0"), entry("2", **bad))), [net])
    assert type(net[0]).__name__ == "Float8Linear", "nothing is changed"
    with pytest.raises(NoMatchError, match="fallback module '3' matches nothing"):
        apply_arm(Arm(name="a", fallbacks=(entry("3"),)), [net])
