"""What an arm does to a model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8debug
from fp8debug.errors import NoMatchError, UsageError
from fp8debug.run.arms import Arm, apply_arm
from tests.trials.laboratory import Chain

BF16_UP = {"module": "layers.1", "gemms": ["fprop"], "tensor": "*", "cast": None}


def model() -> Chain:
    torch.manual_seed(0)
    chain = Chain()
    fp8debug.convert(chain, "blockwise", overrides={"layers.5": None})
    return chain


def results(chain: Any) -> list[Tensor]:
    """Return the output and all gradients of a step."""
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    output = chain(x)
    output.square().mean().backward()
    return [output.detach(), x.grad, *(p.grad for p in chain.parameters())]


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(a, b, strict=True))


def test_the_bf16_arm_is_the_model_unconverted() -> None:
    chain = model()
    assert apply_arm(Arm(name="bf16", compute="bf16"), [chain]) == {"fp8": 0, "linears": 6}
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(results(chain), results(Chain()), strict=True))


def test_the_fp8_arm_changes_nothing() -> None:
    chain = model()
    assert apply_arm(Arm(name="fp8"), [chain]) == {"fp8": 5, "linears": 6}
    assert all(torch.equal(a, b) for a, b in zip(results(chain), results(model()), strict=True))


def test_fp8_tensors_keep_the_quantization_and_leave_the_gemm() -> None:
    """On a CPU the FP8 GEMM is exact: the arm differs from FP8 by rounding (which may turn some elements of the next
    operand), and from BF16 by the quantization."""
    chain, plain = model(), Chain()
    apply_arm(Arm(name="fp8_tensors", compute="fp8_tensors"), [chain])
    plain.load_state_dict(chain.state_dict())
    found = results(chain)
    assert largest_difference(found, results(model())) < 1e-3
    assert largest_difference(found, results(plain)) > 1e-2


def test_fp8_tensors_keep_what_a_fault_did_to_them() -> None:
    chain = model()
    fp8debug.inject(chain, "wrong_scale", module="layers.2", factor=4.0)
    apply_arm(Arm(name="fp8_tensors", compute="fp8_tensors"), [chain])
    sick = model()
    fp8debug.inject(sick, "wrong_scale", module="layers.2", factor=4.0)
    assert largest_difference(results(chain), results(sick)) < 1e-3
    assert largest_difference(results(chain), results(model())) > 0.1


def test_fallbacks_are_applied_after_the_fault_which_they_cure() -> None:
    chain = model()
    fp8debug.inject(chain, "zero_tile", module="layers.1")
    assert not results(chain)[0].isfinite().all()
    apply_arm(Arm(name="candidates", fallbacks=(BF16_UP,)), [chain])
    assert results(chain)[0].isfinite().all()


def test_an_entry_of_some_steps_switches_between_the_steps_of_an_arm() -> None:
    chain: Any = model()
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.01)
    apply_arm(Arm(name="candidates", fallbacks=({**BF16_UP, "from_step": 3, "until_step": 5},)), [chain], start_step=2)
    seen = []
    for _ in range(4):
        seen.append(chain.layers[1].recipe.casts["fprop", "input"] is None)
        results(chain)
        optimizer.step()
    assert seen == [False, True, True, False], "steps 2 to 5 of the run"


def test_names_of_several_roots_begin_with_their_number() -> None:
    chunks = [model(), model()]
    apply_arm(Arm(name="a", fallbacks=({**BF16_UP, "module": "1.layers.1"},)), chunks)
    casts = [chunk.layers[1].recipe.casts["fprop", "input"] for chunk in chunks]  # type: ignore[union-attr,index]  # an Fp8Linear
    assert casts[0] is not None and casts[1] is None
    with pytest.raises(NoMatchError, match=r"fallback module 'layers\.1' matches nothing"):
        apply_arm(Arm(name="a", fallbacks=(BF16_UP,)), chunks)


def test_a_plain_model_is_converted_to_the_recipe() -> None:
    chain = Chain()
    with pytest.raises(UsageError, match="no module in FP8; give --recipe NAME"):
        apply_arm(Arm(name="fp8"), [chain])
    assert apply_arm(Arm(name="bf16", compute="bf16"), [chain]) == {"fp8": 0, "linears": 6}
    assert type(chain.layers[0]) is nn.Linear
    assert apply_arm(Arm(name="fp8", recipe="rowwise"), [chain]) == {"fp8": 6, "linears": 6}
    assert "recipe=rowwise" in repr(chain.layers[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fp16", "--arm is one of bf16, fp8, fp8_tensors or a JSON file of an arm, got 'fp16'"),
        ("FILE", "unknown compute of an arm 'int8': known are bf16, fp8, fp8_tensors"),
    ],
)
def test_an_arm_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "arm.json"
    path.write_text(json.dumps({"name": "a", "compute": "int8", "fallbacks": []}))
    with pytest.raises(UsageError, match=re.escape(message)):
        Arm.read(str(path) if text == "FILE" else text)


def test_an_arm_goes_through_its_file(tmp_path: Path) -> None:
    arm = Arm(name="candidates", fallbacks=(BF16_UP,), recipe="blockwise")
    path = tmp_path / "arm.json"
    path.write_text(json.dumps(arm.to_dict()))
    assert Arm.read(str(path)) == arm and Arm.read("bf16") == Arm(name="bf16", compute="bf16")
