"""Every rule fires on its fault, alone and at the right place, and stays silent on its near misses and on healthy runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import RunError
from fp8debug.recipes import get_recipe, list_recipes
from fp8debug.rules import RULES, Severity, triage
from fp8debug.store.read.run import Run
from tests.rules.sick_runs import CULPRIT, FIRES, INPUT, SILENT, WEIGHT, share
from tests.rules.sick_sites import of_energy
from tests.synthetic import MODULES, Override, build


@pytest.mark.parametrize("code", FIRES)
def test_a_rule_fires_alone_at_the_culprit(tmp_path: Path, code: str) -> None:
    findings = triage(build(tmp_path / "run", **FIRES[code]))
    assert [finding.code for finding in findings] == [code]
    assert findings[0].module == (None if code == "F125" else CULPRIT)
    first = {"F110": 0, "F125": 55}.get(code, 40)
    assert findings[0].steps[0] == first
    assert findings[0].also == ()
    assert code not in dict(findings.skipped)


@pytest.mark.parametrize(("code", "case"), [(code, case) for code, cases in SILENT.items() for case in cases])
def test_a_near_miss_is_silent(tmp_path: Path, code: str, case: str) -> None:
    findings = triage(build(tmp_path / "run", **SILENT[code][case]))
    assert [finding.message for finding in findings] == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("recipe", list_recipes())
def test_a_healthy_run_has_no_finding(tmp_path: Path, recipe: str, every: int) -> None:
    run = build(tmp_path / "run", recipe=recipe, num_steps=30, every=every, seed=every, what_if=["mxfp8"])
    assert list(triage(run)) == []


#: The edge of the healthy envelope of numerics.md, 4.
ENVELOPE: dict[str, dict[str, Any]] = {
    "worst SQNR of an operand": {"slots": {"sqnr_db": 31.0}, "reference": "operand"},
    "best SQNR of an operand": {"slots": {"sqnr_db": 33.0}, "reference": "operand"},
    "results dip": {"slots": {"sqnr_db": 27.3}, "reference": "shadow"},
    "underflow": {"slots": {"num_underflow": share(6e-4)}, "reference": "operand"},
    "no gradient at first": {
        "slots": {"num_zero": lambda row: row["numel"], "sum_x2": 0.0, "sum_xy": 0.0, "sum_y2": 0.0, "sum_err2": 0.0,
                  "amax": 0.0, "num_zero_blocks": lambda row: row.get("num_blocks"), "headroom": None},
        "tensor": "grad_output", "steps": (0, 1),
    },
    "an expert without tokens": {"slots": {"numel": 0, "num_zero": 0, "num_underflow": 0}, "module": "blocks.1.mlp.down"},
}  # fmt: skip


#: SQNR as stated is E4M3's; the gradients of tensorwise_delayed are E5M2, 6 dB lower.
EDGES = [
    (case, recipe)
    for case in ENVELOPE
    for recipe in ("blockwise", "tensorwise_delayed")
    if recipe == "blockwise" or "SQNR of an operand" not in case
]


@pytest.mark.parametrize(("case", "recipe"), EDGES)
def test_the_edge_of_the_envelope_is_healthy(tmp_path: Path, case: str, recipe: str) -> None:
    assert list(triage(build(tmp_path / "run", recipe=recipe, overrides=[Override(**ENVELOPE[case])]))) == []


def test_an_early_clipping_counts_when_it_is_overwhelming(tmp_path: Path) -> None:
    slots = {"num_saturated": share(0.5), "headroom": 64.0, "sqnr_db": 1.0, "gain": 0.1}
    plan = {"recipe": "tensorwise_delayed", "every": 1, "num_steps": 6}
    run = build(tmp_path / "run", **plan, overrides=[Override(**{**INPUT, "steps": (3, None)}, slots=slots)])
    assert [(f.code, f.module, f.steps) for f in triage(run)] == [("F101", CULPRIT, (3, 5))]


#: 2 % of a tensor clip in a run of six sampled steps, all of them within the warm-up.
SHORT = {"num_saturated": share(0.02), "headroom": 1.5, "sqnr_db": 19.0, "gain": 0.98}


@pytest.mark.parametrize(("num_steps", "found"), [(6, ["F101"]), (3, [])])
def test_a_static_scale_that_clips_in_a_short_run_has_no_growth_to_blame(
    tmp_path: Path, num_steps: int, found: list[str]
) -> None:
    slots = {**SHORT, "cast_name": "e4m3fn tensorwise static(0.01)"}
    overrides = [Override(**{**INPUT, "steps": (0, None), "reference": "operand"}, slots=slots)]
    plan = {"recipe": "tensorwise_delayed", "every": 1, "num_steps": num_steps, "overrides": overrides}
    assert [f.code for f in triage(build(tmp_path / "run", **plan)) if f.code == "F101"] == found


@pytest.mark.parametrize(("growth", "is_left_behind"), [(1.0, True), (1.5, False)], ids=["constant tensor", "growing tensor"])
def test_a_delayed_scale_below_an_amax_of_its_own_history_is_left_behind(
    tmp_path: Path, growth: float, is_left_behind: bool
) -> None:
    """A tensor that grows by half a step clips under the amax of the step before, and every scale holds what it has seen."""
    site = {**INPUT, "reference": "operand"}
    overrides = [
        Override(
            **{**site, "steps": (step, step + 1)},
            slots={**SHORT, "amax": 100 * growth**step, "scale_inv_max": 100 * growth**step / 1.5 / 448},
        )
        for step in range(6)
    ]
    plan = {"recipe": "tensorwise_delayed", "every": 1, "num_steps": 6, "overrides": overrides}
    found = [f for f in triage(build(tmp_path / "run", **plan)) if f.code == "F101" and f.severity is Severity.ERROR]
    assert bool(found) is is_left_behind
    assert all("nor does it hold what the tensor had at earlier sampled steps" in f.message for f in found)


@pytest.mark.parametrize(("scale_inv", "severity"), [(1e-12 / 448, Severity.INFO), (1e-9 / 448, Severity.ERROR)])
def test_a_tensor_below_the_usual_amax_floor_is_information(tmp_path: Path, scale_inv: float, severity: Severity) -> None:
    slots = {
        "sqnr_db": 0.0, "gain": 0.0, "num_underflow": share(1.0), "amax": scale_inv * 448 * 1e-6, "headroom": 1e-6,
        "scale_inv_min": scale_inv, "scale_inv_max": scale_inv,
    }  # fmt: skip
    overrides = [Override(**{**INPUT, "steps": (0, None), "reference": "operand"}, slots=slots)]
    found = [f for f in triage(build(tmp_path / "run", overrides=overrides)) if f.code == "F128"]
    assert [f.severity for f in found] == [severity]
    assert ("below the amax floor of 1e-12" in found[0].message) is (severity is Severity.INFO)


def test_a_small_tensor_is_not_judged_by_its_rates(tmp_path: Path) -> None:
    tiny = {"numel": 64, "num_zero": 0, "num_saturated": 4, "headroom": 1.4, "num_underflow": 6}
    run = build(tmp_path / "run", recipe="tensorwise_delayed", overrides=[Override(slots=tiny, reference="operand")])
    assert list(triage(run)) == []


def test_only_a_cast_that_ran_is_accused(tmp_path: Path) -> None:
    sick = {"num_saturated": share(0.9), "headroom": 99.0, "num_actual_nonfinite": 5}
    what_if = Override(actual=False, slots=sick, reference="operand")
    assert list(triage(build(tmp_path / "fp8", what_if=["tensorwise_delayed"], overrides=[what_if]))) == []
    findings = triage(build(tmp_path / "bf16", recipe="bf16", what_if=["tensorwise_delayed"], overrides=[what_if]))
    assert list(findings) == []
    assert ("F101", "no operand ran in FP8: the run has what-if rows only") in findings.skipped
    needy = {rule.code for rule in RULES if rule.needs_fp8}
    assert needy <= {code for code, _ in findings.skipped}


def test_a_lasting_slight_clipping_is_a_warning(tmp_path: Path) -> None:
    slots = {"cast_name": "e4m3fn tensorwise delayed(16,max)", "num_saturated": share(0.004), "headroom": 1.6}
    findings = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=slots)]))
    assert [(f.code, f.severity) for f in findings] == [("F101", Severity.WARNING)]


@pytest.mark.parametrize("factor", [0.5, 240 / 448, 0.9, 1.1, 448 / 240, 2.0])
def test_a_scale_that_is_off_by_any_factor(tmp_path: Path, factor: float) -> None:
    """Below 1 the maxima of all blocks lie beyond the maximum by the recorded scale; that is not F104's clipping."""
    maxima = {"num_saturated": share(0.012), "headroom": 1 / factor} if factor < 1 else {}
    overrides = [Override(**{**INPUT, "reference": "operand"}, slots={"gain": factor, **maxima})]
    findings = triage(build(tmp_path / "run", overrides=overrides))
    assert [(f.code, f.module) for f in findings] == [("F113", CULPRIT)]


