"""Sources and run_view runs: names, growth, verdicts, and the process that judges."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fp8debug import Run
from fp8debug.errors import RunError, UnknownNameError
from fp8debug_dashboard.pages import findings, heatmap
from fp8debug_dashboard.pages import module as module_page
from fp8debug_dashboard.web import run_view as opened_module
from fp8debug_dashboard.web import screens
from fp8debug_dashboard.web.app import settled_stamp
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import QUIET_S, ServedFolder, file_stamp, is_run, last_write, marks, state
from fp8debug_dashboard.web.triage_process import triage_in_process
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.synthetic import Override, Plan, write


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    return Run(folder / "sick")


def test_a_source_opens_runs_by_name_only(folder: Path) -> None:
    source = ServedFolder(folder)
    assert source.is_folder and set(source.names()) == {"sick", "healthy", "ranks", "no-loss", "empty", "<b>hostile<b>"}
    for name in ("../runs/sick", "sick/", "/etc", "notes", None, ""):
        with pytest.raises(UnknownNameError):
            source.folder(name)
    assert source.summary("empty").error and source.summary("sick").recipe == "tensorwise_delayed"


def test_a_source_that_is_nothing_says_so(tmp_path: Path) -> None:
    assert ServedFolder(tmp_path).names() == [], "an empty folder waits for its first run"
    (tmp_path / "notes.txt").write_text("no run")
    with pytest.raises(RunError, match="neither a run nor a folder of runs"):
        ServedFolder(tmp_path)
    with pytest.raises(RunError, match="no such folder"):
        ServedFolder(tmp_path / "x")


def test_a_run_is_opened_again_when_it_has_grown(folder: Path, tmp_path: Path) -> None:
    samples.write_healthy(tmp_path / "a", num_steps=20)
    source = ServedFolder(tmp_path / "a")
    first = source.open(None)
    assert not source.is_folder and source.open(None) is first and is_run(tmp_path / "a")
    (tmp_path / "a" / "rank=00000" / "more").write_text("x")
    assert source.open(None) is not first


def test_state_tells_writing_from_ended_and_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "healthy"
    assert state(path, {0: {"ended": "2026-01-01"}}) == "ended"
    monkeypatch.setattr("time.time", lambda: last_write(path) + QUIET_S - 1)
    assert state(path, {0: {"ended": None}}) == "writing"
    monkeypatch.setattr("time.time", lambda: last_write(path) + QUIET_S)
    assert state(path, {}) == "not closed" and file_stamp(path) == file_stamp(path)


def test_verdict_and_marks_come_from_triage(folder: Path, run: Run) -> None:
    run_view = RunView(run, "")
    judged = run_view.judge()
    assert judged.verdict == "error" and judged.findings[0].module == samples.SICK
    (mark,) = marks(judged.findings)
    assert mark.severity == "error" and mark.codes[0] == "F101" and samples.SICK in mark.lines[0]
    assert RunView(Run(folder / "healthy"), "").judge().verdict == "ok"


def test_modules_with_the_same_cause_are_marked_too(run: Run) -> None:
    finding = replace(RunView(run, "").judge().findings[0], also=("blocks.3.mlp.up",))
    assert [mark.module for mark in marks([finding], by_module=True)] == [samples.SICK, "blocks.3.mlp.up"]


def test_a_large_run_is_shown_before_it_is_judged(run: Run) -> None:
    run_view = RunView(run, "", size=1 << 40)
    assert run_view.judged().is_pending and run_view.judged().verdict == "unknown" and not run_view.is_triaged
    run_view.judge()
    assert run_view.judged().verdict == "error" and not run_view.judged().is_pending


def test_a_large_run_is_judged_in_a_process_of_its_own(folder: Path, tmp_path: Path) -> None:
    assert triage_in_process(folder / "sick")[0].module == samples.SICK
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(RunError, match="holds no recorded step"):
        triage_in_process(tmp_path)


def test_a_manual_page_is_as_wide_as_its_place() -> None:
    first, listed, last = findings.reflowed("Two lines\nof one sentence.\n- item 1: of\n  two lines\n- item 2\nAfter it.")
    assert (first.children, last.children) == ("Two lines of one sentence.", "After it.")
    assert [item.children for item in listed.children] == ["item 1: of two lines", "item 2"]
    assert findings.reflowed("") == []


#: A judge whose rules say that they look, and never end.
ENDLESS = """
import os, sys, threading, fp8debug
from fp8debug_dashboard.web import triage_process as judge

