"""A NaN that begins between two sampled steps: its module and step are known, and nothing of the training changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fp8debug
from fp8debug.observer.observer import place_of_first
from fp8debug.rules import Findings
from tests.recording.models import Net, net, train
from tests.scaled_mm import NEEDS_SCALED_MM

AT, EVERY = 7, 5


def record(path: Path, model: nn.Module, **options: Any) -> tuple[Findings, list[float]]:
    with fp8debug.watch(model, path, every=EVERY, **options) as watch:
        losses = train(model, 12, after=lambda _, loss: watch.step(loss=loss))
    return fp8debug.triage(path), losses


def poison_at(model: nn.Module, module: str, spoil: Any) -> None:
    """Call ``spoil`` before that module's forward of step AT."""
    steps = [0]

    def before(_: nn.Module, args: tuple[Tensor, ...]) -> Any:
        steps[0] += 1
        return spoil(args[0]) if steps[0] == AT + 1 else None

    model.get_submodule(module).register_forward_pre_hook(before)


@pytest.mark.parametrize("module", ["blocks.0.up", "blocks.1.down"])
def test_the_module_that_makes_it_is_named_with_its_step(module: str, tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "zero_tile", module=module, step=AT)
    findings, losses = record(tmp_path / "run", model)
    assert losses[AT] != losses[AT]
    finding = findings[0]
    assert (finding.code, finding.name, finding.module, finding.steps) == ("F103", "gemm-nonfinite", module, (AT, AT))
    assert "which was not sampled, and input and weight were finite" in finding.message
    events = fp8debug.Run(tmp_path / "run").sql("SELECT step, module FROM events WHERE kind = 'nonfinite'").to_pylist()
    assert events[0] == {"step": AT, "module": module}
    fallbacks = fp8debug.recommend(tmp_path / "run", findings)
    assert {f.module for f in fallbacks} == {module}


def test_one_from_outside_accuses_no_linear(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    poison_at(model, "blocks.1.down", lambda x: torch.full_like(x, float("nan")))
    findings, _ = record(tmp_path / "run", model)
    assert [(f.code, f.name, f.module, f.steps[0]) for f in findings] == [("F125", "nonfinite-from-outside", "blocks.1.down", AT)]
    assert findings[0].message.startswith(
        "first NaN/Inf: the forward input of blocks.1.down at step 7; no recorded Linear produced it (head is not); blocks.1.up,"
        " computed before it"
    )


def test_one_in_the_weights_was_made_a_step_earlier(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})

    def spoil(x: Tensor) -> None:
        model.get_parameter("blocks.1.up.weight").data[0, 0] = float("nan")

    poison_at(model, "blocks.0.gate", spoil)
    findings, _ = record(tmp_path / "run", model)
    assert [(f.code, f.name, f.module) for f in findings] == [("F125", "nonfinite-loss-unseen", "blocks.1.up")]
    assert "first NaN/Inf: the weight of blocks.1.up at step 7, which held it when the step began" in findings[0].message


def test_who_does_not_look_blames_nobody(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "zero_tile", module="blocks.0.up", step=AT)
    findings, _ = record(tmp_path / "run", model, check_finite=False)
    assert [(f.code, f.name, f.module) for f in findings] == [("F125", "nonfinite-loss-unseen", None)]
    assert not fp8debug.Run(tmp_path / "run").sql("SELECT 1 AS one FROM steps WHERE nonfinite_module IS NOT NULL").num_rows


def test_the_training_is_the_same_to_the_bit(tmp_path: Path) -> None:
    plain = train(net(), 12)
    findings, watched = record(tmp_path / "run", net(), check_finite=True)
    assert watched == plain
    assert findings == []


def test_an_evaluation_between_two_steps_is_not_looked_at(tmp_path: Path) -> None:
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=EVERY) as watch:
        for _ in range(8):
            with torch.no_grad():
                model(torch.full((4, 64), float("nan")))
            train(model, 1, after=lambda _, loss: watch.step(loss=loss))
    assert not fp8debug.Run(tmp_path / "run").sql("SELECT 1 AS one FROM steps WHERE nonfinite_module IS NOT NULL").num_rows


def test_the_place_of_the_first_is_one_number() -> None:
    fine = torch.tensor([True, True, True])
    assert place_of_first([fine, fine]).item() == -1
    assert place_of_first([fine, torch.tensor([False, True, False]), torch.tensor([True, True, False])]).item() == 4 + 1
    assert place_of_first([torch.tensor([True, False, False]), fine]).item() == 2
    assert place_of_first([fine, fine, torch.tensor([True, True, False])]).item() == 8