def _of(*, gain: float, norm_ratio: float, error: float) -> dict[str, Any]:
    """Slots of an operand or result by its gain, norm ratio and squared error over its energy."""
    return {"sum_xy": of_energy(gain), "sum_y2": of_energy(norm_ratio**2), "sum_err2": of_energy(error)}


def test_a_cast_that_does_not_saturate(tmp_path: Path) -> None:
    slots = {"num_actual_nonfinite": 9000, "headroom": 12.0}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**INPUT, "reference": "operand"}, slots=slots)]))
    assert (finding.code, finding.name) == ("F103", "cast-without-clamp")
    assert finding.message.endswith("values lie up to 12 times beyond what their scale holds, and the cast does not saturate")
    assert finding.cure.startswith("clamp to the format's largest value before the conversion")


def test_a_scale_from_a_part_of_the_tensor(tmp_path: Path) -> None:
    slots = {"num_saturated": 20, "headroom": 1.13, "gain": 0.997, "scale_inv_min": 0.0077, "scale_inv_max": 0.0077}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**INPUT, "reference": "operand"}, slots=slots)]))
    assert (finding.code, finding.name, finding.severity) == ("F113", "wrong-scale", Severity.WARNING)
    assert "from the amax of a part of it" in finding.message


@pytest.mark.parametrize(("larger", "is_told"), [(1.9, True), (1.03, False)])
def test_scales_for_another_maximum_are_information(tmp_path: Path, larger: float, is_told: bool) -> None:
    slots = {"headroom": 1 / larger, "scale_inv_max": lambda row: row["scale_inv_max"] * larger}
    findings = triage(build(tmp_path / "run", overrides=[Override(tensor="input", reference="operand", slots=slots)]))
    assert [(f.name, f.severity) for f in findings] == ([("scale-for-another-maximum", "info")] if is_told else [])


