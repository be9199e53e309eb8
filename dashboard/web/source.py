"""Source of served runs, one or a folder. Opens runs by name, never by path, and again when their files have grown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8debug.errors import Fp8DebugError, NoStepYetError, RunError, UnknownNameError
from fp8debug.store.locations import forget, place_of
from fp8debug.store.write.lock import NAME as LOCK

from ..figures.theme import level

if TYPE_CHECKING:
    from fp8debug import Finding

    from ..data.records import Mark, Summary
    from .run_view import Judgement, RunView, Verdicts

#: A run whose files have not grown for this long and that was not closed is taken for killed.
QUIET_S = 120.0
#: Runs that are kept open, the last opened: each has threads and tens of MB.
MAX_OPEN = 16
#: Seconds between two judgements of a run that grows while others wait, and points of a line in the list of runs.
REJUDGE_S, LINE_POINTS = 4.0, 48
#: Runs that are read before the newest are looked at again.
READ_AT_ONCE = 8
_ORDER = {"error": 0, "warning": 1, "info": 2, "unknown": 3, "ok": 4}


class ServedFolder:
    """The folder that is served.

    Args:
        path: a run, a folder of runs, or an empty folder, in which the first run is waited for.

    Attributes:
        path: the folder.
        is_folder: it holds runs, or will; False for one run.
        has_answered: a first page was sent.
        reading_on: held while :meth:`read_on` reads; what no reader waits for begins after it.

    Raises:
        RunError: it is none of them.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = place_of(path)
        if not self.path.is_dir():
            raise RunError(f"{path}: no such folder; give a run, or a folder of runs")
        self.is_folder = not is_run(self.path)
        self._written: dict[str, float] = {}
        if self.is_folder and not self.names() and any(not entry.name.startswith(".") for entry in self.path.iterdir()):
            raise RunError(f"{path}: neither a run nor a folder of runs; record one with fp8debug.watch(model, '{path}/exp1')")
        self._opened: dict[str, RunView] = {}
        self._lock = threading.Lock()
        self._working: threading.Thread | None = None
        self._has_read = threading.Event()
        self.has_answered = threading.Event()
        self.reading_on = threading.Lock()
        self._num_judged = 0
        self._verdicts: dict[str, Verdicts] = {}
        self._summaries: dict[str, tuple[str, Summary]] = {}
        self._failed: dict[str, str] = {}

    def names(self) -> list[str]:
        """Return the names of the runs in the folder, the last written first; one run is not listed.

        The times are those of the last :meth:`stamp` of the folder, so that one order holds on a page and in its choice of runs.
        """
        if not self.is_folder:
            return []
        runs = [p for p in self.path.iterdir() if p.is_dir() and not p.name.startswith((".", "rank=")) and is_run(p)]
        if not runs and is_run(self.path):  # what was an empty folder has become a run itself
            self.is_folder = False
        for path in runs:
            if path.name not in self._written:
                self._written[path.name] = last_write(path)
        return [p.name for p in sorted(runs, key=lambda p: (-self._written[p.name], p.name))]

    def folder(self, name: str | None) -> Path:
        """Return a run's folder by its name in the list: a name with a path in it is no name.

        Raises:
            UnknownNameError: there is no such run.
        """
        if not self.is_folder:
            return self.path
        if name not in self.names():
            raise UnknownNameError("run", str(name), self.names())
        return self.path / str(name)

    def open(self, name: str | None) -> RunView:
        """Return a run as its files are now; what is open already is kept while they stay the same.

        Raises:
            RunError: it cannot be read.
            UnknownNameError: there is no such run.
        """
        folder = self.folder(name)
        if folder.name not in self._opened:
            forget(folder)  # of a bucket the list of a whole folder holds no parts
        stamp = file_stamp(folder)
        with self._lock:
            found = self._opened.pop(folder.name, None)
            if found is None or found.stamp != stamp:
                if found is not None:
                    found.is_superseded = True
                found = self._new(folder, stamp)
            self._opened[folder.name] = found  # the last opened is the last
            while len(self._opened) > MAX_OPEN:
                self._opened.pop(next(iter(self._opened)))
            return found

    def _new(self, folder: Path, stamp: str) -> RunView:
        """Return a run as its files are now, with what is concluded of it already."""
        from fp8debug import Run

        from ..data.large_run import LargeRun
        from .run_view import SMALL_BYTES, RunView, Verdicts

        size = int(stamp.split(".")[1], 16)
        run = Run(folder) if size < SMALL_BYTES else LargeRun(folder)
        verdicts = self._verdicts.setdefault(folder.name, Verdicts())
        run_view = RunView(run, stamp, size=size, name=run.name, siblings=self.names, verdicts=verdicts)
        run_view.open_sibling = self.open if self.is_folder else None
        return run_view

    def read_ahead(self) -> None:
        """Read what the first page of a run shows: the browser takes as long to begin."""
        with suppress(Fp8DebugError):  # the page says what is wrong
            run_view = self.open(None)
            reads: list[Callable[[], object]] = [run_view.training, run_view.last_loss]
            for read in ([run_view.heat] if run_view.is_small else []) + reads:
                read()

    def read_on(self) -> None:
        """Read what the first heatmap of a large run shows, so that the first click does not wait for it."""
        with self.reading_on, suppress(Fp8DebugError):
            run_view = self.open(None)
            if not run_view.is_small:
                for read in (run_view.recorded, lambda: run_view.heat(at_once=True), run_view.casts):
                    read()

    def load_cache(self, run_view: RunView) -> None:
        """Have a large run's table read into memory, unless it is being written; that of any other run is given back."""
        if state(run_view.run.path, run_view.run.rank_manifests) == "writing":
            return
        for other in [other for other in self._opened.values() if other is not run_view]:
            other.drop_cache()
        run_view.load_cache()

    def is_triaged(self, name: str) -> bool:
        """Return whether a run's findings are known, those of an earlier state of its files too."""
        found = self._verdicts.get(name)
        return found is not None and found.stamp != ""

    def known(self, name: str) -> Judgement | None:
        """Return what is known of a run by now, also of an earlier state of its files; None of one that nobody has judged."""
        found = self._verdicts.get(name)
        return None if found is None else found.latest

    def judge_all(self, wait_s: float, until_new: bool = False) -> bool:
        """Read and judge all runs one after another in the background, newest first; wait a moment for it.

        Args:
            wait_s: how long, at most.
            until_new: wait no longer than until one more is judged: who looks is told at once of the run that is judged first.

        Returns:
            False where all was known already.
        """
        names = self.names()
        if all(self._is_judged(name) and self._is_read(name) for name in names):
            return False
        before = self._num_judged  # of all who look each one counts for itself
        self._begin()
        end, working = time.monotonic() + wait_s, self._working
        while working is not None and working.is_alive() and (left := end - time.monotonic()) > 0:
            if until_new and self._num_judged != before:
                break
            working.join(min(left, 0.2) if until_new else left)
        return True

    def read_all(self, wait_s: float) -> None:
        """Begin to read all runs in the background, as :meth:`judge_all`; wait until they are read, for a moment at most."""
        end = time.monotonic() + wait_s
        while not all(self._is_read(name) for name in self.names()):
            self._begin()
            left = end - time.monotonic()
            if left <= 0:
                break
            self._has_read.wait(min(left, 0.2))
            self._has_read.clear()

    def _begin(self) -> None:
        with self._lock:
            if self._working is None or not self._working.is_alive():
                self._working = threading.Thread(target=self._work, daemon=True)
                self._working.start()

    def _is_judged(self, name: str) -> bool:
        """Return whether the findings of a run as its files are now are known, or that it cannot be judged."""
        found, stamp = self._verdicts.get(name), file_stamp(self.path / name)
        return (found is not None and found.stamp == stamp) or self._failed.get(name) == stamp

    def _is_read(self, name: str) -> bool:
        """Return whether the line about a run is that of its files as they are now."""
        found = self._summaries.get(name)
        return found is not None and found[0] == file_stamp(self.path / name)

    def _work(self) -> None:
        """Read all runs, then judge them, newest first; those that are being written are judged as soon as they are read.

        A run that grows meanwhile is judged every ``REJUDGE_S`` seconds at most, and each has its turn: a live run, some that
        are to be read, and one that has ended.
        """
        begun: dict[str, float] = {}
        while True:
            names, now = self.names(), time.monotonic()
            waiting = [n for n in names if now - begun.get(n, -REJUDGE_S) >= REJUDGE_S and not self._is_judged(n)]
            # One that has been read before: it grows again while it is read, and would be read again and never judged.
            live = [n for n in waiting if n in self._summaries and self._summaries[n][1].state == "writing"]
            if live:
                self._judge(live[0])
                begun[live[0]] = time.monotonic()
            unread = [name for name in names if not self._is_read(name)]
            for name in unread[:READ_AT_ONCE]:
                is_new, found = name not in self._summaries, None
                with suppress(UnknownNameError):  # it is gone
                    found = self.summary(name)
                self._has_read.set()
                if is_new and found is not None and found.state == "writing":
                    break  # it is judged now
            is_read = all(name in self._summaries for name in names)
            ended = [n for n in waiting if n not in live and self._summaries[n][1].state != "writing"] if is_read else []
            if ended:
                self._judge(ended[0])
                begun[ended[0]] = time.monotonic()
            if not (live or unread or ended):
                return

    def _judge(self, name: str) -> None:
        folder = self.path / name
        stamp = file_stamp(folder)
        try:
            found = self._opened.get(name)
            run_view = found if found is not None and found.stamp == stamp else self._new(folder, stamp)
            run_view.judge()
        except (Fp8DebugError, OSError):
            self._failed[name] = stamp
        self._num_judged += 1

    def stamp(self, name: str | None) -> str:
        """Return the state of a run's files, or of the whole folder when no run is named; "" when it cannot be read."""
        try:
            if self.is_folder and name is None:
                forget(self.path, with_runs=False)
                stamps = {name: file_stamp(self.path / name) for name in self.names()}
                self._written = {name: written_at(stamp) for name, stamp in stamps.items()}
                judged = [self._verdicts[name].stamp for name in stamps if self.is_triaged(name)]
                return " ".join([*stamps.values(), *judged, str(len(self._summaries))])
            folder = self.folder(name)
            forget(folder)  # an object store is listed when it is asked whether a run has grown, not for every answer
            return file_stamp(folder)
        except (OSError, UnknownNameError):
            return ""

    def summaries(self) -> list[tuple[str, Summary | None]]:
        """Return the names of the runs and the line about each, None of one that has not been read yet."""
        return [(name, self._summaries.get(name, ("", None))[1]) for name in self.names()]

    def summary(self, name: str) -> Summary:
        """Return one line about a run, also about one that cannot be run_view; it is kept while its files stay the same."""
        from ..data import queries
        from ..data.records import Summary
        from ..data.run_settings import settings_of

        folder = self.folder(name)
        stamp = file_stamp(folder)
        known = self._summaries.get(name)
        if known is not None and known[0] == stamp:
            return known[1]
        try:
            opened = self._opened.get(name)
            run = opened.run if opened is not None and opened.stamp == stamp else self._new(folder, stamp).run
            steps = run.steps_range
            lines = queries.training(run, ("loss",), LINE_POINTS)
            found = Summary(
                name=folder.name,
                recipe=recipe_name(run.manifest),
                first=steps[0],
                last=steps[1],
                sampled=run.sql("SELECT count(DISTINCT step) AS n FROM raw").column("n")[0].as_py(),
                ranks=len(run.ranks),
                loss=queries.last_loss(run),
                state=state(folder, run.rank_manifests),
                written=last_write(folder),
                problems=tuple(run.problems),
                line=lines[0] if lines else None,
                settings=settings_of(run.manifest),
            )
        except NoStepYetError as error:
            found = Summary(name=folder.name, error=str(error), state=state(folder, {}), written=written_at(stamp), is_empty=True)
        except (Fp8DebugError, OSError) as error:
            found = Summary(name=folder.name, error=str(error))
        self._summaries[name] = stamp, found
        return found


