"""No number of a table is cut, at any width: columns are left out by name, text wraps, and a pipe gets everything."""

from __future__ import annotations

import fcntl
import itertools
import json
import math
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from fp8debug_cli.console import cell, print_table
from tests.synthetic import Override, Plan, write

NUMBERS: list[Any] = [5.341e-05, -1.234e-300, 12345678901, math.nan, math.inf, -math.inf, None, 0.0]
TEXTS = ["5.341e-05", "-1.234e-300", "12345678901", "NaN", "Inf", "-Inf", "-", "0"]
HEADER = ["module", *(f"statistic_{place}" for place in range(len(NUMBERS))), "what"]
TEXT = "the amax of 5.341e-05 lies 12345678901 times below what blocks.0.mlp.experts.11.down_proj.weight holds (-1.234e-300)"
ROW = ["blocks.0.mlp.experts.11.down_proj", *NUMBERS, TEXT]
WIDTHS = [20, 40, 60, 80, 100, 120, 200, 400]


def test_a_number_for_people() -> None:
    assert list(map(cell, NUMBERS)) == TEXTS


@pytest.mark.parametrize("width", [*WIDTHS, None])
def test_a_number_stands_whole_or_its_column_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    print_table(HEADER, [ROW], wrap=["module", "what"], drop=["what"])
    printed = capsys.readouterr().out.splitlines()
    lines = list(itertools.takewhile(lambda line: not line.startswith("+"), printed))
    footer = " ".join(line.strip() for line in printed[len(lines) :])
    is_whole = not footer
    left_out = [] if is_whole else footer.partition(": ")[2].removesuffix(" (--wide)").split(", ")
    assert is_whole or re.fullmatch(rf"\+{len(left_out)} columns?: .* \(--wide\)", footer)
    assert [name for name in HEADER if name not in left_out] == lines[0].split()
    words = " ".join(lines[1:]).split()
    for name, text in zip(HEADER[1:-1], TEXTS, strict=True):
        assert name in left_out or text in words
    if "what" not in left_out:
        assert {"5.341e-05", "12345678901", "(-1.234e-300)"} <= set(words)
    assert all(len(line) <= (width or 10_000) for line in lines) or width == 20, "narrower than the name of a module can be"
    assert width is not None or is_whole


@pytest.mark.parametrize("width", [12, 20, 33])
def test_text_wraps_between_words_and_never_in_a_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(["what"], [[f"loss=5.341e-05,amax={12345678901}/x-1.234e-300y"]], wrap=["what"])
    text = capsys.readouterr().out
    assert "5.341e-05" in text and "12345678901" in text


