"""Rules of single operands, rows and microbatches: they fire alone at the culprit, say what they lack, and yield to the cause."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.rules import RULES, Finding, Severity, triage
from tests.rules import sick_sites as sick
from tests.rules import sick_wholeruns
from tests.rules.sick_runs import CLIPPED, CULPRIT, INPUT, OUTLIER, WEIGHT, share
from tests.rules.sick_sites import DGRAD, FOREIGN, STALE, WGRAD, of_energy, rotated, shifted
from tests.synthetic import MODULES, Override, build

MESSAGES = {
    "F106": "50 % of the nonzero dgrad grad_output underflows at step N: tokens of unequal size share 128x128 blocks (2^14"
    " between the values of a block); no what-if with 1x128 blocks was recorded to compare with (what_if=['blockwise'])",
    "F112": "the fprop weight has 20.0 dB at cosine 0.99500 at step N: its FP8 values are not those of the weight as it is now",
    "F115": "the wgrad input is recomputed at step N with scales 2^-3.5 times those of the forward pass, 31.7 dB",
    "F117": "94 % of the output's rows are below 10 dB at step N, while the output as a whole has 32 dB: few rows set the scale,"
    " and 90 % of the nonzero fprop input underflows",
    "F118": "97 % of the fprop weight clips to one code at step N: gain 0.921 at cosine 1.00000",
    "F119": "the fprop weight has -7.0 dB at step N, and values 4 times beyond their block's current scale: the scales are those"
    " of other blocks",
    "F121": "the fprop weight has 0.5 dB at step N, its FP8 copy is not the cast of it: 50% of its rows are other values and 50%"
    " are right, so that a part is of another place",
    "F123": "weight.grad is 24.0 dB from the FP32 sum of its gradients at step N (gain 0.970) and holds BF16 values: it is"
    " accumulated in BF16",
}


@pytest.mark.parametrize("code", sick.FIRES)
def test_a_rule_fires_alone_at_the_culprit(tmp_path: Path, code: str) -> None:
    findings = triage(build(tmp_path / "run", **sick.FIRES[code]))
    assert [f.code for f in findings] == [code], [f.message for f in findings]
    (finding,) = findings
    assert (finding.module, finding.steps[0], finding.also) == (CULPRIT, 40, ())
    assert finding.severity is (Severity.WARNING if code in ("F107", "F137") else Severity.ERROR)
    assert code not in {skipped for skipped, _ in findings.skipped}
    if code in MESSAGES:
        assert re.sub(r"at step \d+", "at step N", finding.message) == MESSAGES[code]


@pytest.mark.parametrize(("code", "case"), [(code, case) for code, cases in sick.SILENT.items() for case in cases])
def test_a_near_miss_is_silent(tmp_path: Path, code: str, case: str) -> None:
    run = build(tmp_path / "run", **sick.SILENT[code][case])
    assert [f.message for f in RULES.get(code).check(run)] == []


@pytest.mark.parametrize(("left", "is_of_the_recipe"), [(0.01, True), (0.4, False)], ids=["cured", "the same in both"])
def test_underflow_that_the_recipe_of_the_weights_cures_is_information_beside_it(
    tmp_path: Path, left: float, is_of_the_recipe: bool
) -> None:
    """A checkpoint in blocks, cast under one scale: F137 names the recipe, and an input's outlier is no other cause."""
    whole = {**WEIGHT, "gemm": "fprop", "steps": (None, None)}
    sites = [
        Override(**whole, actual=False, slots=sick.ON_GRID),
        Override(**INPUT, actual=True, slots=OUTLIER),
        Override(**INPUT, actual=False, slots={"num_underflow": share(left)}),
    ]
    run = build(tmp_path / "run", recipe="tensorwise_current", what_if=["blockwise"], overrides=sites)
    found = [(f.code, f.module, f.severity) for f in triage(run)]
    rounded, outlier = ("F137", CULPRIT, Severity.WARNING), ("F105", CULPRIT, Severity.ERROR)
    assert found == ([rounded, ("F105", CULPRIT, Severity.INFO)] if is_of_the_recipe else [outlier, rounded])


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "mxfp8"])
def test_a_healthy_run_of_two_ranks_has_no_finding(tmp_path: Path, recipe: str) -> None:
    assert list(triage(build(tmp_path / "run", recipe=recipe, num_steps=20, every=5, world_size=2))) == []


def test_a_rule_says_what_it_lacks(tmp_path: Path) -> None:
    lacking = [
        Override(slots=dict.fromkeys(("num_rows", "num_bad_rows", "num_good_rows")), reference="shadow"),
        Override(slots=dict.fromkeys(("num_reread", "num_reread_blocks")), reference="operand"),
        Override(slots=dict.fromkeys(("num_grad", "grad_sum_err2")), tensor="grad_weight"),
    ]
    findings = triage(build(tmp_path / "run", num_steps=30, overrides=lacking))
    skipped = dict(findings.skipped)
    assert list(findings) == []
    assert skipped["F115"] == "not recorded: num_reread_blocks"
    assert skipped["F123"] == "not recorded: num_grad, grad_sum_err2"
    once = Override(slots={"num_reread_blocks": 0}, tensor="input"), Override(slots={"num_grad": 0})
    skipped = dict(triage(build(tmp_path / "once", num_steps=30, overrides=once)).skipped)
    assert skipped["F115"] == "no activation was recomputed for the backward pass"
    assert skipped["F123"] == "no step has three microbatches or more, or weight.grad is kept elsewhere"


