"""Figures from hand-made records, without a run and without a browser."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import numpy as np
import plotly.graph_objects as go  # type: ignore[import-untyped]  # plotly ships no types
import pytest

from fp8debug.reports.svg import Chart
from fp8debug_dashboard.data.healthy_ranges import SHADOW
from fp8debug_dashboard.data.heat_rows import MAX_ROWS, arranged
from fp8debug_dashboard.data.nonfinite import FINITE, NAN
from fp8debug_dashboard.data.ranks import Spread
from fp8debug_dashboard.data.records import BlockMap, CastRange, ExponentHistogram, Heat, History, Mark, StepSeries
from fp8debug_dashboard.figures import axes
from fp8debug_dashboard.figures import base as figures
from fp8debug_dashboard.figures import compare as compare_figures
from fp8debug_dashboard.figures import evidence as evidence_figures
from fp8debug_dashboard.figures import fallback as fallback_figures
from fp8debug_dashboard.figures import history as history_figures
from fp8debug_dashboard.figures import module as module_figures
from fp8debug_dashboard.figures import plot as plots
from fp8debug_dashboard.figures import ranks as rank_figures
from fp8debug_dashboard.figures.theme import LINES, SEVERITY_RANGE, VERMILLION

#: What people without L or without M cones see of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1); linear RGB as
#: XYZ under D65, each row over its sum.
PROTAN = np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]])
DEUTAN = np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]])
XYZ = np.array([[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0178, 0.1094, 0.8728]])


def trace(name: str = "loss", values: tuple[float, ...] = (3.0, 2.0, 1.0), **site: Any) -> StepSeries:
    return StepSeries(name=name, steps=np.arange(len(values), dtype=np.int32) * 10, values=np.array(values, np.float32), **site)


def heat(metric: str, values: list[list[float]], kinds: int = 0, **more: Any) -> Heat:
    grid = np.array(values, np.float32)
    names = tuple(f"blocks.{i}.mlp.up" for i in range(len(values)))
    steps = np.arange(grid.shape[1], dtype=np.int32) * 10
    return Heat(metric=metric, unit="dB", modules=names, steps=steps, values=grid, kinds=np.full(grid.shape, kinds), **more)


def texts(figure: Any) -> str:
    return str(json.dumps([figure.data, figure.layout], default=str))


def packed(figure: Any) -> list[str]:
    """Return the dtypes of the arrays as they travel to the browser."""
    found = []
    for data in json.loads(json.dumps(figure.packed()))["data"]:
        for key in ("x", "y", "z", "customdata"):
            if isinstance(data.get(key), dict):
                found.append(data[key]["dtype"])
    return found


MARK = Mark(step=10, severity="error", codes=("F101", "F104"), lines=("✖ F101 blocks.0.mlp.up: clips",), module="blocks.0.mlp.up")


def test_training_draws_what_was_recorded_and_marks_findings_on_a_rail() -> None:
    figure = figures.training([trace("loss"), trace("grad_norm")], [MARK])
    titles = [figure.layout[f"yaxis{n}"].get("title", {}).get("text") for n in ("", "2", "3")]
    assert titles == [None, "loss", "gradient norm"]
    rail = figure.data[-1]
    assert rail["text"] == ["F101 F104"] and rail["marker"]["symbol"] == ["x"]
    assert [shape["x0"] for shape in figure.layout["shapes"]] == [10]


def test_the_titles_of_axes_below_each_other_have_room() -> None:
    """The words "gradient norm" have 84 px at 13 px a letter, more than the axis had."""
    names = ("loss", "grad_norm", "loss_scale", "lr")
    layout = figures.training([trace(name) for name in names], [MARK]).layout
    inner = layout["height"] - 8 - 34
    for n in range(3, 6):
        low, high = layout[f"yaxis{n}"]["domain"]
        assert inner * (high - low) >= 88


def test_no_act_line_where_no_rule_judges_underflow() -> None:
    """F102, F105 and F106 name the cause of zeros in the forward input, under older scales and of tokens in one tile."""
    values = (0.0, 0.02, 0.2)

    def has_act_line(gemm: str, tensor: str, cast_name: str) -> bool:
        site = trace("underflow_rate", values, gemm=gemm, tensor=tensor, cast_name=cast_name, reference="operand", actual=True)
        return VERMILLION in [
            s["line"]["color"]
            for s in module_figures.sites([site], "underflow_rate", ("fprop", "output")).layout.get("shapes", ())
        ]

    current, delayed, tiles = "e4m3fn 1x128 current", "e4m3fn tensorwise delayed(16,max)", "e4m3fn 128x128 current"
    judged = [("fprop", "input", current), ("wgrad", "input", delayed), ("dgrad", "grad_output", tiles)]
    left = [("fprop", "weight", current), ("wgrad", "input", current), ("dgrad", "weight", tiles)]
    assert [has_act_line(*site) for site in (*judged, *left)] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("blindness", [PROTAN, DEUTAN], ids=["protan", "deutan"])
def test_lines_of_one_plot_differ_for_the_colour_blind(blindness: np.ndarray[Any, Any]) -> None:
    colors = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in LINES]) / 255
    linear = np.where(colors <= 0.04045, colors / 12.92, ((colors + 0.055) / 1.055) ** 2.4)
    seen = np.clip(linear @ blindness.T, 0, 1) @ XYZ.T
    f = np.where(seen > 0.008856, np.cbrt(seen), 7.787 * seen + 16 / 116)
    lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])], axis=1)
    apart = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 1e3 * np.eye(len(lab))
    assert apart.min() > 12, "two colours look alike"


def test_a_loss_scale_is_drawn_on_a_logarithmic_axis() -> None:
    figure = figures.training([trace("loss"), trace("loss_scale", (65536.0, 32768.0, 65536.0))])
    assert "type" not in figure.layout["yaxis"] and figure.layout["yaxis2"]["type"] == "log"
    assert figure.layout["yaxis2"]["tickvals"] == [2.0**15, 2.0**16]
    assert "type" not in figures.training([trace("loss_scale", (0.0, 0.0))]).layout["yaxis"]


def test_a_map_of_tiles_says_what_its_colours_mean() -> None:
    tiles = BlockMap(title="t", sqnr_db=np.full((2, 3), 20, np.float32), tile=(1, 128))
    assert history_figures.blocks(tiles).data[0]["colorbar"]["ticktext"] == ["not FP8", "healthy", "warn 30", "act 24.51", "lost"]


def test_training_without_anything_says_what_to_call() -> None:
    assert "watch.step(loss=loss" in texts(figures.training([], []))


def test_arrays_travel_as_float32_and_int32() -> None:
    assert set(packed(figures.training([trace()]))) == {"i4", "f4"}
    assert set(packed(figures.heatmap(heat("sqnr_db", [[31.0, 20.0]])))) == {"i4", "f4"}
    assert set(packed(module_figures.scales([trace("a", cast_name="a")], []))) == {"i4", "f4"}


def test_heatmap_colours_by_severity_and_keeps_exact_values_for_the_hover() -> None:
    figure = figures.heatmap(heat("sqnr_db", [[32.0, 31.0, 30.0, 24.509, 3.0, float("nan")]]))
    cells = figure.data[0]
    assert cells["z"][0, :5].tolist() == pytest.approx([0, 0, 1, 2, 3], abs=1e-3) and np.isnan(cells["z"][0, 5])
    assert cells["customdata"][0, :5].tolist() == pytest.approx([32, 31, 30, 24.509, 3])
    assert (cells["zmin"], cells["zmax"]) == SEVERITY_RANGE
    assert cells["colorbar"]["ticktext"] == ["not FP8", "healthy", "warn 30", "act 24.51", "lost"]


def test_heatmap_of_a_result_uses_the_limits_of_results_and_calls_none_act() -> None:
    cells = figures.heatmap(heat("sqnr_db", [[28.6, 25.0, 20.0, 3.0]], kinds=SHADOW)).data[0]
    assert cells["z"][0].tolist() == [0, 1, 1.25, 1.5]


def test_heatmap_without_an_envelope_is_robust_against_one_outlier() -> None:
    values = [[float(i) for i in range(2, 102)]]
    values[0][0] = 1e9
    cells = figures.heatmap(heat("max_block_range_log2", values)).data[0]
    assert cells["zmax"] < 110


def test_heatmap_over_many_binades_is_logarithmic() -> None:
    cells = figures.heatmap(heat("amax", [[2.0**i for i in range(-10, 11)]])).data[0]
    assert -11 < cells["zmin"] < cells["zmax"] < 11 and cells["customdata"][0, -1] == 1024
    assert all(text.startswith("2^") for text in cells["colorbar"]["ticktext"])


def test_heatmap_marks_where_findings_begin_and_has_the_first_module_on_top() -> None:
    figure = figures.heatmap(heat("sqnr_db", [[31.0, 20.0], [31.0, 31.0]], marks=(MARK,)))
    assert figure.data[1]["y"] == ["blocks.0.mlp.up"] and figure.data[1]["marker"]["symbol"] == ["x"]
    assert figure.layout["yaxis"]["autorange"] == "reversed"


def test_heatmap_of_nothing_says_so() -> None:
    assert "SQNR, dB was not recorded" in texts(figures.heatmap(heat("sqnr_db", [[float("nan")]])))


def test_each_row_of_a_heatmap_has_a_label_and_room_for_it() -> None:
    for num in (1, 60, 61, 500):
        rows = arranged(heat("sqnr_db", [[31.0]] * num))
        figure = figures.heatmap(rows.heat, rows=rows)
        labels, drawn = figure.layout["yaxis"]["ticktext"], min(num, MAX_ROWS)
        assert len(labels) == len(set(labels)) == drawn and figure.layout["yaxis"]["tickvals"] == list(range(drawn))
        size = figure.layout["yaxis"]["tickfont"]["size"]
        assert 1.2 * size <= (figure.layout["height"] - 74) / drawn and figure.layout["height"] <= 1400


def test_a_text_of_many_cells_travels_once_with_its_place_in_each() -> None:
    values = [[31.0] * 3, [31.0, 12.0, 12.0], [float("nan")] * 3]
    rows = arranged(replace(heat("sqnr_db", values), modules=("blocks.0.<q>", "blocks.0.up", "head")), fold="blocks")
    cells = figures.heatmap(rows.heat, rows=rows).data[0]
    words = cells["meta"]["words"]
    assert [[words[place] for place in row] for row in cells["text"]] == [["blocks.0.&lt;q>"] + ["blocks.0.up"] * 2, [""] * 3]
    assert cells["text"].dtype == np.uint16 and len(words) == 3


@pytest.mark.parametrize("name", ["<b>x</b>", "<a href='http://x'>y</a>", "%{zz}", "a & b"])
def test_names_stay_text(name: str) -> None:
    shown = figures.plain(name)
    assert "<" not in shown and "%{" not in shown
    figure = figures.heatmap(
        Heat(
            metric="gain",
            unit="1",
            modules=(name,),
            steps=np.zeros(1, np.int32),
            values=np.ones((1, 1), np.float32),
            kinds=np.zeros((1, 1), np.int32),
            marks=(Mark(step=0, severity="info", codes=("F101",), lines=(name,), module=name),),
        )
    )
    assert name not in texts(figure) or name == shown


def test_sites_reach_to_the_warn_threshold_so_that_noise_looks_like_noise() -> None:
    site = {"gemm": "fprop", "tensor": "weight", "cast_name": "e4m3fn 128x128 current", "reference": "operand"}
    figure = module_figures.sites([trace("w", (31.7, 31.6, 31.8), **site)], "sqnr_db", ("fprop", "weight"), step=10)
    low, high = figure.layout["yaxis2"]["range"]
    assert low < 30 < 31.8 < high
    assert "<b>▸ fprop · weight</b>" in [note["text"] for note in figure.layout["annotations"]]
    assert sum(note["text"] == "not recorded" for note in figure.layout["annotations"]) == 8


def test_sites_tell_the_running_cast_from_what_ifs_by_line_style() -> None:
    site: dict[str, Any] = {"gemm": "fprop", "tensor": "input", "reference": "operand"}
    running = trace("a", cast_name="e4m3fn tensorwise delayed(4,max)", **site)
    other = trace("b", cast_name="e4m3fn tensorwise current", actual=False, **site)
    figure = module_figures.sites([running, other], "gain", ("fprop", "input"))
    assert {line["name"]: line["line"]["dash"] for line in figure.data} == {
        "running cast": "solid",
        "e4m3fn tensorwise current": "dot",
    }


def test_no_other_cast_has_the_colour_of_the_running_one() -> None:
    casts = [trace(name, cast_name=name, actual=name == "a") for name in "abcdefghij"]
    colors = {line["line"]["color"] for line in module_figures.scales(casts, []).data if line["name"] != "a"}
    assert colors == set(LINES[1:])


def test_scales_mark_the_steps_that_clip() -> None:
    headroom = trace("d", (0.9, 1.0, 4.0), cast_name="d")
    figure = module_figures.scales([trace("d", (-6.0, -6.0, -6.0), cast_name="d")], [headroom])
    clips = [data for data in figure.data if data["mode"] == "markers"]
    assert [list(data["x"]) for data in clips] == [[20]]
    assert figure.layout["yaxis2"]["ticktext"][-1] == "4"


def test_histogram_draws_the_range_of_the_cast() -> None:
    cast = CastRange(name="e4m3fn tensorwise current", actual=True, scale_inv_log2=(-3.0, -3.0, -3.0), format="e4m3fn")
    counts = np.zeros(64, np.int64)
    counts[[30, 40, 45]] = 10, 80, 10
    figure = module_figures.histogram(ExponentHistogram(first_log2=-45, counts=counts, step=7, cast=cast))
    assert figure.data[0]["x"].tolist() == [-14.5, -4.5, 0.5] and figure.data[0]["y"].tolist() == pytest.approx([0.1, 0.8, 0.1])
    zones = [(shape["x0"], shape["x1"]) for shape in figure.layout["shapes"] if shape["type"] == "rect"]
    # E4M3: what rounds to zero lies below 2^-10, subnormals end at 2^-6, the maximum is 448; all times scale_inv = 2^-3.
    assert zones == [(-13.0, -9.0), (-9.0, pytest.approx(np.log2(448) - 3))]


def test_histogram_of_nothing_says_so() -> None:
    assert "No exponent histogram" in texts(module_figures.histogram(None))


def test_a_band_shows_what_one_point_stands_for() -> None:
    low, high = np.array([1, 1, 1], np.float32), np.array([4, 4, 4], np.float32)
    steps = np.arange(3, dtype=np.int32)
    figure = figures.training([StepSeries(name="loss", steps=steps, values=np.full(3, 2, np.float32), low=low, high=high)])
    assert figure.data[0]["fill"] == "toself" and max(figure.data[0]["y"]) == 4


def test_a_lost_loss_is_said_where_the_line_ends() -> None:
    lost = trace("loss", (3.0, 2.0, float("nan"), float("nan")), states=np.array([0, 0, 3, 3], np.int8))
    figure = figures.training([lost], [MARK], lost_at=20)
    assert "loss is NaN from step 20" in [note["text"] for note in figure.layout["annotations"]]


def test_results_equal_to_the_exact_gemm_do_not_flatten_the_others() -> None:
    site: dict[str, Any] = {"gemm": "fprop", "tensor": "output", "cast_name": "e4m3fn 1x128 current @ e4m3fn 128x128 current"}
    shadow = trace("s", (28.0, 28.5, 28.2), reference="shadow", **site)
    exact = trace("e", (138.0, 140.0, 139.0), reference="exact", **site)
    figure = module_figures.sites([shadow, exact], "sqnr_db", ("fprop", "input"))
    assert figure.layout["yaxis3"]["range"][1] < 40
    assert any("off the scale" in note["text"] for note in figure.layout["annotations"])
    normal = trace("e", (55.0, 55.0, 55.0), reference="exact", **site)
    assert module_figures.sites([shadow, normal], "sqnr_db", ("fprop", "input")).layout["yaxis3"]["range"][1] > 55


def test_subplots_share_the_height_and_the_steps_of_their_column() -> None:
    layout = plots.Figure(2, 2, heights=[3, 1], gap=0.2, between=0.1).layout
    assert [layout[f"yaxis{n}"]["domain"] for n in ("", "3")] == [pytest.approx([0.4, 1.0]), pytest.approx([0.0, 0.2])]
    assert layout["xaxis2"]["domain"] == pytest.approx([0.55, 1.0])
    assert layout["xaxis4"]["matches"] == "x2" and layout["xaxis2"]["showticklabels"] is False
    assert layout["xaxis4"]["anchor"] == "y4" and "showticklabels" not in layout["xaxis4"]


def test_arrays_are_packed_with_their_shape() -> None:
    figure = plots.Figure()
    figure.add({"z": np.array([[1.5, 2.5]]), "x": np.zeros(0, np.int64), "y": ["a"]})
    z, x, y = (figure.packed()["data"][0][key] for key in "zxy")
    assert (z["dtype"], z["shape"], x["dtype"], x["bdata"], y) == ("f4", "1, 2", "i4", "", ["a"])
    assert np.frombuffer(base64.b64decode(z["bdata"]), "<f4").tolist() == [1.5, 2.5]


def test_plotly_knows_every_value_of_the_figures() -> None:
    site: dict[str, Any] = {"gemm": "fprop", "tensor": "output", "cast_name": "c"}
    results = [trace("s", (28.0, 28.5), reference="shadow", **site), trace("e", (50.0, 51.0), reference="exact", **site)]
    cast = CastRange(name="c", actual=True, scale_inv_log2=(-3.0, -2.0, -1.0), format="e4m3fn")
    steps = np.arange(2, dtype=np.int32)
    kept = History(first_log2=-3, steps=steps, shares=np.full((2, 2), 0.5, np.float32), scale_inv_log2=np.zeros(2, np.float32))
    choice = fallback_figures.BudgetPoint(budget=0.1, cost=0.1, recovered=0.5, count=2)
    chart = Chart(title="rms", steps=[0, 1], values=[1.0, 2.0], limit=1.5)
    drawn = [
        figures.training([trace("loss"), trace("lr")], [MARK], lost_at=20),
        figures.heatmap(heat("sqnr_db", [[31.0, 20.0]], marks=(MARK,)), "1:2"),
        figures.heatmap(heat("amax", [[2.0**i for i in range(-10, 11)]])),
        module_figures.sites(results, "sqnr_db", ("fprop", "output"), 10),
        module_figures.scales([trace("a", cast_name="a")], [trace("a", (0.5, 2.0), cast_name="a")], 10),
        module_figures.histogram(ExponentHistogram(first_log2=-45, counts=np.arange(64, dtype=np.int64), step=7, cast=cast)),
        history_figures.exponents(replace(kept, format="e4m3fn"), 1),
        history_figures.error_split(results, 10),
        history_figures.blocks(BlockMap(title="t", sqnr_db=np.full((2, 3), 20, np.float32), tile=(1, 128))),
        rank_figures.spread(Spread(median=trace(), outlier=trace("rank 1"), rank=1), "rms", 10),
        compare_figures.losses([("a", trace()), ("b", trace())], [10]),
        compare_figures.site_in_both([("a", [trace()]), ("b", [trace()])], "rms", 10),
        fallback_figures.pareto([choice], choice),
        fallback_figures.trials({"arms": [{"name": "fp8", "losses": [[2.0, 1.0], [2.1, 1.1]]}]}),
        evidence_figures.evidence([chart, chart], (0, 1)),
        evidence_figures.evidence([chart], (1, 1)),
        figures.empty("nothing"),
    ]
    for figure in drawn:
        go.Figure({"data": figure.data, "layout": figure.layout})  # raises where a name or a value is none of plotly's


def test_noise_is_not_drawn_from_end_to_end_as_evidence() -> None:
    noise = Chart(title="amax", steps=[0, 1, 2], values=[2.000617e-4, 2.00062e-4, 2.000618e-4])
    change = Chart(title="amax", steps=[0, 1, 2], values=[1.0, 2.0, 4.0])
    low, high = evidence_figures.evidence([noise], (0, 2)).layout["yaxis"]["range"]
    assert low < 1.96e-4 and high > 2.04e-4
    assert "range" not in evidence_figures.evidence([change], (0, 2)).layout["yaxis"]


def test_words_about_a_gap_stand_where_they_have_room() -> None:
    steps, states = np.arange(10, dtype=np.int32), np.array([FINITE] * 6 + [NAN] * 4, np.int8)  # from 5 of 9 on
    states[5] = NAN
    short = StepSeries(name="short", steps=steps, values=np.ones(10, np.float32), states=states)
    alone, many = plots.Figure(), plots.Figure(3, 3)
    figures.line(alone, short, "#000000")
    figures.line(many, short, "#000000", 4)
    sides = [figure.set(200).layout["annotations"][0]["xanchor"] for figure in (alone, many)]
    assert sides == ["left", "right"]


@pytest.mark.parametrize("is_first", [True, False])
def test_words_about_a_gap_have_the_room_of_the_longest_line(is_first: bool) -> None:
    steps = np.arange(10, dtype=np.int32)
    states = np.where(steps < 8, FINITE, NAN).astype(np.int8)
    short = StepSeries(name="short", steps=steps, values=np.ones(10, np.float32), states=states)
    long = StepSeries(name="long", steps=np.arange(100, dtype=np.int32), values=np.ones(100, np.float32))
    figure = plots.Figure()
    for trace in (short, long) if is_first else (long, short):
        figures.line(figure, trace, "#000000")
    assert figure.set(200).layout["annotations"][0]["xanchor"] == "left"  # on the left plotly makes the axis longer, below 0


def test_one_site_names_the_runs_without_it_and_the_cast_that_did_not_run() -> None:
    what_if = trace("c", cast_name="e4m3fn 1x128 current", actual=False)
    runs = [("good", [trace("a")]), ("other", None), ("a&b", []), ("bf16", [what_if, what_if])]
    figure = compare_figures.site_in_both(runs, "rms").set(200)
    named = {drawn["name"]: drawn for drawn in figure.data if drawn.get("showlegend")}
    assert list(named) == [
        "good",
        "bf16, what-if e4m3fn 1x128 current, 1 of 2 casts",
        "other: no such module",
        "a&amp;b: not recorded here",
    ]
    # Each run has its colour of the plot of the losses, whoever is missing.
    assert [named[name]["line"]["color"] for name in named] == [LINES[0], LINES[3], LINES[1], LINES[2]]
    assert named["bf16, what-if e4m3fn 1x128 current, 1 of 2 casts"]["line"]["dash"] == "dot"


def test_names_of_compared_runs_are_escaped_once() -> None:
    figure = compare_figures.losses([("good", trace()), ("a&b", trace())])
    assert [drawn["name"] for drawn in figure.data if drawn.get("showlegend")] == ["good (reference)", "a&amp;b"]


def test_what_a_hover_box_and_a_plot_have_no_room_for_is_counted() -> None:
    lines = tuple(f"F101 layer {i}" for i in range(11))
    rail = figures.training([trace()], [replace(MARK, lines=lines)], events=[(10, f"event {i}") for i in range(9)])
    boxes = [drawn["customdata"][0].split("<br>") for drawn in rail.data[1:]]
    assert [box[-1] for box in boxes] == ["and 3 more", "and 1 more"] and [len(box) for box in boxes] == [9, 9]
    steps = np.arange(20, dtype=np.int32)
    states = np.where(steps % 2 == 1, NAN, FINITE).astype(np.int8)
    figure = plots.Figure()
    figures.line(figure, StepSeries(name="v", steps=steps, values=np.ones(20, np.float32), states=states), "#000000")
    assert [note["text"] for note in figure.layout["annotations"]][-2:] == [
        "NaN at step 5",
        "NaN at step 7, and 6 times more up to step 19",
    ]


def test_a_repeat_that_ended_early_shortens_no_arm() -> None:
    figure = fallback_figures.trials({"arms": [{"name": "fp8", "losses": [[2.0, 1.0, 0.5], [4.0], [3.0, None]]}]})
    drawn = next(line for line in figure.data if line.get("showlegend"))
    assert drawn["x"].tolist() == [0, 1, 2]
    assert drawn["y"][[0, 2]].tolist() == [3.0, 0.5] and np.isnan(drawn["y"][1])


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_words_about_a_gap_lie_over_no_line(scale: str) -> None:
    """The axis ends above the lines, whichever side the words are on, and reaches as far down as before."""
    steps, states = np.arange(10, dtype=np.int32), np.array([FINITE] * 5 + [NAN] * 5, np.int8)
    values = np.linspace(1, 3, 10, dtype=np.float32)
    for cols, i in ((1, 0), (3, 4)):
        figure = plots.Figure(cols, cols)
        figures.line(figure, StepSeries(name="short", steps=steps, values=values, states=states), "#000000", i)
        figure.over_steps()
        figure.set(400)
        if scale == "log":
            axes.logarithmic(figure)
        n = str(i + 1) if i else ""
        (low, high), end = figure.layout[f"yaxis{n}"]["range"], np.log10(3) if scale == "log" else 3
        share = figure.layout[f"yaxis{n}"].get("domain", (0, 1))
        pixels = (400 - 8 - 34) * (share[1] - share[0])
        assert low < (0 if scale == "log" else 1) and (high - end) / (high - low) * pixels >= plots.NOTE_PX + 6
        assert all("range" not in figure.layout.get(f"yaxis{k}", {}) for k in range(2, cols * cols + 1) if k != i + 1)


def test_a_share_that_is_0_at_every_step_is_drawn_over_no_negative_axis() -> None:
    chart = Chart(title="share clipped", steps=[0, 1, 2], values=[0.0, 0.0, 0.0])
    assert evidence_figures.evidence([chart], (0, 2)).layout["yaxis"]["range"] == [-0.06, 1.0]


def test_words_about_a_list_without_a_share_stand_above_the_curve() -> None:
    points = [fallback_figures.BudgetPoint(budget=b, cost=b, recovered=10 * b, count=1) for b in (0.0, 0.05, 0.1)]
    chosen = fallback_figures.BudgetPoint(budget=0.1, cost=0.1, recovered=None, count=1)
    figure = fallback_figures.pareto(points, chosen)
    (note,), (low, high) = figure.layout["annotations"], figure.layout["yaxis"]["range"]
    below = note["y"] - 2 * plots.NOTE_PX / (figure.layout["height"] - 8 - 34)  # of two lines
    assert low + below * (high - low) > 100 and max(figure.layout["yaxis"]["tickvals"]) == 100
