"""The volume of a run is known before it begins, and a budget is kept: by the plan, and by a cap if the plan was wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fp8debug
from fp8debug.adapters.watching.recording_ranks import num_recording, records_from_start
from fp8debug.errors import UsageError
from fp8debug.store.read.run import Run
from fp8debug.store.volume import STATS_ROW_BYTES, Volume, in_words, parse_size, plan_volume
from fp8debug.store.write import writer
from fp8debug.store.write.writer import RunWriter
from tests.store.recording import names_below, site_rows

#: 80 layers of 7 Linears, blockwise, two recipes tried beside it.
ROWS_OF_70B = 80 * 7 * 24


@pytest.mark.parametrize(
    ("text", "size"),
    [("50GB", 50 * 10**9), (" 1.5 tb ", 1.5 * 10**12), ("7", 7), ("200k", 200_000), (10**9, 10**9), (1e6, 10**6), ("1B", 1)],
)
def test_sizes(text: Any, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "x", "-5", "5 GiB", "0", True, None, float("nan"), float("inf"), [1]])
def test_no_sizes(text: Any) -> None:
    with pytest.raises(UsageError, match="a size is a number of bytes or a text such as '50GB'"):
        parse_size(text)


@pytest.mark.parametrize("ranks", [1, 16, 128, 1000, 1024])
@pytest.mark.parametrize("budget", ["50GB", "200GB", "5TB", "500TB"])
@pytest.mark.parametrize("every", [1, 10, 7, 64])
def test_70b_for_a_million_steps_stays_within_the_budget(ranks: int, budget: str, every: int) -> None:
    volume = plan_volume(ROWS_OF_70B, every=every, ranks=ranks, budget=budget)
    assert volume.bytes_in_all <= parse_size(budget)
    assert volume.every % every == 0 and 1 <= volume.ranks <= ranks
    tighter = Volume(rows_per_step=ROWS_OF_70B, every=volume.every - every, ranks=volume.ranks) if volume.every > every else None
    assert tighter is None or tighter.bytes_in_all > parse_size(budget)  # no step is given away
    assert volume.ranks == ranks or 2 * volume.ranks * volume.bytes_per_rank > parse_size(budget) * volume.every / 1000


def test_what_is_said() -> None:
    assert str(plan_volume(ROWS_OF_70B, ranks=1024, budget="50GB")) == (
        f"13440 rows, {in_words(13440 * STATS_ROW_BYTES)}, of each sampled step, one in 890, on 32 ranks: 49.9 GB in 1,000,000"
        " steps, within the budget of 50 GB"
    )
    assert str(Volume(rows_per_step=24, every=10, ranks=1, steps=100)) == (
        "24 rows, 2.4 kB, of each sampled step, one in 10, on 1 rank: 29 kB in 100 steps"
    )


def test_a_budget_for_nobody() -> None:
    with pytest.raises(UsageError, match=r"one rank, which take 1\.39 GB at every=1000; give more"):
        plan_volume(ROWS_OF_70B, budget="1GB")


def test_a_writer_that_reaches_its_share_goes_on_with_loss_and_events(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PART_ROWS", 300)
    opened = RunWriter(tmp_path / "run", manifest={}, max_bytes=200_000)
    for step in range(60):
        opened.stats(site_rows(step, 100))
        opened.steps({"step": step, "loss": 1.0})
        opened.flush()
    opened.close()
    assert opened.stopped is None
    size = sum(path.stat().st_size for path in (tmp_path / "run/rank=00000/stats").iterdir())
    assert 100_000 < size <= 200_000 and size == opened._parts.num_bytes
    assert not [name for name in names_below(tmp_path / "run") if name.endswith(".arrows")]
    run = Run(tmp_path / "run")
    assert run.sql("SELECT count(*) AS n FROM steps").to_pylist() == [{"n": 60}]
    last = run.sql("SELECT max(step) AS last FROM raw").to_pylist()[0]["last"]
    (event,) = run.sql("SELECT step, kind, message FROM events").to_pylist()
    assert event["kind"] == "recording" and event["message"].startswith("no more statistics of rank 0: they take ")
    assert 3 < last < 59 and event["step"] in (last, last + 1)
    assert capfd.readouterr().err == f"fp8debug: {event['message']}; loss and events are still recorded\n"


def test_a_budget_lets_fewer_ranks_record(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in range(8):
        monkeypatch.setenv("RANK", str(rank))
        model = fp8debug.convert(nn.Sequential(nn.Linear(32, 32)), "blockwise")
        fp8debug.watch(model, tmp_path / "run", budget="220kB", total_steps=1000).close()
        with pytest.raises(UsageError, match=r"does not hold these 8 ranks; it holds this: .* on 4 ranks: .*; give more, fewer"):
            fp8debug.watch(model, tmp_path / "other", budget="220kB", total_steps=1000, ranks="all")
    assert sorted(path.name for path in (tmp_path / "run").glob("rank=*")) == [f"rank=0000{rank}" for rank in (0, 2, 4, 6)]
    planned = "24 rows, 2.4 kB, of each sampled step, one in 500, on 4 ranks: 219 kB in 1,000 steps, within the budget of 220 kB"
    said = [line for line in capfd.readouterr().err.splitlines() if "will record" in line]
    assert said == [f"fp8debug: will record {planned}"]
    manifest = json.loads((tmp_path / "run/manifest.json").read_text())
    assert (manifest["ranks"], manifest["every"], manifest["planned"]["ranks"]) == ("4 of 8", 500, 4)


def test_of_one_replica_fewer_ranks_are_spread_over_its_stages() -> None:
    def mesh(dp: int, pp: int, tp: int) -> dict[str, Any]:
        return {"dims": ["dp", "pp", "tp"], "shape": [8, 16, 8], "coordinate": [dp, pp, tp]}

    assert num_recording(None, 1024, mesh(3, 1, 1)) == 128 and num_recording(None, 1024, {}) == 1
    assert num_recording("all", 1024, {}) == 1024 and num_recording([0, 8, 2000], 1024, {}) == 2
    places = [(pp, tp) for pp in range(16) for tp in range(8)]
    chosen = [(pp, tp) for at, (pp, tp) in enumerate(places) if records_from_start(None, at, 1024, mesh(0, pp, tp), 32)]
    assert chosen == [(pp, tp) for pp in range(16) for tp in (0, 4)]
    assert not any(records_from_start(None, 128 + at, 1024, mesh(1, pp, tp), 128) for at, (pp, tp) in enumerate(places))
