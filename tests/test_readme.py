"""Every block of README.md runs, in order, in one folder, and prints the output that it shows, but for the numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: What would run everything else, or for minutes: make only says what it would do. CI runs both in earnest.
DRY = {"make demo": f"make -C {ROOT} -n demo", "make test": f"make -C {ROOT} -n test"}


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks() -> list[Block]:
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [Block(m[1], README.count("\n", 0, m.start()) + 2, m[2]) for m in found]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Return each ``$ command`` with the lines of output under it."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((re.sub(r"\s+#.*", "", line[2:]), []))
        else:
            found[-1][1].append(line)
    return found


def shape(line: str) -> str:
    """Return a line without its numbers and spacing; a code such as F113 stays."""
    return re.sub(r"(?<![A-Za-z0-9])-?\d+(\.\d+)?(e[-+]?\d+)?", "#", " ".join(line.split()))


def test_the_readme_has_only_blocks_that_can_be_run() -> None:
    assert {block.language for block in blocks()} == {"python", "console"}


def test_the_checker_reads_commands_and_ignores_numbers() -> None:
    assert commands("$ a  # why\nx\ny\n$ b\n") == [("a", ["x", "y"]), ("b", [])]
    assert shape("F113  gain 2.00  at 1e-3") == shape("F113 gain 1.5 at 7")
    assert shape("F113") != shape("F101")


@pytest.mark.slow
def test_every_block_runs_and_shows_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks():
        where = f"README.md:{block.line}"
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, "README.md", "exec"), names)
            continue
        for command, expected in commands(block.text):
            if command.startswith("fp8debug dashboard"):
                serve(command)
                continue
            done = run(DRY.get(command, command))
            allowed = (0, 1) if command.startswith("fp8debug triage") else (0,)
            assert done.returncode in allowed, f"{where} {command}: exit {done.returncode}\n{done.stderr}"
            shown = {shape(line) for line in done.stdout.splitlines()}
            missing = [line for line in expected if line.strip() not in ("", "...") and shape(line) not in shown]
            assert missing == [], f"{where} {command} printed\n{done.stdout}"


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "120"}


def run(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], env=environment(), capture_output=True, text=True, timeout=120)


def serve(command: str) -> None:
    """Start a server, wait for its address, end it."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {command} --port 0"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        lines: list[str] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and "http://127.0.0.1" not in "".join(lines[-1:]):
            line = server.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        assert "http://127.0.0.1" in lines[-1]
    finally:
        server.terminate()
        server.wait(timeout=20)
        if server.stdout is not None:
            server.stdout.close()
