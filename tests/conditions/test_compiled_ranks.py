"""Compiled blocks on two ranks: watched and unwatched the same bits and graphs, and recorded as eager code is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks
from tests.conditions import compiled_job
from tests.conditions.test_compiled_linear import assert_same_rows


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.launch("tests/conditions/compiled_job.py", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", compiled_job.CONDITIONS)
def test_bits_and_graphs_are_those_without_a_watch(name: str, job: Path) -> None:
    for alone, watched, eager in ranks.found_by(job, name):
        assert watched == alone and eager[0] == alone[0] and alone[1]


@pytest.mark.parametrize("name", compiled_job.CONDITIONS)
def test_rows_are_those_of_eager_code(name: str, job: Path) -> None:
    run = job / name.replace(" ", "-")
    assert_same_rows(run, run.with_suffix(".eager"))
    assert "belong to no watched module" not in (job / "said").read_text()
