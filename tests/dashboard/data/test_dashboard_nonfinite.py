"""NaN and Inf on the dashboard: a gap with a mark, a colour of its own, "NaN" in a table; never 0, never "not recorded"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8debug import Run
from fp8debug.reports.svg import Chart
from fp8debug_dashboard.data import history as history_data
from fp8debug_dashboard.data import metric_cache, nonfinite, queries
from fp8debug_dashboard.data import ranks as rank_data
from fp8debug_dashboard.data.nonfinite import FINITE, INF, MADE, MISSING, NAN
from fp8debug_dashboard.data.records import Heat, StepSeries
from fp8debug_dashboard.data.worst_modules import worst_modules
from fp8debug_dashboard.figures import base as figures
from fp8debug_dashboard.figures import compare as compare_figures
from fp8debug_dashboard.figures import evidence as evidence_figures
from fp8debug_dashboard.figures import fallback as fallback_figures
from fp8debug_dashboard.figures import history as history_figures
from fp8debug_dashboard.figures import module as module_figures
from fp8debug_dashboard.figures.fallback import BudgetPoint
from fp8debug_dashboard.pages import compare, fallback, findings, module, overview, runs
from fp8debug_dashboard.web.run_view import PENDING, Judgement, RunView
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from fp8debug_dashboard.widgets import number, percent
from tests.dashboard import samples
from tests.synthetic import Override

AFTER = samples.NAN_STEP + 10


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write_nan(tmp_path_factory.mktemp("runs") / "nan")


@pytest.fixture(scope="module")
def run(path: Path) -> Run:
    return Run(path)


def words(figure: Any) -> list[str]:
    """Return what is written into a figure."""
    return [note["text"] for note in figure.layout.get("annotations", ())]


def text(part: Any) -> str:
    """Return a part of a page as text."""
    if isinstance(part, (list, tuple)):
        return "".join(map(text, part))
    children = getattr(part, "children", part)
    return (
        ""
        if children is None
        else text(children)
        if isinstance(children, (list, tuple)) or hasattr(children, "children")
        else str(children)
    )


def test_a_heatmap_tells_nan_from_what_was_not_recorded(run: Run) -> None:
    heat = queries.heat(run, "amax", "operands")
    at = heat.modules.index(samples.NAN_MODULE)
    assert heat.states is not None
    column = int(np.flatnonzero(heat.steps == samples.NAN_STEP)[0])
    assert heat.states[at, column - 1 :].tolist() == [FINITE] + [NAN] * (len(heat.steps) - column)
    assert np.isfinite(heat.values[at, column]) and np.isnan(heat.values[at, column + 1 :]).all(), "an amax of 0 is false"
    assert (heat.states[0] == FINITE).all()
    figure = figures.heatmap(heat)
    legend = {trace["name"]: trace["marker"]["color"] for trace in figure.data if trace.get("showlegend")}
    assert list(legend) == ["NaN"] and figure.layout["showlegend"]
    cells = next(trace for trace in figure.data if trace["type"] == "heatmap" and trace.get("name") == "NaN")
    assert np.nansum(cells["z"]) == (heat.states == NAN).sum() and cells["colorscale"][0][1] == legend["NaN"]


def test_every_state_has_its_own_colour_and_stands_in_the_legend() -> None:
    states = np.array([[FINITE, INF, MADE, NAN, MISSING]], np.int8)
    values = np.array([[31, np.nan, np.nan, np.nan, np.nan]], np.float32)
    heat = Heat(
        metric="sqnr_db",
        unit="dB",
        modules=("a",),
        steps=np.arange(5, dtype=np.int32),
        values=values,
        kinds=np.zeros((1, 5), np.int32),
        states=states,
    )
    figure = figures.heatmap(heat)
    legend = {trace["name"]: trace["marker"]["color"] for trace in figure.data if trace.get("showlegend")}
    assert set(legend) == {"NaN", "Inf", "NaN or Inf made here", "not recorded"} and len(set(legend.values())) == 4


@pytest.mark.parametrize("metric", ["sqnr_db", "gain", "amax", "headroom", "underflow_rate"])
@pytest.mark.parametrize("cells", [400, 4])
def test_the_table_in_memory_knows_the_same_states(run: Run, metric: str, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_CELLS", cells)
    monkeypatch.setattr(queries, "MAX_POINTS", cells)
    table = metric_cache.build(run.path)
    assert table is not None and metric in table.metrics
    slow, fast = queries.heat(run, metric), queries.heat(run, metric, cache=table)
    for name in ("steps", "states", "kinds"):
        np.testing.assert_array_equal(getattr(fast, name), getattr(slow, name))
    np.testing.assert_allclose(fast.values, slow.values, rtol=1e-6)
    one, other = (queries.several_traces(run, samples.NAN_MODULE, [metric], source)[metric] for source in (None, table))
    assert len(one) == len(other) > 0
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a.steps, b.steps)
        np.testing.assert_allclose(a.values, b.values, rtol=1e-5)
        assert (a.states is None) == (b.states is None)
        if a.states is not None:
            np.testing.assert_array_equal(a.states, b.states)
    assert table.steps(samples.NAN_MODULE) == queries.sampled_steps(run, samples.NAN_MODULE)


def test_a_run_without_nan_pays_for_no_states(tmp_path: Path) -> None:
    found = samples.write_healthy(tmp_path / "run", num_steps=20)
    table = metric_cache.build(found)
    assert not nonfinite.has_nonfinite(Run(found)) and table is not None and table.states is None


def test_a_line_has_a_gap_that_is_marked(run: Run) -> None:
    lines = queries.several_traces(run, samples.NAN_MODULE, ["amax"])["amax"]
    trace = next(t for t in lines if (t.gemm, t.tensor, t.actual) == ("fprop", "input", True))
    assert trace.steps[-1] == 110 and not (trace.values == 0).any() and np.isnan(trace.values[trace.steps >= AFTER]).all()
    figure = module_figures.sites(lines, "amax", ("fprop", "input"), AFTER)
    assert words(figure).count(f"NaN from step {AFTER}") >= 6 and words(figure).count(f"NaN from step {samples.NAN_STEP}") == 2
    assert len([shape for shape in figure.layout["shapes"] if shape["type"] == "rect"]) == 9


def test_a_run_that_is_nan_from_the_start_is_not_called_unrecorded(tmp_path: Path) -> None:
    lost = [Override(actual=None, slots=samples.LOST)]
    run = Run(samples.write_healthy(tmp_path / "run", num_steps=30, modules=samples.gpt_modules(1), overrides=lost))
    figure = figures.heatmap(queries.heat(run, "sqnr_db"))
    assert "not recorded" not in json.dumps(words(figure)) and figure.layout["showlegend"]
    name = "blocks.0.mlp.up"
    lines = queries.several_traces(run, name, ["sqnr_db", "headroom"])
    assert "NaN from step 0" in words(module_figures.sites(lines["sqnr_db"], "sqnr_db", ("fprop", "input")))
    assert "NaN from step 0" in words(module_figures.scales(lines["headroom"], lines["headroom"]))
    state = queries.lost_at(queries.rows_at(run, name, 0, []), ("fprop", "input"))
    assert words(module_figures.histogram(None, state)) == [
        "No element is finite at this step (NaN): there is no exponent to show"
    ]
    assert "no finite" in json.dumps(words(history_figures.exponents(None, 0, state))).replace("No element is", "no")


@pytest.mark.parametrize(("values", "says"), [((2, np.nan, np.nan), "NaN from step 10"), ((2, np.nan, 3), "NaN at step 10")])
def test_words_about_a_gap(values: tuple[float, ...], says: str) -> None:
    states = nonfinite.states_of(values)
    steps = np.array([0, 10, 20], np.int32)
    assert [nonfinite.in_words(*span) for span in nonfinite.spans_of(steps, states)] == [says]
    chart = Chart(title="amax", steps=[0, 10, 20], values=values)
    assert says in words(evidence_figures.evidence([chart], (0, 20)))
    assert says in chart.to_svg() and "class='lost'" in chart.to_svg()


def test_a_chart_without_a_finite_value_says_why() -> None:
    assert "Inf from step 0" in Chart(title="loss", steps=[0, 1], values=[float("inf")] * 2).to_svg()
    assert "not recorded" in Chart(title="loss", steps=[0, 1], values=[None, None]).to_svg()


def test_exponents_over_steps_end_where_no_element_is_finite(run: Run) -> None:
    found = history_data.module_history(run, samples.NAN_MODULE).of(("fprop", "input"))
    assert found is not None and found.lost == ((AFTER, None, NAN),)
    figure = history_figures.exponents(found)
    assert f"no finite element: NaN from step {AFTER}" in words(figure)
    last = run.sampled_steps[-1]
    assert figure.data[0]["x"][-1] == last > AFTER, "the axis goes on to the last step, so that the stretch is in the plot"
    assert np.isnan(figure.data[0]["z"][:, -2:]).all() and not np.isnan(figure.data[0]["z"][:, -3]).all()


def test_the_worst_modules_are_those_that_are_nan(path: Path) -> None:
    run_view = ServedFolder(path).open(None)
    found, total = worst_modules(run_view.heat())
    assert [(one.module, one.state, one.since) for one in found] == [
        (samples.NAN_MODULE, NAN, samples.NAN_STEP),
        ("blocks.1.mlp.down", NAN, AFTER),
    ]
    shown = overview.parts(View("overview"), run_view)[3]
    assert total == 2 and f"NaN from step {samples.NAN_STEP}" in text(shown) and "data:image/svg" in str(shown)


def test_the_choice_of_steps_names_the_one_that_is_shown_also_when_the_findings_come_late(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_view, view = ServedFolder(path).open(None), View("module", None, {"module": samples.NAN_MODULE})
    judged = [run_view.judge(), PENDING]
    monkeypatch.setattr(RunView, "judged", lambda self: judged[-1])
    for step in (110, samples.NAN_STEP):
        *_, choices = parts = module.parts(view, run_view)
        assert choices[0]["label"] == f"{step} (auto)" and f"at step {step}" in text(parts[3])
        judged.pop()


def test_the_table_of_casts_prints_nan_and_not_zero(path: Path) -> None:
    run_view = ServedFolder(path).open(None)
    chosen = {"module": samples.NAN_MODULE, "step": str(AFTER), "site": "fprop.input"}
    shown = module.parts(View("module", None, chosen), run_view)[3]
    body = shown.children[1].children[0].children.children
    head = [getattr(cell.children, "title", cell.children) for cell in body[0].children.children]
    row = dict(zip(head, (text(cell) for cell in body[1].children[0].children), strict=True))
    assert row["amax"].endswith("NaN") and row["sqnr_db"].endswith("NaN") and row["underflow_rate"].endswith("NaN")
    assert row["num_nan"] == f"{1024 * 384:,}"
    partly = module.parts(View("module", None, {"module": samples.NAN_MODULE, "step": "60", "site": "fprop.weight"}), run_view)[3]
    assert "NaN, number" in text(partly)


def test_a_lost_loss_is_nan_in_the_list_and_on_the_page(path: Path) -> None:
    source = ServedFolder(path.parent)
    (row,) = runs.parts(source, 60)
    assert row["loss"] == "NaN"
    assert "last lossNaN" in text(overview.parts(View("overview", "nan"), source.open("nan"))[0])
    assert (number(float("inf")), number(float("-inf")), percent(float("nan"))) == ("Inf", "-Inf", "NaN")


def test_a_module_that_nobody_looked_at_is_not_healthy(path: Path, tmp_path: Path) -> None:
    run_view = ServedFolder(path).open(None)
    run_view.judge()
    first = str(run_view.run.modules[0]["fqn"])
    said = text(module._silent(run_view, first, run_view.judge()))
    assert "No finding names this module" in said and "rules ran on this run" in said
    assert f"{len(run_view.judge().findings.skipped)} rules skipped: no data for them" in said
    said = text(module._silent(run_view, samples.NAN_MODULE, run_view.judge()))
    assert said.startswith("?Not known to be healthy: its tensors hold NaN or Inf from step 60")
    short = samples.write_healthy(tmp_path / "run", num_steps=40, modules=samples.gpt_modules(1), module_entries={"gone": {}})
    other = ServedFolder(short).open(None)
    assert "nothing was recorded for it" in text(module._silent(other, "gone", other.judge()))


def test_a_band_of_ranks_and_their_map_show_the_rank_that_is_nan(tmp_path: Path) -> None:
    lost = Override(module="blocks.0.mlp.up", gemm="fprop", tensor="input", slots=samples.LOST, steps=(20, None), ranks=(1,))
    run = Run(samples.write_healthy(tmp_path / "r", num_steps=40, modules=samples.gpt_modules(1), world_size=2, overrides=[lost]))
    heat = rank_data.by_rank(run, "blocks.0.mlp.up", ("fprop", "input"), "amax")
    assert heat.states is not None and heat.states.tolist() == [[0, 0, 0, 0], [0, 0, NAN, NAN]]
    found = rank_data.spread_over_steps(run, "blocks.0.mlp.up", ("fprop", "input"), "amax", 1)
    assert found.outlier.states is not None and found.outlier.states.tolist() == [0, 0, NAN, NAN]
    assert np.isnan(found.outlier.values[2:]).all() and np.isfinite(found.median.values).all()


def test_the_gap_of_a_run_that_is_nan_is_no_gap_of_zero() -> None:
    steps = np.arange(3, dtype=np.int32)
    good = StepSeries(name="loss", steps=steps, values=np.array([3, 2, 1], np.float32))
    bad = StepSeries(name="loss", steps=steps, values=np.array([3, 2, np.nan], np.float32), states=np.array([0, 0, NAN], np.int8))
    figure = compare_figures.losses([("bad", bad), ("good", good)])
    assert "bad: NaN from step 2" in words(figure) and "no gap: NaN from step 2" in words(figure)


def test_a_cure_whose_effect_is_not_known_is_not_drawn_at_zero() -> None:
    known = [BudgetPoint(budget=0.1 * i, cost=0.1 * i, recovered=0.2 * i, count=i) for i in range(4)]
    figure = fallback_figures.pareto(known, BudgetPoint(budget=0.1, cost=0.0, recovered=None, count=1))
    assert "verify measures it" in json.dumps(words(figure)) and len(figure.data) == 1
    figure = fallback_figures.pareto(known, known[2])
    assert figure.data[1]["y"].tolist() == pytest.approx([40])


def test_the_damage_of_another_cast_is_not_zero(path: Path) -> None:
    run_view = RunView(Run(samples.write_sick(path.parent.parent / "sick", num_steps=300, every=20)), "")
    assert fallback.damage(run_view.fallbacks(0.1)) is None and run_view.fallbacks(0.1)
    assert fallback.damage([]) == 0


def test_a_run_that_is_being_written_keeps_its_verdict(path: Path) -> None:
    run = Run(path)
    first = RunView(run, "")
    assert first.latest().verdict == "unknown"
    later = RunView(run, "", size=1 << 40, verdicts=first.verdicts)
    first.is_superseded = False
    found = first.judge()
    assert found.verdict != "unknown"
    assert later.judged().is_pending and later.judged().verdict == found.verdict, "what was judged last counts for the next state"
    first.is_superseded = True
    assert first.judge() is found
    empty = Judgement(known=type(found.findings)(), is_pending=True)
    assert empty.verdict == "ok" and "none found a fault. The run has grown" in overview.sentence(empty)


def test_a_run_that_is_nan_diverges_from_a_good_one_in_words_and_in_the_plot(path: Path) -> None:
    folder = path.parent.parent / "compared"
    samples.write_nan(folder / "bad")
    for name in ("good", "better"):
        samples.write_healthy(folder / name, every=10)
    run_view = ServedFolder(folder).open("bad")
    view = View("compare", "bad", {"with": "good/better"})
    assert compare.is_pending(view, run_view)
    compare.settle(view, run_view)
    assert not compare.is_pending(view, run_view)
    about, figure, _, rows, site = compare.parts(view, run_view)
    said = text(about)
    assert "good -> bad, median of steps 100 to 119: 2.232 -> NaN" in said
    assert "good -> better, median of steps" in said and "good -> better, none of 90 sites diverges" in said
    assert said.count(f"from step {samples.NAN_STEP} on") == 1 and said.count("within the noise") == 1
    assert said.count(f"the loss of bad is NaN or Inf at step {samples.NAN_STEP}") == 1
    origin = f"the first NaN or Inf of bad: {samples.NAN_MODULE} fprop weight at step {samples.NAN_STEP}"
    assert said.count(origin) == 1
    assert f"bad: NaN from step {samples.NAN_STEP}" in words(figure)
    dashed = [shape["x0"] for shape in figure.layout["shapes"] if shape["line"].get("dash") == "dash"]
    assert set(dashed) == {samples.NAN_STEP}
    assert (rows[0]["module"], rows[0]["site"], rows[0]["at"]) == (samples.NAN_MODULE, "fprop weight", samples.NAN_STEP)
    assert {row["run"] for row in rows} == {"bad"}
    assert any(trace["name"].startswith(f"bad: {samples.NAN_MODULE} fprop weight") for trace in site.data)


def test_a_comparison_with_a_nan_is_never_ok(path: Path) -> None:
    folder = path.parent.parent / "both"
    for name in ("one", "other"):
        samples.write_nan(folder / name)
    run_view = ServedFolder(folder).open("one")
    view = View("compare", "one", {"with": "other"})
    compare.settle(view, run_view)
    about, _, _, rows, site = compare.parts(view, run_view)
    levels = [line.children[0].className for line in about]
    assert levels == ["badge badge-error"] * 2 and "nothing diverges" not in text(about) and rows == []
    assert any(trace["name"].startswith(f"one: {samples.NAN_MODULE} fprop weight") for trace in site.data)


def test_the_first_nan_of_a_long_run_is_dated_by_its_step_and_not_by_its_points() -> None:
    steps = np.arange(0, 80, 8, dtype=np.int32)
    states = np.where(steps >= 40, NAN, FINITE).astype(np.int8)
    bad = StepSeries(name="loss", steps=steps, values=np.where(steps >= 40, np.nan, 2).astype(np.float32), states=states)
    good = StepSeries(name="loss", steps=steps, values=np.ones(10, np.float32))
    figure = compare_figures.losses([("bad", bad), ("good", good)], [43], {"bad": 43})
    assert {"bad: NaN from step 43", "no gap: NaN from step 43"} <= set(words(figure))


def test_the_fallback_page_tells_whose_damage_is_not_known(path: Path, tmp_path: Path) -> None:
    run_view = ServedFolder(path).open(None)
    run_view.judge()
    told = text(fallback.parts(View("fallback"), run_view)[2])
    assert "The curve lacks the damage of outputs with NaN or Inf, which is not known: at 5 sampled steps, the first 70." in told
    healthy = ServedFolder(samples.write_healthy(tmp_path / "run", num_steps=40, modules=samples.gpt_modules(1))).open(None)
    healthy.judge()
    assert fallback.lost_damage(healthy) is None
    assert "NaN" not in text(fallback.parts(View("fallback"), healthy)[2])


def test_a_page_without_findings_says_why(tmp_path: Path) -> None:
    run_view = ServedFolder(samples.write_healthy(tmp_path / "run", num_steps=40, modules=samples.gpt_modules(1))).open(None)
    run_view.judge()
    about, _, head, _, manual = findings.parts(View("findings"), run_view)
    assert "rules ran" in text(about) and "none found a fault." in text(about) and "no evidence to show" in text(head)
    assert text(manual).startswith("Rules skipped, and why:")
    failed = Judgement(failure="no memory")
    assert findings._no_evidence(failed) == "Triage could not run, so there is no evidence to show."
    assert "No verdict yet" in text(findings._silent(failed))
