"""Spark reads the same files by the same SQL, and finds the same; skipped without pyspark and Java."""

from __future__ import annotations

import ast
import math
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.rules import triage
from fp8debug.store.read.resumed import JoinedRun
from fp8debug.store.read.run import Run
from fp8debug.store.schema import SITE_KEYS
from fp8debug.store.spark import SparkRun, open_on_spark, start
from fp8debug.store.write.writer import RunWriter
from fp8debug_cli.main import status
from tests.rules.sick_runs import CLIPPED, INPUT, OUTLIER, WEIGHT
from tests.synthetic import Override, Plan, build, manifest_of, stats_rows, steps_row, write

DOCS = Path(__file__).parents[2] / "docs" / "schema.md"
#: Two workers of one core and 1.5 GB each, in processes of their own.
MASTER = "local-cluster[2,1,1536]"
#: Functions of SQL that queries may call: DuckDB and Spark have them, or Spark is given them (``isfinite``).
FUNCTIONS = {
    *(
        "abs",
        "any_value",
        "array_agg",
        "array_sort",
        "avg",
        "bool_and",
        "bool_or",
        "cast",
        "coalesce",
        "count",
        "flatten",
        "greatest",
        "isfinite",
        "least",
        "sqrt",
    ),
    *("length", "max", "min", "min_by", "percentile_cont", "sum"),
}
_SQL = re.compile(r"\b(SELECT|FROM|WHERE|GROUP BY|AND|AS|CASE|ORDER BY|OVER)\b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spark")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    overrides = [
        Override(**{**INPUT, "ranks": (1,)}, slots=CLIPPED),
        Override(**WEIGHT, slots={"gain": 2.0}),
        Override(module="blocks.0.mlp.up", gemm="fprop", tensor="input", steps=(30, 31), slots={"num_actual_nonfinite": 3}),
    ]
    return build(folder / "runs" / "exp1", num_steps=60, world_size=3, overrides=overrides, steps={50: {"loss": 90.0}})


@pytest.fixture(scope="module")
def resumed(folder: Path) -> Iterator[list[Path]]:
    """A run of one rank and its resumed part, which is being written: streams, no Parquet."""
    paths = [folder / "part1", folder / "part2"]
    sick = Plan(num_steps=60, recipe="tensorwise_current", overrides=[Override(**INPUT, slots=OUTLIER)])
    write(paths[0], sick)
    plan = replace(sick, num_steps=100, steps={80: {"loss": 90.0}})
    writer = RunWriter(paths[1], manifest=manifest_of(plan))
    for step in range(50, 100):
        if step % 10 == 0:
            rows = stats_rows(plan, step, 0)
            writer.stats({name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}})
        writer.steps(steps_row(plan, step, is_sampled=step % 10 == 0))
    writer.flush()
    yield paths
    writer.close()


@pytest.fixture(scope="module")
def spark(folder: Path) -> Iterator[Any]:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)  # where Java starts, for the relative paths of the page
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")  # small runs are over before more pays
        session = start(MASTER)
    yield session
    session.stop()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
