"""Text of the views over the raw tables (``stats``, ``sites``, ``steps``, ``updates``, ...), in SQL common to DuckDB and Spark.

Slots of several ranks join by each column's own merge rule; rates, dB and cosines are derived from the joined slots.
Of rows that are copies (replicated, with the same shard) the one of the lowest rank counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa

from fp8debug.metrics import derived_columns
from fp8debug.metrics.expression import names, to_sql
from fp8debug.metrics.histogram import NUM_BINS
from fp8debug.store.read.engine import taken_words
from fp8debug.store.read.files import RunFile, RunFiles, needed
from fp8debug.store.schema import SITE_KEYS, Column, columns_from, columns_of

SQL_TYPES: dict[str, str] = {
    "bool": "BOOLEAN",
    "int32": "INT",
    "int64": "BIGINT",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "string": "STRING",
    "timestamp": "TIMESTAMPTZ",
    "list<int64>": "BIGINT[]",
}

_AGGREGATES = {"sum": "sum", "max": "max", "min": "min", "mean": "avg", "all": "bool_and", "any": "bool_or"}
_PLAIN_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """Differences of the engines: how they write a list, its i-th element, and types."""

    array: Callable[[Iterable[str]], str]
    element: Callable[[str, int], str]
    types: Mapping[str, str]


DUCKDB = Dialect(array=lambda items: f"[{', '.join(items)}]", element=lambda values, i: f"{values}[{i}]", types=SQL_TYPES)
SPARK = Dialect(
    array=lambda items: f"array({', '.join(items)})",
    element=lambda values, i: f"element_at({values}, {i})",
    types={**SQL_TYPES, "timestamp": "TIMESTAMP", "list<int64>": "ARRAY<BIGINT>"},
)


def is_plain(name: str) -> bool:
    """Return whether a column's name can stand in SQL without quotes, as all of ours do."""
    return _PLAIN_NAME.fullmatch(name) is not None


def derived_sql(columns: Iterable[Column]) -> str:
    """Return ``, expression AS name`` for every derived column whose slots are all there."""
    return "".join(f",\n  {to_sql(expression)} AS {name}" for name, expression in _derived(columns).items())


def _derived(columns: Iterable[Column]) -> dict[str, str]:
    there = {column.name for column in columns}
    return {name: d.expression for name, d in derived_columns().items() if there.issuperset(names(d.expression))}


def site_columns(columns: Sequence[Column], *, is_single_rank: bool) -> list[str]:
    """Return the columns of the view ``sites`` in order."""
    own = [c.name for c in columns if c.merge != "list"]
    joined = [*SITE_KEYS, *(c.name for c in columns if c.merge in _AGGREGATES)]
    return [*(own if is_single_rank else joined), "ranks", *_derived(columns)]


def stats_sql(columns: Sequence[Column]) -> str:
    """Return the view ``stats``: the rows of every rank with all derived columns."""
    return f"SELECT *{derived_sql(columns)}\nFROM raw"


def sites_sql(columns: Sequence[Column], dialect: Dialect, *, is_single_rank: bool, source: str = "raw") -> str:
    """Return the view ``sites``: one row per step, site, cast and reference, ranks joined, with all derived columns.

    Args:
        columns: of the rows.
        dialect: of the engine.
        is_single_rank: whether there is nothing to join.
        source: view or table of the rows.
    """
    own = ", ".join(c.name for c in columns if c.merge != "list")
    if is_single_rank:
        rows = f"SELECT {own}, {dialect.array(['rank'])} AS ranks FROM {source}"
    else:
        keys = ", ".join(SITE_KEYS)
        joined = ", ".join(_joined(c, dialect) for c in columns if c.merge in _AGGREGATES)
        # Named columns, because all columns after USING has another order in Spark.
        rows = f"""
WITH lowest AS (
  SELECT {keys}, min(rank) AS rank, array_agg(rank) AS ranks FROM {source} WHERE replicated GROUP BY {keys}, coalesce(shard, 0)
), once AS (
  SELECT {own}, {dialect.array(["rank"])} AS ranks FROM {source} WHERE NOT coalesce(replicated, FALSE)
  UNION ALL
  SELECT {own}, ranks FROM {source} JOIN lowest USING ({keys}, rank) WHERE replicated
)
SELECT {keys}, {joined}, array_sort(flatten(array_agg(ranks))) AS ranks FROM once GROUP BY {keys}"""
    return f"SELECT *{derived_sql(columns)}\nFROM ({rows})"


def steps_sql(columns: Sequence[Column], *, is_single_rank: bool) -> str:
    """Return the view ``steps``: one row per step, ranks joined; ``rank`` is the lowest that has the step."""
    if is_single_rank:
        return "SELECT * FROM raw_steps"
    joined = ", ".join(f"{_of_ranks(c)} AS {c.name}" for c in columns if c.merge in _AGGREGATES)
    return f"SELECT step, min(rank) AS rank, {joined} FROM raw_steps GROUP BY step"


def _of_ranks(column: Column) -> str:
    """Return a column of a step over its ranks; module, origin and GEMM of a first NaN or Inf are those of the lowest rank."""
    if column.name.startswith("nonfinite_"):
        return f"min_by({column.name}, CASE WHEN nonfinite_module IS NOT NULL THEN rank END)"
    return f"{_AGGREGATES[column.merge]}({column.name})"


def updates_sql(columns: Sequence[Column], dialect: Dialect, table: str = "updates", key: str = "module") -> str:
    """Return the view ``updates`` or ``parameters``: one row per step and tensor, what ranks looked at taken together."""
    joined = ", ".join(_joined(c, dialect) for c in columns if c.merge in _AGGREGATES)
    return f"SELECT step, {key}, {joined} FROM raw_{table} GROUP BY step, {key}"


def _joined(column: Column, dialect: Dialect) -> str:
    name, aggregate = column.name, _AGGREGATES[column.merge]
    if column.type == "list<int64>":
        bins = (f"CAST({aggregate}({dialect.element(name, i + 1)}) AS BIGINT)" for i in range(NUM_BINS))
        return f"CASE WHEN count({name}) > 0 THEN {dialect.array(bins)} END AS {name}"
    joined = f"{aggregate}({name})"
    if column.merge in ("sum", "mean"):
        joined = f"CAST({joined} AS {SQL_TYPES[column.type]})"
    return f"{joined} AS {name}"


def columns_in(table: str, files: RunFiles) -> list[Column]:
    """Return our columns and those that the files describe themselves (a metric that is not installed here)."""
    columns = {column.name: column for column in columns_of(table)}
    for schema in _schemas(files.of(table)):
        for column in columns_from(schema):
            if column.name not in columns and is_plain(column.name) and column.name not in taken_words():
                columns[column.name] = column
    return list(columns.values())


def _schemas(sources: Iterable[RunFile]) -> Iterable[pa.Schema]:
    """Return the schemas of files, one that several share once."""
    return {id(source.schema): source.schema for source in sources}.values()


def typed(columns: Sequence[Column], sources: Sequence[RunFile], dialect: Dialect) -> str:
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
