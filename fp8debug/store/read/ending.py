"""End of a program while other threads still read runs.

DuckDB answers a question without the interpreter's lock, and takes the lock again in C++. In a daemon thread of a program that
ends, Python before 3.14 refuses it by unwinding the thread, through frames of C++ that nothing may pass: "FATAL: exception not
rethrown", and the process aborts. So the end of a program interrupts the questions of other threads, and answers them no more.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from typing import Protocol

#: The longest that the end of a program waits for all questions to stop, in seconds.
WAIT_S = 5.0


class Answering(Protocol):
    """Somebody who answers questions of several threads."""

    def stop_answering(self, until: float) -> None:
        """Interrupt what is being answered to other threads, and answer none of them from now on.

        Args:
            until: ``time.monotonic()`` at which to give up.
        """


_KNOWN: weakref.WeakSet[Answering] = weakref.WeakSet()
_IS_ENDING = threading.Event()


def stop_at_exit(answering: Answering) -> None:
    """Have the end of the program stop it."""
    _KNOWN.add(answering)


def end_thread_at_exit() -> None:
    """Go on while the program runs; once it is ending, in its main thread alone.

    Raises:
        SystemExit: another thread asks while the program is ending; it ends the thread without a word.
    """
    if _IS_ENDING.is_set() and threading.current_thread() is not threading.main_thread():
        raise SystemExit


@atexit.register
def _stop_all() -> None:
    _IS_ENDING.set()
    until = time.monotonic() + WAIT_S
    for one in list(_KNOWN):
        one.stop_answering(until)
