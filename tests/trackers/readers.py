"""Read back what the trackers' own libraries wrote to the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def wandb_records(folder: Path) -> Iterator[Any]:
    """Yield the records of an offline run of W&B.

    The file is a log of LevelDB behind a header of 7 bytes: blocks of 32 KiB, in them chunks of CRC (4 bytes), length (2) and
    kind (1), which is 1 for a whole record and 2, 3, 4 for the first, a middle and the last part of one.
    """
    from wandb.proto import wandb_internal_pb2 as protocol

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, place + 4)
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            record = protocol.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_history(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an offline run of W&B."""
    rows = [record.history.item for record in wandb_records(folder) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]
