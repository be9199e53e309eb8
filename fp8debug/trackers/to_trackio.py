"""Trackio: the current run of ``trackio.init()``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.trackers.base import TRACKERS, Tracker, TrackerRun, is_class, markdown_table


class TrackioRun(TrackerRun):
    """A run of Trackio.

    Args:
        run: what ``trackio.init()`` returned.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers at their step; a step that the training logs by itself is counted on as before."""
        self._log(dict(values), step)

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Send an alert of Trackio, which also prints it."""
        from trackio import AlertLevel

        self._run.alert(title, text, AlertLevel.ERROR if severity == "error" else AlertLevel.WARN, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Write a table as Markdown: Trackio's own tables need pandas."""
        from trackio import Markdown

        self._log({name: Markdown(markdown_table(columns, rows))}, step)

    def report(self, path: Path) -> None:
        """Keep the page as an artifact."""
        self._run.log_artifact(path, name=f"fp8debug-{self._run.name}", type="report")

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()

    def _log(self, values: dict[str, Any], step: int) -> None:
        following = getattr(self._run, "_next_step", None)
        self._run.log(values, step)
        if following is not None and self._run._next_step == step + 1:  # the training's next log() would be numbered by it
            self._run._next_step = following


class Trackio(Tracker):
    """Trackio."""

    name, module, package = "trackio", "trackio", "trackio"
    opening = "trackio.init(project)"

    def find(self) -> TrackerRun | None:
        """Return the current run of this thread."""
        variables = sys.modules.get("trackio.context_vars")
        run = None if variables is None else variables.current_run.get()
        return None if run is None else TrackioRun(run)

    def wrap(self, given: object) -> TrackerRun | None:
        """Take what ``trackio.init()`` returned."""
        return TrackioRun(given) if is_class(type(given), "Run", "trackio") else None

    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        """Open a run in the local store, or where ``TRACKIO_SPACE_ID`` and its like say."""
        import trackio

        return TrackioRun(trackio.init(project=project, name=name, embed=False))


TRACKERS.add("trackio", Trackio())
