"""The guard: fires on hard evidence and on nothing else, keeps its budget, says what it did, and changes no bit until then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8debug
from fp8debug.errors import UsageError
from fp8debug.fallback import Fallback
from fp8debug.fallback.guard import Evidence, Guard
from fp8debug.store.flop_shares import flop_shares
from tests.recording.models import net, train

DELAYED, CURRENT = "e4m3fn tensorwise delayed(16,max)", "e4m3fn 1x128 current"


def rows(*changes: dict[str, Any]) -> dict[str, Any]:
    """Return columns of operands of module ``a``; a missing number is masked."""
    healthy = {
        **{"module": "a", "gemm": "fprop", "tensor": "input", "cast_name": CURRENT, "actual": True},
        **{"num_actual_nonfinite": 0, "num_nan": 0, "num_inf": 0, "num_saturated": 0, "numel": 1000, "headroom": 1.0},
    }
    found = [{**healthy, **change} for change in changes]
    columns: dict[str, Any] = {}
    for name in healthy:
        values = [row[name] for row in found]
        if isinstance(healthy[name], str):
            columns[name] = values
        else:
            columns[name] = np.ma.masked_array([v if v is not None else 0 for v in values], [v is None for v in values])
    return columns


NAN = {"num_actual_nonfinite": 3}
CLIPS = {"num_saturated": 2}


def fired(guard: Guard, *steps: dict[str, Any] | None, every: int = 10, first: int = 0) -> list[int]:
    """Return the sampled steps (counted from 0) at which the guard decides."""
    evidence = Evidence(guard, {"a": 0.05}, first)
    return [n for n, change in enumerate(steps) if evidence.see(first + n * every, rows(change or {}))]


@pytest.mark.parametrize(
    ("change", "is_evidence"),
    [
        (NAN, True),
        ({**NAN, "num_nan": 1}, False),
        ({**NAN, "num_inf": 1}, False),
        ({**NAN, "actual": False}, False),
        ({**NAN, "cast_name": "bf16"}, False),
        ({**NAN, "tensor": "output", "num_saturated": None, "headroom": None}, True),
        ({"num_nan": 5}, False),
        (CLIPS, True),
        ({"num_saturated": 1}, False),
        ({**CLIPS, "cast_name": DELAYED, "headroom": 4.0}, False),
        ({"num_saturated": 11, "cast_name": DELAYED, "headroom": 4.0}, True),
        ({"num_saturated": 900, "cast_name": DELAYED, "headroom": 1.2}, False),
        ({"num_saturated": 11, "cast_name": "e4m3fn tensorwise static(0.5)", "headroom": None}, True),
        ({}, False),
    ],
)
def test_what_counts_as_hard_evidence(change: dict[str, Any], is_evidence: bool) -> None:
    assert bool(fired(Guard(after=1), None, change)) is is_evidence


def test_evidence_has_to_come_in_a_row() -> None:
    assert fired(Guard(after=3), NAN, NAN, None, NAN, CLIPS, NAN, NAN) == [5], "and a module is decided once"
    assert fired(Guard(after=1), NAN) == [0]
    assert fired(Guard(after=2), NAN, None, NAN, None) == []


def test_clipping_in_the_first_steps_does_not_count() -> None:
    assert fired(Guard(after=1), CLIPS, CLIPS, every=7) == []
    assert fired(Guard(after=1), CLIPS, CLIPS, every=8) == [1]
    assert fired(Guard(after=1), CLIPS, every=1, first=500) == [], "nor in those after a resume, when histories are new"
    assert fired(Guard(after=1, warmup=0), CLIPS) == [0]


def test_the_budget_bounds_what_leaves_fp8() -> None:
    evidence = Evidence(Guard(after=1, budget="10%"), {"a": 0.06, "b": 0.06, "c": 0.04}, 0)
    verdicts = evidence.see(0, rows({**NAN}, {**NAN, "module": "b"}, {**NAN, "module": "c"}, {**NAN, "module": "stranger"}))
    assert [(v.module, v.is_within_budget) for v in verdicts] == [("a", True), ("b", False), ("c", True)]
    assert evidence.spent == pytest.approx(0.10)
    assert verdicts[0].reason == "NaN or Inf made by the cast or GEMM of its fprop input at sampled steps 0"


def test_shares_are_of_what_runs_in_fp8() -> None:
    entries = [
        {"fqn": "a", "fp8": True, "in_features": 4, "out_features": 3},
        {"fqn": "b", "fp8": True, "in_features": 4, "out_features": 1},
        {"fqn": "c", "fp8": False, "in_features": 4, "out_features": 4},
        {"fqn": "d", "fp8": True, "in_features": None, "out_features": None},
    ]
    assert flop_shares(entries) == {"a": 0.75, "b": 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 0}, "a guard needs after >= 1 and warmup >= 0, got after=0, warmup=8"),
        ({"warmup": -1}, "a guard needs after >= 1 and warmup >= 0, got after=3, warmup=-1"),
        ({"budget": "20x"}, "budget of a guard is a share such as 10% or 0.1, got '20x'"),
        ({"max_saturation": 2}, "max_saturation of a guard is a share such as 10% or 0.1, got 2"),
    ],
)
def test_a_value_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as refused:
        Guard(**options)
    assert str(refused.value) == message


def test_a_guard_that_does_not_fire_changes_no_bit(tmp_path: Path) -> None:
    alone = train(net("tensorwise_delayed"), 12)
    model = net("tensorwise_delayed")
    with fp8debug.watch(model, tmp_path / "run", every=1, guard=Guard(after=1, budget=1.0)):
        assert train(model, 12) == alone
    run = fp8debug.Run(tmp_path / "run")
    assert run.sql("SELECT count(*) AS n FROM events WHERE kind = 'recipe'").to_pylist() == [{"n": 0}]


def sick_model() -> Any:
    """Return a model one of whose scales is too small from step 10 on."""
    model = net("tensorwise_current")
    fp8debug.inject(model, "stale_scale", module="blocks.1.down", step=10)
    return model


def guarded(path: Path, guard: Guard, *, explicit: bool) -> tuple[Any, list[float]]:
    """Train it under a guard; return it and its losses."""
    model = sick_model()
    with fp8debug.watch(model, path, every=2, what_if=(), guard=guard) as watch:
        losses = train(model, 16, after=(lambda _, loss: watch.step(loss=loss)) if explicit else None)
    return model, losses


@pytest.mark.parametrize("explicit", [True, False])
def test_a_clipping_module_goes_to_bf16_and_the_run_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], explicit: bool
) -> None:
    sick = train(sick_model(), 16)
    model, losses = guarded(tmp_path / "run", Guard(after=2, budget=0.5), explicit=explicit)
    assert model.blocks[1].down.recipe.is_high_precision
    assert [n for n, m in model.named_modules() if hasattr(m, "recipe") and m.recipe.is_high_precision] == ["blocks.1.down"]
    assert losses[:13] == sick[:13] and losses[13:] != sick[13:], "evidence of steps 10 and 12; it acts from step 13 on"
    run = fp8debug.Run(tmp_path / "run")
    (did, moved) = run.sql("SELECT step, module, message FROM events WHERE kind = 'recipe'").to_pylist()
    assert (did["step"], did["module"]) == (moved["step"], moved["module"]) == (13, "blocks.1.down")
    assert did["message"].startswith("guard: BF16 from step 13 on because of ")
    assert did["message"].endswith(" clipped at sampled steps 10, 12; 16.4% of the FP8 FLOPs, 16.4% of at most 50.0% spent")
    assert moved["message"] == "bf16 instead of tensorwise_current"
    assert capsys.readouterr().err.count("guard: BF16 from step 13 on") == 1
    rows = run.sql(
        "SELECT max(step) AS last FROM sites WHERE module = 'blocks.1.down' AND actual AND reference = 'operand'"
    ).to_pylist()
    assert rows == [{"last": 12}]


def test_what_does_not_fit_the_budget_stays_and_is_reported(tmp_path: Path) -> None:
    model, _ = guarded(tmp_path / "run", Guard(after=1, budget=0.05), explicit=True)
    assert not model.blocks[1].down.recipe.is_high_precision
    (event,) = fp8debug.Run(tmp_path / "run").sql("SELECT message FROM events WHERE kind = 'recipe'").to_pylist()
    assert event["message"].startswith("guard: stays in FP8 in spite of ")
    assert event["message"].endswith("its 16.4% of the FP8 FLOPs do not fit the budget of 5.0%, 0.0% spent")


def test_a_schedule_does_not_undo_the_guard(tmp_path: Path) -> None:
    model = sick_model()
    fp8debug.apply(model, [Fallback(module="*", gemms=("fprop",), until_step=2)])
    with fp8debug.watch(model, tmp_path / "run", every=2, guard=Guard(after=1, budget=1.0)):
        train(model, 14)
    assert model.blocks[1].down.recipe.is_high_precision and not model.blocks[1].up.recipe.is_high_precision


def test_a_guard_needs_something_to_guard(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="guard= needs Fp8Linear modules that run in FP8; convert"):
        fp8debug.watch(net(None), tmp_path / "plain", guard=Guard())
    with pytest.raises(UsageError, match=r"guard must be a fp8debug\.Guard, got int"):
        fp8debug.watch(net(), tmp_path / "int", guard=3)  # type: ignore[arg-type]  # what a user may write


def test_an_error_of_the_guard_does_not_reach_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(Evidence, "see", broken)
    model = net()
    with fp8debug.watch(model, tmp_path / "run", every=1, guard=Guard()):
        assert all(torch.isfinite(torch.tensor(train(model, 3))))
    (event,) = fp8debug.Run(tmp_path / "run").sql("SELECT message FROM events WHERE kind = 'recipe'").to_pylist()
    assert event["message"] == "the guard stopped: RuntimeError: broken"


def test_the_guard_loads_neither_torch_nor_the_reading_half() -> None:
    for name in ("Guard", "apply"):
        heavy = ("duckdb", "torch", "fp8debug.rules", "fp8debug.store.read.run")
        code = f"import sys, fp8debug; fp8debug.{name}; print([m for m in {heavy} if m in sys.modules])"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
