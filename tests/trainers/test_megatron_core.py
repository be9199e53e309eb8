"""A GPT of the package megatron-core trains the same under a watch, over two ranks of tensor parallelism and of a pipeline."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

import fp8debug
from fp8debug.exporters import EXPORTERS
from fp8debug.fallback import Fallback
from tests.ranks import launch
from tests.trainers.alike import num_sites, trained_alike

pytestmark = pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
LINEARS = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"]
HIDDEN, TOKENS = 128, 2 * 32 * 2  # of the job: microbatches, sequences of 32, two of them


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train under all conditions in one job."""
    return launch("tests/trainers/megatron_job.py", tmp_path_factory.mktemp("megatron"))


@pytest.mark.parametrize("name", ["tensor_parallel", "pipeline"])
def test_the_loop_trains_the_same_and_tells_its_steps(trained: Path, name: str) -> None:
    ranks, run = trained_alike(trained, name)
    steps = run.sql("SELECT loss, grad_norm, lr FROM steps ORDER BY step").to_pylist()
    found = ranks[1][0][:-1]  # of the last stage, without the weights' sum
    assert [[s["loss"], s["grad_norm"], s["lr"]] for s in steps] == [pytest.approx(step, rel=1e-6) for step in found]
    listed = [m["fqn"] for m in run.modules]
    assert listed == [f"decoder.layers.{layer}.{name}" for layer in (0, 1) for name in LINEARS] + ["output_layer"]
    assert [m["fqn"] for m in run.modules if m["fp8"]] == listed[:-1]
    (head,) = [m for m in run.modules if m["fqn"] == "output_layer"]
    assert head["reason"].startswith("no FP8 GEMM observed")
    assert num_sites(run) == dict.fromkeys(listed[:-1], 9)
    exact = run.sql("SELECT min(sqnr_db) AS db FROM sites WHERE actual AND reference = 'exact'").to_pylist()
    assert exact[0]["db"] > 40, "a result that was summed over the ranks is not its GEMM's"
    said = [line for line in (trained / "said").read_text().splitlines() if line.startswith("fp8debug:")]
    assert [line for line in said if "will record" not in line] == []


def numels(run: fp8debug.Run, module: str) -> dict[str, int]:
    query = (
        "SELECT gemm || ' ' || tensor AS site, max(numel) AS n FROM sites WHERE step = 0 AND module = ? AND actual GROUP BY site"
    )
    return {row["site"]: row["n"] for row in run.sql(query.replace("GROUP BY site", "GROUP BY 1"), [module]).to_pylist()}


def test_its_marks_say_which_piece_a_rank_holds(trained: Path) -> None:
    run = fp8debug.Run(trained / "tensor_parallel")
    meshes = [run.rank_manifests[rank]["mesh"] for rank in (0, 1)]
    assert meshes == [{"dims": ["dp", "pp", "tp"], "shape": [1, 1, 2], "coordinate": [0, 0, rank]} for rank in (0, 1)]
    up, down = numels(run, "decoder.layers.1.mlp.linear_fc1"), numels(run, "decoder.layers.1.mlp.linear_fc2")
    for n in (up, down):  # both shards of the weight, each once
        assert n["fprop weight"] == n["dgrad weight"] == 4 * HIDDEN * HIDDEN
    assert up["fprop input"] == down["dgrad grad_output"] == TOKENS * HIDDEN  # which both ranks have
    assert down["fprop input"] == up["dgrad grad_output"] == TOKENS * 4 * HIDDEN


def test_stages_are_one_model_and_have_files_of_their_own(trained: Path) -> None:
    """Each stage calls its first layer 0."""
    run = fp8debug.Run(trained / "pipeline")
    where = run.sql("SELECT module, array_agg(DISTINCT rank) AS ranks FROM raw GROUP BY module").to_pylist()
    assert {row["module"]: row["ranks"] for row in where} == {
        f"decoder.layers.{layer}.{name}": [layer] for layer in (0, 1) for name in LINEARS
    }
    assert numels(run, "decoder.layers.1.mlp.linear_fc1")["fprop input"] == TOKENS * HIDDEN
    assert "layers_before" not in run.rank_manifests[0]
    assert run.rank_manifests[1]["layers_before"] == {"decoder.layers": 1}
    fallbacks = [Fallback(module="decoder.layers.1.mlp.linear_fc1", gemms=("fprop", "dgrad", "wgrad"))]
    files = EXPORTERS.get("megatron").files(run, fallbacks)
    assert "matchers: {}" in files[".stage0"] and 'pattern: "decoder.layers.0.mlp.linear_fc1"' in files[".stage1"]
