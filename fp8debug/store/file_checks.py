"""Checks of a file before its content is used: kind, place, size, depth, and what a Parquet footer may claim.

A run's folder may come from anywhere. Each limit here is far beyond what a recording needs and far below what harms a reader, and
is looked at before the thing itself is read.
"""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fp8debug.store.locations import place_of

#: A manifest of 10,000 modules takes 12 MB.
MAX_JSON_BYTES = 64 << 20
MAX_DEPTH = 64
#: A stream becomes a part at 64 MB.
MAX_STREAM_BYTES = 1 << 30
#: 70,000 row groups of our columns would fit.
MAX_FOOTER_BYTES = 64 << 20
#: Elements of one list in a footer: its schema, its row groups. A footer nested deeper than the stack allows has more.
MAX_FOOTER_LIST = 20_000
MAX_COLUMNS = 2_000
#: Nullable lists within nullable lists; ours have level 3.
MAX_LEVEL = 8
#: Rows of our tables take at least some bytes each; these are 0.06.
MAX_ROWS_PER_BYTE = 16
MAX_EXPANSION, FREE_EXPANSION = 2_000, 64 << 20
MAX_GROUP_BYTES = 2 << 30
#: No name and no message is longer; strings are looked at only where a row group holds more of them than ``SUSPICIOUS``.
MAX_TEXT, SUSPICIOUS = 1 << 16, 4 << 20


class RefusedError(ValueError):
    """A file that is not read, and why in a clause that follows the file's name."""


def size_of(path: Path, root: Path | None = None) -> int:
    """Return the size of a regular file.

    Args:
        path: the file.
        root: the folder that it must not lead out of by a link.

    Raises:
        OSError: there is none, or it cannot be looked at.
        RefusedError: it is a folder, a FIFO or a device, or a link that leads out.
    """
    if root is not None:
        leads_inside(path, root)
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a FIFO"), (stat.S_ISSOCK, "a socket"))
        raise RefusedError(f"is {next((word for test, word in kinds if test(found.st_mode)), 'a device')}, not a file")
    return found.st_size


def leads_inside(path: Path, root: Path) -> None:
    """Do nothing for what lies where its name says, and for a link that stays below the folder.

    Raises:
        OSError: a link that leads round in a circle.
        RefusedError: a link that leads out of the folder.
    """
    try:
        if path.is_symlink() and not path.resolve().is_relative_to(root.resolve()):
            raise RefusedError("is a link that leads out of the run's folder")
    except RuntimeError:  # before Python 3.13 for links in a circle
        raise RefusedError("is a link that leads round in a circle") from None


def read_text(path: Path, root: Path | None = None, max_bytes: int = MAX_JSON_BYTES) -> str:
    """Return the text of a file of limited size.

    Args:
        path: the file; one that the user named may also be a pipe, or lie in object storage.
        root: for a file of a run's folder: that folder.
        max_bytes: its size at most.

    Raises:
        OSError: it cannot be read.
        ValueError: it is refused, or no UTF-8.
    """
    if root is not None and size_of(path, root) > max_bytes:
        raise RefusedError(f"is larger than {max_bytes >> 20} MB")
    with (path if root is not None else place_of(path)).open("rb") as file:
        data: bytes = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise RefusedError(f"is larger than {max_bytes >> 20} MB")
    return data.decode("utf-8")


def read_json(path: Path, root: Path | None = None, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the value of a JSON file of limited size and depth; arguments as for :func:`read_text`.

    Raises:
        OSError: it cannot be read.
        ValueError: it is refused, or no JSON.
    """
    return parse_json(read_text(path, root, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """Return the value of JSON text, nested at most ``MAX_DEPTH`` deep.

    Raises:
        ValueError: it is no JSON, or nested deeper.
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise RefusedError(f"is nested deeper than {MAX_DEPTH} levels") from None
    level, depth = [value], 0
    while level:
        if depth > MAX_DEPTH:
            raise RefusedError(f"is nested deeper than {MAX_DEPTH} levels")
        children = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list)))
        level, depth = [inner for values in children for inner in values if isinstance(inner, (dict, list))], depth + 1
    return value