def test_a_what_if_with_rows_of_their_own_is_quoted(tmp_path: Path) -> None:
    sick_rows = Override(**sick.DGRAD, slots={"cast_name": sick.COARSE, "num_underflow": share(0.5)})
    (finding,) = triage(build(tmp_path / "run", recipe="blockwise_pow2", what_if=["blockwise"], overrides=[sick_rows]))
    assert finding.message.endswith("; 0.02 % would under the what-if e4m3fn 1x128 current")
    assert finding.cure == "granularity='1x128' for this operand; else BF16 for this module's dgrad"


def test_a_cache_that_is_stale_from_the_second_microbatch_on(tmp_path: Path) -> None:
    override = Override(**WEIGHT, slots={"reread_sum_err2": of_energy(10**-2.2)})
    (finding,) = triage(build(tmp_path / "run", overrides=[override]))
    assert (finding.code, finding.module) == ("F112", CULPRIT)
    assert finding.value == pytest.approx(22.0)
    assert "in the first microbatch of step 40 and 22.0 dB in later ones" in finding.message


@pytest.mark.parametrize(("log2", "is_told"), [(1.0, True), (-9.0, True), (0.0, False), (2.0, False)])
def test_cached_data_under_a_scale_that_was_updated(tmp_path: Path, log2: float, is_told: bool) -> None:
    """Data that stayed are (r - 1) of themselves away under r times their scale; anything else is a copy out of step."""
    error = (2.0**log2 - 1) ** 2 if is_told else 0.1
    slots = {"reread_sum_err2": of_energy(error), "reread_scale_inv_sum_log2": sick.shifted(log2)}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**WEIGHT, slots=slots)]))
    assert (finding.code, finding.module) == ("F112", CULPRIT)
    assert ("its cached FP8 data stayed" in finding.message) == is_told
    assert finding.cure.startswith("keep the scale_inv" if is_told else "refresh the FP8 weight")
    assert not is_told or f"scale_inv is {2.0**log2:.2g} times" in finding.message


def test_an_error_below_the_noise_of_the_cast_shows_by_a_scale_that_is_not_its_own(tmp_path: Path) -> None:
    slots = {**rotated(0.99945), "headroom": 1.01}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**WEIGHT, slots=slots)]))
    assert (finding.code, finding.module) == ("F112", CULPRIT)
    (finding,) = triage(build(tmp_path / "clips", overrides=[Override(**WEIGHT, slots={**slots, "num_saturated": 500})]))
    assert finding.code == "F112", "clipping by a stale amax is not a scale rounded down (F104)"


def test_many_microbatches_in_bf16_are_information(tmp_path: Path) -> None:
    slots = {**sick.STALLED, "grad_sum_err2": sick.of_energy(10**-4.6), "num_tensors": 32}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**sick.GRADIENT, slots=slots)]))
    assert (finding.code, finding.severity) == ("F123", Severity.INFO)
    assert finding.message.endswith("it is accumulated in BF16 over 32 microbatches, which costs little; with 41 it has 45 dB")


@pytest.mark.parametrize(("headroom", "code"), [(1.0, "F120"), (1.03, "F112")])
def test_a_stale_weight_in_the_band_of_e5m2(tmp_path: Path, headroom: float, code: str) -> None:
    slots = {**rotated(0.9986), "headroom": headroom}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**WEIGHT, slots=slots)]))
    assert (finding.code, finding.module) == (code, CULPRIT)


def test_scales_that_are_wrong_explain_an_error_of_e5m2s_size(tmp_path: Path) -> None:
    wrong = Override(**{**WEIGHT, "gemm": "dgrad"}, slots={**rotated(0.9996, 1.5)})
    coarse = Override(**WEIGHT, slots=rotated(0.9986))
    assert [f.code for f in triage(build(tmp_path / "alone", overrides=[coarse]))] == ["F120"]
    assert [f.code for f in triage(build(tmp_path / "run", overrides=[coarse, wrong]))] == ["F113"]


def test_amds_wide_format_is_the_wrong_one_for_an_input(tmp_path: Path) -> None:
    override = Override(**INPUT, slots={"cast_name": "e5m2fnuz tensorwise current", "sqnr_db": 25.5})
    (finding,) = triage(build(tmp_path / "run", recipe="tensorwise_fnuz", overrides=[override]))
    assert (finding.code, finding.cure) == ("F120", "format='e4m3fnuz' for this operand")
    assert "other modules run E4M3 (25.5 dB" in finding.message


@pytest.mark.parametrize(("cosine", "length", "headroom", "code"), [
    (0.7402, 0.7447, 2.1162, "F112"),  # measured: a weight of 9 steps ago at a learning rate of 0.01
    (0.7393, 0.6185, 2.2454, "F112"),  # the same once it has grown in its own direction
    (0.7402, 1.0, 2.1162, "F119"),  # permuted scales keep the length
    (0.7402, 0.7447, 9.0, "F119"),  # no block grows so much more than the weight
])  # fmt: skip
def test_a_weight_that_has_outgrown_an_old_copy(tmp_path: Path, cosine: float, length: float, headroom: float, code: str) -> None:
    slots = {**rotated(cosine, length), "headroom": headroom}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**WEIGHT, slots=slots)]))
    assert (finding.code, finding.module) == (code, CULPRIT)


