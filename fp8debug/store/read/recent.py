"""The last sampled steps of a run that is being recorded, read as a run: for the judge that runs beside the training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fp8debug.store.read.files import RunFiles
from fp8debug.store.read.run import Run
from fp8debug.store.schema import STATS, STEPS, Column

#: Sampled steps whose rows are read: rules that ask for three bad ones in a row see some more.
NUM_SAMPLED = 8
#: Threads of the query engine, beside a training that wants the cores itself.
NUM_THREADS = 2


class RecentRun(Run):
    """A run whose statistics, updates and parameters are those of its last sampled steps; losses and events are all there.

    A step counts once every recording rank has written it; a rank that is more than the window behind is not waited for.

    Args:
        path: the run's folder.
        num_sampled: sampled steps in the window.

    Attributes:
        first: first step of the window.
        last: last step that every rank has written; -1 where there is none.

    Raises:
        RunError: as for a Run.
    """

    _has_all_rows = False

    def __init__(self, path: str | Path, num_sampled: int = NUM_SAMPLED) -> None:
        self._num_sampled = num_sampled
        self.first, self.last = 0, -1
        self._sampled: list[int] = []
        super().__init__(path)

    @property
    def sampled_steps(self) -> list[int]:
        """All sampled steps up to ``last``, those before the window too: rules count their warm-up from the first."""
        return self._sampled

    def _create_views(self, files: RunFiles) -> None:
        self._connection.execute(f"SET threads = {NUM_THREADS}")
        self.first, self.last = 0, 2**62
        steps = self._table_sql("steps", [c for c in STEPS if c.name in ("step", "rank", "sampled")], files)
        self._create("all_steps", steps)
        query = "SELECT DISTINCT step FROM all_steps WHERE sampled AND step IS NOT NULL ORDER BY step"
        sampled = self.sql(query)["step"].to_pylist()
        behind = sampled[-self._num_sampled] if len(sampled) > self._num_sampled else 0
        self.first = behind
        self._create("all_stats", self._table_sql("stats", [c for c in STATS if c.merge == "key" or c.name == "rank"], files))
        # The files were read one after the other: a step's row may be there, and its statistics, written before it, not yet.
        query = f"""
            SELECT CASE WHEN coalesce(stats.last, -1) < steps.sampled THEN steps.sampled - 1 ELSE steps.last END AS last
            FROM (SELECT rank, max(step) AS last, max(step) FILTER (WHERE sampled) AS sampled FROM all_steps GROUP BY rank)
                AS steps
            LEFT JOIN (SELECT rank, max(step) AS last FROM all_stats GROUP BY rank) AS stats USING (rank)
            WHERE steps.last >= {behind}"""
        self.last = min((row["last"] for row in self.sql(query).to_pylist()), default=-1)
        self._sampled = [step for step in sampled if step <= self.last]
        self.first = min(self._sampled[-self._num_sampled :], default=0)
        self._footer_ends = None  # they know of steps behind the last that every rank has written
        super()._create_views(files)

    def _table_sql(self, table: str, columns: Sequence[Column], files: RunFiles) -> str:
        text = super()._table_sql(table, columns, files)
        if table == "events":
            return text
        first = self.first if table in ("stats", "updates", "parameters") else 0
        return f"SELECT * FROM (\n{text}\n) WHERE step BETWEEN {first} AND {self.last}"