def look(path):
    os.write(int(sys.argv[1]), b"looking")
    threading.Event().wait()

fp8debug.triage = look
sys.exit(judge.main("run"))
"""


def test_the_process_that_judges_ends_with_the_server() -> None:
    (watched, held), (told, telling) = os.pipe(), os.pipe()
    command = [sys.executable, "-c", ENDLESS, str(telling)]
    with subprocess.Popen(command, stdin=watched, stdout=subprocess.PIPE, stderr=subprocess.PIPE, pass_fds=(telling,)) as judge:
        os.close(watched)
        os.close(telling)
        with os.fdopen(told, "rb", buffering=0) as said:
            assert said.read(7) == b"looking" and judge.poll() is None
            os.close(held)  # as when the server ends
            assert judge.communicate(timeout=60) == (b"", b"") and judge.returncode == 1


def test_a_run_that_grew_keeps_its_findings_until_the_rules_have_looked_again(run: Run) -> None:
    first = RunView(run, "")
    first.judge()
    again = RunView(run, "", size=1 << 40, verdicts=first.verdicts)
    assert again.judged().is_pending and again.judged().verdict == "error"
    overtaken = RunView(run, "", verdicts=first.verdicts, is_superseded=True)
    assert overtaken.judge() is first.latest() and not overtaken.is_triaged


def test_a_triage_that_fails_is_told_not_hidden(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: Any) -> Any:
        raise RunError("damaged")

    monkeypatch.setattr("fp8debug.triage", fail)
    run_view = RunView(run, "")
    judged = run_view.judge()
    assert (judged.verdict, judged.failure, run_view.fallbacks()) == ("unknown", "damaged", [])


def test_the_modules_of_a_large_run_are_listed_when_somebody_needs_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ServedFolder(folder / "sick").open(None)
    assert small.knows_modules and type(small.run) is Run
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    large = ServedFolder(folder / "sick").open(None)
    large.default_cast()
    large.training()
    waits = [large.knows_modules]
    assert large.run.sql("SELECT count(*) AS n FROM Modules").to_pylist() == [{"n": len(small.run.modules)}]
    waits.append(large.knows_modules)
    assert large.run.modules == small.run.modules
    large.run.refresh()
    assert [*waits, large.knows_modules] == [False, True, False]
    assert large.run.sql("SELECT * FROM modules") == small.run.sql("SELECT * FROM modules")


def test_damage_that_listing_the_modules_meets_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=40)
    part = next((tmp_path / "run").glob("rank=*/stats/part-*"))
    data = bytearray(part.read_bytes())
    data[4:2000] = b"\xff" * 1996
    part.write_bytes(data)
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    large = ServedFolder(tmp_path / "run").open(None)
    names = screens.module_names(large)
    assert names and large.run.problems == [f"{part} is damaged; its rows are left out"]
    assert "is damaged" in str(screens.problems(large)) and large.run.sql("SELECT 1 AS one FROM modules").num_rows == len(names)


def test_the_health_of_a_large_run_is_known_before_and_after_its_table_is_in_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table comes after the health was read of some steps: the overview had waited for good for that of all."""
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    large = ServedFolder(folder / "sick").open(None)
    assert not large.has_health()
    before = large.heat()
    assert large.has_health()
    large.load_cache()
    assert large._loading_cache is not None
    large._loading_cache.join()
    assert large.metric_cache is not None and large.has_health()
    assert set(large.heat().modules) == set(before.modules)