@pytest.mark.parametrize(("cosine", "num", "code"), [
    (0.50, 4, "F128"),  # two of four are another tensor's
    (0.53, 4, "F119"),  # no share of four: scales in another order
    (0.55, 12, "F119"),  # shares of twelve lie too close to tell
])  # fmt: skip
def test_foreign_scales_and_another_tensor_in_some_microbatches(tmp_path: Path, cosine: float, num: int, code: str) -> None:
    slots = {**rotated(cosine), "headroom": 4.0, "num_tensors": num}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=slots)]))
    assert (finding.code, finding.module) == (code, CULPRIT)
    if code == "F128":
        assert "as where 2 of them were read as another tensor" in finding.message
        assert "wrong signs or places in a part of each leave the same numbers" in finding.message


@pytest.mark.parametrize(("recipe", "sqnr_db", "are_wrong"), [
    ("blockwise", 31.6, False),
    ("blockwise", 5.0, True),
    ("tensorwise_delayed", 5.0, False),  # a stale scale does it
])  # fmt: skip
def test_single_codes_that_are_not_finite(tmp_path: Path, recipe: str, sqnr_db: float, are_wrong: bool) -> None:
    slots = {"num_actual_nonfinite": 5, "sqnr_db": sqnr_db}
    found = triage(build(tmp_path / "run", recipe=recipe, overrides=[Override(**INPUT, slots=slots)]))
    (finding,) = (f for f in found if f.code == "F103")
    assert (finding.name, finding.module) == ("nonfinite-codes", CULPRIT)
    assert "no block was all zero" in finding.message and "these codes were never written" in finding.message
    assert ("the finite elements are wrong too (5.0 dB)" in finding.message) is are_wrong


def test_a_program_with_a_history_of_its_own_clips_for_a_step(tmp_path: Path) -> None:
    def scaled(headroom: float, rate: float, steps: tuple[int, int]) -> Override:
        one = {name: lambda row: row["amax"] / 448 / headroom for name in ("scale_inv_min", "scale_inv_max")}
        slots = {**one, "headroom": headroom, "num_saturated": share(rate)}
        return Override(**{**INPUT, "module": "*", "gemm": None, "steps": steps}, slots=slots)

    steps = [(start, start + 1) for start in range(0, 100)]
    shares = [0.7 + 0.07 * (start % 4) for start in range(0, 100)]
    history = [scaled(at, 0.0, step) for step, at in zip(steps, shares, strict=True)]
    assert triage(build(tmp_path / "healthy", overrides=[*history, scaled(1.4, 0.0005, (50, 51))])) == []
    told = triage(build(tmp_path / "sick", overrides=[*history, scaled(1.4, 0.03, (50, 51))]))
    assert {f.code for f in told} == {"F113"} and told[0].severity == Severity.ERROR
    first = {"scale_inv_min": lambda row: row["amax"] / 448 / 2, "num_tensors": 2}  # two microbatches before there is a history
    first_step = Override(**{**INPUT, "module": "*", "gemm": None, "steps": (0, 1)}, slots=first)
    assert triage(build(tmp_path / "micro", overrides=[*history, first_step, scaled(1.4, 0.0005, (50, 51))])) == []
    part = [scaled(1.1, 0.0005, step) for step in steps]  # an amax of a part of the tensor never exceeds the tensor's
    assert {f.code for f in triage(build(tmp_path / "part", overrides=part))} >= {"F113"}


def test_an_empty_history_is_told_as_one(tmp_path: Path) -> None:
    slots = {"scale_inv_min": 0.0, "scale_inv_max": 0.0, "headroom": 3e38, "num_saturated": share(1.0)}
    (finding,) = (f for f in triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=slots)])) if f.code == "F113")
    assert "made from an amax of zero" in finding.message and finding.cure.startswith("save and restore the amax history")


def test_nan_codes_are_told_from_a_nan_scale_where_counts_can(tmp_path: Path) -> None:
    zeros = {"num_zero_blocks": 1, "num_zero": 128}
    told = []
    for number in (3, 128):
        sick = Override(**INPUT, slots={**zeros, "num_actual_nonfinite": number})
        (finding,) = (f for f in triage(build(tmp_path / str(number), overrides=[sick])) if f.code == "F103")
        told.append(finding.message.partition("; ")[2])
    assert told[0] == "fewer elements than the 128 of a block, so that codes are NaN, and not a scale"
    assert told[1].startswith("whether codes or scales are NaN there is not in the statistics")
    assert told[1].endswith(f"dump=['{CULPRIT}:fprop:input@40'] tell")


