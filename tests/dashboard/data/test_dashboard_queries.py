"""What the dashboard reads from runs: values against numpy, reduction, coverage, URLs, sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8debug import Run, recommend
from fp8debug.errors import RunError, UnknownNameError
from fp8debug.recipes import get_recipe
from fp8debug_dashboard.data import history as history_data
from fp8debug_dashboard.data import queries
from fp8debug_dashboard.data import ranks as rank_data
from fp8debug_dashboard.data.coverage import coverage, in_words
from fp8debug_dashboard.data.healthy_ranges import (
    CLIPS_LITTLE,
    DELAYED,
    E5M2,
    EXACT,
    FLOOR,
    FORMAT,
    NO_CAUSE,
    ROUNDED_SCALE,
    SHADOW,
    STOCHASTIC,
    WGRAD_GRAD_OUTPUT,
    envelope,
    kind_of,
    severities,
)
from fp8debug_dashboard.data.nonfinite import FINITE, NAN
from fp8debug_dashboard.data.trial_files import read_trial
from fp8debug_dashboard.pages import fallback
from fp8debug_dashboard.pages import ranks as ranks_page
from fp8debug_dashboard.web import urls
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import recipe_name
from tests.dashboard import samples
from tests.synthetic import Override, build

SITE = ("fprop", "input")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run(folder / "sick")


def test_heat_is_the_worst_of_all_operands_in_execution_order(run: Run) -> None:
    heat = queries.heat(run, "sqnr_db")
    assert heat.modules == tuple(name for name, _, _ in samples.gpt_modules())
    row = heat.modules.index(samples.SICK)
    assert heat.values[row, -1] < 10 and heat.values.dtype == np.float32 and heat.steps.tolist() == list(range(0, 400, 10))
    # The healthy modules' worst is E5M2's grad_output relative to its format, not in plain dB.
    colors = severities("sqnr_db", heat.values, heat.kinds)
    assert colors is not None and colors[0].max() == 0 and colors[row, -1] > 2


def test_heat_of_one_site_and_cast_equals_the_table(run: Run) -> None:
    heat = queries.heat(run, "gain", "fprop.input", "e4m3fn tensorwise current")
    table = run.table(["module", "step", "gain", "cast_name"], module=samples.SICK, gemm="fprop", tensor="input").to_pylist()
    wanted = [row["gain"] for row in table if row["cast_name"] == "e4m3fn tensorwise current"]
    assert heat.values[heat.modules.index(samples.SICK)].tolist() == pytest.approx(wanted)


def test_heat_reduces_in_sql_to_the_worst_of_each_cell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "MAX_CELLS", 10)
    heat = queries.heat(run, "overflow_rate", "fprop.input")
    assert heat.steps_per_cell == 40 and heat.values.shape == (30, 10)
    full = run.table(["step", "overflow_rate", "actual"], module=samples.SICK, gemm="fprop", tensor="input", actual=True)
    last = max(row["overflow_rate"] for row in full.to_pylist() if row["step"] >= 360)
    assert heat.values[heat.modules.index(samples.SICK), -1] == pytest.approx(last)


def test_heat_of_a_range_is_finer(run: Run) -> None:
    assert queries.heat(run, "sqnr_db", steps=(100, 150)).steps.tolist() == [100, 110, 120, 130, 140, 150]
    assert queries.heat(run, "sqnr_db", steps=(5000, 6000)).modules == ()


@pytest.mark.parametrize("name", ["sqnr", "sqnr_db; DROP TABLE raw", "module", ""])
def test_only_columns_of_the_schema_enter_a_query(run: Run, name: str) -> None:
    with pytest.raises(UnknownNameError):
        queries.heat(run, name)
    with pytest.raises(UnknownNameError):
        queries.module_traces(run, samples.SICK, name)


def test_training_leaves_out_what_was_not_recorded_or_never_moves(folder: Path) -> None:
    assert [t.name for t in queries.training(Run(folder / "sick"))] == ["loss", "grad_norm", "loss_scale", "lr"]
    assert [t.name for t in queries.training(Run(folder / "healthy"))] == ["loss", "grad_norm", "lr"]
    assert queries.training(Run(folder / "no-loss")) == [] and queries.last_loss(Run(folder / "no-loss")) is None


def test_training_is_reduced_with_a_band(run: Run) -> None:
    loss = queries.training(run, most=50)[0]
    assert len(loss.values) == 50 and loss.low is not None and loss.high is not None
    assert (loss.low <= loss.values).all() and (loss.values <= loss.high).all()


def test_module_traces_have_one_line_per_site_cast_and_reference(run: Run) -> None:
    traces = queries.module_traces(run, samples.SICK, "sqnr_db")
    assert len({(t.gemm, t.tensor) for t in traces}) == 9
    assert {t.reference for t in traces if t.tensor == "output"} == {"shadow", "exact"}
    at_site = queries.module_traces(run, samples.SICK, "sqnr_db", SITE)
    assert [t.actual for t in at_site] == [True, False, False]
    assert queries.module_traces(run, "no.such", "sqnr_db") == []


def test_casts_side_by_side_start_with_the_running_one(run: Run) -> None:
    rows = queries.side_by_side(queries.rows_at(run, samples.SICK, 390, ["sqnr_db", "headroom"]), SITE)
    assert [row["actual"] for row in rows] == [True, False, False]
    assert rows[0]["headroom"] > 1 and rows[0]["kind"] == DELAYED and rows[1]["kind"] == 0


def test_histogram_has_the_range_of_the_chosen_cast(run: Run) -> None:
    rows = queries.rows_at(run, samples.SICK, 390, [])
    hist = queries.histogram(rows, SITE)
    other = queries.histogram(rows, SITE, "e4m3fn tensorwise current")
    assert hist is not None and hist.cast is not None and other is not None and other.cast is not None
    assert hist.cast.actual and hist.cast.format == "e4m3fn"
    assert other.cast.scale_inv_log2[1] - hist.cast.scale_inv_log2[1] == pytest.approx(3.3, abs=0.3)
    assert queries.histogram(rows, ("fprop", "output")) is None
    assert queries.histogram(queries.rows_at(run, samples.SICK, 391, []), SITE) is None


def test_a_run_without_fp8_shows_its_what_ifs(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20, recipe="bf16", what_if=("blockwise", "tensorwise_delayed"))
    assert queries.default_cast(run) == "what-if"
    heat = queries.heat(run, "sqnr_db", cast="what-if")
    assert len(heat.modules) == 6 and np.isfinite(heat.values).all()
    assert len(queries.health(run, cast="what-if").modules) == 6 and queries.casts(run)[0][1] is False


def test_ranks_are_merged(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20, world_size=2)
    assert queries.heat(run, "underflow_rate").values.shape == (6, 2)
    assert len(queries.module_traces(run, "blocks.0.mlp.up", "sqnr_db", ("fprop", "input"))) == 1
    assert queries.health(run).values.shape == (6, 2) and queries.training(run)[0].steps.tolist() == list(range(20))
    hist = queries.histogram(queries.rows_at(run, "blocks.0.mlp.up", 10, []), ("fprop", "input"))
    assert hist is not None and hist.counts.sum() > 500_000


def test_a_column_that_nobody_recorded_is_not_offered(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=20, overrides=[Override(slots={"headroom": None}, actual=None)])
    assert "headroom" not in queries.recorded(run) and "sqnr_db" in queries.recorded(run)
    assert np.isnan(queries.heat(run, "headroom").values).all()


@pytest.mark.parametrize(
    ("gemm", "tensor", "cast", "reference", "kind"),
    [
        ("fprop", "input", "e4m3fn 1x128 current", "operand", 0),
        ("wgrad", "grad_output", "e5m2 tensorwise delayed(16,max)", "operand", E5M2 | DELAYED | WGRAD_GRAD_OUTPUT),
        ("fprop", "output", "e4m3fn 1x128 current @ e4m3fn 128x128 current", "shadow", SHADOW),
        ("dgrad", "grad_input", "e5m2 tensorwise current @ bf16", "exact", EXACT | E5M2),
        ("fprop", "input", "e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor", "operand", FORMAT | ROUNDED_SCALE),
        ("dgrad", "grad_output", "e2m1fn 1x32 current pow2_ceil scale=e8m0 stochastic", "operand", FORMAT | STOCHASTIC),
        ("fprop", "output", "e3m2fn 1x32 current @ e2m1fn 1x32 current", "shadow", SHADOW | FORMAT),
        ("wgrad", "input", "e5m2fnuz tensorwise current", "operand", E5M2),
    ],
)
def test_kind_is_the_same_in_sql_and_python(gemm: str, tensor: str, cast: str, reference: str, kind: int) -> None:
    import duckdb

    from fp8debug_dashboard.data.healthy_ranges import KIND_SQL

    query = f"SELECT {KIND_SQL} FROM (SELECT ? AS gemm, ? AS tensor, ? AS cast_name, ? AS reference)"
    row = duckdb.connect().execute(query, [gemm, tensor, cast, reference]).fetchone()
    assert kind_of(gemm, tensor, cast, reference) == kind and row == (kind,)


@pytest.mark.parametrize(
    ("metric", "kind", "value", "severity"),
    [
        # NUMERICS.md, section 4: the borders of ok, warn and act, and what is healthy for E5M2 and for results.
        ("sqnr_db", 0, 31.0, 0),
        ("sqnr_db", 0, 33.0, 0),
        ("sqnr_db", 0, 30.0, 1),
        ("sqnr_db", 0, 24.509, 2),
        ("sqnr_db", 0, 55.6, -2),
        ("sqnr_db", E5M2, 25.5, 0),
        ("sqnr_db", SHADOW, 27.3, 0),
        ("sqnr_db", SHADOW, 20.0, 1.25),
        ("sqnr_db", SHADOW | E5M2, 24.6, 0),
        # Clean runs in FP4 and FP6: 20.4 dB in 1x16, 19.1 in 16x16, 3 dB less rounded at random, results 15 to 17 dB.
        ("sqnr_db", FORMAT | ROUNDED_SCALE, 20.4, 0),
        ("sqnr_db", FORMAT | ROUNDED_SCALE, 19.1, 0),
        ("sqnr_db", FORMAT | ROUNDED_SCALE | STOCHASTIC, 17.2, 0),
        ("sqnr_db", FORMAT | SHADOW, 16.0, 0),
        ("sqnr_db", FORMAT, 55.0, -2),
        ("cosine", FORMAT, 0.9927, 0),
        ("underflow_rate", FORMAT, 0.38, 0),
        ("overflow_rate", FORMAT | ROUNDED_SCALE, 0.053, 0),
        ("headroom", FORMAT | ROUNDED_SCALE, 1.0625, 0),
        ("gain", FORMAT, 0.9716, 0),
        ("sqnr_db", EXACT, 55.0, 0),
        ("sqnr_db", EXACT, 35.0, 2),
        ("cosine", 0, 0.99965, 0),
        ("cosine", E5M2, 0.9986, 0),
        ("cosine", 0, 0.99, 2),
        ("underflow_rate", 0, 0.0006, 0),
        ("underflow_rate", 0, 0.05, 2),
        ("underflow_rate", WGRAD_GRAD_OUTPUT, 0.05, 1),
        ("overflow_rate", 0, 0.0, 0),
        ("overflow_rate", DELAYED, 1e-4, 0),
        ("overflow_rate", DELAYED, 1e-2, 2),
        ("gain", 0, 1.0, 0),
        ("gain", 0, 0.5, 2.465),
        ("gain", 0, 1 + 1.1 / 17, 2),
        ("gain", E5M2, 1 - 1.1 / 9, 2),
        ("gain", FLOOR, 0.87, 2),
        ("gain", SHADOW, 1.05, 1.25),
        ("gain", SHADOW, 3.0, 1.5),
        ("overflow_rate", CLIPS_LITTLE, 0.001, 1.25),
        ("underflow_rate", NO_CAUSE, 1.0, 1.5),
        ("headroom", DELAYED, 1.0, 0),
        ("nonfinite_rate", 0, 1e-6, 2.0),
    ],
)
def test_severity_follows_the_published_limits(metric: str, kind: int, value: float, severity: float) -> None:
    found = envelope(metric, kind)
    assert found is not None and found.at_value(value) == pytest.approx(severity, abs=2e-3)


def test_wgrad_underflow_alone_never_reaches_act() -> None:
    found = envelope("underflow_rate", WGRAD_GRAD_OUTPUT)
    assert found is not None and found.at_value(1.0) < 2


def test_coverage_counts_modules_and_flops(run: Run) -> None:
    found = coverage(run.modules, run.manifest["filters"])
    assert (found.num_fp8, found.num_linears) == (30, 31)
    assert found.flops_share == pytest.approx(0.9928, abs=1e-3)
    assert found.casts[0][0] == (
        "input, weight: e4m3fn tensorwise delayed(1024,max); grad_output: e5m2 tensorwise delayed(1024,max)"
    )
    assert found.skipped == ((samples.SKIPPED, "Linear", "bf16", "an override left it in BF16"),)


def test_casts_in_words_do_not_mention_that_wgrad_turns_its_tiles() -> None:
    def words(name: str) -> str:
        return in_words(get_recipe(name).to_dict()["casts"])

    assert words("blockwise") == "input, grad_output: e4m3fn 1x128 current; weight: e4m3fn 128x128 current"
    assert words("tensorwise_current") == "e4m3fn tensorwise current"
    assert words("bf16") == "BF16"
    assert in_words(None) == "casts not recorded" and in_words({"fprop.input": {"what": 1}}) == "unreadable cast"


def test_coverage_of_an_odd_manifest_does_not_fail() -> None:
    assert coverage([]).num_linears == 0
    assert coverage([{"fqn": "a", "fp8": False}]).skipped == (("a", "", "not requested", "no reason recorded"),)


@pytest.mark.parametrize("name", ["a", "a b", "<b>", "?x=1&y=2#z", "../../etc", "ü", "%2e%2e", "a+b"])
def test_urls_round_trip_any_name(name: str) -> None:
    text = urls.href("module", name, module=name, step=3, site=None)
    path, _, search = text.partition("?")
    assert path == "/module" and "<" not in text and "#" not in text
    view = urls.parse(path, "?" + search)
    assert (view.page, view.run, view.get("module"), view.get_int("step"), "site" in view.params) == (
        "module",
        name,
        name,
        3,
        False,
    )


def test_urls_leave_out_what_is_default() -> None:
    assert urls.href("overview") == "/" and urls.parse("/", "") == urls.View("overview")
    assert urls.parse(None, None).page == "overview" and urls.parse("/heatmap/", "?step=x").get_int("step") is None


def test_a_loss_that_became_nan_is_told(tmp_path: Path) -> None:
    steps = {step: {"loss": float("nan")} for step in range(12, 20)}
    run = build(tmp_path / "run", num_steps=20, steps=steps)
    assert queries.loss_lost_at(run) == 12 and str(queries.last_loss(run)) == "nan"
    loss = queries.training(run, most=50)[0]
    assert loss.steps.tolist() == list(range(20)) and loss.states is not None
    assert loss.states.tolist() == 12 * [FINITE] + 8 * [NAN] and np.isnan(loss.values[12:]).all()


def test_wgrad_underflow_does_not_hide_an_operand_that_may_lose_less(tmp_path: Path) -> None:
    lost = {"num_underflow": lambda row: round(row["numel"] * 0.04)}
    less = {"num_underflow": lambda row: round(row["numel"] * 0.02)}
    overrides = [
        Override(gemm="wgrad", tensor="grad_output", slots=lost),
        Override(module="*.down", gemm="dgrad", tensor="grad_output", slots=less),
    ]
    heat = queries.heat(build(tmp_path / "run", num_steps=20, overrides=overrides), "underflow_rate")
    colors = severities("underflow_rate", heat.values, heat.kinds)
    assert colors is not None
    found = {name: round(float(heat.values[i, 0]), 3) for i, name in enumerate(heat.modules)}
    assert found["blocks.0.mlp.down"] == 0.02 and found["blocks.0.mlp.up"] == 0.04
    assert colors[heat.modules.index("blocks.0.mlp.down"), 0] > 1 > colors[heat.modules.index("blocks.0.mlp.up"), 0]


def test_ranks_that_differ_are_found_with_the_step_and_the_rank(folder: Path) -> None:
    run = Run(folder / "ranks")
    found = rank_data.disagreement(run, "scale_inv_mean_log2")
    assert (found[0]["module"], found[0]["tensor"], found[0]["outlier"]) == ("blocks.1.mlp.up", "input", samples.SICK_RANK)
    assert found[0]["step"] >= 60 and found[0]["spread"] == pytest.approx(1.0, abs=0.1) and found[1]["spread"] < 0.2
    heat = rank_data.by_rank(run, "blocks.1.mlp.up", SITE, "scale_inv_mean_log2")
    assert heat.modules == ("rank 0", "rank 1", "rank 2", "rank 3") and heat.values.shape == (4, 12)
    spread = rank_data.spread_over_steps(run, "blocks.1.mlp.up", SITE, "scale_inv_mean_log2", samples.SICK_RANK)
    assert spread.median.high is not None and spread.outlier.values[-1] == pytest.approx(spread.median.high[-1])
    assert [row["rank"] for row in rank_data.rank_rows(run)] == [0, 1, 2, 3]


@pytest.mark.parametrize("metric", ["sqnr_db", "scale_inv_mean_log2"])
def test_a_site_that_is_nan_on_one_rank_only_comes_first(tmp_path: Path, metric: str) -> None:
    first = samples.gpt_modules(2)[6][0]
    later = samples.gpt_modules(2)[0][0]  # is lost on a later step, and all ranks lose the last module
    overrides = [
        Override(module=first, tensor="weight", slots=samples.LOST, steps=(30, None), ranks=(1,)),
        Override(module=later, slots=samples.LOST, steps=(50, None), ranks=(1,)),
        Override(module=samples.gpt_modules(2)[9][0], slots=samples.LOST, steps=(10, None)),
    ]
    run = build(tmp_path / "run", num_steps=60, every=10, modules=samples.gpt_modules(2), world_size=2, overrides=overrides)
    found = rank_data.disagreement(run, metric)
    keys = ("module", "gemm", "tensor", "step", "outlier", "num_lost", "state", "spread", "value")
    assert [found[0][key] for key in keys] == [first, "fprop", "weight", 30, 1, 1, NAN, None, None]
    lost = [row for row in found if row["state"]]
    assert {row["module"] for row in lost} == {first, later} and found[: len(lost)] == lost
    assert all(row["spread"] is not None and row["step"] < 60 for row in found[len(lost) :]) and len(found) > len(lost)
    heat = rank_data.by_rank(run, first, ("fprop", "weight"), metric)
    assert heat.states is not None and heat.states[:, -1].tolist() == [FINITE, NAN]
    about = ranks_page.parts(urls.View("ranks", None, {"metric": metric}), RunView(run, "stamp"))[1]
    assert f"{first}, fprop weight" in str(about) and "NaN on rank 1 from step 30; the other rank has none." in str(about)


def test_history_has_the_shares_of_each_step_and_the_scale_of_the_cast(run: Run) -> None:
    found = history_data.module_history(run, samples.SICK).of(SITE)
    assert found is not None and found.shares.shape == (64, 40) and found.format == "e4m3fn"
    assert found.shares.sum(axis=0) == pytest.approx(np.ones(40))
    one = queries.histogram(queries.rows_at(run, samples.SICK, 390, []), SITE)
    assert one is not None and found.shares[:, -1] == pytest.approx(one.counts / one.counts.sum())
    other = history_data.module_history(run, samples.SICK).of(SITE, "e4m3fn tensorwise current")
    assert other is not None and other.scale_inv_log2[-1] - found.scale_inv_log2[-1] == pytest.approx(3.3, abs=0.3)
    assert history_data.module_history(run, samples.SICK).of(("fprop", "output")) is None


def test_the_block_map_is_that_of_the_nearest_dump(run: Run) -> None:
    found = history_data.block_map(run, samples.SICK, SITE, 200)
    assert found is not None and found.sqnr_db.shape == (4, 6) and found.tile == (64, 128)
    assert found.sqnr_db[1].tolist() == pytest.approx([12.0] * 6, abs=0.01) and "step 300" in found.title
    assert history_data.block_map(run, "blocks.0.mlp.up", SITE, 200) is None
    assert history_data.dumped_steps(run, samples.SICK) == [(300, "fprop.input")]


def test_a_large_block_map_shows_the_worst_tile_of_each_cell(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_data, "MAX_TILES", 3)
    found = history_data.block_map(run, samples.SICK, SITE, 300)
    assert found is not None and found.stride == (2, 2) and found.sqnr_db.shape == (2, 3)
    assert found.sqnr_db[0, 0] == pytest.approx(12, abs=0.01) and found.sqnr_db[1, 0] == pytest.approx(31, abs=0.01)


def test_what_a_budget_buys_rises_with_it(run: Run) -> None:
    run_view = RunView(run, "")
    costs = [sum(f.cost for f in run_view.fallbacks(share, fill=True)) for share in (0.0, 0.1, 0.5)]
    damage = [fallback.damage(run_view.fallbacks(share, fill=True)) for share in (0.0, 0.1, 0.5)]
    assert costs == sorted(costs) and costs[1] <= 0.1 < costs[2]
    assert damage[0] is None, "what another cast takes away is not known, and not 0"
    assert damage[1] is not None and damage[2] is not None and 0 < damage[1] <= damage[2]
    assert run_view.fallbacks(0.1) == recommend(run, run_view.judge().findings, 0.1)


def test_a_damaged_trial_file_is_told(folder: Path, tmp_path: Path) -> None:
    assert read_trial(tmp_path, "verify.json") is None
    found = read_trial(folder / "sick", "verify.json")
    assert found is not None and found["verdict"] == "closed"
    for text in ("{", "[]", '{"schema": 1}', '{"schema": 99, "statements": []}', "[" * 100_000):
        (tmp_path / "verify.json").write_text(text)
        with pytest.raises(RunError, match=r"verify\.json"):
            read_trial(tmp_path, "verify.json")


def test_a_recipe_that_the_manifest_does_not_tell_is_unknown_and_not_none() -> None:
    manifests: list[dict[str, Any]] = [{"recipe": {"name": "blockwise"}}, {"recipe": None}, {}, {"recipe": {}}, {"recipe": []}]
    assert [recipe_name(manifest) for manifest in manifests] == ["blockwise", "none", "unknown", "unknown", "unknown"]
