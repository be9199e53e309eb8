"""The cure of a finding brings loss and site back: some of those that ``tests/bench/cures.py`` applies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fp8debug
from fp8debug.fallback import recommend
from fp8debug.rules import RULES, triage
from tests.bench.remedies.bench import tried
from tests.bench.remedies.trials import BY_HAND, TRIALS
from tests.rules.sick_runs import INPUT, share
from tests.shortened import shortened
from tests.synthetic import Override, build

QUICK = (
    *("zero_tile/amax_eps", "stale_scale/scaling=current", "bf16_gradient_sum/sums_in_FP32", "raw_codes/load_the_scales"),
    *("unwritten_padding/a_buffer_of_zeros", "empty_history/scaling=current", "standing_count/a_count_in_FP32"),
    *("clipped_while_scaled/clip_after_the_division", "lost_second_moment/a_checkpoint_in_FP32"),
    *("a_resume_without_moments/load_the_moments", "a_module_in_BF16_in_inference/FP8_in_both"),
    "inference_after_an_export_in_BF16/export_the_training's_weights",
)


@pytest.mark.parametrize("name", shortened(QUICK, 3))
def test_the_cure_brings_loss_and_site_back(name: str, tmp_path: Path) -> None:
    (trial,) = (t for t in TRIALS if t.name == name)
    outcome = tried(trial, tmp_path)
    assert outcome.found and outcome.helps, outcome


def test_every_rule_has_a_cure_that_is_tried_or_a_reason() -> None:
    assert {trial.code for trial in TRIALS} | BY_HAND.keys() == set(RULES.names())
    assert not {trial.code for trial in TRIALS} & BY_HAND.keys()
    assert {trial.fault for trial in TRIALS if trial.fault} <= {fault.name for fault in fp8debug.list_faults()}


def outlier(path: Path, width: int, what_if: float | None = None) -> Any:
    """Return (finding, candidates) of an outlier in an input of that width, under one scale for the tensor."""
    lost = {"num_underflow": share(0.9), "amax": 6.0e5, "sqnr_db": 37.0}
    tried_as = {"cast_name": "e4m3fn 1x128 current", "actual": False}
    run = build(
        path,
        modules=[("a", width, 256), ("b", 256, 256)],
        recipe="tensorwise_current",
        what_if=["blockwise"] if what_if is not None else [],
        overrides=[
            Override(**{**INPUT, "module": "a"}, slots=lost),
            *([Override(**{**INPUT, "module": "a", **tried_as}, slots={"num_underflow": share(what_if)})] if what_if else []),
        ],
    )
    (finding,) = triage(run, select=["F105"])
    return finding, [(f.cast and f.cast.granularity) for f in recommend(run, [finding], 1.0) if f.module == "a"]


def test_tiles_are_proposed_where_they_would_help(tmp_path: Path) -> None:
    """Of one outlier in a row 1x128 confines the loss to 128 of its elements; of one in each tile it confines nothing."""
    wide, candidates = outlier(tmp_path / "wide", 4096)
    assert wide.cure.startswith("granularity='1x128'") and candidates == ["1x128"]
    narrow, candidates = outlier(tmp_path / "narrow", 192)
    assert narrow.cure == "smooth the outlier channel; else BF16 for this module's fprop" and candidates == [None]
    spread, candidates = outlier(tmp_path / "spread", 4096, what_if=0.8)
    assert spread.cure.startswith("smooth the outlier channel") and candidates == [None]
    measured, candidates = outlier(tmp_path / "measured", 192, what_if=0.02)
    assert measured.cure.startswith("granularity='1x128'") and candidates == ["1x128"]
