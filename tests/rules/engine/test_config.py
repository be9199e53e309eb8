"""Thresholds and choices of a project: found, checked with one clear line, in force and on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.rules import RULES, triage
from fp8debug.rules.engine.config import ProjectSettings, load_settings
from fp8debug.rules.engine.selection import configured
from tests.rules.sick_runs import FIRES
from tests.synthetic import build

FULL = """
[tool.other]
x = 1

[tool.fp8debug]
select = ["F10"]
ignore = ["F105"]
fail-on = "error"

[tool.fp8debug.rules.F101]
max_rate = 0.9
min_steps = 3
"""


def written(folder: Path, text: str, name: str = "pyproject.toml") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_the_nearest_pyproject_that_speaks_of_us_counts(tmp_path: Path) -> None:
    path = written(tmp_path, FULL)
    written(tmp_path / "a", "[tool.other]\ny = 2\n")
    (tmp_path / "a" / "b").mkdir()
    found = load_settings(start=tmp_path / "a" / "b")
    assert found == ProjectSettings(
        path=path.resolve(),
        select=("F10",),
        ignore=("F105",),
        fail_on="error",
        thresholds={"F101": {"max_rate": 0.9, "min_steps": 3}},
    )


def test_a_file_of_ones_own_has_the_same_keys_at_its_top(tmp_path: Path) -> None:
    path = written(tmp_path, 'fail-on = "never"\n[rules.stale-scale-saturation]\nmax_rate = 1\n', "limits.toml")
    found = load_settings(path)
    assert (found.fail_on, found.thresholds) == ("never", {"stale-scale-saturation": {"max_rate": 1}})
    assert load_settings(written(tmp_path, FULL)).fail_on == "error"


MISTAKES = {
    "slect = ['F1']": "unknown key 'slect': did you mean 'select'?",
    "fail_on = 'error'": "unknown key 'fail_on': did you mean 'fail-on'?",
    "fail-on = 'bad'": "fail-on must be one of info, warning, error, never, got 'bad'",
    "select = 'F10'": "select must be a list of codes such as [\"F101\"], got 'F10'",
    "ignore = [101]": 'ignore must be a list of codes such as ["F101"], got [101]',
    "ignore = ['F199']": "unknown rule 'F199': did you mean ",
    "rules = 3": "rules must be tables such as [tool.fp8debug.rules.F101], got 3",
    "rules.F101 = 3": "thresholds of F101 must be a table such as {max_rate = 0.02}, got 3",
    "rules.F1O1.max_rate = 1": "unknown rule 'F1O1': did you mean ",
    "rules.F101.max_rat = 1": "unknown threshold of F101 'max_rat': did you mean 'max_rate'",
    "rules.F101.max_rate = '1'": "max_rate of F101 must be a number, got '1'",
    "rules.F101.max_rate = nan": "max_rate of F101 must be a number, got nan",
    "rules.F101.min_steps = 1.5": "min_steps of F101 must be a whole number, got 1.5",
    "rules.F101.min_steps = true": "min_steps of F101 must be a whole number, got True",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_names_the_file_and_the_way_out(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, line + "\n", "limits.toml")
    with pytest.raises(UsageError) as caught:
        load_settings(path)
    assert str(caught.value).startswith(f"{path}: {MISTAKES[line]}")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read .*none\.toml: No such file"):
        load_settings(tmp_path / "none.toml")
    with pytest.raises(UsageError, match=r"cannot read .*bad\.toml: "):
        load_settings(written(tmp_path, "[", "bad.toml"))
    with pytest.raises(UsageError, match=r"pyproject\.toml has no \[tool\.fp8debug\]"):
        load_settings(written(tmp_path, "[tool.other]\n"))


def test_thresholds_change_the_verdict_and_are_on_record(tmp_path: Path) -> None:
    run = build(tmp_path / "run", **FIRES["F101"])
    lenient = {"F101": {"max_rate": 0.9, "max_rate_once": 0.9, "warn_rate": 0.8}}
    findings = triage(run, select=["F101"], thresholds=lenient)
    assert list(findings) == []
    stated = json.loads(findings.to_json())["thresholds"]
    assert list(stated) == ["F101"]
    assert (stated["F101"]["max_rate"], stated["F101"]["min_headroom"]) == (0.9, 1.25)
    assert RULES.get("F101").thresholds["max_rate"] == 0.01, "the rule itself is as it was"
    assert [f.code for f in triage(run, select=["F101"])] == ["F101"]


def test_rules_are_named_by_code_or_name() -> None:
    for name in ("F101", "f101", "stale-scale-saturation"):
        assert configured({name: {"max_rate": 0.5}})["F101"].thresholds["max_rate"] == 0.5
    with pytest.raises(UnknownNameError, match="unknown rule 'F1O1'"):
        configured({"F1O1": {}})


def test_nothing_selected_is_an_error_and_no_clean_bill(tmp_path: Path) -> None:
    run = build(tmp_path / "run", num_steps=3)
    for empty in ([], [""], ""):
        with pytest.raises(UsageError, match="select is empty: give codes such as F10 or F113, or leave it out for all rules"):
            triage(run, select=empty)
    with pytest.raises(UsageError, match="nothing is left to report: every rule that is selected is ignored"):
        triage(run, select=["F101"], ignore=["F10"])
