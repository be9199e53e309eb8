"""Where the health of a site says "act", triage has a finding: both judge by numerics.md, section 4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import numpy as np
import pytest
import torch

from fp8debug import Run, get_recipe, measure, triage
from fp8debug.formats import FORMATS
from fp8debug.metrics import limits
from fp8debug.metrics.histogram import FIRST_LOG2, NUM_BINS
from fp8debug.recipes import Cast
from fp8debug.rules.f128_operand_differs import OperandDiffers
from fp8debug.rules.reading.bounds import tensor_floor_db
from fp8debug.types import Gemm, TensorRole
from fp8debug_dashboard.data import metric_cache, queries
from fp8debug_dashboard.data.healthy_ranges import CLIPS_LITTLE, envelope, kind_of, severities
from tests.synthetic import Override, Plan, write

SICK = "blocks.1.mlp.up"
#: (gemm, tensor) of operands.
OPERANDS = (("fprop", "input"), ("fprop", "weight"), ("dgrad", "grad_output"), ("wgrad", "input"))


class Verdicts(NamedTuple):
    """Modules whose cell says "act", with an error, and with an error or a warning."""

    acts: set[str]
    errors: set[str | None]
    told: set[str | None]


def clipping(rate: float, headroom: float) -> dict[str, Any]:
    """Return the slots of an operand of which a share clips by up to a headroom."""
    gain = 1 - rate * (1 - 1 / max(1.0, headroom))
    return {"num_saturated": lambda row: round(rate * row["numel"]), "headroom": headroom, "gain": gain}


def zero(rate: float) -> dict[str, Any]:
    """Return the slots of a tensor of which a share underflows, without an outlier above it."""
    return {"num_underflow": lambda row: round(rate * row["numel"])}


#: Rates beyond "act", and a headroom that values which were rounded do not explain.
CLIPPED = {f"{rate:.2%} by {headroom}": clipping(rate, headroom) for rate in (2e-3, 4.2e-3) for headroom in (1.08, 1.3)}
FAR = {f"{db} dB": {"sqnr_db": db} for db in (22.0, 15.0)}
#: Sizes beyond what rounding does to equal values (1/17).
SIZES = {f"gain {gain}": {"gain": gain} for gain in (0.93, 0.935, 1.066, 1.1)}
SICK_ROWS: dict[str, dict[str, Any]] = {**CLIPPED, **FAR, **SIZES}
#: What no rule takes for a fault by itself.
SOUND: dict[str, dict[str, Any]] = {
    **{f"{rate:.0%} zero": zero(rate) for rate in (0.04, 0.06, 0.2, 0.45)},
    **{f"{rate:.1%} by {headroom}": clipping(rate, headroom) for rate in (2e-3, 2e-2) for headroom in (1.0034, 1.035, 1.069)},
    **{f"gain {gain}": {"gain": gain} for gain in (0.945, 0.955, 1.055)},
}
#: More than half is zero: the median lies far below the amax, which is F105's outlier in an input, whatever the format.
MOSTLY_ZERO: dict[str, dict[str, Any]] = {f"{rate:.0%} zero": zero(rate) for rate in (0.61, 0.72, 0.97)}
#: Results against the shadow differ by their operands' errors.
RESULTS = (("fprop", "output"), ("dgrad", "grad_input"), ("wgrad", "grad_weight"))
OF_RESULTS: dict[str, dict[str, Any]] = {
    **{f"result: gain {gain}": {"gain": gain} for gain in (0.85, 0.93, 1.07, 1.2)},
    **{f"result: {db} dB": {"sqnr_db": db} for db in (19.0, 10.0)},
}


def recorded(path: Path, recipe: str, rows: dict[str, Override]) -> Path:
    """Return a new run in which each module that is named has one sick row from its middle on, beside a sound head."""
    overrides = [replace(row, module=module, steps=(20, None)) for module, row in rows.items()]
    modules = [*((module, 256, 1024) for module in rows), ("head", 256, 256)]
    write(path, Plan(num_steps=40, every=4, recipe=recipe, modules=modules, overrides=overrides))
    return path


def of_sites(
    slots: dict[str, Any], sites: Sequence[tuple[str, str]], reference: str, part: str = "blocks"
) -> dict[str, Override]:
    """Return a module for each site, whose row there has the slots."""
    return {
        f"{part}.{i}.mlp.up": Override(gemm=gemm, tensor=tensor, reference=reference, slots=slots)
        for i, (gemm, tensor) in enumerate(sites)
    }


def of_each(cases: dict[str, dict[str, Any]], sites: Sequence[tuple[str, str]], reference: str) -> dict[str, dict[str, Override]]:
    """Return the modules of each case, all of one run."""
    return {name: of_sites(slots, sites, reference, f"part{i}") for i, (name, slots) in enumerate(cases.items())}


def verdicts(path: Path) -> Verdicts:
    """Return the modules whose cell says "act", and those with a finding, by severity."""
    run = Run(path)
    heat, findings = queries.health(run), triage(run)
    found = [(part.module, str(finding.severity)) for finding in findings for part in finding.sites]
    acts = {module for module, row in zip(heat.modules, heat.values, strict=True) if np.nanmax(row) >= 2}
    return Verdicts(acts, {m for m, s in found if s == "error"}, {m for m, s in found if s in ("error", "warning")})


def judged(path: Path, recipe: str, slots: dict[str, Any], sites: Sequence[tuple[str, str]], reference: str) -> Verdicts:
    """Return the modules whose cell says "act", and those with a finding, by severity; each has one of the sites."""
    return verdicts(recorded(path, recipe, of_sites(slots, sites, reference)))


def all_judged(
    path: Path, recipe: str, cases: dict[str, dict[str, Any]], sites: Sequence[tuple[str, str]], reference: str
) -> dict[str, tuple[set[str], Verdicts]]:
    """Return the modules of each case, and what the one run with all of them says of these."""
    modules = of_each(cases, sites, reference)
    found = verdicts(recorded(path, recipe, {k: v for case in modules.values() for k, v in case.items()}))
    return {
        name: ({*of}, Verdicts(found.acts & of.keys(), found.errors & of.keys(), found.told & of.keys()))
        for name, of in modules.items()
    }


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_current", "rowwise", "mxfp8"])
def test_what_the_heatmap_calls_act_has_a_finding(recipe: str, tmp_path: Path) -> None:
    for name, (modules, found) in all_judged(tmp_path / "run", recipe, {**SICK_ROWS, **SOUND}, OPERANDS, "operand").items():
        assert found.acts == found.told == (set() if name in SOUND else modules), name


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "mxfp8", "mxfp6_e3m2"])
def test_an_input_that_is_mostly_zero_is_act(recipe: str, tmp_path: Path) -> None:
    for name, (modules, found) in all_judged(tmp_path / "run", recipe, MOSTLY_ZERO, OPERANDS, "operand").items():
        assert found.acts == found.told == {min(modules)}, name


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise_delayed", "mxfp4", "nvfp4"])
def test_no_result_is_called_act_for_what_its_operands_did(recipe: str, tmp_path: Path) -> None:
    for name, (_, found) in all_judged(tmp_path / "run", recipe, OF_RESULTS, RESULTS, "shadow").items():
        assert not found.acts and not found.told, name


@pytest.mark.parametrize("recipe", ["tensorwise_delayed", "nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"])
@pytest.mark.parametrize("cases", [{**CLIPPED, **SIZES, **SOUND}, MOSTLY_ZERO], ids=["sick and sound", "mostly zero"])
def test_no_act_without_a_finding_in_other_recipes(recipe: str, cases: dict[str, Any], tmp_path: Path) -> None:
    for name, (_, found) in all_judged(tmp_path / "run", recipe, cases, OPERANDS, "operand").items():
        assert found.errors <= found.acts <= found.told, name


#: SQNRs around what magnitudes, or where these say nothing the cast, let an operand of these formats have.
LOW_DB = {
    "nvfp4": (15.0, 12.5, 11.0, 9.0, 2.0),
    "mxfp4": (15.0, 12.5, 9.0, 5.0),
    "mxfp6_e2m3": (26.0, 24.4, 20.0, 18.0),
    "mxfp6_e3m2": (22.0, 19.4, 18.0),
}


def below_the_rules_floor(run: Run) -> set[str]:
    """Return the modules with an operand farther from its tensor than F128 lets it be."""
    rule, found = OperandDiffers(), set()
    columns = "module, cast_name, sqnr_db, log2_hist, amax, scale_inv_max, sum_x2"
    for row in run.sql(f"SELECT {columns} FROM sites WHERE reference = 'operand' AND sqnr_db IS NOT NULL AND actual").to_pylist():
        cast = Cast.parse(row["cast_name"])
        if row["sqnr_db"] < rule._floor_of(cast, row, limits.operand_floor_db(cast)):
            found.add(row["module"])
    return found


@pytest.mark.parametrize("with_histogram", [True, False])
@pytest.mark.parametrize("recipe", LOW_DB)
def test_an_operand_of_few_bits_is_act_where_f128_names_it(recipe: str, with_histogram: bool, tmp_path: Path) -> None:
    """The colours had judged by the format's usual loss: 12.1 dB in FP4, where F128 asks the histogram of each tensor."""
    bins = [0] * NUM_BINS
    bins[-FIRST_LOG2] = 262_144  # all in [1, 2), so that the bound is close
    magnitudes: dict[str, Any] = {"amax": 1.99, "sum_x2": 262_144 * 3.0, "scale_inv_max": 0.4, "log2_hist": bins}
    cases = {str(db): {**(magnitudes if with_histogram else {"log2_hist": None}), "sqnr_db": db} for db in LOW_DB[recipe]}
    path = tmp_path / "run"
    recorded(path, recipe, {k: v for case in of_each(cases, OPERANDS, "operand").values() for k, v in case.items()})
    run, cache, found = Run(path), metric_cache.build(path), verdicts(path)
    acts = below_the_rules_floor(run)
    named = {str(part.module) for finding in triage(run) if finding.code == "F128" for part in finding.sites}
    assert named and named <= found.acts == acts <= found.told
    for table in (None, cache):
        heat = queries.heat(run, "sqnr_db", cache=table)
        colors = severities("sqnr_db", heat.values, heat.kinds)
        assert colors is not None
        assert {name for name, row in zip(heat.modules, colors, strict=True) if np.nanmax(row) >= 2} == acts


