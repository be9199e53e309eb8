"""Rows of a heatmap: folds show their worst, what is chosen and in which order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8debug_dashboard.data import step_ranges
from fp8debug_dashboard.data.heat_rows import MAX_ROWS, arranged, default_fold, is_chosen, labels_of
from fp8debug_dashboard.data.nonfinite import FINITE, INF, MISSING, NAN
from fp8debug_dashboard.data.records import Heat, Mark
from tests.synthetic import MODULES, build

NAMES = ("embed", "layers.0.q", "layers.0.mlp.w1", "layers.1.q", "layers.1.mlp.w1", "head")


def heat(metric: str, values: list[list[float]], names: tuple[str, ...] = NAMES, **more: Any) -> Heat:
    grid = np.array(values, np.float32)
    steps = np.arange(grid.shape[1], dtype=np.int32) * 10
    return Heat(metric=metric, unit="1", modules=names, steps=steps, values=grid, kinds=np.zeros(grid.shape, np.int32), **more)


SQNR = heat("sqnr_db", [[31, 31], [31, 20], [31, 30], [29, 31], [31, 12], [31, 31]])


@pytest.mark.parametrize(
    ("fold", "labels"),
    [
        ("modules", list(NAMES)),
        ("blocks", ["embed", "layers.0.*", "layers.0.*", "layers.1.*", "layers.1.*", "head"]),
        ("places", ["embed", "layers.{0,1}.q", "layers.{0,1}.mlp.w1", "layers.{0,1}.q", "layers.{0,1}.mlp.w1", "head"]),
        ("stacks", ["embed", "layers.*", "layers.*", "layers.*", "layers.*", "head"]),
        ("no such fold", list(NAMES)),
    ],
)
def test_modules_fold_by_the_numbers_in_their_names(fold: str, labels: list[str]) -> None:
    assert labels_of(NAMES, fold) == labels


def test_a_fold_of_one_module_and_an_opened_one_are_their_modules() -> None:
    assert labels_of(["layers.0", "layers.1"], "blocks") == ["layers.0", "layers.1"]
    assert labels_of(["layers.0", "layers.1"], "stacks") == ["layers.*", "layers.*"]
    assert labels_of(NAMES, "blocks", ["layers.1.*"])[1:5] == ["layers.0.*", "layers.0.*", "layers.1.q", "layers.1.mlp.w1"]


def test_a_fold_shows_its_worst_module_in_each_cell() -> None:
    rows = arranged(SQNR, "blocks")
    assert rows.heat.modules == ("embed", "layers.0.*", "layers.1.*", "head") and rows.folds == ("layers.0.*", "layers.1.*")
    assert rows.heat.values.tolist() == [[31, 31], [31, 20], [29, 12], [31, 31]]
    assert [rows.names[i] for i in rows.worst[2]] == ["layers.1.q", "layers.1.mlp.w1"]
    assert rows.members[1] == ("layers.0.q", "layers.0.mlp.w1")


def test_nan_is_worse_than_any_number_and_what_was_not_recorded_better() -> None:
    states = np.array(
        [[FINITE, FINITE], [FINITE, MISSING], [INF, FINITE], [NAN, MISSING], [FINITE, FINITE], [FINITE, FINITE]], np.int8
    )
    nothing = float("nan")
    found = heat("amax", [[1, 1], [9, nothing], [8, 2], [nothing, nothing], [1e9, 3], [1, 1]], states=states)
    rows = arranged(found, "stacks")
    assert rows.heat.states is not None and rows.heat.states.tolist() == [[FINITE, FINITE], [NAN, FINITE], [FINITE, FINITE]]
    assert rows.heat.values[1, 1] == 3
    assert [row[:8] for row in arranged(found, order="worst").heat.modules[:2]] == ["layers.1", "layers.0"]


def test_rows_are_sorted_by_their_worst_cell_and_equal_ones_stay_in_execution_order() -> None:
    ordered = arranged(SQNR, order="worst").heat
    assert ordered.modules == ("layers.1.mlp.w1", "layers.0.q", "layers.1.q", "layers.0.mlp.w1", "embed", "head")
    assert ordered.values[0].tolist() == [31, 12]


@pytest.mark.parametrize(
    ("text", "num"), [("", 6), ("MLP", 2), ("*.q", 2), ("layers.[0]*", 2), ("q", 2), ("head ", 1), ("nothing", 0)]
)
def test_modules_are_chosen_by_a_part_of_their_name_or_a_pattern(text: str, num: int) -> None:
    assert arranged(SQNR, text=text).total == num == sum(is_chosen(name, text) for name in NAMES)


def test_rows_are_drawn_as_far_as_each_has_a_label_and_the_others_by_number() -> None:
    names = tuple(f"layers.{i}" for i in range(250))
    many = heat("sqnr_db", [[31.0]] * 250, names)
    assert default_fold(100) == "modules" and default_fold(101) == "blocks"
    first = arranged(many, "blocks")
    assert (len(first.heat.modules), first.first, first.total) == (MAX_ROWS, 0, 250)
    later = arranged(many, rows=(240, 700))
    assert later.heat.modules == names[240:] and later.first == 240
    assert arranged(many, rows=(9, 3)).heat.modules == ("layers.9",)
    assert arranged(many, rows=(900, 950)).heat.modules == ("layers.249",)


def test_marks_of_a_fold_are_those_of_its_modules() -> None:
    marks = (
        Mark(step=10, severity="warning", codes=("F105",), lines=("a",), module="layers.0.q"),
        Mark(step=10, severity="error", codes=("F101",), lines=("b",), module="layers.0.mlp.w1"),
        Mark(step=0, severity="info", codes=("F130",), lines=("c",), module="elsewhere"),
    )
    found = arranged(heat("sqnr_db", SQNR.values.tolist(), marks=marks), "blocks").heat.marks
    assert [(m.step, m.module, m.severity, m.codes, m.lines) for m in found] == [
        (10, "layers.0.*", "error", ("F101", "F105"), ("b", "a"))
    ]


def test_a_cell_holds_a_round_of_modules_that_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = build(tmp_path / "run", num_steps=60, every=2, modules=MODULES[:1])
    assert step_ranges.cell_width_of(run, 0, 59, 100) == 1
    run.manifest["turns"] = 8
    assert step_ranges.cell_width_of(run, 0, 59, 100) == 16
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 15)
    monkeypatch.setattr(step_ranges, "MOST_READ", 15)
    assert step_ranges.step_condition(run, 0, 59, is_thin=True)[1] == 3, "one in 2 sampled steps shows half of the modules alone"
