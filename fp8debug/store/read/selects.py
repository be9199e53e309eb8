"""Text of the queries that give the rows of files their columns and types, in SQL common to DuckDB and Spark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pyarrow as pa

from fp8debug.store.read.engine import taken_words
from fp8debug.store.read.files import RunFiles, Source, needed
from fp8debug.store.read.views import Dialect, is_plain
from fp8debug.store.schema import Column, columns_from, columns_of


def columns_in(table: str, files: RunFiles) -> list[Column]:
    """Return our columns and those that the files describe themselves (a metric that is not installed here)."""
    columns = {column.name: column for column in columns_of(table)}
    for schema in _schemas(files.of(table)):
        for column in columns_from(schema):
            if column.name not in columns and is_plain(column.name) and column.name not in taken_words():
                columns[column.name] = column
    return list(columns.values())


def _schemas(sources: Iterable[Source]) -> Iterable[pa.Schema]:
    """Return the schemas of files, one that several share once."""
    return {id(source.schema): source.schema for source in sources}.values()


def typed(columns: Sequence[Column], sources: Sequence[Source], dialect: Dialect) -> str:
    """Return the select list of some files: every column of ours with its type, null where none of them has it."""
    there: dict[str, set[pa.DataType]] = {}
    for schema in _schemas(sources):
        for field in schema:
            there.setdefault(field.name, set()).add(field.type)

    def cast(column: Column) -> str:
        # A value that the type cannot hold is none; TRY_CAST only where the types differ, as it hides nothing elsewhere.
        differs = there.get(column.name, set()) - {column.field.type}
        word = "TRY_CAST" if differs else "CAST"
        return f"{word}({column.name if column.name in there else 'NULL'} AS {dialect.types[column.type]}) AS {column.name}"

    return ", ".join(map(cast, columns))


def counted(select: str, where: str, table: str, *, is_whole: bool) -> str:
    """Return a query with the rows that count; where keys may be missing, only rows that have them."""
    if is_whole:
        return f"{select}{where}"
    keys = " AND ".join(["coalesce(step, 0) >= 0", *(f"{key} IS NOT NULL" for key in needed(table))])
    return f"SELECT * FROM ({select}{where}) AS counted WHERE {keys}"
