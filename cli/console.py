"""Functions that commands share: opening a run, tables for people, values for programs, files and progress."""

from __future__ import annotations

import atexit
import csv
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.escaping import field, one_line, visible
from fp8debug.store.locations import ObjectPath, place_of
from fp8debug.store.read.resumed import open_runs
from fp8debug.store.read.run import Run

from .output import MultilineCell, echo

#: Where text wraps in a table that goes to a file or a pipe: wide enough that names do not; its other columns may go beyond.
PIPE_WIDTH = 200
#: Width of a terminal that does not tell its own, spaces between columns, and the least width of a column of text.
DEFAULT_WIDTH, GAP, MIN_TEXT = 80, 2, 20
#: A number with its sign; marks after which a long name may break.
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?%?")
_MARKS = "._/-:,;"
#: Progress shows only for what lasts longer.
PATIENCE_S = 1.0

STYLES: Mapping[str, Mapping[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
    "ok": {"fg": "green", "bold": True},
}


def open_run(*paths: str) -> Run:
    """Open a run, or one with its resumed parts, and say on stderr what of it could not be read.

    A folder of Transformer Engine's statistics logs is opened as the run that ``fp8debug import te-stats`` would make of it.
    """
    run = open_runs([_converted(path) for path in paths])
    for problem in run.problems:
        warn(problem)
    return run


def _converted(path: str) -> str:
    """Return a path; for a folder of statistics logs that is no run, that of a temporary run made of them."""
    place = place_of(path)
    if isinstance(place, ObjectPath) or not place.is_dir() or (place / "manifest.json").exists():
        return path
    from fp8debug.tools.te_stats import find_logs, import_te_stats

    if any(place.glob("rank=*")) or not find_logs(place):
        return path
    folder = tempfile.mkdtemp(prefix="fp8debug-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = import_te_stats(path, f"{folder}/{place.resolve().name}")
    source = f"{path} holds Transformer Engine's statistics logs: {done.num_modules} modules, {done.num_steps} steps"
    assumed = (
        f"; the recipe is assumed to be {done.recipe}, fp8debug import te-stats --recipe names another" if done.is_assumed else ""
    )
    warn(f"{source}{assumed}")
    return str(done.path)


def warn(message: str) -> None:
    """Print one line to stderr."""
    echo(f"warning: {message}", err=True)


def print_table(
    header: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    wrap: Sequence[str] = (),
    drop: Sequence[str] = (),
    more: str = "",
) -> None:
    """Print a table to stdout: coloured on a terminal, plain elsewhere and under NO_COLOR.

    No cell is cut. Text wraps in the columns that may wrap; where the terminal is too narrow all the same, whole columns are left
    out and named below the table. A file or a pipe gets all columns, on lines as long as they need.

    Args:
        header: titles, each its own.
        rows: cells; None is shown as a dash.
        wrap: titles of the columns whose text may wrap; a number is never broken.
        drop: titles in the order in which columns are left out; then the others from the right. The first column stays.
        more: the option or format that shows the columns left out, e.g. ``--format csv``.
    """
    titles = [one_line(title) for title in header]
    cells = [[(cell(value), STYLES.get(str(value), {})) for value in row] for row in rows]
    columns = [_Column(title, [row[i][0] for row in cells], can_wrap=header[i] in wrap) for i, title in enumerate(titles)]
    width = _width()
    order = [list(header).index(title) for title in drop if title in header]
    kept, left_out = _fitting(columns, width, [*order, *(i for i in reversed(range(len(columns))) if i not in order)])
    widths = _widths([columns[place] for place in kept], width)
    has_colour = os.environ.get("TERM") not in ("dumb", "unknown")
    printed: list[str] = []

    def show(words: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        parts = [_broken(word, size) for (word, _), size in zip(words, widths, strict=True)]
        for number in range(max(map(len, parts))):
            line, gap = "", 0
            for (_, style), part, size in zip(words, parts, widths, strict=True):
                piece = part[number] if number < len(part) else ""
                if piece:
                    line += " " * gap + (click.style(piece, **style) if style and has_colour else piece)
                    gap = 0
                gap += size - _length(piece) + GAP
            printed.append(line)

    show([(titles[place], {"bold": True}) for place in kept])
    for row in cells:
        show([row[place] for place in kept])
    try:
        click.echo("\n".join(printed))
    except BrokenPipeError:  # the reader (head, less) has gone; click would end the command with status 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if left_out:
        names = ", ".join(titles[place] for place in sorted(left_out))
        ways = f"{more} or a wider terminal" if more else "a wider terminal"
        echo(f"+{len(left_out)} column{'' if len(left_out) == 1 else 's'} not shown: {names} ({ways})")


class _Column:
    """The widths that a column can have.

    Args:
        title: of the column.
        words: its cells, each of one line or more.
        can_wrap: whether its text may wrap.
    """

    def __init__(self, title: str, words: Sequence[str], *, can_wrap: bool) -> None:
        lines = [line for word in words for line in word.split("\n")]
        self.can_wrap = can_wrap
        self.natural = max(map(_length, [title, *lines]))
        self.least = max([*map(_length, title.split()), *map(_length, lines)], default=0)
        if can_wrap:
            numbers = (_length(number) for text in (title, *lines) for number in _NUMBER.findall(text))
            self.least = max(min(self.natural, MIN_TEXT), max(numbers, default=0))


def _width() -> int | None:
    """Return how many characters fit on a line of stdout; None for a file or a pipe, whose lines have no end."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    if not sys.stdout.isatty():
        return None
    with suppress(OSError, ValueError):  # a stream of its own making has no file, and no terminal has no width
        return os.get_terminal_size(sys.stdout.fileno()).columns or DEFAULT_WIDTH
    return DEFAULT_WIDTH


def _fitting(columns: Sequence[_Column], width: int | None, order: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the places of the columns that fit, and of those left out, given the order in which they are left out."""
    kept, left_out = list(range(len(columns))), list[int]()
    for place in order:
        if width is None or sum(columns[i].least for i in kept) + GAP * (len(kept) - 1) <= width:
            break
        if place:
            kept.remove(place)
            left_out.append(place)
    return kept, left_out


def _widths(columns: Sequence[_Column], width: int | None) -> list[int]:
    """Return the widths of the columns; what is over is shared among those that want more, the small ones first."""
    limit = PIPE_WIDTH if width is None else width
    widths = [column.natural if width is None and not column.can_wrap else column.least for column in columns]
    over = limit - sum(widths) - GAP * (len(widths) - 1)
    wanted = [column.natural - size for column, size in zip(columns, widths, strict=True)]
    for number, place in enumerate(sorted(range(len(columns)), key=wanted.__getitem__)):
        more = min(wanted[place], max(0, over) // (len(columns) - number))
        widths[place] += more
        over -= more
    return widths


def _broken(text: str, width: int) -> list[str]:
    """Return text as lines of a width: broken between words, and within a word that is longer after a mark, else anywhere."""
    broken = []
    for line in text.split("\n"):
        rest = line
        while _length(rest) > width:
            size = _fits(rest, width)
            head = rest[: size + 1]
            at = head.rfind(" ")
            if at <= 0:
                whole = [found.span() for found in _NUMBER.finditer(rest)]
                places = [i for i in range(1, size + 1) if not any(start < i < end for start, end in whole)] or [size]
                at = max((i for i in places if rest[i - 1] in _MARKS), default=places[-1])
            broken.append(rest[:at].rstrip())
            rest = rest[at:].lstrip()
        broken.append(rest)
    return broken


def _fits(text: str, width: int) -> int:
    """Return how many characters of a text fit into a width, one at least."""
    size, used = 0, 0
    while size < len(text) and used + _length(text[size]) <= width:
        used += _length(text[size])
        size += 1
    return max(1, size)


def _length(text: str) -> int:
    """Return how many columns of a terminal text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def cell(value: object) -> str:
    """Write a value for people: four significant digits, NaN and Inf by name, a dash for no data."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return str(value) if isinstance(value, MultilineCell) else one_line(str(value))


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, header: bool = True) -> str:
    """Return CSV, with a header or the rows alone; no data is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(columns)
    writer.writerows([field(row[column]) for column in columns] for row in rows)
    return text.getvalue()


def to_json(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a strict JSON array of objects; a number that is not finite is null."""
    return json.dumps(_strict(list(rows)), indent=2, default=str) + "\n"


def to_json_document(value: Mapping[str, Any]) -> str:
    """Return one strict JSON object, however deep; a number that is not finite is null."""
    return json.dumps(_strict(value), indent=2, default=str) + "\n"


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _strict(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_file(path: str, text: str) -> None:
    """Write a file whole or not at all, and say so on stderr; ``-`` is stdout."""
    if path == "-":
        click.echo(visible(text), nl=False)
        return
    target = place_of(path)
    try:
        half = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            half.write_text(text, encoding="utf-8")
            half.replace(target)
        finally:
            with suppress(OSError, ValueError):  # the first error is reported
                half.unlink()
    except (OSError, ValueError) as error:  # a ValueError: the path has no name, or a NUL in it
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None
    echo(f"Wrote {path}", err=True)


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int, str], None]]:
    """Give a function (done, total, what) that shows a bar on stderr once a second has gone by; none off a terminal."""
    began = time.monotonic()
    bar: Any = None
    task: Any = None

    def report(done: int, total: int, what: str) -> None:
        nonlocal bar, task
        if bar is None and sys.stderr.isatty() and time.monotonic() - began > PATIENCE_S:
            from rich.console import Console
            from rich.progress import Progress

            bar = Progress(console=Console(stderr=True), transient=True)
            task = bar.add_task(label, total=total)
            bar.start()
        if bar is not None:
            bar.update(task, completed=done, total=total, description=f"{label} {what}")

    try:
        yield report
    finally:
        if bar is not None:
            bar.stop()
