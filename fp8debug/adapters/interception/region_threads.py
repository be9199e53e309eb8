"""Mutual exclusion of repetitions and other threads' calls of compiled modules.

A repetition puts aliases in the place of a module's weights. A call of another thread would compute with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Longest wait of a call for a repetition, in seconds. A repetition takes milliseconds, unless it waits for that very thread.
PATIENCE_S = 10.0


class RegionThreads:
    """Mutual exclusion of repetitions and other threads' calls, without deadlock.

    A call waits for a repetition of another thread. A repetition never waits: it is skipped while another thread is in a call.
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # calls that each thread is in, by its id
        self._repeats_in: int | None = None
        self._is_free = threading.Event()
        self._is_free.set()

    @property
    def is_repeating(self) -> bool:
        """True in the thread that runs a repetition."""
        return self._repeats_in == threading.get_ident()

    def enter(self) -> None:
        """Begin a call; wait for a repetition of another thread, at most ``PATIENCE_S``."""
        thread = threading.get_ident()
        self._depths[thread] = self._depths.get(thread, 0) + 1  # repetitions that begin from now on are skipped
        if self._repeats_in not in (None, thread):
            self._is_free.wait(PATIENCE_S)

    def leave(self) -> None:
        """End a call; without effect if an exception of the program ended :meth:`enter` before it counted the call."""
        thread = threading.get_ident()
        depth = self._depths.pop(thread, 0) - 1
        if depth > 0:
            self._depths[thread] = depth

    @contextmanager
    def repeating(self) -> Iterator[bool]:
        """Run a repetition; yields False if it must be skipped, because another thread is in a call or repeats a module."""
        thread = threading.get_ident()
        if self._repeats_in is not None:
            yield False
            return
        self._is_free.clear()
        self._repeats_in = thread
        try:
            yield not any(other != thread for other in list(self._depths))
        finally:
            self._repeats_in = None
            self._is_free.set()
