"""Location of a run: a local folder, or object storage that fsspec reaches (``s3://``, ``gs://``, ``az://``), which is only read.

A run in object storage is listed once when it is opened; what exists, how large it is and what a glob finds is answered from that
list, so that 1024 ranks cost some requests and not thousands.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Generator, Iterator, Mapping
from datetime import datetime
from fnmatch import fnmatchcase
from pathlib import Path, PosixPath
from typing import IO, Any, NoReturn

from fp8debug.errors import RecordError, RunError, UsageError

#: The protocols that stand for object storage, and the package that speaks each. Others that fsspec knows are refused: a chained
#: or a web address could make a reader fetch from anywhere.
PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs"}

#: Addresses of the objects below a folder that was listed, with sizes and times, by its address.
_LISTED: dict[str, dict[str, tuple[int, float]]] = {}
_LOCK = threading.Lock()


class ObjectPath(PosixPath):
    """A place in object storage, with the part of ``Path`` that reading needs; ``str`` gives the address."""

    def __str__(self) -> str:
        """Return the address, ``s3://bucket/key``."""
        protocol, _, rest = super().__str__().partition(":/")
        return f"{protocol}://{rest.lstrip('/')}"

    def __fspath__(self) -> str:
        return str(self)

    @property
    def store(self) -> Any:
        """The fsspec file system that reaches it.

        Raises:
            UsageError: the package that speaks its protocol is not installed.
        """
        protocol = str(self).partition("://")[0]
        try:
            import fsspec

            return fsspec.filesystem(protocol)
        except ImportError:
            package = PACKAGES[protocol]
            how = "pip install 'fp8debug[s3]'" if package == "s3fs" else f"pip install {package}"
            raise UsageError(f"{self}: {protocol}:// needs {package}, which is not installed: {how}") from None

    def _listed(self) -> dict[str, tuple[int, float]]:
        """Return the addresses, with sizes and times, below the folder that was listed and holds this; list this if none was."""
        address = str(self)
        with _LOCK:
            for root, found in _LISTED.items():
                if address == root or address.startswith(f"{root}/"):
                    return found
            found = _LISTED[address] = _list(self)
            return found

    def _below(self) -> Iterator[str]:
        prefix = f"{self}/"
        return (address for address in self._listed() if address.startswith(prefix))

    def exists(self, **_: Any) -> bool:
        """Return whether it is an object, or a folder that holds some."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Return whether it is an object."""
        try:
            return str(self) in self._listed()
        except RunError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return False
            raise

    def is_dir(self, **_: Any) -> bool:
        """Return whether objects lie below it."""
        return next(self._below(), None) is not None

    def is_symlink(self) -> bool:
        """Return False: there are none."""
        return False

    def stat(self, **_: Any) -> os.stat_result:
        """Return kind, size and the time of the last write; that of a folder is 0."""
        if self.is_file():
            size, at = self._listed()[str(self)]
            times = (int(at),) * 3 + (at,) * 3 + (int(1e9 * at),) * 3
            return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, *times))
        if self.is_dir():
            return os.stat_result((stat.S_IFDIR, 0, 0, 1, 0, 0, 0, *(0,) * 9))
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))

    def iterdir(self) -> Generator[ObjectPath, None, None]:
        """Yield what lies in this folder."""
        start = len(str(self)) + 1
        names = dict.fromkeys(address[start:].partition("/")[0] for address in self._below())
        return (self / name for name in names)

    def glob(self, pattern: Any, **_: Any) -> Iterator[ObjectPath]:  # type: ignore[override]  # one signature for 3.10 to 3.14
        """Yield the objects and folders below it whose path matches, part by part."""
        wanted = str(pattern).split("/")
        start = len(str(self)) + 1
        seen: dict[str, None] = {}
        for address in list(self._below()):
            parts = address[start:].split("/")[: len(wanted)]
            if len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted)):
                seen["/".join(parts)] = None
        return (self / name for name in seen)

    def rglob(self, pattern: Any, **_: Any) -> Iterator[ObjectPath]:  # type: ignore[override]  # as above
        """Yield the objects below it whose name matches."""
        start = len(str(self)) + 1
        names = (address[start:] for address in self._below())
        return (self / name for name in names if fnmatchcase(name.rpartition("/")[2], str(pattern)))

    def open(self, mode: str = "r", *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]  # without the overloads
        """Open an object for reading bytes; anything else is refused as a read-only file system refuses it."""
        if mode != "rb":
            self._refuse()
        try:
            opened: IO[Any] = self.store.open(str(self), "rb")
            return opened
        except UsageError:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.strerror:
                raise
            number = errno.ENOENT if isinstance(error, FileNotFoundError) else errno.EIO
            raise OSError(number, os.strerror(number) if number == errno.ENOENT else why(error), str(self)) from None

    def resolve(self, strict: bool = False) -> ObjectPath:
        """Return itself."""
        return self

    def absolute(self) -> ObjectPath:
        """Return itself."""
        return self

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Refuse."""
        self._refuse()

    def write_text(self, *_: Any, **__: Any) -> int:
        """Refuse."""
        self._refuse()

    def unlink(self, missing_ok: bool = False) -> None:
        """Refuse, but do nothing where nothing need be there."""
        if not missing_ok:
            self._refuse()

    def _refuse(self) -> NoReturn:
        raise OSError(errno.EROFS, "object storage is only read; name a local place (--out, -o)", str(self))


def is_remote(path: str | Path) -> bool:
    """Return whether a path is an address, ``protocol://...``; one that went through ``Path`` has lost a slash."""
    protocol, colon, rest = str(path).partition(":/")
    return bool(colon) and rest[:1] not in ("", ":") and protocol.isascii() and protocol.isalnum() and len(protocol) > 1