def read_footer(path: Path, size: int) -> pq.FileMetaData:
    """Return the footer of a Parquet file whose claims stay within the limits.

    Args:
        path: the file.
        size: its bytes.

    Raises:
        OSError: it cannot be read.
        pa.ArrowException: it is no Parquet file.
        RefusedError: it claims what no recording of ours holds.
    """
    with path.open("rb") as file:
        if size >= 12:
            file.seek(size - 8)
            tail = file.read(8)
            length = int.from_bytes(tail[:4], "little")
            if tail[4:] != b"PAR1" or length > size - 12:
                raise RefusedError("has no Parquet footer at its end")
            if length > MAX_FOOTER_BYTES:
                raise RefusedError(f"has a footer of {length >> 20} MB")
        limits = {"thrift_string_size_limit": MAX_FOOTER_BYTES, "thrift_container_size_limit": MAX_FOOTER_LIST}
        try:
            metadata = pq.ParquetFile(file, **limits).metadata
        except UnicodeDecodeError:
            raise RefusedError("has a column whose name is no text") from None
    _check_claims(metadata, size)
    return metadata


def _check_claims(metadata: pq.FileMetaData, size: int) -> None:
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    if metadata.num_rows != sum(group.num_rows for group in groups) or any(group.num_rows < 0 for group in groups):
        raise RefusedError("claims another number of rows than its row groups")
    if metadata.num_rows > MAX_ROWS_PER_BYTE * size:
        raise RefusedError(f"claims {metadata.num_rows} rows in {size} bytes")
    large = [group.total_byte_size for group in groups]
    if any(not 0 <= number <= MAX_GROUP_BYTES for number in large) or sum(large) > MAX_EXPANSION * size + FREE_EXPANSION:
        raise RefusedError(f"claims to hold {sum(large)} bytes in {size}")
    if metadata.num_columns > MAX_COLUMNS:
        raise RefusedError(f"has {metadata.num_columns} columns")
    levels = (metadata.schema.column(index).max_definition_level for index in range(metadata.num_columns))
    if max(levels, default=0) > MAX_LEVEL:
        raise RefusedError("has columns of lists nested too deep")


def twice(schema: pa.Schema) -> str | None:
    """Return a name that two columns share, in whatever case; None where each has its own."""
    counted = Counter(name.lower() for name in schema.names)
    return next((name for name, number in counted.items() if number > 1), None)


def places(metadata: pq.FileMetaData) -> dict[str, int]:
    """Return the place of each plain column in a row group, by name."""
    paths = (metadata.schema.column(index).path for index in range(metadata.num_columns))
    return {path: index for index, path in enumerate(paths) if "." not in path}


def has_long_text(metadata: pq.FileMetaData, path: Path, schema: pa.Schema) -> bool:
    """Return whether a string is longer than ``MAX_TEXT``, by reading the columns that are large enough to hold one."""
    at = places(metadata)
    texts = [name for name in schema.names if name in at and _is_text(schema.field(name).type)]
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        large = [name for name in texts if row_group.column(at[name]).total_uncompressed_size > SUSPICIOUS]
        if large and _longest(path, group, large) > MAX_TEXT:
            return True
    return False


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_dictionary(kind))


def _longest(path: Path, group: int, names: list[str]) -> int:
    """Return the length of the longest string, from the dictionaries, so that one string in many rows is held once."""
    import pyarrow.compute as pc

    with path.open("rb") as file, pq.ParquetFile(file, read_dictionary=names) as parquet:
        chunks = [c for name in names for c in parquet.read_row_group(group, columns=[name]).column(0).chunks]
    lengths = [pc.max(pc.binary_length(c.dictionary if pa.types.is_dictionary(c.type) else c)).as_py() for c in chunks]
    return max((length for length in lengths if length is not None), default=0)
