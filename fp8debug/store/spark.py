"""Runs read by Spark, for logs that one machine does not hold: the same views and the same queries in a Spark session.

The driver lists the files and reads their footers; executors read the rows, so that all of them must reach the folder. Where
the layout of the files helps: docs/scale.md.
"""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import environ
from pathlib import Path
from typing import Any

import pyarrow as pa

from fp8debug.errors import UsageError
from fp8debug.store.files import Source
from fp8debug.store.joined import JoinedRun
from fp8debug.store.places import ObjectPath
from fp8debug.store.run import Run
from fp8debug.store.views import SPARK

#: Results of all queries are small; of a table of rows the largest that a driver of 1 GB takes.
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    # As in DuckDB: a division by zero is no data.
    "spark.sql.ansi.enabled": "false",
    # The vectorized reader of many versions does not know BYTE_STREAM_SPLIT (SPARK-56894).
    "spark.sql.parquet.enableVectorizedReader": "false",
    # Views of a hundred columns make methods that are too long to compile; without a limit each is tried first.
    "spark.sql.codegen.maxFields": "60",
    "spark.sql.shuffle.partitions": "8",
}


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
    builder = SparkSession.builder.appName("fp8debug").config(map=_SETTINGS)
    try:
        session = (builder.master(master) if master else builder).getOrCreate()
    except Exception as error:  # pyspark and py4j have errors of their own
        raise UsageError(f"Spark does not start{f' on {master}' if master else ''}: {_first_line(error)}") from None
    session.sparkContext.setLogLevel("ERROR")
    return session


class _OnSpark(Run):
    """A run whose views lie in a Spark session."""

    _dialect = SPARK
    _session: Any

    def _create_views(self, files: Any) -> None:
        self._num_scans = 0
        self._ask(
            "CREATE OR REPLACE TEMPORARY FUNCTION isfinite(x DOUBLE) RETURNS BOOLEAN RETURN abs(x) < CAST('Infinity' AS DOUBLE)"
        )
        super()._create_views(files)

    def _create(self, name: str, query: str) -> None:
        self._ask(query).createOrReplaceTempView(name)

    def _register(self, name: str, rows: pa.Table) -> None:
        self._session.createDataFrame(rows).createOrReplaceTempView(name)

    def _parts_sql(self, parts: Sequence[Source]) -> str:
        self._num_scans += 1
        name = f"parts_{self._num_scans}"
        reader = self._session.read.option("mergeSchema", str(len({source.schema for source in parts}) > 1).lower())
        reader.parquet(*(_address(source.path) for source in parts)).createOrReplaceTempView(name)
        return name

    def _keep(self, name: str, query: str) -> None:
        self._ask(query).persist().createOrReplaceTempView(name)

    def _query(self, query: str, params: Sequence[object] | Mapping[str, object] | None) -> pa.Table:
        if not re.match(r"\s*(SELECT|WITH)\b", query, re.IGNORECASE):
            raise UsageError(f"not one SELECT: {query.strip()[:80]!r}")
        if isinstance(params, Mapping):
            return self._ask(re.sub(r"\$(\w+)", r":\1", query), dict(params), lambda answer: answer.toArrow())
        return self._ask(query, list(params or ()), lambda answer: answer.toArrow())

    def _ask(self, query: str, args: Any = None, then: Callable[[Any], Any] = lambda answer: answer) -> Any:
        try:
            return then(self._session.sql(query, args) if args else self._session.sql(query))
        except Exception as error:  # pyspark and py4j have errors of their own
            raise UsageError(f"the query failed: {_first_line(error)}") from error


class SparkRun(_OnSpark):
    """A run directory, read by Spark.

    Args:
        path: the run's folder, which every executor must reach.
        session: of ``start()``, or one's own; the run keeps its views in a session of its own beside it.
    """

    def __init__(self, path: str | Path, session: Any) -> None:
        self._session = session.newSession()
        super().__init__(path)


class SparkJoinedRun(_OnSpark, JoinedRun):
    """A run and its resumed parts in folders of their own, read by Spark as one.

    Args:
        paths: the folders.
        session: as of ``SparkRun``.
    """

    def __init__(self, paths: Sequence[str | Path], session: Any) -> None:
        self._session = session.newSession()
        JoinedRun.__init__(self, paths)


def open_on_spark(paths: Sequence[str | Path], session: Any) -> Run:
    """Open one run, or a run with its resumed parts as one, on Spark."""
    return SparkRun(paths[0], session) if len(paths) == 1 else SparkJoinedRun(paths, session)


def _address(path: Path) -> str:
    """Return a file's address for Hadoop, its glob characters escaped."""
    text = str(path) if isinstance(path, ObjectPath) else f"file:{path.absolute()}"
    return re.sub(r"([*?\[\]{}\\])", r"\\\1", re.sub(r"^s3://", "s3a://", text))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
