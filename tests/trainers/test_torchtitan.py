"""torchtitan's own Trainer trains the same under a watch, sharded, with its selective and its full checkpointing.

It is not in the dev extra: it pins versions that others here do not allow. ``pip install torchtitan`` into an environment of its
own beside torch and torchao runs this test.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import launch
from tests.trainers.alike import num_sites, trained_alike

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all conditions in one job."""
    return launch("tests/trainers/titan_job.py", tmp_path_factory.mktemp("titan"))


@pytest.mark.parametrize("name", ["selective", "full"])
def test_its_trainer_trains_the_same_and_tells_its_steps(trained: Path, name: str) -> None:
    ranks, run = trained_alike(trained, name)
    rows = run.sql("SELECT step, rank, loss, grad_norm, lr FROM raw_steps ORDER BY step, rank").to_pylist()
    for step, (average, norm) in enumerate([one[1:] for one in ranks[0][0][:-1]]):
        own = [row for row in rows if row["step"] == step]
        assert sum(row["loss"] for row in own) / 2 == pytest.approx(average, rel=1e-5)
        assert [row["grad_norm"] for row in own] == pytest.approx([norm, norm], rel=1e-5)
    found = num_sites(run)
    assert set(found) == {m["fqn"] for m in run.modules if m["fp8"]} and len(found) >= 10
    assert {name for name, n in found.items() if n < 8} == set()  # where the input is gone before wgrad its cast has no row
    assert "lm_head" in {m["fqn"] for m in run.modules if not m["fp8"]}
    merged = run.sql("SELECT max(num_tensors) AS n FROM sites WHERE reference = 'shadow' AND actual").to_pylist()
    assert merged == [{"n": 4}]  # two microbatches on two ranks; recomputed ones are not counted
