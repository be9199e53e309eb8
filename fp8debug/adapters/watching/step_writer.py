"""Writing of finished steps: rows and events, made in the writer's thread, so that training does not wait for them.

A guard or a dump decides by the rows what training does next; with either they are made at once, which keeps a run the same
from one time to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import partial
from typing import Any

import pyarrow as pa

from fp8debug.adapters.watching.dumps import Dumper
from fp8debug.adapters.watching.pipeline import first_call
from fp8debug.adapters.watching.recipe_changes import RecipeChanges
from fp8debug.adapters.watching.row_batch import BatchCache, by_execution, checked_nonfinite, stats_batch
from fp8debug.observer.observer import FinishedStep, RowInfo
from fp8debug.observer.table import Snapshot
from fp8debug.store.write.writer import RunWriter
from fp8debug.trackers.live import Live
from fp8debug.types import RESULTS, Gemm


class StepWriter:
    """Takes an observer's finished steps, in order.

    Args:
        writer: where rows and events go.
        changes: whose guard, if any, is shown the rows.
        dumper: is told of the first NaN or Inf of a step, and of its loss.
        live: is told when the rows of a step are written; None for nobody.

    Attributes:
        stages: numbers of the pipeline stages that run here; none without a pipeline.
    """

    def __init__(self, writer: RunWriter, changes: RecipeChanges, dumper: Dumper | None, live: Live | None = None) -> None:
        self.stages: set[int] = set()
        self._writer, self._changes, self._dumper, self._live = writer, changes, dumper, live
        self._nonfinite: set[tuple[str, str, str]] = set()
        self._found: list[tuple[str, str]] = []
        self._described = BatchCache(writer.rank, writer.breathe)

    @property
    def decides(self) -> bool:
        """True if what training does next hangs on the rows."""
        return self._dumper is not None or self._changes.has_guard

    def __call__(self, finished: FinishedStep) -> None:
        """Take one step, whose copies have arrived."""
        if finished.progress is None:
            finished.progress = _Progress()
        progress: _Progress = finished.progress
        for number, (snapshot, filled) in enumerate(finished.tables):
            if number < progress.num_written:
                continue
            if number == len(progress.rows):
                make = partial(self._rows, finished, snapshot, filled)
                progress.rows.append(_copied(make()) if self.decides else make)
            if not self._writer.stats(progress.rows[number], len(filled), once=True):
                snapshot.discard()
            progress.num_written = number + 1
        self._write_optimizer_steps(finished, progress)
        if self._dumper is not None and not progress.is_judged:
            reasons = [f"{module} {message}" for module, message in by_execution(self._found)]
            self._dumper.judge(finished.step, reasons, finished.scalars.get("loss"))
            self._found = []
            progress.is_judged = True
        if progress.step is None:
            unseen, now = checked_nonfinite(finished), datetime.now(timezone.utc)
            row = {"time": now, "step": finished.step, "sampled": finished.sampled, **unseen, **finished.scalars}
            is_later = (unseen or finished.tables) and not self.decides
            progress.step = partial(self._with_nonfinite_event, row) if is_later else self._with_nonfinite_event(row)
        self._writer.steps(progress.step, once=True)
        if self._live is not None and finished.sampled:
            self._live.look(is_due=True)
            self._writer.then(partial(self._live.note_step, finished.step))

    def _write_optimizer_steps(self, finished: FinishedStep, progress: _Progress) -> None:
        for update in finished.updates[progress.num_updates :]:
            self._writer.updates(partial(update.rows, finished.step), once=True)
            progress.num_updates += 1
        for found in finished.parameters[progress.num_parameters :]:
            self._writer.parameters(partial(found.rows, finished.step), once=True)
            progress.num_parameters += 1

    def _rows(self, finished: FinishedStep, snapshot: Snapshot, filled: dict[int, RowInfo]) -> pa.RecordBatch:
        self._writer.breathe()
        row_batch = self._described.row_batch(filled, snapshot.layout, first_call(min(self.stages, default=0)))
        batch = stats_batch(finished, snapshot, row_batch)
        self._writer.breathe()
        if self._changes.has_guard:
            self._changes.judge_step(finished.step, row_batch.columns())
        for module, message in row_batch.first_nonfinite(self._nonfinite):
            self._writer.breathe()
            self._writer.event(finished.step, "nonfinite", module, message)
            if self._dumper is not None:
                self._found.append((module, message))
        return batch

    def _with_nonfinite_event(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a step's row; write an event where it has the run's first NaN or Inf and no row of statistics tells of it."""
        if "nonfinite_module" in row and not self._nonfinite:
            gemm = Gemm(row["nonfinite_gemm"])
            self._nonfinite.add((row["nonfinite_module"], gemm.value, RESULTS[gemm].value))
            unseen = "" if row["sampled"] else ", in a step that was not sampled"
            message = f"first NaN or Inf{unseen}: {gemm.value}; origin: {row['nonfinite_origin']}"
            self._writer.event(row["step"], "nonfinite", row["nonfinite_module"], message)
        return row


@dataclass
class _Progress:
    """Progress of one step's hand-over to the writer: after an exception of the program, the rest follows, and nothing twice.

    Attributes:
        rows: of the tables, made so far.
        num_written: how many of these the writer has.
        num_updates: how many stacks of updates it has.
        num_parameters: how many stacks of rows of other parameters.
        is_judged: whether the dumper knows of the step.
        step: the step's own row, once it is made.
    """

    rows: list[Any] = field(default_factory=list)
    num_written: int = 0
    num_updates: int = 0
    num_parameters: int = 0
    is_judged: bool = False
    step: Any = None


def _copied(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch in memory of its own: it may wait, and the next step writes over that of this one."""
    return pa.ipc.read_record_batch(batch.serialize(), batch.schema)
