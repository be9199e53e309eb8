"""Compiled blocks on two ranks: watched and unwatched the same bits and graphs, recorded as eager code is or reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ranks
from tests.conditions import compiled_job
from tests.conditions.test_compiled_linear import assert_same_rows

#: Report of a condition under which the blocks are not recorded, and how often it is there: once on each rank.
REPORTED = {"ddp inside": ("called by code under torch.compile that is no compiled module of the watched model", 2)}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranks.launch("tests/conditions/compiled_job.py", tmp_path_factory.mktemp("compiled"))


@pytest.mark.parametrize("name", compiled_job.CONDITIONS)
def test_bits_and_graphs_are_those_without_a_watch(name: str, job: Path) -> None:
    for alone, watched, eager in ranks.found_by(job, name):
        assert watched == alone and eager[0] == alone[0] and alone[1]


@pytest.mark.parametrize("name", compiled_job.CONDITIONS)
def test_rows_are_those_of_eager_code_or_it_is_reported(name: str, job: Path) -> None:
    run = job / name.replace(" ", "-")
    if name in REPORTED:
        text, times = REPORTED[name]
        assert (job / "said").read_text().count(text) == times
    else:
        assert_same_rows(run, run.with_suffix(".eager"))
    assert "belong to no watched module" not in (job / "said").read_text()
