"""TensorBoard: the ``SummaryWriter`` that the training has open (of torch or tensorboardX), or event files of an export."""

from __future__ import annotations

import gc
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.trackers.base import PREFIX, TRACKERS, Tracker, TrackerRun, is_class, markdown_table

_MODULES = ("torch.utils.tensorboard", "tensorboardX")


class TensorBoardRun(TrackerRun):
    """An open writer.

    Args:
        writer: a ``SummaryWriter``.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers at their step, and have them written to the disk."""
        for name, value in values.items():
            self._open().add_scalar(name, value, step)
        self._open().flush()

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Write a text at the step."""
        self._open().add_text(f"{PREFIX}findings", f"**{severity}** {title}: {text}", step)
        self._open().flush()

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table as text."""
        self._open().add_text(name, markdown_table(columns, rows), step)
        self._open().flush()

    def report(self, path: Path) -> None:
        """Copy the page beside the event files."""
        shutil.copyfile(path, Path(self._open().log_dir) / f"fp8debug-{path.name}")

    def close(self) -> None:
        """Close the writer."""
        self._writer.close()

    def _open(self) -> Any:
        if not is_open(self._writer):  # it would open another file
            raise RuntimeError("the SummaryWriter was closed first: close the watch, or the logger of metric_logger(), before it")
        return self._writer


class EventFiles(TrackerRun):
    """Event files written without torch, by TensorBoard itself.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._writer = EventFileWriter(str(folder))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers at their step."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._add(step, Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()]))

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Write a text at the step."""
        self._text(f"{PREFIX}findings", f"**{severity}** {title}: {text}", step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table as text."""
        self._text(name, markdown_table(columns, rows), step)

    def report(self, path: Path) -> None:
        """Copy the page beside the event files."""
        shutil.copyfile(path, self._folder / f"fp8debug-{path.name}")

    def close(self) -> None:
        """Close the file."""
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        from tensorboard.plugins.text.summary_v2 import text_pb

        self._add(step, text_pb(tag, text))

    def _add(self, step: int, summary: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


class TensorBoard(Tracker):
    """TensorBoard."""

    name, module, package = "tensorboard", "tensorboard", "tensorboard"
    opening = "torch.utils.tensorboard.SummaryWriter(DIR), or give the writer itself: to=(writer,)"

    def find(self) -> TrackerRun | None:
        """Return the writer that is open, the newest of several; all objects of the process are looked at."""
        if not any(module in sys.modules for module in _MODULES):
            return None
        kinds = {kind for kind in set(map(type, gc.get_objects())) if _is_writer_class(kind)}
        found = [one for one in gc.get_objects() if type(one) in kinds and is_open(one)] if kinds else []
        return TensorBoardRun(found[-1]) if found else None

    def wrap(self, given: object) -> TrackerRun | None:
        """Take a ``SummaryWriter``."""
        return TensorBoardRun(given) if _is_writer_class(type(given)) else None

    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        """Write event files into a folder; TensorBoard has no projects."""
        return EventFiles(folder)


def _is_writer_class(kind: type[Any]) -> bool:
    return is_class(kind, "SummaryWriter", *_MODULES)


def is_open(writer: Any) -> bool:
    """Return whether a ``SummaryWriter`` has files; a closed one opens others when it is written to."""
    return getattr(writer, "all_writers", None) is not None


TRACKERS.add("tensorboard", TensorBoard())
