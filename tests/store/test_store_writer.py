"""The writer loses at most the step in flight, refuses a folder at once, and never disturbs training afterwards."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8debug.errors import RecordError
from fp8debug.store import stream, writer
from fp8debug.store.run import Run
from fp8debug.store.writer import RunWriter

ROOT = Path(__file__).parents[2]


def site_rows(step: int, count: int = 3, **changes: Any) -> dict[str, Any]:
    """Return a small set of columns for ``RunWriter.stats``."""
    return {
        "step": [step] * count,
        "module": [f"m{i}" for i in range(count)],
        "gemm": ["fprop"] * count,
        "tensor": ["input"] * count,
        "cast_name": ["e4m3fn 1x128 current"] * count,
        "reference": ["operand"] * count,
        "actual": [True] * count,
        "call_index": list(range(count)),
        "numel": np.full(count, 100),
        **changes,
    }


def record(path: Path, steps: range, **options: Any) -> RunWriter:
    """Write some steps and leave the writer open."""
    opened = RunWriter(path, manifest={"modules": []}, **options)
    for step in steps:
        opened.stats(site_rows(step))
        opened.steps({"step": step, "loss": 1.0 / (step + 1)})
    opened.flush()
    return opened


#: A program of its own begins with this: the helpers above and the run's folder.
PRELUDE = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
from test_store_writer import record, site_rows
path = Path(sys.argv[1])
"""


