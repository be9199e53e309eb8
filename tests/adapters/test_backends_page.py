"""docs/backends.md promises what a test shows, and the example of torchao runs."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_each_cell_is_a_test_or_the_word_no() -> None:
    lines = (ROOT / "docs" / "backends.md").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("| backend |"))
    table = list(takewhile(lambda line: line.startswith("|"), lines[begin + 2 :]))
    cells = [cell.strip() for line in table for cell in line.split("|")[2:-1]]
    assert len(table) > 5 and len(cells) == 5 * len(table)
    for cell in cells:
        if cell != "no":
            named = re.fullmatch(r"`(\w+)::(\w+)`", cell)
            assert named is not None, cell
            assert f"def {named[2]}(" in (ROOT / "tests" / "adapters" / f"{named[1]}.py").read_text(encoding="utf-8"), cell


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_the_example_of_torchao(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "torchao_float8.py"), "--steps", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0 and done.stdout.startswith("runs/torchao: fp8debug coverage runs/torchao"), done.stderr
    assert "not watched" not in done.stderr and (tmp_path / "runs" / "torchao" / "manifest.json").is_file()
