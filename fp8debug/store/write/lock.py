"""One process writes a rank's folder: a lock file names it by host, process id and start time.

On the same host the process table says whether the owner lives. From another host (a network file system) the lock's time
of change says it: its owner renews it every ``HEARTBEAT_S``; clocks are not compared, a lock that stays the same while it is
watched for ``SILENCE_S`` is dead. Neither asks the file system for locks of its own, which not all of them have.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

NAME = "writer.lock"
HEARTBEAT_S, SILENCE_S = 10.0, 30.0
_LOOK_S = 0.5

#: Fields of /proc/PID/stat behind the name in brackets: state, and start in clock ticks since boot.
_STATE, _START = 0, 19

#: Text of the locks of this process; one that names it and is not here is of a program that ran under its id before.
_HELD: set[str] = set()


@dataclass(frozen=True, kw_only=True)
class Owner:
    """Owner of a lock.

    Attributes:
        host: name of the machine.
        system: what process ids are numbers of: the boot of a machine, and the namespace within it.
        pid: process id.
        start: when the process began, in clock ticks since boot; empty where the system does not say.
        job: what all ranks of a job have in common and those of another one have not.
        since: when it took the lock, UTC.
    """

    host: str
    system: str
    pid: int
    start: str
    job: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"

    def is_here(self) -> bool:
        """Return whether it is this process, or a program that ran in it before."""
        return (self.system, self.pid, self.start) == (_system(), os.getpid(), _start_of(os.getpid()))

    def lives(self) -> bool | None:
        """Return whether the process is there; None when only its heartbeat can say so."""
        if self.system != _system():
            return None
        return _start_of(self.pid) == self.start if self.start else _answers(self.pid)


class OccupiedError(Exception):
    """Another process that lives holds the lock."""

    def __init__(self, owner: Owner | None) -> None:
        super().__init__(str(owner) if owner else "another process")
        self.is_own = owner is not None and owner.is_here()


class Lock:
    """A rank's folder held by this process until :meth:`release`, or until the process is gone.

    Args:
        folder: the rank's folder; it is there.
        job: as in :class:`Owner`.

    Raises:
        OccupiedError: another process that lives has it.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, job: str = "") -> None:
        self._path = folder / NAME
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        pid = os.getpid()
        owner = Owner(host=socket.gethostname(), system=_system(), pid=pid, start=_start_of(pid), job=job, since=now)
        self._text = json.dumps({**asdict(owner), "folder": str(folder)}) + "\n"
        while not self._take():
            found = _text(self._path)
            if found is not None and _is_held(self._path, found):
                raise OccupiedError(_owner(found))
            if found is not None:
                self._clear(found)
        _HELD.add(self._text)

    def _take(self) -> bool:
        """Put the lock there whole, unless there is one."""
        own = self._path.with_name(f".{NAME}.{socket.gethostname()}.{os.getpid()}")
        try:
            own.write_text(self._text, encoding="utf-8")
            try:
                os.link(own, self._path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                return self._take_unlinked()
            return True
        finally:
            own.unlink(missing_ok=True)

    def _take_unlinked(self) -> bool:
        try:
            with self._path.open("x", encoding="utf-8") as file:
                file.write(self._text)
        except FileExistsError:
            return False
        return True

    def _clear(self, dead: str) -> None:
        """Move a dead owner's lock away; one that another newcomer has put there meanwhile goes back."""
        aside = self._path.with_name(f".{NAME}.dead.{socket.gethostname()}.{os.getpid()}")
        try:
            self._path.rename(aside)
            if _text(aside) != dead:
                os.link(aside, self._path)
        except FileNotFoundError:
            pass
        except FileExistsError:  # a third one was faster; the second finds out at its next heartbeat
            pass
        finally:
            aside.unlink(missing_ok=True)

    def renew(self) -> bool:
        """Show that the owner lives; return False when another process has taken the folder over."""
        if _text(self._path) != self._text:
            return False
        os.utime(self._path)
        return True

    def release(self) -> None:
        """Give the folder free, if it is still held."""
        _HELD.discard(self._text)
        if _text(self._path) == self._text:
            self._path.unlink(missing_ok=True)


def check_is_free(folder: Path, *, but_job: str | None = None) -> None:
    """See that nobody writes a rank's folder now.

    Args:
        folder: the rank's folder.
        but_job: an owner of this job does not count; it is not even looked whether it lives.

    Raises:
        OccupiedError: somebody does.
    """
    path = folder / NAME
    text = _text(path)
    if text is None:
        return
    owner = _owner(text)
    if (owner is None or owner.job != but_job) and _is_held(path, text):
        raise OccupiedError(owner)


def job_of(world_size: int) -> str:
    """Return what the ranks of this job have in common, as far as each knows it alone."""
    return f"{world_size} {os.environ.get('TORCHELASTIC_RUN_ID', '')}".strip()


def _is_held(path: Path, text: str) -> bool:
    owner = _owner(text)
    lives = text in _HELD if owner and owner.is_here() else owner.lives() if owner else None
    if lives is not None:
        return lives
    whose = f"{owner}" if owner else "somebody"
    print(f"fp8debug: {path.parent} was left locked by {whose}; looking for {SILENCE_S:.0f} s whether it lives", file=sys.stderr)
    first = _mark(path)
    if first is None:
        return False
    until = time.monotonic() + SILENCE_S
    while time.monotonic() < until:
        time.sleep(_LOOK_S)
        if (now := _mark(path)) != first:
            return now is not None
    return False


def _mark(path: Path) -> tuple[int, int] | None:
    """Return what a heartbeat changes; the file is opened, which makes a network file system ask its server."""
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
    except FileNotFoundError:
        return None
    return state.st_ino, state.st_mtime_ns


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes()[:4096].decode("utf-8", "replace")
    except FileNotFoundError:
        return None


def _owner(text: str) -> Owner | None:
    try:
        value = json.loads(text)
        found = {field.name: value[field.name] for field in fields(Owner)}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_whole = isinstance(found["pid"], int) and all(isinstance(v, str) for k, v in found.items() if k != "pid")
    return Owner(**found) if is_whole else None


def _system() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return f"{socket.gethostname()} {platform.system()}"


def _start_of(pid: int) -> str:
    """Return when a process began; empty when there is none or it has ended and waits for its parent."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if values[_STATE] in "ZX" else values[_START]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
