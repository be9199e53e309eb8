"""Text from a run as a terminal and a CI log may have it: names are data, and neither moves the cursor nor gives commands."""

from __future__ import annotations

import re

#: Control characters but line feed and tab, and those that reorder, hide or break what is shown.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]")
#: With these a line of a job's log is a command to GitHub's or Azure's runner.
_COMMAND = re.compile(r"::|##(?=\[|vso)")
#: With these a cell is a formula to a spreadsheet.
_FORMULA = re.compile(r"[=+@\t\r]|-(?![\d.])|::")
#: Longer names and values are cut.
MAX_CELL = 2_000


def plain(text: str) -> str:
    """Return text with what a terminal or a runner would act on written out, ``\\x1b``; line breaks stay."""
    return _COMMAND.sub(lambda found: _escape(found[0][0]) + found[0][1:], visible(text))


def visible(text: str) -> str:
    """Return text with its control characters written out; line breaks and tabs stay."""
    return _UNSAFE.sub(lambda found: _escape(found[0]), text)


def one_line(text: str) -> str:
    """Return a name or value as a part of a line: also its line breaks are written out, and what is very long is cut."""
    cut = text if len(text) <= MAX_CELL else f"{text[:MAX_CELL]}..."
    return plain(cut).replace("\n", "\\n").replace("\t", "\\t")


def field(value: object) -> object:
    """Return a value for a CSV field: text with its control characters written out, a formula behind an apostrophe."""
    if not isinstance(value, str):
        return value
    return visible(f"'{value}" if _FORMULA.match(value) else value).replace("\n", "\\n")


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
