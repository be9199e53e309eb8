"""Modules by severity: which are listed, in which order, and the line of the metric that is worst."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest

from fp8debug import Run
from fp8debug_dashboard.data import queries
from fp8debug_dashboard.data.health import Reason
from fp8debug_dashboard.data.nonfinite import NAN
from fp8debug_dashboard.data.records import StepSeries
from fp8debug_dashboard.data.worst_modules import LISTED, WorstModule, with_series, worst_modules
from fp8debug_dashboard.figures.base import STATE_COLORS
from fp8debug_dashboard.figures.sparkline import WIDTH, ends_in_words, sparkline
from fp8debug_dashboard.pages import overview
from fp8debug_dashboard.web.run_view import Judgement
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.synthetic import Override

UP, DOWN = "blocks.0.mlp.up", "blocks.0.mlp.down"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one block: one module far from healthy, one a little, and three events, two of them of one step."""
    found = tmp_path_factory.mktemp("worst") / "run"
    overrides = [
        Override(module=UP, gemm="dgrad", tensor="grad_output", slots={"sqnr_db": 12.0}, steps=(20, None)),
        Override(module=DOWN, gemm="fprop", tensor="input", slots={"sqnr_db": 29.5}, steps=(10, 11)),
    ]
    events = [
        (20, "recipe", UP, "the cast changed"),
        (20, "note", None, "a note"),
        (0, "skipped", "lm_head", "an override left it in BF16"),
        (10, "tokens", UP, "[1, 2]"),
    ]
    samples.write_healthy(found, num_steps=40, every=10, modules=samples.gpt_modules(1), overrides=overrides, events=events)
    return found


def test_modules_beyond_a_warn_threshold_are_listed_worst_first_and_those_of_findings_before(path: Path) -> None:
    heat = queries.health(Run(path))
    found, total = worst_modules(heat)
    assert [(one.module, one.since, str(one.reason)) for one in found] == [
        (UP, 20, "sqnr_db at dgrad.grad_output"),
        (DOWN, 10, "sqnr_db at fprop.input"),
    ]
    assert total == 2 and found[0].severity > 2 > found[1].severity >= LISTED
    named, total = worst_modules(heat, ["blocks.0.attn.qkv", "nowhere", DOWN])
    assert [one.module for one in named] == ["blocks.0.attn.qkv", DOWN, UP] and total == 3
    assert named[0].since is None and named[0].severity == 0
    assert [len(worst_modules(heat, count=1)[0]), worst_modules(heat, count=1)[1]] == [1, 2]


def test_the_line_is_that_of_the_worst_metric_at_its_site(path: Path) -> None:
    run = Run(path)
    found = with_series(run, worst_modules(queries.health(run))[0], "running")
    lines = {one.module: one.series for one in found}
    up, down = lines[UP], lines[DOWN]
    assert up is not None and up.steps.tolist() == [0, 10, 20, 30]
    assert up.values[2:].tolist() == pytest.approx([12, 12], abs=1e-3) and up.values[0] > 25
    assert down is not None and down.values[1] == pytest.approx(29.5, abs=1e-3)
    assert with_series(run, [WorstModule(module=UP, severity=float("nan"))], "running")[0].series is None


def line(values: list[float], states: list[int]) -> StepSeries:
    steps = np.arange(len(values), dtype=np.int32) * 10
    return StepSeries(
        name="sqnr_db at fprop.input", steps=steps, values=np.array(values, np.float32), states=np.array(states, np.int8)
    )


def test_a_sparkline_is_an_image_with_a_gap_and_a_band_where_values_are_nan() -> None:
    series = line([31, 30, float("nan"), 31], [0, 0, NAN, 0])
    root = ElementTree.fromstring(unquote(sparkline(series, since=20).partition(",")[2]))
    rect, whole, late = list(root)
    assert rect.get("fill") == STATE_COLORS[NAN] and 0 < float(rect.get("x", "")) < WIDTH
    assert whole.get("d", "").count("M") == 2 and late.get("d", "").count("M") == 1
    points = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", whole.get("d", ""))]
    assert points[0] == points[2] < points[1], "a larger value is drawn higher"
    assert sparkline(None) == "" and ends_in_words(series.steps, series.values) == "31 at step 0, 31 at step 30"
    assert ends_in_words(series.steps[2:3], series.values[2:3]) == "no finite value"


def test_the_timeline_has_findings_events_and_the_loss_in_order_of_steps(path: Path) -> None:
    run = Run(path)
    events, num = queries.events(run)
    assert [(e["step"], e["kind"]) for e in events] == [(0, "skipped"), (20, "note"), (20, "recipe")] and num == 3
    few, num = queries.events(run, 2)
    assert (len(few), num) == (2, 3)
    run_view = ServedFolder(path).open(None)
    run_view.judge()
    parts = overview.parts(View("overview"), run_view)
    shown = str(parts[-1])
    assert shown.index("an override left it in BF16") < shown.index("the cast changed")
    assert [trace["name"] for trace in parts[4].data].count("events") == 1


def test_most_rules_skipped_is_a_doubt_beside_healthy() -> None:
    from fp8debug.rules import RULES
    from fp8debug.rules.engine.findings import Findings

    skipped = [(rule.code, "no column") for rule in list(RULES)[: len(RULES) - 3]]
    weak = Judgement(known=Findings([], skipped=skipped))
    assert weak.verdict == "ok" and overview.few_rules(weak) == f"{len(skipped)} of {len(RULES)} rules skipped: no data for them"
    assert f"3 of {len(RULES)} rules ran, {len(skipped)} skipped; none found a fault" in overview.sentence(weak)
    assert overview.few_rules(Judgement(known=Findings([], skipped=skipped[:4]))) == overview.few_rules(Judgement()) == ""


def test_a_reason_says_whether_it_is_of_the_accumulation() -> None:
    assert str(Reason("sqnr_db", "fprop", "output", "exact")) == "sqnr_db at fprop.output, accumulation"
