"""A sheet that is filled in again holds what its step has, and nothing of the step before."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import nn

import fp8debug
from fp8debug.adapters.watching.row_batch import BatchCache, RowBatch
from fp8debug.metrics import METRICS, slots
from fp8debug.observer.observer import RowInfo, RowKey
from fp8debug.observer.table import Group, TableLayout
from fp8debug.store.schema import arrow_schema
from fp8debug.types import Gemm, Reference, TensorRole
from tests.store.recording import python

RANDOM = np.random.default_rng(0)
LAYOUTS = {num_rows: TableLayout(num_rows) for num_rows in (3, 12, *(2 * n for n in (1, 7, 8, 65)))}
PLACES = LAYOUTS[3].places
KEYS = [
    RowKey(Gemm.FPROP, TensorRole.INPUT, "e4m3 1x128", Reference.OPERAND, True),
    RowKey(Gemm.FPROP, TensorRole.OUTPUT, "e4m3 1x128 @ e4m3 128x128", Reference.SHADOW, True),
    RowKey(Gemm.DGRAD, TensorRole.WEIGHT, "e4m3 tensorwise", Reference.OPERAND, False),
]
NEUTRAL = {"sum": 0.0, "max": -math.inf, "min": math.inf}
Parts = dict[Group, np.ndarray[Any, Any]]
Memory = np.ndarray[Any, np.dtype[np.uint8]]


def infos(rows: list[int], first: int = 0) -> dict[int, RowInfo]:
    return {row: RowInfo(f"layer.{row // 3}", first + row // 3, KEYS[row % 3]) for row in rows}


def filled(num_rows: int, odd: float) -> tuple[Memory, Parts]:
    """A table of which that share of the numbers is 0, not finite, or what nobody has touched: all of it, and its groups."""
    memory = torch.zeros(LAYOUTS[num_rows].num_bytes, dtype=torch.uint8)
    parts = {group: part.numpy() for group, part in LAYOUTS[num_rows].cut(memory).items()}
    for (kind, merge), part in parts.items():
        strange = [0, 0] if kind == "int64" else [0.0, NEUTRAL[merge], math.nan, math.inf, -math.inf]
        is_strange = RANDOM.random(part.shape) < odd
        part[:] = np.where(is_strange, RANDOM.choice(strange, part.shape), RANDOM.integers(1, 1000, part.shape))
    return memory.numpy(), parts


def expected(parts: Parts, rows: list[int], name: str) -> list[Any]:
    """The column of a slot by the rules in words: one number after another."""

    def number(slot: str, row: int) -> Any:
        group, start, stop = PLACES[slot]
        found = parts[group][row, start:stop].tolist()
        return found if stop - start > 1 else found[0]

    metric = next((metric for metric in METRICS if name in {slot.name for slot in metric.slots}), None)
    found = []
    for row in rows:
        value = number(name, row)
        has_data = metric is None or metric.of_results or KEYS[row % 3].reference is Reference.OPERAND
        if metric is not None and metric.present != "numel":
            has_data = has_data and number(metric.present, row) != 0
        if isinstance(value, list):
            has_data = has_data and sum(value) > 0
        elif PLACES[name].group[0] == "float32":
            has_data = has_data and math.isfinite(value)
        elif PLACES[name].group[0] == "float64":
            has_data = has_data and not math.isnan(value) and (PLACES[name].group[1] == "sum" or math.isfinite(value))
        found.append(value if has_data else None)
    return found


def check(batch: pa.RecordBatch, step: int, parts: Parts, rows: list[int]) -> None:
    batch = pa.ipc.read_record_batch(batch.serialize(), arrow_schema("stats"))
    batch.validate(full=True)
    assert batch["step"].to_pylist() == [step] * len(rows)
    for name in ("num_tensors", *slots()):
        assert batch[name].to_pylist() == expected(parts, rows, name), name
        assert batch[name].null_count == batch[name].to_pylist().count(None), name


@pytest.mark.parametrize("num_rows", [1, 7, 8, 65])
def test_each_step_has_its_own_numbers(num_rows: int) -> None:
    rows = sorted(RANDOM.choice(2 * num_rows, num_rows, replace=False).tolist())
    described = BatchCache(rank=5)
    sheets: list[RowBatch] = []
    for step, odd in enumerate((0.5, 0.0, 0.2, 1.0, 0.0)):
        memory, parts = filled(2 * num_rows, odd)
        sheets.append(described.row_batch(infos(rows[::-1]), LAYOUTS[2 * num_rows]))
        batch = sheets[-1].fill(step, memory)
        check(batch, step, parts, rows)
        columns = sheets[-1].columns()
        for name in ("amax", "num_nan", "sum_err2", "num_damage_rows"):
            numbers = [math.nan if value is None else value for value in expected(parts, rows, name)]
            np.testing.assert_array_equal(columns[name], numbers)
        assert columns["module"] == batch["module"].to_pylist() == [f"layer.{row // 3}" for row in rows]
        assert batch["rank"].to_pylist() == [5] * num_rows
        assert batch["reference"].to_pylist() == [KEYS[row % 3].reference.value for row in rows]
    assert len(set(map(id, sheets))) == 1


def test_other_rows_get_another_sheet() -> None:
    described, (memory, parts) = BatchCache(), filled(12, 0.1)
    first = described.row_batch(infos([0, 1, 2]), LAYOUTS[12])
    for call, layout in ((0, LAYOUTS[12]), (4, LAYOUTS[12]), (4, TableLayout(12))):
        rows = [0, 1, 3]
        sheet = described.row_batch(infos(rows), layout, call)
        assert sheet is not first and described.row_batch(infos(rows), layout, call) is sheet
        batch = sheet.fill(1, memory)
        check(batch, 1, parts, rows)
        assert batch["call_index"].to_pylist() == [call + row // 3 for row in rows]
        first = sheet
    other = described.row_batch(infos([0, 1, 3], 7), layout, 4)
    assert other is not first, "a module was called elsewhere in the step"
    assert (
        described.row_batch(infos([0, 1, 3]), LAYOUTS[12], 4) is not other is described.row_batch(infos([0, 1, 3], 7), layout, 4)
    )


def test_the_first_nan_of_each_site_is_told_once() -> None:
    sheet, (memory, parts) = BatchCache().row_batch(infos([0, 1, 2]), LAYOUTS[3]), filled(3, 0.0)
    for name in ("num_nan", "num_inf", "num_actual_nonfinite"):
        group, start, _ = PLACES[name]
        parts[group][:, start] = 0
    seen: set[tuple[str, str, str]] = set()
    sheet.fill(0, memory)
    assert sheet.first_nonfinite(seen) == []
    (group, nan, _), (_, made, _) = PLACES["num_nan"], PLACES["num_actual_nonfinite"]
    parts[group][0, nan], parts[group][1, made] = 3, 2
    sheet.fill(1, memory)
    assert sheet.first_nonfinite(seen) == [
        ("layer.0", "fprop input: first NaN or Inf, in the high-precision tensor: 3"),
        ("layer.0", "fprop output: first NaN or Inf, made by the cast or GEMM: 2"),
    ]
    assert sheet.first_nonfinite(seen) == []


#: A watched model, of which every step is sampled, and a step of it.
WATCHED = """
import gc, torch, fp8debug
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(16)])
fp8debug.convert(model, "blockwise")
watch = fp8debug.watch(model, path, every=1)
def train():
    model(torch.ones(128, 64)).sum().backward()
    watch.step(loss=1.0)
