"""A thread that does a writer's jobs one after another; whoever waits for it gives up when nothing gets done any more."""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from fp8debug.store import stream
from fp8debug.store.write.lock import HEARTBEAT_S

Job = Callable[[], object]
_LOOK_S = 0.1
#: How long a job lets other threads run, how long it works before, and how much longer while so many jobs wait.
_BREATH_S, _WORK_S, _BREATHLESS, _LONGER = 2e-4, 1.5e-4, 4, 4


class Worker:
    """The thread; it ends with :meth:`end`, or with the process.

    Args:
        name: of the thread.
        failed: called in the thread with whatever a job raises; the next job is done all the same.
        beat: called in the thread, between jobs, about every ``beat_s``.
        beat_s: seconds.
    """

    def __init__(self, name: str, failed: Callable[[BaseException], None], beat: Job, beat_s: float) -> None:
        self._failed, self._beat, self._beat_s = failed, beat, beat_s
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._num_done = 0
        self._breathed = 0.0
        self._awaited: list[None] = []  # one for each thread that waits
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """True if the thread is there."""
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """True if the caller is a job."""
        return threading.current_thread() is self._thread

    def put(self, job: Job) -> None:
        """Have a job done after those that were put before; returns at once."""
        self._jobs.put(job)

    def breathe(self) -> None:
        """Let other threads have the interpreter, where the caller is a job that has worked for a while; else do nothing.

        A thread that wants the interpreter is given it after 5 ms otherwise, which is long for the step of a training. A job
        that somebody waits for does not keep him waiting.
        """
        if self.is_current and not self._awaited:
            is_pressed = self._jobs.qsize() >= _BREATHLESS
            if time.perf_counter() - self._breathed >= _WORK_S * (_LONGER if is_pressed else 1):
                time.sleep(_BREATH_S)
                self._breathed = time.perf_counter()

    def wait(self, patience_s: float) -> bool:
        """Wait for the jobs put so far; return False once no job has ended for ``patience_s``, or the thread is gone."""
        done = threading.Event()
        self._jobs.put(done.set)
        return self._waited(done.wait, patience_s)

    def end(self, patience_s: float) -> bool:
        """Have the jobs put so far done and end the thread; returns as :meth:`wait` does."""
        self._jobs.put(None)
        return self._waited(self._has_ended, patience_s)

    def _has_ended(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _waited(self, is_over: Callable[[float], bool], patience_s: float) -> bool:
        seen, since = self._num_done, time.monotonic()
        self._awaited.append(None)
        try:
            while not is_over(_LOOK_S):
                if not self._thread.is_alive():
                    return is_over(0)
                if self._num_done != seen:
                    seen, since = self._num_done, time.monotonic()
                elif time.monotonic() - since > patience_s:
                    return False
            return True
        finally:
            self._awaited.pop()

    def _work(self) -> None:
        try:
            last_beat = time.monotonic()
            while True:
                try:
                    job = self._jobs.get(timeout=self._beat_s)
                except queue.Empty:
                    job = _nothing
                if job is None:
                    return
                if time.monotonic() - last_beat >= self._beat_s:
                    self._guarded(self._beat)
                    last_beat = time.monotonic()
                self._guarded(job)
                self._num_done += 1
        except BaseException as error:  # whatever ends this thread, training goes on and it is reported once
            self._failed(error)

    def _guarded(self, job: Job) -> None:
        try:
            job()
        except Exception as error:  # a thread's traceback helps nobody, and training must go on
            self._failed(error)


def _nothing() -> None:
    pass


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
