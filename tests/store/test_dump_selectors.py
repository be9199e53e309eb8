"""Strings of ``watch(dump=...)``: what they select, their mistakes line by line, and when a loss is a spike."""

from __future__ import annotations

import random

import pytest

from fp8debug.errors import Fp8DebugError
from fp8debug.loss_spikes import SpikeDetector
from fp8debug.store.dump_selectors import Selector, parse_selectors
from fp8debug.types import match_fqn

MODULES = ["blocks.0.mlp.up", "blocks.0.mlp.down", "blocks.1.mlp.down", "head"]


@pytest.mark.parametrize(
    ("text", "sites", "steps"),
    [
        ("blocks.0.mlp.up", {("blocks.0.mlp.up", g, t) for g, t in [("fprop", "input"), ("wgrad", "grad_output")]}, {0, 10, 90}),
        ("*.down:fprop:input", {("blocks.0.mlp.down", "fprop", "input"), ("blocks.1.mlp.down", "fprop", "input")}, {0, 10, 90}),
        ("head::weight", {("head", "fprop", "weight"), ("head", "dgrad", "weight")}, {0, 10, 90}),
        (":wgrad", {(m, "wgrad", "grad_output") for m in MODULES}, {0, 10, 90}),
        ("head:fprop:input@10", {("head", "fprop", "input")}, {10}),
        ("head:fprop:input@:50", {("head", "fprop", "input")}, {0, 10}),
        ("head:fprop:input@50:", {("head", "fprop", "input")}, {90}),
        ("head:fprop:input@10:100:40", {("head", "fprop", "input")}, {10, 90}),
        ("head:fprop:input@::90", {("head", "fprop", "input")}, {0, 90}),
    ],
)
def test_what_is_selected(text: str, sites: set[tuple[str, str, str]], steps: set[int]) -> None:
    (selector,) = parse_selectors([text], MODULES, 10)
    keys = [("fprop", "input"), ("fprop", "weight"), ("dgrad", "weight"), ("wgrad", "grad_output")]
    found = {(m, g, t) for m in MODULES for g, t in keys if selector.takes_site(m, g, t)}
    assert found & sites == sites and len(found) >= len(sites)
    assert {step for step in (0, 10, 90) if selector.takes_step(step)} == steps
    assert not selector.on_finding


def test_on_finding_alone_and_with_sites() -> None:
    for text, others in (("on-finding", True), ("head@on-finding", False), ("head:fprop@ on-finding ", False)):
        (selector,) = parse_selectors([text], MODULES, 10)
        assert selector.on_finding
        assert selector.takes_site("head", "fprop", "input")
        assert selector.takes_site("blocks.0.mlp.up", "fprop", "input") is others


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blocks.0.mlp.don", "dump 'blocks.0.mlp.don' matches nothing: did you mean 'blocks.0.mlp.down' or 'blocks.1.mlp.down'"),
        ("head:fprob", "unknown gemm of dump 'head:fprob' 'fprob': did you mean 'fprop'?"),
        ("head:fprop:output", "unknown operand of dump 'head:fprop:output' 'output': did you mean 'input'?"),
        ("head:dgrad:input", "unknown operand of dump 'head:dgrad:input' 'input': known are grad_output, weight"),
        ("a:b:c:d", "dump 'a:b:c:d' has too many parts; expected MODULE:GEMM:TENSOR@STEPS"),
        ("head@", "dump 'head@': steps are a number, a range A:B or A:B:EVERY, or on-finding; got ''"),
        ("head@-1", "dump 'head@-1': steps are a number, a range A:B or A:B:EVERY, or on-finding; got '-1'"),
        ("head@0:9:0", "dump 'head@0:9:0': steps are a number, a range A:B or A:B:EVERY, or on-finding; got '0:9:0'"),
        ("head@onfinding", "dump 'head@onfinding': steps are a number, a range A:B or A:B:EVERY, or on-finding; got 'onfinding'"),
        ("head@30:10", "dump 'head@30:10': the range '30:10' is empty; the first step comes first and the end is not in it"),
        (
            "head@105",
            "dump 'head@105' selects no sampled step with every=10; sampled are 100, 110, ... or watch with another every=",
        ),
        ("", "expected a selector such as 'blocks.2.mlp.down:fprop:input@100:200', got ''"),
    ],
)
def test_a_mistake_is_one_line_with_the_way_out(text: str, message: str) -> None:
    with pytest.raises(Fp8DebugError) as raised:
        parse_selectors([text], MODULES, 10)
    assert str(raised.value).startswith(message)


def test_a_pattern_that_is_a_name_stands_for_it_alone() -> None:
    names = ["w[0]", "w0", "w1"]
    assert match_fqn(names, "w[0]") == ["w[0]"]
    assert match_fqn(names, "w[01]") == ["w0", "w1"] and match_fqn(names, "w2") == []
    (own, glob) = parse_selectors(["w[0]:fprop", "w[01]"], names, 1)
    assert [name for name in names if own.takes_site(name, "fprop", "input")] == ["w[0]"] and own.text == "w[0]:fprop"
    assert [name for name in names if glob.takes_site(name, "fprop", "input")] == ["w0", "w1"]


def test_a_selector_is_a_value() -> None:
    assert Selector.parse("head@5") == Selector.parse("head@5")
    assert Selector.parse("head@5").text == "head@5"


def test_a_spike_stands_out_of_the_noise_and_a_descent_does_not() -> None:
    noise = random.Random(0)
    descent = [3.0 * 0.97**i + noise.gauss(0, 0.02) for i in range(200)]
    detector = SpikeDetector()
    assert not any(detector.see(loss) for loss in descent)
    found = detector.see(descent[-1] + 1.0)
    assert found is not None and found.limit < descent[-1] + 1.0
    assert detector.see(descent[-1] + 0.9) is None, "coming down from a spike is none"
    early = SpikeDetector()
    assert not any(early.see(loss) for loss in [*descent[:5], 100.0]), "too few to know the noise"


def test_a_return_to_the_first_loss_of_a_short_run_is_a_spike() -> None:
    """Seen where the masters of an old checkpoint were written over the weights at step 12 of 24."""
    losses = [4.35, 3.68, 2.81, 2.25, 1.45, 1.13, 1.15, 1.03, 1.13, 1.05, 1.08, 1.2, 0.97, 4.31, 4.04, 3.62, 3.03, 2.47]
    detector = SpikeDetector()
    assert [step for step, loss in enumerate(losses) if detector.see(loss) is not None] == [13]


def test_losses_that_still_fall_have_no_spike() -> None:
    """Of the first 32 steps of noisy descents, fast and slow, none is told."""
    for seed in range(200):
        noise = random.Random(seed)
        rate, size = noise.choice([0.7, 0.85, 0.95, 0.99]), noise.choice([0.02, 0.1, 0.3])
        detector = SpikeDetector()
        losses = [1.0 + 3.5 * rate**i + noise.gauss(0, size) for i in range(48)]
        assert not any(detector.see(loss) for loss in losses), (seed, rate, size)
