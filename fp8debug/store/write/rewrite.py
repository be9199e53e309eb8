"""A run's parts rewritten beside it, then swapped in one after another.

Until the swap begins the run is untouched. A swap that was cut short leaves old and new parts side by side, each whole and
readable; ``finish`` ends it. No part goes away: each keeps the rows of its first step at least.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fp8debug.errors import RecordError, RunError
from fp8debug.store.read.files import scan
from fp8debug.store.stream import sync, write_part
from fp8debug.store.write.lock import Lock, OccupiedError

#: Where rewritten parts lie, below the run's folder: while they are made, and when all are there.
HALF, WHOLE = ".compact.half", ".compact"


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A rewritten run beside its original.

    Attributes:
        path: the copy, a run itself.
        num_rows: rows of ``stats`` before and after.
        num_bytes: bytes of the parts of ``stats`` before and after.
        state: what the original's files were when they were read.
    """

    path: Path
    num_rows: tuple[int, int]
    num_bytes: tuple[int, int]
    state: dict[str, tuple[int, int]]


def stage(run: Path, keep: Callable[[pa.Table], pa.Array]) -> Staged:
    """Rewrite the parts of ``stats``; everything else of the copy is linked.

    Args:
        run: a run's folder that nobody writes.
        keep: of a part's rows ``step`` and ``module``, those to keep, as booleans.
    """
    discard(run)
    half = run / HALF
    rows, sizes = [0, 0], [0, 0]
    before = state(run)
    half.mkdir()
    for manifest in (run / "manifest.json", *run.glob("rank=*/manifest.json")):
        if manifest.is_file() and not manifest.is_symlink():
            _link(manifest, half / manifest.relative_to(run))
    for source in scan(run).of():
        target = half / source.path.relative_to(run)
        if source.table != "stats" or source.rows is not None:
            _link(source.path, target)
            continue
        with pq.ParquetFile(source.path) as file:
            found = keep(file.read(columns=["step", "module"]))
            first = pc.equal(file.read(columns=["step"])["step"], source.first_step)
            wanted = pc.or_(found, pc.fill_null(first, False))
            num_kept = pc.sum(wanted).as_py() or 0
            if num_kept == len(wanted):
                _link(source.path, target)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_part(file.read().filter(wanted).combine_chunks(), target)
        rows = [rows[0] + len(wanted), rows[1] + num_kept]
        sizes = [sizes[0] + source.path.stat().st_size, sizes[1] + target.stat().st_size]
    return Staged(path=half, num_rows=(rows[0], rows[1]), num_bytes=(sizes[0], sizes[1]), state=before)


def swap(run: Path, staged: Staged, note: dict[str, Any]) -> None:
    """Put the rewritten parts into the run, and a note of it into its manifest.

    Raises:
        RecordError: the run is being written, or it changed since it was read.
    """
    locks: list[Lock] = []
    try:
        for folder in sorted(path for path in run.glob("rank=*") if path.is_dir()):
            locks.append(hold(folder))
        if state(run) != staged.state:
            raise RecordError(f"{run} changed while it was rewritten; nothing was swapped, try again")
        manifest = staged.path / "manifest.json"
        if manifest.exists():
            value = json.loads(manifest.read_text(encoding="utf-8"))
            value["compacted"] = [*(value.get("compacted") or []), note]
            manifest.unlink()  # a link to the original
            manifest.write_text(json.dumps(value, indent=1), encoding="utf-8")
            sync(manifest)
        staged.path.rename(run / WHOLE)
        finish(run)
    finally:
        for lock in locks:
            lock.release()


def finish(run: Path) -> bool:
    """End a swap that was cut short; return whether there was one."""
    whole = run / WHOLE
    if whole.is_symlink() or not whole.is_dir():
        return False
    for path in (*sorted(whole.glob("rank=*/stats/part-*.parquet")), whole / "manifest.json"):
        target = run / path.relative_to(whole)
        if path.is_file() and not path.is_symlink() and target.is_file():
            path.replace(target)
    shutil.rmtree(whole)
    return True


def discard(run: Path) -> None:
    """Take away a copy whose swap has not begun."""
    half = run / HALF
    if half.is_symlink():
        half.unlink()
    elif half.exists():
        shutil.rmtree(half)


def hold(folder: Path) -> Lock:
    """Keep writers out of a folder.

    Raises:
        RecordError: one is at work.
    """
    try:
        return Lock(folder)
    except OccupiedError as error:
        raise RecordError(f"{folder} is being written by {error}; a run that goes on is not touched") from None


def check_is_over(run: Path) -> None:
    """See that nobody writes a run.

    Raises:
        RecordError: somebody does.
        RunError: there is no run.
    """
    folders = sorted(path for path in run.glob("rank=*") if path.is_dir())
    if not folders:
        raise RunError(f"{run} is not a run: it has no rank=... folder")
    for folder in folders:
        hold(folder).release()


def state(run: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of change of every file with rows."""
    files = [*run.glob("rank=*/*/part-*.parquet"), *run.glob("rank=*/*.arrows")]
    return {str(path): (found.st_size, found.st_mtime_ns) for path in files for found in (path.stat(),)}


def _link(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, target)
    except OSError:  # a file system without links
        shutil.copy2(path, target)
