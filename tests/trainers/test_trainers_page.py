"""docs/trainers.md promises what a test shows."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(test_\w+)::(test_\w+)`")


def test_each_cell_is_a_test_or_the_word_no() -> None:
    text = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    sources = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
    named = NAMED.findall(text)
    assert len(named) > 25
    assert [f"{file}::{name}" for file, name in named if f"def {name}(" not in sources.get(file, "")] == []
    tables = text[text.index("## What works together") :]
    rows = [line for line in tables.splitlines() if line.startswith("| ") and "---" not in line]
    cells = [cell.strip() for row in rows for cell in row.split("|")[2:-1] if not row.startswith(("| backend", "| trainer"))]
    assert len(cells) == 51
    assert [cell for cell in cells if cell != "no" and not NAMED.fullmatch(cell)] == []
