"""Runs read by Spark, for logs that one machine does not hold: the same views and the same queries in a Spark session.

The driver lists the files and reads their footers; executors read the rows, so that all of them must reach the folder. What a
query leaves that is small (the rows that rules suspect, one row a step, the modules) is fetched once, and further queries about
it are answered on the driver: a job of Spark costs half a second however little it does. Where the layout of the files helps:
docs/scale.md.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import reduce
from os import environ
from pathlib import Path
from tempfile import gettempdir
from typing import Any
from urllib.parse import unquote

import duckdb
import pyarrow as pa

from fp8debug.errors import UsageError
from fp8debug.store.locations import ObjectPath
from fp8debug.store.read.files import RunFile, RunFiles
from fp8debug.store.read.manifest import modules_table
from fp8debug.store.read.resumed import JoinedRun
from fp8debug.store.read.run import Run
from fp8debug.store.read.views import DUCKDB, SPARK, sites_sql
from fp8debug.store.schema import ARROW_TYPES

#: Rows that the driver fetches of a table, 100 to 1,000 bytes each; a larger table stays with the executors.
MAX_FETCHED = 200_000
#: Files of a run up to which a query is one stage with few tasks, planned once.
FEW_FILES = 64

_TYPES = {arrow: SPARK.types[name] for name, arrow in ARROW_TYPES.items()}
_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # As in DuckDB: a division by zero is no data.
    "spark.sql.ansi.enabled": "false",
    # Views of a hundred columns make methods that are too long to compile; without a limit each is tried first.
    "spark.sql.codegen.maxFields": "60",
}
#: From here on the vectorized reader, three times as fast, knows BYTE_STREAM_SPLIT (SPARK-56894).
_VECTORIZED = (4, 3)


def start(master: str | None = None) -> Any:
    """Return a Spark session, the running one if there is any.

    Args:
        master: as Spark takes it, ``local[2]``, ``local-cluster[2,1,1536]`` or ``spark://host:7077``; by default what Spark's own
            configuration says, else all cores of this machine.

    Raises:
        UsageError: there is no pyspark or no Java, or Spark does not start.
    """
    try:
        from pyspark.sql import SparkSession
    except ImportError:
        raise UsageError("Spark needs pyspark, which is not installed: pip install 'fp8debug[spark]'") from None
    if not shutil.which("java") and not environ.get("JAVA_HOME"):
        raise UsageError("Spark needs Java 17 or newer: apt install openjdk-17-jre-headless, or set JAVA_HOME")
    # Nothing here goes through pandas.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.warehouse.dir": str(Path(gettempdir()) / "fp8debug-spark"),  # else a folder where the user stands
    }
    builder = SparkSession.builder.appName("fp8debug").config(map=settings)
    try:
        session = (builder.master(master) if master else builder).getOrCreate()
    except Exception as error:  # pyspark and py4j have errors of their own
        raise UsageError(f"Spark does not start{f' on {master}' if master else ''}: {_first_line(error)}") from None
    session.sparkContext.setLogLevel("FATAL")
    return session


class _OnSpark(Run):
    """A run whose views lie in a Spark session."""

    keeps_whole = False
    _has_all_rows = False  # the files may be where only executors reach them
    _dialect = SPARK
    _session: Any
    _held: dict[str, Any]

    def _create_views(self, files: RunFiles) -> None:
        for frame in self._held.values():
            frame.unpersist()
        self._held = {}
        self._num_scans = 0
        #: Tables that the driver has, and those that it fetches when it is first asked about them.
        self._here, self._fetchable = {"modules"}, {"steps", "events"}
        for name, value in {**_SETTINGS, **_planning(len(self._parts), self._session.version)}.items():
            self._session.conf.set(name, value)
        self._frame(
            "CREATE OR REPLACE TEMPORARY FUNCTION isfinite(x DOUBLE) RETURNS BOOLEAN RETURN abs(x) < CAST('Infinity' AS DOUBLE)"
        )
        super()._create_views(files)
        self._connection.register("modules", modules_table(self.modules))

    def _create(self, name: str, query: str) -> None:
        self._frame(query).createOrReplaceTempView(name)

    def _register(self, name: str, rows: pa.Table) -> None:
        self._session.createDataFrame(rows).createOrReplaceTempView(name)

    def _parts_sql(self, parts: Sequence[RunFile]) -> str:
        self._num_scans += 1
        name = f"parts_{self._num_scans}"
        groups: dict[str | None, list[str]] = {}
        for source in parts:
            groups.setdefault(_columns(source.schema), []).append(_address(source.path))
        # Without the columns Spark starts a job to look for them.
        frames = [
            (self._session.read.schema(columns) if columns else self._session.read).parquet(*paths)
            for columns, paths in groups.items()
        ]
        reduce(lambda one, other: one.unionByName(other, True), frames).createOrReplaceTempView(name)
        return name

    def hold(self, tables: Mapping[str, str]) -> None:
        """Keep the answers to queries as tables: on the driver those that are small, with the executors the others."""
        for name, query in tables.items():
            if self._are_here(query):
                super().hold({name: query})
                self._here.add(name)
            else:
                self._here.discard(name)
                self._held[name] = self._frame(query).persist()
                self._held[name].createOrReplaceTempView(name)
                self._fetchable.add(name)

    def sites_of(self, rows: str, columns: Collection[str]) -> str:
        """Return the text of ``sites`` made of a table, for where that table is."""
        slots = [column for column in self._slots if column.name in columns]
        dialect = DUCKDB if self._is_here(rows) else SPARK
        return sites_sql(slots, dialect, is_single_rank=len(self.ranks) == 1, source=rows)

    def _query(self, query: str, params: Sequence[object] | Mapping[str, object] | None) -> pa.Table:
        if not re.match(r"\s*(SELECT|WITH)\b", query, re.IGNORECASE):
            raise UsageError(f"not one SELECT: {query.strip()[:80]!r}")
        if self._are_here(query):
            try:
                return super()._query(query, params)
            except duckdb.Error:
                pass  # another table, or words that Spark alone knows
        try:
            if isinstance(params, Mapping):
                return self._fetch(self._frame(re.sub(r"\$(\w+)", r":\1", query), dict(params)))
            return self._fetch(self._frame(query, list(params or ())))
        except _DamagedError as error:
            self._damaged.add(error.path)
            self._open()
            return self._query(query, params)

    def _first_row(self, query: str) -> tuple[Any, ...] | None:
        rows = self._query(query, None).to_pylist()
        return tuple(rows[0].values()) if rows else None

    def _are_here(self, query: str) -> bool:
        """Return whether the driver has, or now has, all tables that a query names."""
        names = set(re.findall(r"\b(?:FROM|JOIN)\s+(\w+)", query, re.IGNORECASE))
        names -= set(re.findall(r"\b(\w+)\s+AS\s*\(\s*SELECT\b", query, re.IGNORECASE))
        return bool(names) and names <= self._here | self._fetchable and all(map(self._is_here, names))

    def _is_here(self, name: str) -> bool:
        if name in self._fetchable:
            self._fetchable.discard(name)
            rows = self._fetch(self._session.table(name).limit(MAX_FETCHED + 1))
            if rows.num_rows <= MAX_FETCHED:
                self._connection.register(name, rows)
                self._here.add(name)
        return name in self._here

    def _frame(self, query: str, args: Any = None) -> Any:
        try:
            return self._session.sql(query, args) if args else self._session.sql(query)
        except Exception as error:  # pyspark and py4j have errors of their own
            raise UsageError(f"the query failed: {_first_line(error)}") from error

    def _fetch(self, frame: Any) -> pa.Table:
        try:
            return frame.toArrow()
        except Exception as error:  # those of pyspark; it names the file, encoded as in an address
            text = unquote(str(error))
            damaged = next((part for part in self._parts if f"{part.absolute()}." in text), None)
            if "FAILED_READ_FILE" in text and damaged:
                raise _DamagedError(damaged) from error
            raise UsageError(f"the query failed: {_first_line(error)}") from error


class _DamagedError(Exception):
    """A part that cannot be read to its end."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path


