"""Failures under a writer: training goes on, is told once, and finds an event of it where one can be written."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import subprocess
import sys
import threading
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fp8debug.errors import RecordError
from fp8debug.store import stream
from fp8debug.store.read.run import Run
from fp8debug.store.write import lock, writer
from fp8debug.store.write.writer import RunWriter
from tests.store.recording import PRELUDE, record, site_rows


def events(path: Path) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in Run(path).sql("SELECT step, kind, message FROM events").to_pylist()]


class TestDisk:
    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
    def test_any_error_of_the_file_system_is_one_line_and_an_event(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        opened = record(tmp_path / "run", range(2))
        real = os.write

        def failing(descriptor: int, data: Any) -> int:
            if len(data) > 2000:  # a block does not fit any more, a line does
                raise OSError(code, os.strerror(code))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", failing)
        for step in range(2, 9):
            opened.stats(site_rows(step))
        opened.flush()
        monkeypatch.undo()
        opened.close()
        text = f"recording stopped: {os.strerror(code)}"
        assert capfd.readouterr().err == f"fp8debug: {text}\n"
        assert Run(tmp_path / "run").steps_range == (0, 1)
        assert events(tmp_path / "run") == [(2, "recording", text)]

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
    def test_a_disk_that_is_full_when_a_part_is_written_is_said_alike(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        opened = record(tmp_path / "run", range(2))
        part = tmp_path / "run" / "rank=00000" / "stats" / "part-00000.parquet"
        part.parent.mkdir()
        part.with_name(f".{part.name}.tmp").symlink_to("/dev/full")
        opened.close()
        assert capfd.readouterr().err == f"fp8debug: recording stopped: {os.strerror(errno.ENOSPC)}\n"
        assert Run(tmp_path / "run").steps_range == (0, 1), "its stream is left"
        assert not list(part.parent.iterdir())

    def test_a_disk_that_hangs_holds_up_nobody(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "CLOSE_PATIENCE_S", 0.2)
        go, real = threading.Event(), stream.Stream.append

        def hanging(self: stream.Stream, batch: Any) -> None:
            go.wait(60)
            real(self, batch)

        monkeypatch.setattr(stream.Stream, "append", hanging)
        opened = RunWriter(tmp_path / "run", manifest={})
        for step in range(100):
            opened.stats(site_rows(step))
        opened.close()
        said = capfd.readouterr().err.splitlines()
        assert said[-1] == f"fp8debug: gave up waiting for {tmp_path}/run: nothing got done; the last rows may be missing"
        go.set()

    def test_a_folder_that_does_not_answer_at_the_start(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "OPEN_PATIENCE_S", 0.1)
        monkeypatch.setattr(writer, "SILENCE_S", 0.1)
        go = threading.Event()
        monkeypatch.setattr(RunWriter, "_open", lambda self, resume: go.wait(60))
        opened = RunWriter(tmp_path / "run", manifest={})
        assert not opened.stats(site_rows(0))
        go.set()
        opened.close()
        assert capfd.readouterr().err == f"fp8debug: not recorded: {tmp_path}/run does not answer\n"

    def test_what_waits_is_bounded_in_rows_too(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "MAX_WAITING_ROWS", 1000)
        go, called = threading.Event(), []

        def rows(step: int) -> dict[str, Any]:
            called.append(step)
            go.wait(60)
            return site_rows(step, 400)

        opened = RunWriter(tmp_path / "run", manifest={})
        taken = [opened.stats(lambda step=step: rows(step), 400) for step in range(8)]  # type: ignore[misc]
        go.set()
        opened.close()
        assert taken == [True, True] + [False] * 6 and called == [0, 1] and opened.num_dropped == 6
        assert "6 writings were dropped" in capfd.readouterr().err
        assert events(tmp_path / "run") == [(1, "recording", "6 writings were dropped because the disk was too slow")]


class TestThread:
    def test_a_thread_that_dies_is_said_once(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        opened = record(tmp_path / "run", range(2))
        thread = opened._worker._thread
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)) == 1
        while thread.is_alive():
            opened.flush()  # something to do, after which the exception arrives
        opened.stats(site_rows(3))
        opened.flush()
        opened.close()
        (line,) = capfd.readouterr().err.splitlines()
        assert line.startswith("fp8debug: recording stopped: SystemExit")
        assert Run(tmp_path / "run").steps_range[0] == 0

    def test_rows_that_cannot_be_made_stop_the_recording(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        opened = record(tmp_path / "run", range(2))
        assert opened.stats(lambda: {"step": [1 // 0]}, 1)
        opened.flush()
        opened.close()
        text = "recording stopped: ZeroDivisionError: integer division or modulo by zero"
        assert capfd.readouterr().err == f"fp8debug: {text}\n"
        assert events(tmp_path / "run") == [(1, "recording", text)]


class TestClock:
    def test_a_clock_that_steps_back_mixes_nothing_up(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Clock(datetime):
            offset = timedelta()

            @classmethod
            def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]  # a plain datetime, as Arrow wants it
                return datetime.now(tz) + cls.offset

        monkeypatch.setattr(writer, "datetime", Clock)
        opened = record(tmp_path / "run", range(3))
        Clock.offset = -timedelta(days=400)
        for step in range(3, 6):
            opened.steps({"step": step})
            opened.stats(site_rows(step))
        opened.close()
        assert opened.stopped is None
        run = Run(tmp_path / "run")
        rows = run.sql("SELECT step, time FROM steps ORDER BY step").to_pylist()
        assert [row["step"] for row in rows] == list(range(6)) and rows[0]["time"] > rows[5]["time"]
        record(tmp_path / "run", range(4, 5), resume=True).close()
        assert Run(tmp_path / "run").sql("SELECT step FROM steps ORDER BY step").to_pydict()["step"] == list(range(5))


class TestTwoProcesses:
    SECOND = (
        "from fp8debug.store.write.writer import RunWriter\n"
        "w = RunWriter(path, manifest={}, resume='resume' in sys.argv)\n"
        "for step in range(5): w.stats(site_rows(step)); w.steps({'step': step})\n"
        "w.close(); print(w.stopped is not None)\n"
    )

    @pytest.mark.parametrize("option", ["anew", "resume"])
    def test_the_second_goes_on_unrecorded_and_the_first_is_not_spoilt(self, tmp_path: Path, option: str) -> None:
        first = record(tmp_path / "run", range(3))
        command = [sys.executable, "-c", PRELUDE + self.SECOND, str(tmp_path / "run"), option]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        assert done.stderr.startswith(f"fp8debug: not recorded: {tmp_path}/run is written by another process that runs (process ")
        assert f"process {os.getpid()} on " in done.stderr and len(done.stderr.splitlines()) == 1
        first.stats(site_rows(3))
        first.close()
        assert first.stopped is None
        assert Run(tmp_path / "run").sql("SELECT count(*) AS n FROM raw").to_pylist() == [{"n": 12}]

    def test_a_killed_process_blocks_nobody(self, tmp_path: Path) -> None:
        command = [sys.executable, "-c", PRELUDE + "record(path, range(3)); os._exit(9)", str(tmp_path / "run")]
        assert subprocess.run(command, timeout=120).returncode == 9
        assert (tmp_path / "run/rank=00000" / lock.NAME).exists()
        opened = record(tmp_path / "run", range(3, 5), resume=True)
        opened.close()
        assert opened.stopped is None and not (tmp_path / "run/rank=00000" / lock.NAME).exists()
        assert Run(tmp_path / "run").steps_range == (0, 4)

    def test_the_same_process_twice_is_a_mistake(self, tmp_path: Path) -> None:
        first = record(tmp_path / "run", range(1))
        with pytest.raises(RecordError, match=r"records into .*run already; close\(\) the first watch"):
            RunWriter(tmp_path / "run", manifest={}, resume=True)
        first.stats(site_rows(1))
        first.close()
        assert first.stopped is None and Run(tmp_path / "run").steps_range == (0, 1)

    def test_the_ranks_of_a_job_share_a_folder_and_another_job_does_not(self, tmp_path: Path) -> None:
        ranks = [record(tmp_path / "run", range(2), rank=rank, world_size=3) for rank in (0, 2, 1)]
        assert [opened.stopped for opened in ranks] == [None] * 3
        command = [sys.executable, "-c", PRELUDE + self.SECOND.replace("manifest", "rank=4, world_size=8, manifest")]
        done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
        for opened in ranks:
            opened.close()
        assert Run(tmp_path / "run").ranks == [0, 1, 2] and not list((tmp_path / "run/rank=00004").iterdir())

    def test_a_folder_taken_over_is_left(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        opened = record(tmp_path / "run", range(2))
        path = tmp_path / "run/rank=00000" / lock.NAME
        path.write_text(path.read_text().replace('"pid"', '"pid": 1, "was"'))
        opened._worker.put(opened._beat)
        opened.flush()
        opened.close()
        assert opened.stopped == f"another process has taken {tmp_path}/run over"
        assert path.exists() and "recording stopped: another process" in capfd.readouterr().err


class TestLock:
    def foreign(self, folder: Path, **changes: Any) -> Path:
        owner = {"host": "node7", "system": "another boot", "pid": 1, "start": "5", "job": "1", "since": "then"}
        path = folder / lock.NAME
        path.write_text(json.dumps({**owner, **changes}))
        return path

    def test_one_of_another_host_that_beats_is_respected(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        path, done = self.foreign(tmp_path), threading.Event()

        def beat() -> None:
            while not done.wait(0.05):
                os.utime(path)

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            with pytest.raises(lock.OccupiedError, match="process 1 on node7, since then"):
                lock.Lock(tmp_path)
        finally:
            done.set()
            thread.join()
        assert "was left locked by process 1 on node7, since then; looking for 30 s whether it lives" in capfd.readouterr().err

    @pytest.mark.parametrize("changes", [{}, {"pid": "x"}, {"since": 7}])
    def test_one_of_another_host_that_is_silent_is_not(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], changes: dict[str, Any]
    ) -> None:
        monkeypatch.setattr(lock, "SILENCE_S", 0.1)
        path = self.foreign(tmp_path, **changes)
        os.utime(path, (2**32, 2**32))  # its clock was ahead by a lifetime
        held = lock.Lock(tmp_path)
        assert held.renew()
        with pytest.raises(lock.OccupiedError):
            lock.check_is_free(tmp_path)
        held.release()
        assert list(tmp_path.iterdir()) == []

    def test_a_process_id_that_was_given_out_again_is_not_its_owner(self, tmp_path: Path) -> None:
        first = lock.Lock(tmp_path)
        text = json.loads((tmp_path / lock.NAME).read_text())
        parent = lock._start_of(os.getppid())
        (tmp_path / lock.NAME).write_text(json.dumps({**text, "pid": os.getppid(), "start": parent + "0"}))
        lock.check_is_free(tmp_path)
        assert not first.renew()
        (tmp_path / lock.NAME).write_text(json.dumps({**text, "pid": os.getppid(), "start": parent}))
        with pytest.raises(lock.OccupiedError, match=f"process {os.getppid()} on "):
            lock.check_is_free(tmp_path)

    def test_a_file_system_without_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*paths: Any) -> None:
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
        held = lock.Lock(tmp_path)
        with pytest.raises(lock.OccupiedError):
            lock.Lock(tmp_path)
        held.release()
        assert list(tmp_path.iterdir()) == []
