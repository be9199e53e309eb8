"""Faults of FP4 and of block formats, planted in models that train, are named; each clean run of those recipes has no finding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.fallback import recommend
from fp8debug.kernels.dispatch import operand_pair, quantize, statistics
from fp8debug.kernels.reference import all_values
from fp8debug.metrics import Source
from fp8debug.observer.rechecks import RepeatCheck
from fp8debug.recipes import Cast
from fp8debug.types import Quantized
from tests.recording.models import net, train
from tests.shortened import shortened

STEPS, AT = 10, 4
RANDOM = Cast(format="e2m1fn", granularity="1x16", scale_format="e4m3fn", tensor_scale="tensor", rounding="stochastic")
#: fault, recipe, options, code, part of the message.
PLANTED: list[tuple[str, str, dict[str, Any], str, str]] = [
    ("stochastic_zeros", "nvfp4", {}, "F145", "stochastic rounding returned zeros"),
    ("stochastic_nearest", "mxfp4", {}, "F145", "it is rounded to nearest"),
    ("stochastic_biased", "nvfp4", {}, "F145", "away from zero by 0.2"),
    ("stochastic_repeats", "mxfp4", {}, "F145", "the random numbers come back in each step"),
    ("hadamard_signs", "nvfp4", {}, "F146", "about 8 of 16 differ"),
    ("stale_tensor_scale", "nvfp4", {}, "F147", "times what the second-level scale was made for"),
    ("stale_tensor_scale", "nvfp4", {"ratio": 2.0**-20}, "F147", "made for a larger tensor"),
    ("block_scale_range", "nvfp4", {}, "F148", "its block scales saturate in E4M3"),
    ("block_scale_range", "nvfp4", {"factor": 2.0**-16}, "F148", "E4M3 does not reach down to them"),
    ("swizzled_scales", "mxfp8", {}, "F119", "the scales are those of other blocks"),
    ("swizzled_scales", "nvfp4", {}, "F119", "the scales are those of other blocks"),
    ("fp4_not_on", "nvfp4", {}, "F111", "it did not run in e2m1fn"),
    ("max_240_as_448", "tensorwise_fnuz", {}, "F113", "it is 448/240, a scale made for the maximum of e4m3fn"),
]


@pytest.mark.parametrize(
    ("fault", "recipe", "options", "code", "text"), shortened(PLANTED, 3), ids=[f"{f}-{r}-{len(o)}" for f, r, o, _, _ in PLANTED]
)
def test_a_planted_fault_is_named(fault: str, recipe: str, options: dict[str, Any], code: str, text: str, tmp_path: Path) -> None:
    model = net(recipe, {"head": None})
    injection = fp8debug.inject(model, fault, module="blocks.1.down", step=AT, **options)
    with fp8debug.watch(model, tmp_path / "run", every=2, what_if=()) as watch:
        train(model, STEPS, after=lambda _, loss: watch.step(loss=loss))
    injection.remove()
    (finding,) = fp8debug.triage(tmp_path / "run")
    first = AT + 2 if fault == "stochastic_repeats" else AT
    assert (finding.code, finding.module, finding.steps[0]) == (code, "blocks.1.down", first), finding.message
    assert text in finding.message
    assert {f.module for f in recommend(fp8debug.Run(tmp_path / "run"), [finding])} <= {"blocks.1.down"}


def test_a_last_layer_in_fp4_against_the_recipe_is_named(tmp_path: Path) -> None:
    model = net("nvfp4", {"head": None})
    injection = fp8debug.inject(model, "last_layers_in_fp4", module="head")
    with fp8debug.watch(model, tmp_path / "run", every=2, what_if=()) as watch:
        train(model, 4, after=lambda _, loss: watch.step(loss=loss))
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.module) == ("F110", "head")
    assert finding.message == "it runs in FP4 although an override requests high precision"
    injection.remove()
    assert type(model.head) is torch.nn.Linear
    with pytest.raises(UsageError, match=r"blocks.0.up runs in a low precision"):
        fp8debug.inject(model, "last_layers_in_fp4", module="blocks.0.up")


@pytest.mark.parametrize("fault", [f for f in dict.fromkeys(row[0] for row in PLANTED) if f != "max_240_as_448"])
def test_a_recipe_without_what_the_fault_needs_is_refused(fault: str) -> None:
    with pytest.raises(UsageError, match=re.escape("(recipe blockwise); try the recipe 'nvfp4'")):
        fp8debug.inject(net(), fault, module="head")


def test_a_removed_fault_leaves_no_trace() -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    for fault, recipe, options, *_ in PLANTED:
        model = net(recipe)
        (model(x) ** 2).sum().backward()
        expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        injection = fp8debug.inject(model, fault, module="blocks.1.down", **options)
        injection.remove()
        model.zero_grad()
        (model(x) ** 2).sum().backward()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def noise(x: Tensor, q: Quantized) -> dict[str, Any]:
    return all_values(statistics(operand_pair(Source(x), RANDOM, q)))


@pytest.mark.parametrize("seed", range(4))
def test_the_roundings_of_any_tensor_have_mean_0_and_variance_f_1_minus_f(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(128, 256, generator=generator) ** (1 + 2 * seed) * 10.0**-seed
    found = noise(x, quantize(x, RANDOM))
    assert found["num_noise"] > 0.9 * x.numel() * (seed < 3)
    assert abs(found["noise_sum"]) < 5 * found["noise_variance"] ** 0.5
    assert abs(found["noise_sum2"] - found["noise_variance"]) < 5 * found["noise_variance"] ** 0.5
    nearest = quantize(x, Cast.parse(str(RANDOM).replace(" stochastic", "")))
    assert noise(x, nearest)["noise_ratio"] < 0.6
    assert noise(x, Quantized(torch.zeros_like(nearest.data), nearest.scale_inv))["noise_ratio"] > 2


def test_roundings_by_hand() -> None:
    """Scales of 1: 6 is the block's amax; 2.5 lies between 2 and 3, 0.125 between 0 and 0.5, 5 between 4 and 6."""
    cast = Cast(format="e2m1fn", granularity="1x16", scaling="static", scale_inv=1.0, rounding="stochastic")
    x = torch.tensor([[6.0, 2.5, 0.125, 5.0, 7.0, 1.0]])
    q = Quantized(torch.tensor([[6.0, 3.0, 0.0, 4.0, 6.0, 1.0]]).to(torch.float8_e4m3fn), torch.ones(1, 1))
    found = all_values(statistics(operand_pair(Source(x), cast, q)))
    assert found["num_noise"] == 3
    assert found["noise_sum"] == 0.5 - 0.25 - 0.5
    assert found["noise_sum2"] == 0.25 + 0.0625 + 0.25
    assert found["noise_variance"] == 0.25 + 0.1875 + 0.25


def test_repeats_are_told_from_unchanged_elements() -> None:
    check, generator = RepeatCheck(), torch.Generator().manual_seed(0)
    x = torch.randn(64, 64, generator=generator)
    q = quantize(x, RANDOM)
    assert float(check.compare(x, q, RANDOM)["noise_repeat_variance"]) == 0, "nothing before it"
    same = check.compare(x, q, RANDOM)
    assert float(same["noise_repeat"]) == float(same["noise_repeat_variance"]) == 0, "a tensor that has not changed"
    other = torch.randn(64, 64, generator=generator)
    found = check.compare(other, quantize(other, RANDOM), RANDOM)
    assert abs(float(found["noise_repeat"])) < 5 * float(found["noise_repeat_variance"]) ** 0.5
    assert float(found["noise_repeat_variance"]) > 50
