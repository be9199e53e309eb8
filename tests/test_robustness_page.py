"""docs/robustness.md and docs/security.md name tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("document", "least"), [("robustness.md", 30), ("security.md", 7)])
def test_every_test_that_a_page_names_is_there(document: str, least: int) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / document).read_text(encoding="utf-8")))
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(named) > least
    assert sorted(name for name in named if f"def {name}(" not in sources) == []
