"""Sites read from the parts that differ in them: the same answers as from all rows, whatever the files are like."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fp8debug.store.read.files import scan
from fp8debug.store.read.recent import RecentRun
from fp8debug.store.read.repeats import SITE_COLUMNS
from fp8debug.store.read.resumed import open_runs
from fp8debug.store.read.run import Run
from fp8debug.store.stream import write_part
from fp8debug.store.write import writer as writers
from fp8debug.store.write.writer import RunWriter
from fp8debug_dashboard.data import queries
from fp8debug_dashboard.data.large_run import LargeRun
from fp8debug_dashboard.data.site_rows import COLUMNS, keys_of
from tests.synthetic import MODULES, Plan, manifest_of, stats_rows, steps_row, write

MODULE = "blocks.1.mlp.up"


def plan(num_steps: int = 100, world_size: int = 1) -> Plan:
    return Plan(num_steps=num_steps, world_size=world_size, modules=MODULES[1:5], what_if=("tensorwise_current",))


ROWS = len(stats_rows(plan(), 0))


@pytest.fixture(autouse=True)
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sampled steps make a part."""
    monkeypatch.setattr(writers, "PART_ROWS", 2 * ROWS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of five parts, in a folder of a name that a large run looks for in a query."""
    path = tmp_path_factory.mktemp("recorded") / "modules"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "PART_ROWS", 2 * ROWS)
        write(path, plan())
    assert len(parts(path)) == 5
    return path


@pytest.fixture
def path(recorded: Path, tmp_path: Path) -> Path:
    """Copy of that run, to be changed."""
    return Path(shutil.copytree(recorded, tmp_path / recorded.name))


def write_from(path: Path, start: int, end: int, resume: bool = True) -> None:
    """Write steps of a run, as one that is resumed does."""
    own = plan(end)
    writer = RunWriter(path, manifest=manifest_of(own), rank_manifest={"device": "cpu"}, resume=resume)
    for step in range(start, end):
        if step % own.every == 0:
            rows = stats_rows(own, step)
            names = {name for row in rows for name in row}
            writer.stats({name: [row.get(name) for row in rows] for name in names})
            writer.flush()
        writer.steps(steps_row(own, step, is_sampled=step % own.every == 0))
    writer.close()


def parts(path: Path) -> list[Path]:
    return sorted(path.glob("rank=*/stats/part-*.parquet"))


def change(part: Path, name: str, change: Callable[[list[object], dict[str, list[object]]], list[object]]) -> None:
    """Rewrite a column of a part; the function gets its values and those of all columns."""
    table = pq.ParquetFile(part).read()
    place = table.schema.get_field_index(name)
    values = change(table.column(name).to_pylist(), table.to_pydict())
    write_part(table.set_column(place, table.schema.field(place), pa.array(values, table.schema.field(place).type)), part)


def earlier_call(path: Path) -> None:
    """Call a module earlier than ever in a step in the middle."""

    def moved(values: list[object], columns: dict[str, list[object]]) -> list[object]:
        return [-7 if columns["step"][i] == 50 and columns["module"][i] == MODULE else value for i, value in enumerate(values)]

    change(parts(path)[2], "call_index", moved)


def other_name(path: Path) -> None:
    """Give a module a name of equal length in a part."""
    change(parts(path)[3], "module", lambda values, _: [str(value).replace("up", "uq") for value in values])


def late_cast(path: Path) -> None:
    """Run a what-if's cast in the last row of the last part."""
    change(parts(path)[-1], "actual", lambda values, _: [*values[:-1], not values[-1]])
    change(parts(path)[-1], "cast_name", lambda values, _: ["seen once", *values[1:]])


def shuffled(path: Path) -> None:
    """Mix the rows of two parts."""
    for seed, part in enumerate(parts(path)[1:3]):
        table = pq.ParquetFile(part).read()
        write_part(table.take(pa.array(np.random.default_rng(seed).permutation(table.num_rows))), part)


def damaged_sites(path: Path) -> None:
    """Overwrite the modules of a part."""
    part = parts(path)[1]
    chunk = pq.read_metadata(part).row_group(0).column(pq.read_schema(part).get_field_index("module"))
    data = bytearray(part.read_bytes())
    end = chunk.dictionary_page_offset + chunk.total_compressed_size
    data[chunk.dictionary_page_offset : end] = b"\xff" * chunk.total_compressed_size
    part.write_bytes(data)


def damaged_footer(path: Path) -> None:
    """Cut a part short."""
    parts(path)[0].write_bytes(parts(path)[0].read_bytes()[:-20])


def without_column(path: Path) -> None:
    """Leave the place of calls out of the first part, as an older version did."""
    table = pq.ParquetFile(parts(path)[0]).read()
    write_part(table.drop_columns(["call_index"]), parts(path)[0])


def wide_steps(path: Path) -> None:
    """Store steps as int64, beyond what a step may be in the first part."""
    for number, part in enumerate(parts(path)):
        table = pq.ParquetFile(part).read()
        steps = pa.array([step + (2**32 if number == 0 else 0) for step in table.column("step").to_pylist()], pa.int64())
        table = table.set_column(0, pa.field("step", pa.int64()), steps)
        write_part(table, part)


def lost_keys(path: Path) -> None:
    """Leave the module out of some rows of a part."""
    change(parts(path)[1], "module", lambda values, _: [None if i % 5 == 0 else value for i, value in enumerate(values)])


def copied_rank(path: Path) -> None:
    """Add a rank whose parts are copies of those of the first."""
    shutil.copytree(path / "rank=00000", path / "rank=00001")


def answers(run: Run, source: str) -> list[object]:
    """Return what is asked of the sites, from the files that differ or from all rows."""
    asked = [
        "SELECT module, min(call_index) AS a, max(call_index) AS b FROM {} WHERE module IS NOT NULL GROUP BY ALL ORDER BY ALL",
        f"SELECT DISTINCT {', '.join(COLUMNS)} FROM {{}} WHERE step IS NOT NULL ORDER BY ALL",
        f"SELECT DISTINCT {', '.join(SITE_COLUMNS)} FROM {{}} ORDER BY ALL",
        "SELECT cast_name, bool_or(actual) AS running FROM {} WHERE reference = 'operand' GROUP BY ALL ORDER BY 1",
    ]
    ask = run.sql if source == "raw" else run.distinct_sites
    return [ask(query.format(source)).to_pylist() for query in asked]


def num_parts(run: Run) -> tuple[int, int]:
    """Return how many parts of statistics there are, and how many the sites are read from."""
    files = scan(run.path)
    return sum(1 for _ in files.of("stats")), sum(1 for _ in files.without_repeats().of("stats"))


def nothing(path: Path) -> None:
    """Change nothing."""


CHANGES: dict[Callable[[Path], None], int] = {  # parts of five, or of ten, that are read
    nothing: 1,
    earlier_call: 2,
    other_name: 2,
    late_cast: 2,
    shuffled: 3,
    damaged_sites: 2,
    damaged_footer: 1,
    without_column: 2,
    wide_steps: 2,
    lost_keys: 2,
    copied_rank: 1,
}


@pytest.mark.parametrize("kind", [Run, LargeRun], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("changed", CHANGES, ids=lambda changed: changed.__name__)
def test_the_sites_are_those_of_all_rows(path: Path, changed: Callable[[Path], None], kind: type[Run]) -> None:
    changed(path)
    run = kind(path)
    # First, so that damage is met here.
    found = answers(run, "site_rows")
    assert found == answers(run, "raw") and all(found)
    assert num_parts(Run(path))[1] == CHANGES[changed]
    assert run.num_rows == run.sql("SELECT count(*) AS n FROM raw").to_pylist()[0]["n"]
    assert len(run.problems) == (changed in (damaged_sites, damaged_footer))
    rows = run.sql("SELECT cast_name, bool_or(actual) AS n FROM stats WHERE reference = 'operand' GROUP BY 1").to_pylist()
    assert sorted(queries.casts(run)) == sorted((row["cast_name"], row["n"]) for row in rows)
    assert keys_of(run) == keys_of(run, "TRUE")
    called = {row["module"]: row["a"] for row in found[0]}  # type: ignore[attr-defined]
    assert {m["fqn"]: m["call_index"] for m in run.modules} == called
    assert [m["call_index"] for m in run.modules] == sorted(called.values())


def test_damage_met_by_the_first_question_of_the_sites(path: Path) -> None:
    """The files were whole when the run was opened."""
    run = LargeRun(path)
    for part in parts(path)[:-1]:
        data = bytearray(part.read_bytes())
        end = len(data) // 3
        data[4:end] = b"\xff" * (end - 4)
        part.write_bytes(data)
    assert answers(run, "site_rows") == answers(run, "raw")
    assert len(run.problems) == 4


def test_what_a_later_writing_replaced_does_not_stand_for_others(tmp_path: Path) -> None:
    """The last row of either part is of a cast of its own: that of the first part was replaced, that of the second counts."""
    write(tmp_path / "run", plan(20))
    write_from(tmp_path / "run", 10, 30)
    for part in parts(tmp_path / "run"):
        change(part, "cast_name", lambda values, _: [*values[:-1], "seen once"])
    run = Run(tmp_path / "run")
    assert answers(run, "site_rows") == answers(run, "raw")
    assert ("seen once" in {key[2] for key in keys_of(run)}) and num_parts(run) == (2, 2)
    assert run.num_rows == 3 * ROWS


def test_parts_of_a_later_writing_repeat_those_of_an_earlier(tmp_path: Path) -> None:
    write(tmp_path / "run", plan(60))
    write_from(tmp_path / "run", 20, 100)
    run = Run(tmp_path / "run")
    assert answers(run, "site_rows") == answers(run, "raw")
    assert num_parts(run) == (7, 3)  # two of the first writing are replaced, and read: no row of theirs counts


def test_several_ranks_and_streams(tmp_path: Path) -> None:
    write(tmp_path / "run", plan(world_size=3))
    live = RunWriter(tmp_path / "run", rank=3, world_size=4, manifest=manifest_of(plan()), rank_manifest={"device": "cpu"})
    rows = [{**row, "module": "blocks.9.new"} for row in stats_rows(plan(), 0, 3)]
    live.stats({name: [row.get(name) for row in rows] for name in {name for row in rows for name in row}})
    live.steps(steps_row(plan(), 0, is_sampled=True))
    live.flush()
    run = Run(tmp_path / "run")
    live.close()
    assert run.ranks == [0, 1, 2, 3] and "blocks.9.new" in {m["fqn"] for m in run.modules}
    assert answers(run, "site_rows") == answers(run, "raw")


def test_folders_of_one_run(tmp_path: Path) -> None:
    write(tmp_path / "first", plan(60))
    write_from(tmp_path / "second", 50, 120, resume=False)
    earlier_call(tmp_path / "first")  # at step 50, which the second folder replaces
    run = open_runs([tmp_path / "first", tmp_path / "second"])
    assert answers(run, "site_rows") == answers(run, "raw")
    assert min(m["call_index"] for m in run.modules) == 0


def test_a_window_of_the_last_steps_has_the_sites_of_its_own_rows(path: Path) -> None:
    earlier_call(path)
    run = RecentRun(path, num_sampled=3)
    assert run.num_rows == 3 * ROWS
    assert answers(run, "site_rows") == answers(run, "raw")
    assert min(m["call_index"] for m in run.modules) == 0


def test_a_refresh_reads_the_new_parts(tmp_path: Path) -> None:
    write(tmp_path / "run", plan(40))
    run = Run(tmp_path / "run")
    late_cast(tmp_path / "run")
    run.refresh()
    assert answers(run, "site_rows") == answers(run, "raw")
    assert "seen once" in {name for name, _ in queries.casts(run)}
