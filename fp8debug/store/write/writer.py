"""Writes one rank's part of a run directory from a thread of its own; training never waits for it nor fails by it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from fp8debug.errors import RecordError
from fp8debug.store import stream
from fp8debug.store.columns import Message, OneRow
from fp8debug.store.locations import refuse_to_write
from fp8debug.store.schema import RECORDING_STOPPED, SCHEMA_VERSION, STOPPED_CODE, TABLES, arrow_schema
from fp8debug.store.write.batch import record_batch, row_batch
from fp8debug.store.write.lock import HEARTBEAT_S, SILENCE_S, Lock, OccupiedError, check_is_free, job_of
from fp8debug.store.write.worker import Parts, Worker

#: A stream becomes a part at this size, or at close().
PART_ROWS, PART_BYTES, PART_BATCHES = 256 * 1024, 64 * 2**20, 16 * 1024
#: Writings that may wait for a slow disk, per table; what comes while they wait is dropped and counted.
MAX_WAITING = {"stats": 512, "steps": 4096, "updates": 4096, "parameters": 4096, "events": 4096}
#: Rows of ``stats`` that may wait in memory, about 1 KB each; a single writing always may.
MAX_WAITING_ROWS = 128 * 1024
#: How long close() waits for a disk that gets nothing done before it gives up, and how long the constructor does.
CLOSE_PATIENCE_S = 60.0
OPEN_PATIENCE_S = 30.0

Columns = Mapping[str, "Sequence[Any] | np.ndarray[Any, Any]"]
Content: TypeAlias = "Columns | pa.RecordBatch | Callable[[], Columns | pa.RecordBatch | Message]"


class RunWriter:
    """Appends the rows of one rank to a run directory.

    Nothing but the constructor raises: when the disk fails later, recording stops with one line on stderr, an event if it
    can still be written, and ``stopped`` holds the reason. A forked child holds a writer that does nothing. So does a
    process that finds another one, which lives, writing the same rank's folder.

    Args:
        path: the run's folder; it is made when it is not there.
        rank: global rank.
        world_size: number of ranks of the job.
        manifest: what the run is (model, recipe, environment); rank 0 writes it to ``manifest.json``.
        rank_manifest: what this rank is (device, versions, mesh).
        resume: go on in a folder that holds this rank's part of a run already; new rows replace the earlier ones from
            the first new step on.
        max_bytes: what this rank's ``stats`` may take on disk; from there on only steps and events are written.

    Attributes:
        stopped: why recording stopped, or None.
        num_dropped: writings that were dropped because the disk was too slow.
        earlier: manifest of the run that the folder held, as it was read; empty for a new run.

    Raises:
        RecordError: the folder holds a run already, or cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        rank: int = 0,
        world_size: int = 1,
        manifest: Mapping[str, Any],
        rank_manifest: Mapping[str, Any] | None = None,
        resume: bool = False,
        max_bytes: int | None = None,
    ) -> None:
        refuse_to_write(path)
        self.path, self.rank = Path(path), rank
        self.stopped: str | None = None
        self.num_dropped = 0
        self.earlier: dict[str, Any] = {}
        self._max_bytes = max_bytes
        self._is_full = False
        self._root = self.path.absolute()  # the training script may change its directory
        self._folder = self._root / f"rank={rank:05d}"
        self._pid = os.getpid()
        self._job = job_of(world_size)
        self._lock: Lock | None = None
        self._streams: dict[str, stream.Stream] = {}
        self._schemas: dict[str, pa.Schema] = {}
        self._waiting, self._waiting_rows = dict.fromkeys(TABLES, 0), 0
        self._counting = threading.Lock()
        self._closed = self._is_over = False
        self._parts = Parts(lambda: self._worker.put(self._parts.check))
        self._must_tell_resume = self._has_told_dropped = False
        self._last_step: int | None = None
        self._last_given: dict[str, object] = {}
        self._manifest = {"schema_version": SCHEMA_VERSION, "name": self._root.name, "created": _now(), **manifest}
        self._rank_manifest = {
            "schema_version": SCHEMA_VERSION,
            "rank": rank,
            "world_size": world_size,
            "pid": self._pid,
            "created": _now(),
            **(rank_manifest or {}),
            "ended": None,
        }
        self._step_row = OneRow(self._schema("steps"))
        pa.array([0])  # imports pandas where it is installed, for which training would wait while the thread did it
        self._worker = Worker("fp8debug-writer", self._failed, self._beat, HEARTBEAT_S)
        self._begin(resume)
        atexit.register(self.close)

    def _begin(self, resume: bool) -> None:
        """Open the folder from the thread, so that one that hangs is not waited for."""
        problems: list[OSError | OccupiedError] = []

        def job() -> None:
            try:
                self._open(resume)
            except (OSError, OccupiedError) as problem:
                problems.append(problem)

        self._worker.put(job)
        if not self._worker.wait(OPEN_PATIENCE_S + SILENCE_S):
            self._stop(f"{self.path} does not answer", "not recorded")
        for problem in problems:
            if isinstance(problem, OccupiedError) and not problem.is_own:
                self._stop(f"{self.path} is written by another process that runs ({problem})", "not recorded")
                continue
            self._parts.end(OPEN_PATIENCE_S)
            self._release()
            self._worker.end(OPEN_PATIENCE_S)
            if isinstance(problem, RecordError):
                raise problem
            if isinstance(problem, OccupiedError):
                raise RecordError(f"this process records into {self.path} already; close() the first watch") from problem
            reason = problem.strerror or str(problem)
            raise RecordError(f"cannot write to {self.path}: {reason}; choose a folder that can be written") from problem

    def _open(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RecordError(f"{self.path} is a file; a run needs a folder of its own")
        self._folder.mkdir(parents=True, exist_ok=True)
        if self.rank:
            check_is_free(self._root / "rank=00000", but_job=self._job)
        self._lock = Lock(self._folder, self._job)
        taken = [n for t in TABLES for n in (*stream.streams(self._folder, t), *stream.parts(self._folder, t))]
        own = self._root / "manifest.json" if self.rank == 0 else self._folder / "manifest.json"
        holds = own.exists() or (self._folder / "manifest.json").exists() or bool(taken)
        if holds and not resume:
            raise RecordError(f"{self.path} already holds a run; choose another folder or delete it")
        self._number = max(taken, default=-1) + 1
        writings: list[Any] = []
        if holds:
            earlier, earlier_own = _read_json(self._root / "manifest.json"), _read_json(self._folder / "manifest.json")
            self._manifest["created"] = earlier.get("created", self._manifest["created"])
            writings = earlier_own["writings"] if isinstance(earlier_own.get("writings"), list) else []
            self._must_tell_resume = bool(taken)
            self.earlier = earlier if taken else {}
        self._parts.num_bytes = sum(part.stat().st_size for part in stream.parts(self._folder, "stats").values())
        for table in TABLES:
            for number, path in stream.streams(self._folder, table).items():
                self._parts.make(path, stream.part_path(self._folder, table, number), is_leftover=True)
        self._rank_manifest["writings"] = [*writings, {"first_part": self._number, "created": _now()}]
        self._numbers = dict.fromkeys(TABLES, self._number)
        self._write_json(self._folder / "manifest.json", self._rank_manifest)
        if self.rank == 0:
            self._write_json(self._root / "manifest.json", self._manifest)
        self._worker.put(self._sync_manifests)  # which nobody waits for

    def stats(self, columns: Content, num_rows: int | None = None, *, once: bool = False) -> bool:
        """Append the rows of one sampled step.

        Args:
            columns: equally long lists or arrays by column name; the caller must not change them any more. ``rank`` may
                be left out. A missing column is null; so are None, masked elements, and in slots NaN and the neutral
                infinity of an extreme. ``log2_hist`` is a list of 64 counts or None per row, or an array
                ``[rows, 64]``. Or a batch of them all, or a function that returns either, which is called in the writer's
                thread, when those before are written.
            num_rows: how many rows a function will return.
            once: drop it where the last call gave the same object: an exception may have hidden that that call succeeded.

        Returns:
            False when the rows will not be written (dropped, or recording has stopped); a function is not called then.
        """
        if num_rows is None:
            num_rows = 1 if callable(columns) else len(columns["step"])
        return not self._is_full and self._append("stats", columns, num_rows, columns if once else None)

    def updates(self, columns: Content, *, once: bool = False) -> None:
        """Append rows of what an optimizer step did to weights; ``rank`` may be left out.

        Args:
            columns: as in :meth:`stats`.
            once: as in :meth:`stats`.
        """
        self._append("updates", columns, given=columns if once else None)

    def parameters(self, columns: Content, *, once: bool = False) -> None:
        """Append rows of parameters that are no watched weights; ``rank`` may be left out.

        Args:
            columns: as in :meth:`stats`.
            once: as in :meth:`stats`.
        """
        self._append("parameters", columns, given=columns if once else None)

    def steps(self, row: Mapping[str, Any] | Callable[[], Mapping[str, Any]], *, once: bool = False) -> None:
        """Append the row of one step; ``rank`` and ``time`` may be left out, other missing columns are null.

        Args:
            row: by column, made what is written at once, or a function that returns it, which the writer's thread calls.
            once: as in :meth:`stats`.
        """
        given = row if once else None
        full = {"rank": self.rank, "time": datetime.now(timezone.utc)}
        if callable(row):
            self._append("steps", lambda: self._message({**full, **row()}), given=given)
        else:
            full.update(row)
            self._append("steps", self._step_row.message(full) or partial(self._message, full), given=given)

    def _message(self, row: Mapping[str, Any]) -> Message | pa.RecordBatch:
        return self._step_row.message(row) or row_batch(self._schema("steps"), row)

    def event(self, step: int | None, kind: str, module: str | None, message: str, code: str | None = None) -> None:
        """Append one event; see the ``events`` table for the kinds and codes."""
        event = self._event(step, kind, module, message, code)
        if self._worker.is_current:
            self._put("events", event())
        else:
            self._append("events", event)

    def _event(
        self, step: int | None, kind: str, module: str | None, message: str, code: str | None
    ) -> Callable[[], pa.RecordBatch]:
        now = datetime.now(timezone.utc)
        row = {"step": step, "rank": self.rank, "time": now, "kind": kind, "module": module, "message": message, "code": code}
        return lambda: row_batch(self._schema("events"), row)

    def update_manifest(self, changes: Mapping[str, Any], *, add: bool = False) -> None:
        """Change top-level keys of ``manifest.json``, which rank 0 writes; elsewhere the own manifest's, new ones by ``add``."""
        manifest, folder = (self._manifest, self._root) if self.rank == 0 else (self._rank_manifest, self._folder)
        changes = {name: value for name, value in changes.items() if add or self.rank == 0 or name in manifest}

        def job() -> None:
            manifest.update(changes)
            self._write_json(folder / "manifest.json", manifest, is_synced=True)

        if changes and self._is_open() and self.stopped is None:
            self._worker.put(job)

    def then(self, job: Callable[[], object]) -> None:
        """Have a function called in the writer's thread once all rows so far are with the operating system; it must not raise."""
        if self._is_open() and self.stopped is None:
            self._worker.put(job)

    def breathe(self) -> None:
        """Between two pieces of work in the writer's thread: let others run; elsewhere it does nothing."""
        self._worker.breathe()

    def flush(self) -> None:
        """Wait until all rows so far are with the operating system, as long as its disk gets anything done."""
        if self._is_open() and self.stopped is None:
            self._worker.wait(CLOSE_PATIENCE_S)
            if self._parts.wait(CLOSE_PATIENCE_S):
                self._worker.wait(CLOSE_PATIENCE_S)  # which reports what went wrong there

    def close(self) -> None:
        """Write what waits, turn the streams into parts and end the thread; a second call does nothing.

        A call that an exception of the program ended in the middle may be repeated, and is when the process ends.
        """
        if os.getpid() != self._pid or self._is_over:
            return
        self._closed = True
        patience = CLOSE_PATIENCE_S if self.stopped is None else 1.0
        is_done = True
        if self._worker.is_alive:
            self._worker.put(self._finish_all)
            is_done = self._worker.wait(patience) and self._parts.wait(patience)
            self._worker.put(self._end)
            is_done = self._worker.end(patience if is_done else 0.0)
        self._parts.end(OPEN_PATIENCE_S if is_done else 0.0)
        self._is_over = True
        atexit.unregister(self.close)
        if not (is_done or self.stopped):
            _say(f"gave up waiting for {self.path}: nothing got done; the last rows may be missing")
        elif self.num_dropped:
            _say(f"{self.num_dropped} writings were dropped because {self.path} is too slow")

    def _is_open(self) -> bool:
        return os.getpid() == self._pid and not self._closed

    def _append(self, table: str, content: Content | Message, num_rows: int = 0, given: object = None) -> bool:
        if not self._is_open() or self.stopped:
            return False
        if not self._worker.is_alive:
            self._stop("the writer's thread is gone")
            return False
        with self._counting:
            is_full = self._waiting[table] >= MAX_WAITING[table]
            if is_full or (self._waiting_rows and self._waiting_rows + num_rows > MAX_WAITING_ROWS):
                self.num_dropped += 1
                if self.num_dropped == 1:
                    _say(f"a step was not recorded: {self.path} is too slow; more such steps are only counted")
                return False
            self._waiting[table] += 1
            self._waiting_rows += num_rows
        self._worker.put(partial(self._store, table, content, num_rows, given))
        return True

    def _beat(self) -> None:
        if self._lock is not None and self.stopped is None and not self._lock.renew():
            raise RecordError(f"another process has taken {self.path} over")

    def _failed(self, error: BaseException) -> None:
        """Stop after an error in the thread, and try to leave an event of it."""
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else None  # Arrow's texts say more
        if self.stopped is None:
            self._stop(reason or (str(error) if isinstance(error, RecordError) else f"{type(error).__name__}: {error}"))
            with contextlib.suppress(Exception):
                text = f"{RECORDING_STOPPED}: {self.stopped}"
                self._put("events", self._event(self._last_step, "recording", None, text, STOPPED_CODE)())

    def _stop(self, reason: str, what: str = RECORDING_STOPPED) -> None:
        if self.stopped is None:
            self.stopped = reason
            _say(f"{what}: {reason}")

    def _schema(self, table: str) -> pa.Schema:
        return self._schemas.get(table) or self._schemas.setdefault(table, arrow_schema(table))

    def _store(self, table: str, content: Content | Message, num_rows: int, given: object) -> None:
        try:
            if given is not None and given is self._last_given.get(table):
                return
            self._last_given[table] = given
            if self.stopped is None:
                found = content() if callable(content) else content
                if not isinstance(found, pa.RecordBatch | Message):
                    found = record_batch(self._schema(table), {"rank": self.rank, **found}, self.breathe)
                if table != "events" and found.num_rows:
                    self._last_step = found.step if isinstance(found, Message) else found["step"][0].as_py()
                    if self._must_tell_resume:
                        self._must_tell_resume = False
                        self.event(self._last_step, "resume", None, "resumed in the folder of the earlier part")
                self._put(table, found)
        finally:
            with self._counting:
                self._waiting[table] -= 1
                self._waiting_rows -= num_rows

    def _put(self, table: str, found: pa.RecordBatch | Message) -> None:
        current = self._streams.get(table)
        if current is None:
            path = stream.stream_path(self._folder, table, self._numbers[table])
            current = self._streams[table] = stream.Stream(path, self._schema(table))
        current.append(found)
        max_bytes = PART_BYTES if self._max_bytes is None else min(PART_BYTES, self._max_bytes)
        if current.num_rows >= PART_ROWS or current.num_bytes >= max_bytes or current.num_batches >= PART_BATCHES:
            self._finish(table)

    def _finish(self, table: str) -> None:
        current = self._streams.pop(table)
        current.close()
        if self.stopped is None:
            self._parts.make(current.path, stream.part_path(self._folder, table, self._numbers[table]))
            self._numbers[table] += 1
            if table == "stats" and self._max_bytes is not None:
                self._parts.wait()
                self._look_at_budget(self._max_bytes)

    def _look_at_budget(self, max_bytes: int) -> None:
        """Write no more statistics once the next part of like size would not fit into ``max_bytes``."""
        num_parts, num_bytes = len(stream.parts(self._folder, "stats")), self._parts.num_bytes
        if num_parts and num_bytes * (1 + 1 / num_parts) > max_bytes:
            self._is_full = True
            text = f"no more statistics of rank {self.rank}: they take {num_bytes / 1e9:.3g} GB, near the budget"
            _say(f"{text}; loss and events are still recorded")
            self.event(self._last_step, "recording", None, text)

    def _finish_all(self) -> None:
        if self.num_dropped and self.stopped is None and not self._has_told_dropped:
            self._has_told_dropped = True
            text = f"{self.num_dropped} writings were dropped because the disk was too slow"
            self.event(self._last_step, "recording", None, text)
        for table in TABLES:  # events last: finishing the others may make some
            if table in self._streams:
                self._finish(table)

    def _end(self) -> None:
        try:
            self._parts.wait()
            if self.stopped is None and self._rank_manifest["ended"] is None:
                self._parts.check()
                self._beat()
                self._rank_manifest["ended"] = _now()
                self._write_json(self._folder / "manifest.json", self._rank_manifest)
        finally:
            self._release()

    def _release(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock is not None:
                self._lock.release()

    def _sync_manifests(self) -> None:
        stream.sync(self._folder / "manifest.json")
        if self.rank == 0:
            stream.sync(self._root / "manifest.json")

    def _write_json(self, path: Path, value: Mapping[str, Any], *, is_synced: bool = False) -> None:
        """Replace a document; with ``is_synced`` the new one is on the disk before the old one goes."""
        temporary = path.with_name(f".{path.name}.{self._pid}.tmp")
        try:
            temporary.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
            if is_synced:
                stream.sync(temporary)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(f"fp8debug: {line}", file=sys.stderr)
