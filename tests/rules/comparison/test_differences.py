"""Two runs side by side: configuration first, the loss with its noise, and where the first site parts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8debug.errors import NoMatchError
from fp8debug.rules import triage
from fp8debug.rules.comparison.configuration import configuration_words, loss_text
from fp8debug.rules.comparison.runs import diff_runs
from fp8debug.rules.comparison.sites import unwrapped
from fp8debug.store.read.run import Run
from tests.rules.sick_runs import CLIPPED, CULPRIT, INPUT
from tests.synthetic import MODULES, Override, Plan, build, steps_row


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return build(tmp_path_factory.mktemp("a") / "good")


def test_a_run_and_its_twin_do_not_differ(healthy: Run, tmp_path: Path) -> None:
    found = diff_runs(healthy, build(tmp_path / "twin"))
    assert (found.differ, found.first, found.configuration, found.only) == (False, None, {}, ([], []))
    assert len(found.sites) == 9 * len(MODULES)
    assert all(site.differs_at is None and site.num_steps == 10 for site in found.sites)
    assert (
        found.loss_words
        == "median of steps 80 to 99: 2.777 -> 2.777, gap 0 +- 0: within the noise (4 standard errors, or 1% of the loss)"
    )
    assert found.site_words == "none of 54 sites diverges; 54 have the same tensors to the last digits"


def test_another_seed_differs_and_does_not_part(healthy: Run, tmp_path: Path) -> None:
    found = diff_runs(healthy, build(tmp_path / "other", seed=1))
    assert not found.differ
    assert all(site.differs_at == 0 for site in found.sites)


def test_the_first_site_that_parts(healthy: Run, tmp_path: Path) -> None:
    """In order of step, and of execution within it."""
    sick = [
        Override(**INPUT, slots=CLIPPED),
        Override(module="blocks.1.mlp.down", gemm="fprop", tensor="input", steps=(50, None), slots={"sum_x2": 9.9}),
        Override(module="blocks.0.*", gemm="fprop", tensor="input", steps=(50, None), slots={"sum_x2": 9.9}),
        Override(module="blocks.0.attn.qkv", gemm="fprop", tensor="input", steps=(20, 30), slots={"sqnr_db": 20.0}),
    ]
    found = diff_runs(healthy, build(tmp_path / "sick", overrides=sick))
    assert found.differ
    parted = [(site.diverges_at, site.module) for site in found.sites if site.diverges_at is not None]
    assert parted == [(40, CULPRIT), *((50, name) for name, _, _ in MODULES if "up" not in name or "0" in name)]
    assert found.first is not None
    assert found.first.what is not None and found.first.what.startswith("SQNR 31.") and found.first.what.endswith(" dB")
    assert [row["apart"] != "" for row in found.rows].count(True) > 5
    assert set(found.columns) == set(found.rows[0])


def test_another_recipe_is_told_once_for_all_modules(healthy: Run, tmp_path: Path) -> None:
    found = diff_runs(build(tmp_path / "bf16", recipe="bf16", what_if=["blockwise"]), healthy)
    assert found.configuration["recipe"] == ["bf16", "blockwise"]
    words = configuration_words(found.configuration)
    assert ("recipe", "bf16", "blockwise") in words
    assert ("fprop input of 6 modules, first blocks.0.attn.out", None, "e4m3fn 1x128 current") in words
    assert len(words) == 7
    assert all(site.medians["amax"][0] for site in found.sites), "a run in BF16 has its tensors"


def test_other_modules_and_wrappers(healthy: Run, tmp_path: Path) -> None:
    names = [(f"_orig_mod.module.{name}", k, n) for name, k, n in MODULES[:-1]] + [("head", 256, 16)]
    found = diff_runs(healthy, build(tmp_path / "other", modules=names))
    assert found.only == (["blocks.1.mlp.down"], ["head"])
    assert {site.module for site in found.sites} == {name for name, _, _ in MODULES[:-1]}
    assert unwrapped("module") == "module"


def test_no_common_step_and_a_choice_of_steps_and_modules(healthy: Run, tmp_path: Path) -> None:
    some = diff_runs(healthy, healthy, module="blocks.1.*", steps="20:50")
    assert {site.num_steps for site in some.sites} == {3}
    assert {site.module for site in some.sites} == {"blocks.1.mlp.up", "blocks.1.mlp.down"}
    odd = Override(actual=None, slots={"step": lambda row: row["step"] + 1})
    none = diff_runs(healthy, build(tmp_path / "odd", overrides=[odd]))
    assert none.site_words == "none compared: no site was sampled in both runs at a common step"
    with pytest.raises(NoMatchError, match=r"module 'blocks\.2\.\*' matches nothing"):
        diff_runs(healthy, healthy, module="blocks.2.*")


def test_a_name_with_brackets_is_that_module_alone(tmp_path: Path) -> None:
    run = build(tmp_path / "run", modules=[("w[0]", 16, 16), ("w0", 16, 16)])
    for module in ("w[0]", "w0"):
        assert {site.module for site in diff_runs(run, run, module=module).sites} == {module}


def test_the_document(healthy: Run) -> None:
    document = diff_runs(healthy, healthy).to_dict()
    assert list(document) == ["schema", "runs", "configuration", "loss", "modules", "first_divergence", "sites"]
    assert document["runs"] == ["good", "good"]
    assert document["loss"]["loss_gap"] == 0


NAN = float("nan")


def losses_since(step: int, loss: Callable[[float], float], end: int = 100) -> dict[int, dict[str, float]]:
    """Return losses changed from a step on."""
    return {at: {"loss": loss(steps_row(Plan(), at, is_sampled=False)["loss"])} for at in range(step, end)}


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_an_infinite_gap(healthy: Run, tmp_path: Path, value: float) -> None:
    bad = build(tmp_path / "bad", steps=losses_since(43, lambda loss: value))
    found = diff_runs(healthy, bad)
    assert (found.loss["diverges_at"], found.loss["loss_gap"], found.loss["nonfinite_at"]) == (43, math.inf, [None, 43])
    assert found.differ and "infinite gap: beyond the noise" in found.loss_words and "within" not in found.loss_words
    assert f"-> {loss_text(value)}, infinite gap" in found.loss_words
    assert found.loss_words.endswith("from step 43 on; the loss of bad is NaN or Inf at step 43")
    document = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (document["loss"]["loss"], document["loss"]["loss_gap"], document["loss"]["diverges_at"]) == (None, None, 43)
    turned = diff_runs(bad, healthy)
    assert (turned.loss["diverges_at"], turned.loss["loss_gap"]) == (43, -math.inf)


def test_a_nan_in_both_runs_and_one_that_passes(healthy: Run, tmp_path: Path) -> None:
    early, late = (build(tmp_path / str(s), steps=losses_since(s, lambda loss: NAN)) for s in (40, 60))
    assert diff_runs(late, early).loss["diverges_at"] == 40
    both = diff_runs(early, early)
    assert (both.loss["diverges_at"], both.loss["loss_gap"], both.differ) == (None, None, False)
    assert "both are NaN or Inf, so their gap is not defined" in both.loss_words
    passing = diff_runs(healthy, build(tmp_path / "passing", steps=losses_since(50, lambda loss: NAN, 51)))
    assert passing.differ and passing.loss["diverges_at"] is None
    assert passing.loss_words.endswith("; the loss of passing is NaN or Inf at step 50")


@pytest.mark.parametrize("step", [0, 3, 15, 40, 45, 61, 79, 85, 96])
def test_a_divergence_is_dated_where_it_is(healthy: Run, tmp_path: Path, step: int) -> None:
    found = diff_runs(healthy, build(tmp_path / "worse", seed=1, steps=losses_since(step, lambda loss: 1.5 * loss)))
    assert found.loss["diverges_at"] is not None and abs(found.loss["diverges_at"] - step) <= 1
    assert found.loss["steps"][0] >= found.loss["diverges_at"] - 1


def test_a_gap_that_grows_is_not_dated_before_it(healthy: Run, tmp_path: Path) -> None:
    rising = {at: {"loss": steps_row(Plan(), at, is_sampled=False)["loss"] + 0.02 * (at - 50)} for at in range(50, 100)}
    found = diff_runs(healthy, build(tmp_path / "rising", steps=rising))
    assert 50 <= found.loss["diverges_at"] <= 62


@pytest.mark.parametrize("seed", range(4))
def test_clean_seeds_lie_within_the_noise(healthy: Run, tmp_path: Path, seed: int) -> None:
    assert diff_runs(healthy, build(tmp_path / "other", seed=seed, with_results=False)).loss["diverges_at"] is None


def test_the_first_site_is_where_triage_sees_the_first_nan(healthy: Run, tmp_path: Path) -> None:
    """The forward pass of a layer makes NaN; at the same sampled step the backward pass has it everywhere, this run's first."""
    every = {"num_nan": lambda row: int(row["numel"])}
    sick = [
        Override(**{**INPUT, "steps": (40, None)}, slots={"num_actual_nonfinite": 5}),
        Override(module="blocks.0.*", gemm="dgrad", steps=(40, None), slots=every),
        Override(module="blocks.1.mlp.down", steps=(40, None), slots=every),
        Override(steps=(50, None), slots=every),
    ]
    run = build(tmp_path / "sick", overrides=sick, steps=losses_since(40, lambda loss: NAN))
    found, findings = diff_runs(healthy, run), triage(run)
    assert found.first is not None and found.first.diverges_at == 40
    place = (found.first.module, found.first.gemm, found.first.tensor)
    assert place == (findings[0].module, findings[0].gemm, findings[0].tensor) == (CULPRIT, "fprop", "input")
    assert found.first.what == "elements that are NaN or Inf 0 -> 5"
    assert found.site_words.endswith(f"; the first NaN or Inf of sick: {CULPRIT} fprop input at step 40")
    assert found.to_dict()["loss"]["first_nonfinite"] == {
        "run": "sick", "step": 40, "module": CULPRIT, "gemm": "fprop", "tensor": "input"
    }  # fmt: skip