def queries_asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that each query of a run is added to from now on."""
    asked: list[str] = []
    ask, ask_for_row = Run.sql, Run.first_row

    def sql(self: Run, query: str, *params: Any) -> Any:
        asked.append(query)
        return ask(self, query, *params)

    def first_row(self: Run, query: str) -> Any:
        asked.append(query)
        return ask_for_row(self, query)

    monkeypatch.setattr(Run, "sql", sql)
    monkeypatch.setattr(Run, "first_row", first_row)
    return asked


def test_a_cast_that_was_in_force_between_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first, a middle and the last sampled step were listed of a large run: others were in no menu."""
    once = Override(slots={"cast_name": "e4m3fn tensorwise current"}, gemm="fprop", tensor="weight", steps=(20, 30))
    write(tmp_path / "run", Plan(num_steps=100, every=10, overrides=[once]))
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    large = ServedFolder(tmp_path / "run").open(None)
    assert ("e4m3fn tensorwise current", True) in large.casts()
    assert "e4m3fn tensorwise current" in str(heatmap.layout(View("heatmap", None, {}), large))


def test_what_the_first_click_on_a_large_run_asks_for_is_read_before(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The browser takes as long to paint the first page as the server to read the first heatmap."""
    monkeypatch.setattr(opened_module, "SMALL_BYTES", 0)
    monkeypatch.setattr(screens, "IDLE_S", 0.01)
    source = ServedFolder(folder / "sick")
    screens.go_ahead(source)
    asked = queries_asked(monkeypatch)
    heatmap.layout(View("heatmap", None, {}), source.open(None))
    assert [query for query in asked if "FROM steps" not in query] == []  # whether there are times and tokens


def test_what_no_reader_waits_for_begins_when_the_first_heatmap_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A click right after the first paint would share the cores with the import of all rules."""
    source, imported = ServedFolder(folder / "sick"), threading.Event()
    monkeypatch.setattr(screens, "import_rest", imported.set)
    asked = threading.Thread(target=settled_stamp, args=(View("overview", None, {}), source, False))
    with source.reading_on:
        asked.start()
        assert not imported.wait(0.2)
    asked.join()
    assert imported.is_set()


def test_another_site_or_cast_of_a_module_asks_the_files_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query has the rows of all sites of a step, one pass the histograms of all sites and casts."""
    run_view = ServedFolder(samples.write_sick(tmp_path / "run")).open(None)
    shown = {"module": samples.SICK, "step": "390"}
    module_page.settle(View("module", None, shown), run_view)
    module_page.parts(View("module", None, shown), run_view)
    asked = queries_asked(monkeypatch)
    for more in ({"site": "wgrad.input"}, {"site": "dgrad.weight", "cast": "e4m3fn tensorwise current"}):
        module_page.parts(View("module", None, {**shown, **more}), run_view)
    assert asked == []
    module_page.parts(View("module", None, {**shown, "step": "380"}), run_view)
    assert len(asked) == 1


def test_what_takes_long_leaves_a_core_to_the_pages(tmp_path: Path) -> None:
    run_view = ServedFolder(samples.write_healthy(tmp_path / "run", num_steps=20)).open(None)
    query = "SELECT CAST(current_setting('threads') AS INTEGER) AS n"
    of_pages, behind = (run.sql(query)["n"][0].as_py() for run in (run_view.run, run_view.second_connection()))
    assert behind == max(1, of_pages - 1)


def test_a_lock_that_its_writer_renews_is_no_new_state_of_a_run(tmp_path: Path) -> None:
    """Else a live run of hundreds of megabytes was judged again every ten seconds, though nothing was written."""
    path = samples.write_healthy(tmp_path / "live", num_steps=20, modules=samples.gpt_modules(1))
    before, long_ago = file_stamp(path), time.time() - 2 * QUIET_S
    for file in path.rglob("*"):
        os.utime(file, (long_ago, long_ago))
    stamp = file_stamp(path)
    assert stamp != before and state(path, {}) == "not closed"
    lock = path / "rank=00000" / "writer.lock"
    lock.write_text("{}")
    assert file_stamp(path) == stamp and last_write(path) == pytest.approx(long_ago, abs=1)
    assert state(path, {}) == "writing", "its writer lives, though it samples rarely"
    os.utime(lock, (long_ago, long_ago))
    assert state(path, {}) == "not closed"
