"""The parity page: two runs side by side, the report of two dumps, and a report that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fp8debug.parity import compare_paths
from fp8debug_dashboard.pages import parity
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.bench.parity import compared
from tests.dashboard import samples
from tests.synthetic import Override


def words(part: Any) -> str:
    return json.dumps(part, default=lambda one: one.to_plotly_json())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("train", "rollout"):
        samples.write_healthy(tmp_path / name, every=10)
    return tmp_path


def test_two_runs_are_compared_when_one_is_chosen(folder: Path) -> None:
    run_view = ServedFolder(folder).open("train")
    about, _, rows = parity.parts(View("parity", "train", {}), run_view)
    assert "Choose the run of the rollout" in words(about) and not rows
    view = View("parity", "train", {"with": "rollout"})
    assert parity.is_pending(view, run_view)
    parity.settle(view, run_view)
    about, figure, rows = parity.parts(view, run_view)
    assert not parity.is_pending(view, run_view) and rows
    assert [row["place"] for row in rows] == list(range(len(rows)))
    assert "modules compared; none differs beyond noise" in words(about) and figure.data
    assert figure.layout["meta"]["about"] == ["train", "with rollout", "relative difference of paths"]
    assert parity.layout(view, run_view) is not None


def test_what_a_comparison_of_runs_leaves_out_is_told(tmp_path: Path) -> None:
    samples.write_healthy(tmp_path / "train", every=10)
    samples.write_nan(tmp_path / "nan")
    lost = Override(module="*", actual=None, slots=samples.LOST, steps=(0, None))
    samples.write_healthy(tmp_path / "lost", every=10, overrides=[lost])
    run_view = ServedFolder(tmp_path).open("train")
    told = {}
    for name in ("nan", "lost"):
        view = View("parity", "train", {"with": name})
        parity.settle(view, run_view)
        told[name] = words(parity.parts(view, run_view)[0])
    assert "only the first sampled step of each (step 0) is compared" in told["nan"] and "none differs" in told["nan"]
    assert (
        f"the rollout has NaN or Inf later, first in {samples.NAN_MODULE} fprop.weight at step {samples.NAN_STEP}" in told["nan"]
    )
    assert "its output in the rollout has NaN or Inf, and not in the other path" in told["lost"]
    assert "none differs" not in told["lost"]
    assert "Not compared: 9 modules whose input and output have no finite number in both paths" in told["lost"]
    blind = [{"module": "a", "input_nmse": None, "output_nmse": None}]
    lines = words(parity.lines_of({"findings": [], "modules": blind, "unmatched": [], "metrics": {}, "problems": []}))
    assert "No module could be compared" in lines and "none differs" not in lines


def test_what_the_page_does_not_list_is_counted(folder: Path) -> None:
    view, run_view = View("parity", "train", {"with": "rollout"}), ServedFolder(folder).open("train")
    found: Any = parity.settle(view, run_view)
    told = {"severity": "error", "code": "P101", "message": "differs", "cure": "none", "module": None}
    lines = words(parity.lines_of({**found, "findings": [told] * 23, "problems": ["a problem"] * 21}))
    assert "3 findings more" in lines and "1 note more" in lines
    assert "more: " not in words(parity.lines_of(found))


def test_the_report_of_two_dumps_is_shown_with_its_culprit(folder: Path, tmp_path: Path) -> None:
    compared("gpt", "scale x2", 0, tmp_path / "dumps")
    report = compare_paths(tmp_path / "dumps" / "train", tmp_path / "dumps" / "rollout")
    (folder / "train" / "parity.json").write_text(report.to_json())
    run_view, view = ServedFolder(folder).open("train"), View("parity", "train", {})
    parity.settle(view, run_view)
    about, figure, rows = parity.parts(view, run_view)
    assert report[0].message in words(about)
    (row,) = [row for row in rows if row["cause"]]
    assert (row["module"], row["cause"]) == (report[0].module, "F302")
    assert any(shape["x0"] == row["place"] for shape in figure.layout["shapes"])


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"modules": 3, "findings": []}', '{"modules": [3], "findings": [{"severity": "<b>"}]}']
)
def test_a_file_that_is_no_report_is_one_line(text: str, folder: Path) -> None:
    (folder / "train" / "parity.json").write_text(text)
    run_view, view = ServedFolder(folder).open("train"), View("parity", "train", {})
    parity.settle(view, run_view)
    about, _, rows = parity.parts(view, run_view)
    assert not rows and about is not None


def test_modules_of_one_path_alone_are_listed_and_counted(folder: Path, tmp_path: Path) -> None:
    compared("gpt", "scale x2", 0, tmp_path / "dumps")
    report = compare_paths(tmp_path / "dumps" / "train", tmp_path / "dumps" / "rollout").to_dict()
    report["problems"] = ["a.safetensors cannot be read: cut off"]
    report["unmatched"] = [{"module": f"mtp.{n}", "path": "training"} for n in range(5)] + [{"module": "k", "path": "rollout"}, 3]
    (folder / "train" / "parity.json").write_text(json.dumps(report))
    run_view, view = ServedFolder(folder).open("train"), View("parity", "train", {})
    parity.settle(view, run_view)
    about, _, rows = parity.parts(view, run_view)
    assert "Not compared: 5 modules of the training that the rollout does not have (mtp.0, mtp.1, mtp.2 ...)." in words(about)
    assert "Not compared: 1 module of the rollout that the training does not have (k)." in words(about)
    assert "Note: a.safetensors cannot be read: cut off." in words(about)
    alone = [(row["module"], row["rollout_module"]) for row in rows if row["cause"] == "not compared"]
    assert alone == [*((f"mtp.{n}", "") for n in range(5)), ("", "k")]