def test_zeros_that_the_cast_can_divide_by_elsewhere_were_never_written(tmp_path: Path) -> None:
    padded = {"num_zero_blocks": 4, "num_zero": 4 * 128}
    sick = Override(**INPUT, slots={**padded, "num_actual_nonfinite": 4 * 128})
    (finding,) = (f for f in triage(build(tmp_path / "alone", overrides=[sick])) if f.code == "F103")
    assert finding.name == "zero-tile-nan" and "amax_eps" in finding.cure
    other = Override(**DGRAD, slots=padded)
    (finding,) = (f for f in triage(build(tmp_path / "both", overrides=[other, sick])) if f.code == "F103")
    assert (finding.name, finding.module) == ("nonfinite-unwritten", CULPRIT)
    assert "such blocks of its dgrad grad_output finite" in finding.message and "eps" not in finding.cure
    elsewhere = Override(**{**INPUT, "module": "blocks.0.attn.out"}, slots=padded)  # which has an eps of its own, perhaps
    (finding,) = (f for f in triage(build(tmp_path / "elsewhere", overrides=[elsewhere, sick])) if f.code == "F103")
    assert finding.name == "zero-tile-nan" and "amax_eps" in finding.cure


def test_a_weight_that_is_wrong_from_the_first_step_is_another_one(tmp_path: Path) -> None:
    override = Override(**{**WEIGHT, "steps": (None, None)}, slots=rotated(0.02))
    (finding,) = triage(build(tmp_path / "run", overrides=[override]))
    assert (finding.code, finding.module, finding.steps[0]) == ("F121", CULPRIT, 0)
    assert "from the first step on" in finding.message


def test_a_transposed_copy_that_alone_is_wrong_is_made_wrongly(tmp_path: Path) -> None:
    dgrad = Override(**{**WEIGHT, "steps": (None, None), "gemm": "dgrad"}, slots=rotated(0.75))
    (finding,) = triage(build(tmp_path / "run", overrides=[dgrad]))
    assert (finding.code, finding.module, finding.gemm) == ("F121", CULPRIT, "dgrad")
    assert "the copy that fprop reads is right" in finding.message
    assert finding.cure.startswith("check how the transposed copy is made")


@pytest.mark.parametrize(
    ("tensor", "cosine", "gain"), [("weight", 0.9993, 6e3), ("grad_output", 0.58, 1.6e6)]
)  # measured, one scale per row
def test_a_scale_that_is_applied_after_the_gemm_is_no_fault(tmp_path: Path, tensor: str, cosine: float, gain: float) -> None:
    ones = {"scale_inv_min": 1.0, "scale_inv_max": 1.0, "headroom": 2e-4}
    slots = {**rotated(cosine, gain), **ones}
    assert triage(build(tmp_path / "run", overrides=[Override(tensor=tensor, reference="operand", slots=slots)])) == []


@pytest.mark.parametrize(("first", "length", "code"), [
    (None, 1.025, "F128"),  # noise of 13 dB across the weight makes it longer, and leaves its gain
    (40, 1.025, "F112"),  # a weight that decays while its copy does not looks alike, and is right at first
    (None, 1.0, "F121"),  # values in other places keep the length
])  # fmt: skip
def test_noise_on_a_weight_is_neither_an_older_nor_another_one(
    tmp_path: Path, first: int | None, length: float, code: str
) -> None:
    slots = rotated(1 / 1.025, length) if length > 1 else rotated(0.975)
    override = Override(**{**WEIGHT, "steps": (first, None)}, slots=slots)
    (finding,) = triage(build(tmp_path / "run", overrides=[override]))
    assert (finding.code, finding.module) == (code, CULPRIT)
    assert code != "F128" or "the right values with noise" in finding.message


def test_a_weight_that_is_wrong_after_a_resume_is_another_one(tmp_path: Path) -> None:
    plan: dict[str, Any] = {"overrides": [Override(**WEIGHT, slots=rotated(0.02))]}
    assert [f.code for f in triage(build(tmp_path / "run", **plan))] == ["F112"]
    resumed = build(tmp_path / "resumed", **plan, events=[(35, "resume", None, "goes on from a checkpoint")])
    assert [f.code for f in triage(resumed)] == ["F121"]


@pytest.mark.parametrize(
    ("cosine", "pace", "code"), [(0.02, 1e-4, "F121"), (0.02, 1e-3, "F112"), (0.9, 1e-4, "F112")]
)  # RMS of an update; 41 steps of 1e-4 do not turn a weight round, and of 1e-3 they can
def test_values_that_no_update_can_have_left_behind_are_another_weights(
    tmp_path: Path, cosine: float, pace: float, code: str
) -> None:
    run = build(tmp_path / "run", overrides=[Override(**WEIGHT, slots=rotated(cosine))], updates=sick_wholeruns.pace(pace))
    (finding,) = triage(run)
    assert (finding.code, finding.module, finding.steps[0]) == (code, CULPRIT, 40)
    assert (
        ("these are no older values" in finding.message) == ("which copy this GEMM is handed" in finding.cure) == (code == "F121")
    )


@pytest.mark.parametrize(
    ("first", "pace", "code"), [(0, 1e-3, "F128"), (40, 1e-5, "F128"), (40, 1e-4, "F112"), (40, 1e-3, "F112")]
)
def test_values_that_no_version_of_the_weight_had_are_not_stale(tmp_path: Path, first: int, pace: float, code: str) -> None:
    """Before the first step there is no other version; 10 steps of 1e-4 do not move it so far, 41 of them can."""
    sick_weight = Override(**{**WEIGHT, "steps": (first, None)}, slots=rotated(0.99 if first == 0 else 0.9))
    (finding,) = triage(build(tmp_path / "run", overrides=[sick_weight], updates=sick_wholeruns.pace(pace)))
    assert (finding.code, finding.module, finding.steps[0]) == (code, CULPRIT, first)
    is_far = (code, pace) == ("F112", 1e-4)
    assert ("it was right at step 30" in finding.message) == finding.cure.startswith("if this FP8 weight is cached") == is_far


