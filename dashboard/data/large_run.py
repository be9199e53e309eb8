"""A large run as the pages read it: its modules are listed when somebody needs them, as that takes a pass over all rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa

from fp8debug import Run
from fp8debug.store.read.files import RunFiles


class BackgroundRun(Run):
    """A run on a connection that leaves one core to the answers that a reader waits for."""

    def _create_views(self, files: RunFiles) -> None:
        threads = self._connection.execute("SELECT CAST(current_setting('threads') AS INTEGER)").fetchall()[0][0]
        self._connection.execute(f"SET threads = {max(1, threads - 1)}")
        super()._create_views(files)


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
