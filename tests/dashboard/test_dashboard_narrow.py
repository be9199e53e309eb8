"""The table in memory answers as the views do: heatmaps of every choice, lines of a module, and its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fp8debug import Run
from fp8debug_dashboard import data, narrow, spans
from fp8debug_dashboard.narrow import Narrow
from fp8debug_dashboard.records import Trace
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
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Narrow]:
    path = tmp_path_factory.mktemp("narrow") / "it's"
    if request.param == "one rank":
        samples.write_sick(path, num_steps=120, every=10)
    else:
        samples.write_ranks(path, num_steps=80)
    found = narrow.build(path)
    assert found is not None
    return Run(path), found


@pytest.mark.parametrize(("metric", "site", "cast"), CHOICES)
@pytest.mark.parametrize("cells", [400, 5])
def test_a_heatmap_is_the_same(
    both: tuple[Run, Narrow], metric: str, site: str, cast: str, cells: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, table = both
    monkeypatch.setattr(data, "MAX_CELLS", cells)
    slow, fast = data.heat(run, metric, site, cast), data.heat(run, metric, site, cast, narrow=table)
    assert fast.modules == slow.modules and fast.steps_per_cell == slow.steps_per_cell
    np.testing.assert_array_equal(fast.steps, slow.steps)
    np.testing.assert_allclose(fast.values, slow.values, rtol=1e-6)
    np.testing.assert_array_equal(fast.kinds, slow.kinds)


@pytest.mark.parametrize("points", [600, 4])
def test_the_lines_of_a_module_are_the_same(both: tuple[Run, Narrow], points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run, table = both
    monkeypatch.setattr(data, "MAX_POINTS", points)
    names = ("sqnr_db", "scale_inv_mean_log2", "headroom")
    module = str(run.modules[3]["fqn"])
    slow, fast = data.several_traces(run, module, names), data.several_traces(run, module, names, table)
    assert sum(len(lines) for lines in slow.values()) > 9
    for name in names:
        assert [_label(trace) for trace in fast[name]] == [_label(trace) for trace in slow[name]]
        for one, other in zip(fast[name], slow[name], strict=True):
            np.testing.assert_array_equal(one.steps, other.steps)
            np.testing.assert_allclose(one.values, other.values, rtol=1e-5)
            assert (one.low is None) == (other.low is None) == (points == 600)


def _label(trace: Trace) -> tuple[object, ...]:
    return trace.name, trace.gemm, trace.tensor, trace.cast_name, trace.reference, trace.actual


def test_steps_of_a_module_and_of_none(both: tuple[Run, Narrow]) -> None:
    run, table = both
    module = str(run.modules[3]["fqn"])
    assert data.sampled_steps(run, module, table) == data.sampled_steps(run, module) != []
    assert data.sampled_steps(run, "nowhere", table) == []
    assert data.several_traces(run, "nowhere", ["sqnr_db"], table) == {"sqnr_db": []}


def test_a_metric_that_is_not_kept_is_read_from_the_files(both: tuple[Run, Narrow]) -> None:
    run, table = both
    assert "mse" not in table.metrics
    assert np.isfinite(data.heat(run, "mse", narrow=table).values).any()


def test_a_run_that_is_too_large_is_left_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=20)
    monkeypatch.setattr(narrow, "MAX_BYTES", 500)
    assert narrow.build(tmp_path / "run") is None


def test_cells_of_many_steps_have_one_width(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=120, every=4)
    monkeypatch.setattr(data, "MAX_CELLS", 10)
    run = Run(tmp_path / "run")
    heat = data.heat(run, "sqnr_db")
    assert heat.steps_per_cell == 12 and set(np.diff(heat.steps).tolist()) == {12}
    assert spans.width_of(run, "raw_steps", 0, 119, 50) == 3