def test_a_constant_scale_of_a_constant_tensor_says_nothing_of_another_maximum(tmp_path: Path) -> None:
    slots = {"headroom": 0.28, "scale_inv_max": 0.00123}
    assert list(triage(build(tmp_path / "run", overrides=[Override(tensor="weight", reference="operand", slots=slots)]))) == []


def test_a_range_that_varies_is_a_scale_that_follows(tmp_path: Path) -> None:
    overrides = [
        Override(
            **{**INPUT, "reference": "operand", "steps": (step, step + 1)},
            slots={"headroom": 0.5 + step / 300, "scale_inv_max": lambda row: row["scale_inv_max"] * 1.9},
        )
        for step in range(100)
    ]
    assert list(triage(build(tmp_path / "run", overrides=overrides))) == []


def test_a_part_of_a_sum_without_scales(tmp_path: Path) -> None:
    slots = _of(gain=1.4e6, norm_ratio=2.5e6, error=6e12)
    (finding,) = triage(
        build(tmp_path / "run", overrides=[Override(**{**INPUT, "tensor": "output", "reference": "exact"}, slots=slots)])
    )
    assert (finding.code, finding.name) == ("F108", "result-differs") and "a part of the sum lacks its scales" in finding.message


def test_a_conversion_that_changes_large_values(tmp_path: Path) -> None:
    slots = {**_of(gain=1.09, norm_ratio=1.11, error=0.047), "headroom": 1.0}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**INPUT, "reference": "operand"}, slots=slots)]))
    assert (finding.code, finding.name) == (
        "F128",
        "operand-differs",
    ) and "the conversion to codes changes values" in finding.message


