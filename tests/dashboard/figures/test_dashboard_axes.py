"""Figures over tokens or time, with logarithmic axes, smoothed; and where the places of steps come from."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pytest

from fp8debug import Run
from fp8debug_dashboard.data.records import Heat, StepSeries
from fp8debug_dashboard.data.step_scales import StepScale, step_scale
from fp8debug_dashboard.figures import axes
from fp8debug_dashboard.figures.base import empty, heatmap, line
from fp8debug_dashboard.figures.plot import Figure
from fp8debug_dashboard.pages.axes import controls, shaped
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.synthetic import Plan, write

SCALE = StepScale(name="tokens", title="tokens", steps=np.array([0, 10, 20], np.int32), at=np.array([100.0, 1100.0, 3100.0]))


def figure(values: list[float] | None = None) -> Figure:
    found = Figure()
    given = np.array(values or [1, 2, 4], np.float32)
    steps = np.arange(0, 10 * len(given), 10, dtype=np.int32)
    line(found, StepSeries(name="loss", steps=steps, values=given), "#000000")
    found.rule("#000000", x=15)
    found.rule("#000000", y=2)
    found.note("here", xref="x", x=15, y=1)
    found.axis("x", range=[0, 20])
    found.over_steps()
    return found.set(200)


def test_everything_of_a_figure_moves_to_the_other_scale() -> None:
    found = axes.rescaled(figure(), SCALE)
    trace = found.data[0]
    assert trace["x"].tolist() == [100, 1100, 3100] and trace["text"] == [0, 10, 20]
    assert trace["hovertemplate"].startswith("%{y:.5g} · step %{text} · %{x:.4~g} tokens")
    upright, across = found.layout["shapes"]
    assert (upright["x0"], upright["x1"]) == (2100, 2100) and (across["x0"], across["x1"]) == (0, 1)
    assert found.layout["annotations"][0]["x"] == 2100
    assert found.layout["xaxis"]["range"] == [100, 3100] and found.layout["xaxis"]["title"]["text"] == "tokens"
    assert found.layout["meta"] == {"x": "tokens", "steps": [0, 10, 20], "at": [100, 1100, 3100]}


def test_a_trace_of_another_run_moves_by_that_runs_scale() -> None:
    found = figure()
    found.data[0]["legendgroup"] = "other"
    other = StepScale(name="tokens", title="tokens", steps=np.array([0, 20], np.int32), at=np.array([0.0, 2.0]))
    assert axes.rescaled(found, SCALE, {"other": other}).data[0]["x"].tolist() == [0, 1, 2]


def test_an_axis_is_logarithmic_where_all_is_above_zero() -> None:
    assert axes.logarithmic(figure()).layout["yaxis"]["type"] == "log"
    assert "type" not in axes.logarithmic(figure([1, 0, 2])).layout.get("yaxis", {})


def test_smoothing_keeps_gaps_and_the_line_itself() -> None:
    nan = np.nan
    assert axes.moving_mean(np.array([1, 2, 3, nan, 5], np.float32), 3).tolist()[:3] == [1.5, 2, 2.5]
    smooth = axes.moving_mean(np.array([1, 2, 3, nan, 5], np.float32), 3)
    assert np.isnan(smooth[3]) and smooth[4] == 5
    assert axes.moving_mean(np.ones(2, np.float32), 50).tolist() == [1, 1]
    found = axes.smoothed(figure([1, 2, 9]), 3)
    faint, mean = found.data
    assert faint["y"].tolist() == [1, 2, 9] and faint["opacity"] == 0.25 and mean["y"].tolist() == [1.5, 4, 5.5]
    assert mean["meta"] == "loss, mean of 3 points"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 40 steps, of 100 tokens each on each of two ranks."""
    path = tmp_path_factory.mktemp("scaled") / "run"
    steps = {step: {"loss": 2.0, "tokens": 100} for step in range(40)}
    write(path, Plan(num_steps=40, every=10, modules=samples.gpt_modules(1)[:1], steps=steps, world_size=2))
    return Run(path)


def test_tokens_are_summed_over_ranks_and_steps(run: Run) -> None:
    found = step_scale(run, "tokens")
    assert found is not None and found.at[[0, 1, -1]].tolist() == [200, 400, 8000]
    assert found(np.array([1, 3])).tolist() == [400, 800]
    assert step_scale(run, "step") is None


def test_wall_time_runs_from_the_first_row(run: Run) -> None:
    found = step_scale(run, "time")
    times = run.sql("SELECT step, min(time) AS t FROM steps GROUP BY step ORDER BY step").column("t").to_pylist()
    assert found is not None and isinstance(times[0], datetime)
    unit = {"seconds": timedelta(seconds=1), "minutes": timedelta(minutes=1)}[found.title.removeprefix("wall time, ")]
    assert found.at[-1] == pytest.approx((times[-1] - times[0]) / unit) and found.at[0] == 0


def test_a_page_shapes_what_is_over_steps_only(run: Run) -> None:
    run_view = RunView(run, "")
    view = View("overview", None, {"x": "tokens", "y": "log", "smooth": "5"})
    assert shaped(empty("nothing"), view, run_view).layout.get("meta") is None
    found = shaped(figure(), view, run_view)
    assert found.layout["meta"]["x"] == "tokens" and found.layout["yaxis"]["type"] == "log" and len(found.data) == 2
    unknown = View("overview", None, {"x": "furlongs", "smooth": "7", "y": "cube"})
    assert shaped(figure(), unknown, run_view).layout["meta"] == {"x": "step"}
    assert "tokens" in str(controls(unknown, run_view))


def test_what_was_not_recorded_is_no_choice(tmp_path: Path) -> None:
    path = tmp_path / "run"
    steps = {step: {"loss": 2.0, "tokens": None} for step in range(20)}
    write(path, Plan(num_steps=20, every=10, modules=samples.gpt_modules(1)[:1], steps=steps))
    run_view = RunView(Run(path), "")
    assert step_scale(run_view.run, "tokens") is None
    assert "tokens" not in str(controls(View("overview"), run_view))


def test_ticks_of_few_cells_are_their_steps_in_every_scale() -> None:
    steps = np.array([0, 10, 20], np.int32)
    values = np.zeros((2, 3), np.float32)
    heat = Heat(metric="sqnr_db", unit="dB", modules=("a", "b"), steps=steps, values=values, kinds=np.zeros((2, 3), np.int32))
    assert heatmap(heat).layout["xaxis"]["tickvals"] == [0, 10, 20]
    assert axes.rescaled(heatmap(heat), SCALE).layout["xaxis"]["tickvals"] == [100, 1100, 3100]
