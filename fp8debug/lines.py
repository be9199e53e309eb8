"""Which rows of a table a module's observations go to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fp8debug.observer import Observer, RowInfo, RowKey
from fp8debug.sharding import Piece


class Line(NamedTuple):
    """Where what a key names is recorded, as long as its place in the step and its piece stay."""

    key: RowKey
    row: int
    info: RowInfo


class Lines:
    """The rows of one module, the same from step to step.

    Args:
        observer: whose tables they are in.
        module: FQN.
    """

    def __init__(self, observer: Observer, module: str) -> None:
        self._observer, self._module = observer, module
        self._count = observer.settings.rows_per_module
        self._first = observer.num_modules * self._count
        self._rows: dict[RowKey, int] = {}
        self._known: dict[int, Line] = {}

    def record(
        self, key: RowKey, call_index: int, piece: Piece | None, partials: Mapping[Any, Any], device: torch.device
    ) -> None:
        """Merge one observation into the key's row.

        Raises:
            RuntimeError: one step has more keys than a module has rows.
        """
        line = self._known.get(id(key))  # most keys are the same object in every step, and a line keeps its key
        if line is None or line.key is not key or line.info.call_index != call_index or line.info.piece != piece:
            if len(self._known) > 2 * self._count:
                self._known.clear()
            self._observer.modules_seen.add(self._module)
            info = RowInfo(self._module, call_index, key, piece)
            line = self._known[id(key)] = Line(key, self._row(key), info)
        table, filled = self._observer.filled(device)
        table.merge(line.row, partials)
        filled[line.row] = line.info

    def _row(self, key: RowKey) -> int:
        row = self._rows.get(key)
        if row is not None:
            return row
        if len(self._rows) == self._count:  # casts that this step has not seen give way
            self._rows = {known: at for known, at in self._rows.items() if self._observer.is_filled(at)}
            self._known.clear()
        taken = set(self._rows.values())
        row = next((at for at in range(self._first, self._first + self._count) if at not in taken), None)
        if row is None:
            raise RuntimeError("the casts of this module changed too often within one step")
        self._rows[key] = row
        return row