def is_run(folder: Path) -> bool:
    """Return whether a folder looks like a run."""
    return (folder / "manifest.json").is_file() or any(folder.glob("rank=*"))


def recipe_name(manifest: dict[str, Any]) -> str:
    """Return the recipe's name, "none" where nothing was converted, "unknown" where the manifest does not tell."""
    recipe = manifest.get("recipe", {})
    return str(recipe.get("name", "unknown")) if isinstance(recipe, dict) else "none" if recipe is None else "unknown"


def file_stamp(folder: Path) -> str:
    """Return a word that changes whenever a file of the run is written; the lock, which its writer renews, is none."""
    newest, size, count = 0, 0, 0
    for path in (folder / "manifest.json", *folder.glob("rank=*/*"), *folder.glob("rank=*/*/part-*")):
        if path.name == LOCK:
            continue
        try:
            info = path.stat()
        except OSError:
            continue
        newest, size, count = max(newest, info.st_mtime_ns), size + info.st_size, count + 1
    return f"{newest:x}.{size:x}.{count:x}"


def last_write(folder: Path) -> float:
    """Return the time of the newest file of a run, in seconds since 1970."""
    return written_at(file_stamp(folder))


def written_at(stamp: str) -> float:
    """Return the time in a stamp, in seconds since 1970."""
    return int(stamp.split(".")[0], 16) / 1e9


