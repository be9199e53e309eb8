"""The short version of tests/bench/soak.py: many sampled steps are exact in every row, harm nothing and leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8debug.store.write import writer
from tests.bench.soak import soak


def test_three_hundred_sampled_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PART_ROWS", writer.PART_ROWS)  # set back afterwards
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = soak(300, tmp_path / "run", part_rows=600)
    finally:
        torch.set_num_threads(threads)
    assert found["wrong"] == []
    assert found["rows"] == 299 * found["rows_per_step"] and found["parts"] >= 3
