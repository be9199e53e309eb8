"""Large run folders for tests/bench/scale.py: statistics of a Llama, noise in every row, faults at known places.

A few steps are made row by row as tests/synthetic.py makes them, and repeated with another step, rank and size of the tensors,
so that ten million rows take a minute. Files, encodings and sizes of parts are those of the recorder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fp8debug.store.schema import arrow_schema, columns_of
from fp8debug.store.stream import part_path, write_part
from fp8debug.store.write.batch import record_batch
from fp8debug.store.write.writer import PART_ROWS, RunWriter
from tests.synthetic import Override, Plan, manifest_of, stats_rows, steps_row

#: Linears of a layer of an 8B Llama: name, in and out features.
LINEARS = (
    ("self_attn.q_proj", 4096, 4096),
    ("self_attn.k_proj", 4096, 1024),
    ("self_attn.v_proj", 4096, 1024),
    ("self_attn.o_proj", 4096, 4096),
    ("mlp.gate_proj", 4096, 14336),
    ("mlp.up_proj", 4096, 14336),
    ("mlp.down_proj", 14336, 4096),
)
#: Rows of one step of one rank for each Linear: six operands, and three results against two references.
ROWS_PER_LINEAR = 12
#: Steps that are made row by row; the others repeat them.
NUM_MODELS = 4
#: By how much the tensors' sizes vary from row to row.
SPREAD = 0.02


class Planted(NamedTuple):
    """A fault that triage has to find.

    Attributes:
        code: of its rule.
        module: where; None for the run.
        first: share of the steps before it.
        lasts: whether it goes on to the end; else it is there for one step.
        slots: what its rows show.
    """

    code: str
    module: str | None
    first: float
    lasts: bool
    slots: dict[str, Any]


PLANTED = (
    Planted("F113", "model.layers.5.mlp.up_proj", 0.5, True, {"gain": 2.0}),
    Planted("F103", "model.layers.3.mlp.down_proj", 0.75, False, {"num_actual_nonfinite": 128, "num_zero_blocks": 1}),
    Planted("F125", None, 0.25, False, {}),
)
Faulty = tuple[Planted, list[pa.Table]]
_TENSORS = {"F113": "weight", "F103": "input"}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a run is.

    Attributes:
        steps: sampled steps.
        ranks: ranks that recorded.
        layers: of seven Linears each.
    """

    steps: int
    ranks: int = 8
    layers: int = 32

    @property
    def rows(self) -> int:
        """Rows of ``stats``."""
        return self.steps * self.ranks * self.layers * len(LINEARS) * ROWS_PER_LINEAR


def size_of(rows: float, ranks: int = 8, layers: int = 32) -> Size:
    """Return the size of about so many rows, by its number of steps."""
    one = Size(steps=1, ranks=ranks, layers=layers)
    return replace(one, steps=max(20, round(rows / one.rows)))


def write_run(folder: Path, size: Size) -> None:
    """Write a run with the faults of ``PLANTED``."""
    modules = [(f"model.layers.{layer}.{name}", k, n) for layer in range(size.layers) for name, k, n in LINEARS]
    plan = Plan(num_steps=size.steps, every=1, modules=modules, world_size=size.ranks)
    healthy = _models(plan)
    sick = [
        (
            fault,
            [table.filter(pc.equal(table["module"], fault.module)) for table in _models(replace(plan, overrides=[_of(fault)]))],
        )
        for fault in PLANTED
        if fault.module
    ]
    spikes = {round(fault.first * size.steps) for fault in PLANTED if fault.module is None}

    def write_rank(rank: int) -> None:
        RunWriter(folder, rank=rank, world_size=size.ranks, manifest=manifest_of(plan), rank_manifest={"device": "none"}).close()
        home = folder / f"rank={rank:05d}"
        losses = [steps_row(plan, step, is_sampled=True) for step in range(size.steps)]
        rows = [{**row, "rank": rank, "loss": row["loss"] * (3 if row["step"] in spikes else 1)} for row in losses]
        write_part(_table("steps", rows), part_path(home, "steps", 2))
        per_part = max(1, PART_ROWS // healthy[0].num_rows)
        for number, first in enumerate(range(0, size.steps, per_part), 2):
            tables = [_step(healthy, sick, step, rank, size) for step in range(first, min(first + per_part, size.steps))]
            write_part(pa.concat_tables(tables).combine_chunks(), part_path(home, "stats", number))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write_rank, range(size.ranks)))


def _of(fault: Planted) -> Override:
    return Override(module=str(fault.module), gemm="fprop", tensor=_TENSORS[fault.code], slots=fault.slots)


def _models(plan: Plan) -> list[pa.Table]:
    """Return the statistics of a few steps."""
    return [_table("stats", stats_rows(plan, step)) for step in range(NUM_MODELS)]


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    columns = {key for row in rows for key in row}
    return pa.Table.from_batches([record_batch(arrow_schema(name), {key: [row.get(key) for row in rows] for key in columns})])


def _step(healthy: Sequence[pa.Table], sick: Sequence[Faulty], step: int, rank: int, size: Size) -> pa.Table:
    """Return the rows of one step of one rank, every tensor a little larger or smaller than its model."""
    model = step % NUM_MODELS
    table = healthy[model]
    for fault, tables in sick:
        first = round(fault.first * size.steps)
        if step == first or (fault.lasts and step > first):
            others = pc.not_equal(table["module"], fault.module)
            table = pa.concat_tables([table.filter(others), tables[model]])
    own, common = (np.random.default_rng([step, of]).uniform(-1, 1, table.num_rows) for of in (rank + 1, 0))
    factor = 1 + SPREAD * np.where(table["replicated"].to_numpy(), common, own)
    arrays = []
    for column in columns_of("stats"):
        values = table[column.name]
        power = {"x": 1, "x^2": 2}.get(column.unit)
        if column.name in ("step", "rank"):
            values = pa.array(np.full(table.num_rows, step if column.name == "step" else rank), column.field.type)
        elif power is not None:
            values = pc.multiply(values, pa.array(factor**power)).cast(column.field.type)
        arrays.append(values)
    return pa.table(arrays, schema=arrow_schema("stats"))
