"""Interface of a tracker (W&B, TensorBoard, ...): find the run that the training has open there, and write to it.

A new tracker is one file, ``to_NAME.py``. Its library is imported in functions only, and while a training is watched only if the
training has imported it: a run that fp8debug writes to is one that the training opened.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from fp8debug.errors import UsageError, suggest
from fp8debug.registry import Registry

#: All names in a tracker begin with it.
PREFIX = "fp8debug/"


class TrackerRun(ABC):
    """A tracker's run that is open. Methods may block and raise: they are called in a thread of their own."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a sampled step.

        Args:
            step: optimizer step.
            values: by name, at most twenty.
        """

    @abstractmethod
    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Report a finding.

        Args:
            step: first step that shows it.
            title: its code and name.
            text: one line.
            severity: ``warning`` or ``error``.
        """

    @abstractmethod
    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table of strings, numbers and None.

        Args:
            name: of the table.
            columns: in order.
            rows: value by column.
            step: last step.
        """

    @abstractmethod
    def report(self, path: Path) -> None:
        """Keep a report.

        Args:
            path: an HTML file, which is deleted afterwards.
        """

    @abstractmethod
    def close(self) -> None:
        """End a run that :meth:`Tracker.create` opened; called for no other."""


class Tracker(ABC):
    """One tracker.

    Attributes:
        name: as in ``watch(..., to=name)``.
        module: name under which its library is imported.
        package: name under which its library is installed.
        opening: call that opens a run, for messages.
    """

    name: ClassVar[str]
    module: ClassVar[str]
    package: ClassVar[str]
    opening: ClassVar[str]

    @abstractmethod
    def find(self) -> TrackerRun | None:
        """Return the run that the training has open, None without one; called in the training's thread."""

    @abstractmethod
    def wrap(self, given: object) -> TrackerRun | None:
        """Return the run that an object of the tracker's library stands for; None if it is no such object."""

    @abstractmethod
    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        """Open a new run, for ``fp8debug export``.

        Args:
            name: of the run.
            project: that it belongs to, where the tracker has projects.
            folder: of the files, where the tracker writes files.
        """

    def require(self, otherwise: str) -> None:
        """Check that the library is installed.

        Args:
            otherwise: what else the user may do, in the words of the option that names the tracker.

        Raises:
            UsageError: it is not.
        """
        if find_spec(self.module.partition(".")[0]) is None:
            raise UsageError(f"{self.name} is not installed: pip install {self.package}, or {otherwise}")


TRACKERS: Registry[Tracker] = Registry("tracker")


def trackers_of(to: object, option: str = "to=") -> list[tuple[Tracker, TrackerRun | None]]:
    """Return the trackers that ``watch(to=...)`` names, each with its run where an object was given for it.

    Args:
        to: a name, an object such as a ``SummaryWriter`` or what ``wandb.init()`` returned, or a sequence of these.
        option: what the user calls it.

    Raises:
        UsageError: neither the name nor the class of one is known, or a library is not installed.
    """
    known = TRACKERS.names()
    found: list[tuple[Tracker, TrackerRun | None]] = []
    for entry in to if isinstance(to, list | tuple | set) else (to,):
        if isinstance(entry, str):
            if entry not in TRACKERS:
                raise UsageError(f"{option} names no tracker: {entry!r}: {suggest(entry, known)}")
            tracker = TRACKERS.get(entry)
            tracker.require(f"leave {entry!r} out of {option}")
            if tracker not in [other for other, _ in found]:
                found.append((tracker, None))
            continue
        wrapped = next(((t, run) for t in TRACKERS if (run := t.wrap(entry)) is not None), None)
        if wrapped is None:
            raise UsageError(f"{option} takes names ({', '.join(known)}) or an open run of theirs, got {type(entry).__name__}")
        found.append(wrapped)
    return found


def is_class(kind: type[Any], name: str, *modules: str) -> bool:
    """Return whether a class has that name in one of some modules, or is derived from one that has."""
    return any(c.__name__ == name and str(c.__module__).startswith(modules) for c in kind.__mro__)


def markdown_table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table in Markdown; text from a run stays in its cell."""
    lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
    lines += [" | ".join(_cell(row.get(column)) for column in columns) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def _cell(value: object) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def set_default(variable: str, value: str) -> None:
    """Set an environment variable that the user has not set."""
    os.environ.setdefault(variable, value)
