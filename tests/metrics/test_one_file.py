"""A new metric is one file: dropped into the package it is registered, measured, stored with its doc, and read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
METRIC = '''"""Elements above one."""
from fp8debug.metrics.base import METRICS, Derived, Pair, Slot


class Large:
    """Counts."""

    name, of_results, present = "large", True, "numel"
    slots = (Slot(name="num_large", merge="sum", kind="int64", unit="1", doc="elements beyond one"),)
    derived = {"large_rate": Derived(expression="num_large / numel", unit="1", doc="their share")}

    def partial(self, pair: Pair) -> dict:
        return {"num_large": (pair.source.magnitude > 1).count_nonzero()}


METRICS.add(Large.name, Large())
'''
USE = """
import pyarrow.parquet as pq, torch, fp8debug
assert fp8debug.measure(torch.tensor([0.5, 2.0, -3.0]), fp8debug.Cast())["num_large"] == 2
model = fp8debug.convert(torch.nn.Sequential(torch.nn.Linear(8, 8)), "blockwise")
with fp8debug.watch(model, "run") as watch:
    model(torch.full((4, 8), 2.0)).sum().backward()
    watch.step()
(row,) = fp8debug.Run("run").table(["num_large", "large_rate"], gemm="fprop", tensor="input", actual=True).to_pylist()
assert row == {"num_large": 32, "large_rate": 1.0}, row
field = pq.read_schema("run/rank=00000/stats/part-00000.parquet").field("num_large")
assert b"Elements beyond one" in field.metadata[b"doc"], field.metadata
"""


def test_a_metric_is_one_file(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fp8debug", tmp_path / "fp8debug", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "fp8debug" / "metrics" / "large.py").write_text(METRIC)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
