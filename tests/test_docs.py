"""The documentation keeps up with the code: errors, columns, formats and links."""

from __future__ import annotations

import dataclasses
import re
import runpy
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest

from fp8debug import errors
from fp8debug.formats import FORMATS
from fp8debug.metrics import derived_columns, slots
from fp8debug.recipes import SCALE_ROUNDINGS, SCALINGS, Cast
from fp8debug.rules import RULES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
CHANGELOG = ROOT / "CHANGELOG.md"
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
        largest = f"{fmt.max:g}" if fmt.max < 1e6 else "2^127"
        sqnr = f"{fmt.gaussian_sqnr_db} dB" if fmt.gaussian_sqnr_db else "-"
        found = re.search(rf"^\| {fmt.name}\b[^|]*\| {re.escape(largest)} \|.*\| {sqnr} \|$", text, re.MULTILINE)
        assert found is not None, f"docs/numerics.md, 1: no row of {fmt.name} with {largest} and, at its end, {sqnr}"
    fields = [f.name for f in dataclasses.fields(Cast)]
    assert [name for name in fields[fields.index("scale_format") :] if f"{name}" not in text] == []
    assert [word for word in (*SCALINGS, *SCALE_ROUNDINGS) if not re.search(rf"^\| {word}\b", text, re.MULTILINE)] == []


def test_generated_pages_are_up_to_date() -> None:
    for name, make in runpy.run_path(str(ROOT / "scripts" / "docs.py"))["PAGES"].items():
        assert (DOCS / name).read_text(encoding="utf-8") == make(), f"docs/{name} is stale; run `make docs`"


def test_the_catalogue_names_the_rules_that_there_are() -> None:
    text = (DOCS / "numerics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (F\d+|-) \|", text, re.MULTILINE)
    numbers = [int(number) for number, _ in rows]
    assert numbers == list(range(1, len(rows) + 1)), "docs/numerics.md, 5: one row for each number, in order"
    in_catalogue, codes = {code for _, code in rows} - {"-"}, {rule.code for rule in RULES}
    assert in_catalogue == codes, f"docs/numerics.md, 5: no row of {codes - in_catalogue}, no rule of {in_catalogue - codes}"
    # A mode has the rule of its own number, or one of an earlier mode that covers it.
    assert all(code == "-" or code <= f"F{100 + int(number)}" for number, code in rows)
    assert {f"F{100 + int(number)}" for number, code in rows if code != "-"} >= {rule.code for rule in RULES}


def test_rules_that_judge_at_the_end_alone_are_in_the_limits() -> None:
    """A tracker's judge asks the rules that name their rows; the others see a run when it has ended."""
    text = (DOCS / "limits.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"^- A live alarm of rules that need the whole run: ([F\d,\s]+)\.", text, re.MULTILINE)
    assert listed.replace(",", "").split() == [rule.code for rule in RULES if not tuple(rule.looks())], "docs/limits.md"


def test_the_readme_shows_the_number_of_rules() -> None:
    """What README's commands print is compared without its numbers."""
    shown = re.findall(r"of (\d+) rules ran", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert shown == [str(len(RULES))], f"README.md, The first triage: there are {len(RULES)} rules"


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


def badly_folded(text: str) -> list[str]:
    """Return the lines of more than 120 columns that could be shorter: no table row, no code, no single link or picture.

    And those that begin with the number of an issue (#123), which a site shows as a heading.
    """
    outside_code = re.sub(r"^```.*?^```$", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    unbreakable = re.compile(r"\s*(\||(- |\d+\. )?!?\[[^\]]*\]\([^)]*\)[.,;:]?$)")
    lines = outside_code.splitlines()
    return [line for line in lines if (len(line) > 120 and not unbreakable.match(line)) or re.match(r" *#\d", line)]


def test_what_is_too_long() -> None:
    link = "[x](https://host/" + "x" * 120 + ")"
    assert badly_folded("x" * 121) and badly_folded(f"see {link}") and badly_folded("- " + "x" * 120)
    assert badly_folded("see\n#123") and not badly_folded("## A heading")
    assert not badly_folded("x" * 120) and not badly_folded("| " + "x" * 120 + " |") and not badly_folded(f"- {link}.")
    assert not badly_folded("```\n" + "x" * 121 + "\n```") and badly_folded("```\n```\n" + "x" * 121)


@pytest.mark.parametrize("document", [p for p in PAGES if p != CHANGELOG], ids=lambda p: str(p.relative_to(ROOT)))
def test_no_line_is_too_long(document: Path) -> None:
    assert badly_folded(document.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("document", [p for p in PAGES if "lab" not in p.parts and p != CHANGELOG], ids=lambda p: p.name)
def test_no_table_has_a_paragraph_in_a_cell(document: Path) -> None:
    rows = re.findall(r"^\|.*$", document.read_text(encoding="utf-8"), re.MULTILINE)
    assert [cell for row in rows for cell in row.split("|") if len(cell) > 200] == []


def test_the_readme_comes_to_the_point() -> None:
    """A picture of use within two screens; the limits are short, and each has its link."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert next(n for n, line in enumerate(lines) if line.startswith("![")) < 90 and len(lines) < 200
    limits = lines[lines.index("## Limits") + 1 :]
    limits = [line for line in limits[: next(n for n, line in enumerate(limits) if line.startswith("## "))] if line]
    assert len(limits) <= 5 and all("](docs/" in line for line in limits)


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    listed = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("document", [p for p in PAGES if "lab" not in p.parts and p != CHANGELOG], ids=lambda p: p.name)
def test_paths_that_pages_name_are_there(document: Path) -> None:
    folders = "fp8debug|cli|dashboard|tests|docs|examples|scripts|[.]ci"
    named = re.findall(rf"`((?:{folders})/[\w./-]*)`", document.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and "NN" not in path] == []


def test_the_way_of_a_tensor_is_that_of_the_code() -> None:
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+) \| (`[^|]+\.py`) \|$", (DOCS / "architecture.md").read_text(encoding="utf-8"), re.M)
    assert len(rows) >= 15
    for functions, files in rows:
        sources = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`(\w+)`", functions):
            assert re.search(rf"^\s*(def|class) {name}\b", sources, re.MULTILINE), f"{name} is not defined in {files}"


def test_the_site_loads_nothing_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = runpy.run_path(str(ROOT / "scripts" / "check_site.py"))
    assert check["main"](str(tmp_path)) == 2
    page = tmp_path / "index.html"
    page.write_text(
        '<a href="https://a.example/">a link</a><link rel="canonical" href="https://b.example/"><script src="own.js">'
    )
    assert check["main"](str(tmp_path)) == 0
    for text in (
        '<script async src="https://c.example/x.js">',
        '<link href="//d.example/x.css" rel="stylesheet">',
        "<style>@import 'https://e.example/x.css'</style>",
        "<img src=https://f.example/x.png>",
    ):
        page.write_text(text)
        assert check["main"](str(tmp_path)) == 1, text
    assert "index.html loads https://f.example/x.png" in capsys.readouterr().err


@pytest.mark.parametrize("document", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []
