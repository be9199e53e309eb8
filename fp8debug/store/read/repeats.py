"""Bytes of a part that hold the columns of its sites, so that parts with equal ones are found without unpacking them.

Each sampled step has rows of the same sites in the same order. So parts with equally many steps differ in steps and metrics, and
agree in the columns that name the sites. Equal bytes that are unpacked in the same way are equal values: of such parts one has
every value that all of them have. Damage in these columns makes other bytes, and the part is read as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq

#: Columns of ``raw`` that name a site, and its place in the order of execution.
SITE_COLUMNS = ("module", "gemm", "tensor", "cast_name", "reference", "actual", "call_index")


class SiteBytes(NamedTuple):
    """Place of the columns of the sites in a part.

    Attributes:
        spans: offset and length of each stretch of bytes.
        layout: digest of what the footer says of how they are unpacked.
    """

    spans: tuple[tuple[int, int], ...]
    layout: bytes

    def digest(self, path: Path) -> bytes | None:
        """Return a digest of the bytes and their layout; None where they cannot be read."""
        found = blake2b(self.layout, digest_size=16)
        try:
            with path.open("rb") as file:
                for offset, length in self.spans:
                    file.seek(offset)
                    data = file.read(length)
                    if len(data) != length:
                        return None
                    found.update(data)
        except (OSError, ValueError):
            return None
        return found.digest()


def site_bytes(metadata: pq.FileMetaData, at: Mapping[str, int]) -> SiteBytes | None:
    """Return where a part holds the columns of its sites; None where it lacks one of them, or its footer makes no sense.

    Args:
        metadata: footer of the part.
        at: place of each column in a row group.
    """
    if not at.keys() >= set(SITE_COLUMNS):
        return None
    spans: list[tuple[int, int]] = []
    layout: list[object] = [str(metadata.schema.column(at[name])) for name in SITE_COLUMNS]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        layout.append(group.num_rows)
        for name in SITE_COLUMNS:
            chunk = group.column(at[name])
            data, size = chunk.data_page_offset, chunk.total_compressed_size
            start = chunk.dictionary_page_offset if chunk.has_dictionary_page else data
            if not 0 <= start <= data <= start + size:
                return None
            layout.append((data - start, size, chunk.compression))
            if spans and sum(spans[-1]) == start:
                spans[-1] = spans[-1][0], spans[-1][1] + size
            else:
                spans.append((start, size))
    return SiteBytes(tuple(spans), blake2b(repr(layout).encode(), digest_size=16).digest())
