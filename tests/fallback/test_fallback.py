"""The policy: cheap cures before BF16, hard faults always, damage only where it is material; and its application."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback, apply, load_fallbacks, positional_prior, recommend
from fp8debug.fallback.measured import expected_sqnr_db, result_errors
from fp8debug.fallback.policy import RUNGS, best_within
from fp8debug.linear import convert
from fp8debug.recipes import Cast, list_recipes
from fp8debug.rules import triage
from fp8debug.rules.reading import prefilter
from fp8debug.store.read.run import Run
from fp8debug.types import OPERANDS, RESULTS, Gemm, parse_share
from tests.synthetic import MODULES, Override, Slots, build

NAMES = [name for name, _, _ in MODULES]
CULPRIT = "blocks.1.mlp.up"
ALL_FLOPS = 3 * sum(2 * k * n for _, k, n in MODULES)


def share(rate: float) -> Any:
    def count(row: Slots) -> int:
        return int(row["numel"] * rate)

    return count


def override(slots: dict[str, Any], gemm: str | None = "fprop", tensor: str | None = "input", **where: Any) -> Override:
    where = {"module": CULPRIT, "reference": "operand", "steps": (40, None), **where}
    return Override(gemm=gemm, tensor=tensor, slots=slots, **where)


def outputs(sqnr_db: float, damage: float, module: str) -> Override:
    slots = {"sqnr_db": sqnr_db, "damage": damage}
    return Override(module=module, tensor="output", reference="shadow", slots=slots)


def candidates(run: Run, budget: float = 0.10) -> list[Fallback]:
    return recommend(run, triage(run), budget)


CLIPPED = {"num_saturated": share(0.7), "headroom": 14.0, "sqnr_db": 3.0, "gain": 0.4}
FLOOR = {"cast_name": "e4m3fn 128x128 current pow2_floor", "num_saturated": share(0.003), "gain": 0.998}


@pytest.mark.parametrize("recipe", list_recipes())
def test_a_healthy_run_needs_nothing(tmp_path: Path, recipe: str) -> None:
    run = build(tmp_path / "run", recipe=recipe, num_steps=40, what_if=["mxfp8"])
    assert candidates(run, budget=1.0) == []


@pytest.mark.parametrize(
    ("slots", "tensor", "cured"),
    [
        ({"cast_name": "e4m3fn tensorwise delayed(16,max)", **CLIPPED}, "input", "e4m3fn tensorwise current"),
        ({"cast_name": "e4m3fn tensorwise static(0.5)", **CLIPPED}, "input", "e4m3fn tensorwise current"),
        (FLOOR, "weight", "e4m3fn 128x128 current pow2_ceil"),
        ({"cast_name": "e5m2 1x128 current", "sqnr_db": 25.5}, "input", "e4m3fn 1x128 current"),
    ],
)
def test_another_cast_costs_nothing(tmp_path: Path, slots: dict[str, Any], tensor: str, cured: str) -> None:
    (fallback,) = candidates(build(tmp_path / "run", overrides=[override(slots, tensor=tensor)]), budget=0.0)
    assert (fallback.module, fallback.tensor, str(fallback.cast), fallback.cost) == (CULPRIT, tensor, cured, 0.0)
    assert fallback.gemms == ("fprop",)
    assert fallback.damage is not None


def test_a_cast_changes_in_every_gemm_that_runs_it(tmp_path: Path) -> None:
    nan = override({"num_actual_nonfinite": 128, "num_zero_blocks": 1})
    (fallback,) = candidates(build(tmp_path / "run", overrides=[nan]))
    assert fallback.gemms == ("fprop", "wgrad"), "wgrad runs the same cast along the other axis"
    assert fallback.cast == Cast(granularity="1x128", amax_eps=1e-12)


def test_two_causes_at_one_operand_give_one_cast(tmp_path: Path) -> None:
    nan = override({"num_actual_nonfinite": 128, "num_zero_blocks": 1})
    low = override({**FLOOR, "cast_name": "e4m3fn 1x128 current pow2_floor"})
    (fallback,) = candidates(build(tmp_path / "run", overrides=[low, nan]))
    assert fallback.reasons == ("F103", "F104")
    assert fallback.cast == Cast(granularity="1x128", amax_eps=1e-12, scale_rounding="pow2_ceil")


def test_what_no_cast_cures_leaves_fp8_whatever_the_budget(tmp_path: Path) -> None:
    run = build(tmp_path / "run", overrides=[override({"gain": 2.0}, gemm=None, tensor="weight")])
    (fallback,) = candidates(run, budget=0.0)
    assert (fallback.gemms, fallback.tensor, fallback.cast) == (("fprop", "dgrad"), "*", None)
    assert fallback.cost == pytest.approx(2 * 2 * 256 * 1024 / ALL_FLOPS)
    assert fallback.cheaper == "recompute the scale from its data, or reload both as saved with the same flags"


@pytest.mark.parametrize("recipe", ["nvfp4", "mxfp6_e3m2"])
def test_a_gemm_below_fp8_climbs_one_rung(tmp_path: Path, recipe: str) -> None:
    lost = override({"gain": 2.0}, gemm=None, tensor="weight")
    (first,) = candidates(build(tmp_path / "run", recipe=recipe, overrides=[lost]), budget=0.0)
    assert (first.gemms, first.tensor, first.cast) == (("fprop", "dgrad"), "*", RUNGS[32])
    assert first.cost == pytest.approx(2 * 2 * 256 * 1024 / ALL_FLOPS / 3)
    (second,) = candidates(build(tmp_path / "again", recipe="mxfp8", overrides=[lost]), budget=0.0)
    assert second.cast is None, "and from there to BF16"


def test_it_climbs_to_tiles_where_the_run_has_them(tmp_path: Path) -> None:
    lost = override({"gain": 2.0}, gemm=None, tensor="weight")
    run = build(tmp_path / "run", recipe="nvfp4", recipes={NAMES[0]: "blockwise_pow2"}, overrides=[lost])
    assert [f.cast for f in candidates(run, budget=0.0)] == [RUNGS[128]]


def test_a_rung_is_applied_and_recorded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32)), "nvfp4")
    entry = Fallback(module="1", gemms=("fprop", "dgrad"), cast=RUNGS[32])
    fp8debug.apply(net, json.loads(EXPORTERS.get("json").export(build(tmp_path / "any"), [entry])))
    with fp8debug.watch(net, tmp_path / "run", every=1, shadow="full", what_if=()) as watch:
        loss = net(torch.randn(64, 64)).square().mean()
        loss.backward()
        watch.step(loss=loss)
    query = "SELECT gemm, tensor, cast_name, sqnr_db FROM sites WHERE module = '1' AND reference = 'operand'"
    found = {(r["gemm"], r["tensor"]): (r["cast_name"], r["sqnr_db"]) for r in Run(tmp_path / "run").sql(query).to_pylist()}
    for site, (name, sqnr) in found.items():
        assert name.startswith("e2m1fn") == (site[0] == "wgrad") and (sqnr > 29) == (site[0] != "wgrad"), (site, name)


def test_a_warning_has_to_fit_the_budget(tmp_path: Path) -> None:
    slots = {"num_underflow": share(0.03), "amax": 3e5, "sum_x2": 1e12, "sqnr_db": 40.0}
    run = build(tmp_path / "run", overrides=[override(slots)])
    assert [str(f.severity) for f in triage(run)] == ["warning"]
    assert [f.reasons for f in candidates(run, budget=0.10)] == [("F105",)]
    assert candidates(run, budget=0.01) == []


def test_damage_counts_only_outside_the_healthy_envelope(tmp_path: Path) -> None:
    envelope = [outputs(27.3, 1e6, NAMES[0])]
    assert candidates(build(tmp_path / "healthy", overrides=envelope), budget=1.0) == []
    sick = [outputs(18.0, 1e-3, NAMES[2]), outputs(18.0, 5e-3, NAMES[3]), outputs(18.0, 1e-12, NAMES[4])]
    run = build(tmp_path / "sick", overrides=sick)
    found = candidates(run, budget=1.0)
    assert [(f.module, f.gemms, f.reasons) for f in found] == [
        (NAMES[3], ("fprop",), ("damage",)),
        (NAMES[2], ("fprop",), ("damage",)),
    ], "by damage per cost, and the third does no material damage"
    one = found[0].cost
    assert [f.module for f in candidates(run, budget=1.5 * one)] == [NAMES[3]]


def results(gemm: str, sqnr_db: float, module: str = NAMES[2]) -> Override:
    return Override(module=module, gemm=gemm, reference="shadow", slots={"sqnr_db": sqnr_db})


@pytest.mark.parametrize("gemm", ["dgrad", "wgrad"])
def test_a_backward_gemm_outside_the_envelope_leaves_fp8_alone(tmp_path: Path, gemm: str) -> None:
    (fallback,) = candidates(build(tmp_path / "run", overrides=[results(gemm, 20.0)]), budget=1.0)
    assert (fallback.module, fallback.gemms, fallback.reasons) == (NAMES[2], (gemm,), ("error",))
    assert candidates(build(tmp_path / "healthy", overrides=[results(gemm, 26.0)]), budget=1.0) == []


def test_the_envelope_is_that_of_the_formats(tmp_path: Path) -> None:
    assert expected_sqnr_db("e4m3fn 1x128 current @ e4m3fn 128x128 current") == pytest.approx(28.66, abs=0.01)
    assert expected_sqnr_db("e5m2 tensorwise delayed(1024,max) @ bf16") == pytest.approx(25.58, abs=0.01)
    nvfp4 = "e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor"
    assert expected_sqnr_db(f"{nvfp4} @ {nvfp4}") == pytest.approx(17.4, abs=0.05)
    hybrid = [results("dgrad", 22.0)]
    assert candidates(build(tmp_path / "run", recipe="tensorwise_delayed", overrides=hybrid), budget=1.0) == []


def test_forward_errors_come_before_backward_errors(tmp_path: Path) -> None:
    run = build(tmp_path / "run", overrides=[results("wgrad", 5.0), results("dgrad", 20.0), outputs(18.0, 1e-6, NAMES[3])])
    assert [f.gemms for f in candidates(run, budget=1.0)] == [("fprop",), ("dgrad",), ("wgrad",)]


def test_fill_spends_the_budget_of_a_healthy_run_on_forward_gemms(tmp_path: Path) -> None:
    run = build(tmp_path / "run")
    assert recommend(run, triage(run), 0.2) == []
    filled = recommend(run, triage(run), 0.2, fill=True)
    assert filled and all((f.gemms, f.reasons, f.cast) == (("fprop",), ("damage",), None) for f in filled)
    assert sum(f.cost for f in filled) <= 0.2
    damages = [f.damage or 0.0 for f in filled]
    assert damages and len(recommend(run, [], 1.0, fill=True)) == len(NAMES)


def test_fill_counts_what_another_cast_leaves_of_an_error(tmp_path: Path) -> None:
    clipped = override({"cast_name": "e4m3fn tensorwise delayed(16,max)", **CLIPPED})
    worst = outputs(3.0, 1e-3, CULPRIT)
    run = build(tmp_path / "run", overrides=[clipped, worst])
    filled = recommend(run, triage(run), 1.0, fill=True)
    assert [f.module for f in filled if f.cast] == [CULPRIT], "the cast is cured first"
    of_bf16 = [f.module for f in filled if f.cast is None]
    assert set(of_bf16) == set(NAMES) and of_bf16[0] == CULPRIT
    slight = recommend(build(tmp_path / "slight", overrides=[clipped, outputs(3.0, 1e-5, CULPRIT)]), triage(run), 1.0, fill=True)
    assert next(f.module for f in slight if f.cast is None) != CULPRIT, "25 dB less of an error is a 350th of the damage"


def test_the_budget_goes_to_the_choice_of_most_worth() -> None:
    def entry(name: str, cost: float) -> Fallback:
        return Fallback(module=name, gemms=("fprop",), cost=cost)

    small, large, other = (2.0, entry("small", 0.01)), (9.0, entry("large", 0.10)), (6.0, entry("other", 0.05))
    group = [small, large, other]
    assert [f.module for f in best_within(group, 0.10)] == ["large"], "9 is more than 8, though small is worth most per cost"
    assert [f.module for f in best_within(group, 0.11)] == ["small", "large"]
    assert [f.module for f in best_within(group, 0.06)] == ["small", "other"]
    assert best_within(group, 0.0) == [] and best_within([], 0.5) == []
    assert [f.module for f in best_within([(0.0, entry("free", 0.0)), *group], 0.0)] == ["free"]
    for budget in (0.013, 0.05, 0.11, 0.155, 0.16):
        costs = {subset: sum(e.cost for _, e in subset) for n in range(4) for subset in combinations(group, n)}
        most = max(sum(w for w, _ in subset) for subset, cost in costs.items() if cost <= budget)
        worth = {e.module: w for w, e in group}
        assert sum(worth[f.module] for f in best_within(group, budget)) == most


def test_a_budget_may_be_text(tmp_path: Path) -> None:
    run = build(tmp_path / "run")
    assert recommend(run, [], "20%", fill=True) == recommend(run, [], 0.2, fill=True)
    with pytest.raises(UsageError, match=r"expected a share such as 10% or 0\.1, got 'ten'"):
        recommend(run, [], "ten")


def test_a_run_of_one_module_more_is_in_also(tmp_path: Path) -> None:
    run = build(tmp_path / "run", overrides=[override(FLOOR, module="*", tensor="weight")])
    assert [f.module for f in candidates(run)] == NAMES


@pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan")])
def test_a_budget_is_a_share(tmp_path: Path, budget: float) -> None:
    run = build(tmp_path / "run", num_steps=3)
    with pytest.raises(UsageError, match=r"expected a share such as 10% or 0\.1"):
        recommend(run, [], budget)


def test_shares_as_people_write_them() -> None:
    assert [parse_share(text) for text in ("10%", "0.1", " 5 % ", "0", "100%")] == [0.1, 0.1, 0.05, 0.0, 1.0]
    for text in ("20x", "", "120%", "-1", "nan", "10%%", True, None):
        with pytest.raises(UsageError, match=r"expected a share such as 10% or 0\.1"):
            parse_share(text)  # type: ignore[arg-type]  # what people pass


def test_the_json_round_trip(tmp_path: Path) -> None:
    run = build(tmp_path / "exp1", overrides=[override(FLOOR), override({"gain": 2.0}, gemm=None, tensor="weight")])
    fallbacks = candidates(run)
    text = EXPORTERS.get("json").export(run, fallbacks)
    document = json.loads(text)
    assert (document["schema"], document["run"]) == (1, "exp1")
    assert document["folklore"]["modules"] == [NAMES[0], NAMES[-1]] == positional_prior(run)
    assert document["folklore"]["about"].startswith("positional prior, not evidence")
    (tmp_path / "fallback.json").write_text(text)
    for source in (text, document, tmp_path / "fallback.json", str(tmp_path / "fallback.json")):
        assert load_fallbacks(source) == fallbacks


def test_what_is_no_fallback_list(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read fallbacks from"):
        load_fallbacks(tmp_path / "missing.json")
    with pytest.raises(UsageError, match=r"expected a fallback list: what recommend\(\) returns, or a JSON object"):
        load_fallbacks('{"runs": []}')
    with pytest.raises(UsageError, match=r"not an entry of a fallback list: \{'gemms': "):
        load_fallbacks('{"fallbacks": [{"gemms": ["fprop"]}]}')
    with pytest.raises(UsageError, match=r"a fallback needs gemms of fprop, dgrad, wgrad"):
        Fallback(module="m", gemms=("forward",))
    with pytest.raises(UnknownNameError, match="unknown exporter 'jsn': did you mean 'json'"):
        EXPORTERS.get("jsn")


def test_apply_gives_gemms_their_casts() -> None:
    layers: Any = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128), torch.nn.ReLU())
    model: Any = convert(layers, "blockwise", overrides={"1": "tensorwise_delayed"})
    current = Cast.parse("e4m3fn tensorwise current")
    fallbacks = [
        Fallback(module="0", gemms=("dgrad",)),
        Fallback(module="1", gemms=("fprop", "wgrad"), tensor="input", cast=current),
    ]
    applied: Any = apply(model, fallbacks)
    assert applied is model
    first, second = (applied[place].recipe.casts for place in (0, 1))
    assert [key for key, cast in first.items() if cast is None] == [("dgrad", "grad_output"), ("dgrad", "weight")]
    assert {key for key, cast in second.items() if cast == current} == {("fprop", "input"), ("wgrad", "input")}
    applied(torch.randn(4, 128)).sum().backward()
    apply(model, [Fallback(module="1", gemms=("fprop", "dgrad", "wgrad"))])
    assert (applied[0].fp8debug_request, applied[1].fp8debug_request) == ("fp8", "bf16"), "coverage misses nothing"


def test_apply_changes_nothing_when_an_entry_is_wrong() -> None:
    model: Any = convert(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), "blockwise", overrides={"1": None})
    before = model[0].recipe
    good = Fallback(module="0", gemms=("fprop",))
    with pytest.raises(NoMatchError, match="fallback module '00' matches nothing: did you mean '0'"):
        apply(model, [good, Fallback(module="00", gemms=("fprop",))])
    with pytest.raises(UsageError, match="1 is a Linear, not an Fp8Linear; convert"):
        apply(model, [good, Fallback(module="1", gemms=("fprop",))])
    assert model[0].recipe == before


@pytest.mark.parametrize("gemm", Gemm)
def test_what_operands_explain_of_an_error_that_is_low(gemm: Gemm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefilter, "BATCH", 300)  # several batches of steps, which are joined
    low = override({"sqnr_db": 12.0}, gemm.value, OPERANDS[gemm][0].value, module=NAMES[2])
    run = build(tmp_path / "run", overrides=[results(gemm.value, 10.0), low])
    found = result_errors(run)
    assert {key for key, error in found.items() if error.explained is not None} == {(NAMES[2], gemm.value)}
    (in_features, out_features), ratios = next((i, o) for name, i, o in MODULES if name == NAMES[2]), []
    query = "SELECT * FROM sites WHERE actual AND module = ? AND gemm = ? AND step = ? AND reference <> 'exact'"
    for step in run.sampled_steps:
        rows = {row["tensor"]: row for row in run.sql(query, [NAMES[2], gemm.value, step]).to_pylist()}
        a, b = (rows[tensor.value] for tensor in OPERANDS[gemm])
        result = rows[RESULTS[gemm].value]
        depth = {"fprop": in_features, "dgrad": out_features, "wgrad": a["numel"] / out_features}[gemm.value]
        # An operand at 12 dB counts with the error of its format; the healthy one with its own.
        noise = [
            min(row["sum_err2"] / row["sum_x2"], 10 ** (-Cast.parse(row["cast_name"]).gaussian.sqnr_db / 10)) for row in (a, b)
        ]
        energies = a["sum_x2"] / a["numel"] * b["sum_x2"] / b["numel"]
        ratios.append(result["sum_err2"] / result["numel"] / (depth * energies * sum(noise)))
    assert found[NAMES[2], gemm.value].explained == pytest.approx(median(ratios), rel=1e-12)