@pytest.mark.parametrize(("pace", "code"), [(3e-5, "F121"), (1e-3, "F112")])
def test_a_transposed_copy_farther_away_than_updates_reach_is_made_wrongly(tmp_path: Path, pace: float, code: str) -> None:
    dgrad = Override(**{**WEIGHT, "gemm": "dgrad"}, slots=rotated(0.8))
    (finding,) = triage(build(tmp_path / "run", overrides=[dgrad], updates=sick_wholeruns.pace(pace)))
    assert (finding.code, finding.module, finding.gemm, finding.steps[0]) == (code, CULPRIT, "dgrad", 40)
    assert finding.cure.startswith("check how the transposed copy is made") == (code == "F121")


def test_replicas_that_differ_are_found_on_the_rank_that_does_not_count(tmp_path: Path) -> None:
    """Of a replicated weight the lowest rank's row is the one in ``sites``; the fault is on the other."""
    run = build(tmp_path / "run", world_size=2, overrides=[Override(**WEIGHT, ranks=(1,), slots=STALE)])
    (finding,) = triage(run)
    assert (finding.code, finding.module, finding.steps[0], finding.ranks) == ("F121", CULPRIT, 40, (0, 1))


def test_an_input_that_one_rank_clips_does_not_hold_the_scale_of_a_weight_that_is_wrong_on_all(tmp_path: Path) -> None:
    overrides = [Override(**{**INPUT, "ranks": (1,)}, slots=CLIPPED), Override(**WEIGHT, slots={"gain": 2.0})]
    found = triage(build(tmp_path / "run", num_steps=60, world_size=3, overrides=overrides), select=["F113"])
    (finding,) = found
    assert finding.steps == (40, 50)
    assert sorted((part.gemm, part.steps) for part in finding.parts) == [("dgrad", (40, 50)), ("fprop", (40, 50))]


def test_an_input_that_clips_does_not_hold_the_scale_of_an_old_weight(tmp_path: Path) -> None:
    clips = {"num_saturated": share(0.25), "headroom": 8.0, "gain": 0.9, "sqnr_db": 10.0}
    old = Override(module=CULPRIT, gemm="fprop", tensor="weight", steps=(40, None), slots={**clips, "headroom": 2.0})
    overrides = [Override(**INPUT, slots=clips), old]
    found = triage(build(tmp_path / "run", recipe="tensorwise_delayed", overrides=overrides))
    assert sorted(finding.code for finding in found if finding.severity != Severity.INFO) == ["F101", "F112"]


def test_other_weights_on_each_rank_are_no_replicas(tmp_path: Path) -> None:
    half = Override(**WEIGHT, ranks=(1,), slots={"sum_x2": lambda row: 2 * row["sum_x2"]})
    worse = Override(**WEIGHT, ranks=(1,), slots={**FOREIGN})
    assert list(triage(build(tmp_path / "run", world_size=2, overrides=[half, worse]))) == []


def test_layers_behind_a_wrong_recomputation_are_not_accused(tmp_path: Path) -> None:
    names = [name for name, _, _ in MODULES]
    follows = Override(**{**WGRAD, "module": names[5]}, slots={"reread_scale_inv_sum_log2": shifted(0.7)})
    (finding,) = triage(build(tmp_path / "run", overrides=[*sick.FIRES["F115"]["overrides"], follows]))
    assert (finding.code, finding.module, finding.also) == ("F115", CULPRIT, ())


def test_an_outlier_channel_is_not_a_poisoned_row(tmp_path: Path) -> None:
    """Every row holds the outlier, and the output as a whole is as bad as its rows."""
    overrides = [Override(**INPUT, slots=OUTLIER), Override(**sick.OUTPUT, slots={"num_bad_rows": 256, "sqnr_db": 4.0})]
    (finding,) = triage(build(tmp_path / "run", recipe="tensorwise_current", overrides=overrides))
    assert finding.code == "F105"
    few = [Override(**INPUT, slots=OUTLIER), sick.POISONED[1]]
    (finding,) = triage(build(tmp_path / "rows", recipe="tensorwise_current", overrides=few))
    assert finding.code == "F117", "F105 yields"


def test_a_cast_that_cuts_mantissas_off_is_named(tmp_path: Path) -> None:
    cut = {"max_abs_err": lambda row: 21.0 * row["scale_inv_max"], "gain": 0.965, "sqnr_db": 26.8, "headroom": 1.0}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=cut)]))
    assert (finding.code, finding.name, finding.module, finding.severity) == ("F128", "element-differs", CULPRIT, "warning")
    assert "rounds towards zero" in finding.message
    near = {**cut, "max_abs_err": lambda row: 17.0 * row["scale_inv_max"]}
    assert list(triage(build(tmp_path / "near", overrides=[Override(**INPUT, slots=near)]))) == []


