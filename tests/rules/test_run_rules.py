"""Rules of coverage and of whole runs: what they accuse, what they leave alone, and what they say."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8debug.rules import Severity, triage
from fp8debug.rules.base import Rule
from fp8debug.rules.f111_fp8_not_on import Fp8NotOn
from fp8debug.rules.f112_stale_weight import StaleWeight
from fp8debug.rules.f119_scale_grid import ScaleGrid
from fp8debug.rules.f121_weight_copy import WeightCopyDiffers
from fp8debug.rules.f124_outliers_with_depth import theil_sen
from fp8debug.rules.reading.model_structure import fprop_inputs, is_routed, numbered
from fp8debug.store.schema import OTHER_LOSS_CODE
from fp8debug.types import Gemm, not_observed, not_observed_code
from tests.rules import sick_wholeruns as sick
from tests.synthetic import MODULES, Override, build

#: (code -> module, first step, severity).
ACCUSED = {
    "F109": ("net.0.moe.choose", 0, Severity.WARNING),
    "F114": (sick.CULPRIT, 40, Severity.ERROR),
    "F116": ("net.0.moe.parts.2.a", 40, Severity.INFO),
    "F122": (None, 40, Severity.WARNING),
    "F124": ("net.5.mix", 0, Severity.WARNING),
    "F126": (None, 42, Severity.ERROR),
    "F127": (None, 0, Severity.ERROR),
    "F135": (sick.CULPRIT, 0, Severity.ERROR),
    "F144": (None, 40, Severity.WARNING),
    "F149": (sick.CULPRIT, 40, Severity.ERROR),
    "F150": (sick.CULPRIT, 40, Severity.ERROR),
    "F143": ("blocks.1.mlp.down", 40, Severity.WARNING),
    "F151": ("embed", 40, Severity.WARNING),
}


@pytest.mark.parametrize("code", sick.FIRES)
def test_a_rule_fires_alone(tmp_path: Path, code: str) -> None:
    findings = triage(build(tmp_path / "run", **sick.FIRES[code]))
    assert [f.code for f in findings] == [code], [f.message for f in findings]
    assert (findings[0].module, findings[0].steps[0], findings[0].severity) == ACCUSED[code]
    assert code not in {skipped for skipped, _ in findings.skipped}


@pytest.mark.parametrize(("code", "case"), [(code, case) for code, cases in sick.SILENT.items() for case in cases])
def test_a_near_miss_is_silent(tmp_path: Path, code: str, case: str) -> None:
    assert [f.message for f in triage(build(tmp_path / "run", **sick.SILENT[code][case]))] == []


def test_a_rule_says_what_it_lacks(tmp_path: Path) -> None:
    skipped = dict(triage(build(tmp_path / "run")).skipped)
    assert skipped["F114"] == "one rank only"
    assert skipped["F122"] == "no inference was compared: call watch.compare_inference(batch)"
    assert "F126" not in skipped, "gradients that vanish are seen without a loss scale"


def test_one_of_a_users_own_class_that_ran_in_high_precision(tmp_path: Path) -> None:
    entries: dict[str, dict[str, Any]] = {name: {"kind": "BlockLinear", "requested": None} for name, _, _ in MODULES}
    entries[sick.CULPRIT] |= {"fp8": False, "casts": None}
    (finding,) = triage(build(tmp_path / "run", module_entries=entries))
    assert (finding.code, finding.module) == ("F110", sick.CULPRIT)
    assert finding.message == "a BlockLinear in high precision, and 1 of its 1 sibling run in FP8"


def test_a_weight_that_jumps_at_a_resume(tmp_path: Path) -> None:
    """Ten steps of 1e-5 move no RMS by a third; all weights of an older step are a warning, as somebody may have meant it."""
    jump: dict[str, Any] = {"events": sick.RESUME, "updates": sick.pace(1e-5), "overrides": [sick.sized(1.5, (40, None))]}
    (finding,) = triage(build(tmp_path / "jump", **jump))
    assert (finding.name, finding.module, finding.severity) == ("weights-jump", sick.CULPRIT, Severity.WARNING)
    assert triage(build(tmp_path / "again", **jump), thresholds={"F150": {"max_steps_worth": 200.0}}) == []
    back = [sick.sized(1, (20, 30), "*"), sick.sized(1, (40, 50), "*")]
    (finding,) = triage(build(tmp_path / "older", events=sick.RESUME, overrides=back))
    assert (finding.name, finding.severity, len(finding.also)) == ("older-weights", Severity.WARNING, len(MODULES) - 1)
    assert "is that of step 20, and not that of step 30" in finding.message


@pytest.mark.parametrize(("sum2", "is_lost"), [(1.0, True), (2.0, False), (1.4, False)])
def test_a_shared_weight_whose_gradient_is_that_of_one_use(tmp_path: Path, sum2: float, is_lost: bool) -> None:
    """Gradients of both uses have squares of 1 an element; clipping multiplies all weights' by a quarter."""
    holder, other = "blocks.0.mlp.down", "blocks.1.mlp.down"
    squares = [Override(tensor="grad_weight", slots={"sum_y2": lambda row: float(row["numel"])})]
    updates = {"sum_grad2": 8192 / 16}
    entries = {other: {"shared_with": holder}}
    findings = triage(
        build(
            tmp_path / "run", overrides=squares, module_entries=entries,
            updates=lambda step, module: {**updates, **({"sum_grad2": sum2 * 8192 / 16} if module == holder else {})},
        )
    )  # fmt: skip
    assert [(f.code, f.name, f.module) for f in findings] == ([("F149", "gradient-of-one-use", holder)] if is_lost else [])
    if is_lost:
        assert f"gets the gradient of {holder} alone, and none of {other}, for the shared weight" in findings[0].message


def _rounded_to(bits: int) -> Callable[[float], float]:
    def rounded(loss: float) -> float:
        spacing = 2.0 ** (math.frexp(loss)[1] - bits)
        return round(loss / spacing) * spacing

    return rounded


@pytest.mark.parametrize(
    ("rounded", "name"),
    [(_rounded_to(8), "BF16"), (_rounded_to(11), "FP16"), (_rounded_to(24), None), (_rounded_to(9), None),
     (lambda loss: float(round(loss * 30)), None), (lambda loss: _rounded_to(8)(2.0 + loss // 1), None)],
    ids=["bf16", "fp16", "fp32", "another grid", "whole numbers", "few"],
)  # fmt: skip
def test_losses_that_are_values_of_16_bits(rounded: Callable[[float], float], name: str | None, tmp_path: Path) -> None:
    losses = sick.losses(lambda step: rounded((2.0 + 3.5 * math.exp(-step / 60)) * (1 + 0.01 * math.sin(7.0 * step))))
    findings = [f for f in triage(build(tmp_path / "run", steps=losses, num_steps=100)) if f.code == "F126"]
    assert [(f.name, f.severity) for f in findings] == ([("loss-rounded", Severity.INFO)] if name else [])
    if name:
        assert findings[0].message.startswith(f"all 100 losses are {name} values, two of which lie ")


@pytest.mark.parametrize(
    ("steps", "has_all", "size", "is_found"),
    [((40,), False, 1e4, True), ((40,), False, 500, False), (range(0, 200, 10), False, 1e4, False), ((40,), True, 1e4, False)],
    ids=["one step", "sampling", "every step", "all modules"],
)
def test_a_gradient_out_of_all_proportion_to_wgrads_result(
    tmp_path: Path, steps: Sequence[int], has_all: bool, size: float, is_found: bool
) -> None:
    squares = [Override(tensor="grad_weight", slots={"sum_y2": lambda row: float(row["numel"])})]

    def update(step: int, module: str) -> dict[str, float]:
        is_sick = step in steps and (has_all or module == "blocks.1.mlp.down")
        return {"sum_grad2": 8192 * (size**2 if is_sick else 1.0)}

    findings = triage(build(tmp_path / "run", overrides=squares, updates=update))
    assert [(f.code, f.name, f.module) for f in findings if f.code == "F149"] == (
        [("F149", "gradient-out-of-size", "blocks.1.mlp.down")] if is_found else []
    )
    if is_found:
        assert findings[0].message == (
            "the optimizer gets a gradient 1e+04 times as large (RMS) as wgrad's result at step 40, for the weight of"
            " blocks.1.mlp.down, at 1 sampled step from step 40 on"
        )


def test_a_router_that_the_whole_model_took_along_is_an_info(tmp_path: Path) -> None:
    flips = Override(
        module="net.0.moe.choose", tensor="output", slots={"num_choice_rows": 256, "num_top1_flips": 11, "num_top2_flips": 20}
    )
    run = build(tmp_path / "run", modules=sick.ROUTED, overrides=[*sick.SHARES, flips])
    (finding,) = triage(run)
    assert (finding.code, finding.severity) == ("F109", Severity.INFO)
    assert finding.value == pytest.approx(11 / 256)
    assert finding.message == (
        "it chooses among 4 experts and runs in FP8, as the whole model does: 4.3 % of the sampled tokens change their first"
        " choice"
    )


def test_a_router_whose_twin_stays_out_is_a_mistake(tmp_path: Path) -> None:
    twin = [(name.replace("net.0", "net.1"), *shape) for name, *shape in sick.ROUTED]
    overrides = [*sick.SHARES, *(Override(module=o.module.replace("net.0", "net.1"), tensor=o.tensor, slots=o.slots)
                                 for o in sick.SHARES)]  # fmt: skip
    run = build(tmp_path / "run", modules=(*sick.ROUTED, *twin), recipes={"net.1.moe.choose": None}, overrides=overrides)
    (finding,) = triage(run)
    assert (finding.code, finding.module, finding.severity) == ("F109", "net.0.moe.choose", "warning")


def test_experts_that_all_read_everything_have_a_router_too(tmp_path: Path) -> None:
    entry = {"net.0.moe.choose": {"requested": None}}
    same = [
        Override(
            module="net.0.moe.*", gemm="fprop", tensor="input", slots={"sum_x2": lambda row: row["numel"] * 1.25, "sqnr_db": 31.7}
        )
    ]
    findings = triage(build(tmp_path / "run", modules=sick.ROUTED, module_entries=entry, overrides=same))
    assert [(f.code, f.module) for f in findings] == [("F109", "net.0.moe.choose")]


def test_a_router_whose_outputs_are_padded_for_fp8_is_found(tmp_path: Path) -> None:
    """Four experts, and twelve outputs more that are never chosen; 17 are no multiple of 16."""
    for num, expected in ((16, [("F109", "net.0.moe.choose")]), (17, [])):
        modules = tuple((name, fan_in, num if name.endswith("choose") else out) for name, fan_in, out in sick.ROUTED)
        entry = {"net.0.moe.choose": {"requested": None}}
        run = build(tmp_path / str(num), modules=modules, module_entries=entry, overrides=sick.SHARES)
        found = triage(run, select=["F109"])
        assert [(f.code, f.module) for f in found] == expected
        assert all(f"among {sick.NUM_EXPERTS} experts" in f.message for f in found)


def test_experts_in_one_weight_have_a_router_too(tmp_path: Path) -> None:
    modules = (("net.0.mix", 256, 256), ("net.0.moe.choose", 256, 8))
    entry = {"net.0.moe.choose": {"requested": None, "selects": 8}}
    findings = triage(build(tmp_path / "run", modules=modules, module_entries=entry))
    assert [(f.code, f.module) for f in findings] == [("F109", "net.0.moe.choose")]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"requested": "bf16"}, "it runs in FP8 although an override requests high precision"),
        ({"requested": None}, "it runs in FP8, which was not requested here"),
    ],
)
def test_a_module_in_fp8_that_nobody_asked_for(tmp_path: Path, entry: dict[str, object], message: str) -> None:
    (finding,) = triage(build(tmp_path / "run", module_entries={sick.CULPRIT: entry}))
    assert (finding.code, finding.module, finding.message) == ("F110", sick.CULPRIT, message)


