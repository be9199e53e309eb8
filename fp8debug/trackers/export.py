"""``fp8debug export RUN --to TRACKER``: what a watch would have sent, of a run that is over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from fp8debug.rules import Findings
from fp8debug.store.read.run import Run
from fp8debug.trackers.base import PREFIX, TrackerRun
from fp8debug.trackers.judging import write_report
from fp8debug.trackers.summary import FINDING_COLUMNS, WORST_COLUMNS, finding_rows, step_scalars, worst_modules


def export(run: Run, findings: Findings, into: TrackerRun) -> tuple[int, bool]:
    """Write a run's numbers, worst modules, findings and report; findings are no alerts, as nobody is to be woken by them.

    Args:
        run: the run.
        findings: of the run.
        into: an open run of a tracker; it is closed.

    Returns:
        Number of sampled steps, and whether the report could be made.
    """
    with tempfile.TemporaryDirectory(prefix="fp8debug-", ignore_cleanup_errors=True) as folder:
        try:
            steps = step_scalars(run, findings)
            for step, values in steps.items():
                into.scalars(step, {f"{PREFIX}{name}": value for name, value in values.items()})
            last = run.steps_range[1]
            into.table(f"{PREFIX}worst_modules", WORST_COLUMNS, worst_modules(run, findings), last)
            if findings:
                into.table(f"{PREFIX}findings", FINDING_COLUMNS, finding_rows(findings), last)
            path = Path(folder) / "report.html"
            has_report = write_report(str(run.path), str(path))
            if has_report:
                into.report(path)
        finally:
            into.close()  # some trackers read the report until then
    return len(steps), has_report