@pytest.mark.parametrize(("recipe", "gain", "sqnr_db"), [("tensorwise_fnuz", 0.917, 20.2), ("blockwise", 0.962, 26.8)])
def test_mantissas_that_are_cut_off_below_the_largest_values_are_named(
    recipe: str, gain: float, sqnr_db: float, tmp_path: Path
) -> None:
    at: dict[str, Any] = {"module": CULPRIT, "gemm": "dgrad", "tensor": "grad_output", "reference": "operand"}
    cut: dict[str, Any] = {"gain": gain, "sqnr_db": sqnr_db, "max_abs_err": lambda row: row["scale_inv_max"], "log2_hist": spread}
    near: dict[str, dict[str, Any]] = {
        "one value": {**cut, "log2_hist": lambda row: [row["numel"] * (i == 45) for i in range(NUM_BINS)]},
        "noise": {**cut, "sqnr_db": sqnr_db - 4},
        "rounding": {**cut, "gain": 1 - (1 - gain) / 3},
    }

    def found(name: str, slots: dict[str, Any], steps: tuple[int, int | None] = (40, None)) -> list[Finding]:
        overrides = [Override(**at, steps=steps, slots=slots)]
        return list(triage(build(tmp_path / name, recipe=recipe, overrides=overrides)))

    (finding,) = found("run", cut)
    assert (finding.code, finding.name, finding.module, finding.severity) == ("F128", "values-cut-off", CULPRIT, "warning")
    assert finding.steps[0] == 40 and "upper byte of FP16" in finding.message and "nearest even" in finding.cure
    others = [*(found(name, slots) for name, slots in near.items()), found("ended", cut, (40, 80))]
    assert "values-cut-off" not in {other.name for findings in others for other in findings}


def spread(row: dict[str, Any]) -> list[int]:
    """Return a histogram whose energy lies in several binades."""
    return [row["numel"] // 4 ** max(0, i - 40) if i < 46 else 0 for i in range(NUM_BINS)]


def test_an_input_that_is_recomputed_from_other_values_is_named(tmp_path: Path) -> None:
    other = {"reread_sum_err2": lambda row: row["reread_sum_x2"] / 4}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**WGRAD, "module": "*"}, slots=other)]))
    assert (finding.code, finding.name, finding.module) == ("F115", "recompute-of-other-values", MODULES[0][0])
    assert CULPRIT in finding.victims and "preserve_rng_state" in finding.cure
    # What clips under a stale scale is as far from its tensor at the first read: that is no other value.
    clipped = [Override(**{**WGRAD, "module": "*"}, slots={**other, "sqnr_db": 6.0})]
    assert "F115" not in {f.code for f in triage(build(tmp_path / "clipped", overrides=clipped))}


def test_scales_that_are_too_small_for_some_rows_of_a_weight_are_named(tmp_path: Path) -> None:
    rows = {"num_rows": 256, "num_bad_rows": 128, "num_good_rows": 128}
    small = {**rows, "num_saturated": share(0.02), "headroom": 3.0, "gain": 0.4, "sqnr_db": 4.0}
    overrides = [Override(**WEIGHT, slots={**small, "sum_y2": lambda row: 0.2 * row["sum_x2"]})]
    (finding,) = triage(build(tmp_path / "run", overrides=overrides))
    assert (finding.code, finding.module, finding.tensor) == ("F113", CULPRIT, "weight")
    assert "greatest value in place of the magnitude" in finding.message


@pytest.mark.parametrize(
    ("headroom", "clipped", "name"),
    [
        (128.0, 0, "read-as-another-format"),
        (128.0, 200_000, "scaled-for-another-format"),
        (131.0, 0, "scale-grid"),
        (131.0, 200_000, "wrong-scale"),  # what clips was cast with these scales: they are older, not other blocks'
    ],
)
def test_scales_of_e5m2_under_codes_of_either_format(tmp_path: Path, headroom: float, clipped: int, name: str) -> None:
    """The scales of all blocks are made for 57344, 128 times the largest value of E4M3: a cast to it clips under them."""
    gain, cosine = 0.0077, 0.97
    nmse = (1 - gain) ** 2 + gain**2 * (1 / cosine**2 - 1)
    slots = {
        "gain": gain, "sqnr_db": -10 * math.log10(nmse), "headroom": headroom, "scale_inv_max": lambda row: row["amax"] / 57344,
        "scale_inv_min": lambda row: row["amax"] / 57344 / 4, "num_saturated": clipped,
    }  # fmt: skip
    misread = Override(module="blocks.1.mlp.up", gemm="dgrad", tensor="grad_output", reference="operand", slots=slots)
    (finding,) = triage(build(tmp_path / "run", overrides=[misread]))
    assert finding.name == name
    cures = {
        "read-as-another-format": "tell the GEMM that the operand is e5m2, or cast it to e4m3fn",
        "scaled-for-another-format": "divide the amax by the largest value of e4m3fn (448), not by that of e5m2",
    }
    assert cures.get(name, finding.cure) == finding.cure


