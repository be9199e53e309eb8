"""Damaged files are named and the rest is read; older and newer files, broken manifests, wrong folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8debug.errors import RunError
from fp8debug.store.read.run import Run
from fp8debug.store.schema import SCHEMA_VERSION
from fp8debug.store.stream import write_part
from fp8debug.store.write.writer import RunWriter
from tests.synthetic import MODULES, Plan, write


class TestRefusals:
    def refusal(self, path: Path) -> str:
        with pytest.raises(RunError) as caught:
            Run(path)
        return str(caught.value).replace(str(path), "RUN")

    def test_missing(self, tmp_path: Path) -> None:
        wanted = "RUN does not exist; give the folder that watch() or `fp8debug run --out` wrote"
        assert self.refusal(tmp_path / "nope") == wanted

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_text("")
        assert self.refusal(tmp_path / "f") == "RUN is a file, not a run's folder"

    def test_another_folder(self, tmp_path: Path) -> None:
        assert self.refusal(tmp_path) == "RUN is not a run: it has no manifest.json and no rank=... folder"

    def test_a_folder_of_runs(self, tmp_path: Path) -> None:
        write(tmp_path / "exp1", Plan(num_steps=1))
        assert self.refusal(tmp_path) == "RUN is a folder of runs, not a run; give one of them, e.g. RUN/exp1"

    def test_nothing_recorded_yet(self, tmp_path: Path) -> None:
        writer = RunWriter(tmp_path / "run", manifest={})
        assert (
            self.refusal(tmp_path / "run")
            == "RUN holds no recorded step yet; a run that is being written can be read after its first sampled step"
        )
        writer.close()

    @pytest.mark.parametrize("where", ["manifest.json", "rank=00000/manifest.json"])
    def test_a_newer_schema(self, tmp_path: Path, where: str) -> None:
        write(tmp_path / "run", Plan(num_steps=1))
        manifest = json.loads((tmp_path / "run" / where).read_text())
        (tmp_path / "run" / where).write_text(json.dumps({**manifest, "schema_version": SCHEMA_VERSION + 1}))
        assert self.refusal(tmp_path / "run").removesuffix("; install a newer fp8debug") == (
            f"RUN{'/rank=00000' if 'rank' in where else ''} has schema version {SCHEMA_VERSION + 1},"
            f" this fp8debug reads up to {SCHEMA_VERSION}"
        )


class TestDamage:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        write(tmp_path / "run", Plan(num_steps=11, world_size=2))
        return tmp_path / "run"

    def test_a_part_without_a_footer(self, path: Path) -> None:
        part = path / "rank=00000/stats/part-00000.parquet"
        part.write_bytes(part.read_bytes()[:-20])
        run = Run(path)
        (problem,) = run.problems
        assert problem.startswith(f"{part} cannot be read: ")
        assert set(run.sql("SELECT DISTINCT rank FROM raw").to_pydict()["rank"]) == {1}

    def test_a_part_damaged_inside(self, path: Path) -> None:
        part = path / "rank=00000/stats/part-00000.parquet"
        data = bytearray(part.read_bytes())
        data[4:2000] = b"\xff" * 1996
        part.write_bytes(data)
        run = Run(path)
        assert run.sql("SELECT sum(numel) AS n, count(module) AS m FROM raw WHERE rank = 0").to_pylist()[0]["m"] == 0
        assert run.problems == [f"{part} is damaged; its rows are left out"]
        assert run.table(["sqnr_db", "ranks"]).to_pylist()[0]["ranks"] == [1]

    def test_an_empty_part_and_an_empty_stream(self, path: Path) -> None:
        (path / "rank=00001/stats/part-00001.parquet").write_bytes(b"")
        (path / "rank=00001/stats-00002.arrows").write_bytes(b"")
        run = Run(path)
        (problem,) = run.problems
        assert "part-00001.parquet cannot be read" in problem
        assert run.ranks == [0, 1]

    def test_a_stream_whose_schema_is_being_written_is_no_damage(self, path: Path, tmp_path: Path) -> None:
        """A reader comes at any moment, and a process may be killed between two pages of the first message."""
        opened = RunWriter(tmp_path / "live", manifest={})
        opened.steps({"step": 0})
        opened.flush()
        whole = (tmp_path / "live/rank=00000/steps-00000.arrows").read_bytes()
        opened.close()
        place = path / "rank=00001/steps-00002.arrows"
        for size in (0, 1, 4, 7, 8, 100, 4096):
            place.write_bytes(whole[:size])
            assert Run(path).problems == [], size
        flipped = [whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :] for at in (4, 5, 6, 7) for bit in range(8)]
        for foreign in (b"PAR1", b"\xff\xffAR", b"x" * 5000, *flipped):
            place.write_bytes(foreign)
            (problem,) = Run(path).problems
            assert problem.startswith(f"{place} ")

    def test_a_column_of_another_kind(self, path: Path) -> None:
        part = path / "rank=00001/stats/part-00000.parquet"
        table = pq.ParquetFile(part).read()
        strings = pa.array(["many"] * table.num_rows)
        write_part(table.set_column(table.schema.get_field_index("numel"), "numel", strings), part)
        run = Run(path)
        assert run.problems == [f"{part} is left out: column numel is string, expected int64"]
        assert run.table(["numel"]).num_rows == 2 * 6 * 12

    def test_a_broken_manifest(self, path: Path) -> None:
        (path / "manifest.json").write_text("{broken")
        (path / "rank=00001/manifest.json").unlink()
        run = Run(path)
        assert run.manifest == {} and len(run.modules) == 6
        assert run.problems == [
            f"{path}/manifest.json cannot be read: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
            f"{path}/rank=00001/manifest.json is missing",
        ]

    @pytest.mark.parametrize(
        "modules",
        [
            "text",
            7,
            [1, None, "x"],
            [{"fqn": ["list"], "in_features": "many", "out_features": 10**30, "bias": 3}],
            [{}],
        ],
    )
    def test_a_manifest_of_nonsense(self, path: Path, modules: Any) -> None:
        (path / "manifest.json").write_text(json.dumps({"schema_version": "new", "modules": modules}))
        run = Run(path)
        assert {m["fqn"] for m in run.modules} >= {name for name, _, _ in MODULES}
        assert run.sql("SELECT * FROM modules").num_rows == len(run.modules)


class TestOtherSchemas:
    def test_a_missing_column_is_null_and_those_derived_from_it_too(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        write(path, Plan(num_steps=11, world_size=2))
        part = path / "rank=00001/stats/part-00000.parquet"
        write_part(pq.ParquetFile(part).read().drop_columns(["num_underflow", "log2_hist"]), part)
        run = Run(path)
        assert run.problems == []
        query = "SELECT rank, count(underflow_rate) AS a, count(log2_hist) AS h, count(sqnr_db) AS s FROM stats"
        rows = run.sql(f"{query} GROUP BY rank ORDER BY rank").to_pylist()
        assert [(row["a"], row["h"], row["s"]) for row in rows] == [(72, 72, 144), (0, 0, 144)]

    def test_a_slot_of_a_metric_that_is_not_installed_joins_by_the_rule_in_the_file(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        write(path, Plan(num_steps=1, world_size=2))
        for rank in (0, 1):
            part = path / f"rank={rank:05d}/stats/part-00000.parquet"
            table = pq.ParquetFile(part).read()
            metadata = {"unit": "1", "merge": "max", "doc": "A plug-in's."}
            field = pa.field("top_code", pa.int64(), metadata=metadata)
            table = table.append_column(field, pa.array([10 + rank] * table.num_rows, pa.int64()))
            odd = pa.field("drop table; --", pa.int64(), metadata=metadata)
            write_part(table.append_column(odd, pa.array([1] * table.num_rows, pa.int64())), part)
        run = Run(path)
        assert set(run.table(["top_code"], tensor="input").to_pydict()["top_code"]) == {11}
        assert "drop table; --" not in run.columns