def test_a_net_of_the_tests_has_what_these_expect() -> None:
    assert {"blocks.0.up", "blocks.1.down"} <= dict(Net().named_modules()).keys()


class Late(nn.Linear):
    """A user's FP8 Linear over torch._scaled_mm that writes to the result of its GEMM ``late``, after it, at the step AT."""

    late = ""
    step = 0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Scaled.apply(x, self.weight, self)
        return out

    def product(self, which: str, a: Tensor, b: Tensor) -> Tensor:
        """Return ``a @ b.t()`` under one scale each."""
        scales = [t.abs().amax().clamp(min=1e-12).float() / 448 for t in (a, b)]
        first, second = ((t / s).to(torch.float8_e4m3fn) for t, s in zip((a, b), scales, strict=True))
        out = torch._scaled_mm(first, second.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16).to(a.dtype)
        if which == self.late and Late.step == AT:
            out[-7:] = float("nan")
        return out


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Late) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x, weight)
        return layer.product("fprop", x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dgrad = ctx.layer.product("dgrad", grad, weight.t().contiguous())
        return dgrad, ctx.layer.product("wgrad", grad.t().contiguous(), x.t().contiguous()), None


def late(module: str, which: str) -> nn.Module:
    model = net(None)
    for name in ("gate", "down"):
        for block in model.blocks:
            block.get_submodule(name).__class__ = Late
    layer = model.get_submodule(module)
    assert isinstance(layer, Late)
    layer.late = which
    return model


def record_late(path: Path, model: nn.Module, every: int, **options: Any) -> Findings:
    def after(step: int, loss: Tensor) -> None:
        watch.step(loss=loss)
        Late.step = step + 1

    Late.step = 0
    with fp8debug.watch(model, path, every=every, **options) as watch:
        train(model, 10, after=after)
    return fp8debug.triage(path)


@NEEDS_SCALED_MM
@pytest.mark.parametrize(("which", "every"), [("fprop", 1), ("dgrad", 1), ("dgrad", EVERY), ("wgrad", EVERY)])
def test_what_enters_after_a_gemm_is_its_modules(which: str, every: int, tmp_path: Path) -> None:
    finding = record_late(tmp_path / "run", late("blocks.1.down", which), every)[0]
    tensor = {"fprop": "output", "dgrad": "grad_input", "wgrad": "grad_weight"}[which]
    assert (finding.code, finding.name, finding.steps) == ("F103", "gemm-nonfinite", (AT, AT))
    assert (finding.module, finding.gemm, finding.tensor) == ("blocks.1.down", which, tensor)
    assert ("that leaves the module" in finding.message) == (every == 1)


@NEEDS_SCALED_MM
def test_a_backward_pass_that_overflows_and_is_skipped_is_no_fault(tmp_path: Path) -> None:
    """A gradient scaler throws such a step away; the loss stays finite."""
    model = late("blocks.1.down", "dgrad")

    def skip(*_: Any) -> None:
        if Late.step == AT:
            for p in model.parameters():
                p.grad = None

    handle = register_optimizer_step_pre_hook(skip)
    try:
        findings = record_late(tmp_path / "run", model, EVERY)
    finally:
        handle.remove()
    assert findings == []


@NEEDS_SCALED_MM
def test_a_gradient_from_outside_is_dated_between_two_samples(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})

    def spoil(grad: Tensor) -> Tensor:
        return grad * float("nan")

    poison_at(model, "head", lambda x: x.register_hook(spoil) and None)
    findings, losses = record(tmp_path / "run", model)
    assert losses[AT] == losses[AT] and losses[AT + 1] != losses[AT + 1]
    assert [(f.code, f.name, f.module, f.gemm, f.tensor, f.steps[0]) for f in findings] == [
        ("F125", "nonfinite-from-outside", "blocks.1.down", "dgrad", "grad_output", AT + 1)
    ]
    assert findings[0].message.startswith(
        f"first NaN/Inf: the dgrad grad_output of blocks.1.down at step {AT}; no recorded Linear produced"
    )


@NEEDS_SCALED_MM
def test_who_asks_for_no_search_has_none_of_late_results(tmp_path: Path) -> None:
    findings = record_late(tmp_path / "run", late("blocks.1.down", "dgrad"), EVERY, check_finite=False)
    assert [(f.code, f.name, f.module) for f in findings] == [("F125", "nonfinite-loss-unseen", None)]
