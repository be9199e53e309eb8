"""Work that no reader waits for, in a thread that leaves the cores to the answers a reader waits for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

#: How much nicer such a thread is than the server: the scheduler gives it a tenth of what it gives an answer.
NICER = 10


def in_background(work: Callable[[], Result]) -> Result:
    """Return what a function returns in a thread of low priority; what it raises is raised here.

    Threads that it starts have the priority too. On Linux alone a thread has a priority of its own; elsewhere this is a call.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            if sys.platform == "linux":
                os.nice(NICER)
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]