def place_of(path: str | Path) -> Path:
    """Return the place that a path or an address stands for.

    Raises:
        UsageError: an address of a kind that is not read.
    """
    if isinstance(path, ObjectPath) or not is_remote(path):
        return Path(path) if isinstance(path, str) else path
    protocol = str(path).partition(":")[0]
    if protocol not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        address = str(path).replace("://", ":/", 1).replace(":/", "://", 1)
        raise UsageError(f"{address}: {protocol}:// is not read; known are local folders and {known}")
    if not str(path).partition(":/")[2].strip("/"):
        raise UsageError(f"{path} names no bucket; expected an address such as {protocol}://bucket/runs/exp1")
    return ObjectPath(str(path))


def refuse_to_write(path: str | Path) -> None:
    """Do nothing for a local path: a step is appended to its file at once, which object storage has no way to do.

    Raises:
        RecordError: it is an address.
        UsageError: it is one of a kind that is not even read.
    """
    if is_remote(path):
        place = place_of(path)
        raise RecordError(f"{place} is in object storage, where no step can be appended; record to a local folder, copy it there")


def forget(path: Path, *, with_runs: bool = True) -> None:
    """List a place anew when it is looked at next, and what lies in it; does nothing for a local one.

    Args:
        path: a run, or a folder of runs.
        with_runs: the places in it, too; False for a folder of runs of which each keeps the list of its own.
    """
    if isinstance(path, ObjectPath):
        address = str(path)
        with _LOCK:
            for root in list(_LISTED):
                # A thread that looks at one file just after its run was forgotten leaves a list that holds only this file.
                is_in_it = with_runs and root.startswith(f"{address}/")
                if is_in_it or address == root or address.startswith(f"{root}/"):
                    del _LISTED[root]
            path.store.invalidate_cache()


def _list(place: ObjectPath) -> dict[str, tuple[int, float]]:
    store, address = place.store, str(place)
    try:
        names = {str(entry["name"]).rstrip("/").rpartition("/")[2] for entry in store.ls(address, detail=True)}
        is_run = "manifest.json" in names or any(name.startswith("rank=") for name in names)
        # Of what is no run only so much as names the runs in it: a whole bucket can hold anything.
        found = store.find(address, detail=True, **({} if is_run else {"maxdepth": 2}))
    except FileNotFoundError as error:
        raise RunError(f"{address} does not exist, neither bucket nor folder; check the address and the region") from error
    except Exception as error:  # each store has errors of its own: no credentials, no such host, no right
        raise RunError(f"{address} cannot be listed: {why(error)}") from None
    protocol = address.partition("://")[0]
    return {
        f"{protocol}://{str(name).lstrip('/')}": (int(entry.get("size") or 0), _written(entry)) for name, entry in found.items()
    }


def _written(entry: Mapping[str, Any]) -> float:
    """Return when an object was written, in seconds since 1970, as each store has it; 0 where it does not say."""
    found = entry.get("LastModified") or entry.get("last_modified") or entry.get("mtime") or entry.get("updated")
    if isinstance(found, str):
        found = datetime.fromisoformat(found.replace("Z", "+00:00"))
    return found.timestamp() if isinstance(found, datetime) else float(found or 0)


def why(error: BaseException) -> str:
    """Return an error of a store as one clause, with the way out of the one that everybody meets."""
    if "Credentials" in type(error).__name__ or "credentials" in str(error):
        return "no credentials were found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or a profile, or FSSPEC_S3_ANON=true"
    return (str(error) or type(error).__name__).splitlines()[0][:200]