def test_no_finite_code_of_a_wider_format_is_read_as_the_largest_value() -> None:
    """F120 tells codes of another format from a clipped cast by it."""
    codes = torch.arange(256, dtype=torch.uint8)
    pairs = [("e5m2", "e4m3fn", 448), ("e5m2", "e4m3fnuz", 240), ("e4m3fn", "e4m3fnuz", 240)]
    for made, read, largest in pairs:
        is_finite = codes.view(getattr(torch, f"float8_{made}")).float().isfinite()
        assert not (codes.view(getattr(torch, f"float8_{read}")).float().abs()[is_finite] == largest).any()


def test_an_element_that_no_rounding_moves_so_far_blames_no_rounding(tmp_path: Path) -> None:
    parts = {"max_abs_err": lambda row: 38.0 * row["scale_inv_max"], "gain": 1.019, "sqnr_db": 27.2, "headroom": 1.0}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=parts)]))
    assert (finding.code, finding.name, finding.module) == ("F128", "element-differs", CULPRIT)
    assert "another scale" in finding.message and "away from zero" not in finding.message
    assert "nearest even" not in finding.cure and "before the cast" in finding.cure


def unused(share: float, underflow: float, *, moves: bool = True) -> list[Override]:
    """Return overrides of an input whose scales are powers of two and leave most of the range unused."""
    return [
        Override(**{**INPUT, "steps": (step, step + 10)}, slots={
            "headroom": share, "scale_inv_max": 2.0 ** (step // 30 if moves else 1), "scale_inv_min": 0.5,
            "num_underflow": lambda row: int(underflow * row["numel"])})
        for step in range(0, 100, 10)
    ]  # fmt: skip


def test_scales_that_leave_eight_binades_unused_are_named(tmp_path: Path) -> None:
    (finding,) = triage(build(tmp_path / "run", overrides=unused(0.0044, 0.04)))
    assert (finding.code, finding.name, finding.module) == ("F113", "scale-for-another-maximum", CULPRIT)
    assert finding.severity == "warning" and "4 % underflow" in finding.message
    (finding,) = triage(build(tmp_path / "mild", overrides=unused(0.2, 0.0)))
    assert (finding.name, finding.severity) == ("scale-for-another-maximum", "info")


@pytest.mark.parametrize(("share", "moves"), [(0.3, True), (0.0044, False)])
def test_a_margin_of_a_binade_and_a_constant_scale_are_left_alone(tmp_path: Path, share: float, moves: bool) -> None:
    assert [f.message for f in triage(build(tmp_path / "run", overrides=unused(share, 0.0, moves=moves)))] == []


@pytest.mark.parametrize(("lost", "of_dgrad", "is_named"), [(0.9, 0.0, True), (0.9, 0.85, False), (0.15, 0.0, False)])
def test_zeros_of_what_wgrad_reads_count_beyond_those_that_dgrad_has(
    tmp_path: Path, lost: float, of_dgrad: float, is_named: bool
) -> None:
    """A cast that loses small values in wgrad alone; a cast of dgrad's codes, which have zeros of their own, is none."""
    wgrad = {"num_underflow": share(lost), "log2_hist": lambda row: row["log2_hist"]}
    dgrad = {"num_underflow": share(of_dgrad)}
    overrides = [
        Override(**{**INPUT, "gemm": gemm, "tensor": "grad_output"}, slots=slots)
        for gemm, slots in (("wgrad", wgrad), ("dgrad", dgrad))
    ]
    found = [(f.name, f.severity, f.module, f.gemm) for f in triage(build(tmp_path / "run", overrides=overrides))]
    named = [f for f in found if f[0] == "zeros-differ"]
    assert named == ([("zeros-differ", Severity.WARNING, CULPRIT, "wgrad")] if is_named else [])


@pytest.mark.parametrize(("rate", "severity"), [(0.08, Severity.ERROR), (0.03, Severity.WARNING), (0.009, None)])
def test_zeros_that_the_magnitudes_do_not_explain(tmp_path: Path, rate: float, severity: Severity | None) -> None:
    """A tile of small values that was never written: the SQNR is a sound cast's."""
    lost = {"num_underflow": share(rate), "log2_hist": lambda row: row["log2_hist"]}
    found = triage(build(tmp_path / "run", overrides=[Override(**INPUT, slots=lost)]))
    assert [(f.code, f.name, f.severity, f.module) for f in found] == (
        [("F128", "zeros-differ", severity, CULPRIT)] if severity else []
    )
    # So many small values underflow in a sound cast, wherever their share lies.
    small = [Override(**INPUT, slots={"num_underflow": share(rate)})]
    assert [f.code for f in triage(build(tmp_path / "small", overrides=small))] == []
    # Nor does a scale that the other operand holds too say what the cast made zero.
    gains = {"gain": 300.0, "scale_inv_min": 1.0, "scale_inv_max": 1.0}, {**lost, "gain": 1 / 300}
    both = [Override(**{**site, "gemm": "fprop"}, slots=slots) for site, slots in zip((WEIGHT, INPUT), gains, strict=True)]
    assert [f.code for f in triage(build(tmp_path / "both", overrides=both))] == []


@pytest.mark.parametrize(("worst", "is_single"), [(300.0, True), (150.0, False)])
def test_a_few_elements_far_off_are_told_from_noise(tmp_path: Path, worst: float, is_single: bool) -> None:
    """A tile at the largest code in values that are right elsewhere: noise of that size has no such peak."""
    near = {**rotated(0.929, 1.07), "headroom": 1.0, "max_abs_err": lambda row: worst * row["scale_inv_max"]}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**sick.DGRAD, slots=near)]))
    assert (finding.code, finding.module) == ("F128", CULPRIT)
    assert ("a few elements are off by" in finding.message) is is_single
    assert ("the right values with noise" in finding.message) is not is_single


