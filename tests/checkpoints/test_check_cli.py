"""``fp8debug check``: formats, exit codes, options, and the rules' manual pages."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8debug.checkpoints import CHECKS, FileRule, check_checkpoint
from fp8debug.checkpoints.report import CSV_COLUMNS
from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.rules import RULES, SECTIONS
from fp8debug_cli.main import status
from tests.checkpoints import writers
from tests.checkpoints.writers import NAMES

BAD = NAMES[1]


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return writers.save(writers.LAYOUTS["deepseek"](writers.original()), tmp_path / "sound.safetensors")


@pytest.fixture
def wrong(tmp_path: Path) -> Path:
    tensors = writers.LAYOUTS["deepseek"](writers.original())
    tensors[f"{BAD}_scale_inv"][1, 1] = float("nan")
    return writers.save(tensors, tmp_path / "wrong.safetensors")


def test_a_table(sound: Path, wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", str(sound)]) == 0
    out = capsys.readouterr().out
    assert out == f"{sound}: ok, 0 findings\n4 quantized weights (4 deepseek e4m3fn 128x128), 2 other tensors\n"
    assert status(["check", str(wrong)]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[3:6] == [
        "code severity tensor what",
        f"F211 error {BAD} 1 of 9 scales are NaN",
        "cure: quantize the weight again from the original; the codes alone do not tell the scale",
    ]
    assert lines[-1] == "fp8debug explain F211 says more"


def test_the_numbers_of_each_weight(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = writers.save(writers.original(), tmp_path / "original.safetensors")
    assert status(["check", str(sound), "--against", str(reference), "--tensors"]) == 0
    out = capsys.readouterr().out
    assert f"4 weights compared with {reference}" in out
    row = next(line.split() for line in out.splitlines() if line.startswith(BAD))
    assert row[1:4] == ["deepseek", "e4m3fn", "128x128"] and float(row[5]) == pytest.approx(1, abs=0.01)
    assert 31 < float(row[6]) < 33 and float(row[6]) == pytest.approx(float(row[7]), abs=0.1)


def test_json(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", str(wrong), "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(word))
    assert (document["schema"], document["verdict"], document["against"]) == (1, "error", None)
    (finding,) = document["findings"]
    assert (finding["code"], finding["tensor"], finding["file"]) == ("F211", BAD, "wrong.safetensors")
    assert finding["module"] == BAD.removesuffix(".weight")
    assert {entry["code"] for entry in document["skipped"]} == {rule.code for rule in CHECKS if rule.needs_reference}
    assert len(document["weights"]) == 4


def test_csv(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(["check", str(wrong), "--format", "csv"])
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (tuple(row), row["code"], row["tensor"]) == (CSV_COLUMNS, "F211", BAD)


def test_sarif(wrong: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(["check", str(wrong), "--format", "sarif"])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    (result,) = run["results"]
    rules = run["tool"]["driver"]["rules"]
    assert rules[result["ruleIndex"]]["id"] == result["ruleId"] == "F211"
    (location,) = result["locations"]
    assert location["physicalLocation"]["artifactLocation"] == {"uri": "wrong.safetensors", "uriBaseId": "CHECKPOINT"}
    assert location["logicalLocations"][0]["fullyQualifiedName"] == BAD


def test_html_and_github(wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert status(["check", str(wrong), "--format", "html", "-o", str(page)]) == 1
    text = page.read_text(encoding="utf-8")
    assert (
        "Manual page of F211" in text and BAD in text and "<script" not in text and "http" not in text.replace("http-equiv", "")
    )
    capsys.readouterr()
    status(["check", str(wrong), "--format", "github"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"::error title=F211 nonfinite-scale in {BAD}::{BAD}: 1 of 9 scales are NaN%0Acure: ")


def test_exit_codes(sound: Path, wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(["check", str(wrong), "--fail-on", "never"]) == 0
    assert status(["check", str(wrong), "--ignore", "F21"]) == 0
    assert status(["check", str(wrong), "--select", "nonfinite-scale"]) == 1
    assert status(["check", str(wrong), "--select", "F101"]) == 2
    assert status(["check", str(tmp_path / "none")]) == 3
    assert status(["check", str(sound), "--against", str(tmp_path / "none")]) == 3
    (tmp_path / "junk.safetensors").write_bytes(b"junk")
    assert status(["check", str(tmp_path / "junk.safetensors")]) == 3
    err = capsys.readouterr().err
    assert all(line.startswith("error: ") for line in err.splitlines()) and "Traceback" not in err


def test_settings(wrong: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "pyproject.toml"
    config.write_text('[tool.fp8debug.check]\nignore = ["F211"]\n[tool.fp8debug.check.rules.F214]\nmax_rms = 0.0001\n')
    assert status(["check", str(wrong), "--config", str(config)]) == 1
    assert "F214" in capsys.readouterr().out
    config.write_text('[tool.fp8debug.check]\nignore = ["F101"]\n')
    assert status(["check", str(wrong), "--config", str(config)]) == 2
    assert "unknown rule 'F101'" in capsys.readouterr().err


def test_thresholds_are_arguments(sound: Path) -> None:
    assert [f.code for f in check_checkpoint(sound, thresholds={"F214": {"max_rms": 1e-4}})] == ["F214"]
    with pytest.raises(UnknownNameError):
        check_checkpoint(sound, thresholds={"F101": {"max_rate": 1.0}})
    with pytest.raises(UsageError, match="nothing is left"):
        check_checkpoint(sound, select=("F211",), ignore=("F2",))


def test_the_command_imports_no_torch(sound: Path) -> None:
    script = (
        "import sys; from fp8debug_cli.main import status; code = status(['check', *sys.argv[1:]]);"
        " heavy = {'torch', 'dash', 'safetensors'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(sound)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# The ratchet: every rule has its manual page and its thresholds' sources.


def test_codes_and_names() -> None:
    assert CHECKS.names() == sorted(CHECKS.names())
    assert all(re.fullmatch(r"F2\d\d", name) for name in CHECKS.names())
    names = [rule.name for rule in (*CHECKS, *RULES)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("rule", CHECKS, ids=lambda rule: rule.code)
def test_a_rule_has_a_manual_page(rule: FileRule, capsys: pytest.CaptureFixture[str]) -> None:
    manual = rule.manual()
    assert tuple(manual) == SECTIONS and all(manual.values())
    assert rule.summary.endswith(".")
    for name, value in rule.thresholds.items():
        stated = re.search(rf"\b{name} ([\d.e-]+)", manual["Thresholds"])
        assert stated, f"{name} is not in the manual page"
        assert float(stated[1].rstrip(".,:")) == pytest.approx(value), f"the page states another {name}"
    assert re.search(r"numerics\.md, \d|#\d{2,}|safetensors format", manual["Thresholds"]), "no threshold has a source"
    assert status(["explain", rule.code.lower()]) == 0
    assert capsys.readouterr().out.startswith(f"{rule.code} {rule.name}\n")