@pytest.mark.parametrize(("first", "code"), [(None, "F119"), (40, None)])
def test_a_weight_under_scales_of_other_blocks_from_the_start(tmp_path: Path, first: int | None, code: str | None) -> None:
    """As rows of a fused weight in another order: the same later on may be a weight that outgrew its scales."""
    slots = {**_of(gain=0.964, norm_ratio=0.9997, error=0.071), "headroom": 1.6, "num_saturated": 121}
    override = Override(**{**WEIGHT, "gemm": "fprop", "steps": (first, None)}, slots=slots)
    findings = triage(build(tmp_path / "run", overrides=[override]))
    assert [f.code for f in findings][:1] == ([code] if code else ["F112"])


UNIT = {"gain": 4480.0, "scale_inv_min": 1.0, "scale_inv_max": 1.0}


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ({"gemm": "fprop"}, "dgrad of the module has a scale for it"),
        ({}, "the weight of blocks.0.mlp.up has a scale"),
        ({"module": "*", "gemm": "fprop"}, "dgrad of the module has a scale for it"),
    ],
)
def test_a_scale_that_one_gemm_lacks(tmp_path: Path, where: dict[str, Any], why: str) -> None:
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**WEIGHT, **where}, slots=UNIT)]))
    assert (finding.code, finding.name, finding.severity) == ("F113", "scale-not-applied", Severity.WARNING)
    assert f"where {why}: its scale was dropped" in finding.message


def test_a_gemm_of_codes_alone_whose_result_is_multiplied_by_both_scales(tmp_path: Path) -> None:
    """So Meta Lingua's rowwise dgrad, whose fprop has its scales in the GEMM."""
    both = [Override(module="*", gemm="dgrad", tensor="weight", reference="operand", slots=UNIT),
            Override(module="*", gemm="dgrad", tensor="grad_output", reference="operand", slots=UNIT)]  # fmt: skip
    findings = triage(build(tmp_path / "run", overrides=both))
    assert [f for f in findings if f.name == "scale-not-applied"] == []
    assert findings.classification is not None
    assert any("whether scales are applied outside" in line for line in findings.classification["evidence"])


def test_scales_outside_of_gemms_are_told_as_not_watched(tmp_path: Path) -> None:
    verdict = triage(
        build(tmp_path / "run", overrides=[Override(tensor="weight", reference="operand", slots=UNIT)])
    ).classification
    assert verdict is not None and verdict["cause"] == "healthy"
    assert any(line.startswith("not watched: whether scales are applied outside their GEMMs") for line in verdict["evidence"])


def test_a_bias_is_told_as_not_watched(tmp_path: Path) -> None:
    entries = {CULPRIT: {"kind": "BlockLinear", "bias": True, "fp8": True, "observed": True}}
    verdict = triage(build(tmp_path / "run", module_entries=entries)).classification
    assert verdict is not None
    assert [line for line in verdict["evidence"] if f"the bias of {CULPRIT};" in line]


GRADIENTS: dict[str, Any] = {"tensor": "grad_output", "reference": "operand"}


def _in_format(name: str, *modules: str) -> dict[str, Any]:
    """A run of the recipe of 1x128 blocks in which gradients of some modules are of another format, with its noise."""
    casts = {
        site: {**(cast.to_dict() if cast else {}), **({"format": name} if tensor == "grad_output" else {})}
        for (gemm, tensor), cast in get_recipe("blockwise").casts.items()
        if (site := f"{gemm}.{tensor}")
    }
    slots = {"cast_name": lambda row: f"{name} {row['cast_name'].partition(' ')[2]}", "sqnr_db": 25.5}
    return {
        "overrides": [Override(**GRADIENTS, module=module, slots=slots) for module in modules],
        "module_entries": {module: {"casts": casts} for module in modules},
    }


