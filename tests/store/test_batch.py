"""Rows that are described as those before become arrays once, and the writer's thread lets others run in between."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from fp8debug.store.batch import Known, record_batch
from fp8debug.store.schema import arrow_schema
from fp8debug.store.worker import Worker


def columns(step: int, names: list[str]) -> dict[str, Any]:
    return {"step": np.full(len(names), step), "rank": 0, "module": names, "numel": np.arange(len(names))}


def test_the_same_list_is_the_same_array() -> None:
    schema, known, names = arrow_schema("stats"), Known(), [f"layer.{i}" for i in range(20)]
    pauses: list[int] = []
    first = record_batch(schema, columns(1, names), known, lambda: pauses.append(1))
    again = record_batch(schema, columns(2, names), known)
    other = record_batch(schema, columns(3, [name.upper() for name in names]), known)
    assert first["module"].to_pylist() == again["module"].to_pylist() == names
    assert first["module"].buffers()[2].address == again["module"].buffers()[2].address
    assert other["module"].to_pylist() == [name.upper() for name in names]
    assert again["step"].to_pylist() == [2] * 20 and len(pauses) > 3


def test_a_job_breathes_while_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    go, started = threading.Event(), threading.Event()
    jobs = Worker("test", lambda error: None, lambda: None, 60.0)
    jobs.breathe()  # not a job
    jobs.put(jobs.breathe)
    assert jobs.wait(10) and len(slept) == 1

    def late() -> None:
        started.set()
        go.wait(10)
        jobs.breathe()

    jobs.put(late)
    assert started.wait(10)
    for _ in range(10):
        jobs.put(lambda: None)
    go.set()
    assert jobs.end(10) and len(slept) == 1
