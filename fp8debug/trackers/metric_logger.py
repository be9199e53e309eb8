"""Statistics of Transformer Engine's debug tools (nvdlfw_inspect) into trackers: a ``BaseLogger`` for its ``MetricLogger``.

    import nvdlfw_inspect.api as debug_api
    from fp8debug.trackers.metric_logger import metric_logger

    debug_api.initialize(config_file=..., feature_dirs=[...], statistics_logger=metric_logger("wandb"))

Transformer Engine itself writes to a file or to a ``SummaryWriter`` that it is given.
"""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from typing import Any

from fp8debug.errors import UsageError
from fp8debug.trackers.base import PREFIX, TrackerRun, trackers_of
from fp8debug.trackers.sending import TrackerThread

#: Seconds that the end of a program waits for each tracker.
PATIENCE_S = 30.0


def metric_logger(to: object) -> Any:
    """Return a logger for ``nvdlfw_inspect.api.initialize(statistics_logger=...)`` or ``MetricLogger.add_logger``.

    Ranks other than 0 write nothing. The numbers are called ``fp8debug/te/NAME``; those of one iteration go together.

    Args:
        to: as of :func:`fp8debug.watch`.

    Raises:
        UsageError: a tracker is unknown or not installed, or nvdlfw_inspect is not.
    """
    trackers = trackers_of(to)
    try:
        from nvdlfw_inspect.logging import BaseLogger
    except ImportError:
        raise UsageError(
            "metric_logger() needs nvdlfw_inspect, the debug tools of Transformer Engine: pip install nvdlfw-inspect"
        ) from None

    class TrackerLogger(BaseLogger):  # type: ignore[misc]  # the library has no types
        """Gathers the numbers of an iteration and hands them to the threads of the trackers.

        What is left is sent when nobody refers to the logger any more, as after ``nvdlfw_inspect.api.end_debug()``, and at
        exit.
        """

        def __init__(self) -> None:
            threads = [TrackerThread(tracker, run) for tracker, run in trackers] if _is_first_rank() else []
            self._iterations = _Iterations(threads)
            self._end = weakref.finalize(self, self._iterations.close)

        def log_scalar(self, name: str, value: Any, iteration: int, **kwargs: Any) -> None:
            """Take a number; a tensor is read in the tracker's thread, so that nothing here waits for the device."""
            self._iterations.add(f"{PREFIX}te/{name}", value, iteration)

        def close(self) -> None:
            """Send what is left, bounded in time."""
            self._end()

    return TrackerLogger()


class _Iterations:
    """The numbers of the iteration under way; those of one that has ended are with the threads.

    Args:
        threads: of the trackers.
    """

    def __init__(self, threads: list[TrackerThread]) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self._iteration = -1
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any, iteration: int) -> None:
        """Take a number; that of another iteration ends the one under way."""
        with self._lock:
            if iteration != self._iteration:
                self._hand_on()
                self._iteration = iteration
            self._values[name] = value

    def close(self) -> None:
        """Send what is left, bounded in time."""
        with self._lock:
            self._hand_on()
        for thread in self._threads:
            thread.end(PATIENCE_S)

    def _hand_on(self) -> None:
        values, self._values = self._values, {}
        for thread in self._threads if values else ():
            thread.look(is_due=True)
            thread.put(partial(_send, self._iteration, values))


def _send(step: int, values: dict[str, Any], run: TrackerRun) -> None:
    run.scalars(step, {name: float(value) for name, value in values.items()})


def _is_first_rank() -> bool:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
