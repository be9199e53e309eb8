"""Display of the trainings of ``verify`` and ``bisect``: the plan with its cost, and progress."""

from __future__ import annotations

import shlex
import signal
import sys
import time
from pathlib import Path

import click

from fp8debug.store.read.run import Run
from fp8debug.trials import Script

from .output import echo


def announce(run: Run, script: Script, folder: Path, what: str, number: int) -> None:
    """Say what is about to be trained, before it is, and how long so many trainings may take."""
    command = shlex.join([*(script.launcher or ("python",)), str(script.path), *script.args])
    seconds = step_seconds(run)
    total = number * script.steps * (seconds or 0.0)
    cost = f"about {lasting(total)} by the steps of {run.name}, start-up apart; " if total >= 1 else ""
    echo(f"{what} of {script.steps} steps: {command}\n{cost}they go to {folder}", err=True)


def step_seconds(run: Run) -> float | None:
    """Return how long a step of the run usually took, its statistics apart where some steps have none."""
    query = "SELECT sampled, percentile_cont(0.5) WITHIN GROUP (ORDER BY seconds) AS seconds FROM steps WHERE seconds > 0"
    found = {row["sampled"]: row["seconds"] for row in run.sql(f"{query} GROUP BY sampled").to_pylist()}
    seconds: float | None = found.get(False, found.get(True))
    return seconds


def lasting(seconds: float) -> str:
    """Write a duration for people."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


class Trainings:
    """Shows trainings on stderr: a bar on a terminal, elsewhere a line each; SIGTERM ends them as Ctrl-C does."""

    def __enter__(self) -> Trainings:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        left = (TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, *left, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self._task = self._bar.add_task("training", total=None)
        self._bar.start()
        self._began = time.monotonic()
        # Not what SIGINT has: a shell has that ignored in what it runs in the background.
        self._handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        signal.signal(signal.SIGTERM, self._handler)
        self._bar.stop()
        if kind is KeyboardInterrupt:
            echo("what was trained is kept; the same command goes on", err=True)

    def __call__(self, done: int, total: int, what: str) -> None:
        """Say that a training begins: those done, of how many, and what it is."""
        if self._bar.disable:
            echo(f"[{done + 1}/{total}] {what} (after {lasting(time.monotonic() - self._began)})", err=True)
        self._bar.update(self._task, completed=done, total=total, description=what)

    def ask(self, question: str) -> None:
        """Ask a question in place of the bar.

        Raises:
            Abort: the answer is no.
        """
        self._bar.stop()
        click.confirm(question, default=True, abort=True, err=True)
        self._bar.start()
