"""The writer appends at once, compacts behind the scenes, and refuses a folder before training starts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fp8debug.errors import RecordError
from fp8debug.store import stream
from fp8debug.store.read.run import Run
from fp8debug.store.schema import SCHEMA_VERSION
from fp8debug.store.write import writer
from fp8debug.store.write.writer import RunWriter
from tests.store.recording import names_below, record, site_rows


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

    def test_a_long_stream_becomes_a_part_while_it_goes_on(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(writer, "PART_ROWS", 10)
        opened = record(tmp_path / "run", range(7))
        folder = tmp_path / "run" / "rank=00000"
        assert [pq.read_metadata(p).num_rows for p in stream.parts(folder, "stats").values()] == [12]
        assert list(stream.streams(folder, "stats")) == [1]
        assert Run(tmp_path / "run").sql("SELECT count(*) AS n FROM raw").to_pylist() == [{"n": 21}]
        opened.close()
        assert [pq.read_metadata(p).num_rows for p in stream.parts(folder, "stats").values()] == [12, 9]

    def test_the_training_script_may_change_its_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path)
        opened = RunWriter("run", manifest={})
        opened.steps({"step": 0})
        monkeypatch.chdir(tmp_path / "elsewhere")
        opened.update_manifest({"every": 5})
        opened.steps({"step": 1})
        opened.close()
        assert opened.stopped is None and names_below(tmp_path / "elsewhere") == set()
        monkeypatch.chdir(tmp_path)
        run = Run("run")
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 2}]
        assert run.manifest["every"] == 5

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
        assert manifest["schema_version"] == SCHEMA_VERSION and manifest["name"] == "run" and manifest["created"]
        assert (manifest["every"], manifest["path"], manifest["modules"]) == (10, "x", [{"fqn": "a"}])
        own = json.loads((tmp_path / "run/rank=00001/manifest.json").read_text())
        assert (own["rank"], own["world_size"], own["pid"]) == (1, 2, os.getpid())


class TestValues:
    def read(self, path: Path, columns: dict[str, Any]) -> list[dict[str, Any]]:
        opened = RunWriter(path / "run", manifest={})
        opened.stats(columns)
        opened.close()
        assert opened.stopped is None
        rows: list[dict[str, Any]] = Run(path / "run").sql("SELECT * FROM raw ORDER BY module").to_pylist()
        return rows

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
        opened.steps({"step": 3, "nonfinite_module": "mlp", "loss": 3.5})
        opened.steps(lambda: {"step": 4, "loss": 4.5})
        opened.steps(lambda: {"step": 5, "nonfinite_module": "mlp", "loss": 5.5})
        opened.close()
        assert opened.stopped is None
        first, second, third, *texts = Run(tmp_path / "run").sql("SELECT * FROM steps ORDER BY step").to_pylist()
        assert [(row["loss"], row["nonfinite_module"]) for row in texts] == [(3.5, "mlp"), (4.5, None), (5.5, "mlp")]
        assert all(row["rank"] == 0 and row["time"] is not None for row in texts)
        assert np.isnan(first["loss"]) and second["loss"] is None and third["loss"] == 1.5 and third["tokens"] == 7
        assert first["rank"] == 0 and first["time"] is not None

    @pytest.mark.parametrize("is_later", [False, True])
    @pytest.mark.parametrize(
        "row, reason",
        [
            ({"step": 1, "colour": 2}, "ValueError: columns colour are not in the schema of steps"),
            ({"step": 1, "loss": "low"}, "ArrowInvalid: Could not convert 'low' with type str: tried to convert to double"),
        ],
    )
    def test_a_wrong_row_stops_the_recording_and_says_so(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str], row: dict[str, Any], reason: str, is_later: bool
    ) -> None:
        opened = RunWriter(tmp_path / "run", manifest={})
        opened.steps({"step": 0, "loss": 1.0})
        opened.steps((lambda: row) if is_later else row)
        opened.flush()
        assert opened.stopped == reason
        opened.close()
        assert capfd.readouterr().err == f"fp8debug: recording stopped: {reason}\n"
        assert Run(tmp_path / "run").sql("SELECT step, loss FROM steps").to_pylist() == [{"step": 0, "loss": 1.0}]

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
        assert str(caught.value) == ("cannot write to /proc/exp1: No such file or directory; choose a folder that can be written")

    def test_a_file_above(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(RecordError, match="Not a directory; choose a folder that can be written"):
            RunWriter(tmp_path / "file" / "exp1", manifest={})

    def test_a_folder_with_other_things_in_it_is_fine(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        record(tmp_path, range(1)).close()
        assert Run(tmp_path).steps_range == (0, 0)
