"""The table in memory answers as the views do: heatmaps of every choice, lines of a module, and its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8debug import Run
from fp8debug_dashboard.data import history as history_data
from fp8debug_dashboard.data import metric_cache, queries, step_ranges
from fp8debug_dashboard.data import ranks as rank_data
from fp8debug_dashboard.data.metric_cache import MetricCache
from fp8debug_dashboard.data.records import StepSeries
from fp8debug_dashboard.pages import heatmap, module
from fp8debug_dashboard.web import run_view
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples

CHOICES = [
    ("sqnr_db", "operands", "running"),
    ("sqnr_db", "results", "running"),
    ("sqnr_db", "exact", "running"),
    ("gain", "operands", "what-if"),
    ("underflow_rate", "wgrad.grad_output", "running"),
    ("overflow_rate", "fprop.input", "e4m3fn tensorwise current"),
    ("headroom", "operands", "running"),
    ("sqnr_db", "fprop.output", "running"),
    ("cosine", "operands", "no such cast"),
]


@pytest.fixture(scope="module", params=["one rank", "four ranks"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, MetricCache]:
    path = tmp_path_factory.mktemp("narrow") / "it's"
    if request.param == "one rank":
        samples.write_sick(path, num_steps=120, every=10)
    else:
        samples.write_ranks(path, num_steps=80)
    found = metric_cache.build(path)
    assert found is not None
    return Run(path), found


@pytest.mark.parametrize(("metric", "site", "cast"), CHOICES)
@pytest.mark.parametrize("cells", [400, 5])
def test_a_heatmap_is_the_same(
    both: tuple[Run, MetricCache], metric: str, site: str, cast: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, table = both
    monkeypatch.setattr(queries, "MAX_CELLS", cells)
    slow, fast = queries.heat(run, metric, site, cast), queries.heat(run, metric, site, cast, cache=table)
    assert fast.modules == slow.modules and fast.steps_per_cell == slow.steps_per_cell
    np.testing.assert_array_equal(fast.steps, slow.steps)
    np.testing.assert_allclose(fast.values, slow.values, rtol=1e-6)
    np.testing.assert_array_equal(fast.kinds, slow.kinds)


@pytest.mark.parametrize("points", [600, 4])
def test_the_lines_of_a_module_are_the_same(both: tuple[Run, MetricCache], points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, table = both
    monkeypatch.setattr(queries, "MAX_POINTS", points)
    names = ("sqnr_db", "scale_inv_mean_log2", "headroom")
    module = str(run.modules[3]["fqn"])
    slow, fast = queries.several_traces(run, module, names), queries.several_traces(run, module, names, table)
    assert sum(len(lines) for lines in slow.values()) > 9
    for name in names:
        assert [_label(trace) for trace in fast[name]] == [_label(trace) for trace in slow[name]]
        for one, other in zip(fast[name], slow[name], strict=True):
            np.testing.assert_array_equal(one.steps, other.steps)
            np.testing.assert_allclose(one.values, other.values, rtol=1e-5)
            assert (one.low is None) == (other.low is None) == (points == 600)


def _label(trace: StepSeries) -> tuple[object, ...]:
    return trace.name, trace.gemm, trace.tensor, trace.cast_name, trace.reference, trace.actual


def test_steps_of_a_module_and_of_none(both: tuple[Run, MetricCache]) -> None:
    run, table = both
    module = str(run.modules[3]["fqn"])
    assert queries.sampled_steps(run, module, table) == queries.sampled_steps(run, module) != []
    assert queries.sampled_steps(run, "nowhere", table) == []
    assert queries.several_traces(run, "nowhere", ["sqnr_db"], table) == {"sqnr_db": []}


def test_a_metric_that_is_not_kept_is_read_from_the_files(both: tuple[Run, MetricCache]) -> None:
    run, table = both
    assert "mse" not in table.metrics
    assert np.isfinite(queries.heat(run, "mse", cache=table).values).any()


def test_a_run_that_is_too_large_is_left_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=20)
    monkeypatch.setattr(metric_cache, "MAX_BYTES", 500)
    assert metric_cache.build(tmp_path / "run") is None


def test_cells_of_many_steps_have_one_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=120, every=4)
    monkeypatch.setattr(queries, "MAX_CELLS", 10)
    run = Run(tmp_path / "run")
    heat = queries.heat(run, "sqnr_db")
    assert heat.steps_per_cell == 12 and set(np.diff(heat.steps).tolist()) == {12}
    assert step_ranges.width_of(run, "raw_steps", 0, 119, 50) == 3


@pytest.mark.parametrize("ranks", [1, 4])
def test_of_a_huge_run_some_steps_are_read(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if ranks == 1:
        samples.write_sick(tmp_path / "run", num_steps=120, every=5)
    else:
        samples.write_ranks(tmp_path / "run", num_steps=120)
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 7)
    monkeypatch.setattr(step_ranges, "MOST_ROWS", 1000)
    run = Run(tmp_path / "run")
    whole, some = queries.heat(run, "sqnr_db"), queries.heat(run, "sqnr_db", is_thin=True)
    steps = run.sampled_steps
    apart = -(-len(steps) // 7)
    assert (whole.steps_apart, some.steps_apart) == (1, apart) and apart > 1
    assert some.steps.tolist() == steps[(len(steps) - 1) % apart :: apart] and some.steps[-1] == steps[-1]
    assert some.modules == whole.modules
    np.testing.assert_array_equal(some.values, whole.values[:, np.isin(whole.steps, some.steps)])
    near = queries.heat(run, "sqnr_db", steps=(20, 45), is_thin=True)  # of a part there are few enough to read them all
    assert near.steps_apart == 1 and near.steps.tolist() == [step for step in steps if 20 <= step <= 45]
    name = str(run.modules[3]["fqn"])
    lines, points = (queries.several_traces(run, name, ["gain"], is_thin=thin)["gain"] for thin in (False, True))
    assert [_label(line) for line in lines] == [_label(line) for line in points]
    for line, point in zip(lines, points, strict=True):
        chosen = np.isin(line.steps, some.steps)
        np.testing.assert_array_equal(point.steps, line.steps[chosen])
        np.testing.assert_array_equal(point.values, line.values[chosen])
    exponents = history_data.module_history(run, name, is_thin=True).of(("fprop", "input"))
    assert exponents is not None and exponents.steps.tolist() == some.steps.tolist()
    assert queries.sampled_steps(run, name, is_thin=True) == steps
    by_rank = rank_data.by_rank(run, name, ("fprop", "input"), "amax", is_thin=True)
    assert by_rank.modules == tuple(f"rank {rank}" for rank in range(ranks)) and by_rank.steps.tolist() == some.steps.tolist()
    band = rank_data.spread_over_steps(run, name, ("fprop", "input"), "amax", 0, is_thin=True)
    assert band.median.steps.tolist() == some.steps.tolist()
    assert {row["step"] for row in rank_data.disagreement(run, "amax", is_thin=True)} <= set(some.steps.tolist())


def test_a_run_is_huge_until_its_table_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_sick(tmp_path / "run", num_steps=120, every=5)
    source = ServedFolder(tmp_path / "run")
    found = source.open(None)
    assert not found.is_thin("sqnr_db")
    monkeypatch.setattr(run_view, "HUGE_BYTES", 1000)
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 5)
    monkeypatch.setattr(step_ranges, "MOST_READ", 7)
    assert found.is_thin("sqnr_db")
    words = "one of 4 sampled steps was read"
    view = View("heatmap", None, {})
    assert words in str(heatmap.parts(view, found)[0])
    assert words in str(module.parts(View("module", None, {}), found)[1])
    found.metric_cache = metric_cache.build(found.run.path)
    assert words not in str(module.parts(View("module", None, {}), found)[1])
    assert not found.is_thin("sqnr_db") and found.is_thin("mse")
    assert words not in str(heatmap.parts(view, found)[0])
    assert words in str(heatmap.parts(View("heatmap", None, {"metric": "mse"}), found)[0])


def test_very_many_steps_are_not_all_listed() -> None:
    steps = list(range(0, 100_000, 10))
    values = [int(choice["value"]) for choice in module.step_choices(steps, 50_000, 33_330)[2:]]
    assert len(values) < 1.2 * module.MAX_CHOICES and values == sorted(values)
    assert {0, 99_990, *range(33_300, 33_400, 10)} <= set(values)
    assert len(module.step_choices(steps[:900], None, None)) == 901
    assert module.step_choices([], None, None) == [{"value": "", "label": "none"}]


def test_the_health_of_a_large_run_is_drawn_from_few_steps_then_from_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_sick(tmp_path / "run", num_steps=160, every=5)
    monkeypatch.setattr(run_view, "SMALL_BYTES", 1000)
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 4)
    monkeypatch.setattr(step_ranges, "MOST_ROWS", 16 * 65536)
    source, view = ServedFolder(tmp_path / "run"), View("heatmap", None, {})
    found = source.open(None)
    assert "one of 8 sampled steps was read" in str(heatmap.parts(view, found)[0])
    with monkeypatch.context() as loading:
        loading.setattr(run_view.RunView, "is_loading_cache", True)
        assert heatmap.READING in str(heatmap.parts(view, found)[0])
        whole = str(heatmap.parts(View("heatmap", None, {"metric": "amax"}), found)[0])
        assert "being read" not in whole, "all steps are drawn already"
    found.heat()  # as the first page asks for it in the background
    assert "one of 2 sampled steps was read" in str(heatmap.parts(view, found)[0])
    source.load_cache(found)
    assert heatmap.is_pending(view, found)
    heatmap.settle(view, found)
    assert not heatmap.is_pending(view, found) and "sampled steps was read" not in str(heatmap.parts(view, found)[0])


def test_sites_of_the_steps_that_are_read_name_the_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(samples.write_sick(tmp_path / "run", num_steps=160, every=5))
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 4)
    monkeypatch.setattr(step_ranges, "MOST_ROWS", 16 * 65536)
    whole, few = queries.health(run), queries.health(run, is_thin=True, part=4)
    assert few.steps_apart == 8 and few.sites == whole.sites
    assert few.reasons is not None and whole.reasons is not None
    np.testing.assert_array_equal(few.reasons, whole.reasons[:, np.isin(whole.steps, few.steps)])
