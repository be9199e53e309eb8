"""Which threads are in a call of a compiled module: none may see the aliases that a repetition puts in the place of weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: Seconds after which a call waits no longer for a repetition, which takes milliseconds: it may wait for the call's own thread.
PATIENCE_S = 10.0


class RegionThreads:
    """Lets a repetition and calls of other threads exclude each other; neither waits for what the other waits for.

    A call waits for a repetition that another thread runs. A repetition waits for nobody: it is left out.
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
        """Begin a call, after a repetition that another thread runs."""
        thread = threading.get_ident()
        self._depths[thread] = self._depths.get(thread, 0) + 1  # a repetition that begins from now on is left out
        if self._repeats_in not in (None, thread):
            self._is_free.wait(PATIENCE_S)

    def leave(self) -> None:
        """End a call, also one whose beginning an exception of the program ended."""
        thread = threading.get_ident()
        depth = self._depths.pop(thread, 0) - 1
        if depth > 0:
            self._depths[thread] = depth

    @contextmanager
    def repeating(self) -> Iterator[bool]:
        """Run a repetition; False where another thread is in a call, or runs one, so that it must be left out."""
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
