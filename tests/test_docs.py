"""The documentation keeps up with the code: errors, columns, formats and links."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from fp8debug import errors
from fp8debug.formats import FORMATS
from fp8debug.metrics import derived_columns, slots
from fp8debug.recipes import SCALE_ROUNDINGS, SCALINGS
from fp8debug.rules import RULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md")])


def headings(name: str) -> list[str]:
    return re.findall(r"^## (.+)$", (DOCS / name).read_text(encoding="utf-8"), re.MULTILINE)


def error_classes(base: type[errors.Fp8DebugError] = errors.Fp8DebugError) -> Iterator[type[errors.Fp8DebugError]]:
    yield base
    for child in base.__subclasses__():
        yield from error_classes(child)


def test_every_error_has_its_cure() -> None:
    slugs = [error.slug for error in error_classes() if error.__module__.startswith("fp8debug")]
    assert sorted(headings("errors.md")) == sorted(set(slugs))
    assert len(slugs) == len(set(slugs)), "two errors share a slug"


def test_every_column_is_defined() -> None:
    text = (DOCS / "numerics.md").read_text(encoding="utf-8")
    assert [name for name in [*slots(), *derived_columns()] if f"`{name}`" not in text] == []


def test_every_format_and_cast_option_is_defined() -> None:
    text = (DOCS / "numerics.md").read_text(encoding="utf-8")
    for fmt in FORMATS.values():
        largest = f"{fmt.max:.0f}" if fmt.max < 1e6 else "2^127"
        sqnr = f"{fmt.gaussian_sqnr_db} dB" if fmt.gaussian_sqnr_db else "-"
        assert re.search(rf"^\| {fmt.name}\b[^|]*\| {re.escape(largest)} \|.*\| {sqnr} \|$", text, re.MULTILINE), fmt.name
    assert [word for word in (*SCALINGS, *SCALE_ROUNDINGS) if not re.search(rf"^\| {word}\b", text, re.MULTILINE)] == []


def test_generated_pages_are_up_to_date() -> None:
    for name, make in runpy.run_path(str(ROOT / "scripts" / "docs.py"))["PAGES"].items():
        assert (DOCS / name).read_text(encoding="utf-8") == make(), f"docs/{name} is stale; run `make docs`"


def test_the_catalogue_names_the_rules_that_there_are() -> None:
    text = (DOCS / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (F\d+|-) \|", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 44))
    assert sorted({code for _, code in rows} - {"-"}) == sorted(rule.code for rule in RULES)
    # A mode has the rule of its own number, or one of an earlier mode that covers it.
    assert all(code == "-" or code <= f"F{100 + int(number)}" for number, code in rows)
    assert {f"F{100 + int(number)}" for number, code in rows if code != "-"} >= {rule.code for rule in RULES}


def test_sections_that_docstrings_cite_are_there() -> None:
    """Docstrings cite ``numerics.md, 4``: the section's number."""
    sources = [path for folder in ("fp8debug", "cli", "dashboard") for path in (ROOT / folder).rglob("*.py")]
    cited = {n for p in sources for n in re.findall(r"numerics\.md, (\d)", p.read_text(encoding="utf-8"))}
    numbers = {heading[0] for heading in headings("numerics.md")}
    assert cited <= numbers


def test_the_log_is_dated_newest_first() -> None:
    text = re.sub(r"<!--.*?-->", "", (DOCS / "lab" / "log.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    days = [date.fromisoformat(h[:10]) for h in re.findall(r"^## (.+)$", text, re.MULTILINE)]
    assert days == sorted(days, reverse=True)


@pytest.mark.parametrize("document", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []
