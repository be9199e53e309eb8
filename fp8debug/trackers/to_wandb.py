"""Weights & Biases: ``wandb.run``.

Numbers go into the row that the training logs next (``commit=False``), and a step axis of their own goes with them. A row of
fp8debug's own would move W&B's step counter, and rows that the training logs under an explicit step would be dropped by W&B as
lying in the past. So the axis of the training's own curves stays as it is, and where the training logs more rarely than steps are
sampled, each of its rows has the last sampled step before it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp8debug.trackers.base import PREFIX, TRACKERS, Tracker, TrackerRun, is_class

#: W&B refuses longer titles of alerts.
MAX_TITLE = 63


class WandbRun(TrackerRun):
    """A run of W&B.

    Args:
        run: what ``wandb.init()`` returned.
        is_own: opened by fp8debug, so that each sampled step has a row.
    """

    def __init__(self, run: Any, *, is_own: bool = False) -> None:
        self._run, self._is_own = run, is_own
        self._has_axis = False

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers to the row under way; their x axis is ``fp8debug/step``."""
        if not self._has_axis:
            self._run.define_metric(f"{PREFIX}step", hidden=True)
            self._run.define_metric(f"{PREFIX}*", step_metric=f"{PREFIX}step")
            self._has_axis = True
        self._run.log({f"{PREFIX}step": step, **values}, commit=self._is_own)

    def alert(self, step: int, title: str, text: str, severity: str) -> None:
        """Send an alert of W&B, which mails or posts it as the user's settings say."""
        self._run.alert(title[:MAX_TITLE], text, level="ERROR" if severity == "error" else "WARN")

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]], step: int) -> None:
        """Put a table into the summary."""
        import wandb

        data: list[Any] = [[row.get(column) for column in columns] for row in rows]
        self._run.log({name: wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)}, commit=self._is_own)

    def report(self, path: Path) -> None:
        """Log the page as an artifact, whose files W&B copies at once."""
        import wandb

        artifact = wandb.Artifact(f"fp8debug-{self._run.id}", type="report")
        artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class Wandb(Tracker):
    """Weights & Biases."""

    name, module, package = "wandb", "wandb", "wandb"
    opening = "wandb.init()"

    def find(self) -> TrackerRun | None:
        """Return ``wandb.run``."""
        run = getattr(sys.modules.get("wandb"), "run", None)
        return None if run is None else WandbRun(run)

    def wrap(self, given: object) -> TrackerRun | None:
        """Take what ``wandb.init()`` returned."""
        return WandbRun(given) if is_class(type(given), "Run", "wandb") else None

    def create(self, name: str, project: str, folder: Path) -> TrackerRun:
        """Open a run; ``WANDB_MODE``, ``WANDB_ENTITY`` and ``WANDB_DIR`` hold as ever."""
        import wandb

        settings = wandb.Settings(console="off", silent=True)
        return WandbRun(wandb.init(project=project, name=name, settings=settings), is_own=True)


TRACKERS.add("wandb", Wandb())
