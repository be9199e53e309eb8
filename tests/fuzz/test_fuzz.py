"""Any byte of any file may be wrong: a fixed budget of damage, the same at every call; tests/fuzz/long.py goes on for longer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from fp8debug.store.stream import write_part
from tests.fuzz import targets
from tests.fuzz.targets import COMMANDS, Template, changed, read_run, run_command
from tests.store.test_dump_files import written

CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]


def budget(number: int) -> settings:
    phases = (Phase.explicit, Phase.generate)  # a failure is told as it was found: shrinking it has no budget
    return settings(
        max_examples=number, derandomize=True, database=None, deadline=None, phases=phases, suppress_health_check=CHECKS
    )


#: Few bytes, as a disk flips them, from the start of a file and from its end, where Parquet keeps its footer.
changes = st.lists(st.tuples(st.integers(0, 1 << 16) | st.integers(-4096, -1), st.integers(0, 255)), min_size=1, max_size=4)
lengths = st.none() | st.integers(0, 1 << 16)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
KEYS = (
    *("schema", "schema_version", "modules", "filters", "outside", "recipe", "environment", "argv", "what_if", "world_size"),
    *("shapes", "fallbacks", "kind", "recipes", "writings", "mesh", "name", "compute", "plain_recipe", "every", "created"),
    *("fqn", "in_features", "casts", "gemms", "module", "cast", "tensor", "from_step", "tokens", "first_part", "rules", "select"),
)
documents = st.dictionaries(st.sampled_from(KEYS), json_values | st.lists(st.dictionaries(st.sampled_from(KEYS), json_values)))


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("template"))


@given(number=st.integers(0, 30), changes=changes, length=lengths)
@budget(40)
def test_a_run_with_any_bytes_wrong_is_read_or_refused_in_one_line(
    template: Template, number: int, changes: list[tuple[int, int]], length: int | None
) -> None:
    with template.damaged(number, lambda whole: changed(whole, changes, length)):
        read_run(template.path)


@given(number=st.integers(0, 30), changes=changes, which=st.integers(0, len(COMMANDS) - 1))
@budget(8)
def test_commands_say_what_is_wrong_and_end_with_a_code(
    template: Template, number: int, changes: list[tuple[int, int]], which: int
) -> None:
    with template.damaged(number, lambda whole: changed(whole, changes)):
        run_command(template.path, *COMMANDS[which])


def test_nothing_was_left_damaged(template: Template) -> None:
    assert read_run(template.path) == []
    assert run_command(template.path, *COMMANDS[0])[0] == 0


@given(changes=changes, length=lengths)
@budget(150)
def test_streams(template: Template, tmp_path: Path, changes: list[tuple[int, int]], length: int | None) -> None:
    (stream,) = template.path.glob("rank=00000/stats-*.arrows")
    rows = targets.read_stream(tmp_path, changed(stream.read_bytes(), changes, length))
    assert 0 <= rows <= 6


@given(changes=changes, length=lengths)
@budget(100)
def test_footers(template: Template, tmp_path: Path, changes: list[tuple[int, int]], length: int | None) -> None:
    whole = (template.path / "rank=00000/steps/part-00000.parquet").read_bytes()
    targets.read_parquet(tmp_path, changed(whole, [(-abs(place), value) for place, value in changes], length))


@given(document=documents)
@example(document={"modules": [{"fqn": "a", "casts": {"fprop.input": {"format": []}}}], "world_size": 10**9})
@example(document={"schema": 1, "shapes": [{"modules": "up", "gemms": {}}]})
@example(document={"fallbacks": [{"module": ["a"], "gemms": 3, "cast": {"format": 1}}]})
@budget(120)
def test_documents_of_the_wrong_shape(tmp_path: Path, document: dict[str, Any]) -> None:
    targets.read_documents(tmp_path, json.dumps(document).encode())


@given(data=st.binary(max_size=64))
@example(data=b"[" * 100_000)
@example(data=b'{"a":' * 5_000 + b"1" + b"}" * 5_000)
@example(data=b"a = " + b"[" * 100_000)
@example(data=b"1" * 5_000)
@example(data=b"\xff\xfe")
@budget(60)
def test_documents_that_are_none(tmp_path: Path, data: bytes) -> None:
    targets.read_documents(tmp_path, data)


@given(changes=changes, length=lengths)
@budget(150)
def test_dumps(tmp_path: Path, changes: list[tuple[int, int]], length: int | None) -> None:
    whole = written(tmp_path / "whole.safetensors").read_bytes()
    targets.read_dump(tmp_path, changed(whole, changes, length))


ODD: dict[str, list[Any]] = {
    "int64": [-1, -(2**63), 2**63 - 1, 0, None],
    "int32": [-1, 2**31 - 1, None],
    "double": [float("nan"), float("inf"), -1.0, 1e308, 0.0, None],
    "float": [float("nan"), float("-inf"), 3e38, None],
    "string": ["", "x" * 5000, "\x1b[2J", "::error::x", "a\nb", None],
    "bool": [True, False, None],
}


@given(data=st.data())
@budget(6)
def test_values_that_no_recording_has(template: Template, data: st.DataObject) -> None:
    table_name = data.draw(st.sampled_from(["stats", "stats", "steps"]))
    part = template.path / f"rank=00000/{table_name}/part-00000.parquet"
    table = pq.ParquetFile(part).read()
    for name in data.draw(st.lists(st.sampled_from(table.schema.names), min_size=1, max_size=3, unique=True)):
        place = table.schema.get_field_index(name)
        kind = str(table.schema.types[place])
        if kind in ODD:
            row = data.draw(st.integers(0, table.num_rows - 1))
            values = table[name].to_pylist()
            values[row] = data.draw(st.sampled_from(ODD[kind]))
            table = table.set_column(place, table.schema.field(name), pa.array(values, table.schema.types[place]))
    whole = part.read_bytes()
    try:
        write_part(table, part)
        run_command(template.path, "triage", "--fail-on", "never")
    finally:
        part.write_bytes(whole)


def test_a_column_may_be_of_any_kind_of_number(template: Template) -> None:
    part = template.path / "rank=00000/stats/part-00000.parquet"
    whole, table = part.read_bytes(), pq.ParquetFile(part).read()
    place = table.schema.get_field_index("step")
    steps = np.where(np.arange(table.num_rows) % 2, np.nan, 1.0)
    try:
        write_part(table.set_column(place, "step", pa.array(steps)), part)
        run_command(template.path, *COMMANDS[0])
        assert not any("step" in problem for problem in read_run(template.path))
    finally:
        part.write_bytes(whole)