def state(folder: Path, rank_manifests: Mapping[int, Mapping[str, Any]]) -> str:
    """Return ``ended``, ``writing`` or ``not closed`` (killed, or waiting for long)."""
    if rank_manifests and all(m.get("ended") for m in rank_manifests.values()):
        return "ended"
    renewed = [last_write(folder)]
    for lock in folder.glob(f"rank=*/{LOCK}"):
        with suppress(OSError):  # the run has just ended
            renewed.append(lock.stat().st_mtime)
    return "writing" if time.time() - max(renewed) < QUIET_S else "not closed"


def marks(findings: Sequence[Finding], by_module: bool = False) -> tuple[Mark, ...]:
    """Return where findings begin, those of one step (and module) together, most severe first in each."""
    from ..data.records import Mark

    grouped: dict[tuple[int, str | None], list[Finding]] = {}
    for finding in findings:
        for module in dict.fromkeys((finding.module, *finding.also)) if by_module else (None,):
            grouped.setdefault((int(finding.steps[0]), module), []).append(finding)
    result = []
    for (step, module), group in sorted(grouped.items(), key=lambda item: item[0][0]):
        group.sort(key=lambda f: _ORDER[level(f.severity)])
        result.append(
            Mark(
                step=step,
                severity=level(group[0].severity),
                codes=tuple(dict.fromkeys(f.code for f in group)),
                lines=tuple(_line(f) for f in group),
                module=module,
            )
        )
    return tuple(result)


def _line(finding: Finding) -> str:
    from ..figures.base import mark_label

    return mark_label(level(finding.severity), finding.code, finding.module, finding.message)
