"""A training's live part: numbers of each sampled step to its trackers, findings as alarms, and a report at the end.

The training's thread says that a step has ended, and nothing else. The judge reads the run's files in a process of its own
(:mod:`fp8debug.trackers.judging`); a thread here passes its answers on, and each tracker has a thread of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8debug.errors import UsageError
from fp8debug.escaping import one_line
from fp8debug.trackers.base import PREFIX, Tracker, TrackerRun, trackers_of
from fp8debug.trackers.sending import TrackerThread, say

if TYPE_CHECKING:
    from fp8debug.rules.base import Finding

#: Seconds that the end of a training waits for the judge and the report, and then for each tracker.
JUDGE_PATIENCE_S, TRACKER_PATIENCE_S = 60.0, 30.0
#: Seconds for the judge to end by itself.
STOP_S = 2.0
#: Steps in a row that the judge may fail to read before that is reported.
MAX_PROBLEMS = 3

#: The current directory is not on the judge's path: the training's may hold modules named like others.
_PROGRAM = "import sys; sys.path[0] = sys.argv.pop(1); from fp8debug.trackers.judging import main; sys.exit(main())"
#: Variables that make a Python process record, or print what it imports.
_NOT_FOR_THE_JUDGE = ("FP8DEBUG", "PYTHONVERBOSE", "PYTHONPROFILEIMPORTTIME", "PYTHONINSPECT")

_FOLDERS: list[Path] = []  # of the watches that are open in this process: names of all but the first begin with theirs


def check_live(
    to: object, on_finding: object, options: tuple[str, str] = ("to=", "on_finding=")
) -> list[tuple[Tracker, TrackerRun | None]]:
    """Look at the arguments ``to`` and ``on_finding`` of :func:`fp8debug.watch`; return the trackers.

    Args:
        to: the trackers.
        on_finding: what is called with each finding.
        options: what the user calls these two.

    Raises:
        UsageError: one cannot be used, or what judges is not installed.
    """
    if on_finding is not None and not callable(on_finding):
        raise UsageError(f"on_finding must be a function of one Finding, got {on_finding!r}")
    found = trackers_of(to, options[0]) if to is not None and to != () and to != [] else []
    if (found or on_finding is not None) and find_spec("duckdb") is None:
        raise UsageError(f"{' and '.join(options)} need duckdb, which judges the run: pip install duckdb")
    return found


class Live:
    """The live part of one watch; made where something is to be told, by the rank that tells it.

    Args:
        path: the run directory.
        trackers: of :func:`check_live`.
        on_finding: called in a thread of its own with each new warning or error.
    """

    def __init__(
        self, path: Path, trackers: Sequence[tuple[Tracker, TrackerRun | None]], on_finding: Callable[[Finding], object] | None
    ) -> None:
        self._path = path.absolute()
        self._pid = os.getpid()
        _FOLDERS.append(self._path)
        self._prefix = PREFIX if len(_FOLDERS) == 1 else f"{PREFIX}{self._path.name}/"
        self._on_finding = on_finding
        self._findings: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._pending: int | None = None  # step that is to be judged
        self._report: Path | None = None  # where to write it, once the run has ended
        self._has_ended = self._has_failed = False
        self._num_problems = 0  # one after the other
        self._process = self._start()
        self._trackers = [TrackerThread(tracker, run) for tracker, run in trackers]
        self._threads = [threading.Thread(target=self._work, name="fp8debug-live", daemon=True)]
        if on_finding is not None:
            self._threads.append(threading.Thread(target=self._call, name="fp8debug-on-finding", daemon=True))
        for thread in self._threads:
            thread.start()

    def look(self, *, is_due: bool = False) -> None:
        """In the training's thread: look for the runs of trackers that have none yet."""
        for tracker in self._trackers:
            tracker.look(is_due=is_due)

    def note_step(self, step: int) -> None:
        """Have the run judged: the rows of a step are with the operating system. Steps that come meanwhile are judged at once."""
        with self._changed:
            self._pending = step
            self._changed.notify_all()

    def leave(self) -> None:
        """Let go of everything in a forked child, where no thread of this runs."""
        self._process.returncode = 0

    def close(self) -> None:
        """Send what the whole run shows, and the report; the run's files are complete. Bounded in time."""
        if os.getpid() != self._pid or self._has_ended:
            return
        with tempfile.TemporaryDirectory(prefix="fp8debug-", ignore_cleanup_errors=True) as folder:
            with self._changed:
                self._has_ended = True
                self._report = Path(folder) / "report.html"
                self._changed.notify_all()
            self._threads[0].join(JUDGE_PATIENCE_S)
            if self._threads[0].is_alive():
                self._fail(f"the judge took more than {JUDGE_PATIENCE_S:.0f} s at the end")
            self._stop()
            self._findings.put(None)
            for thread in self._threads[1:]:
                thread.join(TRACKER_PATIENCE_S)
                if thread.is_alive():
                    say("on_finding does not return: findings may be missing")
            for tracker in self._trackers:
                tracker.end(TRACKER_PATIENCE_S)
        _FOLDERS.remove(self._path)

    def _start(self) -> subprocess.Popen[str]:
        environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_THE_JUDGE}
        root = str(Path(__file__).parents[2])
        return subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, root, str(self._path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
            start_new_session=True,  # Ctrl-C ends the training, which then ends the judge
        )

    def _stop(self) -> None:
        """End the judge's process."""
        process = self._process
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        if process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # the report's process too
            process.wait()
        self._threads[0].join(STOP_S)  # which now reads the end of it
        if process.stdout is not None and not self._threads[0].is_alive():
            process.stdout.close()

    def _work(self) -> None:
        """Ask the judge, one request after the other, until the run has ended and is judged."""
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._pending is not None or self._has_ended)
                    step, self._pending = self._pending, None
                    is_last = step is None
                if is_last:
                    assert self._report is not None
                    self._pass_on(self._ask({"finish": str(self._report) if self._trackers else None}), is_last=True)
                    return
                self._pass_on(self._ask({"step": step}), is_last=False)
        except Exception as error:  # in this thread nothing of the training runs
            self._fail(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"[:300])

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the judge ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        self._num_problems = self._num_problems + 1 if "problem" in answer else 0
        if self._num_problems >= (1 if "finish" in request else MAX_PROBLEMS):
            self._fail(str(answer["problem"]))
        return {} if self._num_problems else answer

    def _pass_on(self, answer: Mapping[str, Any], *, is_last: bool) -> None:
        for step, values in answer.get("steps", {}).items():
            named = {f"{self._prefix}{name}": value for name, value in values.items()}
            self._put(partial(_scalars, int(step), named))
        for values in answer.get("findings", ()):
            if self._on_finding is not None:
                self._findings.put(values)
            title = f"{values['code']} {values['name']}" + (f": {values['module']}" if values["module"] else "")
            text, severity = finding_line(self._path.name, values), str(values["severity"])
            self._put(partial(_alert, values["steps"][0], title, text, severity))
        if is_last and answer:
            last = answer["last"]
            columns = {"worst_modules": (answer["worst_columns"], answer["worst"])}
            if answer["all"]:
                columns["findings"] = (list(answer["all"][0]), answer["all"])
            for name, (header, rows) in columns.items():
                self._put(partial(_table, f"{self._prefix}{name}", header, rows, last))
            if answer["report"] and self._report is not None:
                self._put(partial(_report, self._report))

    def _put(self, job: Callable[[TrackerRun], object]) -> None:
        for tracker in self._trackers:
            tracker.put(job)

    def _call(self) -> None:
        """Call the user's function with findings as they come."""
        assert self._on_finding is not None
        has_failed = False
        while (values := self._findings.get()) is not None:
            from fp8debug.rules.base import Finding  # brings the query engine: only when there is a finding

            try:
                self._on_finding(Finding.unpacked(values))
            except Exception as error:  # in this thread nothing of the training runs
                if not has_failed:
                    has_failed = True
                    say(f"on_finding failed: {type(error).__name__}: {error}"[:300])

    def _fail(self, reason: str) -> None:
        if not self._has_failed:
            self._has_failed = True
            say(f"no live findings or tracker values: {reason}; the recording goes on: fp8debug triage {self._path}")


def start_live(
    path: Path, trackers: Sequence[tuple[Tracker, TrackerRun | None]], on_finding: Callable[[Finding], object] | None
) -> Live | None:
    """Return the live part of a watch; None where its process cannot be started, which is reported.

    Args:
        path: as of Live, as are the others.
    """
    try:
        return Live(path, trackers, on_finding)
    except OSError as error:
        say(f"no live findings or tracker values: {error}; the recording goes on")
        return None


def _scalars(step: int, values: Mapping[str, float], run: TrackerRun) -> None:
    run.scalars(step, values)


def _alert(step: int, title: str, text: str, severity: str, run: TrackerRun) -> None:
    run.alert(step, title, text, severity)


def _table(name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int, run: TrackerRun) -> None:
    run.table(name, columns, rows, step)


def _report(path: Path, run: TrackerRun) -> None:
    run.report(path)


def finding_line(run: str, values: Mapping[str, Any]) -> str:
    """Return a finding as one line: run, site, first step and message.

    Args:
        run: name of the run.
        values: of a Finding, by attribute.
    """
    site = " ".join(values[name] for name in ("module", "gemm", "tensor") if values[name]) or "the whole run"
    num = len(values["also"])
    also = f" and {num} more module{'s' if num > 1 else ''}" if num else ""
    return one_line(f"{run}: {values['severity']} {values['code']} {values['name']}: {site}{also}, step {values['steps'][0]}:"
                    f" {values['message']}")  # fmt: skip
