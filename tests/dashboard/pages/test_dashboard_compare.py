"""Two to eight runs beside one reference: each is judged by itself, and what is left out is named."""

from __future__ import annotations

from typing import Any

import pytest

from fp8debug_dashboard.pages import compare
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.dashboard.data.test_dashboard_nonfinite import text

SMALL = samples.gpt_modules(1)
SICK = "blocks.0.mlp.gate"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ServedFolder:
    """Nine healthy runs of one block, one whose scale goes stale at step 60, and a folder that is no readable run."""
    root = tmp_path_factory.mktemp("compared")
    for i in range(8):
        samples.write_healthy(root / f"ok{i}", num_steps=20, modules=SMALL)
    long: dict[str, Any] = {"num_steps": 400, "every": 20, "modules": SMALL}
    samples.write_healthy(root / "good", **long)
    sick: dict[str, Any] = {
        "overrides": samples.stale_scale(SICK),
        "recipe": "tensorwise_delayed",
        "what_if": ("tensorwise_current",),
    }
    samples.write_healthy(root / "sick", **long, **sick)
    (root / "broken").mkdir()
    (root / "broken" / "manifest.json").write_text("{")
    return ServedFolder(root)


def view(run: str, *others: str, **params: str) -> View:
    return View("compare", run, {"with": "/".join(others), **params})


def names(shown: View, run_view: RunView) -> tuple[str | None, list[str]]:
    runs = compare.chosen(shown, run_view)
    return (None if runs.reference is None else runs.reference.name), [one.name for one in runs.judged]


def test_each_run_is_judged_against_one_reference(source: ServedFolder) -> None:
    run_view = source.open("sick")
    shown = view("sick", "good", "ok0")
    assert names(shown, run_view) == ("good", ["sick", "ok0"])
    assert names(view("sick", "good", "ok0", reference="sick"), run_view) == ("sick", ["good", "ok0"])
    assert compare.is_pending(shown, run_view)
    compare.settle(shown, run_view)
    assert not compare.is_pending(shown, run_view)
    about, figure, settings, rows, site = compare.parts(shown, run_view)
    said = text(about)
    assert "good -> sick, " in said and "good -> ok0, " in said
    assert len(settings) == 2 and "good -> ok0: no difference" in text(settings[1])
    assert any(str(trace.get("name")) == "good (reference)" for trace in figure.data)
    # Of two recipes every site differs from the first step on; the first divergence is where triage has the fault begin.
    assert f"triage of sick: F101 stale-scale-saturation at {SICK} fprop input from step" in said
    assert (rows[0]["run"], rows[0]["module"], rows[0]["site"]) == ("sick", SICK, "fprop input")
    assert rows[0]["what"].startswith("origin (triage); ")
    assert any(str(trace.get("name")).startswith(f"sick: {SICK} fprop input") for trace in site.data)


def test_what_cannot_be_compared_is_named(source: ServedFolder) -> None:
    run_view = source.open("good")
    assert names(view("good", "ok0", "ok0", "good"), run_view) == ("ok0", ["good"])
    runs = compare.chosen(view("good", "nope", "broken", "ok1"), run_view)
    assert runs.problems[0] == "No run 'nope' in this folder." and runs.problems[1].startswith("broken cannot be read: ")
    assert [one.name for one in runs.all] == ["ok1", "good"]
    many = [f"ok{i}" for i in range(8)]
    runs = compare.chosen(view("good", *many, "sick"), run_view)
    assert len(runs.all) == compare.MAX_RUNS == 8
    assert runs.problems == ("8 runs are compared at a time; left out: ok7, sick.",)
    about, *_ = compare.parts(view("good", "nope"), run_view)
    assert "No run 'nope' in this folder." in text(about)


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> ServedFolder:
    """A reference, a shorter run, one that is lost to NaN, one of another model, and one without losses."""
    root, modules = tmp_path_factory.mktemp("unlike"), samples.gpt_modules(2)
    samples.write_healthy(root / "good", num_steps=120, every=10)
    samples.write_healthy(root / "short", num_steps=40, every=10)
    samples.write_nan(root / "nan", num_steps=120)
    samples.write_healthy(root / "other", num_steps=120, every=10, modules=[(f"other.{name}", k, n) for name, k, n in modules])
    samples.write_healthy(root / "no-loss", num_steps=120, every=10, steps={step: {"loss": None} for step in range(120)})
    return ServedFolder(root)


def test_what_was_not_compared_is_not_called_healthy(unlike: ServedFolder) -> None:
    run_view, shown = unlike.open("good"), view("good", "short", "nan", "other", "no-loss", reference="good")
    compare.settle(shown, run_view)
    about, _, _, rows, site = compare.parts(shown, run_view)
    assert "other: no such module" in [str(trace.get("name")) for trace in site.data]
    said = [text(line) for line in about]
    (other,) = [line for line in said if "good -> other, none compared: no site" in line]
    (lost,) = [line for line in said if "good -> no-loss, " in line and "sites" not in line]
    assert other[0] == lost[0] == "?"
    words = "short is recorded up to step 39, good up to step 119: what comes after step 39 was not compared."
    assert any(words in line for line in said) and sum("was not compared" in line for line in said) == 1
    assert rows[0]["run"] == "nan"


def test_the_first_divergence_of_each_run_comes_before_the_others(source: ServedFolder) -> None:
    run_view, shown = source.open("sick"), view("sick", "good", "ok0", reference="ok0")
    compare.settle(shown, run_view)
    rows = compare.parts(shown, run_view)[3]
    firsts = list(dict.fromkeys(row["run"] for row in rows))
    assert [row["run"] for row in rows[: len(firsts)]] == firsts
