"""Allocation of a table's rows to a module's observations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

from fp8debug.kernels.slot_rows import Slots
from fp8debug.observer.observer import Observer, RowInfo, RowKey
from fp8debug.observer.sharding import ShardLayout


class RowGroup(NamedTuple):
    """Rows of some keys, valid as long as the module's place in the step and its layout stay."""

    keys: tuple[RowKey, ...]
    rows: list[int]
    infos: dict[int, RowInfo]


class RowAllocator:
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
        self._known: dict[int, RowGroup] = {}  # by the identity of their keys
        self._call_index = -1
        self._layout: ShardLayout | None = None

    def record(
        self,
        keys: tuple[RowKey, ...],
        call_index: int,
        layout: ShardLayout | None,
        found: Sequence[Slots],
        device: torch.device,
    ) -> None:
        """Merge observations into the rows of some keys.

        Args:
            keys: which rows; best the same object in every step.
            call_index: the module's place in the step, mostly as before.
            layout: which piece of the whole each tensor is, mostly as before.
            found: for each key what :meth:`Table.merge` takes.
            device: where they are.

        Raises:
            RuntimeError: one step has more keys than a module has rows.
        """
        if call_index != self._call_index or layout is not self._layout:
            self._move(call_index, layout)
        table, filled = self._observer.filled(device)
        known = self._known.get(id(keys))  # which are kept with it, so that no others have their identity
        if known is None:
            known = self._new(keys)
        filled.update(known.infos)
        table.merge(known.rows, found)

    def _move(self, call_index: int, layout: ShardLayout | None) -> None:
        if call_index != self._call_index or layout != self._layout:
            self._known.clear()
        self._call_index, self._layout = call_index, layout

    def _new(self, keys: tuple[RowKey, ...]) -> RowGroup:
        if len(self._known) > 2 * self._count:
            self._known.clear()
        self._observer.modules_seen.add(self._module)
        pieces, infos = self._layout or {}, dict[int, RowInfo]()
        for key in keys:
            infos[self._row(key, infos)] = RowInfo(self._module, self._call_index, key, pieces.get(key.tensor))
        known = self._known[id(keys)] = RowGroup(keys, list(infos), infos)
        return known

    def _row(self, key: RowKey, held: Collection[int]) -> int:
        """Return the row of a key; a new one's is none of those that are held or that this step has recorded anything in."""
        row = self._rows.get(key)
        if row is not None:
            return row
        if len(self._rows) == self._count:  # casts that this step has not seen give way
            self._rows = {known: at for known, at in self._rows.items() if at in held or self._observer.is_filled(at)}
            self._known.clear()
        taken = set(self._rows.values())
        row = next((at for at in range(self._first, self._first + self._count) if at not in taken), None)
        if row is None:
            raise RuntimeError("the casts of this module changed too often within one step")
        self._rows[key] = row
        return row