def python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + code, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def names_below(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


class TestFiles:
    def test_a_step_is_with_the_system_at_once_and_becomes_a_part_at_close(self, tmp_path: Path) -> None:
        opened = record(tmp_path / "run", range(3))
        folder = tmp_path / "run" / "rank=00000"
        assert stream.read_stream(folder / "stats-00000.arrows").num_rows == 9
        assert not stream.parts(folder, "stats")
        opened.event(2, "note", None, "hello")
        opened.close()
        assert names_below(tmp_path / "run") == {
            "manifest.json",
            "rank=00000/manifest.json",
            "rank=00000/stats/part-00000.parquet",
            "rank=00000/steps/part-00000.parquet",
            "rank=00000/events/part-00000.parquet",
        }
        assert json.loads((folder / "manifest.json").read_text())["ended"]

    def test_a_long_stream_becomes_a_part_while_it_goes_on(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(writer, "PART_ROWS", 10)
        opened = record(tmp_path / "run", range(7))
        folder = tmp_path / "run" / "rank=00000"
        assert [pq.read_metadata(p).num_rows for p in stream.parts(folder, "stats").values()] == [12]
        assert list(stream.streams(folder, "stats")) == [1]
        assert Run(tmp_path / "run").sql("SELECT count(*) AS n FROM raw").to_pylist() == [{"n": 21}]
        opened.close()
        assert [pq.read_metadata(p).num_rows for p in stream.parts(folder, "stats").values()] == [12, 9]

    def test_manifests(self, tmp_path: Path) -> None:
        opened = RunWriter(
            tmp_path / "run",
            rank=0,
            world_size=2,
            manifest={"every": 10, "path": Path("x")},
            rank_manifest={"device": "cpu"},
        )
        RunWriter(tmp_path / "run", rank=1, world_size=2, manifest={"every": 99}).close()
        opened.update_manifest({"modules": [{"fqn": "a"}]})
        opened.close()
        manifest = json.loads((tmp_path / "run/manifest.json").read_text())
        assert manifest["schema_version"] == 1 and manifest["name"] == "run" and manifest["created"]
        assert (manifest["every"], manifest["path"], manifest["modules"]) == (10, "x", [{"fqn": "a"}])
        own = json.loads((tmp_path / "run/rank=00001/manifest.json").read_text())
        assert (own["rank"], own["world_size"], own["pid"]) == (1, 2, os.getpid())


class TestValues:
    def read(self, path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
        opened = RunWriter(path / "run", manifest={})
        opened.stats(columns)
        opened.close()
        assert opened.stopped is None
        return Run(path / "run").sql("SELECT * FROM raw ORDER BY module").to_pylist()

    def test_what_means_no_data_is_null(self, tmp_path: Path) -> None:
        rows = self.read(
            tmp_path,
            site_rows(
                0,
                amax=np.array([1.0, -np.inf, np.inf], np.float32),
                amin=[np.inf, 2.0, None],
                sum_x=np.array([np.nan, 0.0, -1.0]),
                num_zero=np.ma.array([1, 2, 3], mask=[False, True, False]),
                num_nan=[None, 2, 3],
                num_inf=np.array([np.nan, 2.0, 3.0]),
            ),
        )
        assert [row["amax"] for row in rows] == [1.0, None, np.inf]
        assert [row["amin"] for row in rows] == [None, 2.0, None]
        assert [row["sum_x"] for row in rows] == [None, 0.0, -1.0]
        assert [row["num_zero"] for row in rows] == [1, None, 3]
        assert [row["num_nan"] for row in rows] == [None, 2, 3]
        assert [row["num_inf"] for row in rows] == [None, 2, 3]
        assert [row["num_underflow"] for row in rows] == [None] * 3

    @pytest.mark.parametrize("kind", ["lists", "array"])
    def test_histograms(self, tmp_path: Path, kind: str) -> None:
        counts = np.arange(192).reshape(3, 64)
        given: Any = [counts[0], None, counts[2].tolist()]
        if kind == "array":
            given = np.ma.array(counts, mask=np.repeat([[False], [True], [False]], 64, axis=1))
        rows = self.read(tmp_path, site_rows(0, log2_hist=given))
        assert [row["log2_hist"] for row in rows] == [counts[0].tolist(), None, counts[2].tolist()]

    def test_counts_beyond_float32_and_names_of_any_kind_are_exact(self, tmp_path: Path) -> None:
        hostile = ["a'; DROP VIEW raw --", "../../etc", 'ünï "☃"']
        rows = self.read(tmp_path, site_rows(0, module=hostile, num_zero=[2**24 + 1, 2**53 + 1, 2**62]))
        found = {row["module"]: row["num_zero"] for row in rows}
        assert found == dict(zip(hostile, [2**24 + 1, 2**53 + 1, 2**62], strict=True))

    def test_a_loss_that_is_nan_stays_nan_and_one_that_is_missing_is_null(self, tmp_path: Path) -> None:
        opened = RunWriter(tmp_path / "run", manifest={})
        opened.steps({"step": 0, "loss": float("nan")})
        opened.steps({"step": 1, "loss": None, "sampled": True})
        opened.steps({"step": np.int64(2), "loss": np.float32(1.5), "tokens": 7})
        opened.close()
        assert opened.stopped is None
        first, second, third = Run(tmp_path / "run").sql("SELECT * FROM steps ORDER BY step").to_pylist()
        assert np.isnan(first["loss"]) and second["loss"] is None and third["loss"] == 1.5 and third["tokens"] == 7
        assert first["rank"] == 0 and first["time"] is not None

    @pytest.mark.parametrize(
        "columns, reason",
        [
            ({"step": [1], "colour": [2]}, "ValueError: columns colour are not in the schema of stats"),
            (
                {"step": [1, 2], "module": ["a"]},
                "ValueError: the columns of stats differ in length: {'step': 2, 'module': 1}",
            ),
        ],
    )
    def test_wrong_columns_stop_the_recording_and_say_so(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], columns: dict[str, Any], reason: str
    ) -> None:
        opened = RunWriter(tmp_path / "run", manifest={})
        opened.stats(columns)
        opened.flush()
        assert opened.stopped == reason
        opened.stats(site_rows(2))
        opened.close()
        assert capfd.readouterr().err == f"fp8debug: recording stopped: {reason}\n"


class TestRefusals:
    def test_a_folder_that_holds_a_run(self, tmp_path: Path) -> None:
        record(tmp_path / "exp1", range(1)).close()
        with pytest.raises(RecordError) as caught:
            RunWriter(tmp_path / "exp1", manifest={})
        assert str(caught.value) == f"{tmp_path}/exp1 already holds a run; choose another folder or delete it"

    def test_a_later_rank_finds_the_run_of_another_job(self, tmp_path: Path) -> None:
        record(tmp_path / "exp1", range(1), rank=3, world_size=4).close()
        with pytest.raises(RecordError, match="already holds a run"):
            RunWriter(tmp_path / "exp1", rank=3, world_size=4, manifest={})

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "exp1").write_text("")
        with pytest.raises(RecordError) as caught:
            RunWriter(tmp_path / "exp1", manifest={})
        assert str(caught.value) == f"{tmp_path}/exp1 is a file; a run needs a folder of its own"

    def test_a_folder_that_cannot_be_written(self) -> None:
        with pytest.raises(RecordError) as caught:
            RunWriter("/proc/exp1", manifest={})
        assert str(caught.value) == (
            "cannot write to /proc/exp1: No such file or directory; choose a folder that can be written"
        )

    def test_a_file_above(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RecordError, match="Not a directory; choose a folder that can be written"):
            RunWriter(tmp_path / "file" / "exp1", manifest={})

    def test_a_folder_with_other_things_in_it_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        record(tmp_path, range(1)).close()
        assert Run(tmp_path).steps_range == (0, 0)


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
        for name, ending in (("exit", ""), ("error", "raise RuntimeError('training failed')")):
            done = python(f"w = record(path, range(3))\n{ending}\n", tmp_path / name)
            assert ("training failed" in done.stderr) == bool(ending)
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
        assert done.returncode == 0, done.stderr
        run = Run(tmp_path / "run")
        steps = run.sql("SELECT DISTINCT step FROM raw ORDER BY step").to_pydict()["step"]
        assert steps == [0, 1, 5]
        assert run.sql("SELECT * FROM events").num_rows == 0


class TestFailingDisk:
    def test_a_full_disk_stops_the_recording_with_one_line(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = record(tmp_path / "run", range(2))
        real = os.write

        def full(descriptor: int, data: Any) -> int:
            real(descriptor, bytes(data)[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(stream.os, "write", full)
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
        assert (
            first == f"fp8debug: a step was not recorded: {tmp_path}/run is too slow; more such steps are only counted"
        )
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
        numel = run.sql(
            "SELECT step, min(numel) AS a, sum(numel) AS n FROM raw GROUP BY step ORDER BY step"
        ).to_pylist()
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