"""


def check_nothing_printed(code: str, path: Path) -> None:
    """What the code collects in ``found``, until the watch is closed, is nothing."""
    done = python(f"{WATCHED}{code}watch.close()\nprint(found() if callable(found) else found)\n", path)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_nothing_is_imported_while_training_runs(tmp_path: Path) -> None:
    """pyarrow imports pandas with its first array: a third of a second in which another thread has the interpreter at times."""
    code = (
        "model(torch.ones(128, 64)).sum().backward()\n"  # what the hooks need, the training's thread imports
        "before = set(sys.modules)\n"
        "found = lambda: sorted(set(sys.modules) - before)\n"
        "for _ in range(3): train()\n"
    )
    check_nothing_printed(code, tmp_path / "run")


def test_no_full_garbage_collection_falls_into_the_first_steps(tmp_path: Path) -> None:
    """What watch() makes would cause one: 0.1 to 0.2 s, with everything that torch has loaded."""
    code = (
        "found = []\n"
        "def heard(phase, info):\n"
        "    if (phase, info['generation']) == ('start', 2): found.append(step)\n"
        "gc.callbacks.append(heard)\n"
        "for step in range(10): train()\n"
        "gc.callbacks.remove(heard)\n"
    )
    check_nothing_printed(code, tmp_path / "run")


def test_rows_that_wait_are_not_written_over(tmp_path: Path) -> None:
    """With a dump rows are made at once and may wait for the disk, while their memory serves the next step."""
    go, sums = threading.Event(), []
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32, bias=False))
    fp8debug.convert(model, "blockwise")
    with fp8debug.watch(model, tmp_path / "run", every=1, dump=("on-finding",)) as watch:
        watch._writer._worker.put(go.wait)
        for step in range(4):
            x = (step + 1) * torch.ones(8, 32)
            model(x).sum().backward()
            watch.step(loss=1.0)
            sums.append(float(x.double().square().sum()))
        go.set()
    query = "SELECT sum_x2 FROM raw WHERE gemm = 'fprop' AND tensor = 'input' AND actual ORDER BY step"
    assert fp8debug.Run(tmp_path / "run").sql(query).to_pydict()["sum_x2"] == sums
