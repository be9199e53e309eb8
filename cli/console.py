"""What commands share: opening a run, tables for people, values for programs, files and progress."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.plain import field, one_line, visible
from fp8debug.store.joined import open_runs
from fp8debug.store.places import place_of
from fp8debug.store.run import Run

from .plain import Lines, echo

#: Columns of a table that goes to a file or a pipe: wide enough that names do not wrap.
PIPE_WIDTH = 200
#: Progress shows only for what lasts longer.
PATIENCE_S = 1.0

STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan", "ok": "bold green"}


def open_run(*paths: str) -> Run:
    """Open a run, or one with its resumed parts, and say on stderr what of it could not be read."""
    run = open_runs(paths)
    for problem in run.problems:
        warn(problem)
    return run


def warn(message: str) -> None:
    """Print one line to stderr."""
    echo(f"warning: {message}", err=True)


def print_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, wrap: Sequence[str] = ()) -> None:
    """Print a table to stdout: coloured on a terminal, plain elsewhere and under NO_COLOR.

    Args:
        header: titles.
        rows: cells; None is shown as a dash.
        wrap: titles of the columns that may wrap; the others are folded only when nothing else helps.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for title in header:
        table.add_column(Text(one_line(title)), overflow="fold", min_width=None if title in wrap else len(title))
    for row in rows:
        table.add_row(*(Text(cell(value), style=STYLES.get(str(value), "")) for value in row))
    console.print(table)


def cell(value: object) -> str:
    """Write a value for people: four significant digits, a dash for no data."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return str(value) if isinstance(value, Lines) else one_line(str(value))


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return CSV with a header; no data is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
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
            with suppress(OSError, ValueError):  # what went wrong first is said
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
