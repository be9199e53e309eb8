"""Answer of a command line: its exit code and both streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8debug_cli.main import status


class Said:
    """Answer of a command line; ``RUNS`` stands for the folder of the runs, in the line and in what was printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], runs: Path, line: str) -> None:
        self.code = status([word.replace("RUNS", str(runs)) for word in line.split()])
        captured = capsys.readouterr()
        self.out, self.err = captured.out, captured.err.replace(str(runs), "RUNS")
