"""The reader: derived columns agree with the metrics, ranks join by each slot's rule, damage is named."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8debug.errors import NoMatchError, UnknownNameError, UsageError
from fp8debug.metrics import derive, derived_columns, slots
from fp8debug.metrics.expression import to_sql
from fp8debug.store.read.run import Run, parse_steps
from fp8debug.store.schema import SITE_KEYS, arrow_schema, columns_of
from fp8debug.store.write.writer import RunWriter
from tests.synthetic import MODULES, Override, Plan, build, stats_rows, write

ROOT = Path(__file__).parents[3]
SCALARS = {name: slot for name, slot in slots().items() if slot.size == 1}


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build(tmp_path_factory.mktemp("healthy") / "run", what_if=("tensorwise_current", "tensorwise_delayed"))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build(tmp_path_factory.mktemp("ranks") / "run", num_steps=21, world_size=3)


def close(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None or math.isinf(a) else math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-12)


def counts() -> st.SearchStrategy[int | None]:
    return st.one_of(st.none(), st.just(0), st.integers(0, 2**40))


def sums() -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), st.just(0.0), st.floats(-1e30, 1e30), st.floats(0, 1e-30))


def extremes() -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), st.just(0.0), st.floats(0, 2.0**100, width=32))


VALUES = st.fixed_dictionaries(
    {name: {"int64": counts(), "float64": sums(), "float32": extremes()}[slot.kind] for name, slot in SCALARS.items()}
)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect() as opened:
        yield opened


class TestDerived:
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(rows=st.lists(VALUES, min_size=1, max_size=20))
    def test_sql_and_python_agree(self, connection: duckdb.DuckDBPyConnection, rows: list[dict[str, float | None]]) -> None:
        """Many rows for each query, which takes longer to plan than to run."""
        schema = arrow_schema("stats")
        table = pa.table({name: pa.array([row[name] for row in rows], schema.field(name).type) for name in rows[0]})
        connection.register("drawn", table)
        selected = ", ".join(f"{to_sql(d.expression)} AS {name}" for name, d in derived_columns().items())
        answers = connection.sql(f"SELECT {selected} FROM drawn").to_arrow_table().to_pylist()
        for row, found in zip(rows, answers, strict=True):
            for name, wanted in derive(row).items():
                assert close(found[name], wanted), (name, found[name], wanted)

    def test_no_error_is_infinite_sqnr_and_no_element_is_no_data(self, tmp_path: Path) -> None:
        exact = Override(module="blocks.0.attn.qkv", slots={"sum_err2": 0.0})
        empty = Override(module="blocks.0.attn.out", slots=dict.fromkeys(SCALARS, 0))
        run = build(tmp_path / "run", num_steps=1, overrides=[exact, empty])
        found = run.table(["sqnr_db", "cosine", "underflow_rate"], module="*qkv", reference="operand").to_pylist()
        assert {row["sqnr_db"] for row in found} == {math.inf}
        found = run.table(["sqnr_db", "cosine", "underflow_rate"], module="*out").to_pylist()
        assert {value for row in found for value in row.values()} == {None}

    def test_the_view_has_every_derived_column(self, healthy: Run) -> None:
        assert set(derived_columns()) <= set(healthy.columns)
        assert set(healthy.sql("SELECT * FROM stats LIMIT 0").column_names) >= {"rank", *derived_columns()}


class TestMergingOverRanks:
    def merged(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """Join rows of several ranks in plain Python."""
        if rows[0]["replicated"]:
            rows = rows[:1]
        joins: dict[str, Callable[..., Any]] = {"sum": sum, "max": max, "min": min}
        values: dict[str, Any] = {"num_tensors": sum(row["num_tensors"] for row in rows)}
        for name, slot in slots().items():
            there = [row[name] for row in rows if row.get(name) is not None]
            join = joins[slot.merge]
            if slot.size > 1:
                values[name] = np.sum(there, axis=0).tolist() if there else None
            else:
                values[name] = join(there) if there else None
        return values

    def test_every_slot_joins_by_its_rule_and_derived_columns_follow(self, ranks: Run) -> None:
        plan = Plan(num_steps=21, world_size=3)
        expected: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for rank in range(3):
            for row in stats_rows(plan, 10, rank):
                expected.setdefault(tuple(row[key] for key in SITE_KEYS), []).append(row)
        found = ranks.sql("SELECT * FROM sites WHERE step = 10").to_pylist()
        assert len(found) == len(expected)
        for row in found:
            rows = expected[tuple(row[key] for key in SITE_KEYS)]
            wanted = self.merged(rows)
            assert row["ranks"] == [0, 1, 2]
            assert row["log2_hist"] == wanted.pop("log2_hist")
            wanted |= derive(wanted)
            for name, value in wanted.items():
                is_extreme = name in slots() and slots()[name].kind == "float32"
                rel = 1e-6 if is_extreme or name.endswith("log2") else 1e-9
                is_close = row[name] == value or math.isclose(row[name], value, rel_tol=rel, abs_tol=1e-6)
                assert is_close, (name, row[name], value)

    def test_types_survive_the_join(self, ranks: Run, healthy: Run) -> None:
        names = [c.name for c in columns_of("stats") if c.name in ranks.columns]
        query = f"SELECT {', '.join(names)} FROM sites LIMIT 0"
        assert ranks.sql(query).schema.equals(healthy.sql(query).schema)
        assert ranks.columns == healthy.columns or set(ranks.columns) == set(healthy.columns)

    def test_a_replicated_tensor_counts_once_and_from_the_lowest_rank_that_has_it(self, tmp_path: Path) -> None:
        write(tmp_path / "run", Plan(num_steps=11, world_size=3))
        shutil.rmtree(tmp_path / "run" / "rank=00000" / "stats")
        run = Run(tmp_path / "run")
        (row,) = run.table(
            ["numel", "num_blocks", "ranks"], module="*qkv", gemm="fprop", tensor="weight", steps="0:1"
        ).to_pylist()
        assert row == {"numel": 256 * 768, "num_blocks": 12, "ranks": [1, 2]}
        (row,) = run.table(["numel", "ranks"], module="*qkv", gemm="fprop", tensor="input", steps="0:1").to_pylist()
        assert row == {"numel": 2 * 1024 * 256, "ranks": [1, 2]}

    def test_steps_are_one_row_each(self, ranks: Run) -> None:
        rows = ranks.sql("SELECT step, tokens, sampled, loss FROM steps ORDER BY step").to_pylist()
        assert [row["step"] for row in rows] == list(range(21))
        assert rows[3]["tokens"] == 3 * 1024
        assert [row["step"] for row in rows if row["sampled"]] == [0, 10, 20]
        assert ranks.sql("SELECT * FROM raw_steps").num_rows == 63
        joined = ranks.sql("SELECT step, loss, sqnr_db FROM sites JOIN steps USING (step)")
        assert joined.num_rows == ranks.sql("SELECT * FROM sites").num_rows

    def test_a_missing_rank_is_a_problem(self, tmp_path: Path) -> None:
        write(tmp_path / "run", Plan(num_steps=1, world_size=4))
        shutil.rmtree(tmp_path / "run" / "rank=00002")
        assert Run(tmp_path / "run").problems == ["no rows of rank 2 (1 of 4 ranks)"]


class TestTable:
    def test_rows_come_in_execution_order(self, healthy: Run) -> None:
        rows = healthy.table(["step", "module", "gemm"], steps="0:1").to_pylist()
        seen = list(dict.fromkeys((row["module"], row["gemm"]) for row in rows))
        assert seen == [(name, gemm) for name, _, _ in MODULES for gemm in ("fprop", "dgrad", "wgrad")]

    def test_filters(self, healthy: Run) -> None:
        found = healthy.table(
            ["step", "module", "gemm", "tensor", "reference", "actual"],
            module="blocks.*.mlp.up",
            gemm="wgrad",
            tensor="input",
            steps=(10, 30),
            reference="operand",
            actual=True,
        ).to_pylist()
        assert [(row["step"], row["module"]) for row in found] == [
            (step, module) for step in (10, 20) for module in ("blocks.0.mlp.up", "blocks.1.mlp.up")
        ]

    def test_all_columns_but_the_histogram(self, healthy: Run) -> None:
        assert healthy.table(steps="0:1").column_names == [c for c in healthy.columns if c != "log2_hist"]
        (row,) = healthy.table(["log2_hist"], module="*qkv", gemm="fprop", tensor="input", steps=":1", actual=True).to_pylist()
        assert len(row["log2_hist"]) == 64

    @pytest.mark.parametrize(
        "steps, wanted",
        [
            (None, (None, None)),
            ("3:9", (3, 9)),
            ("3:", (3, None)),
            (":9", (None, 9)),
            (" 3 : ", (3, None)),
            ((1, None), (1, None)),
        ],
    )
    def test_step_ranges(self, steps: Any, wanted: tuple[int | None, int | None]) -> None:
        assert parse_steps(steps) == wanted

    @pytest.mark.parametrize(
        "arguments, error, message",
        [
            ({"columns": ["sqnr"]}, UnknownNameError, "unknown column 'sqnr': did you mean 'sqnr_db'?"),
            ({"gemm": "x"}, UnknownNameError, "unknown gemm 'x': known are dgrad, fprop, wgrad"),
            (
                {"tensor": "grad"},
                UnknownNameError,
                "unknown tensor 'grad': did you mean 'grad_input' or 'grad_weight' or 'grad_output'?",
            ),
            ({"reference": "bf16"}, UnknownNameError, "unknown reference 'bf16': known are exact, operand, shadow"),
            (
                {"module": "blocks.9.mlp.up"},
                NoMatchError,
                "module 'blocks.9.mlp.up' matches nothing: did you mean 'blocks.1.mlp.up' or 'blocks.0.mlp.up' or"
                " 'blocks.1.mlp.down'?",
            ),
            ({"steps": "first"}, UsageError, "steps must be a step like 100 or a range like 100:200, 100: or :200, got 'first'"),
            (
                {"steps": (1, 2, 3)},
                UsageError,
                "steps must be a step like 100 or a range like 100:200, 100: or :200, got (1, 2, 3)",
            ),
        ],
    )
    def test_wrong_arguments(self, healthy: Run, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
        with pytest.raises(error) as caught:
            healthy.table(**arguments)
        assert str(caught.value) == message

    def test_has(self, healthy: Run) -> None:
        assert healthy.has("sqnr_db") and healthy.has("loss") and healthy.has("damage") and healthy.has("ranks")
        assert not healthy.has("loss_scale") and not healthy.has("no_such_metric")

    def test_modules(self, tmp_path: Path) -> None:
        entries = {"norm": {"kind": "RMSNorm", "reason": "no Linear"}}
        run = build(tmp_path / "run", num_steps=1, modules=MODULES[::-1], module_entries=entries)
        assert [m["fqn"] for m in run.modules] == [*(name for name, _, _ in MODULES[::-1]), "norm"]
        rows = run.sql("SELECT fqn, call_index, flops_per_token, observed FROM modules").to_pylist()
        assert rows[0] == {"fqn": MODULES[-1][0], "call_index": 0, "flops_per_token": 6 * 1024 * 256, "observed": True}
        assert rows[-1]["call_index"] is None and not rows[-1]["observed"]
        assert run.table(["step"], module="norm").num_rows == 0


class TestNamesAreData:
    NAMES = ("a'; DROP VIEW raw; --", 'b"c', "../../../etc/passwd", "d.[0].{e}?*", "ünï.☃", "")

    def test_hostile_module_names(self, tmp_path: Path) -> None:
        run = build(tmp_path / "run", num_steps=1, modules=[(name, 128, 128) for name in self.NAMES])
        assert [m["fqn"] for m in run.modules] == list(self.NAMES)
        for name in self.NAMES[:3]:
            assert set(run.table(["module"], module=name).to_pydict()["module"]) == {name}
        found = run.sql("SELECT count(*) AS n FROM sites WHERE module = ?", [self.NAMES[0]]).to_pylist()
        assert found == [{"n": 12}]
        found = run.sql("SELECT count(*) AS n FROM sites WHERE module = $m", {"m": self.NAMES[1]}).to_pylist()
        assert found == [{"n": 12}]

    @pytest.mark.parametrize("folder", ["with space", "it's", 'say "hi"', "[a]*?{b}", "ünï", "rank=00007", "a;b--c"])
    def test_hostile_folders(self, tmp_path: Path, folder: str) -> None:
        write(tmp_path / folder / "run", Plan(num_steps=11))
        (tmp_path / "xa" / "run").mkdir(parents=True)
        run = Run(tmp_path / folder / "run")
        assert run.problems == [] and run.ranks == [0]
        assert run.table(["step"]).num_rows == 2 * 6 * 12
        assert set(run.sql("SELECT rank FROM raw").to_pydict()["rank"]) == {0}

    def test_a_local_variable_is_no_table(self, healthy: Run) -> None:
        some_table = pa.table({"x": [1]})
        with pytest.raises(UsageError, match="some_table does not exist"):
            healthy.sql("SELECT * FROM some_table")
        del some_table

    @pytest.mark.parametrize(
        "query",
        ["", "SELEC 1", "SELECT nope FROM sites", "CREATE TABLE t (x INT)", "SELECT 1; SELECT 2", "COPY raw TO 'here'"],
    )
    def test_a_wrong_query_is_a_usage_error(self, healthy: Run, query: str) -> None:
        with pytest.raises(UsageError):
            healthy.sql(query)


class TestLive:
    def test_a_run_is_read_while_it_is_written(self, tmp_path: Path) -> None:
        plan = Plan(num_steps=60, every=1, modules=MODULES[:2])
        path = tmp_path / "run"
        writer = RunWriter(path, manifest={"modules": []})
        writer.steps({"step": -1})
        writer.flush()
        run = Run(path)
        done = threading.Event()

        def train() -> None:
            for step in range(plan.num_steps):
                rows = stats_rows(plan, step)
                writer.stats({name: [row.get(name) for row in rows] for name in {k for row in rows for k in row}})
                writer.steps({"step": step})
                writer.flush()
            writer.close()
            done.set()

        thread = threading.Thread(target=train)
        thread.start()
        seen = [0]
        while not done.is_set():
            run.refresh()
            assert run.problems == []
            seen.append(run.sql("SELECT count(*) AS n FROM raw").to_pylist()[0]["n"])
        thread.join()
        run.refresh()
        assert run.sql("SELECT count(*) AS n FROM raw").to_pylist() == [{"n": 60 * 2 * 12}]
        assert seen == sorted(seen)
        assert all(n % 24 == 0 for n in seen)

    def test_a_part_wins_over_its_stream(self, tmp_path: Path) -> None:
        path = tmp_path / "run"
        writer = RunWriter(path, manifest={})
        writer.steps({"step": 3})
        writer.flush()
        saved = (path / "rank=00000/steps-00000.arrows").read_bytes()
        writer.close()
        (path / "rank=00000/steps-00000.arrows").write_bytes(saved)
        assert Run(path).sql("SELECT step FROM steps").to_pylist() == [{"step": 3}]

    def test_many_threads_may_ask(self, healthy: Run) -> None:
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                for _ in range(10):
                    assert healthy.sql("SELECT max(sqnr_db) AS m FROM sites WHERE actual").num_rows == 1
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


class TestHealthyRun:
    def test_it_lies_in_the_envelope(self, healthy: Run) -> None:
        query = """
            SELECT reference, min(sqnr_db) AS low, max(sqnr_db) AS high, min(cosine) AS cosine,
                   max(underflow_rate) AS under, max(overflow_rate) AS over, max(abs(gain - 1)) AS gain
            FROM sites WHERE actual GROUP BY reference ORDER BY reference"""
        exact, operand, shadow = healthy.sql(query).to_pylist()
        assert 31.5 <= operand["low"] and operand["high"] <= 33.0 and operand["cosine"] >= 0.99965
        assert operand["under"] < 6e-4 and operand["over"] == 0 and operand["gain"] < 1e-12
        assert 28.4 <= shadow["low"] and shadow["high"] <= 29.3
        assert 54 <= exact["low"] and exact["high"] <= 56

    def test_overrides_hit_only_what_they_name(self, tmp_path: Path) -> None:
        sick = Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input", steps=(50, None), slots={"sqnr_db": 12.0})
        scaled = Override(module="blocks.0.*", tensor="weight", slots={"gain": 2.0})
        run = build(tmp_path / "run", overrides=[sick, scaled])
        rows = run.sql("SELECT DISTINCT module, gemm, tensor FROM sites WHERE sqnr_db < 20 AND gain < 1.5").to_pylist()
        assert rows == [{"module": "blocks.1.mlp.up", "gemm": "fprop", "tensor": "input"}]
        assert run.sql("SELECT min(step) AS s FROM sites WHERE module = 'blocks.1.mlp.up' AND sqnr_db < 20").to_pylist() == [
            {"s": 50}
        ]
        rows = run.sql("SELECT DISTINCT tensor, gain FROM sites WHERE gain > 1.5").to_pylist()
        assert rows == [{"tensor": "weight", "gain": 2.0}]


def test_reading_imports_neither_torch_nor_pandas_and_writing_no_duckdb() -> None:
    for module, forbidden in (("read.run", "torch pandas"), ("write.writer", "torch pandas duckdb"), ("schema", "torch duckdb")):
        code = f"import sys, fp8debug.store.{module}; print([m for m in {forbidden.split()!r} if m in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert done.stdout == "[]\n", done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_columns_are_those_of_the_view(tmp_path: Path, ranks: int) -> None:
    run = build(tmp_path / "run", num_steps=2, every=1, world_size=ranks)
    assert run.columns == run.sql("SELECT * FROM sites LIMIT 0").column_names