class TestOnACluster:
    def test_the_page_about_files_is_right(self, spark: Any, run: Run, capfd: pytest.CaptureFixture[str]) -> None:
        page = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
        exec(next(block for block in page if "spark" in block), {"spark": spark})
        assert "|blocks.0.attn.qkv|            0|" in capfd.readouterr().out

    def test_the_view_sites_is_the_same(self, spark: Any, run: Run) -> None:
        query = f"SELECT * FROM sites WHERE step = 40 ORDER BY {', '.join(SITE_KEYS)}"
        found, wanted = SparkRun(run.path, spark).sql(query).to_pylist(), run.sql(query).to_pylist()
        assert len(found) == len(wanted) > 0
        for ours, theirs in zip(wanted, found, strict=True):
            for name, value in ours.items():
                same = value == theirs[name] or math.isclose(value, theirs[name], rel_tol=1e-9, abs_tol=1e-12)
                assert same, (name, value, theirs[name])

    def test_triage_finds_the_same(self, spark: Any, run: Run) -> None:
        wanted = triage(run).to_dict()
        assert {finding["code"] for finding in wanted["findings"]} == {"F101", "F103", "F113"}
        assert triage(SparkRun(run.path, spark)).to_dict() == wanted

    def test_triage_of_what_the_driver_does_not_hold(
        self, spark: Any, resumed: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        wanted = triage(JoinedRun(resumed)).to_dict()
        assert {finding["code"] for finding in wanted["findings"]} == {"F105"}
        monkeypatch.setattr("fp8debug.store.spark.MAX_FETCHED", 3)
        opened = open_on_spark(resumed, spark)
        assert triage(opened).to_dict() == wanted
        opened.refresh()
        assert opened.num_rows == JoinedRun(resumed).num_rows

    def test_a_part_that_is_damaged_inside_is_named_and_left_out(self, spark: Any, folder: Path) -> None:
        wanted = build(folder / "a run [1]", num_steps=20, world_size=2)
        part = next((wanted.path / "rank=00001" / "stats").iterdir())
        footer = parquet.read_metadata(part).row_group(0)
        at = next(c for c in map(footer.column, range(footer.num_columns)) if c.path_in_schema == "amax")
        content = bytearray(part.read_bytes())
        start_of = at.dictionary_page_offset or at.data_page_offset
        content[start_of : start_of + 60] = b"\xff" * 60
        part.write_bytes(content)
        wanted.refresh()
        opened, query = SparkRun(wanted.path, spark), "SELECT rank, max(amax) AS amax FROM raw GROUP BY rank"
        assert opened.sql(query).to_pylist() == wanted.sql(query).to_pylist()
        assert opened.problems == wanted.problems == [f"{part} is damaged; its rows are left out"]

    def test_it_has_every_function_that_queries_call(self, spark: Any, run: Run) -> None:
        opened = SparkRun(run.path, spark)
        there = {row["function"].lower() for row in opened._session.sql("SHOW FUNCTIONS").collect()}
        assert there.issuperset(FUNCTIONS)

    def test_parameters_by_place_and_by_name(self, spark: Any, run: Run) -> None:
        opened = SparkRun(run.path, spark)
        by_place = opened.sql("SELECT count(*) AS num FROM raw WHERE step = ? AND rank = ?", [40, 1])
        by_name = opened.sql("SELECT count(*) AS num FROM raw WHERE step = $step AND rank = $rank", {"step": 40, "rank": 1})
        assert by_place.to_pylist() == by_name.to_pylist() != [{"num": 0}]
        with pytest.raises(UsageError, match="not one SELECT"):
            opened.sql("DROP VIEW raw")
        with pytest.raises(UsageError, match=r"the query failed: .*no_such_column"):
            opened.sql("SELECT no_such_column FROM raw")


def test_queries_call_functions_of_both_engines() -> None:
    """A function of DuckDB alone fails where a run is read by Spark, and only at a rule that comes that far."""
    package = Path(fp8debug.__file__).parent
    called: dict[str, str] = {}
    for path in [
        path for part in ("rules", "metrics", "fallback", "reports", "store/read") for path in (package / part).rglob("*.py")
    ]:
        if path.name != "engine.py":  # DuckDB's own
            for text in _texts(path):
                called |= dict.fromkeys(re.findall(r"\b([a-z_]+)\(", text.lower()), path.name) if _SQL.search(text) else {}
    assert len(called) > 10
    assert {name: path for name, path in called.items() if name not in FUNCTIONS} == {}


def _texts(path: Path) -> Iterator[str]:
    """Yield the string literals of a file, without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, owners) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_without_pyspark_a_line_says_what_to_install(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    assert status(["triage", str(run.path), "--engine", "spark"]) == 2
    assert capsys.readouterr().err == "error: Spark needs pyspark, which is not installed: pip install 'fp8debug[spark]'\n"


def test_without_java_a_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(UsageError, match="Java 17"):
        start("local[1]")


def test_a_master_is_of_spark(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["triage", str(run.path), "--master", "local[2]"]) == 2
    assert capsys.readouterr().err == "error: --master is Spark's: add --engine spark\n"
