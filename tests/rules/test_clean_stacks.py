"""Architectures and stacks that are not the bench's own: no warning; some of the runs of ``tests/bench/clean.py``, shortened."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fp8debug.rules import Severity, triage
from tests.bench.clean_programs.architectures import ARCHITECTURES
from tests.bench.clean_programs.stacks import STACKS
from tests.bench.clean_programs.training import LONG, keys, losses_of, training_of
from tests.scaled_mm import skipped_without_scaled_mm

QUICK = ("lora/deep_gemm", "vit/torchao_rowwise", "reward/scaled_mm", "two_towers/own_delayed", "tied/exclude")


@pytest.mark.parametrize("key", QUICK)
def test_a_clean_program_has_no_warning(key: str, tmp_path: Path) -> None:
    if "torchao" in key:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its import: extensions for other builds of torch
            pytest.importorskip("torchao.float8")
    with skipped_without_scaled_mm():
        losses = list(losses_of(key, tmp_path / "run", is_long=False, steps=20))
    found = triage(tmp_path / "run")
    assert len(losses) == 20 and [(f.code, f.module, f.message) for f in found if f.severity > Severity.INFO] == []
    assert found.classification is not None and found.classification["class"] == "loss-fine"


def test_the_bench_has_what_users_train_with() -> None:
    runs = keys()
    assert len(runs) == 120 and len(ARCHITECTURES) >= 8 and len(STACKS) == 10
    assert 5 <= sum(runs.values())
    drawn = [training_of(key, is_long=is_long) for key, is_long in runs.items()]
    assert {t.steps for t in drawn if t.steps > 64} == {LONG}
    wanted: dict[str, set[object]] = {"warmup": {0, 20}, "clip": {None, 0.1}, "dropout": {0.0, 0.3}, "label_noise": {0.0, 0.4}}
    for name, values in wanted.items():
        assert values <= {getattr(t, name) for t in drawn}, name
    assert max(t.lr * t.decay for t in drawn) == pytest.approx(0.01), "weights without a gradient decay to zero"
    assert len({t.seed for t in drawn}) > 100
