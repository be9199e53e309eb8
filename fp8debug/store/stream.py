"""One table on disk: rows go to an append-only Arrow IPC stream, which becomes a Parquet part; both are read here.

A stream has no buffer of its own: each message is one write to the operating system, so that a killed process loses at
most the message in flight and a forked child has nothing to flush.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fp8debug.store.columns import Message

_NUMBER = re.compile(r"-(\d{5,})\.(?:arrows|parquet)$")
ROWS_PER_GROUP = 65536
#: How file systems answer that have no synchronization of folders.
_NO_SYNC_OF_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EPERM, errno.EBADF, errno.EISDIR}


def stream_path(folder: Path, table: str, number: int) -> Path:
    """Return where stream ``number`` of a table lies in a rank's folder."""
    return folder / f"{table}-{number:05d}.arrows"


def part_path(folder: Path, table: str, number: int) -> Path:
    """Return where part ``number`` of a table lies in a rank's folder."""
    return folder / table / f"part-{number:05d}.parquet"


def number_of(path: Path) -> int:
    """Return the number in a stream's or part's name, -1 when it has none."""
    match = _NUMBER.search(path.name)
    return int(match.group(1)) if match else -1


def streams(folder: Path, table: str) -> dict[int, Path]:
    """Return the streams of a table in a rank's folder by number."""
    found = {number_of(path): path for path in folder.glob(f"{table}-*.arrows")}
    return {number: found[number] for number in sorted(found) if number >= 0}


def parts(folder: Path, table: str) -> dict[int, Path]:
    """Return the finished parts of a table in a rank's folder by number."""
    found = {number_of(path): path for path in (folder / table).glob("part-*.parquet")}
    return {number: found[number] for number in sorted(found) if number >= 0}


class Stream:
    """An Arrow IPC stream being written.

    Args:
        path: file to create.
        schema: schema of its batches, without dictionaries.
    """

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self.path, self.schema = path, schema
        self.num_rows = self.num_bytes = self.num_batches = 0
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(schema.serialize())

    def append(self, found: pa.RecordBatch | Message) -> None:
        """Append one batch; on an error the file is cut back to the batches before it."""
        self._write(found.data if isinstance(found, Message) else found.serialize())
        self.num_rows += found.num_rows
        self.num_batches += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def _write(self, message: pa.Buffer) -> None:
        view, written = memoryview(message), 0
        try:
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
        except OSError:
            os.ftruncate(self._descriptor, self.num_bytes)
            raise
        self.num_bytes += written


def read_stream(path: Path) -> pa.Table:
    """Return the whole batches of a stream; a batch cut off at the end is left out.

    Raises:
        pa.ArrowException: the file is no Arrow stream.
        OSError: it cannot be read.
    """
    data = pa.py_buffer(path.read_bytes())
    with contextlib.suppress(pa.ArrowException, OSError):
        table = pa.ipc.open_stream(data).read_all()  # at once: between its batches the training would wait for the interpreter
        table.validate(full=True)
        return table.combine_chunks()
    reader = pa.ipc.open_stream(data)
    batches: list[pa.RecordBatch] = []
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except (StopIteration, pa.ArrowException, OSError):
            break
        batches.append(batch)
    return pa.Table.from_batches(batches, reader.schema).combine_chunks()


def write_part(table: pa.Table, path: Path) -> None:
    """Write a zstd Parquet part, dictionaries for strings only, BYTE_STREAM_SPLIT for floats; it appears when whole.

    On return it is on the disk itself, name and all, so that what it replaces can go.
    """
    if not path.parent.exists():
        path.parent.mkdir(exist_ok=True)
        _sync_names(path.parent.parent)
    temporary = path.with_name(f".{path.name}.tmp")
    strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
    floats = [field.name for field in table.schema if pa.types.is_floating(field.type)]
    try:
        with pa.OSFile(str(temporary), "wb") as file:  # Arrow's own: a file of Python's takes the interpreter for each piece
            pq.write_table(
                table,
                file,
                compression="zstd",
                use_dictionary=strings,
                column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
                row_group_size=ROWS_PER_GROUP,
            )
        sync(temporary)
        temporary.replace(path)
        _sync_names(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(folder: Path) -> None:
    """Have the names in a folder on the disk itself, where the file system knows how."""
    try:
        sync(folder)
    except OSError as error:
        if error.errno not in _NO_SYNC_OF_FOLDERS:
            raise


def compact(path: Path, part: Path) -> None:
    """Turn a stream into a part and delete it; a stream without rows leaves no part."""
    table = read_stream(path)
    if table.num_rows and not part.exists():
        write_part(table, part)
    path.unlink()
