"""Forecasts: told in time and with their uncertainty, and never of what is noise, levels off or lies far ahead."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.rules import RULES, Finding, Severity, triage
from fp8debug.rules.reading.forecasts import ForecastLimits, rising
from tests.rules.sick_runs import CULPRIT
from tests.synthetic import MODULES, Override, Slots, build

STATIC = "e4m3fn tensorwise static(0.01)"
LIMITS = ForecastLimits()


def noisy(slope: float, noise: float, num: int = 20, every: int = 10, seed: int = 0) -> tuple[list[int], list[float]]:
    chance = random.Random(seed)
    steps = [every * i for i in range(num)]
    return steps, [slope * step + noise * chance.gauss(0, 1) for step in steps]


def test_a_line_is_met_when_it_says() -> None:
    trend = rising(*noisy(0.01, 0.0), LIMITS)
    assert trend is not None
    assert trend.slope == pytest.approx(0.01)
    assert trend.level == pytest.approx(1.9)
    assert trend.reaches(2.4).steps == pytest.approx(50)


def test_wild_points_do_not_move_the_slope() -> None:
    steps, values = noisy(0.01, 0.02)
    values[4], values[11] = 30.0, -30.0
    trend = rising(steps, values, LIMITS)
    assert trend is not None and trend.slope == pytest.approx(0.01, rel=0.1)


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    trends = [rising(*noisy(0.01, 0.2, seed=seed), LIMITS) for seed in range(200)]
    found = [trend for trend in trends if trend is not None]
    held = sum(trend.low <= 0.01 <= trend.high for trend in found)
    assert len(found) > 150
    assert held / len(found) > 0.88


def test_noise_has_no_trend() -> None:
    assert sum(rising(*noisy(0.0, 1.0, seed=seed), LIMITS) is not None for seed in range(300)) <= 2


@pytest.mark.parametrize(
    "course",
    [lambda step: 1 - math.exp(-step / 20), lambda step: -0.01 * step, lambda step: 0.0, lambda step: min(step, 60) / 60],
    ids=["levels off", "falls", "stands still", "rose long ago"],
)
def test_what_is_no_steady_rise(course: Callable[[float], float]) -> None:
    steps = [10 * i for i in range(20)]
    assert rising(steps, [course(step) for step in steps], LIMITS) is None


def headroom(course: Callable[[int], float], cast_name: str) -> Override:
    slots = {"cast_name": cast_name, "headroom": lambda row: course(row["step"])}
    return Override(module=CULPRIT, gemm="fprop", tensor="input", slots=slots)


def judged(path: Path, *overrides: Override, **plan: Any) -> list[Finding]:
    run = build(path / "run", **{"num_steps": 200, "modules": MODULES[-3:], "with_results": False, **plan}, overrides=overrides)
    return [finding for code in ("F101", "F105") for finding in RULES.get(code).check(run)]


def test_a_static_scale_that_its_tensor_outgrows(tmp_path: Path) -> None:
    findings = judged(tmp_path, headroom(lambda step: 0.25 * 2 ** (step / 100), STATIC))
    assert [(f.code, f.name, f.module, f.severity) for f in findings] == [
        ("F101", "stale-scale-saturation-forecast", CULPRIT, Severity.INFO)
    ]
    assert findings[0].message == (
        "the fprop input grows towards the end of its scale: headroom 0.27 at step 10, 0.93 at step 190, rising by 0.01"
        " binades a step (0.01 to 0.01); it clips in about 42 steps (95 % interval 42 to 42), near step 233"
    )
    assert findings[0].steps == (10, 190)


def test_what_makes_a_trend_can_be_set(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=200, modules=MODULES[-3:], with_results=False,
                overrides=[headroom(lambda step: 0.25 * 2 ** (step / 100), STATIC)])  # fmt: skip
    for limits, num in (({}, 1), ({"min_points": 30}, 0), ({"trend_warmup": 150}, 0), ({"max_points": 4}, 0), ({"min_z": 99}, 0)):
        assert len(triage(run, select="F101", thresholds={"F101": limits})) == num, limits


@pytest.mark.parametrize(
    ("course", "cast_name"),
    [
        (lambda step: 0.25 * 2 ** (step / 1000), STATIC),
        (lambda step: 0.9 - 0.4 * math.exp(-step / 30), STATIC),
        (lambda step: 0.5 + 0.4 * step / 200, "e4m3fn tensorwise delayed(16,max)"),
    ],
    ids=["far ahead", "levels off", "delayed scales settle at 1"],
)
def test_no_false_alarm_of_headroom(tmp_path: Path, course: Callable[[int], float], cast_name: str) -> None:
    assert list(judged(tmp_path, headroom(course, cast_name))) == []


def test_a_delayed_scale_that_falls_behind_ever_more(tmp_path: Path) -> None:
    findings = judged(tmp_path, headroom(lambda step: 1.02 + 0.001 * step, "e4m3fn tensorwise delayed(16,max)"))
    assert [(f.name, f.module) for f in findings] == [("stale-scale-saturation-forecast", CULPRIT)]


def runaway(binades: float) -> Override:
    """The input of the last layer: nearly all elements near 2^0, one that grows by so many binades a step."""

    def amax(row: Slots) -> float:
        return float(2.0 ** (4 + binades * row["step"]))

    def histogram(row: Slots) -> list[int]:
        bins = [0] * NUM_BINS
        for binade in range(-8, 1):
            bins[binade - FIRST_LOG2] = row["numel"] // 9
        bins[min(math.floor(math.log2(amax(row))), 18) - FIRST_LOG2] += 4
        return bins

    slots = {"amax": amax, "log2_hist": histogram, "scale_inv_max": lambda row: amax(row) / 448}
    return Override(module="blocks.1.mlp.down", gemm="fprop", tensor="input", slots=slots)


GATED = (
    ("blocks.1.mlp.gate", 256, 1024),
    ("blocks.1.mlp.up", 256, 1024),
    ("blocks.1.mlp.down", 1024, 256),
)


def test_an_outlier_that_will_flush_its_neighbours(tmp_path: Path) -> None:
    same = Override(module="blocks.1.mlp.[gu]*", gemm="fprop", tensor="input", slots={"amax": lambda row: 5 + row["step"] % 3})
    findings = judged(tmp_path, same, runaway(0.03), modules=GATED, with_results=True, recipe="tensorwise_current")
    assert [(f.code, f.name, f.module) for f in findings] == [("F105", "outlier-underflow-forecast", "blocks.1.mlp.down")]
    told = findings[0].message
    assert "1 % of the nonzero elements underflow in about 40 steps (95 % interval 40 to 40), near step 2" in told
    assert "; it is the product of blocks.1.mlp.gate and blocks.1.mlp.up, whose largest outputs meet by " in told


@pytest.mark.parametrize("binades", [0.0, 0.004])
def test_no_false_alarm_of_outliers(tmp_path: Path, binades: float) -> None:
    assert list(judged(tmp_path, runaway(binades), recipe="tensorwise_current")) == []


def test_a_forecast_can_be_switched_off_and_asks_for_nothing(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=200, overrides=[headroom(lambda step: 0.25 * 2 ** (step / 100), STATIC)])
    assert list(triage(run, select=["F101"], thresholds={"F101": {"horizon": 0}})) == []
    findings = triage(run, select=["F101"])
    assert not findings.reaches(Severity.WARNING)
    assert findings.classification is not None and findings.classification["cause"] == "findings"
