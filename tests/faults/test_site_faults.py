"""Faults of weights, rows and microbatches in training: those that need several microbatches or a recomputation, and cures."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import fp8debug
from tests.faults.test_faults import sick_run
from tests.recording.models import Net, batch, net, train
from tests.shortened import shortened

STEPS, AT = 8, 4


class Checkpointed(Net):
    """Net whose blocks are recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


def run_of(path: Path, model: nn.Module, microbatches: int, **options: Any) -> fp8debug.Run:
    """Train with gradient accumulation under a watch and return the run."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, path, what_if=(), **{"every": 2, **options}) as watch:
        for step in range(STEPS):
            for part in range(microbatches):
                x, classes = batch(step * microbatches + part, rows=64)
                loss = functional.cross_entropy(model(x), classes)
                (loss / microbatches).backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    return fp8debug.Run(path)


@pytest.mark.parametrize("module", shortened(["blocks.0.up", "blocks.1.down"], 2))
@pytest.mark.parametrize(
    ("name", "code", "options"),
    [
        ("stale_weight", "F112", {"lag": 4, "from_microbatch": 1}),
        ("bf16_gradient_sum", "F123", {}),
        ("lost_microbatches", "F134", {}),
    ],
)
def test_a_fault_between_microbatches_is_named(
    name: str, code: str, options: dict[str, int], module: str, tmp_path: Path
) -> None:
    model = net("blockwise", {"head": None})
    injection = fp8debug.inject(model, name, module=module, step=AT, **options)
    run = run_of(tmp_path / "run", model, 3)
    injection.remove()
    (finding,) = fp8debug.triage(run)
    assert (finding.code, finding.module, finding.steps[0]) == (code, module, AT)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("emptied_gradient", "gradient-emptied"),
        ("overwritten_gradient", "gradient-overwritten"),
        ("lost_microbatches", "gradient-of-first-microbatch"),
        ("gradient_elsewhere", "gradient-lost"),
    ],
)
def test_a_gradient_that_is_lost_in_a_step_of_two_microbatches_is_named(name: str, kind: str, tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    fp8debug.inject(model, name, module="blocks.1.down", step=AT)
    run = run_of(tmp_path / "run", model, 2)
    (finding,) = fp8debug.triage(run)
    assert (finding.code, finding.name, finding.module, finding.steps[0]) == ("F149", kind, "blocks.1.down", AT)
    row = run.sql("SELECT * FROM updates WHERE module = 'blocks.0.up' AND step = 4").to_pylist()[0]
    assert row["sum_given2"] == pytest.approx(row["sum_passes2"]) == pytest.approx(row["sum_since2"])
    assert 0 < row["sum_last2"] != row["sum_first2"]


def test_a_step_of_an_optimizer_begins_a_new_sum(tmp_path: Path) -> None:
    """Optimizer steps for each microbatch, several in one recorded step, are no gradient that is lost."""
    model = net("blockwise", {"head": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, tmp_path / "run", what_if=(), every=1) as watch:
        for step in range(4):
            for part in range(3):
                x, classes = batch(step * 3 + part, rows=64)
                loss = functional.cross_entropy(model(x), classes)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            watch.step(loss=loss)
    run = fp8debug.Run(tmp_path / "run")
    assert list(fp8debug.triage(run)) == []
    assert run.sql("SELECT count(*) AS num, count(sum_given2) AS given FROM updates").to_pylist()[0]["given"] == 0


def test_clipping_is_no_gradient_that_is_lost(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with fp8debug.watch(model, tmp_path / "run", what_if=(), every=2) as watch:
        for step in range(STEPS):
            for part in range(2):
                x, classes = batch(step * 2 + part, rows=64)
                loss = functional.cross_entropy(model(x), classes)
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss=loss)
    run = fp8debug.Run(tmp_path / "run")
    assert list(fp8debug.triage(run)) == []
    (row,) = run.sql("SELECT max(sum_given_passes / sum_passes2) AS gain FROM updates").to_pylist()
    assert 0 < row["gain"] < 0.5


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed"])
def test_microbatches_and_recomputation_are_healthy(recipe: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    run = run_of(tmp_path / "run", fp8debug.convert(Checkpointed(), recipe), 3)
    findings = fp8debug.triage(run)
    assert list(findings) == []
    assert not {"F112", "F115", "F117", "F123"} & dict(findings.skipped).keys()
    query = (
        "SELECT max(abs(sqnr_db - reread_sqnr_db)) AS gap, max(abs(reread_scale_log2)) AS shift"
        " FROM sites WHERE actual AND num_reread > 0 AND step > 0"
    )
    (row,) = run.sql(query).to_pylist()
    if recipe != "tensorwise_delayed":  # whose scale moves between two reads
        assert row["gap"] < 1e-9
        assert row["shift"] < 1e-9
    (row,) = run.sql("SELECT min(grad_sum_sqnr_db) AS sum, max(grad_first_nmse) AS first FROM sites").to_pylist()
    assert row["sum"] > 120 and row["first"] < 1e-12


def test_a_checkpointed_model_with_another_scale_names_the_first_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = fp8debug.convert(Checkpointed(), "blockwise")
    fp8debug.inject(model, "recompute_scale", module="blocks.0.up", step=AT)
    (finding,) = fp8debug.triage(run_of(tmp_path / "run", model, 1))
    assert (finding.code, finding.module, finding.steps[0]) == ("F115", "blocks.0.up", AT)


def test_a_weight_that_is_rounded_twice_is_named(tmp_path: Path) -> None:
    model = net("blockwise_pow2", {"head": None})
    fp8debug.inject(model, "rounded_weights", module="blocks.1.down", step=6)
    with fp8debug.watch(model, tmp_path / "run", every=3, what_if=("blockwise",)) as watch:
        train(model, STEPS, after=lambda _, loss: watch.step(loss=loss))
    (finding,) = fp8debug.triage(tmp_path / "run")
    assert (finding.code, finding.module, finding.steps[0]) == ("F137", "blocks.1.down", 6)
    assert "already" in finding.message


def test_a_tied_weight_is_no_stalled_sum(tmp_path: Path) -> None:
    model = net("blockwise", {"head": None})
    model.get_submodule("blocks.1.up").weight = model.get_parameter("blocks.0.up.weight")
    findings = fp8debug.triage(run_of(tmp_path / "run", model, 3))
    assert list(findings) == []


def test_a_second_cast_under_power_of_two_scales_is_harmless(tmp_path: Path) -> None:
    model = net("blockwise_pow2", {"head": None})
    fp8debug.inject(model, "double_quantization", module="blocks.1.down", step=AT)
    run = run_of(tmp_path / "run", model, 1)
    query = (
        "SELECT max(a.sqnr_db - b.sqnr_db) AS gap FROM sites a JOIN sites b USING (step, module, tensor) WHERE a.gemm = 'fprop'"
        " AND b.gemm = 'wgrad' AND module = 'blocks.1.down' AND tensor = 'input' AND step >= 4"
    )
    assert run.sql(query).to_pylist()[0]["gap"] < 1.5
    assert list(fp8debug.triage(run)) == []


@pytest.mark.parametrize("name", shortened(["uneven_tokens", "padding_rows", "clustered_weights"], 3))
def test_a_cast_cures_it(name: str, tmp_path: Path) -> None:
    sick_run(tmp_path / "sick", name, "blocks.1.down")
    run = fp8debug.Run(tmp_path / "sick")
    fallbacks = fp8debug.recommend(run, fp8debug.triage(run))
    assert {f.module for f in fallbacks} == {"blocks.1.down"}
    assert all(f.cast is not None for f in fallbacks), "nothing has to leave FP8"
    losses = sick_run(tmp_path / "cured", name, "blocks.1.down", fallbacks=fallbacks)
    assert math.isfinite(losses[-1])
    assert fp8debug.triage(tmp_path / "cured") == []


def test_rows_of_a_result_are_recorded_and_those_of_an_operand_are_not(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", net("blockwise"), 1)
    query = "SELECT DISTINCT reference, gemm, tensor FROM sites WHERE num_rows IS NOT NULL AND reference <> 'exact'"
    found = {(row["reference"], row["gemm"], row["tensor"]) for row in run.sql(query).to_pylist()}
    results = {("fprop", "output"), ("dgrad", "grad_input"), ("wgrad", "grad_weight")}
    assert found == {("shadow", *result) for result in results} | {("operand", "fprop", "weight")}
    assert run.has("num_reread") is False and run.has("num_grad") is False
