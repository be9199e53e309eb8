"""Where the health of a site says "act", triage has a finding: both judge by numerics.md, section 4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp8debug import Run, get_recipe, measure, triage
from fp8debug.types import Gemm, TensorRole
from fp8debug_dashboard.data import queries
from fp8debug_dashboard.data.healthy_ranges import envelope, kind_of
from tests.synthetic import Override, Plan, write

SICK = "blocks.1.mlp.up"
#: (gemm, tensor) of operands.
OPERANDS = (("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output"), ("wgrad", "input"))


def clipping(rate: float, headroom: float) -> dict[str, Any]:
    """Return the slots of an operand of which a share clips by up to a headroom."""
    gain = 1 - rate * (1 - 1 / max(1.0, headroom))
    return {"num_saturated": lambda row: round(rate * row["numel"]), "headroom": headroom, "gain": gain}


#: Rates beyond "act", and a headroom that values which were rounded do not explain.
CLIPPED = {f"{rate:.2%} by 1.08": clipping(rate, 1.08) for rate in (2e-3, 4.2e-3)}
FAR = {f"{db} dB": {"sqnr_db": db} for db in (24.3, 22.0, 15.0)}

#: Sizes beyond what rounding does to equal values (1/17).
SIZES = {f"gain {gain}": {"gain": gain} for gain in (0.93, 0.935, 1.065, 1.1)}
SOUND: dict[str, dict[str, Any]] = {"4 % zero": {"num_underflow": lambda row: round(0.04 * row["numel"])}}
KINDS: dict[str, dict[str, Any]] = {**CLIPPED, **FAR, **SIZES, **SOUND}


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "rowwise", "mxfp8"])
@pytest.mark.parametrize("name", KINDS)
def test_what_the_heatmap_calls_act_has_a_finding(recipe: str, name: str, tmp_path: Path) -> None:
    sick: list[dict[str, Any]] = [{"gemm": gemm, "tensor": tensor, "slots": KINDS[name]} for gemm, tensor in OPERANDS]
    modules = [(f"blocks.{i}.mlp.up", 256, 1024) for i in range(len(sick))]
    overrides = [Override(module=module, steps=(20, None), **slots) for (module, _, _), slots in zip(modules, sick, strict=True)]
    write(tmp_path / "run", Plan(num_steps=40, every=4, recipe=recipe, modules=modules, overrides=overrides))
    run = Run(tmp_path / "run")
    heat, findings = queries.health(run), triage(run)
    found = {part.module for finding in findings for part in finding.sites if str(finding.severity) in ("error", "warning")}
    acts = {module for module, row in zip(heat.modules, heat.values, strict=True) if np.nanmax(row) >= 2}
    assert acts == (set() if name in SOUND else {module for module, _, _ in modules})
    assert acts == found, [str(finding) for finding in findings]


@pytest.mark.parametrize(("recipe", "rate", "headroom"), [("blockwise_pow2", 3e-4, 1.06), ("blockwise", 7.8e-3, 1.0034)])
def test_a_clipping_by_no_more_than_rounding_is_left_alone(recipe: str, rate: float, headroom: float, tmp_path: Path) -> None:
    """Quantized twice under powers of two, and scales of a copy in BF16: the maximum of each block of 128 clips."""
    overrides = [Override(module=SICK, gemm="wgrad", tensor="input", slots=clipping(rate, headroom))]
    write(tmp_path / "run", Plan(num_steps=40, every=4, recipe=recipe, overrides=overrides))
    assert not triage(Run(tmp_path / "run"))


@pytest.mark.parametrize("granularity", ["1x32", "1x128"])
def test_sound_pow2_even_scales_are_healthy(granularity: str) -> None:
    plain = get_recipe("blockwise").casts[Gemm.FPROP, TensorRole.INPUT]
    assert plain is not None
    cast = replace(plain, granularity=granularity, scale_rounding="pow2_even")
    rate: Any = measure(2 * torch.rand(512, 1024, generator=torch.Generator().manual_seed(0)) - 1, cast)["overflow_rate"]
    ranges = envelope("overflow_rate", kind_of("fprop", "input", str(cast), "operand"))
    assert ranges is not None and rate > 1e-4
    assert ranges.at_value(rate) == 0
