"""Every fault, planted in a model that trains, is found by triage: the module and the cause; and its cure helps."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug import Fp8Linear
from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from tests.recording.models import Net, batch, net, train
from tests.shortened import shortened

STEPS, AT = 24, 12
#: Faults that need another model, several ranks or a whole run, with the files that plant them: ``test_run_faults``.
ELSEWHERE = {
    *("router_in_fp8", "unasked_fp8", "starved_expert", "rank_scale", "stale_inference", "depth_outliers"),
    *("loss_scale_loop", "lr_too_high", "bf16_gradient_sum", "lost_microbatches", "rounded_weights", "no_gradient"),
    *("coarse_weight", "moment_underflow", "emptied_gradient", "overwritten_gradient", "unwritten_bias_gradient"),
    *("standing_count", "lost_second_moment", "emptied_moments", "clipped_while_scaled"),
    *("stochastic_zeros", "stochastic_nearest", "stochastic_biased", "stochastic_repeats", "hadamard_signs", "fp4_not_on"),
    *("stale_tensor_scale", "block_scale_range", "swizzled_scales", "last_layers_in_fp4", "max_240_as_448"),
}
#: Faults of the backward pass or of data: they leave the model's outputs alone.
OF_GRADIENTS = {"data_spike", "uneven_tokens", "double_quantization", "recompute_scale", "gradient_elsewhere"}
#: Those that need a weight to age before they show.
OF_TIME = {"stale_weight"}
FAULTS = {fault.name: fault for fault in fp8debug.list_faults()}
#: Where each can be planted: the first layer's input wants no gradient, so it has no dgrad.
PLACES = {
    name: ("blocks.1.up" if name == "uneven_tokens" else "blocks.0.up", "blocks.1.down")
    for name in (one.name for one in FAULTS.values() if one.needs_module and one.name not in ELSEWHERE)
}
#: In one of them each is planted by `make test`, and in the other by `make test-long`.
PLANTED = {name: places[number % 2] for number, (name, places) in enumerate(PLACES.items())}


def sick_run(path: Path, name: str, module: str | None, model: nn.Module | None = None, fallbacks: object = None) -> list[float]:
    model = model or net("blockwise", {"head": None})
    injection = fp8debug.inject(model, name, module=module, step=AT)
    if fallbacks is not None:
        fp8debug.apply(model, fallbacks)  # type: ignore[arg-type]  # a list
    with fp8debug.watch(model, path, every=3) as watch:
        losses = train(model, STEPS, after=lambda _, loss: watch.step(loss=loss))
    injection.remove()
    assert all(m.distortion is None for m in model.modules() if isinstance(m, Fp8Linear))
    return losses


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Return the run in which a module has a fault, recorded once."""

    @functools.cache
    def record(name: str, module: str) -> Path:
        path = tmp_path_factory.mktemp("sick") / "run"
        sick_run(path, name, module)
        return path

    return record


@pytest.mark.parametrize(
    ("name", "module"), shortened([(name, place) for name, places in PLACES.items() for place in places], PLANTED.items())
)
def test_triage_names_the_module_and_the_cause(name: str, module: str, sick: Callable[[str, str], Path]) -> None:
    findings, code = fp8debug.triage(sick(name, module)), FAULTS[name].code
    assert [f.code for f in findings] == [code], [f.message for f in findings]
    assert findings[0].module == module
    assert findings[0].steps[0] == (0 if name == "unconverted" else AT)


def test_a_module_called_twice_that_makes_nan_is_named(tmp_path: Path) -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.blocks[1](x))

    torch.manual_seed(0)
    sick_run(tmp_path / "run", "zero_tile", "blocks.1.up", fp8debug.convert(Twice(), "blockwise"))
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.module, finding.steps[0]) == ("F103", "blocks.1.up", AT)


def test_a_bad_batch_blames_no_layer(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, "data_spike", step=40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with fp8debug.watch(model, tmp_path / "run", every=5) as watch:
        losses = train(model, 50, optimizer, after=lambda _, loss: watch.step(loss=loss))
    assert losses[40] > 2 * losses[39]
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.module, finding.severity) == ("F125", None, "info")
    assert finding.steps == (40, 40)


