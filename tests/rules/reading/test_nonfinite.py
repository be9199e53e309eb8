"""The first NaN or Inf that several ranks found in one step: module, GEMM and origin are of one rank, the first in execution."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fp8debug.rules import triage
from fp8debug.rules.reading.nonfinite import first_poison
from fp8debug.store.read.run import Run
from fp8debug.store.write.writer import RunWriter
from tests.synthetic import build

#: Alphabetical order is not the order of execution: qkv runs before out, and both before up.
EARLY = {"nonfinite_module": "blocks.0.attn.qkv", "nonfinite_origin": "weight", "nonfinite_gemm": "fprop"}
LATE = {"nonfinite_module": "blocks.0.attn.out", "nonfinite_origin": "outside", "nonfinite_gemm": "fprop"}
BACKWARD = {"nonfinite_module": "blocks.0.attn.out", "nonfinite_origin": "gemm", "nonfinite_gemm": "dgrad"}
LOST = {step: {"loss": math.nan} for step in range(45, 50)}


def test_the_rank_that_had_it_first_in_execution_decides(tmp_path: Path) -> None:
    run = build(
        tmp_path / "run", num_steps=50, world_size=3, steps=LOST, rank_steps={0: {45: LATE}, 1: {45: EARLY}, 2: {45: BACKWARD}}
    )
    origin = first_poison(run)
    assert origin is not None
    assert (origin.row["module"], origin.kind, origin.row["gemm"], origin.row["ranks"]) == (
        "blocks.0.attn.qkv",
        "weight",
        "fprop",
        [1],
    )
    (finding,) = (f for f in triage(run) if f.code == "F125")
    assert (finding.module, finding.tensor, finding.ranks) == ("blocks.0.attn.qkv", "weight", (1,))


def test_ranks_that_agree_are_named_together(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=50, world_size=3, steps=LOST, rank_steps={0: {45: LATE}, 2: {45: LATE}})
    origin = first_poison(run)
    assert origin is not None and origin.row["ranks"] == [0, 2]


def test_the_view_pairs_the_columns_of_one_rank(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=50, world_size=3, rank_steps={1: {45: EARLY}, 2: {45: BACKWARD}})
    query = "SELECT nonfinite_module, nonfinite_origin, nonfinite_gemm FROM steps WHERE step IN (44, 45) ORDER BY step"
    assert run.sql(query).to_pylist() == [dict.fromkeys(EARLY), EARLY]


def test_a_gradient_that_was_nan_one_step_before_the_loss(tmp_path: Path) -> None:
    """A run as it is written has one row group for both losses, whose smallest and largest value leave NaN out."""
    modules = [{"fqn": "blocks.0.attn.out", "kind": "Fp8Linear", "fp8": True, "index": 0}]
    writer = RunWriter(tmp_path / "run", manifest={"modules": modules})
    writer.steps({"step": 0, "sampled": True, "loss": 4.2, **BACKWARD})
    writer.steps(
        {"step": 1, "sampled": False, "loss": math.nan, **BACKWARD, "nonfinite_gemm": "fprop", "nonfinite_origin": "weight"}
    )
    writer.close()
    origin = first_poison(Run(tmp_path / "run"))
    assert origin is not None
    assert (origin.step, origin.kind, origin.row["gemm"]) == (0, "gemm", "dgrad")


@pytest.mark.parametrize("is_sampled", [False, True], ids=["searched", "sampled"])
def test_the_loss_comes_before_a_gemm_of_its_own_backward_pass(is_sampled: bool, tmp_path: Path) -> None:
    """A sum that overflows in the loss function alone: the forward pass is finite, and the first NaN of a tensor is wgrad's."""
    wgrad = {"nonfinite_module": "blocks.1.down", "nonfinite_origin": "gemm", "nonfinite_gemm": "wgrad"}
    step = 44 if is_sampled else 45
    lost = {at: {"loss": math.inf, **(wgrad if at == step else {})} for at in range(step, 50)}
    found = triage(build(tmp_path / "run", num_steps=50, every=2, steps=lost))
    assert [(f.code, f.name, f.module, f.origin) for f in found] == [("F125", "nonfinite-from-outside", None, "outside")]
    assert "the loss function, or what lies between the last Linear and the loss, made it" in found[0].message
    assert "the wgrad grad_weight of blocks.1.down, the first NaN/Inf of the tensors, came after it" in found[0].message
    assert found.classification is not None and found.classification["cause"] == "not-fp8"
    earlier = {at: {"loss": math.inf} for at in range(step + 1, 50)} | {step: wgrad}
    assert "F103" in {f.code for f in triage(build(tmp_path / "earlier", num_steps=50, every=2, steps=earlier))}
