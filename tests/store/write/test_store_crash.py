"""A killed process, a full disk, a slow disk, a forked child, a job that resumes: what was recorded stays readable."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fp8debug.store import stream
from fp8debug.store.read.run import Run
from fp8debug.store.write import writer
from fp8debug.store.write.writer import RunWriter
from tests.store.recording import PRELUDE, names_below, python, record, site_rows


class TestCrashes:
    def test_a_killed_process_loses_at_most_the_step_in_flight(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        code = "w = record(path, range(3))\nprint('ready', flush=True)\n"
        code += "for step in range(3, 10**6): w.stats(site_rows(step)); w.flush(); print(step, flush=True)\n"
        command = [sys.executable, "-c", PRELUDE + code, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            seen = [int(process.stdout.readline()) for _ in range(20)][-1]
            process.send_signal(signal.SIGKILL)
            rest = [int(line) for line in process.stdout.read().split()]
        assert process.returncode == -signal.SIGKILL
        run = Run(path)
        assert run.problems == []
        last = run.steps_range[1]
        assert last >= (rest or [seen])[-1]
        counts = run.sql("SELECT step, count(*) AS n FROM raw GROUP BY step ORDER BY step").to_pylist()
        assert [row["step"] for row in counts] == list(range(last + 1))
        assert {row["n"] for row in counts} == {3}

    def test_a_stream_cut_at_any_byte_gives_its_whole_batches(self, tmp_path: Path) -> None:
        opened = record(tmp_path / "run", range(2))
        data = (tmp_path / "run/rank=00000/steps-00000.arrows").read_bytes()
        opened.close()
        cut = tmp_path / "cut.arrows"
        found = []
        for size in [*range(0, len(data), 7), len(data)]:
            cut.write_bytes(data[:size])
            try:
                found.append(stream.read_stream(cut).num_rows)
            except (pa.ArrowException, OSError):
                found.append(-1)
        assert found == sorted(found)
        assert set(found) == {-1, 0, 1, 2}

    def test_an_exception_or_a_plain_exit_closes_the_run(self, tmp_path: Path) -> None:
        refused = "def refuse(thread): raise RuntimeError('no new thread')\nimport threading; threading.Thread.start = refuse"
        endings = {"exit": "", "error": "raise RuntimeError('training failed')", "as Python 3.12 exits": refused}
        for name, ending in endings.items():
            done = python(f"w = record(path, range(3))\n{ending}\n", tmp_path / name)
            assert ("training failed" in done.stderr) == (name == "error"), done.stderr
            assert "fp8debug" not in done.stderr
            assert "rank=00000/stats/part-00000.parquet" in names_below(tmp_path / name)
            assert not stream.streams(tmp_path / name / "rank=00000", "stats")

    def test_a_forked_child_writes_nothing(self, tmp_path: Path) -> None:
        code = (
            "w = record(path, range(2))\n"
            "child = os.fork()\n"
            "w.stats(site_rows(2)) if child == 0 else None\n"
            "w.flush()\nw.event(3, 'note', None, 'child') if child == 0 else None\n"
            "w.close() if child == 0 else None\n"
            "sys.exit(0) if child == 0 else None\n"
            "assert os.waitpid(child, 0)[1] == 0\n"
            "w.stats(site_rows(5))\n"
        )
        done = python(code, tmp_path / "run")
        assert done.returncode == 0 and done.stderr == "", done.stderr
        run = Run(tmp_path / "run")
        steps = run.sql("SELECT DISTINCT step FROM raw ORDER BY step").to_pydict()["step"]
        assert steps == [0, 1, 5]
        assert run.sql("SELECT * FROM events").num_rows == 0


class TestFailingDisk:
    def test_half_a_message_is_cut_off_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        batch = pa.record_batch({"step": pa.array([1, 2, 3])})
        written = stream.Stream(tmp_path / "steps-00000.arrows", batch.schema)
        written.append(batch)
        size, real = written.path.stat().st_size, os.write

        def full(descriptor: int, data: Any) -> int:
            if len(data) <= len(batch.serialize()) // 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, bytes(data)[: len(data) // 2])

        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(os, "write", full)
            written.append(batch)
        assert written.path.stat().st_size == size
        written.close()
        assert stream.read_stream(written.path).num_rows == 3

    def test_a_full_disk_stops_the_recording_with_one_line(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = record(tmp_path / "run", range(2))
        real = os.write

        def full(descriptor: int, data: Any) -> int:
            real(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        for step in range(2, 5):
            opened.stats(site_rows(step))
        opened.flush()
        monkeypatch.undo()
        opened.stats(site_rows(9))
        opened.close()
        assert opened.stopped == "No space left on device"
        assert capfd.readouterr().err == "fp8debug: recording stopped: No space left on device\n"
        run = Run(tmp_path / "run")
        assert run.problems == []
        assert run.sql("SELECT count(*) AS n FROM raw").to_pylist() == [{"n": 6}]

    def test_a_real_limit_on_file_size(self, tmp_path: Path) -> None:
        code = (
            "import resource, signal\n"
            "w = record(path, range(2))\n"
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))\n"
            "for step in range(2, 200): w.stats(site_rows(step)); w.steps({'step': step}); w.flush()\n"
            "w.close(); print(w.stopped)\n"
        )
        done = python(code, tmp_path / "run")
        assert (done.returncode, done.stdout) == (0, "File too large\n"), done.stderr
        assert done.stderr == "fp8debug: recording stopped: File too large\n"
        assert Run(tmp_path / "run").steps_range[0] == 0

    def test_a_folder_deleted_under_the_writer(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        opened = RunWriter(tmp_path / "run", manifest={})
        shutil.rmtree(tmp_path / "run")
        opened.stats(site_rows(0))
        opened.close()
        assert capfd.readouterr().err == "fp8debug: recording stopped: No such file or directory\n"

    def test_a_slow_disk_drops_steps_and_never_blocks(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        go = threading.Event()
        append = stream.Stream.append

        def slow(self: stream.Stream, batch: pa.RecordBatch) -> None:
            go.wait(60)
            append(self, batch)

        monkeypatch.setattr(stream.Stream, "append", slow)
        opened = RunWriter(tmp_path / "run", manifest={})
        limit = writer.MAX_WAITING["stats"]
        started = time.monotonic()
        for step in range(limit + 10):
            opened.stats(site_rows(step))
        assert time.monotonic() - started < 10
        go.set()
        opened.close()
        num_steps = Run(tmp_path / "run").sql("SELECT DISTINCT step FROM raw").num_rows
        assert num_steps + opened.num_dropped == limit + 10 and opened.num_dropped >= 9
        first, last = capfd.readouterr().err.splitlines()
        assert first == f"fp8debug: a step was not recorded: {tmp_path}/run is too slow; more such steps are only counted"
        assert last == f"fp8debug: {opened.num_dropped} writings were dropped because {tmp_path}/run is too slow"


class TestResume:
    def test_rows_of_steps_recorded_again_replace_the_earlier_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        record(path, range(6)).close()
        opened = RunWriter(path, manifest={"modules": []}, resume=True)
        for step in range(4, 8):
            opened.stats(site_rows(step, numel=[7, 7, 7]))
            opened.steps({"step": step, "loss": 100.0})
        opened.close()
        run = Run(path)
        numel = run.sql("SELECT step, min(numel) AS a, sum(numel) AS n FROM raw GROUP BY step ORDER BY step").to_pylist()
        assert [(row["step"], row["a"], row["n"]) for row in numel] == [
            *((step, 100, 300) for step in range(4)),
            *((step, 7, 21) for step in range(4, 8)),
        ]
        assert run.sql("SELECT * FROM steps WHERE loss = 100").num_rows == 4
        assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 8}]
        assert run.sql("SELECT step, kind FROM events").to_pylist() == [{"step": 4, "kind": "resume"}]

    def test_the_stream_of_a_killed_process_is_finished(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        python("record(path, range(3)); os._exit(9)", path)
        leftover = path / "rank=00000" / "stats-00000.arrows"
        leftover.write_bytes(leftover.read_bytes()[:-5])
        (path / "rank=00000" / "stats-00001.arrows").write_bytes(b"no stream at all, and yet recording goes on")
        opened = record(path, range(2, 4), resume=True)
        opened.close()
        assert opened.stopped is None
        run = Run(path)
        assert [row["step"] for row in run.sql("SELECT DISTINCT step FROM raw ORDER BY step").to_pylist()] == [
            0,
            1,
            2,
            3,
        ]
        (problem,) = run.problems
        assert problem.startswith(f"{path}/rank=00000/stats-00001.arrows cannot be read: ")

    def test_a_new_folder_is_a_new_run(self, tmp_path: Path) -> None:
        record(tmp_path / "run", range(2), resume=True).close()
        assert Run(tmp_path / "run").sql("SELECT * FROM events").num_rows == 0

    def test_three_times(self, tmp_path: Path) -> None:
        for start in (0, 5, 2):
            record(tmp_path / "run", range(start, start + 6), resume=True).close()
        steps = Run(tmp_path / "run").sql("SELECT step FROM steps ORDER BY step").to_pydict()["step"]
        assert steps == list(range(8))
