"""Writes one rank's part of a run directory from a thread of its own; training never waits for it nor fails by it."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from fp8debug.errors import RecordError
from fp8debug.store import stream
from fp8debug.store.batch import record_batch
from fp8debug.store.schema import SCHEMA_VERSION, TABLES, arrow_schema

#: A stream becomes a part at this size, or at close().
PART_ROWS, PART_BYTES, PART_BATCHES = 256 * 1024, 64 * 2**20, 16 * 1024
#: Writings that may wait for a slow disk, per table; what comes while they wait is dropped and counted.
MAX_WAITING = {"stats": 32, "steps": 4096, "events": 4096}
#: How long close() waits for the disk before it gives up.
CLOSE_TIMEOUT_S = 120.0

_Job = Callable[[], None]


class RunWriter:
    """Appends the rows of one rank to a run directory.

    Nothing but the constructor raises: when the disk fails later, recording stops with one line on stderr and
    ``stopped`` holds the reason. A forked child holds a writer that does nothing.

    Args:
        path: the run's folder; it is made when it is not there.
        rank: global rank.
        world_size: number of ranks of the job.
        manifest: what the run is (model, recipe, environment); rank 0 writes it to ``manifest.json``.
        rank_manifest: what this rank is (device, versions, mesh).
        resume: go on in a folder that holds this rank's part of a run already; new rows replace the earlier ones from
            the first new step on.

    Attributes:
        stopped: why recording stopped, or None.
        num_dropped: writings that were dropped because the disk was too slow.

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
    ) -> None:
        self.path, self.rank = Path(path), rank
        self.stopped: str | None = None
        self.num_dropped = 0
        self._root = self.path.absolute()  # the training script may change its directory
        self._folder = self._root / f"rank={rank:05d}"
        self._pid = os.getpid()
        self._streams: dict[str, stream.Stream] = {}
        self._waiting = dict.fromkeys(TABLES, 0)
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._must_tell_resume = False
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
        try:
            self._open(resume)
        except OSError as error:
            if isinstance(error, RecordError):
                raise
            reason = error.strerror or str(error)
            raise RecordError(f"cannot write to {self.path}: {reason}; choose a folder that can be written") from error
        self._thread = threading.Thread(target=self._work, name="fp8debug-writer", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def _open(self, resume: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RecordError(f"{self.path} is a file; a run needs a folder of its own")
        own = self._root / "manifest.json" if self.rank == 0 else self._folder / "manifest.json"
        holds = own.exists() or self._folder.exists()
        if holds and not resume:
            raise RecordError(f"{self.path} already holds a run; choose another folder or delete it")
        self._folder.mkdir(parents=True, exist_ok=True)
        taken = [n for t in TABLES for n in (*stream.streams(self._folder, t), *stream.parts(self._folder, t))]
        self._number = max(taken, default=-1) + 1
        writings: list[Any] = []
        if holds:
            earlier, earlier_own = _read_json(self._root / "manifest.json"), _read_json(self._folder / "manifest.json")
            self._manifest["created"] = earlier.get("created", self._manifest["created"])
            writings = earlier_own["writings"] if isinstance(earlier_own.get("writings"), list) else []
            self._must_tell_resume = bool(taken)
        for table in TABLES:
            for number, path in stream.streams(self._folder, table).items():
                part = stream.part_path(self._folder, table, number)
                self._jobs.put(partial(_compact_leftover, path, part))
        self._rank_manifest["writings"] = [*writings, {"first_part": self._number, "created": _now()}]
        self._numbers = dict.fromkeys(TABLES, self._number)
        self._write_json(self._folder / "manifest.json", self._rank_manifest)
        if self.rank == 0:
            self._write_json(self._root / "manifest.json", self._manifest)

    def stats(self, columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]) -> None:
        """Append the rows of one sampled step.

        Args:
            columns: equally long lists or arrays by column name; the caller must not change them any more. ``rank`` may
                be left out. A missing column is null; so are None, masked elements, and in slots NaN and the neutral
                infinity of an extreme. ``log2_hist`` is a list of 64 counts or None per row, or an array
                ``[rows, 64]``.
        """
        self._append("stats", columns)

    def steps(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step; ``rank`` and ``time`` may be left out, other missing columns are null."""
        full = {"time": datetime.now(timezone.utc), **row}
        self._append("steps", {name: [value] for name, value in full.items()})

    def event(self, step: int | None, kind: str, module: str | None, message: str) -> None:
        """Append one event; see the ``events`` table for the kinds."""
        self._append("events", _event(step, kind, module, message))

    def update_manifest(self, changes: Mapping[str, Any]) -> None:
        """Change top-level keys of ``manifest.json``; only rank 0 has it, on other ranks this does nothing."""
        changes = dict(changes)

        def job() -> None:
            self._manifest.update(changes)
            self._write_json(self._root / "manifest.json", self._manifest)

        if self.rank == 0 and self._is_open():
            self._jobs.put(job)

    def flush(self) -> None:
        """Wait until all rows so far are with the operating system."""
        if self._is_open():
            done = threading.Event()
            self._jobs.put(done.set)
            done.wait(CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Write what waits, turn the streams into parts and end the thread; a second call does nothing."""
        if not self._is_open():
            return
        self._closed = True
        atexit.unregister(self.close)
        self._jobs.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            _say(f"gave up waiting for {self.path} after {CLOSE_TIMEOUT_S:.0f} s; the last rows may be missing")
        elif self.num_dropped:
            _say(f"{self.num_dropped} writings were dropped because {self.path} is too slow")

    def _is_open(self) -> bool:
        return os.getpid() == self._pid and not self._closed

    def _append(self, table: str, columns: Mapping[str, Any]) -> None:
        if not self._is_open() or self.stopped:
            return
        with self._lock:
            if self._waiting[table] >= MAX_WAITING[table]:
                self.num_dropped += 1
                if self.num_dropped == 1:
                    _say(f"a step was not recorded: {self.path} is too slow; more such steps are only counted")
                return
            self._waiting[table] += 1
        self._jobs.put(partial(self._store, table, columns))

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._guarded(job)
        for table in list(self._streams):
            self._guarded(partial(self._finish, table))
        self._guarded(self._end)

    def _guarded(self, job: _Job) -> None:
        try:
            job()
        except Exception as error:  # a thread's traceback helps nobody, and training must go on
            self._stop((error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}")

    def _stop(self, reason: str) -> None:
        if self.stopped is None:
            self.stopped = reason
            _say(f"recording stopped: {reason}")

    def _store(self, table: str, columns: Mapping[str, Any]) -> None:
        with self._lock:
            self._waiting[table] -= 1
        if self.stopped is None:
            batch = record_batch(arrow_schema(table), {"rank": self.rank, **columns})
            if self._must_tell_resume and table != "events" and batch.num_rows:
                self._must_tell_resume = False
                event = _event(batch["step"][0].as_py(), "resume", None, "recording goes on in a folder that held a run")
                self._put("events", record_batch(arrow_schema("events"), {"rank": self.rank, **event}))
            self._put(table, batch)

    def _put(self, table: str, batch: pa.RecordBatch) -> None:
        current = self._streams.get(table)
        if current is None:
            path = stream.stream_path(self._folder, table, self._numbers[table])
            current = self._streams[table] = stream.Stream(path, batch.schema)
        current.append(batch)
        if current.num_rows >= PART_ROWS or current.num_bytes >= PART_BYTES or current.num_batches >= PART_BATCHES:
            self._finish(table)

    def _finish(self, table: str) -> None:
        current = self._streams.pop(table)
        current.close()
        if self.stopped is None:
            stream.compact(current.path, stream.part_path(self._folder, table, self._numbers[table]))
            self._numbers[table] += 1

    def _end(self) -> None:
        if self.stopped is None:
            self._rank_manifest["ended"] = _now()
            self._write_json(self._folder / "manifest.json", self._rank_manifest)

    def _write_json(self, path: Path, value: Mapping[str, Any]) -> None:
        temporary = path.with_name(f".{path.name}.{self._pid}.tmp")
        try:
            temporary.write_text(json.dumps(value, indent=1, default=str), encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def _compact_leftover(path: Path, part: Path) -> None:
    """Finish what a killed process left; what is no stream stays as it is, and the reader names it."""
    with contextlib.suppress(pa.ArrowException):
        stream.compact(path, part)


def _event(step: int | None, kind: str, module: str | None, message: str) -> dict[str, list[Any]]:
    row = {"step": step, "time": datetime.now(timezone.utc), "kind": kind, "module": module, "message": message}
    return {name: [value] for name, value in row.items()}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _say(line: str) -> None:
    if sys.stderr is not None:
        print(f"fp8debug: {line}", file=sys.stderr)
