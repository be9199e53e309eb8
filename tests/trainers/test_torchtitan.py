"""torchtitan's own Trainer trains the same under a watch, sharded, with its selective and its full checkpointing.

It is not in the dev extra: it pins versions that others here do not allow. ``pip install torchtitan`` into an environment of its
own beside torch and torchao runs this test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import fp8debug

pytestmark = pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all conditions in one job."""
    folder = tmp_path_factory.mktemp("titan")
    words = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    command = [sys.executable, *words, str(ROOT / "tests/trainers/titan_job.py"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (folder / "said").write_text(done.stderr)
    return folder


@pytest.mark.parametrize("name", ["selective", "full"])
def test_its_trainer_trains_the_same_and_tells_its_steps(trained: Path, name: str) -> None:
    ranks: list[Any] = [json.loads((trained / f"{rank}.json").read_text())[name] for rank in (0, 1)]
    for rank in ranks:
        assert isinstance(rank, list), rank
        alone, watched = rank
        assert watched == alone
    run = fp8debug.Run(trained / name)
    assert run.ranks == [0, 1] and run.problems == []
    rows = run.sql("SELECT step, rank, loss, grad_norm, lr FROM raw_steps ORDER BY step, rank").to_pylist()
    for step, (average, norm) in enumerate([one[1:] for one in ranks[0][0][:-1]]):
        own = [row for row in rows if row["step"] == step]
        assert sum(row["loss"] for row in own) / 2 == pytest.approx(average, rel=1e-5)
        assert [row["grad_norm"] for row in own] == pytest.approx([norm, norm], rel=1e-5)
    counts = run.sql("SELECT module, count(DISTINCT gemm || tensor) AS n FROM sites WHERE actual GROUP BY module").to_pylist()
    found = {row["module"]: row["n"] for row in counts}
    assert set(found) == {m["fqn"] for m in run.modules if m["fp8"]} and len(found) >= 10
    assert {name for name, n in found.items() if n < 8} == set()  # where the input is gone before wgrad its cast has no row
    assert "lm_head" in {m["fqn"] for m in run.modules if not m["fp8"]}
    merged = run.sql("SELECT max(num_tensors) AS n FROM sites WHERE reference = 'shadow' AND actual").to_pylist()
    assert merged == [{"n": 4}]  # two microbatches on two ranks; recomputed ones are not counted
