"""A thread for each tracker: what blocks or raises there never reaches the training, and is reported once."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable

from fp8debug.interruptions import is_ours
from fp8debug.trackers.base import Tracker, TrackerRun

#: Jobs that wait for a tracker; with more, what comes is dropped.
MAX_WAITING = 1024
#: Seconds that one call may take before the tracker is reported as hanging.
HANGS_S = 60.0

Job = Callable[[TrackerRun], object]


class TrackerThread:
    """Sends jobs to a tracker's run, in order; they wait until the run is open.

    Args:
        tracker: which one.
        run: its run where that is known; else it is looked for.
    """

    def __init__(self, tracker: Tracker, run: TrackerRun | None = None) -> None:
        self.name = tracker.name
        self._tracker, self._run = tracker, run
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_WAITING)
        self._is_open = threading.Event()
        self._since: float | None = None  # of the call under way
        self._num_looks = 0
        self._is_given_up = False  # what is left is for nobody: the report is deleted
        self._has_told: set[str] = set()
        self._thread = threading.Thread(target=self._work, name=f"fp8debug-{tracker.name}", daemon=True)
        self.look()
        self._thread.start()

    def look(self, *, is_due: bool = False) -> None:
        """Look for the run in the calling thread, the training's: some trackers know one run for each thread.

        Looks become rare where there is none, at the 1st, 2nd, 4th, 8th time.

        Args:
            is_due: a run should be open by now; report once that there is none.
        """
        if self._is_open.is_set():
            return
        self._num_looks += 1
        if self._num_looks & (self._num_looks - 1):
            return
        try:
            if self._run is None:
                self._run = self._tracker.find()
        except Exception as error:
            if not is_ours(error):
                raise
            self.tell("failed", f"{self.name}: {_words(error)}")
        if self._run is not None:
            self._is_open.set()
        elif is_due:
            self.tell("none", f"{self.name}: nothing is sent: no run is open here; open one first: {self._tracker.opening}")

    def put(self, job: Job) -> None:
        """Have a job done after those before it; returns at once."""
        since = self._since
        if since is not None and time.monotonic() - since > HANGS_S:
            self.tell("hangs", f"{self.name} does not answer; training goes on without it")
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            if self._is_open.is_set():
                self.tell("hangs", f"{self.name} does not answer; training goes on without it")

    def end(self, patience_s: float) -> None:
        """Have the jobs so far done, and give up after a time."""
        if not self._is_open.is_set():
            return
        try:
            self._jobs.put(None, timeout=patience_s)
        except queue.Full:
            pass
        self._thread.join(patience_s)
        if self._thread.is_alive():
            self._is_given_up = True
            self.tell("hangs", f"{self.name} does not answer: the last values and the report may be missing there")

    def tell(self, kind: str, text: str) -> None:
        """Print a line on stderr, once for each kind."""
        if kind not in self._has_told:
            self._has_told.add(kind)
            say(text)

    def _work(self) -> None:
        self._is_open.wait()
        assert self._run is not None
        while (job := self._jobs.get()) is not None and not self._is_given_up:
            self._since = time.monotonic()
            try:
                job(self._run)
            except Exception as error:  # in this thread nothing of the training runs
                self.tell("failed", f"{self.name}: {_words(error)}; not sent, training goes on")
            self._since = None


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300]


def say(text: str) -> None:
    """Print a line on stderr, where there is one."""
    if sys.stderr is not None:
        print(f"fp8debug: {text}", file=sys.stderr)
