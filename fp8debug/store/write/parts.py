"""A thread of its own turns a writer's closed streams into parts: rows that waited for that would hold the pinned memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from fp8debug.store import stream
from fp8debug.store.write.lock import HEARTBEAT_S
from fp8debug.store.write.worker import Worker


class Parts:
    """The parts that are being made; the thread is there from the beginning, for Python 3.12 starts none while it exits.

    Args:
        failed: called in the thread when one could not be made; :meth:`check` raises why.

    Attributes:
        num_bytes: what those of ``stats`` take that are made.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self.num_bytes = 0
        self._failed = failed
        self._errors: list[BaseException] = []
        self._worker = Worker("fp8debug-parts", self._note, lambda: None, HEARTBEAT_S)

    def make(self, path: Path, part: Path, *, is_leftover: bool = False) -> None:
        """Begin to turn a stream into a part.

        Args:
            path: of the stream, which is deleted in the end.
            part: path.
            is_leftover: a killed process left it; what is no stream stays as it is, and the reader names it.
        """
        self._worker.put(partial(self._make, path, part, is_leftover))

    def wait(self, patience_s: float = math.inf) -> bool:
        """Wait for the parts so far; return False once none has been made for ``patience_s``."""
        return self._worker.wait(patience_s)

    def check(self) -> None:
        """Raise what the first part that could not be made failed by."""
        if self._errors:
            raise self._errors[0]

    def end(self, patience_s: float) -> None:
        """End the thread when the parts so far are made."""
        self._worker.end(patience_s)

    def _make(self, path: Path, part: Path, is_leftover: bool) -> None:
        with contextlib.suppress(*(pa.ArrowException,) if is_leftover else ()):
            stream.compact(path, part)
        if part.parent.name == "stats" and part.exists():
            self.num_bytes += part.stat().st_size

    def _note(self, error: BaseException) -> None:
        self._errors.append(error)
        self._failed()
