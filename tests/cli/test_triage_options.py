"""triage and diff on the command line: formats, files, settings of a project, several folders, exit codes."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from fp8debug_cli.main import status
from tests.cli.said import Said
from tests.rules.sick_runs import FIRES
from tests.synthetic import MODULES, Plan, write


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    small: dict[str, Any] = {"modules": MODULES[-3:], "with_results": False}
    write(folder / "healthy", Plan(num_steps=30, **small))
    write(folder / "sick", Plan(num_steps=60, **small, **FIRES["F101"]))
    return folder


@pytest.mark.parametrize("form", ["json", "csv", "github", "sarif", "html"])
def test_every_format_goes_to_a_file_whole(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path, form: str) -> None:
    target = tmp_path / "report"
    said = Said(capsys, runs, f"triage RUNS/sick --format {form} -o {target}")
    assert (said.code, said.out, said.err) == (1, "", f"Wrote {target}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["report"]
    assert Said(capsys, runs, f"triage RUNS/sick --format {form}").out == target.read_text(encoding="utf-8")


def test_a_table_goes_to_a_file_too(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    said = Said(capsys, runs, f"triage RUNS/sick -o {tmp_path / 'table.txt'}")
    assert (said.code, said.out) == (1, "")
    text = (tmp_path / "table.txt").read_text(encoding="utf-8")
    assert text.startswith("sick: error, 1 finding, steps 0 to 59\nclass: no loss problem: ")
    assert "\x1b" not in text


def test_a_file_that_cannot_be_written(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "triage RUNS/sick --format html -o RUNS/no/report.html")
    assert (said.code, said.err) == (2, "error: cannot write RUNS/no/report.html: No such file or directory\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--select ,", "select is empty: give codes such as F10 or F113, or leave it out for all rules"),
        ("--select F101 --ignore F10", "nothing is left to report: every rule that is selected is ignored"),
        ("--config RUNS/none.toml", "cannot read RUNS/none.toml: No such file or directory"),
        ("RUNS/sick", "RUNS/healthy and RUNS/sick both begin at step 0: these are two runs, not a run and its resumed part;"
         " compare them with fp8debug diff"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], runs: Path, line: str, message: str) -> None:
    said = Said(capsys, runs, f"triage RUNS/healthy {line}")
    assert (said.code, said.err, said.out) == (2, f"error: {message}\n", "")


def test_an_empty_choice_is_a_mistake(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    assert status(["triage", str(runs / "healthy"), "--select", ""]) == 2
    assert capsys.readouterr().err.startswith("error: select is empty")


def test_the_project_decides_and_options_win(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = tmp_path / "pyproject.toml"
    project.write_text('[tool.fp8debug]\nfail-on = "never"\nselect = ["F101", "F113"]\n', encoding="utf-8")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    assert Said(capsys, runs, "triage RUNS/sick").code == 0
    assert Said(capsys, runs, "triage RUNS/sick --fail-on error").code == 1
    document = json.loads(Said(capsys, runs, "triage RUNS/sick --format json").out)
    assert list(document["thresholds"]) == ["F101", "F113"]
    assert list(json.loads(Said(capsys, runs, "triage RUNS/sick --select F102 --format json").out)["thresholds"]) == ["F102"]
    project.write_text("[tool.fp8debug.rules.F101]\nmax_rat = 1\n", encoding="utf-8")
    said = Said(capsys, runs, "triage RUNS/sick")
    assert said.code == 2
    assert said.err.startswith(f"error: {project.resolve()}: unknown threshold of F101 'max_rat': did you mean 'max_rate'")
    own = tmp_path / "own.toml"
    own.write_text("[rules.F101]\nmax_rate = 0.99\nmax_rate_once = 0.99\nwarn_rate = 0.98\n", encoding="utf-8")
    assert Said(capsys, runs, f"triage RUNS/sick --config {own} --select F101").code == 0


def test_diff_for_people(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "diff RUNS/healthy RUNS/sick")
    assert (said.code, said.err) == (0, "")
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert lines == [
        "healthy -> sick: no difference beyond the noise",
        "",
        "configuration differences:",
        "blocks.1.mlp.up.fprop.input: e4m3fn 1x128 current -> e4m3fn 1x128 current then e4m3fn tensorwise delayed(16,max)",
        "",
        "loss:",
        "median of steps 10 to 29: 4.554 -> 4.554, gap 0 +- 0: within the noise (4 standard errors, or 1% of the loss)",
        "",
        "sites:",
        "none of 18 sites diverges; 18 have the same tensors to the last digits",
    ]


def test_diff_of_a_run_that_is_sick(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    write(tmp_path / "good", Plan(num_steps=60, modules=MODULES[-3:], with_results=False))
    line = f"diff {tmp_path / 'good'} RUNS/sick"
    said = Said(capsys, runs, f"{line} --exit-code")
    assert said.code == 1
    assert "1 of 18 sites diverge, first blocks.1.mlp.up fprop input at step 40: SQNR 31.66 -> 3" in said.out
    assert "blocks.1.mlp.up.fprop.input: e4m3fn 1x128 current -> e4m3fn 1x128 current then e4m3fn tensorwise delayed" in said.out
    document = json.loads(Said(capsys, runs, f"{line} --format json").out)
    assert document["first_divergence"]["module"] == "blocks.1.mlp.up"
    rows = list(csv.DictReader(io.StringIO(Said(capsys, runs, f"{line} --format csv --module *.up").out)))
    assert {row["module"] for row in rows} == {"blocks.1.mlp.up"}
    assert [row["step"] for row in rows if row["apart"]] == ["40", "50"]


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("diff RUNS/healthy", 2, "error: Missing argument 'SECOND...'.\n"),
        ("diff RUNS/healthy RUNS/none", 3,
         "error: RUNS/none does not exist; give the folder that watch() or `fp8debug run --out` wrote\n"),
        ("diff RUNS/healthy RUNS/sick -o x.txt", 2, "error: -o needs --format json or csv\n"),
        (
            "diff RUNS/healthy RUNS/sick --steps 5-",
            2,
            "error: steps must be a step like 100 or a range like 100:200, 100: or :200, got '5-'\n",
        ),
        ("diff RUNS/healthy RUNS/healthy --exit-code", 0, ""),
    ],
)  # fmt: skip
def test_exit_codes_of_diff(capsys: pytest.CaptureFixture[str], runs: Path, line: str, code: int, message: str) -> None:
    said = Said(capsys, runs, line)
    assert (said.code, said.err) == (code, message)