def test_a_row_below_its_floor_is_the_worst_of_a_cell(tmp_path: Path) -> None:
    """One that few elements under a scale bound to 13.9 dB, beside one of 16x16 that may have 4 dB by its cast."""
    overrides = [
        Override(
            module=SICK, gemm="fprop", tensor=tensor, slots={"sqnr_db": db, **({} if tensor == "input" else {"log2_hist": None})}
        )
        for tensor, db in (("input", 11.0), ("weight", 4.0))
    ]
    write(tmp_path / "run", Plan(num_steps=40, every=4, recipe="nvfp4", overrides=overrides))
    run, cache = Run(tmp_path / "run"), metric_cache.build(tmp_path / "run")
    for table in (None, cache):
        heat = queries.heat(run, "sqnr_db", cache=table)
        assert heat.values[heat.modules.index(SICK), 0] == pytest.approx(11.0, abs=1e-3)
    assert below_the_rules_floor(run) == {SICK}


@pytest.mark.parametrize(
    "name", ["e2m1fn 1x16 current scale=e4m3fn tensor_scale=tensor", "e3m2fn 1x32 current pow2_ceil scale=e8m0"]
)
@pytest.mark.parametrize("rounding", ["", " stochastic"])
def test_the_floor_of_a_tensor_in_sql_is_that_of_the_rule(name: str, rounding: str) -> None:
    cast, random = Cast.parse(name + rounding), np.random.default_rng(0)
    assert limits.judges_magnitudes(cast)
    for _ in range(50):
        values = random.standard_normal(4096) * 2.0 ** random.integers(-20, 20, 4096 if random.random() < 0.5 else 1)
        amax, energy = float(np.abs(values).max()), float((values**2).sum())
        bins = np.bincount(
            np.clip(np.floor(np.log2(np.abs(values))).astype(int) - FIRST_LOG2, 0, NUM_BINS - 1), minlength=NUM_BINS
        )
        scale = amax / FORMATS[cast.format].max * 2.0 ** random.uniform(0, 1)
        floor = tensor_floor_db(cast, bins.tolist(), amax, scale, energy) - limits.FLOOR_MARGIN_DB
        assert floor <= limits.highest_floor_db(cast) + 1e-9
        for db in (floor - 1e-6, floor + 1e-6):
            numbers = {"amax": amax, "scale_inv_max": scale, "sum_x2": energy, "sqnr_db": db}
            row = ", ".join(f"CAST({value!r} AS DOUBLE) AS {column}" for column, value in numbers.items())
            query = f"SELECT {limits.below_tensor_floor_sql(cast)} FROM (SELECT {bins.tolist()} AS log2_hist, {row})"
            assert duckdb.execute(query).fetchall() == [(db < floor,)]


