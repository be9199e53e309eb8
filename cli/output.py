"""Output of commands for people, escaped: a name from a run neither moves the cursor nor gives a CI runner commands."""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from typing import TextIO

import click

from fp8debug.escaping import plain

#: Width of a terminal that does not tell its own.
DEFAULT_WIDTH = 80
#: A number with its sign; marks after which a long name may break.
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?%?")
_MARKS = "._/-:,;"


class MultilineCell(str):
    """A cell of several lines: its breaks are ours, what stands between them went through :func:`fp8debug.escaping.one_line`."""


def echo(message: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Print text for people; on a terminal a line that is too long goes on below it, its numbers whole."""
    text, width = plain(message), terminal_width(err=err)
    if width is not None:
        text = "\n".join(part for line in text.split("\n") for part in _folded(line, width))
    if err:
        with suppress(BrokenPipeError):
            click.echo(text, err=True, nl=nl)
    else:
        write(text, nl=nl)


def write(text: str, *, nl: bool = True) -> None:
    """Write text to stdout as it is: what programs read, or what is escaped already.

    Once its reader (head, less) has gone, the rest goes nowhere, and the command ends with its own status; click's would be 1.
    """
    global _has_reader
    try:
        click.echo(text, nl=nl)
    except BrokenPipeError:
        _has_reader = False
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_has_reader = True


def has_reader() -> bool:
    """Return whether stdout still has a reader, as far as it has been written to."""
    return _has_reader


def _folded(line: str, width: int) -> list[str]:
    """Return a line as lines of a width; those after the first are indented by two more."""
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    if display_width(line) <= width or width <= 2 * len(indent):
        return [line]
    first, *_ = broken(line, width)
    rest = line[len(first) :].lstrip()
    return [first, *(indent + part for part in broken(rest, width - len(indent)))]


def terminal_width(*, err: bool = False) -> int | None:
    """Return how many characters fit on a line of stdout, or of stderr; None for a file or a pipe, whose lines have no end.

    COLUMNS tells it of stdout whatever that is, of stderr where it is a terminal: logs keep their lines.
    """
    stream = sys.stderr if err else sys.stdout
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0 and (not err or stream.isatty()):
        return int(told)
    return _width_of(stream)


def _width_of(stream: TextIO) -> int | None:
    """Return the width of the terminal that a stream writes to; None where it is none."""
    if not stream.isatty():
        return None
    with suppress(OSError, ValueError):  # a stream of its own making has no file, and no terminal has no width
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    return DEFAULT_WIDTH


def broken(text: str, width: int) -> list[str]:
    """Return text as lines of a width: broken between words, and within a word that is longer after a mark, else anywhere."""
    lines = []
    for line in text.split("\n"):
        rest = line
        while display_width(rest) > width:
            size = _fits(rest, width)
            head = rest[: size + 1]
            at = head.rfind(" ")
            if at <= len(rest) - len(rest.lstrip()):
                whole = [found.span() for found in NUMBER.finditer(rest)]
                places = [i for i in range(1, size + 1) if not any(start < i < end for start, end in whole)] or [size]
                at = max((i for i in places if rest[i - 1] in _MARKS), default=places[-1])
            lines.append(rest[:at].rstrip())
            rest = rest[at:].lstrip()
        lines.append(rest)
    return lines


def _fits(text: str, width: int) -> int:
    """Return how many characters of a text fit into a width, one at least."""
    size, used = 0, 0
    while size < len(text) and used + display_width(text[size]) <= width:
        used += display_width(text[size])
        size += 1
    return max(1, size)


def display_width(text: str) -> int:
    """Return how many columns of a terminal text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