@pytest.mark.parametrize("recipe", shortened(fp8debug.list_recipes(), 3))
def test_a_healthy_run_has_no_finding(recipe: str, tmp_path: Path) -> None:
    model = net(recipe)
    with fp8debug.watch(model, tmp_path / "run", every=3) as watch:
        train(model, STEPS, after=lambda _, loss: watch.step(loss=loss))
    assert fp8debug.triage(tmp_path / "run") == []


@pytest.mark.parametrize("name", ["zero_tile", "stale_scale", "stale_history", "e8m0_floor", "wrong_format", "wrong_scale",
                                  "short_accumulator"])  # fmt: skip
def test_the_recommended_fallback_cures_the_run(name: str, sick: Callable[[str, str], Path], tmp_path: Path) -> None:
    run = fp8debug.Run(sick(name, PLANTED[name]))
    fallbacks = fp8debug.recommend(run, fp8debug.triage(run))
    assert {f.module for f in fallbacks} == {PLANTED[name]}
    losses = sick_run(tmp_path / "cured", name, PLANTED[name], fallbacks=fallbacks)
    assert math.isfinite(losses[-1])
    assert fp8debug.triage(tmp_path / "cured") == []


def test_a_removed_fault_leaves_no_trace() -> None:
    for fault in (f for f in fp8debug.list_faults() if f.name not in ELSEWHERE):
        model = net()
        x, _ = batch(3)
        expected, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
        injection = fp8debug.inject(model, fault.name, module="blocks.1.down" if fault.needs_module else None)
        faulty = model(x)
        injection.remove()
        injection.remove()
        assert torch.equal(model(x), expected), fault.name
        assert not torch.equal(faulty, expected) or fault.name in OF_GRADIENTS | OF_TIME, fault.name
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()), fault.name


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_faults_of_one_module_go_in_any_order(order: tuple[int, ...]) -> None:
    model = net()
    x, _ = batch(0)
    healthy = model(x)
    names = ("wrong_scale", "short_accumulator", "wrong_format")
    planted = [fp8debug.inject(model, name, module="blocks.0.up") for name in names]
    for number in order:
        assert not torch.equal(model(x), healthy)
        planted[number].remove()
    assert torch.equal(model(x), healthy)
    linear = model.get_submodule("blocks.0.up")
    assert isinstance(linear, Fp8Linear) and linear.distortion is None and linear.summation is None


def test_a_fault_waits_for_its_step() -> None:
    model, twin = net(), net()
    fp8debug.inject(model, "wrong_scale", module="head", step=3, factor=4.0)
    sick, healthy = train(model, 5), train(twin, 5)
    assert sick[:3] == healthy[:3] and sick[3] != healthy[3]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp8debug.inject(net(), "stale_skale", "head"), UnknownNameError, "did you mean 'stale_scale'"),
        (
            lambda: fp8debug.inject(net(), "stale_scale"),
            UsageError,
            "fault 'stale_scale' needs module=, the FQN of a Linear such as",
        ),
        (lambda: fp8debug.inject(net(), "stale_scale", "blocks.0.dwon"), NoMatchError, "did you mean 'blocks.0.down'"),
        (lambda: fp8debug.inject(net(), "stale_scale", "head", ration=2), UnknownNameError, "did you mean 'ratio'"),
        (lambda: fp8debug.inject(net(None), "stale_scale", "head"), UsageError, "head does not run in FP8 (Linear)"),
    ],
)
def test_mistakes_are_said_in_one_line(call, error, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(error, match=re.escape(message)) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_every_fault_has_a_rule_and_a_description() -> None:
    from fp8debug.rules import RULES

    codes = [rule.code for rule in RULES]
    for fault in fp8debug.list_faults():
        assert fault.code in codes and fault.description
    bare = set(codes) - {fault.code for fault in fp8debug.list_faults()}
    assert bare == {"F144"}, f"rules that no fault shows: {bare}; what a resume changes is no fault to inject"
