"""The judge beside a training: what it says of a window of steps holds for the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fp8debug.rules import triage
from fp8debug.store.read.recent import NUM_SAMPLED
from fp8debug.trackers.judging import Judge
from tests.synthetic import MODULES, Override, build

#: Of a tensor of which one element is NaN.
SICK = {"num_nan": 1}


@pytest.mark.parametrize("age", [3, NUM_SAMPLED + 2], ids=["in the window", "before the window"])
def test_a_loss_that_is_gone_is_judged_while_its_step_is_in_the_window(tmp_path: Path, age: int) -> None:
    """Behind it, the rows that tell the origin are not read any more: nothing is said of them."""
    num_steps, first = 30, 30 - age
    module = MODULES[3][0]
    made = Override(module=module, gemm="fprop", tensor="input", actual=None, slots=SICK, steps=(first, None))
    steps = {step: {"loss": math.nan} for step in range(first, num_steps)}
    run = build(tmp_path / "run", num_steps=num_steps, every=1, overrides=[made], steps=steps)
    (whole,) = [finding for finding in triage(run) if finding.code == "F125"]
    assert (whole.module, whole.steps[0]) == (module, first)
    live = [(f["code"], f["module"], f["steps"][0]) for f in Judge(str(run.path)).step()["findings"] if f["code"] == "F125"]
    assert live == ([("F125", module, first)] if age <= NUM_SAMPLED else [])
