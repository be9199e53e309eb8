"""DeepSpeed's own engine trains the same under a watch, under three kinds of ZeRO.

It is not in the dev extra: it is compiled when it is installed, and again when it first runs. ``pip install deepspeed`` beside
torch runs this test.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.ranks import launch
from tests.trainers.alike import num_sites, trained_alike

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all kinds in one job."""
    return launch("tests/trainers/deepspeed_job.py", tmp_path_factory.mktemp("deepspeed"))


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_its_engine_trains_the_same_and_tells_its_steps(trained: Path, stage: str) -> None:
    ranks, run = trained_alike(trained, stage)
    steps = run.sql("SELECT loss, lr, grad_norm FROM steps ORDER BY step").to_pylist()
    losses = [[sum(alone[0][2 * step : 2 * step + 2]) / 2 for alone, _ in ranks] for step in range(3)]
    assert [s["loss"] for s in steps] == pytest.approx([sum(both) / 2 for both in losses])
    assert {s["lr"] for s in steps} == {0.5} and steps[-1]["grad_norm"] == pytest.approx(ranks[0][0][1], rel=1e-5)
    (weight,) = run.sql(
        "SELECT max(numel) AS n FROM sites WHERE step = 0 AND module = 'blocks.1.down' AND gemm = 'fprop' AND tensor = 'weight'"
    ).to_pylist()
    assert weight["n"] == 64 * 192
    first = ("blocks.0.gate", "blocks.0.up")  # data want no gradient
    assert num_sites(run) == {m["fqn"]: 6 if m["fqn"] in first else 9 for m in run.modules}