NOTHING: dict[str, Any] = {
    "sum_x2": 0.0, "sum_xy": 0.0, "sum_y2": 1e-4, "sum_err2": 1e-4, "max_abs_err": 2e-4, "num_zero": lambda row: row["numel"],
}  # fmt: skip
SOUND: dict[str, Any] = {**NOTHING, "sum_y2": 0.0, "sum_err2": 0.0, "max_abs_err": 0.0}


@pytest.mark.parametrize(("numel", "why"), [(0, "as the module got no tokens"), (4096, "as an operand is zero")])
def test_a_result_whose_exact_product_is_zero_is_zero(tmp_path: Path, numel: int, why: str) -> None:
    """No SQNR shows it: there is no signal."""
    product: dict[str, Any] = {**sick.GRADIENT, "reference": "exact", "steps": (40, 60)}
    empty = Override(**{**WGRAD, "tensor": None, "reference": "operand", "steps": (40, 60)}, slots={**SOUND, "numel": numel})
    (finding,) = triage(build(tmp_path / "run", overrides=[empty, Override(**product, slots=NOTHING)]))
    assert (finding.code, finding.name, finding.module) == ("F108", "result-of-nothing", CULPRIT)
    assert why in finding.message and "torch.zeros" in finding.cure and "2 of 10 sampled steps" in finding.message
    sound = triage(build(tmp_path / "sound", overrides=[empty, Override(**product, slots=SOUND)]))
    assert [f for f in sound if f.severity > "info"] == []
    tiny = {**NOTHING, "max_abs_err": 1e-38}
    assert "F108" not in {f.code for f in triage(build(tmp_path / "tiny", overrides=[empty, Override(**product, slots=tiny)]))}


@pytest.mark.parametrize(
    ("largest", "name"),
    [(2.0**-25, "result-below-fp16"), (0.97 * 2.0**-25, "result-below-fp16"), (2.0**-24, "result-differs"),
     (2.0**-33, "result-differs"), (3.0, "result-differs")],
)  # fmt: skip
def test_a_result_that_fp16_rounds_to_its_smallest_spacing(tmp_path: Path, largest: float, name: str) -> None:
    slots = {"sqnr_db": 16.4, "max_abs_err": largest}
    (finding,) = triage(build(tmp_path / "run", overrides=[Override(**{**sick.OUTPUT, "reference": "exact"}, slots=slots)]))
    assert (finding.code, finding.name, finding.module) == ("F108", name, CULPRIT)
    assert (finding.severity == "warning") is (name == "result-below-fp16")
    if name == "result-below-fp16":
        assert "half of FP16's smallest spacing, 3e-08" in finding.message and finding.cure.startswith("multiply the loss")


@pytest.mark.parametrize(("largest", "is_beyond"), [(65536.0, True), (65000.0, False)])
def test_a_result_that_passes_the_largest_value_of_fp16(tmp_path: Path, largest: float, is_beyond: bool) -> None:
    site = {**sick.OUTPUT, "steps": (40, None)}
    overrides = [
        Override(module="blocks.*", tensor=None, reference="operand", actual=None, slots={"amax": 1e3}),
        Override(**{**site, "reference": "shadow"}, slots={"num_inf": 2, "amax": largest}),
        Override(**{**site, "reference": "exact"}, slots={"num_inf": 1, "amax": 6e4}),
    ]
    steps = {step: {"loss": float("nan")} for step in range(40, 100)}
    found = [f for f in triage(build(tmp_path / "run", overrides=overrides, steps=steps)) if f.name == "gemm-nonfinite"]
    assert [(f.code, f.module, f.gemm, f.tensor) for f in found] == [("F103", CULPRIT, "fprop", "output")]
    assert ("reaches 65536 there, beyond FP16's largest value, 65504" in found[0].message) is is_beyond
    assert found[0].cure.startswith("write this GEMM's result in BF16") is is_beyond


def test_what_rounding_leaves_of_a_bias_is_no_result_of_nothing(tmp_path: Path) -> None:
    output = Override(**{**sick.OUTPUT, "reference": "exact"}, slots=NOTHING)
    biased = {CULPRIT: {"bias": True}}
    assert "F108" not in {f.code for f in triage(build(tmp_path / "bias", overrides=[output], module_entries=biased))}
    assert "F108" in {f.code for f in triage(build(tmp_path / "run", overrides=[output]))}


def test_data_of_a_tensor_of_zeros_are_zeros(tmp_path: Path) -> None:
    zeros: dict[str, Any] = {**sick.DGRAD, "reference": "operand"}
    found = triage(build(tmp_path / "run", overrides=[Override(**zeros, slots=NOTHING)]))
    assert [(f.code, f.name, f.module, f.severity) for f in found] == [("F128", "data-of-nothing", CULPRIT, "warning")]
    assert [f for f in triage(build(tmp_path / "sound", overrides=[Override(**zeros, slots=SOUND)])) if f.severity > "info"] == []
