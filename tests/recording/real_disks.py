"""Trains on file systems that fail for real, in a mount namespace of its own: ``unshare --mount python -m ... FOLDER``.

Prints a JSON object: what was said and recorded, by the name of the failure. Needs the rights to mount.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp8debug
from fp8debug.errors import RunError
from fp8debug.store.write import writer
from fp8debug.store.write.writer import RunWriter
from tests.adapters.watching.test_failures import train

#: ``FS_IOC_SHUTDOWN`` of Linux; its argument here: leave everything as the disk has it, journal included.
_SHUTDOWN, _AS_IT_IS = 0x8004587D, 2


class NotHereError(Exception):
    """This machine cannot let a disk fail in this way; an error of the recording is never one of these."""


def command(*words: str | Path) -> None:
    try:
        subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotHereError(str(getattr(error, "stderr", None) or error).strip()) from error


def tmpfs(folder: Path) -> Path:
    """Mount a disk of 1 MB in memory; return where."""
    place = folder / "tmpfs"
    place.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=1m", "none", place)
    return place


def ext4(folder: Path) -> Path:
    """Mount a file as a disk; return where."""
    image, place = folder / "image", folder / "ext4"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(8 * 2**20)
    command("mkfs.ext4", "-q", "-F", image)
    command("mount", "-o", "loop", image, place)
    return place


def unanswered(folder: Path) -> tuple[Path, int]:
    """Mount a file system whose server never answers; return where, and what to close so that everybody gets an error."""
    place = folder / "fuse"
    place.mkdir()
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError as error:
        raise NotHereError(str(error)) from error
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(place), b"fuse", 0, options):
        raise NotHereError(f"mount of a FUSE file system: {os.strerror(ctypes.get_errno())}")
    return place, server


def fill(disk: Path) -> None:
    """Write until nothing fits any more."""
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def shut_down(disk: Path) -> None:
    """Have a disk fail all that is asked of it from now on, with nothing more written to it."""
    folder = os.open(disk, os.O_RDONLY)
    try:
        fcntl.ioctl(folder, _SHUTDOWN, struct.pack("I", _AS_IT_IS))
    except OSError as error:
        raise NotHereError(f"shutdown of a file system: {error}") from error
    finally:
        os.close(folder)


def recorded(run: Path) -> dict[str, Any]:
    """Return what can be read."""
    try:
        opened = fp8debug.Run(run)
        rows = opened.sql("SELECT step, count(*) AS n FROM raw GROUP BY step ORDER BY step").to_pylist()
        steps = opened.sql("SELECT step FROM raw_steps ORDER BY step").column("step").to_pylist()
        return {"rows": {row["step"]: row["n"] for row in rows}, "steps": steps, "problems": opened.problems}
    except RunError as error:
        return {"rows": {}, "steps": [], "problems": [str(error)]}


def said(path: Path, during: Callable[[int], None]) -> dict[str, Any]:
    """Train into a folder; return the losses and what was printed."""
    with contextlib.redirect_stderr(io.StringIO()) as heard:
        losses = train(path, during)
    return {"run": str(path), "losses": losses, "said": heard.getvalue().splitlines()}


def at(step: int, what: Callable[[], object]) -> Callable[[int], None]:
    """Return what lets a disk fail at a step, once all before it is written."""

    def fail(current: int) -> None:
        if current == step:
            for opened in writers():
                opened.flush()
            what()

    return fail


def writers() -> list[RunWriter]:
    """Return the writers that are there."""
    return [found for found in gc.get_objects() if type(found) is RunWriter]


def full(folder: Path) -> dict[str, Any]:
    disk = tmpfs(folder)
    found = said(disk / "run", at(3, lambda: fill(disk)))
    return {**found, **recorded(disk / "run")}


def read_only(folder: Path) -> dict[str, Any]:
    disk = tmpfs(folder)
    writer.PART_ROWS = 1  # no file stays open, which would keep the kernel from it
    found = said(disk / "run", at(3, lambda: command("mount", "-o", "remount,ro", disk)))
    return {**found, **recorded(disk / "run")}


def dead(folder: Path) -> dict[str, Any]:
    disk = ext4(folder)
    writer.PART_ROWS = 1  # each step is a part, which is on the disk when it appears
    found = said(disk / "run", at(3, lambda: shut_down(disk)))
    command("umount", disk)
    command("mount", "-o", "loop", folder / "image", disk)
    return {**found, **recorded(disk / "run")}


def gone(folder: Path) -> dict[str, Any]:
    disk = tmpfs(folder)
    writer.PART_ROWS = 1
    found = said(disk / "run", at(3, lambda: command("umount", "--lazy", disk)))
    return {**found, "left": [path.name for path in disk.iterdir()]}


def frozen(folder: Path) -> dict[str, Any]:
    disk = ext4(folder)
    writer.CLOSE_PATIENCE_S = 0.3
    try:
        found = said(disk / "run", at(3, lambda: command("fsfreeze", "--freeze", disk)))
    finally:
        command("fsfreeze", "--unfreeze", disk)
    for opened in writers():
        opened._worker.wait(60)
    return {**found, **recorded(disk / "run")}


def silent(folder: Path) -> dict[str, Any]:
    for name in ("OPEN_PATIENCE_S", "SILENCE_S"):
        setattr(writer, name, 0.1)
    disk, server = unanswered(folder)
    try:
        return said(disk / "run", lambda step: None)
    finally:
        os.close(server)


def main() -> None:
    """Let each fail in turn."""
    usual = {name: getattr(writer, name) for name in ("PART_ROWS", "CLOSE_PATIENCE_S", "OPEN_PATIENCE_S", "SILENCE_S")}
    command("mount", "-t", "tmpfs", "-o", "size=64m", "none", sys.argv[1])  # images too lie in memory
    found: dict[str, Any] = {"alone": {"losses": train(None)}}
    for fail in (full, read_only, dead, gone, frozen, silent):
        folder = Path(sys.argv[1]) / fail.__name__
        folder.mkdir()
        try:
            found[fail.__name__] = fail(folder)
        except NotHereError as error:
            found[fail.__name__] = {"skipped": str(error)}
        for name, value in usual.items():
            setattr(writer, name, value)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
