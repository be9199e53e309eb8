"""Every kind of parallelism: the same losses as without a watch, and a record that merges into one model's.

Four ranks of a CPU, or one for each of several GPUs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fp8debug
from tests.conditions import job
from tests.ranks import launch

STEPS, ROWS, WORLD = job.STEPS, 96, job.WORLD
ALL = list(range(WORLD))
DATA_PARALLEL = [name for name in job.CONDITIONS if name.startswith(("ddp", "fsdp2"))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all conditions in one job."""
    return launch("tests/conditions/job.py", tmp_path_factory.mktemp("job"), WORLD, on_gpus=job.ON_GPUS)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in ALL]


def numels(run: fp8debug.Run, module: str) -> dict[tuple[str, str], int]:
    """Return elements by (gemm, tensor) of the first step, of the running cast and of the shadow."""
    where = "step = 0 AND module = ? AND reference <> 'exact'"
    query = f"SELECT gemm, tensor, max(numel) AS n FROM sites WHERE {where} GROUP BY gemm, tensor"
    return {(row["gemm"], row["tensor"]): int(row["n"]) for row in run.sql(query, [module]).to_pylist()}


@pytest.mark.parametrize("name", list(job.CONDITIONS))
def test_the_loss_is_the_same_to_the_last_bit(name: str, trained: Path) -> None:
    for rank in results(trained):
        assert isinstance(rank[name], list), rank[name]
        alone, watched = rank[name]
        assert len(alone) == STEPS and watched == alone
    run = fp8debug.Run(trained / name)
    assert run.ranks == ALL and run.problems == []
    assert run.sql("SELECT DISTINCT step FROM sites ORDER BY step").column("step").to_pylist() == list(range(STEPS))


@pytest.mark.parametrize("name", DATA_PARALLEL)
def test_data_parallel_ranks_add_up_and_a_weight_counts_once(name: str, trained: Path) -> None:
    run = fp8debug.Run(trained / name)
    parts = 2 if name == "ddp_accumulating" else 1
    n = numels(run, "blocks.1.down")
    assert n["fprop", "input"] == WORLD * parts * ROWS * 192 and n["wgrad", "grad_output"] == WORLD * parts * ROWS * 64
    assert n["fprop", "weight"] == n["dgrad", "weight"] == 64 * 192
    per_rank = run.sql("SELECT DISTINCT num_tensors AS n FROM raw WHERE tensor = 'input'").column("n").to_pylist()
    assert per_rank == [parts]
    (row,) = run.sql("SELECT step, loss FROM steps WHERE step = 1").to_pylist()
    assert row["loss"] == pytest.approx(sum(rank[name][0][1] for rank in results(trained)) / WORLD)


@pytest.mark.parametrize("name", ["tensor_parallel", "tensor_parallel_plain"])
def test_replicas_of_two_shards_are_one_model(name: str, trained: Path) -> None:
    run = fp8debug.Run(trained / name)
    tokens = WORLD // 2 * ROWS  # of the replicas
    up, down = numels(run, "blocks.1.up"), numels(run, "blocks.1.down")
    for n in (up, down):  # both shards of the weight, each once
        assert n["fprop", "weight"] == n["dgrad", "weight"] == 64 * 192
    assert up["fprop", "input"] == tokens * 64 and up["dgrad", "grad_output"] == tokens * 192
    assert down["fprop", "input"] == tokens * 192 and down["dgrad", "grad_output"] == tokens * 64
    meshes = [run.rank_manifests[rank]["mesh"] for rank in ALL]
    assert meshes == [{"dims": ["dp", "tp"], "shape": [WORLD // 2, 2], "coordinate": [rank // 2, rank % 2]} for rank in ALL]
    listed = (
        run.sql("SELECT DISTINCT ranks FROM sites WHERE module = 'blocks.1.up' AND tensor = 'weight'").column("ranks").to_pylist()
    )
    assert listed == [ALL]
    # a row of a shard is not the whole: without its place the first would stand for both
    pieces = run.sql("SELECT rank, min(shard) AS shard FROM raw WHERE module = 'blocks.1.up' AND tensor = 'weight' GROUP BY rank")
    assert {row["rank"]: row["shard"] for row in pieces.to_pylist()} == {rank: rank % 2 for rank in ALL}


def test_a_split_block_is_the_whole_block(trained: Path) -> None:
    for rank in results(trained):
        assert max(rank["right"].values()) < 1e-6


def test_pipeline_stages_are_one_model_in_order(trained: Path) -> None:
    run = fp8debug.Run(trained / "pipeline")
    where = run.sql("SELECT module, array_agg(DISTINCT rank ORDER BY rank) AS ranks FROM raw GROUP BY module").to_pylist()
    ranks = {row["module"]: row["ranks"] for row in where}
    assert ranks["blocks.0.up"] == ALL[::2] and ranks["blocks.1.up"] == ranks["head"] == ALL[1::2]
    stages = [f"blocks.{stage}.{name}" for stage in (0, 1) for name in ("gate", "up", "down")] + ["head"]
    assert [(m["fqn"], m["fp8"]) for m in run.modules] == [(fqn, True) for fqn in stages]
    (row,) = run.sql(
        "SELECT num_tensors FROM raw WHERE step = 0 AND rank = 1 AND module = 'head' AND gemm = 'wgrad' AND tensor = 'input'"
        " AND actual AND reference = 'operand'"
    ).to_pylist()
    assert row["num_tensors"] == 4  # microbatches; the stage's own trial without values is none
    losses = [row["loss"] for row in run.sql("SELECT loss FROM steps ORDER BY step").to_pylist()]
    assert losses == pytest.approx(results(trained)[1]["pipeline"][0])


def test_nothing_was_lost_on_the_way(trained: Path) -> None:
    said = [line for line in (trained / "said").read_text().splitlines() if line.startswith("fp8debug:")]
    assert [line for line in said if "will record" not in line] == []
