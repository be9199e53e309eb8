"""Parts are made beside the writing of rows, which does not wait for them, and before a writer is closed."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8debug.store import stream
from fp8debug.store.read.run import Run
from fp8debug.store.write import writer
from fp8debug.store.write.writer import RunWriter
from tests.store.recording import python, record, site_rows

REAL = stream.compact


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """What making a part waits for; parts have ten rows."""
    event = threading.Event()

    def held(path: Path, part: Path) -> None:
        assert event.wait(60)
        REAL(path, part)

    monkeypatch.setattr(stream, "compact", held)
    monkeypatch.setattr(writer, "PART_ROWS", 10)
    return event


def begun(run: Path, num_steps: int) -> RunWriter:
    """A writer that was handed three rows of each step, and not waited for."""
    opened = RunWriter(run, manifest={"modules": []})
    for step in range(num_steps):
        opened.stats(site_rows(step))
    return opened


def num_rows(run: Path) -> int:
    return int(Run(run).sql("SELECT count(*) AS n FROM raw").to_pylist()[0]["n"])


def test_rows_do_not_wait_for_a_part(tmp_path: Path, go: threading.Event) -> None:
    path, taken = tmp_path / "run", list[int]()
    folder = path / "rank=00000"
    opened = RunWriter(path, manifest={"modules": []})

    def rows(step: int) -> dict[str, Any]:
        taken.append(step)
        return site_rows(step)

    for step in range(20):
        opened.stats(lambda step=step: rows(step), 3)  # type: ignore[misc]
    assert opened._worker.wait(60) and taken == list(range(20)), "their memory is given back"
    assert not stream.parts(folder, "stats") and list(stream.streams(folder, "stats")) == [0, 1, 2, 3, 4]
    assert num_rows(path) == 60, "a reader finds them in the streams meanwhile"
    go.set()
    opened.flush()
    assert list(stream.parts(folder, "stats")) == [0, 1, 2, 3, 4] and not stream.streams(folder, "stats")
    opened.stats(site_rows(20))
    opened.close()
    assert opened.stopped is None and num_rows(path) == 63
    assert not list(path.rglob("*.arrows"))


def test_a_writer_is_closed_when_its_parts_are_made(tmp_path: Path, go: threading.Event) -> None:
    opened = begun(tmp_path / "run", 20)
    threading.Timer(0.3, go.set).start()
    opened.close()
    assert opened.stopped is None and not opened._worker.is_alive
    assert num_rows(tmp_path / "run") == 60 and not list((tmp_path / "run").rglob("*.arrows"))
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("fp8debug-")] == []


def test_a_part_is_on_the_disk_by_name_before_its_stream_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, done = tmp_path / "run" / "rank=00000", list[tuple[Any, ...]]()
    opened = record(tmp_path / "run", range(3))

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *to: Path, **options: Any) -> Any:
            done.append((name, *to) if to else (name, path))
            return real(path, *to, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(stream, "sync", noted("sync", stream.sync))
        patch.setattr(Path, "replace", noted("replace", Path.replace))
        patch.setattr(Path, "unlink", noted("unlink", Path.unlink))
        opened.close()
    part, start = stream.part_path(folder, "stats", 0), done.index(("sync", folder))  # the name of stats/
    temporary = part.with_name(f".{part.name}.tmp")
    assert done[start : start + 6] == [
        ("sync", folder),
        ("sync", temporary),
        ("replace", part),
        ("sync", part.parent),
        ("unlink", temporary),
        ("unlink", stream.stream_path(folder, "stats", 0)),
    ]


@pytest.mark.parametrize(("number", "is_fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_file_systems_that_do_not_synchronize_folders_record_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_fatal: bool
) -> None:
    real = stream.sync

    def sync(path: Path) -> None:
        if path.is_dir():
            raise OSError(number, os.strerror(number))
        real(path)

    monkeypatch.setattr(stream, "sync", sync)
    opened = record(tmp_path / "run", range(3))
    opened.close()
    assert opened.stopped == (os.strerror(number) if is_fatal else None)
    assert Run(tmp_path / "run").sql("SELECT DISTINCT step FROM raw ORDER BY step").column("step").to_pylist() == [0, 1, 2]


def test_a_disk_that_makes_each_part_in_time_is_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path, part: Path) -> None:
        time.sleep(0.4)
        REAL(path, part)

    monkeypatch.setattr(stream, "compact", slow)
    monkeypatch.setattr(writer, "PART_ROWS", 10)
    monkeypatch.setattr(writer, "CLOSE_PATIENCE_S", 1.0)
    opened = begun(tmp_path / "run", 20)
    start = time.monotonic()
    opened.close()
    assert time.monotonic() - start > 1.5 and capfd.readouterr().err == ""
    assert num_rows(tmp_path / "run") == 60 and not list((tmp_path / "run").rglob("*.arrows"))


def test_a_disk_that_hangs_over_a_part_is_not_waited_for_longer_than_any(
    tmp_path: Path, go: threading.Event, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CLOSE_PATIENCE_S", 0.3)
    opened = begun(tmp_path / "run", 5)
    start = time.monotonic()
    opened.close()
    assert time.monotonic() - start < 20
    assert (
        capfd.readouterr().err == f"fp8debug: gave up waiting for {opened.path}: nothing got done; the last rows may be missing\n"
    )
    assert num_rows(tmp_path / "run") == 15, "the streams hold them"
    go.set()
    assert opened._worker.end(60)


def test_a_part_that_cannot_be_made_stops_the_recording_and_loses_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(path: Path, part: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stream, "compact", failing)
    monkeypatch.setattr(writer, "PART_ROWS", 10)
    opened = record(tmp_path / "run", range(5))
    opened.flush()
    text = "recording stopped: No space left on device"
    assert capfd.readouterr().err == f"fp8debug: {text}\n" and opened.stopped == "No space left on device"
    opened.stats(site_rows(5))
    opened.close()
    run = Run(tmp_path / "run")
    assert run.sql("SELECT count(*) AS n, max(step) AS last FROM raw").to_pylist() == [{"n": 15, "last": 4}]
    assert run.sql("SELECT kind, message FROM events").to_pylist() == [{"kind": "recording", "message": text}]
    assert capfd.readouterr().err == ""


def test_what_a_killed_process_left_holds_no_rows_up(tmp_path: Path, go: threading.Event) -> None:
    path = tmp_path / "run"
    assert python("record(path, range(4)); os._exit(9)", path).returncode == 9
    opened = RunWriter(path, manifest={"modules": []}, resume=True)
    opened.stats(site_rows(4))
    assert opened._worker.wait(60) and num_rows(path) == 15
    go.set()
    opened.close()
    assert num_rows(path) == 15 and not list(path.rglob("*.arrows"))
