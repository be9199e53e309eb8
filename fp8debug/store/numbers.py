"""Columns of answers as numpy arrays. Arrow's own ``to_numpy()`` imports pandas wherever it is installed: 0.2 to 0.3 s."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def numbers_of(column: pa.Array | pa.ChunkedArray, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """Return the numbers of a column, ``[rows]``, any number for null; read-only where they are Arrow's own memory.

    Args:
        column: numbers of one width; no booleans, which take a bit each.
        dtype: their type, which has to be Arrow's: nothing is converted, so cast the column first.
    """
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.frombuffer(c.buffers()[1], dtype)[c.offset : c.offset + len(c)] for c in chunks if len(c)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.zeros(0, dtype)
