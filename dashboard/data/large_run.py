"""A large run as the pages read it: its modules are listed when somebody needs them, as that takes a pass over all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from fp8debug import Run


class LargeRun(Run):
    """A run whose modules the first page does not wait for."""

    _has_view = False

    @property
    def knows_modules(self) -> bool:
        """True if ``modules`` costs nothing."""
        return self._modules is not None

    def _list_modules(self) -> None:
        self._has_view = False  # of this state of the files

    def _query(self, query: str, params: Sequence[object] | Mapping[str, object] | None) -> pa.Table:
        if not self._has_view and "modules" in query.lower():
            super()._list_modules()
            self._has_view = True
        return super()._query(query, params)
