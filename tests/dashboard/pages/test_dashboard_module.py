"""The module page opens at what is sick: from every link, and where the URL names no site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from fp8debug.types import Gemm, TensorRole
from fp8debug_dashboard.data import queries
from fp8debug_dashboard.figures.theme import NO_DATA
from fp8debug_dashboard.pages import fallback, model, module, overview
from fp8debug_dashboard.web.run_view import RunView
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.dashboard.data.test_dashboard_nonfinite import text
from tests.synthetic import Override, build

WEAK = "blocks.0.mlp.down"
VIEW = View("module")


def opened(path: Path) -> RunView:
    run_view = ServedFolder(path).open(None)
    run_view.judge()
    return run_view


def links(part: Any) -> list[str]:
    """Return the addresses of all links in a component."""
    if isinstance(part, (list, tuple)):
        return [address for one in part for address in links(one)]
    own = [str(part.href)] if getattr(part, "href", None) else []
    return own + (links(part.children) if getattr(part, "children", None) is not None else [])


def site_of(address: str) -> str | None:
    return parse_qs(urlsplit(address).query).get("site", [None])[0]


def test_the_module_of_a_finding_opens_at_its_site_whatever_link_led_there(tmp_path: Path) -> None:
    run_view = opened(samples.write_nan(tmp_path / "nan"))
    assert module.chosen_site(VIEW, run_view, samples.NAN_MODULE) == ("fprop", "weight")
    shown = module.parts(replace(VIEW, params={"module": samples.NAN_MODULE}), run_view)
    assert f"fprop weight at step {samples.NAN_STEP}" in text(shown)
    named = replace(VIEW, params={"module": samples.NAN_MODULE, "site": "dgrad.grad_output"})
    assert module.chosen_site(named, run_view, samples.NAN_MODULE) == ("dgrad", "grad_output"), "the URL has the last word"


class Unjudged:
    """Judgement of a run in which no rule found anything."""

    known: tuple[()] = ()


def test_a_module_that_no_finding_names_opens_at_its_worst_or_first_nonfinite_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weak = Override(module=WEAK, gemm="dgrad", tensor="grad_output", actual=None, slots={"sqnr_db": 24.0})
    lost = Override(module=WEAK, gemm="wgrad", tensor="input", actual=None, slots=samples.LOST, steps=(60, None))
    for name, overrides, site in (("weak", [weak], "dgrad.grad_output"), ("lost", [weak, lost], "wgrad.input")):
        run_view = ServedFolder(samples.write_nan(tmp_path / name, overrides=overrides)).open(None)
        monkeypatch.setattr(run_view, "judged", Unjudged)
        assert module.sick_site(run_view, WEAK) == site
        assert module.sick_site(run_view, "blocks.0.attn.qkv") == "fprop.input", "a healthy module has no sick site"
    assert queries.first_not_finite_site(run_view.run, "blocks.0.attn.qkv") is None


def test_a_menu_of_steps_says_that_it_has_not_all() -> None:
    few, many = (module.step_choices(list(range(0, 10 * n, 10)), 0, None) for n in (1000, 2500))
    assert len(few) == 1001 and not any(choice.get("disabled") for choice in few)
    told = [choice["label"] for choice in many if choice.get("disabled")]
    assert told == [f"{len(many) - 2:,} of 2,500 steps are listed; the address takes each (step=...)"]


@pytest.mark.parametrize("write", [samples.write_sick, samples.write_nan])
def test_the_tree_leads_to_the_site_that_its_row_names(tmp_path: Path, write: Any) -> None:
    run_view = opened(write(tmp_path / "run"))
    sick = samples.SICK if write is samples.write_sick else samples.NAN_MODULE
    found = [address for address in links(model.parts(View("model"), run_view)[1]) if f"module={sick}&" in address]
    assert [site_of(address) for address in found] == ["fprop.input" if write is samples.write_sick else None]


def test_also_and_candidates_lead_to_their_site_and_victims_to_their_own(tmp_path: Path) -> None:
    run_view = opened(samples.write_sick(tmp_path / "run"))
    found = run_view.judged().findings[0]
    finding = replace(found, gemm=Gemm.WGRAD, tensor=TensorRole.INPUT, also=("a",), victims=("b",))
    assert site_of(overview.module_href(finding, None)) == site_of(overview.module_href(finding, None, "a")) == "wgrad.input"
    assert site_of(overview.module_href(finding, None, "b")) is None
    one = run_view.fallbacks()[0]
    assert site_of(fallback.row(one, None)["href"]) == f"{one.gemms[0]}.{one.tensor}"
    assert site_of(fallback.row(replace(one, tensor="*"), None)["href"]) is None


def test_candidates_that_the_budget_leaves_out_are_not_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_view, shown = opened(samples.write_sick(tmp_path / "run")), View("fallback", None, {"budget": "3"})
    known = run_view.fallbacks(1.0)
    assert known
    monkeypatch.setattr(run_view, "fallbacks", lambda budget, fill=False: known if budget == 1.0 else [])
    assert "No candidate within the budget: each costs more than 3 %" in str(fallback.parts(shown, run_view)[2])
    monkeypatch.setattr(run_view, "fallbacks", lambda budget, fill=False: [])
    assert "No candidate: another cast or BF16 is no cure for" in str(fallback.parts(shown, run_view)[2])


@pytest.mark.parametrize(("every", "words"), [(1, "every step"), (10, "every 10 steps"), (None, NO_DATA)])
def test_the_interval_of_sampling_is_in_words(every: int | None, words: str) -> None:
    assert overview._every(every) == words


def test_the_overview_names_what_was_not_watched(tmp_path: Path) -> None:
    counted = [
        {"role": "embedding", "first": "embed.weight", "num_tensors": 1, "num_params": 300},
        {"role": "watched", "first": "blocks.0.mlp.up.weight", "num_tensors": 6, "num_params": 700},
    ]
    build(tmp_path / "run", manifest={"parameters": counted})
    run_view = opened(tmp_path / "run")
    run_view.judge()
    shown = str(overview.parts(View("overview", None, {}), run_view))
    assert "30 % of the parameters: embedding 30 % (embed.weight)" in shown and "id='unwatched'" in shown