@pytest.mark.parametrize("with_histogram", [True, False])
def test_zeros_below_an_outlier_are_act(with_histogram: bool, tmp_path: Path) -> None:
    """Half of the elements lie 12 binades below the amax; where no histogram was recorded the crest tells."""
    outlier: dict[str, Any] = {**zero(0.2), "amax": 2.0**6}
    bins = [0] * NUM_BINS
    bins[-6 - FIRST_LOG2], bins[5 - FIRST_LOG2] = 250_000, 12_144
    outlier["log2_hist"] = bins if with_histogram else None
    found = judged(tmp_path / "run", "tensorwise_current", outlier, [("fprop", "input"), ("wgrad", "input")], "operand")
    assert found.acts == found.told == {"blocks.0.mlp.up"}


def test_a_row_that_no_rule_takes_for_a_fault_hides_none_that_one_does(tmp_path: Path) -> None:
    """In the heatmap of one metric, too: 2 % of the input clip by rounding, 0.3 % of the weight by more."""
    overrides = [
        Override(module=SICK, gemm="fprop", tensor=tensor, slots=clipping(rate, headroom))
        for tensor, rate, headroom in (("input", 2e-2, 1.03), ("weight", 3e-3, 1.3))
    ]
    write(tmp_path / "run", Plan(num_steps=40, every=4, overrides=overrides))
    run, cache = Run(tmp_path / "run"), metric_cache.build(tmp_path / "run")
    for table in (None, cache):
        heat = queries.heat(run, "overflow_rate", cache=table)
        place = heat.modules.index(SICK)
        ranges = envelope("overflow_rate", int(heat.kinds[place, 0]))
        assert ranges is not None and ranges.at_value(float(heat.values[place, 0])) >= 2
        assert not heat.kinds[place, 0] & CLIPS_LITTLE
    assert {str(part.module) for finding in triage(run) for part in finding.sites} == {SICK}


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
