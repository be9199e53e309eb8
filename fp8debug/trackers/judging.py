"""The judge beside a training: ``python -c ... RUN``, a process of low priority that reads what was recorded and judges it.

It reads a line of JSON for each request and answers with one:

    {"step": 120}             -> {"steps": {"120": {"loss": 2.1, ...}}, "findings": [...]}   what is new
    {"finish": "report.html"} -> {"findings": [...], "worst": [...], "all": [...], "last": 400, "report": true}

The rules are those that name the rows that they ask for (``Rule.looks``); they see the last sampled steps. F125 joins while the
first loss that is NaN or Inf is among them. At the end all rules see the whole run.

When the training ends, however it does, so does the judge: it holds the other end of stdin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fp8debug.errors import Fp8DebugError
from fp8debug.rules import RULES, Finding, Severity, triage
from fp8debug.rules.engine.triage import judge
from fp8debug.store.read.recent import RecentRun
from fp8debug.store.read.run import Run
from fp8debug.trackers.summary import WORST_COLUMNS, finding_rows, step_scalars, worst_modules

#: Seconds for the report.
REPORT_S = 300.0


class Judge:
    """Judges a run as it grows.

    Args:
        path: of the run.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._run: RecentRun | None = None
        self._first, self._last = 0, -1  # steps of the window that was read last
        self._told: set[int] = set()  # of it or before, those whose numbers were returned
        self._rules = {rule.code: rule for rule in RULES if tuple(rule.looks())}
        self._lost = RULES.get("F125")  # which reads every loss, and is asked when one is gone
        self._worst: dict[tuple[str, str | None], Severity] = {}  # of a code in a module
        self._known: list[Finding] = []

    def step(self) -> dict[str, Any]:
        """Return the numbers of the sampled steps that are new, and the findings that are."""
        if self._run is None:
            self._run = RecentRun(self._path)
        else:
            self._run.refresh()
        run = self._run
        if not run.sampled_steps or run.sampled_steps[-1] <= self._last:
            return {"steps": {}, "findings": []}
        rules = self._rules | {self._lost.code: self._lost} if self._is_lost(run) else self._rules
        new = self._new(judge(run, rules)[0])
        self._first, self._last = run.first, run.sampled_steps[-1]
        return {"steps": self._numbers(run, self._known), "findings": [asdict(finding) for finding in new]}

    def finish(self, report: str | None) -> dict[str, Any]:
        """Return what the whole run shows, by all rules.

        Args:
            report: file to write the HTML report to.
        """
        run = Run(self._path)
        found = triage(run)
        new = self._new(found)
        return {
            "findings": [asdict(finding) for finding in new],
            "worst": worst_modules(run, found),
            "worst_columns": WORST_COLUMNS,
            "all": finding_rows(found),
            "steps": self._numbers(run, found),
            "last": run.steps_range[1],
            "report": report is not None and write_report(self._path, report),
        }

    def _numbers(self, run: Run, findings: list[Finding]) -> dict[int, dict[str, float]]:
        """Return the numbers of the window's steps, and of later ones, that were not returned before: rows may come late."""
        left = [step for step in run.sampled_steps if step >= self._first and step not in self._told]
        found = step_scalars(run, findings, after=left[0] - 1) if left else {}
        new = {step: values for step, values in found.items() if step not in self._told}
        self._told |= new.keys()
        return new

    def _is_lost(self, run: RecentRun) -> bool:
        """Return whether a loss is NaN or infinite for the first time in the window.

        Of an earlier one F125 would look for the origin in rows that are not in the window.
        """
        # As text: DuckDB answers isnan() and comparisons from Parquet's min and max, which leave NaN out. NaN of x86 has a sign.
        gone = "lower(CAST(loss AS STRING)) IN ('nan', '-nan', 'inf', '-inf', 'infinity', '-infinity')"
        first = run.sql(f"SELECT min(step) AS step FROM steps WHERE {gone}")["step"].to_pylist()[0]
        return first is not None and bool(first >= run.first)

    def _new(self, findings: list[Finding]) -> list[Finding]:
        """Return the warnings and errors that are new; one that only follows into further modules is not."""
        new = []
        for finding in findings:
            modules = (finding.module, *finding.also)
            if finding.severity > Severity.INFO:
                before = [self._worst.get((finding.code, module)) for module in modules]
                if all(worst is None or worst < finding.severity for worst in before):
                    new.append(finding)
                self._worst |= {(finding.code, module): finding.severity for module in modules}
        self._known += new
        return new


def write_report(run: str, path: str) -> bool:
    """Write the HTML report of a run; return whether it is there."""
    command = [sys.executable, "-m", "fp8debug_cli.main", "report", run, "-o", path]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=REPORT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return Path(path).is_file()


def main() -> int:
    """Answer requests until stdin ends; return the exit code."""
    if hasattr(os, "nice"):
        os.nice(10)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # only answers go there
    this = Judge(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = this.finish(request["finish"]) if "finish" in request else this.step()
        except Fp8DebugError as error:
            answer = {"problem": str(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0
