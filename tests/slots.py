"""Contents of a table's rows, by the names of slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fp8debug.observer.table import Snapshot


def slots_of(snapshot: Snapshot, rows: Sequence[int]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the slots of some rows, ``[len(rows)]`` or for a list ``[len(rows), size]``."""
    parts, found = snapshot.layout.cut(torch.from_numpy(snapshot.memory())), {}
    for name, (group, start, stop) in snapshot.layout.places.items():
        values = parts[group].numpy()[list(rows), start:stop]
        found[name] = values if stop - start > 1 else values[:, 0]
    snapshot.discard()
    return found
