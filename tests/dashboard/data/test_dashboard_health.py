"""The health of a site is the worst severity of its metrics, in SQL, in numpy and in the table in memory alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp8debug import Run
from fp8debug_dashboard.data import health, metric_cache, module_health, queries, step_ranges
from fp8debug_dashboard.data.healthy_ranges import envelope, kind_of
from fp8debug_dashboard.data.nonfinite import FINITE, MISSING, NAN
from fp8debug_dashboard.data.row_kinds import bits_sql
from tests.dashboard import samples
from tests.synthetic import Override


def write_left(path: Path) -> None:
    """Write a run with values that no rule takes for a fault beside those that one does."""
    slots: tuple[dict[str, Any], ...] = (
        {"num_saturated": lambda row: round(0.02 * row["numel"]), "headroom": 1.03},
        {"num_saturated": lambda row: round(0.02 * row["numel"]), "headroom": 1.3},
        {"num_underflow": lambda row: round(0.3 * row["numel"])},
        {"num_underflow": lambda row: round(0.3 * row["numel"]), "amax": 64.0, "log2_hist": None},
    )
    tensors = ("weight", "input", "weight", "input")
    overrides = [
        Override(module=module, gemm="fprop", tensor=tensor, steps=(10, None), slots=own)
        for (module, _, _), tensor, own in zip(samples.gpt_modules(1), tensors, slots, strict=False)
    ]
    samples.write_healthy(path, num_steps=40, every=10, modules=samples.gpt_modules(1), overrides=overrides)


@pytest.fixture(scope="module", params=["sick", "ranks", "nan", "left"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("health") / "run"
    if request.param == "sick":
        samples.write_sick(path, num_steps=320, every=80)
    elif request.param == "ranks":
        samples.write_ranks(path, num_steps=20)
    elif request.param == "left":
        write_left(path)
    else:
        samples.write_nan(path, num_steps=100, every=20)
    return Run(path)


def test_the_levels_of_a_report_are_the_severities_of_the_dashboard(run: Run) -> None:
    levels, heat = module_health.module_health(run), queries.health(run)
    assert (levels.modules, levels.steps.tolist()) == (heat.modules, heat.steps.tolist()) and heat.states is not None
    lost, nothing = (heat.states > FINITE) & (heat.states < MISSING), np.isnan(heat.values)
    words = [module_health.NONFINITE, module_health.NO_DATA, module_health.HEALTHY, module_health.NEAR, module_health.WARNING]
    expected = np.select([lost, nothing, heat.values < 0.5, heat.values < 1, heat.values < 2], words, module_health.ERROR)
    assert levels.levels.tolist() == expected.tolist()


def by_hand(run: Run) -> dict[tuple[str, int], float]:
    """Return the worst severity of each module and step, from the columns and their envelopes."""
    keys = ("module", "step", "gemm", "tensor", "cast_name", "reference", "num_nan", "num_inf", "numel")
    rows = run.sql(f"SELECT {', '.join((*keys, *health.METRICS))}, {bits_sql(run)} AS bits FROM sites WHERE actual").to_pylist()
    found: dict[tuple[str, int], float] = {}
    for row in rows:
        place = row["module"], row["step"]
        kind = kind_of(row["gemm"], row["tensor"], row["cast_name"], row["reference"]) + row["bits"]
        is_lost = (row["num_nan"] or 0) + (row["num_inf"] or 0) >= (row["numel"] or 1)
        for metric in health.METRICS:
            ranges = envelope(metric, kind)
            if ranges is not None and row[metric] is not None and not is_lost:
                found[place] = max(found.get(place, 0.0), ranges.at_value(row[metric]))
    return found


def test_a_cell_is_the_worst_severity_of_all_metrics_and_sites(run: Run) -> None:
    heat, wanted = queries.health(run), by_hand(run)
    assert heat.modules == tuple(dict.fromkeys(str(m["fqn"]) for m in run.modules if m["fqn"] in {m for m, _ in wanted}))
    got = {
        (module, int(step)): float(heat.values[i, j])
        for i, module in enumerate(heat.modules)
        for j, step in enumerate(heat.steps)
        if not np.isnan(heat.values[i, j])
    }
    assert got.keys() == wanted.keys()
    assert got == pytest.approx(wanted, abs=0.6 / health.FINE)


def test_the_table_in_memory_has_the_same_health(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    table = metric_cache.build(run.path)
    assert table is not None and table.health is not None
    for cells in (400, 2):
        monkeypatch.setattr(queries, "MAX_CELLS", cells)
        for site, cast in (("all", "running"), ("fprop.input", "running"), ("all", "what-if")):
            slow, fast = queries.health(run, site, cast), queries.health(run, site, cast, cache=table)
            assert fast.modules == slow.modules and fast.sites == slow.sites
            np.testing.assert_array_equal(fast.steps, slow.steps)
            np.testing.assert_array_equal(fast.reasons, slow.reasons)
            np.testing.assert_array_equal(fast.states, slow.states)


def test_the_worst_metric_and_its_site_are_named(tmp_path: Path) -> None:
    rate = Override(
        module="blocks.0.mlp.up",
        gemm="fprop",
        tensor="input",
        slots={"num_underflow": lambda row: round(0.3 * row["numel"])},
        steps=(10, None),
    )
    noisy = Override(module="blocks.0.mlp.down", gemm="dgrad", tensor="weight", slots={"sqnr_db": 27.0}, steps=(10, None))
    samples.write_healthy(tmp_path / "run", num_steps=20, every=10, overrides=[rate, noisy])
    heat = queries.health(Run(tmp_path / "run"))
    assert heat.reasons is not None
    found = {}
    for i, j in np.argwhere(heat.values > 0).tolist():
        found[heat.modules[i], int(heat.steps[j])] = str(health.reason_of(int(heat.reasons[i, j]), heat.sites))
    assert found == {
        ("blocks.0.mlp.up", 10): "underflow_rate at fprop.input",
        ("blocks.0.mlp.down", 10): "sqnr_db at dgrad.weight",
    }
    assert heat.values[heat.modules.index("blocks.0.mlp.down"), 1] == pytest.approx(1.546, abs=1e-3)


def test_nan_is_a_state_of_its_own_and_no_healthy_cell(tmp_path: Path) -> None:
    heat = queries.health(Run(samples.write_nan(tmp_path / "run", num_steps=100, every=20)))
    assert heat.states is not None
    row = heat.states[heat.modules.index(samples.NAN_MODULE)]
    assert (row[heat.steps >= samples.NAN_STEP] == NAN).all() and (row[heat.steps < samples.NAN_STEP] == 0).all()


def test_of_a_huge_run_some_steps_are_read_for_the_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=48, every=2, modules=samples.gpt_modules(1))
    run = Run(tmp_path / "run")
    monkeypatch.setattr(step_ranges, "FEWEST_READ", 7)
    monkeypatch.setattr(step_ranges, "MOST_ROWS", 1000)
    whole, some = queries.health(run), queries.health(run, is_thin=True)
    assert some.steps_apart == 4 and some.steps[-1] == whole.steps[-1]
    np.testing.assert_array_equal(some.values, whole.values[:, np.isin(whole.steps, some.steps)])


def test_a_run_without_any_of_the_metrics_has_no_health(tmp_path: Path) -> None:
    samples.write_healthy(tmp_path / "run", num_steps=20)
    heat = queries.health(Run(tmp_path / "run"), steps=(900, 901))
    assert heat.modules == () and heat.values.shape == (0, 0)
    assert queries.health(Run(tmp_path / "run"), cast="no such cast").modules == ()
