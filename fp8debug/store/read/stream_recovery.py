"""Reads an Arrow IPC stream that may be damaged: whole batches count, message by message, and losses are reported.

    FF FF FF FF | length of the metadata, int32 | metadata, a flatbuffer | body

Half a message at the end is no damage: the writer was killed there, or writes it just now. Compressed bodies and dictionaries,
which our writer does not make, are refused: few bytes of them could claim any amount of memory.
"""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa

from fp8debug.store.file_checks import MAX_STREAM_BYTES, MAX_TEXT, RefusedError, size_of

_MARK = b"\xff\xff\xff\xff"
#: What may be missing at the end without being called damage: a message this much larger than the largest before it.
_TORN, _SLACK = 4, 1 << 20
#: No first message of ours is longer; that of the statistics takes 14 kB.
_LONGEST_SCHEMA = 1 << 16
#: Fields of the flatbuffer tables Message and RecordBatch.
_HEADER_TYPE, _HEADER, _BODY_LENGTH, _COMPRESSION = 1, 2, 3, 3
_SCHEMA_MESSAGE, _BATCH_MESSAGE = 1, 3


def read_batches(path: Path, root: Path) -> tuple[pa.Table, str | None]:
    """Return the whole batches of a stream, and in a clause what of it cannot be read, if anything.

    Args:
        path: the file.
        root: the run's folder.

    Raises:
        OSError: it cannot be read.
        pa.ArrowException: it is no Arrow stream.
        RefusedError: it is no file, too large, or no stream of ours.
    """
    size = size_of(path, root)
    if size > MAX_STREAM_BYTES:
        raise RefusedError(f"is larger than {MAX_STREAM_BYTES >> 20} MB")
    with path.open("rb") as file:
        data: bytes = file.read(size)
    if (header := _schema(data)) is None:
        return pa.table({}), None
    schema, start = header
    batches: list[pa.RecordBatch] = []
    largest, num_lost, reason = _SLACK, 0, ""
    while start < len(data):
        end = None
        try:
            if (end := _end(data, start)) is None:
                if len(data) - start > _TORN * largest:
                    num_lost, reason = num_lost + len(data) - start, reason or f"is cut off at byte {start}"
                break
            if end == start:  # the mark of the end
                break
            batches.append(_batch(data[start:end], schema))
            largest = max(largest, end - start)
        except (pa.ArrowException, OSError, ValueError, struct.error, IndexError) as error:
            said = (str(error) or type(error).__name__).splitlines()[0][:160]
            reason = reason or f"is damaged at byte {start}: {said}"
            num_lost += (end or len(data)) - start
        if end is None:
            break
        start = end
    lost = f"{reason}; {num_lost} of {len(data)} bytes are left out" if num_lost else None
    return pa.Table.from_batches(batches, schema).combine_chunks(), lost


def _schema(data: bytes) -> tuple[pa.Schema, int] | None:
    """Return the schema and where it ends; None where no more than its beginning is written yet."""
    try:
        end = _end(data, 0)
        if end is None and len(data) <= _LONGEST_SCHEMA and _MARK.startswith(data[:4]) and _is_begun(data):
            return None
        if end is None or _number(data, _table(data, 8), _HEADER_TYPE, "B") != _SCHEMA_MESSAGE:
            raise RefusedError("is no Arrow stream")
    except (struct.error, IndexError):
        raise RefusedError("is no Arrow stream") from None
    return pa.ipc.read_schema(pa.py_buffer(data[:end])), end


def _is_begun(data: bytes) -> bool:
    """Return whether this may be the beginning of a schema: none is longer than ours, and no message follows in it."""
    claimed = int.from_bytes(data[4:8], "little") if len(data) >= 8 else 0
    return claimed <= _LONGEST_SCHEMA and _MARK not in data[4:]


def _end(data: bytes, start: int) -> int | None:
    """Return where the message ends that begins here; None when it is cut off, ``start`` for the mark of the end."""
    if len(data) - start < 8:
        return None
    if data[start : start + 4] != _MARK:
        raise RefusedError("no message begins here")
    (length,) = struct.unpack_from("<i", data, start + 4)
    if length == 0:
        return start
    if length < 8:
        raise RefusedError("a message of negative length")
    if start + 8 + length > len(data):
        return None
    body = _number(data, _table(data, start + 8), _BODY_LENGTH, "q")
    if body < 0:
        raise RefusedError("a body of negative length")
    end = start + 8 + length + body
    return end if end <= len(data) else None


def _batch(message: bytes, schema: pa.Schema) -> pa.RecordBatch:
    table = _table(message, 8)
    if _number(message, table, _HEADER_TYPE, "B") != _BATCH_MESSAGE:
        raise RefusedError("a message that is no batch of rows")
    place = _field(message, table, _HEADER)
    if place is None:
        raise RefusedError("a message without a batch")
    header = place + struct.unpack_from("<I", message, place)[0]
    if _field(message, header, _COMPRESSION) is not None:
        raise RefusedError("a compressed batch")
    import pyarrow.compute as pc  # takes 50 ms, and few runs need it

    batch = pa.ipc.read_record_batch(pa.py_buffer(message), schema)
    batch.validate(full=True)
    if batch.num_rows > len(message):
        raise RefusedError(f"claims {batch.num_rows} rows in {len(message)} bytes")
    for column in batch.columns:
        if pa.types.is_string(column.type) and (pc.max(pc.binary_length(column)).as_py() or 0) > MAX_TEXT:
            raise RefusedError(f"a string longer than {MAX_TEXT >> 10} KB")
    return batch


def _table(data: bytes, start: int) -> int:
    """Return where the root table of a flatbuffer lies."""
    return start + int(struct.unpack_from("<I", data, start)[0])


def _field(data: bytes, table: int, number: int) -> int | None:
    """Return where a table's field lies, None when it is not there."""
    entries = table - struct.unpack_from("<i", data, table)[0]
    if entries < 0 or table < 0:
        raise RefusedError("a table that lies outside")
    size = struct.unpack_from("<H", data, entries)[0]
    if 4 + 2 * number + 2 > size:
        return None
    offset = struct.unpack_from("<H", data, entries + 4 + 2 * number)[0]
    return table + offset if offset else None


def _number(data: bytes, table: int, number: int, kind: str) -> int:
    place = _field(data, table, number)
    return 0 if place is None else int(struct.unpack_from(f"<{kind}", data, place)[0])
