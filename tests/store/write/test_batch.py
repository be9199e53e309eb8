"""Lists become arrays in pieces, a row becomes a batch at once, and the writer's thread lets others run in between."""

from __future__ import annotations

import threading
import time
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp8debug.store.schema import arrow_schema
from fp8debug.store.write import batch, worker
from fp8debug.store.write.batch import record_batch, row_batch
from fp8debug.store.write.worker import Worker


def columns(step: int, names: list[str]) -> dict[str, Any]:
    return {"step": np.full(len(names), step), "rank": 0, "module": names, "numel": np.arange(len(names))}


def test_others_may_run_at_each_list_that_is_made() -> None:
    pauses: list[int] = []
    made = record_batch(arrow_schema("stats"), columns(2, list("abc")), lambda: pauses.append(1))
    assert made["module"].to_pylist() == list("abc") and made["step"].to_pylist() == [2] * 3
    assert len(pauses) == 5  # at the start, for each column that is made, at the end


@pytest.mark.parametrize("table", ["steps", "events"])
def test_a_row_becomes_the_batch_that_its_columns_become(table: str) -> None:
    now = datetime.now(timezone.utc)
    steps = {"step": 3, "rank": 1, "time": now, "sampled": True, "loss": np.float32(2.5), "grad_norm": float("nan"), "tokens": 7}
    events = {"step": None, "rank": 0, "time": now, "kind": "nonfinite", "module": None, "message": "of \u03b1"}
    rows: dict[str, dict[str, Any]] = {"steps": steps, "events": events}
    row, schema = rows[table], arrow_schema(table)
    made, expected = row_batch(schema, row), record_batch(schema, {name: [value] for name, value in row.items()})
    made.validate(full=True)
    assert made.schema.equals(schema, check_metadata=True)
    assert str(made.to_pylist()) == str(expected.to_pylist())  # NaN is not NaN, but both are written nan
    with pytest.raises(ValueError, match=f"columns moon are not in the schema of {table}"):
        row_batch(schema, {**row, "moon": 1})


def test_a_long_list_becomes_one_array_in_pieces() -> None:
    schema, names, pauses = arrow_schema("stats"), [f"layer.{i}" for i in range(2 * batch._PIECE + 3)], list[int]()
    pauses_of = {}
    for count in (1, len(names)):
        made = record_batch(schema, columns(1, names[:count]), lambda: pauses.append(1))
        pauses_of[count] = len(pauses)
        pauses.clear()
        assert made["module"].to_pylist() == names[:count] and made["rank"].to_pylist() == [0] * count
    assert pauses_of[len(names)] == pauses_of[1] + 2


def test_a_job_breathes_once_it_has_worked_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer before where many jobs wait; whoever is no job never does, nor one that is waited for."""
    slept: list[float] = []
    now = [100.0]
    own = SimpleNamespace(sleep=slept.append, perf_counter=lambda: now[0], monotonic=time.monotonic)
    monkeypatch.setattr(worker, "time", own)  # and nobody else's: other threads of the tests sleep too
    go, started, done = threading.Event(), threading.Event(), threading.Event()
    jobs = Worker("test", lambda error: None, lambda: None, 60.0)
    jobs.breathe()  # not a job

    def work() -> None:
        for _ in range(3):  # the first and the third
            jobs.breathe()
            now[0] += 0.7 * worker._WORK_S

    jobs.put(work)
    jobs.put(done.set)
    assert done.wait(10) and len(slept) == 2

    def late() -> None:
        started.set()
        go.wait(10)
        for seconds in (2 * worker._WORK_S, worker._LONGER * worker._WORK_S):
            now[0] += seconds
            jobs.breathe()

    jobs.put(late)
    assert started.wait(10)
    for _ in range(10):
        jobs.put(lambda: None)
    jobs.put(done.set)
    done.clear()
    go.set()
    assert done.wait(10) and len(slept) == 3
    go.clear()

    def awaited() -> None:
        go.wait(10)
        work()

    jobs.put(awaited)
    threading.Timer(0.2, go.set).start()
    assert jobs.end(10) and len(slept) == 3