def test_a_site_that_a_group_leaves_out(tmp_path: Path) -> None:
    plan = {"world_size": 3, "recipe": "tensorwise_delayed", "overrides": [sick.GROUPED, sick.LEFT_OUT]}
    (finding,) = triage(build(tmp_path / "run", **plan))
    assert (finding.code, finding.module, finding.gemm, finding.tensor, finding.ranks) == (
        "F114", sick.CULPRIT, "fprop", "input", (1,),
    )  # fmt: skip
    assert "a tensor whose scale the other sites' ranks share" in finding.message


def test_two_ranks_that_disagree_are_both_named(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", world_size=2, overrides=[sick.WRONG_RANK]))
    assert finding.ranks == (0, 1)
    assert finding.message.endswith("ranks 0, 1 differ")


def test_an_operand_at_fault_explains_inference(tmp_path: Path) -> None:
    overrides = [Override(module=sick.CULPRIT, tensor="weight", reference="operand", slots={"gain": 2.0})]
    findings = triage(build(tmp_path / "run", steps=sick.compared(0.4, 0.7), overrides=overrides))
    assert [f.code for f in findings] == ["F113"]


def test_inference_that_is_suddenly_further_away(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", steps={**sick.compared(0.015, 0.004), 40: sick.compared(1e-4, 1e-5)[40]}))
    assert (finding.code, finding.steps, finding.threshold) == ("F122", (60, 80), 0.01)


@pytest.mark.parametrize(("modules", "name", "words"), [
    ({"a": (0.0, 1e-3, 0.0), "b": (0.0, 1e-3, 1e-3)}, "other-precision", "inference runs a in high precision"),
    ({"a": (0.0, 1e-3, 1e-3), "b": (0.0, 2e-6, 1e-3), "c": (0.0, 0.0, 1e-3)}, "other-precision", "training runs b and 1 more"),
    ({"a": (2.7e-6, 1e-3, 1e-3), "b": (2.6e-6, 1e-3, 1e-3)}, "rounded-before-cast", "what BF16 makes of training's"),
    ({"a": (0.0, 1e-3, 0.0), "b": (0.0, 1e-3, 2e-6)}, None, ""),  # inference is in BF16
    ({"a": (0.0, 0.0, 1e-3), "b": (0.0, 0.0, 1e-3)}, None, ""),  # training is
    ({"a": (0.0, 1e-3, 1e-3), "head": (0.0, 0.0, 0.0)}, None, ""),  # a head in BF16 in both
    ({"a": (2.7e-6, 1e-3, 0.0), "b": (2.7e-6, 1e-3, 0.0)}, None, ""),  # an export in BF16, served so
    ({"a": (0.0, 1e-3, 3e-5), "b": (0.0, 1e-3, 1e-3)}, None, ""),  # neither in FP8 nor exact
    ({"a": (0.0, 1e-3, 1e-3), "b": (7e-4, 1e-3, 1e-3)}, None, ""),  # an engine that keeps one weight in FP8
    ({"a": (2e-2, 1e-3, 1e-3), "b": (1e-3, 1e-3, 1e-3), "c": (3e-2, 1e-3, 1e-3)}, None, ""),  # weights of an earlier step
    ({"a": (0.0, 1e-3, 1e-3), "b": (0.0, 1e-3, 1e-3), "c": (2e-2, 1e-3, 1e-3)}, "other-weight", "2 other modules have"),
    ({"a": (7e-4, 1e-3, 1e-3), "b": (2e-2, 1e-3, 1e-3), "c": (7e-4, 1e-3, 1e-3)}, "other-weight", "b in inference: its weight"),
    ({"a": (0.0, 1e-3, 1e-3), "embed": (2e-3, None, None), "c": (0.0, 1e-3, 1e-3)}, "other-weight", "embed in inference"),
])  # fmt: skip
def test_paths_that_run_other_modules_in_fp8(
    tmp_path: Path, modules: dict[str, tuple[float, float | None, float | None]], name: str | None, words: str
) -> None:
    measures = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")]
    rows = {
        fqn: [weight, 1.0, 0.0, 0.0, training, 1.0, inference, 1.0, 1.0] for fqn, (weight, training, inference) in modules.items()
    }
    text = json.dumps({"measures": [*measures, "rows"], "modules": rows})
    events = [(step, "inference", None, text) for step in (40, 60, 80)]
    found = triage(build(tmp_path / "run", steps=sick.compared(1e-4, 1e-5), events=events))
    severity = Severity.WARNING if name == "other-weight" else Severity.INFO
    assert [(f.code, f.name, f.severity, f.steps) for f in found] == ([("F122", name, severity, (40, 80))] if name else [])
    assert all(words in f.message for f in found)


@pytest.mark.parametrize(("inputs", "module", "words"), [
    ((0.0, 0.3, 0.3), "mix", "what differs lies between embed and norm, and is no Linear"),
    ((0.2, 0.3, 0.3), "mix", "what differs lies before all of them, and is no Linear"),
    ((0.0, 0.0, 0.3), "mix", "what differs lies between norm and mix, and is no Linear"),
    ((0.0, 0.0, 0.0), None, "what differs lies between them"),
])  # fmt: skip
def test_paths_whose_modules_compute_the_same(tmp_path: Path, inputs: tuple[float, ...], module: str | None, words: str) -> None:
    measures = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")]
    rows = {
        name: [0.0, 1.0, None, None, *([2e-6, 1.0, 2e-6, 1.0] if name == "mix" else [None] * 4), size, 1.0]
        for name, size in zip(("embed", "norm", "mix"), inputs, strict=True)
    }
    text = json.dumps({"measures": [*measures, "input", "rows"], "modules": rows})
    events = [(step, "inference", None, text) for step in (40, 60, 80)]
    (finding,) = triage(build(tmp_path / "run", steps=sick.compared(0.4, 0.7), events=events))
    assert (finding.code, finding.module) == ("F122", module)
    assert words in finding.message


@pytest.mark.parametrize(("inputs", "weight", "nmse", "is_found"), [
    ((0.0, 0.03, 0.02), 0.0, 1e-3, True),
    ((0.0, 5e-6, 0.02), 0.0, 1e-3, True),  # BF16's noise before it
    ((0.0, 2e-3, 0.02), 0.0, 1e-3, False),  # as codes near a tie differ, and grow with depth
    ((0.0, 0.0, 3e-3), 0.0, 1e-3, False),
    ((0.03, 0.03, 0.02), 0.0, 1e-3, False),  # another batch
    ((0.0, 0.03, 0.02), 7e-4, 1e-3, False),  # weights in FP8
    ((0.0, 0.0, 0.0), 0.0, 1e-3, False),
])  # fmt: skip
def test_an_input_that_differs_while_the_logits_hardly_do(
    tmp_path: Path, inputs: tuple[float, ...], weight: float, nmse: float, is_found: bool
) -> None:
    measures = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")]
    rows = {
        name: [weight, 1.0, None, None, 8e-4, 1.0, 7e-4, 1.0, size, 1.0]
        for name, size in zip(("gate", "router", "expert"), inputs, strict=True)
    }
    text = json.dumps({"measures": [*measures, "input", "rows"], "modules": rows})
    events = [(step, "inference", None, text) for step in (40, 60, 80)]
    found = [f for f in triage(build(tmp_path / "run", steps=sick.compared(nmse, 1e-3), events=events)) if f.name != "other-cast"]
    assert [(f.code, f.name, f.severity) for f in found] == ([("F122", "other-input", "warning")] if is_found else [])
    for finding in found:
        place = "gate and router" if inputs[1] > 1e-5 else "router and expert"
        assert finding.tensor == "input" and f"what differs lies between {place}" in finding.message


@pytest.mark.parametrize(("change", "is_found"), [
    ({}, True),
    ({"inference": 1.005e-3}, False),  # another order of the sums
    ({"weight": 3e-6 + 1e-5}, False),  # another weight
    ({"input": 1e-4}, False),  # another input
    ({"next": 2e-5}, False),  # a kernel that rounds its result otherwise
    ({"next": 6e-3}, False),  # what lies between the Linears differs as well
    ({"inference": 0.0}, False),  # inference is in high precision
])  # fmt: skip
def test_casts_that_differ_between_training_and_inference(tmp_path: Path, change: dict[str, float], is_found: bool) -> None:
    m = {"weight": 0.0, "input": 0.0, "inference": 1.2e-3, "next": 1.4e-3, **change}
    measures = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")]
    rows = {
        "gate": [m["weight"], 1.0, 0.0, 0.0, 1e-3, 1.0, m["inference"], 1.0, m["input"], 1.0],
        "down": [0.0, 1.0, 0.0, 0.0, 1e-3, 1.0, m["inference"], 1.0, m["next"], 1.0],
    }
    text = json.dumps({"measures": [*measures, "input", "rows"], "modules": rows})
    events = [(step, "inference", None, text) for step in (40, 60, 80)]
    found = [f for f in triage(build(tmp_path / "run", steps=sick.compared(1e-4, 1e-5), events=events)) if f.name == "other-cast"]
    assert [(f.code, f.module, f.severity) for f in found] == ([("F122", "gate", "info")] if is_found else [])
    if is_found:
        assert "an error of 0.001 of the output's square in training and of 0.0012 in inference" in found[0].message


@pytest.mark.parametrize(("sizes", "flips", "size", "is_found"), [
    ((0.4444, 0.4444, 0.4444), 0.0, 0.0, True),
    ((0.4444, 0.45, 0.4444), 0.0, 0.0, False),
    ((0.4444, 0.4444, 0.4444), 0.01, 0.0, False),
    ((0.4444, 0.4444, 0.4444), 0.0, 0.3, False),  # an input differs: a norm, attention
])  # fmt: skip
def test_logits_that_differ_by_one_factor(
    tmp_path: Path, sizes: Sequence[float], flips: float, size: float, is_found: bool
) -> None:
    measures = [f"{part}{gain}" for part in ("weight", "bias", "training", "inference") for gain in ("", "_gain")]
    rows = {name: [0.0, 1.0, None, None, 2e-6, 1.0, 2e-6, 1.0, size, 1.0] for name in ("mix", "head")}
    text = json.dumps({"measures": [*measures, "input", "rows"], "modules": rows})
    events = [(step, "inference", None, text) for step in (40, 60, 80)]
    steps = {
        step: {"inference_nmse": nmse, "inference_kl": 0.3, "inference_flip_rate": flips}
        for step, nmse in zip((40, 60, 80), sizes, strict=True)
    }
    (finding,) = triage(build(tmp_path / "run", steps=steps, events=events))
    assert finding.code == "F122" and finding.severity == Severity.WARNING
    assert ("logits are 1.67 or 0.333 times training's" in finding.message) is is_found
    assert finding.cure.startswith("divide the logits by the temperature") is is_found


@pytest.mark.parametrize(
    ("steps", "loss", "is_found"),
    [
        ([20, 60], None, True),
        ([20, 90], None, True),  # the last sampled step is one of them
        ([60], None, False),
        ([20, 60], 0.0, False),  # batches without a token to learn from
        ([20, 60], float("nan"), False),
    ],
)
def test_steps_without_a_gradient(tmp_path: Path, steps: list[int], loss: float | None, is_found: bool) -> None:
    overrides = [Override(**sick.GRADIENTS, steps=(step, step + 1), slots=sick.ZERO) for step in steps]
    losses = {} if loss is None else {step: {"loss": loss} for step in steps}
    found = [f for f in triage(build(tmp_path / "run", overrides=overrides, steps=losses)) if f.code == "F143"]
    names = [("no-gradient-at-steps", "warning", "blocks.1.mlp.down")] if is_found else []
    assert [(f.name, f.severity, f.module) for f in found] == names
    if is_found:
        assert found[0].steps == (steps[0], steps[-1])
        assert "at 2 of 10 sampled steps, first step 20, whose losses are as large as others" in found[0].message


def test_a_layer_at_fault_explains_a_divergence(tmp_path: Path) -> None:
    overrides = [Override(module=sick.CULPRIT, tensor="weight", reference="operand", slots={"gain": 2.0})]
    findings = triage(build(tmp_path / "run", steps=sick.FIRES["F127"]["steps"], overrides=overrides))
    assert findings[0].code == "F113" and "F127" not in {f.code for f in findings}


def test_a_divergence_to_nan(tmp_path: Path) -> None:
    steps = sick.losses(lambda step: 5.5 + step**2 if step < 6 else float("nan"))
    findings = triage(build(tmp_path / "run", steps=steps))
    assert [(f.code, f.module, f.steps) for f in findings] == [("F127", None, (0, 6))]
    assert findings[0].message.startswith("the loss rises from 5.5 to 30.5, then to NaN or Inf within steps 0 to 6")


#: Another model trains by a loss of its own.
AGAINST = [(6, "note", None, "two optimizers step by turns", OTHER_LOSS_CODE)]


def test_the_loss_of_an_actor_that_rises(tmp_path: Path) -> None:
    """Its loss is of what the critic says, which trains too: information; a spike of it is no class of its own."""
    findings = triage(build(tmp_path / "run", steps=sick.FIRES["F127"]["steps"], events=AGAINST))
    assert [(f.code, f.severity, f.cure) for f in findings if f.code != "F125"] == [
        ("F127", Severity.INFO, "none if it is meant: judge the training by its task (the return, samples), or beside the same"
         " steps in BF16")]  # fmt: skip
    words = "another model of this process trains by a loss of its own, as a critic or a discriminator does, so this one need not"
    assert words in findings[0].message
    assert findings.classification is not None
    assert (findings.classification["class"], findings.classification["step"]) == ("loss-fine", None)
    spike = sick.losses(lambda step: 2.0 + 0.01 * (step % 3) + 3.0 * (step == 70))
    findings = triage(build(tmp_path / "spike", steps=spike, events=AGAINST))
    assert [(f.code, f.severity) for f in findings] == [("F125", Severity.INFO)] and words in findings[0].message
    assert findings.classification is not None and findings.classification["class"] == "loss-fine"
    late = sick.losses(lambda step: 2.0 + 0.01 * (step % 3) + (step > 50) * 0.1 * (step - 50))
    for name, events, kind in (("against", AGAINST, "loss-fine"), ("alone", [], "divergence")):
        findings = triage(build(tmp_path / name, steps=late, events=events))
        assert findings.classification is not None and findings.classification["class"] == kind


def test_the_loss_of_an_actor_that_becomes_nan(tmp_path: Path) -> None:
    steps = sick.losses(lambda step: 5.5 + step**2 if step < 6 else float("nan"))
    findings = triage(build(tmp_path / "run", steps=steps, events=AGAINST))
    assert [(f.code, f.severity) for f in findings] == [("F127", Severity.ERROR)]
    steps = sick.losses(lambda step: 5.5 if step < 60 else float("nan"))
    findings = triage(build(tmp_path / "late", steps=steps, events=AGAINST))
    assert [(f.code, f.severity) for f in findings] == [("F125", Severity.ERROR)]
    assert findings.classification is not None and findings.classification["class"] == "divergence"


def test_updates_out_of_size_of_an_actor(tmp_path: Path) -> None:
    """They are of the weights, whatever its loss does."""
    plan: dict[str, Any] = {"steps": sick.FIRES["F127"]["steps"], "updates": sick.enlarged(2.0)}
    findings = triage(build(tmp_path / "run", **plan, events=AGAINST))
    assert {(f.name, f.severity) for f in findings if f.code == "F127"} == {
        ("updates-out-of-size", Severity.ERROR), ("diverges-at-start", Severity.INFO)}  # fmt: skip


def test_a_loss_scale_that_sinks(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", steps=sick.scales(lambda step: 2.0 ** (10 - step // 8))))
    assert (finding.code, finding.message) == ("F126", "the loss scale has sunk to 0.25 by step 99")


@pytest.mark.parametrize("last", [80, 44])
def test_a_loss_scale_that_no_gradient_fits(tmp_path: Path, last: int) -> None:
    """NaN at any scale is not the scale's doing; what ends when it is halved a few times may be an overflow."""
    steps = {step: {"loss_scale": 65536.0 / 2 ** max(0, min(30, (step - 40) // 2))} for step in range(100)}
    overrides = [
        Override(module="blocks.1.mlp.up", gemm=gemm, tensor="grad_output", reference="operand", actual=None,
                 slots={"num_nan": 3}, steps=(step, step + 1))
        for gemm in ("dgrad", "wgrad") for step in (42, last)
    ]  # fmt: skip
    (finding,) = triage(build(tmp_path / "run", steps=steps, overrides=overrides, every=2))
    assert (finding.code, finding.name, finding.severity) == ("F126", "loss-scale-loop", "error")
    if last == 44:
        assert finding.module is None and finding.cure.startswith("find the overflowing gradient")
        return
    assert (finding.module, finding.gemm, finding.tensor) == ("blocks.1.mlp.up", "dgrad", "grad_output")
    assert "at step 42 under a scale of 32768 and still at step 80 under 0.062" in finding.message
    assert "between blocks.1.mlp.down and blocks.1.mlp.up" in finding.cure and "overflowing loss scale" not in finding.cure


def _scaled(step: int, growth: int = 8) -> float:
    return 1024.0 * 2.0 ** ((step + 1) // growth)


@pytest.mark.parametrize("noted_late", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
def test_gradients_that_are_divided_by_a_scale_that_has_just_grown(tmp_path: Path, is_late: bool, noted_late: bool) -> None:
    def numbers(step: int) -> dict[str, float]:
        norm = 3.0 * (1.0 + 0.05 * math.sin(5.0 * step)) * (0.5 if is_late and _scaled(step) != _scaled(step - 1) else 1.0)
        return {"loss_scale": _scaled(step - 1 if noted_late else step), "grad_norm": norm}

    findings = triage(build(tmp_path / "run", steps={step: numbers(step) for step in range(100)}, every=7))
    assert [(f.code, f.name, f.severity, f.steps) for f in findings] == (
        [("F126", "unscaled-late", "warning", (7, 95))] if is_late else []
    )


@pytest.mark.parametrize("is_late", [False, True])
def test_unscaling_is_seen_in_what_the_optimizer_gets(tmp_path: Path, is_late: bool) -> None:
    def update(step: int, module: str) -> dict[str, float]:
        grows = _scaled(step) != _scaled(step - 1)
        multiple = 1.0 / _scaled(step if is_late else step - 1)
        return {
            "sum_grad2": 5.0 * (0.25 if is_late and grows else 1.0),
            "sum_given_passes": multiple, "sum_passes2": 1.0, "sum_given2": multiple**2,
        }  # fmt: skip

    findings = triage(build(tmp_path / "run", updates=update, num_steps=60, every=1))
    assert [(f.code, f.name) for f in findings] == ([("F126", "unscaled-late")] if is_late else []), [f.message for f in findings]


@pytest.mark.parametrize("has_scale", [True, False])
def test_gradients_among_the_subnormals_of_fp16(tmp_path: Path, has_scale: bool) -> None:
    flushed = {"amin": 2.0**-24, "amax": 2.0**-16, "num_zero": lambda row: row["numel"] // 2}
    overrides = [Override(tensor="grad_output", slots=flushed, actual=None)]
    steps = sick.scales(lambda step: 1.0) if has_scale else {}
    (finding,) = triage(build(tmp_path / "run", steps=steps, overrides=overrides))
    assert (finding.code, finding.module, finding.severity) == ("F126", None, "warning")
    assert finding.cure.startswith("multiply the loss by a loss scale")
    assert finding.message == (
        "the gradients of 6 of 6 modules lie among FP16's subnormals, and 50 % of their elements are zero before any cast"
    )


@pytest.mark.parametrize(
    ("multiple", "scale", "changes", "is_found"),
    [
        (1.0, 65536.0, {}, True),
        (0.7, 65536.0, {}, True),  # of two steps, one with them and one without
        (1 / 65536, 65536.0, {}, False),  # divided by it
        (32 / 65536, 65536.0, {}, False),  # and summed over ranks
        (1.0, 1.0, {}, False),  # no loss scale in effect
        (1.0, 65536.0, {"sum_moment2": 8192 * (0.2 / 65536) ** 2}, False),  # a fused kernel that divides them itself
        (1.0, 65536.0, {"sum_moment2": None, "beta1": None, "sum_update2": 8192 * 3e-4**2}, True),  # SGD
        (1.0, 65536.0, {"sum_moment2": None, "beta1": None, "sum_update2": 8192 * (3e-4 / 65536) ** 2}, False),
    ],
)
def test_a_step_with_gradients_that_are_still_scaled(
    tmp_path: Path, multiple: float, scale: float, changes: dict[str, Any], is_found: bool
) -> None:
    given = {"sum_grad2": 8192.0, "sum_given2": 1.0, "sum_passes2": 1 / multiple**2, "sum_given_passes": 1 / multiple,
             "sum_moment2": 8192 * 0.2**2}  # fmt: skip
    run = build(tmp_path / "run", steps=sick.scales(lambda step: scale), updates=lambda step, module: {**given, **changes})
    found = [f for f in triage(run, select=["F126"]) if f.name == "stepped-while-scaled"]
    assert [f.severity for f in found] == ([Severity.WARNING] if is_found else [])
    if is_found:
        assert f"{multiple:.2g} times the gradients of wgrad at 10 sampled steps" in found[0].message
        assert found[0].cure.startswith("let the scaler take the optimizer's step")


@pytest.mark.parametrize(
    ("factor", "limit", "is_found"),
    [
        (1e-5, 1.0 / 65536, True),
        (1e-5, 1.0, False),  # gradients of a sum over tokens, which are divided by their number
        (0.5, 1.0 / 65536, False),  # small gradients that are hardly clipped
        (1e-5, 1e-9, False),  # no limit that a program clips to, times the loss scale
    ],
)
def test_gradients_that_are_clipped_while_they_are_scaled(tmp_path: Path, factor: float, limit: float, is_found: bool) -> None:
    scale, num, modules = 65536.0, 8192, 6
    square = limit**2 / modules * num / 65536  # of the sampled elements, so that all modules' norm is the limit
    multiple = factor / scale
    given = {"sum_grad2": square, "sum_given2": 1.0, "sum_passes2": 1 / multiple**2, "sum_given_passes": 1 / multiple}
    run = build(tmp_path / "run", steps=sick.scales(lambda step: scale), updates=lambda step, module: given)
    found = triage(run, select=["F126"])
    assert [(f.name, f.severity) for f in found] == ([("clipped-while-scaled", "warning")] if is_found else [])
    if is_found:
        assert "norm of 1.5e-05" in found[0].message and "is 1 over the loss scale of 65536" in found[0].message
        assert found[0].cure.startswith("divide the gradients by the loss scale before they are clipped")


@pytest.mark.parametrize(
    ("divisor", "norm", "varies", "is_found"),
    [
        (65536.0**2, 1.0 / 65536, True, True),
        (1.05 * 65536.0**2, 1.0 / 65536, True, True),  # known from samples
        (1.2 * 65536.0**2, 1.0 / 65536, True, False),
        (65536.0**2, 1.0 / 65536, False, False),  # clipped to the norm that they would have had, times the scale
        (65536.0, 1e-4, True, False),  # small gradients, divided once
        (65536.0**2, 1.0, True, False),  # gradients of a sum over 65536 tokens, which are divided by their number
    ],
)
def test_gradients_that_are_divided_by_the_loss_scale_twice(
    tmp_path: Path, divisor: float, norm: float, varies: bool, is_found: bool
) -> None:
    def given(step: int, module: str) -> dict[str, float]:
        size = norm * (1.5 if varies and step >= 50 else 1.0)
        square = size**2 / 6 * 8192 / 65536  # of the sampled elements, so that all modules' norm is this one
        return {"sum_grad2": square, "sum_given2": 1.0, "sum_passes2": divisor**2, "sum_given_passes": divisor}

    run = build(tmp_path / "run", steps=sick.scales(lambda step: 65536.0), updates=given)
    found = [f for f in triage(run, select=["F126"]) if f.name == "unscaled-twice"]
    assert [f.severity for f in found] == ([Severity.WARNING] if is_found else [])
    if is_found:
        assert "those of wgrad over 4.3e+09, the square of the loss scale of 65536" in found[0].message
        assert found[0].cure.startswith("divide the gradients by the loss scale once")
        assert "clipped-while-scaled" not in [f.name for f in triage(run, select=["F126"])]


def test_groups_are_found_by_numbers_and_shapes(tmp_path: Path) -> None:
    run = build(tmp_path / "run", modules=sick.ROUTED, overrides=sick.SHARES, num_steps=30)
    groups = {(g.prefix, g.suffix): g for g in numbered(run)}
    assert set(groups) == {("net.0.moe.parts", "a"), ("net.0.moe.parts", "c")}
    assert groups["net.0.moe.parts", "a"].holder == "net.0.moe"
    assert all(is_routed(group, fprop_inputs(run)) for group in groups.values())


def test_a_robust_slope_has_its_uncertainty() -> None:
    assert theil_sen([1.0, 2.0, 3.0, 4.0]) == (1.0, 1.0, 1.0)
    slope, low, high = theil_sen([0.0, 1.1, 1.9, 9.0, 4.1, 5.0, 6.0, 6.9])
    assert 0.9 < slope < 1.1 and low < slope < high
    assert theil_sen([3.0, 3.2, 2.9, 3.1, 3.0])[1] <= 0


@pytest.mark.parametrize("harm", [False, True], ids=["the loss falls on", "the loss rises"])
def test_a_gate_with_a_learning_rate_of_its_own_is_no_divergence(tmp_path: Path, harm: bool) -> None:
    """A gate of 24 weights near zero moves by 0.76 times its size in the first steps of a public trainer that trains well."""
    large = sick.enlarged(4.0)
    rise = {step: {"loss": 9.0 + 0.1 * step} for step in range(71, 100)} if harm else {}
    run = build(tmp_path / "run", steps=rise,
                updates=lambda step, name: large(step, name) if name == sick.CULPRIT and step <= 70 else {})  # fmt: skip
    (found,) = (f for f in triage(run) if f.name == "updates-out-of-size")
    classification = triage(run).classification
    assert classification is not None
    assert found.severity == ("error" if harm else "info") and ("the loss falls on" in found.message) is not harm
    assert classification["class"] == ("divergence" if harm else "loss-fine")


@pytest.mark.parametrize("comes_back", [True, False], ids=["comes back", "stays up"])
def test_the_first_step_of_adagrad_moves_each_element_by_the_learning_rate(tmp_path: Path, comes_back: bool) -> None:
    """It divides by the sum of all squares so far: the loss jumps, and soon lies below its first value."""
    own = {"optimizer": "Adagrad", "beta1": None, "beta2": None, "lr": 0.02, "max_update": 0.02, "sum_update2": 8192 * 0.02**2}
    own |= dict.fromkeys(("num_intended", "sum_intended2"))
    rise = {step: {"loss": 9.0 - 0.01 * step} for step in range(1, 7 if comes_back else 100)}
    updates = lambda step, name: own if name == sick.CULPRIT and step == 0 else {}  # noqa: E731  # of one line
    (found,) = (f for f in triage(build(tmp_path / "run", steps=rise, updates=updates)) if f.code == "F127")
    assert found.severity is (Severity.INFO if comes_back else Severity.ERROR)
    assert ("in its first step alone, and the loss ends below the one before it" in found.message) is comes_back


@pytest.mark.parametrize(
    ("changes", "cause", "cure"),
    [
        ({"num_moment_zero": 400, "max_update": 0.9}, "second moments are 0", "keep the second moment in FP32"),
        ({"num_moment_zero": 0, "max_update": 0.9}, "its two moments do not belong together", "keep the second moment in FP32"),
        ({"lr": 0.03}, "the learning rate is too high", "lower the learning rate"),
        ({"optimizer": "SGD", "beta1": None}, "so large is the gradient", "clip the gradient norm"),
    ],
)
def test_updates_as_large_as_the_weights_blame_the_optimizer(
    tmp_path: Path, changes: dict[str, object], cause: str, cure: str
) -> None:
    clipped = Override(module=sick.CULPRIT, gemm="fprop", tensor="input", steps=(50, None), reference="operand",
                       slots={"num_saturated": lambda row: row["numel"] // 2, "headroom": 64.0, "gain": 0.1})  # fmt: skip
    run = build(tmp_path / "run", recipe="tensorwise_delayed", updates=sick.enlarged(4.0, **changes), overrides=[clipped])
    findings = triage(run)
    assert [(f.code, f.name, f.module, f.severity) for f in findings] == [
        ("F127", "updates-out-of-size", None, "error"), ("F101", "stale-scale-saturation", sick.CULPRIT, "info"),
    ]  # fmt: skip
    assert findings[0].steps == (40, 90)
    assert findings[0].message.startswith("the optimizer step 40 changes the weight of ") and cause in findings[0].message
    assert findings[0].cure.startswith(cure)
    assert findings.classification is not None
    assert (findings.classification["class"], findings.classification["cause"]) == ("divergence", "not-fp8")


@pytest.mark.parametrize(("optimizer", "stands"), [("AdamW", True), ("SGD", False)])
def test_a_cast_at_fault_before_explains_what_the_gradient_explains(tmp_path: Path, optimizer: str, stands: bool) -> None:
    sick_cast = Override(module=sick.CULPRIT, gemm="fprop", tensor="input", steps=(20, None), reference="operand",
                         slots={"gain": 2.0})  # fmt: skip
    changes = {"optimizer": optimizer, "beta1": 0.9 if optimizer == "AdamW" else None}
    findings = triage(build(tmp_path / "run", updates=sick.enlarged(4.0, **changes), overrides=[sick_cast]))
    assert [f.code for f in findings] == (["F113", "F127"] if stands else ["F113"])
    assert findings.classification is not None and findings.classification["cause"] != "not-fp8"


#: Updates of the culprit's BF16 weight by an optimizer of unknown formula; two BF16 values lie 1.2e-4 apart at its RMS of 0.02.
UNKNOWN = dict.fromkeys(("num_intended", "num_lost", "sum_intended2", "sum_intended_update", "sum_spacing_log2"))


@pytest.mark.parametrize(
    ("moved", "by", "is_named"), [(1600, 1.0, True), (1600, 4.0, False), (6000, 1.0, False), (4000, 1.9, True)]
)  # fmt: skip
def test_few_elements_that_move_by_one_value_under_an_unknown_formula(
    tmp_path: Path, moved: int, by: float, is_named: bool
) -> None:
    size = moved * (by * 2.0**-13) ** 2
    updates = sick.rounded(0.0, 0.0, **UNKNOWN, num_moved=moved, sum_update2=size, optimizer="Mine")
    found = [f for f in triage(build(tmp_path / "run", updates=updates)) if f.code == "F135"]
    assert [(f.module, f.severity) for f in found] == ([(sick.CULPRIT, "info")] if is_named else [])


@pytest.mark.parametrize(
    ("largest", "num_moved", "since", "is_named"),
    [(lambda step: 3e-5, 500, 0, True), (lambda step: 3e-5, 500, 50, True), (lambda step: 2.5e-4, 500, 0, False),
     (lambda step: 3e-5, 20, 0, False), (lambda step: 3e-5, 5000, 0, False), (lambda step: 3e-5, 800, 200, False),
     (lambda step: 4e-6 * math.sqrt(step + 1), 500, 0, False)],
    ids=["always", "since a resume", "an FP32 copy", "few moves", "most move", "not for long", "an FP32 copy, small updates"],
)  # fmt: skip
def test_a_bf16_weight_whose_copy_is_rounded(
    tmp_path: Path, largest: Callable[[int], float], num_moved: int, since: int, is_named: bool
) -> None:
    """Two BF16 values lie 1.2e-4 apart at the weight's RMS of 0.02; with an FP32 copy larger elements move by that, seldom."""

    def updates(step: int, module: str) -> dict[str, Any]:
        row = {**UNKNOWN, "dtype": "bfloat16", "keeps_precision": True, "num_moved": num_moved, "optimizer": "Mine",
               "sum_weight2": 8192 * 0.02**2, "sum_update2": num_moved * 1e-10, "max_update": 2.5e-4}  # fmt: skip
        return {**row, "max_update": largest(step)} if module == sick.CULPRIT and step >= since else row

    found = [f for f in triage(build(tmp_path / "run", updates=updates, num_steps=300)) if f.code == "F135"]
    assert [(f.name, f.module, f.severity) for f in found] == ([("copy-rounded", sick.CULPRIT, "warning")] if is_named else [])
    if is_named:
        assert found[0].steps == (since, 290) and ("though they did before" in found[0].message) == (since > 0)


@pytest.mark.parametrize(
    ("change", "is_named"),
    [
        ({}, True), ({"num_bf16": 8000}, False), ({"sum_update2": 8192 * (2.0**-13) ** 2}, False),
        ({"num_moved": 100, "sum_update2": 100 * 3e-6**2}, False), ({"dtype": "bfloat16", "num_bf16": None}, False),
        ({"keeps_precision": True}, False), ({"sum_weight2": math.inf}, False),
    ],
)  # fmt: skip
def test_an_fp32_weight_that_is_written_back_to_bf16(tmp_path: Path, change: dict[str, Any], is_named: bool) -> None:
    row = {"num_bf16": 8192, "sum_update2": 8192 * 3e-6**2, **change}
    findings = triage(build(tmp_path / "run", updates=lambda step, module: row if module == sick.CULPRIT else {}))
    found = [f for f in findings if f.code == "F135"]
    assert [(f.module, f.severity) for f in found] == ([(sick.CULPRIT, "warning")] if is_named else [])
    if is_named:
        assert "writes it back to BF16" in found[0].message and found[0].steps == (10, 90)


def test_a_weight_that_hardly_moves_under_an_unknown_formula(tmp_path: Path) -> None:
    updates = sick.rounded(0.0, 0.0, **UNKNOWN, num_moved=40, optimizer="Mine")
    (finding,) = triage(build(tmp_path / "run", updates=updates))
    assert (finding.code, finding.module, finding.severity) == ("F135", sick.CULPRIT, "warning")
    assert finding.message == (
        f"the weight of {sick.CULPRIT} hardly moves: an update changed at most 0.49 % of the elements that have a gradient in"
        " 10 sampled steps (Mine, learning rate 0.0003, bfloat16 weights)"
    )


@pytest.mark.parametrize(("change", "is_left_out"), [
    ({}, True),
    ({"num_intended": None, "sum_intended2": None, "sum_grad2": 1.0}, True),  # an optimizer of another formula
    ({"num_intended": None, "sum_intended2": None, "sum_grad2": 1e-12}, False),  # too small for FP32, as behind a gate of zeros
    ({"num_moved": 1}, False),
])  # fmt: skip
def test_a_weight_that_the_optimizer_leaves_out(tmp_path: Path, change: dict[str, Any], is_left_out: bool) -> None:
    row = {"dtype": "float32", "num_moved": 0, "num_lost": 8192, "sum_intended_update": 0.0, **change}
    findings = triage(build(tmp_path / "run", updates=lambda step, module: row if module == sick.CULPRIT else {}))
    named = [(f.code, f.name, f.module) for f in findings if f.name == "weight-not-updated"]
    assert named == ([("F135", "weight-not-updated", sick.CULPRIT)] if is_left_out else [])


@pytest.mark.parametrize(("moment", "is_lost"), [(0.0, True), (1e-4, False), (None, False)])
@pytest.mark.parametrize("modules", [(sick.CULPRIT,), tuple(name for name, _, _ in MODULES)], ids=["one", "all"])
def test_a_first_moment_that_is_zero_is_no_weight_that_was_left_out(
    tmp_path: Path, modules: Sequence[str], moment: float | None, is_lost: bool
) -> None:
    """As one in E4M3 without a scale: the optimizer writes its updates, and they are 0."""
    row = {
        "dtype": "float32",
        "num_moved": 0,
        "num_intended": None,
        "sum_intended2": None,
        "sum_grad2": 1.0,
        "sum_moment2": moment,
    }
    found = triage(build(tmp_path / "run", updates=lambda step, module: row if module in modules else {}))
    named = [(f.name, f.module, f.severity) for f in found if f.code == "F135"]
    if is_lost:
        assert named == [("first-moment-lost", None, Severity.ERROR)]
        assert f"of {modules[0]} is 0 at all 10 sampled steps" in found[0].message
        assert found[0].cure.startswith("keep the first moment in FP32")
    else:
        assert named == ([("weight-not-updated", sick.CULPRIT, Severity.ERROR)] if len(modules) == 1 else [])


@pytest.mark.parametrize(
    ("grown", "update", "num_grad", "events", "is_found"),
    [
        (1.0, 3e-4, 8170, [], True),
        (1.0, 3e-4, 8192, [], True),
        (0.05, 3e-4, 8192, [], False),  # 10 steps of 17 times the largest update that was sampled
        (1.0, 0.0, 0, [], False),  # a weight that no optimizer moves: a merge, or a copy of another
        (1.0, 3e-4, 8192, [(40, "resume", None, "resumed in the folder of the earlier part")], False),
    ],
)
def test_a_weight_whose_largest_element_jumps(
    tmp_path: Path, grown: float, update: float, num_grad: int, events: list[Any], is_found: bool
) -> None:
    overrides = [Override(module=sick.CULPRIT, tensor="weight", reference="operand", actual=None, steps=(40, None),
                          slots={"amax": lambda row: row["amax"] + grown})]  # fmt: skip
    row = {"max_update": update, "num_grad": num_grad}
    run = build(
        tmp_path / "run", overrides=overrides, events=events, updates=lambda step, name: row if name == sick.CULPRIT else {}
    )
    found = [f for f in triage(run) if f.name == "elements-jump"]
    assert [(f.code, f.module, f.severity, f.steps) for f in found] == (
        [("F150", sick.CULPRIT, Severity.WARNING, (30, 40))] if is_found else []
    )
    if is_found:
        assert ("0.27 % of its elements have no gradient then" in found[0].message) == (num_grad < 8192)
        assert "3.3e+02 times as far as the largest update of a sampled step (0.0003)" in found[0].message


@pytest.mark.parametrize(
    ("weight", "gradient", "since", "is_found"),
    [
        (0.67, 0.67, 0, True),
        (1.0, 0.67, 0, True),
        (0.67, 0.0, 0, False),  # pruned or masked: wgrad gives all
        (0.4, 0.4, 0, False),  # padded to a multiple
        (0.67, 1.0, 0, False),  # no gradient at all
        (0.67, 0.67, 50, False),  # not from the start on
    ],
)
def test_a_weight_that_stays_zero(tmp_path: Path, weight: float, gradient: float, since: int, is_found: bool) -> None:
    def zeros(rate: float) -> dict[str, Any]:
        return {"num_zero": lambda row: round(rate * row["numel"])}

    overrides = [
        Override(module=sick.CULPRIT, tensor="weight", reference="operand", steps=(since, None), slots=zeros(weight)),
        Override(module=sick.CULPRIT, tensor="grad_weight", reference="shadow", slots=zeros(gradient)),
    ]
    found = [f for f in triage(build(tmp_path / "run", overrides=overrides)) if f.name == "weights-stay-zero"]
    assert [(f.code, f.module, f.severity) for f in found] == ([("F150", sick.CULPRIT, Severity.WARNING)] if is_found else [])
    if is_found:
        assert "67 % of what wgrad gives" in found[0].message and found[0].cure.startswith("load or initialize this weight")


@pytest.mark.parametrize("has_gradient", [True, False])
def test_an_expert_without_tokens_is_left_out_of_a_step_and_nothing_is_rounded_away(tmp_path: Path, has_gradient: bool) -> None:
    """Adam's state asks for an update at each step; the optimizer makes it only where there is a gradient."""
    skipped = {"num_moved": 0, "num_lost": 8192, "sum_intended_update": 0.0, "dtype": "float32"}
    skipped |= {} if has_gradient else {"num_grad": None, "sum_grad2": None}

    def updates(step: int, module: str) -> dict[str, Any]:
        return skipped if module == sick.CULPRIT and step % 40 else {}

    found = [(f.code, f.name, f.module) for f in triage(build(tmp_path / "run", updates=updates))]
    assert found == ([("F135", "updates-rounded-away", sick.CULPRIT)] if has_gradient else [])


def test_a_gradient_that_is_doubled_between_two_microbatches_is_named(tmp_path: Path) -> None:
    doubled = {"sum_given2": 5.0, "sum_given_passes": 3.0, "sum_given_since": 3.0, "sum_given_last": 1.0, "sum_given_first": 2.0}
    (finding,) = triage(build(tmp_path / "run", updates=sick.given(sick.CULPRIT, **doubled)))
    assert (finding.code, finding.name, finding.module, finding.value) == ("F149", "gradient-weighted", sick.CULPRIT, 2.0)


def twice_of_two(first: float, last: float) -> dict[str, float]:
    """The gradients of two microbatches, which are at right angles, each times a factor of its own."""
    total = first + last
    return {"sum_given2": first**2 + last**2, "sum_given_passes": total, "sum_given_since": total, "sum_given_last": last,
            "sum_given_first": first}  # fmt: skip


@pytest.mark.parametrize(
    ("first", "is_named"),
    [(lambda step: 0.05 + step / 5000, False), (lambda step: 0.05, True), (lambda step: 1.5 + step / 100, True)],
    ids=["clipped after each", "a constant factor", "the first one larger"],
)
def test_clipping_after_each_microbatch_clips_the_first_ones_gradient_twice(
    tmp_path: Path, first: Callable[[int], float], is_named: bool
) -> None:
    def updates(step: int, module: str) -> dict[str, Any]:
        changed: dict[str, Any] = sick.given("*", **twice_of_two(first(step), 0.4))(step, module)
        return changed

    found = triage(build(tmp_path / "run", updates=updates))
    assert {f.name for f in found} == ({"gradient-weighted"} if is_named else set())


@pytest.mark.parametrize(
    ("first", "last", "is_named"),
    [
        (lambda step: 0.2 + step / 500, lambda step: 1.0, True),
        (lambda step: 0.2 + step / 500, lambda step: 0.3 + step / 500, False),  # the sum was clipped as well
        (lambda step: 0.2 + step / 500, lambda step: 1.0 if step else 0.9, False),
        (lambda step: 0.2 + step / 500 if step < 50 else 1.0, lambda step: 1.0, True),  # within the limit later
        (lambda step: 0.2 + step / 500 if step < 50 else 0.9, lambda step: 1.0 if step < 50 else 0.9, False),
        (lambda step: 1.0, lambda step: 1.0, False),
    ],
    ids=["before the last pass", "after each", "after each, seldom", "before, seldom", "after each, the sum later", "never"],
)
def test_clipping_before_the_last_backward_pass(
    tmp_path: Path, first: Callable[[int], float], last: Callable[[int], float], is_named: bool
) -> None:
    def updates(step: int, module: str) -> dict[str, Any]:
        changed: dict[str, Any] = sick.given("*", **twice_of_two(first(step), last(step)))(step, module)
        return changed

    found = triage(build(tmp_path / "run", updates=updates))
    assert {(f.name, f.severity) for f in found} == ({("gradient-clipped-early", Severity.WARNING)} if is_named else set())
    assert all("steps with 0.2 times the first pass's gradient at step 0" in f.message for f in found)


@pytest.mark.parametrize(
    ("kept", "num_grad", "num_modules", "name"),
    [
        (1.1, 1024, 2, "gradient-rounded-to-zero"),
        (0.125, 1024, 2, "gradient-in-part"),
        (1.1, 7200, 2, "gradient-in-part"),
        (1.1, 1024, 1, "gradient-in-part"),
    ],
    ids=["the large ones are left", "a mask of any", "dead channels", "one module"],
)
def test_zeros_in_weight_grad_where_the_large_elements_are_left(
    tmp_path: Path, kept: float, num_grad: int, num_modules: int, name: str
) -> None:
    """As gradients that are reduced in E4M3 without a scale; a mask takes large and small ones alike."""
    modules = [sick.CULPRIT, "blocks.0.mlp.up"][:num_modules]
    query = "SELECT max(sum_y2 / numel) AS square FROM raw WHERE tensor = 'grad_weight' AND reference = 'shadow' AND module = ?"
    square = build(tmp_path / "healthy").sql(query, [sick.CULPRIT])["square"][0].as_py()
    row = {"num_grad": num_grad, "sum_grad2": 8192 * kept * square}
    zero = sick.told("blocks.1.mlp.norm.weight", grad_amax=0.0, num_grad=0, num_moved=0, num_intended=0)
    updates = lambda step, module: row if module in modules else {}  # noqa: E731  # of one line
    found = triage(build(tmp_path / "run", updates=updates, parameters=zero))
    is_rounded = name == "gradient-rounded-to-zero"
    severity = Severity.WARNING if is_rounded else Severity.INFO
    assert [(f.name, f.severity) for f in found if f.code == "F149"] == [(name, severity)]
    assert ("F151" not in {f.code for f in found}) is is_rounded


def multiple(factor: float) -> dict[str, float]:
    """The sum of two microbatches, times a factor."""
    return {
        name: value * factor ** (1 + (name == "sum_given2")) for name, value in sick.given()(0, "").items() if "given" in name
    }


@pytest.mark.parametrize(
    ("factor", "num_tensors", "name", "severity"),
    [
        (lambda step: 0.5, 2, "gradient-averaged-twice", Severity.WARNING),
        (lambda step: 2.0, 2, "gradient-averaged-twice", Severity.WARNING),
        (lambda step: 0.25, 2, "gradient-of-another-factor", Severity.INFO),
        (lambda step: 0.5 + step / 1000, 2, None, None),
    ],
    ids=["averaged", "undone", "another factor", "clipped by module"],
)
def test_the_sum_of_microbatches_times_a_factor_that_others_do_not_have(
    tmp_path: Path, factor: Callable[[int], float], num_tensors: int, name: str | None, severity: Severity | None
) -> None:
    passes = [Override(tensor="grad_weight", slots={"num_tensors": num_tensors})]

    def updates(step: int, module: str) -> dict[str, Any]:
        changed = multiple(factor(step)) if step >= 40 and module == sick.CULPRIT else {}
        return {**sick.given()(step, module), **changed}

    found = triage(build(tmp_path / "run", updates=updates, overrides=passes))
    assert [(f.code, f.name, f.module, f.severity) for f in found] == ([("F149", name, sick.CULPRIT, severity)] if name else [])
    if name == "gradient-averaged-twice":
        assert f"by the number of microbatches, 2, once more, for the weight of {sick.CULPRIT}" in found[0].message


@pytest.mark.parametrize(
    ("of_most", "of_others", "ratio"),
    [(4.0, 1.0, 4.0), (1.0, 0.25, 0.25), (2.0, 0.5, 0.25), (1.0, 4.0, 4.0)],
    ids=["most have one", "others are divided", "all are multiplied", "others have one"],
)
def test_most_modules_have_another_factor_where_others_get_their_gradient_as_it_is(
    tmp_path: Path, of_most: float, of_others: float, ratio: float
) -> None:
    """As of the experts of a model, which are most of its modules; nothing multiplies all gradients by more than 1 on purpose."""

    def updates(step: int, module: str) -> dict[str, Any]:
        return {**sick.given()(step, module), **multiple(of_others if module == sick.CULPRIT else of_most)}

    found = triage(build(tmp_path / "run", updates=updates))
    assert {(f.name, f.severity) for f in found} == {("gradient-of-another-factor", Severity.INFO)}
    named = {found[0].module, *found[0].also}
    others = {name for name, _, _ in MODULES} - {sick.CULPRIT}
    assert named == (others if (of_most, of_others) == (4.0, 1.0) else {sick.CULPRIT})
    assert found[0].value == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("empty", "size", "severity"),
    [((30,), 1.5, Severity.INFO), ((30, 60), 1.5, Severity.WARNING), ((30, 60), 0.5, None), ((), 1.5, None)],
    ids=["one step", "two steps", "not the largest", "none"],
)
def test_zeros_for_all_weights_at_the_steps_with_the_largest_gradients(
    tmp_path: Path, empty: Sequence[int], size: float, severity: Severity | None
) -> None:
    larger = [
        Override(tensor="grad_weight", steps=(step, step + 1), slots={"sum_y2": lambda row: row["sum_y2"] * size**2})
        for step in empty or (30, 60)
    ]

    def updates(step: int, module: str) -> dict[str, Any]:
        return {"num_grad": 0, "sum_grad2": 0.0} if step in empty else {}

    found = [f for f in triage(build(tmp_path / "run", updates=updates, overrides=larger)) if f.code == "F149"]
    assert [(f.name, f.severity) for f in found] == ([("gradient-zeroed-at-steps", severity)] if severity else [])
    if severity:
        assert ("at step 30, the one of 10 sampled steps" in found[0].message) == (len(empty) == 1)


@pytest.mark.parametrize("modules", [(sick.CULPRIT,), ("blocks.0.attn.qkv", sick.CULPRIT)])
def test_zeros_for_some_weights_at_steps_are_no_clipping(tmp_path: Path, modules: Sequence[str]) -> None:
    larger = [Override(tensor="grad_weight", steps=(30, 31), slots={"sum_y2": lambda row: row["sum_y2"] * 4})]
    updates = lambda step, name: {"num_grad": 0, "sum_grad2": 0.0} if step == 30 and name in modules else {}  # noqa: E731
    found = triage(build(tmp_path / "run", updates=updates, overrides=larger))
    assert "gradient-zeroed-at-steps" not in {f.name for f in found}


@pytest.mark.parametrize(
    ("steps", "first", "size", "is_found"),
    [((40, 41), 2, 1e4, True), ((40, 41), 2, 500, False), ((20, 101), 2, 1e4, False), ((90, 91), 2, 1e4, False),
     ((40, 41), 6, 1e4, False)],
    ids=["one step", "a spike", "from a step on", "the last step", "all modules"],
)  # fmt: skip
def test_gradients_that_are_changed_between_a_dgrad_and_the_modules_before(
    tmp_path: Path, steps: tuple[int, int], first: int, size: float, is_found: bool
) -> None:
    larger = {"amax": lambda row: row["amax"] * size, "sum_x2": lambda row: row["sum_x2"] * size**2}
    sites = [
        Override(module=name, gemm="dgrad", tensor="grad_output", steps=steps, slots=larger) for name, _, _ in MODULES[:first]
    ]
    found = [f for f in triage(build(tmp_path / "run", overrides=sites, updates=lambda *_: {})) if f.code == "F149"]
    assert [(f.name, f.module, f.gemm, f.tensor) for f in found] == (
        [("gradient-changed-after-dgrad", "blocks.0.mlp.up", "dgrad", "grad_input")] if is_found else []
    )
    if is_found:
        assert "grad_output of blocks.0.attn.out and of what lies before it is " in found[0].message


@pytest.mark.parametrize(
    ("update", "steps", "is_named"), [(1e-5, (10, None), True), (1e-2, (10, None), False), (1e-5, (50, None), False)]
)
def test_a_weight_that_is_on_its_fp8_grid_whenever_a_step_begins(
    tmp_path: Path, update: float, steps: tuple[int, int | None], is_named: bool
) -> None:
    """Updates of about the distance of two values are not lost; a weight that was once on the grid moved off it."""
    exact = Override(module=sick.CULPRIT, tensor="weight", reference="operand", steps=steps, slots={"sum_err2": 0.0})
    size = {"dtype": "float32", "num_moved": 8192, "num_lost": 0, "sum_weight2": 8192 * 0.02**2, "sum_update2": 8192 * update**2}
    found = [f for f in triage(build(tmp_path / "run", overrides=[exact], updates=lambda *_: size)) if f.code == "F135"]
    assert [(f.name, f.module, f.severity) for f in found] == (
        [("updates-rounded-away", sick.CULPRIT, Severity.INFO)] if is_named else []
    )


ONE_PASS = {"sum_since2": None, "sum_given_since": None}
#: One use counts twice; the optimizer gets one alone; three times both; as much again of something else, as of a tied embedding.
TWICE = {"sum_given2": 5.0, "sum_given_passes": 3.0, "sum_given_last": 1.0, "sum_given_first": 2.0}
ALONE = {"sum_given2": 1.0, "sum_given_passes": 1.0, "sum_given_last": 1.0, "sum_given_first": 0.0}
THRICE = {"sum_given2": 18.0, "sum_given_passes": 6.0, "sum_given_last": 3.0, "sum_given_first": 3.0}
TIED = {"sum_given2": 3.0}


@pytest.mark.parametrize(
    ("row", "name", "severity"),
    [
        (TWICE, "gradient-of-uses-weighted", Severity.WARNING),
        (ALONE, "gradient-of-one-use", Severity.ERROR),
        ({}, None, None),
        (THRICE, None, None),
        (TIED, None, None),
    ],
)
def test_a_module_that_is_called_twice_in_a_pass(
    tmp_path: Path, row: dict[str, Any], name: str | None, severity: Severity | None
) -> None:
    found = triage(build(tmp_path / "run", updates=sick.given(sick.CULPRIT, **{**ONE_PASS, **row})))
    assert [(f.name, f.module, f.severity) for f in found] == ([(name, sick.CULPRIT, severity)] if name else [])


def test_a_factor_of_gradients_of_one_pass_is_no_finding(tmp_path: Path) -> None:
    """Of several microbatches it is: who divides by their number twice undoes it so."""
    assert list(triage(build(tmp_path / "run", updates=sick.given("*", **{**ONE_PASS, **THRICE})))) == []
    (finding,) = triage(build(tmp_path / "passes", updates=sick.given("*", **{**THRICE, "sum_given_since": 6.0})))
    assert finding.name == "gradient-scaled-at-step"


@pytest.mark.parametrize(("size", "is_named"), [(1.0, True), (3e-4, False)])
def test_a_gradient_on_top_of_something_far_larger_counts_at_one_step(tmp_path: Path, size: float, is_named: bool) -> None:
    """A buffer that gradients share with weights may hold them once; an older gradient of ordinary size does not count once."""
    num = 8192

    def updates(step: int, module: str) -> dict[str, Any]:
        own = {**sick.given()(step, module), "sum_grad2": num * 1e-8, "sum_before2": 0.0}
        return {**own, "sum_grad2": num * size**2, "sum_before2": 2.0} if (step, module) == (40, sick.CULPRIT) else own

    found = [(f.code, f.name, f.module) for f in triage(build(tmp_path / "run", updates=updates))]
    assert found == ([("F149", "gradient-kept", sick.CULPRIT)] if is_named else [])


@pytest.mark.parametrize(("num_microbatches", "is_named"), [(1, True), (4, False)])
def test_a_gradient_of_a_microbatch_whose_wgrad_went_unseen_is_not_of_an_earlier_step(
    tmp_path: Path, num_microbatches: int, is_named: bool
) -> None:
    """A wgrad whose tokens are padded is not recognized: the first one that is finds the gradient of those before it."""
    unseen = Override(module=sick.CULPRIT, gemm="fprop", slots={"num_tensors": num_microbatches})

    def updates(step: int, module: str) -> dict[str, Any]:
        return {**sick.given()(step, module), **ONE_PASS, "sum_before2": float(module == sick.CULPRIT)}

    found = [(f.name, f.module) for f in triage(build(tmp_path / "run", updates=updates, overrides=[unseen]))]
    assert found == ([("gradient-kept", sick.CULPRIT)] if is_named else [])


@pytest.mark.parametrize(
    ("moved", "told", "is_named"),
    [
        (0, (Gemm.WGRAD,), True), (0, (Gemm.DGRAD, Gemm.WGRAD), True), (5, (Gemm.WGRAD,), False),
        (0, (Gemm.DGRAD,), False), (0, (), False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_code", [True, False])
def test_a_weight_whose_backward_pass_has_no_wgrad(
    tmp_path: Path, moved: int, told: tuple[Gemm, ...], is_named: bool, has_code: bool
) -> None:
    """A frozen weight has none either, and the recorder says nothing of it."""
    none = {"num_grad": None, "num_moved": moved, "sum_grad2": None, "sum_update2": 0.0, "num_intended": None, "num_lost": None,
            "sum_intended2": None, "sum_intended_update": None}  # fmt: skip
    text = f"{sick.CULPRIT} is not recorded in full: {not_observed(*told)} before the step ended"
    # As in runs that are recorded already.
    assert not_observed(Gemm.WGRAD) == "no wgrad was observed"
    assert not_observed(Gemm.DGRAD, Gemm.WGRAD) == "no dgrad, wgrad was observed"
    event: tuple[Any, ...] = (0, "skipped", sick.CULPRIT, text)
    if has_code:
        event = (*event[:3], "in other words", not_observed_code(*told))
    findings = triage(
        build(
            tmp_path / "run", events=[event] if told else [],
            overrides=[Override(module=sick.CULPRIT, gemm="wgrad", slots={"numel": 0})],
            updates=lambda step, module: none if module == sick.CULPRIT else {},
        )
    )  # fmt: skip
    named = [(f.code, f.module, f.severity) for f in findings if f.name == "gradient-never-computed"]
    assert named == ([("F149", sick.CULPRIT, Severity.WARNING)] if is_named else [])


@pytest.mark.parametrize(
    ("still", "backward", "is_named"),
    [
        ([sick.CULPRIT], (), True),  # what reads it is detached, or it is frozen
        ([sick.CULPRIT], ("dgrad",), False),  # frozen, and its gradient goes on
        ([sick.CULPRIT, "blocks.1.mlp.down"], (), False),  # a frozen block
        ([sick.CULPRIT, "blocks.0.mlp.up"], (), False),  # a role that no layer trains
    ],
)
def test_a_weight_without_any_backward_pass(tmp_path: Path, still: list[str], backward: tuple[str, ...], is_named: bool) -> None:
    """Seen where the values of one attention were detached: its projection had no row of a backward pass, and no finding."""
    none = {"num_grad": None, "num_moved": 0, "sum_grad2": None, "sum_update2": 0.0, "num_intended": None, "num_lost": None,
            "sum_intended2": None, "sum_intended_update": None}  # fmt: skip
    absent = [
        Override(module=module, gemm=gemm, slots={"numel": 0})
        for module in still
        for gemm in ("dgrad", "wgrad")
        if gemm not in backward
    ]
    run = build(tmp_path / "run", overrides=absent, updates=lambda step, module: none if module in still else {})
    found = [(f.module, f.severity) for f in triage(run, select=["F149"]) if f.name == "gradient-cut-off"]
    assert found == ([(sick.CULPRIT, Severity.INFO)] if is_named else [])


@pytest.mark.parametrize(
    ("held", "moves", "severity"),
    [
        (lambda module: module != sick.CULPRIT, False, Severity.WARNING),  # an optimizer of parameters that were replaced since
        (lambda module: module != sick.CULPRIT, True, None),  # by what is no torch optimizer
        (lambda module: module == MODULES[-1][0], False, Severity.INFO),  # a program that trains its last layer alone
        (lambda module: False, False, None),  # nothing is known of optimizers
    ],
)
def test_a_weight_that_no_optimizer_has(tmp_path: Path, held: Any, moves: bool, severity: Severity | None) -> None:
    size = {"sum_x": 1.0, "sum_x2": 26.0, "amax": 0.1}
    still = [Override(module=sick.CULPRIT, gemm="fprop", tensor="weight", reference="operand", slots=size)]
    run = build(tmp_path / "run", overrides=[] if moves else still, updates=lambda step, module: {} if held(module) else None)
    found = [f for f in triage(run, select=["F149"]) if f.name == "gradient-without-optimizer"]
    assert [(f.module, f.severity) for f in found] == ([(sick.CULPRIT, severity)] if severity else [])
    if severity:
        assert "never steps with a parameter to which wgrad gave a gradient" in found[0].message


@pytest.mark.parametrize(
    ("rate", "culprits", "names"),
    [
        (lambda step, stands: 3e-4 if stands else 3e-4 * (1 - step / 100), [sick.CULPRIT], [sick.CULPRIT]),
        (lambda step, stands: 3e-4 * (1 - step / 100), [sick.CULPRIT], []),  # one schedule
        (lambda step, stands: 1e-3 if stands else 3e-4, [sick.CULPRIT], []),  # no schedule
        (lambda step, stands: 0.0 if stands else 3e-4 * (1 - step / 100), [sick.CULPRIT], []),  # frozen
        (lambda step, stands: 3e-4 if stands else 3e-4 * (1 - step / 100), [name for name, *_ in MODULES[:-1]], []),
    ],
)
def test_a_learning_rate_that_stands(tmp_path: Path, rate: Any, culprits: list[str], names: list[str]) -> None:
    run = build(tmp_path / "run", updates=lambda step, module: {"lr": rate(step, module in culprits)})
    found = [f for f in triage(run, select=["F135"]) if f.name == "learning-rate-stands"]
    assert [(f.module, f.severity) for f in found] == [(name, Severity.INFO) for name in names]
    if found:
        assert f"is 0.0003 at all its 10 sampled steps from step 0 to 90, as of 1 of {len(MODULES)} weights" in found[0].message


def test_weights_that_a_reload_took_from_fp8_values(tmp_path: Path) -> None:
    slots = {"sum_err2": 0.0, "sum_xy": lambda row: row["sum_x2"], "sum_y2": lambda row: row["sum_x2"]}
    exact = Override(module=sick.CULPRIT, tensor="weight", reference="operand", steps=(40, 50), slots=slots)
    (finding,) = (f for f in triage(build(tmp_path / "run", events=sick.RESUME, overrides=[exact])) if f.code == "F150")
    assert (finding.name, finding.module, finding.severity) == ("weights-rounded", sick.CULPRIT, Severity.WARNING)
    always = Override(**{**exact.__dict__, "steps": (None, None)})
    found = [f.name for f in triage(build(tmp_path / "always", events=sick.RESUME, overrides=[always]))]
    assert "weights-rounded" not in found


def test_weights_of_a_run_in_high_precision_are_compared_over_a_resume(tmp_path: Path) -> None:
    """Only what-if casts have rows of its weights."""
    back = [Override(**{**sick.sized(1, steps).__dict__, "actual": None}) for steps in ((0, 10), (40, 50))]
    plan: dict[str, Any] = {"recipe": "bf16", "what_if": ["blockwise"], "events": sick.RESUME, "overrides": back}
    found = [(f.name, f.module) for f in triage(build(tmp_path / "run", **plan)) if f.code == "F150"]
    assert found == [("older-weights", sick.CULPRIT)]


@pytest.mark.parametrize(("moved", "is_named"), [(3e-9, False), (1e-3, True)])
def test_a_weight_that_barely_moves_returns_by_chance(tmp_path: Path, moved: float, is_named: bool) -> None:
    """Few elements of a weight in BF16 move between sampled steps, so that its sums come near an older one's again."""
    path = [sick.sized(1, (0, 30)), sick.sized(1 + moved, (30, 40)), sick.sized(1, (40, 50))]
    amax = {"amax": 0.1, "sum_x": 0.5}
    path = [Override(**{**one.__dict__, "slots": {**one.slots, **amax}}) for one in path]
    found = [f.name for f in triage(build(tmp_path / "run", events=sick.RESUME, overrides=path)) if f.code == "F150"]
    assert found == (["older-weights"] if is_named else [])


@pytest.mark.parametrize("rule", [StaleWeight, WeightCopyDiffers, ScaleGrid])
def test_the_share_of_flushed_elements_is_a_threshold(rule: type[Rule]) -> None:
    usual = list(rule().looks())
    assert list(replace(rule(), max_flushed_rate=0.2).looks()) != usual  # type: ignore[call-arg]


def test_the_lowest_limit_below_8_bits_is_a_threshold() -> None:
    usual = list(Fp8NotOn().looks())
    assert list(Fp8NotOn(min_low_bit_sqnr_db=24.0).looks()) != usual


def on_the_grid(steps: tuple[int, int | None], **slots: float) -> list[Override]:
    """Return overrides of weights that their casts hold exactly."""
    return [Override(tensor="weight", module="*", steps=steps, slots={"sum_err2": 0.0, **slots})]


def test_weights_that_begin_as_fp8_values_are_told(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", overrides=on_the_grid((0, 1))))
    assert (finding.code, finding.name, finding.severity) == ("F150", "weights-begin-rounded", Severity.INFO)
    assert len(finding.also) == len(MODULES) - 1 and "masters" in finding.cure


def test_an_identity_lies_on_every_grid(tmp_path: Path) -> None:
    assert list(triage(build(tmp_path / "run", overrides=on_the_grid((0, 1), amin=1.0, amax=1.0)))) == []


@pytest.mark.parametrize(
    ("factors", "names"),
    [
        ({0: 1.5, 1: 2.0}, 2),
        ({number: 2.0 for number in range(len(MODULES))}, 0),  # a scaling of all
        ({0: 2.0}, 0),  # a weight that is tied to what is no Linear
        ({number: 0.1 * (number + 1) for number in range(4)}, 0),  # clipped layer by layer
        ({0: 1.3, 1: 1.4, 2: 0.6}, 0),  # samples that differ, as of queries and keys
    ],
)
def test_gradients_that_have_more_than_wgrad_gave_are_told(tmp_path: Path, factors: dict[int, float], names: int) -> None:
    query = (
        "SELECT module, max(sum_y2 / numel) AS square FROM raw WHERE actual AND tensor = 'grad_weight' AND reference = 'shadow'"
        " GROUP BY module"
    )
    made = {row["module"]: row["square"] for row in build(tmp_path / "plain").sql(query).to_pylist()}
    factor = {name: factors.get(number, 1.0) for number, (name, *_) in enumerate(MODULES)}

    def updates(step: int, name: str) -> dict[str, float]:
        return {"sum_grad2": 8192 * made.get(name, 0.0) * factor[name] ** 2}

    same = Override(tensor="grad_weight", reference="shadow", slots={"sum_y2": lambda row: made[row["module"]] * row["numel"]})
    found = triage(build(tmp_path / "run", updates=updates, overrides=[same]))
    assert [(f.code, f.name, f.severity, 1 + len(f.also)) for f in found] == (
        [("F149", "gradient-joined", Severity.INFO, names)] if names else []
    )
    parallel = triage(build(tmp_path / "parallel", updates=updates, overrides=[same], world_size=2))
    assert [f.name for f in parallel] == [], "other ranks add to weight.grad"


@pytest.mark.parametrize(
    ("counts", "changes", "severity"),
    [
        (lambda step: min(step + 1, 32), {}, "warning"),
        (lambda step: min(step + 1, 32), {"beta2": 0.8, "beta1": 0.1}, "info"),  # whose bias is corrected by then
        (lambda step: step + 1, {}, None),
        (lambda step: min(step + 1, 32), {"num_moved": 0}, None),  # a step that a scaler skips
        (lambda step: 1 + step % 50, {}, None),  # a count that a schedule begins anew
        (lambda step: None, {}, None),
    ],
)
def test_a_count_of_steps_that_stands(tmp_path: Path, counts: Any, changes: dict[str, Any], severity: str | None) -> None:
    run = build(tmp_path / "run", updates=lambda step, module: {**changes, "num_steps": counts(step)})
    found = [f for f in triage(run, select=["F135"]) if f.name == "step-count-stands"]
    assert [f.severity for f in found] == ([severity] if severity else [])
    if severity == "warning":
        factor = math.sqrt((1 - 0.999**82) / (1 - 0.999**32)) * (1 - 0.9**32) / (1 - 0.9**82)
        assert found[0].steps == (40, 90) and found[0].value == pytest.approx(factor)
        assert "counts 32 steps" in found[0].message and "for 6 of 6 weights" in found[0].message
        assert found[0].cure.startswith("keep the optimizer's count of steps in FP32")
