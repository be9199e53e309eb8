"""Which ranks of a large job record: one replica and whoever sees something wrong, or those that were asked for."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.adapters.watching.recording_ranks import records_from_start
from fp8debug.errors import UsageError
from fp8debug.observer.sharding import is_first_replica
from tests.recording.models import batch, net


def train(path: Path, rank: int, patch: pytest.MonkeyPatch, nan_at: int | None = None, **options: Any) -> None:
    """Train as one of 32 ranks; the weights turn into NaN at a step."""
    patch.setenv("RANK", str(rank))
    patch.setenv("WORLD_SIZE", "32")
    model = net()
    with fp8debug.watch(model, path, every=2, **options) as watch:
        for step in range(6):
            if step == nan_at:
                with torch.no_grad():
                    model.head.weight.fill_(math.nan)
            loss = nn.functional.cross_entropy(model(batch(step)[0]), batch(step)[1])
            loss.backward()
            watch.step(loss=loss)


def test_a_quiet_rank_leaves_nothing_until_something_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    train(run, 0, monkeypatch)
    train(run, 5, monkeypatch)
    assert not (run / "rank=00005").exists()
    opened = fp8debug.Run(run)
    assert opened.problems == [] and opened.manifest["ranks"] == "first replica"
    train(run, 7, monkeypatch, nan_at=3)
    woken = fp8debug.Run(run)
    assert woken.ranks == [0, 7]
    steps = woken.sql("SELECT step, loss FROM raw_steps WHERE rank = 7 ORDER BY step").to_pylist()
    assert [row["step"] for row in steps] == list(range(6))  # those before it too
    assert [math.isnan(row["loss"]) for row in steps] == [False] * 3 + [True] * 3
    assert woken.sql("SELECT DISTINCT step FROM raw WHERE rank = 7").column("step").to_pylist() == [4]
    messages = woken.sql("SELECT message FROM events WHERE rank = 7 AND kind = 'recording'").column("message").to_pylist()
    assert messages == ["rank 7 records from here on: loss is not finite"]


def test_ranks_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(tmp_path / "run", 5, monkeypatch, ranks="all")
    train(tmp_path / "run", 6, monkeypatch, ranks=[0, 6])
    train(tmp_path / "run", 7, monkeypatch, ranks=[0, 6])
    assert sorted(path.name for path in (tmp_path / "run").glob("rank=*")) == ["rank=00005", "rank=00006"]
    for wrong in ("first", [1, 2], [0, "1"]):
        with pytest.raises(UsageError, match=r"ranks must (hold rank 0|be 'all' or a list)"):
            fp8debug.watch(net(), tmp_path / "other", ranks=wrong)  # type: ignore[arg-type]  # mistakes


def test_the_first_replica() -> None:
    def of(rank: int, names: list[str], coordinate: list[int]) -> bool:
        return is_first_replica({"dims": names, "shape": [], "coordinate": coordinate}, rank)

    assert of(3, ["dp", "tp"], [0, 3]) and not of(8, ["dp", "tp"], [1, 0])
    assert of(12, ["pp", "dp_replicate", "dp_shard", "tp"], [1, 0, 0, 2])  # every stage and shard of the replica
    assert not of(1, ["dp_shard"], [1]) and of(0, [], []) and not of(1, [], [])
    assert all(records_from_start(None, rank, 16, {}) for rank in range(16))
    assert [rank for rank in range(17) if records_from_start(None, rank, 17, {})] == [0]