class SparkRun(_OnSpark):
    """A run directory, read by Spark.

    Args:
        path: the run's folder, which every executor must reach.
        session: of ``start()``, or one's own; the run keeps its views in a session of its own beside it.
    """

    def __init__(self, path: str | Path, session: Any) -> None:
        self._session, self._held = session.newSession(), {}
        super().__init__(path)


class SparkJoinedRun(_OnSpark, JoinedRun):
    """A run and its resumed parts in folders of their own, read by Spark as one.

    Args:
        paths: the folders.
        session: as of ``SparkRun``.
    """

    def __init__(self, paths: Sequence[str | Path], session: Any) -> None:
        self._session, self._held = session.newSession(), {}
        JoinedRun.__init__(self, paths)


def open_on_spark(paths: Sequence[str | Path], session: Any) -> Run:
    """Open one run, or a run with its resumed parts as one, on Spark."""
    return SparkRun(paths[0], session) if len(paths) == 1 else SparkJoinedRun(paths, session)


def _address(path: Path) -> str:
    """Return a file's address for Hadoop, its glob characters escaped."""
    text = str(path) if isinstance(path, ObjectPath) else f"file:{path.absolute()}"
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", re.sub(r"^s3://", "s3a://", text))


def _planning(num_files: int, version: str) -> dict[str, str]:
    """Return the settings that hang on the run's size and on Spark's version."""
    is_large = num_files > FEW_FILES
    return {
        "spark.sql.adaptive.enabled": str(is_large).lower(),
        "spark.sql.shuffle.partitions": str(min(num_files, 2000) if is_large else 2),
        "spark.sql.parquet.enableVectorizedReader": str(tuple(map(int, version.split(".")[:2])) >= _VECTORIZED).lower(),
    }


def _columns(schema: pa.Schema) -> str | None:
    """Return a file's columns as Spark declares them; None where one has a type that we do not write."""
    types = [_TYPES.get(field.type) for field in schema]
    if None in types:
        return None
    return ", ".join(f"`{name.replace('`', '``')}` {text}" for name, text in zip(schema.names, types, strict=True))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