def test_one_gradient_in_another_format_than_the_others(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", **_in_format("e5m2", CULPRIT)))
    assert (finding.code, finding.severity, finding.module) == ("F120", Severity.WARNING, CULPRIT)
    assert finding.message == "the dgrad grad_output runs e5m2 1x128 current, where that of 5 other modules runs e4m3fn (25.5 dB)"
    assert finding.cure == "format='e4m3fn' for this gradient"


def test_an_override_by_name_means_its_format(tmp_path: Path) -> None:
    named = {"filters": [{"kind": "override", "pattern": CULPRIT, "matched": 1}]}
    assert [
        f for f in triage(build(tmp_path / "run", **_in_format("e5m2", CULPRIT), manifest=named)) if f.severity > "info"
    ] == []


def test_gradients_in_e5m2_blocks_that_e4m3_would_hold(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", **_in_format("e5m2", *(name for name, _, _ in MODULES))))
    assert (finding.code, finding.severity, len(finding.also)) == ("F120", Severity.INFO, 5)
    assert "with a single scale for the tensor" in finding.message
    assert "looked at" not in finding.message
    (finding,) = triage(tmp_path / "run", thresholds={"F120": {"max_steps": 4}})
    sampled = len(Run(tmp_path / "run").sampled_steps)
    assert finding.message.endswith(f"; looked at in 4 of {sampled} sampled steps)") and finding.steps[0] == 0


def test_the_first_steps_do_not_tell_what_range_gradients_need(tmp_path: Path) -> None:
    plan = _in_format("e5m2", *(name for name, _, _ in MODULES))
    assert list(triage(build(tmp_path / "run", **plan, num_steps=8, every=1))) == []


def test_e5m2_by_its_noise_alone(tmp_path: Path) -> None:
    findings = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots={"sqnr_db": 25.5})]))
    assert [(f.code, f.message) for f in findings] == [
        ("F120", "the fprop input is declared E4M3 and has the noise of E5M2 (25.5 dB, E4M3 gives 31.5 dB)")
    ]


def test_a_nan_loss_without_a_sick_cast(tmp_path: Path) -> None:
    losses = {step: {"loss": float("nan")} for step in range(50, 100)}
    findings = triage(build(tmp_path / "run", steps=losses))
    assert [(f.code, f.module, f.severity) for f in findings] == [("F125", None, Severity.ERROR)]
    assert findings[0].message == (
        "the loss is NaN from step 50 on; no Linear produced it: all tensors of Linears read at that step are finite, so the"
        " loss function, or what lies between the last Linear and the loss, made it"
    )


def test_a_nan_between_sampled_steps_clears_nobody(tmp_path: Path) -> None:
    losses = {step: {"loss": float("nan")} for step in range(55, 100)}
    (finding,) = triage(build(tmp_path / "run", steps=losses))
    assert (finding.code, finding.name, finding.module) == ("F125", "nonfinite-loss-unseen", None)
    assert finding.message.startswith("the loss is NaN from step 55 on, which was not sampled: whether a cast did it")
    assert finding.cure == "train again from step 50 or before with every=1: the first NaN then names its layer"


def test_damaged_statistics_are_no_clean_bill(tmp_path: Path) -> None:
    build(tmp_path / "run")
    for part in (tmp_path / "run").glob("rank=*/stats/*.parquet"):
        part.write_bytes(part.read_bytes()[:500])
    with pytest.raises(RunError, match="run has no statistics that can be read: "):
        triage(tmp_path / "run")


def test_a_spike_after_a_sick_cast_is_not_acquitted(tmp_path: Path) -> None:
    plan = {**FIRES["F101"], "steps": {55: {"loss": 6.0}}}
    assert [f.code for f in triage(build(tmp_path / "run", **plan))] == ["F101"]
    only = triage(build(tmp_path / "selected", **plan), select=["F125"])
    assert list(only) == [], "rules that nobody selected still bear witness"


def test_a_delayed_scale_that_is_rounded_down_is_not_a_stale_one(tmp_path: Path) -> None:
    recipe = get_recipe("tensorwise_delayed").replace("fprop", "input", scale_rounding="pow2_floor")
    slots = {"num_saturated": 6, "headroom": 1.1, "gain": 0.998}
    override = Override(module="blocks.0.mlp.up", gemm="fprop", tensor="input", steps=(20, None), slots=slots)
    (finding,) = triage(build(tmp_path / "run", recipes={"blocks.0.mlp.up": recipe}, overrides=[override]))
    assert (finding.code, finding.module, finding.tensor) == ("F104", "blocks.0.mlp.up", "input")


def test_an_exact_operand_beside_one_in_fp8_is_information(tmp_path: Path) -> None:
    """FP8 is on there; a tensor that lay on the FP8 grid before its cast looks like one that was not cast."""
    overrides = [Override(**{**INPUT, "reference": "operand"}, slots={"sum_err2": 0.0})]
    (finding,) = triage(build(tmp_path / "run", overrides=overrides))
    assert (finding.code, finding.severity, finding.tensor) == ("F111", Severity.INFO, "input")
    assert "the GEMM's other operand is in FP8" in finding.message
