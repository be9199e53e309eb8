"""The tree of modules: shares that add up, casts, and the worst health at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fp8debug_dashboard.data.module_tree import module_tree, rank_of
from fp8debug_dashboard.data.nonfinite import NAN
from fp8debug_dashboard.data.worst_modules import WorstModule
from fp8debug_dashboard.figures.theme import NO_DATA
from fp8debug_dashboard.pages import model
from fp8debug_dashboard.web.source import ServedFolder
from fp8debug_dashboard.web.urls import View
from tests.dashboard import samples
from tests.dashboard.data.test_dashboard_nonfinite import text


def entry(fqn: str, size: int, fp8: bool = True) -> dict[str, Any]:
    return {"fqn": fqn, "in_features": size, "out_features": 10, "fp8": fp8, "casts": None}


def test_shares_and_casts_add_up_and_the_worst_health_rises() -> None:
    modules = [entry("blocks.0.up", 10), entry("blocks.0.down", 20), entry("blocks.1.up", 10), entry("head", 60, fp8=False)]
    ill, lost = WorstModule(module="blocks.0.down", severity=1.5), WorstModule(module="blocks.1.up", severity=0.0, state=NAN)
    root = module_tree(modules, {"blocks.0.down": ill, "blocks.1.up": lost, "head": WorstModule(module="head", severity=0)})
    blocks, head = root.children.values()
    assert [root.share, blocks.share, head.share] == pytest.approx([1, 0.4, 0.6])
    assert blocks.casts == {"casts not recorded": 3} and head.casts == {"BF16 or FP32": 1}
    assert blocks.entry is None and blocks.children["0"].children["up"].path == "blocks.0.up"
    assert blocks.children["0"].health is ill and blocks.health is lost and root.health is lost, "NaN is worse than any severity"
    assert blocks.children["0"].children["up"].health is None and rank_of(None) < rank_of(head.health)


def test_shares_are_not_made_up() -> None:
    root = module_tree([{"fqn": "a.b", "fp8": True, "casts": None}], {})
    assert root.share is None and root.children["a"].share is None


def test_a_module_that_contains_others_and_is_one_has_both() -> None:
    root = module_tree([entry("a", 1), entry("a.b", 1)], {})
    assert root.children["a"].entry is not None and list(root.children["a"].children) == ["b"]


def test_the_page_names_the_sick_module_and_opens_the_way_to_it(tmp_path: Path) -> None:
    for write, module, words in (
        (samples.write_sick, samples.SICK, "SQNR, dB at "),
        (samples.write_nan, samples.NAN_MODULE, f"NaN from step {samples.NAN_STEP}"),
    ):
        run_view = ServedFolder(write(tmp_path / write.__name__)).open(None)
        about, rows = model.parts(View("model"), run_view)
        assert "beyond a warn threshold, or NaN or Inf" in text(about) and "blocks (" in text(rows)
        node = rows[0]
        for part in module.split(".")[1:-1]:
            assert node.open, f"closed above {part} of {module}"
            node = next(one for one in node.children[1:] if text(one).startswith(part))
        row = next(one for one in node.children[1:] if one.children[0].children.children == module.rpartition(".")[2])
        assert "tree-error" in row.className and words in text(row)
        assert "healthy" in text(rows)


def test_levels_of_health_in_words() -> None:
    assert model.in_words(None) == ("unknown", "not recorded")
    assert model.in_words(WorstModule(module="a", severity=float("nan"))) == ("unknown", NO_DATA)
    assert model.in_words(WorstModule(module="a", severity=0.4)) == ("ok", "healthy")