@pytest.mark.parametrize(("width", "is_below"), [(40, True), (60, True), (80, True), (200, False), (None, False)])
def test_sentences_stand_below_their_row_where_their_column_is_narrow(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int | None, is_below: bool
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    rows = [["F101", "blocks.3.down_proj", "fprop input", TEXT], ["F102", "head", "dgrad grad_output", "short"]]
    print_table(["code", "module", "site", "what"], rows, wrap=["module", "what"], drop=["site"], below="what")
    lines = capsys.readouterr().out.splitlines()
    assert ("what" in lines[0].split()) == (not is_below)
    first, second = (next(i for i, line in enumerate(lines) if line.startswith(code)) for code in ("F101", "F102"))
    told = [" ".join(line.split()) for line in lines[first + 1 : second]] if is_below else []
    if is_below:
        assert TEXT.replace(" ", "") == "".join(told).replace(" ", "")
        assert all(line.startswith("  ") for line in lines[first + 1 : second])
        assert len(told) <= len(TEXT) // (0.6 * (width or 1)) + 1 and lines[second + 1] == "  short"
        assert max(map(len, lines)) <= (width or 0)
    else:
        assert TEXT in lines[first] and second == first + 1
    print_table(["code", "what"], [["F101", "short"]], wrap=["what"], below="what")
    assert capsys.readouterr().out.splitlines() == ["code  what", "F101  short"]


def test_wide_characters_and_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    print_table(["name", "n"], [["\u5c42" * 30, 7], ["b", 8]], wrap=["name"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.count("\u5c42") for line in lines) == 30
    assert max(2 * line.count("\u5c42") + line.count(" ") + line.count("7") for line in lines) <= 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    tiny = Override(slots={"amax": 5.341e-05})
    sick = Override(module="blocks.1.mlp.up", gemm="fprop", tensor="input", steps=(20, None), slots={"gain": 2.0})
    write(folder / "run", Plan(num_steps=40, overrides=[tiny, sick]))
    write(folder / "good", Plan(num_steps=40))
    return folder


def _in_a_terminal(words: list[str], width: int, with_stderr: bool = False, /, **environment: str) -> str:
    """Return what a command prints on a terminal of that width, what it says on stderr if asked for."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8debug_cli.main", *words],
        stdout=theirs,
        stderr=theirs if with_stderr else subprocess.DEVNULL,
        env={**env, "TERM": "xterm", **environment},
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(ours)
    process.wait()
    return text.decode().replace("\r\n", "\n")


@pytest.mark.parametrize(("width", "environment"), [(80, {}), (120, {"NO_COLOR": "1"}), (100, {"TERM": "dumb"})])
def test_show_on_a_terminal(runs: Path, width: int, environment: dict[str, str]) -> None:
    text = _in_a_terminal(["show", str(runs / "run"), "--limit", "5"], width, **environment)
    lines = text.splitlines()
    wide = _in_a_terminal(["show", str(runs / "run"), "--limit", "5", "--wide"], width).splitlines()
    assert ("\x1b" in text) == (not environment)
    assert max(len(line) for line in lines if "\x1b" not in line) <= width
    assert "tensor" in lines[0] and "reference" in lines[0], "what tells the rows apart"
    assert text.count("5.341e-05") == 5, (
        "amax, the smallest of numbers, in each row: a cast's name that tells none apart goes first"
    )
    assert "(--wide)" in lines[-1] and not any(line.startswith("+") for line in wide) and "\x1b" not in "".join(wide[1:])
    assert max(map(len, wide[1:])) > 150, "all columns, whatever the terminal's width"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_of_stderr_go_on_below_on_a_terminal(runs: Path, width: int) -> None:
    text = _in_a_terminal(["triage", str(runs / "run"), "--follow"], width, True)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    assert lines[0].startswith("steps 0 to 30: "), "all sampled steps that were judged at once"
    assert any(line.startswith("  F") and "blocks.1.mlp.up" in line for line in lines)
    assert any(line.startswith("skipped F") for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("command", ["triage RUN", "coverage RUN", "fallback RUN", "calibrate RUN", "diff GOOD RUN"])
def test_every_table_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path, width: int, command: str
) -> None:
    from fp8debug_cli.main import status

    monkeypatch.setenv("COLUMNS", str(width))
    places = {"RUN": str(runs / "run"), "GOOD": str(runs / "good")}
    assert status([places.get(word, word) for word in command.split()]) in (0, 1)
    lines = capsys.readouterr().out.splitlines()
    heads = ("code", "module", "diverges")
    (start,) = [place for place, line in enumerate(lines) if line.split()[:1] and line.split()[0] in heads]
    table = list(itertools.takewhile(lambda line: line and not line.startswith("+"), lines[start:]))
    assert len(table) > 1 and max(map(len, table)) <= width


MODULES = [(f"blocks.{i}.{name}", 256, 256) for i in range(16) for name in ("attn.q_proj", "mlp.down")] + [("head", 256, 64)]


def test_layers_that_are_alike_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from fp8debug_cli.main import status

    monkeypatch.setenv("COLUMNS", "160")
    sick = [
        Override(module=f"blocks.{i}.mlp.down", gemm="fprop", tensor="input", slots={"gain": 2.0, "sqnr_db": 1.0})
        for i in (3, 4, 5)
    ]
    recipes: dict[str, Any] = {"head": None, "blocks.7.mlp.down": None}
    write(tmp_path / "run", Plan(num_steps=40, modules=MODULES, recipes=recipes, overrides=sick))

    def said(command: str) -> list[str]:
        assert status(command.replace("RUN", str(tmp_path / "run")).split()) in (0, 1)
        return capsys.readouterr().out.splitlines()

    lines = said("coverage RUN")
    names = [line.split()[0] for line in lines if line.startswith(("blocks", "head"))]
    assert names == ["blocks.{0..15}.attn.q_proj", "blocks.{0..6,8..15}.mlp.down", "blocks.7.mlp.down", "head"]
    shares = {
        line.split()[0]: float(line.partition(" %")[0].split()[-1]) for line in lines if line.startswith(("blocks", "head"))
    }
    assert sum(shares.values()) == pytest.approx(100, abs=0.1) and shares["blocks.{0..15}.attn.q_proj"] == pytest.approx(49.61)
    assert sum(line.startswith("blocks") for line in said("coverage RUN --each")) == 32
    assert len(json.loads("\n".join(said("coverage RUN --format json")))) == 33
    assert any(line.startswith("blocks.{3..5}.mlp.down") for line in said("fallback RUN --budget 100%"))


def test_an_asked_column_stays_longest(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    from fp8debug_cli.main import status

    monkeypatch.setenv("COLUMNS", "50")
    assert status(["show", str(runs / "run"), "--columns", "amax", "--limit", "2"]) == 0
    assert capsys.readouterr().out.count("5.341e-05") == 2


def test_show_keeps_what_tells_rows_apart_before_the_name_of_the_cast(runs: Path) -> None:
    run = runs / "deep"
    if not run.exists():
        write(run, Plan(num_steps=2, modules=[("blocks.0.up", 64, 64)], recipe="tensorwise_delayed"))
    for width in (60, 80, 100):
        head, *lines, more = _in_a_terminal(["show", str(run), "--limit", "5"], width, NO_COLOR="1").splitlines()[:7]
        assert len(lines) == 5 and all(line.startswith("0 ") for line in lines), f"a row takes several lines at {width}"
        assert head.split()[:5] == ["step", "module", "gemm", "tensor", "reference"] and "sqnr_db" in head
        assert more.startswith("+") and "cast_name" in more
    wide = _in_a_terminal(["show", str(run), "--limit", "5"], 260, NO_COLOR="1")
    assert "cast_name" in wide.splitlines()[0], "where it fits it is there"
