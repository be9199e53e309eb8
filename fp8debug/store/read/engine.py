"""DuckDB as runs are read with it: no file but the run's own, no extension, nothing drawn, and a text for any file name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import duckdb

from fp8debug.metrics import derived_columns
from fp8debug.store.locations import ObjectPath

#: FROM name means a view, never a local variable of the caller; a run must not make us fetch or load an extension.
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "python_enable_replacements": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
}


def connect(folders: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    """Return a connection that reads what lies below these folders and nothing else, by file or by network."""
    connection = duckdb.connect(":memory:", config=_CONFIG)
    for store in {id(f.store): f.store for f in folders if isinstance(f, ObjectPath)}.values():
        connection.register_filesystem(store)
    connection.execute("SET TimeZone = 'UTC'")
    with suppress(duckdb.InvalidInputException):  # in Jupyter without ipywidgets there is none, and it cannot be set
        connection.execute("SET enable_progress_bar = false")  # it draws on stdout
    connection.execute("SET parquet_metadata_cache = true")  # footers are parsed once, not for every query
    # A store's own address is checked as a pattern, a file's as it is.
    allowed = {text for folder in folders for text in (_quoted(f"{folder.absolute()}/"), _quoted(f"{_escaped(folder)}/"))}
    connection.execute(f"SET allowed_directories = [{', '.join(sorted(allowed))}]")
    connection.execute("SET enable_external_access = false")
    return connection


@cache
def taken_words() -> frozenset[str]:
    """Return what no column of a file may be called: what SQL or a view of ours means otherwise."""
    query = "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category <> 'unreserved'"
    words = {str(word) for (word,) in duckdb.connect(":memory:", config=_CONFIG).execute(query).fetchall()}
    return frozenset(words | {"ranks"} | derived_columns().keys())


def path_literal(path: Path) -> str:
    """Return a path as SQL text, its glob characters escaped."""
    return _quoted(_escaped(path))


def unreadable(parts: Iterable[Path], folders: Sequence[Path]) -> set[Path]:
    """Return the Parquet files that cannot be read to their end.

    Raises:
        OSError: a store gives one of them no more, which is no damage.
    """
    connection, found = connect(folders), set()
    for path in parts:
        query = f"SELECT min(hash(COLUMNS(*))) FROM read_parquet([{path_literal(path)}], hive_partitioning = false)"
        try:
            connection.execute(query).fetchall()
        except duckdb.OutOfMemoryException:
            raise
        except duckdb.Error:
            if isinstance(path, ObjectPath):
                with path.open("rb") as file:
                    file.read(4)
            found.add(path)
            connection = connect(folders)  # a fatal error ends a connection
    return found


def _escaped(path: Path) -> str:
    return "".join(f"[{char}]" if char in "*?[" else char for char in str(path.absolute()))


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
