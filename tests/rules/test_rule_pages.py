"""The ratchet: every rule has its manual page, its thresholds' sources, a firing and a silent run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from fp8debug import rules
from fp8debug.recipes import Cast
from fp8debug.rules import RULES, SECTIONS, Rule
from tests.rules import sick_runs, sick_sites, sick_wholeruns


def test_codes_are_those_of_the_catalogue() -> None:
    assert RULES.names() == sorted(RULES.names())
    odd = [name for name in RULES.names() if not re.fullmatch(r"F1\d\d", name)]
    assert not odd, f"{odd}: a rule over a run is F1NN, NN its row in docs/numerics.md, section 5"
    assert len({rule.name for rule in RULES}) == len(RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_has_a_manual_page(rule: Rule) -> None:
    manual = rule.manual()
    assert tuple(manual) == SECTIONS
    assert all(manual.values())
    assert rule.summary.endswith(".")
    for name, value in rule.thresholds.items():
        stated = re.search(rf"\b{name} ([\d.e-]+)", manual["Thresholds"])
        assert stated, f"{name} is not in the manual page"
        assert float(stated[1].rstrip(".,:")) == pytest.approx(value), f"the page states another {name}"
    assert re.search(r"numerics\.md, \d|#\d{2,}", manual["Thresholds"]), "no threshold has a source"


def test_no_threshold_is_hidden_in_sql() -> None:
    """A number with a decimal point that a predicate compares with comes from a rule's field, which can be set."""
    hidden = []
    for file in sorted(Path(rules.__file__).parent.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = (node.body[0] for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)))
        texts = {id(node.value) for node in documented if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
                hidden += [f"{file.name}:{node.lineno} {found}" for found in re.findall(r"[<>]=? *-?\d*\.\d+", node.value)]
    assert not hidden


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_a_rule_has_fixtures(rule: Rule) -> None:
    fixtures = (sick_runs, sick_sites, sick_wholeruns)
    assert any(rule.code in fixture.FIRES for fixture in fixtures), "a run that fires"
    assert any(fixture.SILENT.get(rule.code) for fixture in fixtures), "a run that stays silent"


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.changes], ids=lambda rule: rule.code)
def test_what_a_rule_changes_is_a_cast(rule: Rule) -> None:
    assert Cast.from_dict({**Cast(format="e5m2", scale_rounding="pow2_floor").to_dict(), **rule.changes})
