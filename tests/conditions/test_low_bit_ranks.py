"""A weight that FSDP2 gathers in FP8 is compared with the rows of each rank; ranks whose Hadamard signs differ are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.distributed import fsdp

import fp8debug
from tests.conditions import low_bit_job as job
from tests.ranks import found_by, launch

GATHERED = [name for name in job.MODELS if name != "signs"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all models in one job of two ranks."""
    pytest.importorskip("torchao.float8")
    if not hasattr(fsdp.FSDPModule, "set_custom_all_gather"):
        pytest.skip("this torch gathers through its process group alone")
    return launch("tests/conditions/low_bit_job.py", tmp_path_factory.mktemp("low_bit"))


def weights(run: fp8debug.Run, table: str) -> list[dict[str, Any]]:
    query = f"SELECT * FROM {table} WHERE actual AND tensor = 'weight' ORDER BY step, module, gemm"
    rows: list[dict[str, Any]] = run.sql(query).to_pylist()
    return rows


@pytest.mark.parametrize("name", job.MODELS)
def test_training_is_as_it_was(name: str, trained: Path) -> None:
    for unwatched, watched in found_by(trained, name):
        assert len(watched) == job.STEPS and unwatched == watched


@pytest.mark.parametrize("name", GATHERED[:2])
def test_a_weight_gathered_in_fp8_has_the_row_of_one_gathered_in_high_precision(name: str, trained: Path) -> None:
    run, plain = (fp8debug.Run(trained / one) for one in (name, "gathered in high precision"))
    found, expected = (weights(one, "sites") for one in (run, plain))
    assert len(found) == 3 * job.STEPS  # fprop of both, dgrad of the second
    for row, other in zip(found, expected, strict=True):
        assert (row["module"], row["gemm"], row["cast_name"]) == (other["module"], other["gemm"], other["cast_name"])
        for column in ("numel", "num_underflow", "amax", "amin", "headroom", "log2_hist"):
            assert row[column] == other[column], column
        assert row["sqnr_db"] == pytest.approx(other["sqnr_db"], rel=1e-9) and 30 < row["sqnr_db"] < 33
    pieces = {(row["rank"], row["shard"], row["numel"]) for row in weights(run, "raw") if row["module"] == "0"}
    assert pieces == {(0, 0, 64 * 48), (1, 1, 64 * 48)}


@pytest.mark.parametrize("name", GATHERED[:2])
def test_its_gemms_are_compared_with_those_of_the_codes_and_that_is_reported(name: str, trained: Path) -> None:
    run, plain = (fp8debug.Run(trained / one) for one in (name, "gathered in high precision"))
    query = "SELECT module, gemm, sqnr_db FROM sites WHERE reference = 'shadow' AND step = 1 ORDER BY module, gemm"
    for row, other in zip(*(one.sql(query).to_pylist() for one in (run, plain)), strict=True):
        lost = 0.0 if row["gemm"] == "wgrad" else 0.5  # a weight's error at least, beside E5M2's of the gradient
        assert row["sqnr_db"] >= other["sqnr_db"] + lost, (row, other)
    messages = run.sql("SELECT DISTINCT message FROM events WHERE kind <> 'recording' ORDER BY message").column(0).to_pylist()
    assert [message[:56] for message in messages] == [
        f"{n} is not recorded in full: its weight is gathered in FP8" for n in (0, 2)
    ]
    assert fp8debug.triage(run) == []


def test_hadamard_signs_of_each_rank_are_named(trained: Path) -> None:
    findings = fp8debug.triage(trained / "signs")
    assert {f.code for f in findings} == {"F146"}
    (finding,) = findings
    assert finding.message == "its ranks declare different Hadamard transforms in wgrad: 16 0xd7e8, 16 0xd7e9"
    assert (finding.module, finding.gemm, finding.ranks) == ("2", "wgrad", (0, 1))
    assert finding.also == ("0",)
