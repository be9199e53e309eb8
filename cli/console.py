"""Functions that commands share: opening a run, tables for people, values for programs, files and progress."""

from __future__ import annotations

import atexit
import csv
import io
import json
import math
import os
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

from .output import NUMBER, MultilineCell, broken, display_width, echo, terminal_width, write

#: Where text wraps in a table that goes to a file or a pipe: wide enough that names do not; its other columns may go beyond.
PIPE_WIDTH = 200
#: Spaces between columns, and the least width of a column of text.
GAP, MIN_TEXT = 2, 20
#: Sentences in a column that is narrower than this stand below their rows instead, over the whole width.
MIN_SENTENCE = 48
_WIDE = "fp8debug.wide"
#: Progress shows only for what lasts longer.
PATIENCE_S = 1.0

STYLES: Mapping[str, Mapping[str, Any]] = {
    "error": {"fg": "red", "bold": True},
    "warning": {"fg": "yellow"},
    "info": {"fg": "cyan"},
    "ok": {"fg": "green", "bold": True},
}


def wide_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--wide``, which :func:`print_table` obeys."""

    def keep(context: click.Context, _: click.Parameter, is_wide: bool) -> None:
        context.meta[_WIDE] = is_wide

    words = "All columns of a table, however narrow the terminal is."
    return click.option("--wide", is_flag=True, expose_value=False, callback=keep, help=words)(command)


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
    least: int = MIN_TEXT,
    below: str | None = None,
) -> None:
    """Print a table to stdout: coloured on a terminal, plain elsewhere and under NO_COLOR.

    No cell is cut. Text wraps in the columns that may wrap; where the terminal is too narrow all the same, whole columns are left
    out and named below the table, those without any data first. A file, a pipe and ``--wide`` get all columns, on lines as long
    as they need.

    Args:
        header: titles, each its own.
        rows: cells; None is shown as a dash.
        wrap: titles of the columns whose text may wrap; a number is never broken.
        drop: titles in the order in which columns are left out; then the others from the right. The first column stays.
        least: width to which a column that may wrap is narrowed before another one is left out.
        below: title of a column of sentences, which stand below their rows where the column would be narrow.
    """
    titles = [one_line(title) for title in header]
    cells = [[(cell(value), STYLES.get(str(value), {})) for value in row] for row in rows]
    columns = [
        _Column(title, [row[i][0] for row in cells], least if header[i] in wrap else None) for i, title in enumerate(titles)
    ]
    context = click.get_current_context(silent=True)
    width = None if context is not None and context.meta.get(_WIDE) else terminal_width()
    empty = [i for i in range(1, len(columns)) if cells and all(row[i][0] == "-" for row in cells)]
    order = list(dict.fromkeys([*reversed(empty), *(list(header).index(title) for title in drop if title in header)]))
    order += [i for i in reversed(range(len(columns))) if i not in order]
    kept, left_out = _fitting(columns, width, order)
    widths = _widths([columns[place] for place in kept], width)
    sentences = None if below is None else list(header).index(below)
    if sentences is not None and dict(zip(kept, widths, strict=True)).get(sentences, 0) < min(
        MIN_SENTENCE, columns[sentences].natural
    ):
        kept, left_out = _fitting(columns, width, [place for place in order if place != sentences], without=sentences)
        widths = _widths([columns[place] for place in kept], width)
    else:
        sentences = None
    has_colour = os.environ.get("TERM") not in ("dumb", "unknown")
    printed: list[str] = []

    def show(words: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        parts = [broken(word, size) for (word, _), size in zip(words, widths, strict=True)]
        for number in range(max(map(len, parts))):
            line, gap = "", 0
            for (_, style), part, size in zip(words, parts, widths, strict=True):
                piece = part[number] if number < len(part) else ""
                if piece:
                    line += " " * gap + (click.style(piece, **style) if style and has_colour else piece)
                    gap = 0
                gap += size - display_width(piece) + GAP
            printed.append(line)

    show([(titles[place], {"bold": True}) for place in kept])
    for row in cells:
        show([row[place] for place in kept])
        if sentences is not None and width is not None:
            printed.extend(f"{'':{GAP}}{line}" for line in broken(row[sentences][0], max(MIN_TEXT, width) - GAP))
    write("\n".join(printed))
    if left_out:
        names = ", ".join(titles[place] for place in sorted(left_out))
        echo(f"+{len(left_out)} column{'' if len(left_out) == 1 else 's'}: {names} (--wide)")


class _Column:
    """The widths that a column can have.

    Args:
        title: of the column.
        words: its cells, each of one line or more.
        narrowest: width to which its text may wrap; None where it may not.
    """

    def __init__(self, title: str, words: Sequence[str], narrowest: int | None) -> None:
        lines = [line for word in words for line in word.split("\n")]
        self.can_wrap = narrowest is not None
        self.natural = max(map(display_width, [title, *lines]))
        self.least = max([*map(display_width, title.split()), *map(display_width, lines)], default=0)
        if narrowest is not None:
            numbers = (display_width(number) for text in (title, *lines) for number in NUMBER.findall(text))
            self.least = max(min(self.natural, narrowest), max(numbers, default=0))


def _fitting(
    columns: Sequence[_Column], width: int | None, order: Sequence[int], without: int | None = None
) -> tuple[list[int], list[int]]:
    """Return the places of the columns that fit, and of those left out, given the order in which they are left out.

    The column ``without`` is neither.
    """
    kept, left_out = [place for place in range(len(columns)) if place != without], list[int]()
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
        write(visible(text), nl=False)
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
