"""The schema describes itself in the files, docs/schema.md is printed from it, and its queries run without us."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from fp8debug.metrics import slots
from fp8debug.store.schema import TABLES, arrow_schema, columns_of, to_markdown
from tests.synthetic import Plan, write

DOCS = Path(__file__).parents[2] / "docs" / "schema.md"
MERGES = {"key", "sum", "max", "min", "mean", "all", "any", "list", ""}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs")
    write(path / "runs" / "exp1", Plan(num_steps=21, world_size=2, what_if=("tensorwise_current",)))
    return path


def test_the_page_is_printed_from_the_code() -> None:
    message = "docs/schema.md is stale: python -m fp8debug.store.schema > docs/schema.md"
    assert DOCS.read_text(encoding="utf-8") == to_markdown(), message


@pytest.mark.parametrize("table", TABLES)
def test_every_column_has_a_sentence_and_a_merge_rule(table: str) -> None:
    for column in columns_of(table):
        assert column.doc.endswith(".") and (column.doc[0].isupper() or column.doc.startswith("log2")), column
        assert column.merge in MERGES
        assert column.type in ("string", "bool") or column.unit, column


def test_every_slot_is_a_column_with_its_own_merge_rule() -> None:
    columns = {column.name: column for column in columns_of("stats")}
    for name, slot in slots().items():
        assert (columns[name].merge, columns[name].unit) == (slot.merge, slot.unit)
        assert columns[name].type == (slot.kind if slot.size == 1 else f"list<{slot.kind}>")


@pytest.mark.parametrize("table", ["stats", "steps"])
def test_parquet_fields_carry_sentence_unit_and_merge_rule(folder: Path, table: str) -> None:
    found = pq.read_schema(folder / f"runs/exp1/rank=00000/{table}/part-00000.parquet")
    wanted = arrow_schema(table)
    assert found.metadata == wanted.metadata
    assert [(field.name, field.metadata) for field in found] == [(field.name, field.metadata) for field in wanted]
    assert found.equals(wanted), "types"


def test_strings_alone_have_dictionaries_and_floats_are_split(folder: Path) -> None:
    metadata = pq.read_metadata(folder / "runs/exp1/rank=00000/stats/part-00000.parquet")
    schema = arrow_schema("stats")
    group = metadata.row_group(0)
    for column in (group.column(i) for i in range(group.num_columns)):
        kind = str(schema.field(column.path_in_schema.split(".")[0]).type)
        is_dictionary = any("DICTIONARY" in encoding for encoding in column.encodings)
        assert is_dictionary == (kind == "string"), column.path_in_schema
        assert ("BYTE_STREAM_SPLIT" in column.encodings) == (kind in ("float", "double")), column.path_in_schema
        assert column.compression == "ZSTD"


def test_the_duckdb_query_of_the_page_runs_in_duckdb_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (query,) = blocks("sql")
    monkeypatch.chdir(folder)
    with duckdb.connect() as connection:
        rows = connection.execute(query).fetchall()
    assert len(rows) == 10
    assert all(0 < rate < 1e-3 for _, _, rate in rows)


def test_the_pandas_query_of_the_page_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("pandas")
    code = next(block for block in blocks("python") if "pandas" in block)
    monkeypatch.chdir(folder)
    exec(compile(code, str(DOCS), "exec"), {})
    assert "blocks.0.attn.qkv" in capsys.readouterr().out


def test_the_spark_query_of_the_page_is_sql_that_duckdb_reads_too(folder: Path) -> None:
    code = next(block for block in blocks("python") if "spark" in block)
    (query,) = re.findall(r'spark\.sql\("(.*)"\)', code)
    with duckdb.connect() as connection:
        parts = folder / "runs/exp1/rank=*/stats/part-*.parquet"
        connection.execute(f"CREATE VIEW stats AS SELECT * FROM read_parquet('{parts}')")
        assert connection.sql(query).fetchall()


def test_a_part_is_read_by_pandas_by_its_folder(folder: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    shutil.copytree(folder / "runs/exp1/rank=00000/stats", tmp_path / "stats")
    (tmp_path / "stats" / ".part-00001.parquet.tmp").write_bytes(b"half a part")
    assert len(pandas.read_parquet(tmp_path / "stats")) == 3 * 6 * 18
