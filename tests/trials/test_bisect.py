"""``bisect`` on real trainings in this process: faults that no statistic shows, budgets, resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.fallback import load_fallbacks
from fp8debug.run.arms import Arm
from fp8debug.store.write.writer import RunWriter
from fp8debug.trials import bisect_run
from fp8debug.trials.bisect import SearchPlan
from fp8debug.trials.hints import hints
from fp8debug.trials.script import Ending
from tests.trials.laboratory import Chain, Laboratory, backwards, healthy, planted


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def bisect(laboratory: Laboratory, **options: Any) -> dict[str, Any]:
    trials = laboratory.trials()
    options = {"repeats": 1, "run_name": "run", "save_as": laboratory.folder / "bisect.json", **options}
    try:
        return bisect_run(trials, **options)
    finally:
        trials.close()


def test_a_fault_that_no_statistic_shows_is_found(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, backwards("layers.3"))
    run = laboratory.record()
    assert fp8debug.triage(run) == []
    suspects, damage = hints(run)
    assert suspects == [] and set(damage) == {f"layers.{i}" for i in range(6)}
    plans: list[SearchPlan] = []
    found = bisect(laboratory, suspects=suspects, damage=damage, confirm=plans.append)
    assert found["units"] == [{"module": "layers.3", "gemm": "wgrad"}] and found["verdict"] == "found"
    assert found["share"]["value"] == pytest.approx(1, abs=0.2)
    assert found["runs"] == len(laboratory.trained) <= 16 and plans[0].num_modules == 6
    assert found["statements"][-1] == "the gap closes with layers.3 wgrad in BF16"
    assert found["fallbacks"][0]["cost"] == pytest.approx(64 * 64 / (3 * (5 * 64 * 64 + 64 * 16)))
    assert json.loads((tmp_path / "bisect.json").read_text()) == found
    model = Chain()
    fp8debug.convert(model, "blockwise")
    fp8debug.apply(model, tmp_path / "bisect.json")
    assert model.layers[3].recipe.casts["wgrad", "input"] is None  # type: ignore[union-attr,index]  # an Fp8Linear
    assert load_fallbacks(found)[0].reasons == ("bisect",)


def test_two_culprits_are_found(tmp_path: Path) -> None:
    def both(model: Chain) -> None:
        planted("zero_tile", "layers.1")(model)
        planted("zero_tile", "layers.4")(model)

    laboratory = Laboratory(tmp_path, both, steps=3)
    found = bisect(laboratory)
    assert found["units"] == [{"module": f"layers.{i}", "gemm": "fprop"} for i in (1, 4)]
    assert found["share"] is None and "the gap is infinite" in found["statements"][0]


def test_what_triage_suspects_is_tried_first(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, planted("zero_tile", "layers.4"), steps=3)
    found = bisect(laboratory, suspects=["layers.4"])
    assert found["tests"][0]["modules"] == ["layers.4"]
    assert found["units"] == [{"module": "layers.4", "gemm": "fprop"}] and found["runs"] == 4


def test_wrong_suspects_cost_one_test(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, planted("zero_tile", "layers.4"), steps=3)
    assert bisect(laboratory, suspects=["layers.0"])["units"] == [{"module": "layers.4", "gemm": "fprop"}]


def test_without_a_gap_there_is_nothing_to_search(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, healthy, steps=6)
    found = bisect(laboratory, repeats=2)
    assert found["verdict"] == "nothing_to_close" and found["units"] == [] and found["tests"] == []
    assert laboratory.trained == [("bf16", 0), ("fp8", 0), ("bf16", 1), ("fp8", 1)]


def test_a_spent_budget_leaves_the_best_so_far_and_a_larger_one_goes_on(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, planted("zero_tile", "layers.0"), steps=3)
    found = bisect(laboratory, max_runs=3)
    assert found["verdict"] == "not_minimal" and found["runs"] == 3
    assert {unit["module"] for unit in found["units"]} == {"layers.0", "layers.1", "layers.2"}
    assert "stopped after 3 trainings" in found["statements"][1]
    assert bisect(laboratory)["units"] == [{"module": "layers.0", "gemm": "fprop"}]
    assert len(set(laboratory.trained)) == len(laboratory.trained), "something was trained twice"


def test_an_answer_no_stops_before_the_search(tmp_path: Path) -> None:
    def no(plan: SearchPlan) -> None:
        raise KeyboardInterrupt

    laboratory = Laboratory(tmp_path, planted("zero_tile", "layers.0"), steps=3)
    with pytest.raises(KeyboardInterrupt):
        bisect(laboratory, confirm=no)
    assert laboratory.trained == [("bf16", 0), ("fp8", 0)]


@pytest.mark.parametrize(("closed", "repeats"), [(0.5, 1), (1.0, 2)])
def test_near_the_threshold_another_seed_is_asked(closed: float, repeats: int, tmp_path: Path) -> None:
    """The culprit in BF16 closes about the whole gap: far above a half, and on either side of the whole."""
    laboratory = Laboratory(tmp_path, backwards("layers.3"), steps=16)
    found = bisect(laboratory, repeats=2, closed=closed, suspects=["layers.3"], max_runs=6)
    assert found["tests"][0]["modules"] == ["layers.3"] and found["tests"][0]["repeats"] == repeats


def test_a_bf16_that_diverges_with_another_seed_ends_the_search(tmp_path: Path) -> None:
    def fake(arm: Arm, repeat: int, out: Path) -> Ending:
        writer = RunWriter(out, manifest={"modules": [{"fqn": name, "fp8": True} for name in ("a", "b")]})
        sick = arm.name == "fp8" or (arm.name == "bf16" and repeat == 1)
        for step in range(8):
            writer.steps({"step": step, "sampled": False, "loss": float("nan") if sick else 2.0})
        writer.close()
        (out / "arm.json").write_text("{}")
        return Ending(0, 0.1, False, "")

    trials = Laboratory(tmp_path, steps=8).trials()
    trials._train = fake
    found = bisect_run(trials, repeats=2, run_name="run", save_as=tmp_path / "bisect.json")
    assert found["verdict"] == "bf16_diverged" and found["units"] == [] and found["fallbacks"] == []
    assert found["statements"] == ["BF16 itself diverges in 1 of 2 repeats: not FP8's doing"]
    trials.close()


def test_arguments_out_of_range(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="repeats must be at least 1 and max_runs at least 2, got 1 and 1"):
        bisect(Laboratory(tmp_path), max_runs=1)
