"""The list of runs: read and judged in the background, live ones first, with chosen settings as columns."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest

from fp8debug_dashboard.data.run_settings import choices, settings_of
from fp8debug_dashboard.pages import runs
from fp8debug_dashboard.web import source as sources
from fp8debug_dashboard.web.screens import live_text
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.synthetic import Plan, write

NAMES = ("a", "b", "c", "d")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four runs of one block that differ in a learning rate; "d" is the newest, "a" is being written."""
    root = tmp_path_factory.mktemp("sweep")
    for i, name in enumerate(NAMES):
        samples.write_healthy(root / name, num_steps=20, modules=samples.gpt_modules(1))
        manifest = root / name / "manifest.json"
        document = json.loads(manifest.read_text())
        document["argv"] = ["train.py", "--lr", f"{10.0**-i}", "optimizer=adam", "--compile"]
        manifest.write_text(json.dumps(document))
        for file in (root / name).rglob("*"):
            os.utime(file, (time.time() - 60 + i,) * 2)
    for file in (root / "a").glob("rank=*/manifest.json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "ended": False}))
        os.utime(file, (time.time() - 50,) * 2)
    return root


def test_the_head_counts_the_runs(tmp_path: Path) -> None:
    told = []
    for number in range(3):
        told.append(live_text(View("overview", None, {}), ServedFolder(tmp_path)))
        write(tmp_path / f"run-{number}", Plan(num_steps=1))
    assert told == ["0 runs", "1 run", "2 runs"]


def test_the_list_does_not_wait_for_all_runs_to_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, gate, summary = ServedFolder(folder), threading.Event(), ServedFolder.summary

    def slow(self: ServedFolder, name: str) -> object:
        if name not in ("a", "d"):
            gate.wait(60)
        return summary(self, name)

    monkeypatch.setattr(ServedFolder, "summary", slow)
    found = {row["name"]: row for row in runs.parts(source, 1.0)}
    assert found.keys() == set(NAMES) and found["c"]["state"] == found["c"]["finding"] == runs.READING
    before = source.stamp(None)
    gate.set()
    found = {row["name"]: row for row in runs.parts(source, 60)}
    assert {row["state"] for row in found.values()} == {"ended", "writing"} and source.stamp(None) != before


def test_a_live_run_is_judged_before_those_that_have_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, judged = ServedFolder(folder), []
    judge = ServedFolder._judge

    def noted(self: ServedFolder, name: str) -> None:
        if self is source:  # others may still be at work in the background
            judged.append(name)
        judge(self, name)

    monkeypatch.setattr(ServedFolder, "_judge", noted)
    assert source.judge_all(60) and judged == ["a", "d", "c", "b"]
    assert not source.judge_all(60) and len(judged) == 4
    rows = {row["name"]: row for row in runs.parts(source, 60)}
    assert {row["severity"] for row in rows.values()} == {"ok"}
    assert len(source._opened) == 0, "the list keeps no run open"
    assert source.open("b").is_triaged, "what the list concluded is known to the run's pages"


def test_a_live_run_that_grows_while_it_is_read_is_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, summary, read = ServedFolder(folder), ServedFolder.summary, []
    growing = next((folder / "a").glob("rank=*/manifest.json"))

    def grown(self: ServedFolder, name: str) -> object:
        found = summary(self, name)
        if self is source:
            read.append(name)
            if name == "a" and len(read) < 40:  # as a training writes on
                os.utime(growing, (time.time() - 50 + len(read),) * 2)
        return found

    order: list[tuple[str, int]] = []
    judge = ServedFolder._judge

    def noted(self: ServedFolder, name: str) -> None:
        if self is source:
            order.append((name, read.count("a")))
        judge(self, name)

    monkeypatch.setattr(ServedFolder, "summary", grown)
    monkeypatch.setattr(ServedFolder, "_judge", noted)
    source.judge_all(60)
    assert order[0] == ("a", 1), "after it was read once"
    known = source.known("a")
    assert known is not None and known.verdict == "ok"


def test_who_waits_is_told_of_the_first_verdict(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, gate, judge = ServedFolder(folder), threading.Event(), ServedFolder._judge

    def slow(self: ServedFolder, name: str) -> None:
        if self is source and name != "a":
            gate.wait(60)
        judge(self, name)

    monkeypatch.setattr(ServedFolder, "_judge", slow)
    begun, told = time.monotonic(), list[bool]()
    other = threading.Thread(target=lambda: told.append(source.judge_all(50, until_new=True)))
    other.start()
    assert source.judge_all(50, until_new=True) and time.monotonic() - begun < 40
    other.join()
    assert told == [True] and time.monotonic() - begun < 40, "both who wait are told"
    found = {row["name"]: row["severity"] for row in runs.parts(source)}
    assert found == {"a": "ok", "b": "unknown", "c": "unknown", "d": "unknown"}
    gate.set()
    source.judge_all(60)


def test_live_runs_leave_the_others_their_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, judge, order = ServedFolder(folder), ServedFolder._judge, []
    growing = next((folder / "a").glob("rank=*/manifest.json"))
    monkeypatch.setattr(sources, "REJUDGE_S", 0.0)  # as where judging takes longer

    def grown(self: ServedFolder, name: str) -> None:
        judge(self, name)
        if self is source:
            order.append(name)
            if len(order) < 12:
                os.utime(growing, (time.time() - 50 + len(order),) * 2)

    monkeypatch.setattr(ServedFolder, "_judge", grown)
    source.judge_all(60)
    assert order[:6] == ["a", "d", "a", "c", "a", "b"]


def test_few_runs_are_kept_open(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_OPEN", 2)
    source = ServedFolder(folder)
    first = source.open("a")
    source.open("b")
    assert source.open("a") is first
    source.open("c")
    assert list(source._opened) == ["a", "c"] and source.open("b") is not None


def test_a_run_that_was_being_written_and_is_silent_is_not_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ServedFolder(folder)
    assert {row["name"]: row["state"] for row in runs.parts(source, 60)}["a"] == "writing"
    monkeypatch.setattr(runs, "QUIET_S", 0)
    assert {row["name"]: row["state"] for row in runs.parts(source)}["a"] == "not closed"


def test_settings_are_columns_where_the_url_asks_for_them(folder: Path) -> None:
    source = ServedFolder(folder)
    rows = runs.parts(source, 60)
    columns, options = runs.configured(View("overview", None, {"columns": "--lr~optimizer"}), source)
    assert [group["group"] for group in options] == ["differ between the runs", "same in all runs"]
    assert "--lr" in [item["value"] for item in options[0]["items"]]
    names = [column["headerName"] for column in columns]
    assert names[3:8] == ["First finding", "Recipe", "--lr", "optimizer", "Last step"]
    field = columns[5]["field"]
    assert {row["name"]: row[field] for row in rows} == {"a": 1.0, "b": 0.1, "c": 0.01, "d": 0.001}
    assert all("." not in str(column.get("field")) for column in columns)
    assert all(row["line"].startswith("data:image/svg") and row["lineWords"].startswith("loss ") for row in rows)


def test_settings_come_from_the_options_and_the_environment() -> None:
    argv = ["train.py", "--lr=3e-4", "--name", "x", "--flag", "--steps", "10", "model.width=8", "data.bin", "--steps", "20"]
    found = settings_of({"argv": argv, "every": 10, "what_if": [], "environment": {"torch": "2.9", "device": None}, "git": None})
    assert found == {
        "--lr": 3e-4,
        "--name": "x",
        "--flag": "yes",
        "--steps": 20.0,
        "model.width": 8.0,
        "every": 10.0,
        "environment.torch": 2.9,
    }
    assert settings_of({"argv": "no list", "environment": 3}) == {}
    assert choices([{"a": 1, "b": 2}, {"a": 1, "c": "x"}]) == (["b", "c"], ["a"])
