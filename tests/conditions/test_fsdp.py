"""FSDP2 gathers and frees parameters between GEMMs: no bit differs, and nothing counts as overwritten that is not."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import fp8debug
from tests.conditions import fsdp_job as job
from tests.ranks import launch


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all conditions in one job of two ranks."""
    return launch("tests/conditions/fsdp_job.py", tmp_path_factory.mktemp("fsdp"))


def rows_of(run: fp8debug.Run) -> set[tuple[Any, ...]]:
    """Return what was recorded: of each step and rank the sites, and how many tensors each row is of."""
    query = "SELECT step, rank, module, gemm, tensor, reference, cast_name, num_tensors FROM raw WHERE actual"
    return {tuple(row.values()) for row in run.sql(query).to_pylist()}


@pytest.mark.parametrize("name", [name for name in job.CONDITIONS if "-alone-" not in name])
def test_rows_are_those_of_the_model_on_one_rank(name: str, trained: Path) -> None:
    for rank in (0, 1):
        found = json.loads((trained / f"{rank}.json").read_text())[name]
        assert isinstance(found, list), found
        assert len(found[0]) == job.STEPS * job.PARTS and found[0] == found[1]
    model, _, how = job.CONDITIONS[name]
    run = fp8debug.Run(trained / name)
    expected = rows_of(fp8debug.Run(trained / f"{model}-alone-{how}"))
    assert len(expected) > 100 and rows_of(run) == expected
    events = run.sql("SELECT DISTINCT message FROM events").column("message").to_pylist()
    assert not [message for message in events if "overwritten" in message or "taken away" in message], events


@pytest.mark.parametrize("name", [name for name in job.CONDITIONS if "-alone-" not in name])
def test_shards_of_other_parameters_add_up_to_the_whole(name: str, trained: Path) -> None:
    model, _, how = job.CONDITIONS[name]
    query = (
        "SELECT parameter, shape, step, CAST(sum(numel) AS INT) AS numel, bool_and(has_grad) AS has_grad,"
        " CAST(sum(num_moved) AS INT) AS moved, min(optimizer) AS optimizer FROM raw_parameters GROUP BY ALL ORDER BY ALL"
    )
    found = fp8debug.Run(trained / name).sql(query).to_pylist()
    assert {row["step"] for row in found} == {0, 1}
    for row in found:
        assert row["numel"] == math.prod(json.loads(row["shape"])), "each element is on one rank"
        assert row["has_grad"] and row["optimizer"] == "SGD"
    alone = fp8debug.Run(trained / f"{model}-alone-{how}").sql(query).to_pylist()
    assert [row["parameter"] for row in found] == [row["parameter"] for row in alone]
