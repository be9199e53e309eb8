"""The command line: exit codes, messages line by line, streams, formats, and a start that imports nothing heavy."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fp8debug.rules import RULES
from fp8debug_cli.main import COMMANDS, LazyGroup, cli, status
from tests.cli.said import Said
from tests.synthetic import Override, Plan, Slots, build, write

CULPRIT = "blocks.1.mlp.up"


def _clipped(row: Slots) -> int:
    return int(row["numel"] * 0.76)


SICK: dict[str, Any] = {
    "overrides": [
        Override(
            module=CULPRIT,
            gemm="fprop",
            tensor="input",
            steps=(40, None),
            slots={
                "cast_name": "e4m3fn tensorwise delayed(16,max)",
                "num_saturated": _clipped,
                "headroom": 14.0,
                "sqnr_db": 3.0,
                "gain": 0.4,
            },
        )
    ]
}
UNCONVERTED: dict[str, Any] = {"module_entries": {CULPRIT: {"fp8": False, "kind": "Linear", "requested": None, "casts": None}}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write(folder / "healthy", Plan(num_steps=50))
    write(folder / "sick", Plan(**SICK))
    write(folder / "gap", Plan(num_steps=20, **UNCONVERTED))
    write(folder / "spike", Plan(steps={55: {"loss": 6.0}}))
    write(folder / "bf16", Plan(num_steps=20, recipe="bf16", what_if=["blockwise"]))
    (folder / "empty").mkdir()
    return folder


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("triage RUNS/healthy", 0),
        ("triage RUNS/sick", 1),
        ("triage RUNS/sick --fail-on error", 1),
        ("triage RUNS/sick --fail-on never", 0),
        ("triage RUNS/sick --ignore F101", 0),
        ("triage RUNS/sick --format json", 1),
        ("triage RUNS/gap", 1),
        ("triage RUNS/gap --fail-on error", 0),
        ("triage RUNS/spike", 0),
        ("triage RUNS/spike --fail-on info", 1),
        ("triage RUNS/empty", 3),
        ("triage RUNS/missing", 3),
        ("triage", 2),
        ("triage RUNS/sick --nonsense", 2),
        ("show RUNS/sick --limit 3", 0),
        ("show RUNS/missing", 3),
        ("coverage RUNS/gap", 0),
        ("fallback RUNS/sick", 0),
        ("fallback RUNS/healthy", 0),
        ("explain F101", 0),
        ("explain stale-scale-saturation", 0),
        ("explain --list", 0),
        ("--help", 0),
        ("--version", 0),
        ("", 2),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], runs: Path, line: str, code: int) -> None:
    said = Said(capsys, runs, line)
    assert said.code == code, said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("triag RUNS/sick", "error: unknown command 'triag': did you mean 'triage'?"),
        ("triage", "error: Missing argument 'RUN...'."),
        (
            "triage RUNS/sick --fail-on bad",
            "error: Invalid value for '--fail-on': 'bad' is not one of 'error', 'warning', 'info', 'never'.",
        ),
        (
            "triage RUNS/missing",
            "error: RUNS/missing does not exist; give the folder that watch() or `fp8debug run --out` wrote",
        ),
        ("show RUNS/healthy/rank=00000", "error: RUNS/healthy/rank=00000 is one rank's part of a run; give RUNS/healthy"),
        ("triage a\udce9", "error: 'a\\udce9' is no path in UTF-8, which the query engine needs; rename it"),
        ("verify RUNS/sick --recipe row --script setup.py", "error: unknown recipe 'row': did you mean 'rowwise'?"),
        (
            "verify RUNS/sick --launcher '\" --script x.py",
            "error: --launcher '\\'\"' cannot be split into words: No closing quotation",
        ),
        ("bisect RUNS/sick --timeout nan --script pyproject.toml", "error: the timeout is a number of seconds above 0, got nan"),
        ("show RUNS/sick --columns sqnr", "error: unknown column 'sqnr': did you mean 'sqnr_db'?"),
        (
            "show RUNS/sick --module blocks.1.mlp.upp",
            "error: module 'blocks.1.mlp.upp' matches nothing: did you mean 'blocks.1.mlp.up' or 'blocks.0.mlp.up'"
            " or 'blocks.1.mlp.down'?",
        ),
        ("show RUNS/sick --gemm fprob", "error: unknown gemm 'fprob': did you mean 'fprop'?"),
        ("show RUNS/sick --steps 3-4", "error: steps must be a step like 100 or a range like 100:200, 100: or :200, got '3-4'"),
        ("fallback RUNS/sick --to jsn", "error: unknown exporter 'jsn': did you mean 'json'?"),
        ("fallback RUNS/sick --budget 20x", "error: expected a share such as 10% or 0.1, got '20x'"),
        ("fallback RUNS/sick -o list.json", "error: -o needs --to NAME, the format of the file"),
        (
            "fallback RUNS/sick --to json -o RUNS/no/list.json",
            "error: cannot write RUNS/no/list.json: No such file or directory",
        ),
        ("triage RUNS/sick --format json -o /", "error: cannot write /: PosixPath('/') has an empty name"),
        ("fallback RUNS/sick --to json -o a\0b", "error: cannot write a\\x00b: embedded null byte"),
        ("calibrate RUNS/sick -o RUNS/no/scales.json", "error: cannot write RUNS/no/scales.json: No such file or directory"),
        ("triage s3://", "error: s3:// names no bucket; expected an address such as s3://bucket/runs/exp1"),
        ("measure a\0b", "error: expected the path of a dump, or of a folder with dumps, got 'a\\x00b'"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], runs: Path, line: str, message: str) -> None:
    said = Said(capsys, runs, line)
    assert said.err == message + "\n"
    assert said.out == ""


@pytest.mark.parametrize("line", ["triage RUNS/sick --select F199", "triage RUNS/sick --ignore F199", "explain F199"])
def test_a_wrong_code_gets_those_that_are_near(capsys: pytest.CaptureFixture[str], runs: Path, line: str) -> None:
    said = Said(capsys, runs, line)
    assert re.fullmatch(r"error: unknown rule 'F199': did you mean ('F[12]\d\d'( or )?){1,3}\?\n", said.err)


def test_triage_for_people(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "triage RUNS/sick")
    lines = [" ".join(line.split()) for line in said.out.splitlines()]
    assert lines == [
        "sick: error, 1 finding, steps 0 to 99",
        "class: no loss problem: the loss is fine so far; 1 finding, first blocks.1.mlp.up (F101 stale-scale-saturation)"
        " since step 40",
        "if downstream metrics are off all the same, training and inference differ: record both paths on the same tokens"
        " and compare them: fp8debug parity TRAIN ROLLOUT",
        "",
        "code severity module site steps what",
        "F101 error blocks.1.mlp.up fprop input 40-90 76 % of the fprop input clips at step 40: its amax is 14 times what the"
        " delayed scale can hold",
        "cure: scaling='current' for this operand; else a shorter history or a margin; else BF16 for this GEMM",
        "",
        "fp8debug explain F101 says more; fp8debug fallback RUN lists candidates",
    ]
    num = len(RULES.names())
    healthy = Said(capsys, runs, "triage RUNS/healthy").out.splitlines()
    assert healthy[:2] == [
        "healthy: ok, 0 findings, steps 0 to 49",
        f"class: no loss problem: the loss is fine; {num - 7} of {num} rules ran; none found a fault (5 sampled steps, 6"
        " modules)",
    ]
    assert len(healthy) == 3


def test_rules_that_could_not_judge_are_named_on_stderr(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    first = Said(capsys, runs, "triage RUNS/bf16").err.splitlines()[0]
    needy = ", ".join(rule.code for rule in RULES if rule.needs_fp8)
    assert first == f"skipped {needy}: no operand ran in FP8: the run has what-if rows only"


def test_triage_for_programs(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    document = json.loads(Said(capsys, runs, "triage RUNS/sick --format json").out)
    assert (document["verdict"], document["findings"][0]["module"]) == ("error", CULPRIT)
    (row,) = csv.DictReader(io.StringIO(Said(capsys, runs, "triage RUNS/sick --format csv").out))
    assert row["code"] == "F101"


def test_a_baseline(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "triage RUNS/healthy --baseline RUNS/bf16")
    assert "baseline bf16:" in said.out
    assert "median of steps 0 to 19: " in said.out
    assert "recipe: bf16 -> blockwise" in said.out


def test_show_in_three_formats(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    line = f"show RUNS/sick --module {CULPRIT} --gemm fprop --tensor input --steps 30:50 --columns sqnr_db,damage"
    text = Said(capsys, runs, f"{line} --format csv").out
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [(row["step"], round(float(row["sqnr_db"])), row["damage"]) for row in rows] == [("30", 32, ""), ("40", 3, "")]
    records = json.loads(Said(capsys, runs, f"{line} --format json").out)
    assert [record["damage"] for record in records] == [None, None]
    table = Said(capsys, runs, line).out.splitlines()
    assert table[0].split() == ["step", "module", "gemm", "tensor", "reference", "actual", "cast_name", "sqnr_db", "damage"]
    assert len(table) == 3


def test_a_long_table_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "show RUNS/sick --limit 2 --actual --reference operand")
    assert len(said.out.splitlines()) == 3
    assert said.err == "warning: the first 2 of 360 rows; --limit 0 prints all\n"
    assert Said(capsys, runs, f"show RUNS/sick --limit {10**20}").err == ""
    assert Said(capsys, runs, "show RUNS/sick --steps 900:").err == "warning: no recorded row matches\n"


def test_coverage(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    said = Said(capsys, runs, "coverage RUNS/gap")
    assert said.out.splitlines()[0] == "gap: 5 of 6 Linears in FP8, 80.0 % of the Linear FLOPs"
    rows = {row["module"]: row for row in json.loads(Said(capsys, runs, "coverage RUNS/gap --format json").out)}
    assert rows[CULPRIT]["requested"] == "not requested"
    assert rows["blocks.0.mlp.up"]["fp8"] is True
    assert "weight: e4m3fn 128x128 current" in rows["blocks.0.mlp.up"]["casts"]


def test_fallback_writes_a_file_that_loads(capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path) -> None:
    from fp8debug.fallback import load_fallbacks

    target = tmp_path / "list.json"
    said = Said(capsys, runs, f"fallback RUNS/sick --to json -o {target}")
    assert (said.out, said.err) == ("", f"Wrote {target}\n")
    assert [f.module for f in load_fallbacks(target)] == [CULPRIT]
    assert [path.name for path in tmp_path.iterdir()] == ["list.json"], "no half-written file stays"
    assert Said(capsys, runs, "fallback RUNS/sick --to json").out == target.read_text()


def test_fallback_for_people_prints_the_prior_apart(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    *_, prior = Said(capsys, runs, "fallback RUNS/sick").out.splitlines()
    assert prior.startswith("folklore (positional prior, not evidence from this run")
    healthy = Said(capsys, runs, "fallback RUNS/healthy").out
    assert healthy.startswith("no candidates: nothing found that another cast or BF16 would cure\n")


def test_explain_prints_every_section(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    text = Said(capsys, runs, "explain f101").out
    assert text.startswith("F101 stale-scale-saturation\n")
    for heading in ("What it detects", "Why it matters", "Example", "Cure", "Thresholds"):
        assert f"\n{heading}\n    " in text


def test_every_command_loads_and_has_help(capsys: pytest.CaptureFixture[str], runs: Path) -> None:
    group = cli
    assert isinstance(group, LazyGroup)
    for name in COMMANDS:
        command = group.get_command(None, name)  # type: ignore[arg-type]  # the context is not looked at
        assert command is not None and command.name == name and command.help
        if name != "run":
            assert Said(capsys, runs, f"{name} --help").code == 0


def _python(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=env)


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from fp8debug_cli.main import status; code = status(['--help']);"
        " heavy = {'torch', 'dash', 'pandas', 'duckdb', 'pyarrow', 'numpy', 'rich', 'plotly'} & set(sys.modules);"
        " sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = _python("-c", script)
    assert done.returncode == 0, done.stderr


def test_triage_imports_no_torch(runs: Path) -> None:
    script = (
        "import sys; from fp8debug_cli.main import status; code = status(sys.argv[1:]);"
        " heavy = {'torch', 'dash'} & set(sys.modules); sys.exit(f'imported {heavy}' if heavy else code)"
    )
    for words in (["triage", f"{runs}/healthy"], ["fallback", f"{runs}/healthy"], ["show", f"{runs}/healthy"]):
        done = _python("-c", script, *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "line",
    [
        "show RUN --format csv",
        "show RUN --format json",
        "show RUN --follow",
        "coverage RUN --format csv",
        "triage RUN --format json",
        "triage RUN",
        "report RUN -o -",
        "explain --list",
        "explain F101",
        "--help",
    ],
)
def test_a_reader_that_has_gone_before_the_first_line_is_no_error(runs: Path, line: str) -> None:
    read, written = os.pipe()
    os.close(read)
    words = [str(runs / "healthy") if word == "RUN" else word for word in line.split()]
    command = [sys.executable, "-m", "fp8debug_cli.main", *words]
    try:
        done = subprocess.run(command, stdout=written, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    finally:
        os.close(written)
    assert done.returncode == 0 and not re.search("Traceback|error|Broken pipe", done.stderr), done.stderr


@pytest.mark.parametrize("width", ["", "80"])
def test_a_pipe_that_closes_is_no_error(runs: Path, width: str) -> None:
    line = f"COLUMNS={width} {sys.executable} -m fp8debug_cli.main show {runs}/sick --limit 0 | head -1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line}"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.startswith("step")
    assert done.returncode == 0


@pytest.mark.parametrize(("closed", "code"), [(">&-", 1), ("2>&-", 1), (">&- 2>&-", 1), (">/dev/full", 2)])
def test_a_stream_that_is_closed_or_full(runs: Path, closed: str, code: int) -> None:
    line = f"{sys.executable} -m fp8debug_cli.main triage {runs}/sick {closed}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == code and "fault" not in done.stderr
    assert code == 1 or done.stderr.endswith("error: No space left on device\n")


def test_no_colour_off_a_terminal(runs: Path) -> None:
    done = _python("-m", "fp8debug_cli.main", "triage", f"{runs}/sick")
    assert (done.returncode, "\x1b" in done.stdout) == (1, False)


def test_run_hands_over_to_the_recording_half(tmp_path: Path) -> None:
    done = _python("-m", "fp8debug_cli.main", "run", str(tmp_path / "missing.py"))
    assert done.returncode != 0
    assert "missing.py" in done.stderr


def test_coverage_without_a_manifest_is_not_recorded(tmp_path: Path) -> None:
    build(tmp_path / "run")
    (tmp_path / "run" / "manifest.json").unlink()
    command = [sys.executable, "-m", "fp8debug_cli.main", "coverage", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "error: run: coverage was not recorded, manifest.json is missing or lists no modules" in done.stderr


def test_the_program_alone_says_what_comes_next(
    capsys: pytest.CaptureFixture[str], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert status([]) == 2
    text = capsys.readouterr().err
    assert text.startswith("Usage: fp8debug") and "Next: fp8debug run train.py ARGS records your script" in text
    (tmp_path / "my runs").symlink_to(runs)
    os.utime(runs / "healthy" / "manifest.json", (2e9, 2e9))
    assert status([]) == 2
    assert "Next: fp8debug triage 'my runs/healthy' judges the newest run here" in capsys.readouterr().err
    assert status(["triage"]) == 2 and "Next:" not in capsys.readouterr().err
