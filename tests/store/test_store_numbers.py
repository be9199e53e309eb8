"""Columns of answers as numpy arrays, without pandas."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.store.columns import numbers_of


def test_numbers_of_slices_chunks_and_nothing() -> None:
    parts = pa.chunked_array([pa.array([1, 2, 3])[1:], pa.array([], pa.int64()), pa.array([4, None, 6])[:2]])
    found = numbers_of(parts, np.int64)
    assert found.shape == (4,) and found[:3].tolist() == [2, 3, 4]
    assert numbers_of(pa.array([0.5, 1.5, 2.5], pa.float32())[2:], np.float32).tolist() == [2.5]
    assert numbers_of(pa.chunked_array([], pa.int32()), np.int32).tolist() == []


def test_the_spreads_of_histograms_come_without_pandas(tmp_path: Path) -> None:
    hist = pa.array([[1] * NUM_BINS, None], pa.list_(pa.int64()))
    rows = {"step": [0, 0], "module": ["a", "a"], "amax": pa.array([1.0, None]), "log2_hist": hist}
    pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
    code = (
        "import sys, duckdb; from fp8debug.rules.reading.outlier_spread import bound_log2;"
        " rows = duckdb.read_parquet(sys.argv[1]).to_arrow_table(); assert bound_log2(rows)[1] == {'a': 1};"
        " assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "rows.parquet")], check=True)
