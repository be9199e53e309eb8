"""The options that say what reads a run: DuckDB here, or Spark on a cluster."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.store.read.run import Run

from .console import open_run, warn

ENGINES = ("duckdb", "spark")


def engine_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--engine`` and ``--master``, and the argument ``open_run`` that opens runs as they say."""

    @click.option("--engine", type=click.Choice(ENGINES), default="duckdb", show_default=True, help="What reads the logs.")
    @click.option("--master", metavar="URL", help="Spark's, such as local-cluster[2,1,1536] or spark://HOST:7077.")
    @wraps(command)
    def opening(*args: Any, engine: str, master: str | None, **options: Any) -> Any:
        if engine == "spark":
            return command(*args, open_run=partial(_on_spark, master), **options)
        if master is not None:
            raise UsageError("--master is Spark's: add --engine spark")
        return command(*args, open_run=open_run, **options)

    return opening


def _on_spark(master: str | None, *paths: str) -> Run:
    from fp8debug.store.spark import open_on_spark, start

    run = open_on_spark(paths, start(master))
    for problem in run.problems:
        warn(problem)
    return run
