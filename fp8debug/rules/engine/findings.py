"""``Findings``: what triage returns, and its documented, stable forms for programs (JSON, CSV)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fp8debug.rules.base import Finding, Severity, finite
from fp8debug.rules.comparison.configuration import without_nonfinite
from fp8debug.rules.engine.report import Report

#: What each version of the JSON document changed. 1: first version (fp8debug 0.1); a new key makes no new version.
JSON_SCHEMA = 1


def _flat(finding: Finding) -> dict[str, Any]:
    values = finding.to_dict()
    first, last = values.pop("steps")
    return {**values, "first_step": first, "last_step": last}


#: The columns of the CSV.
CSV_COLUMNS = tuple(_flat(Finding(code="", name="", severity=Severity.INFO, steps=(0, 0), message="", cure="")))


class Findings(Report[Finding]):
    """Findings, the culprit first, with the rules that could not judge.

    Args:
        findings: in culprit order.
        run: name of the run.
        steps: first and last recorded step.
        skipped: (code, reason) of each rule that lacked what it needs.
        baseline: comparison with another run, if one was asked for.
        classification: which class of problem the run shows (docs/triage.md).
        thresholds: in force, by code of each rule that was asked.
        lost: what the run stopped recording before its end, as ``module``, ``rank``, ``step``, ``until`` and ``reason``.
        not_watched: what fp8debug did not look at, as ``what``, ``text``, ``share``, ``first`` and ``num``.
    """

    columns = CSV_COLUMNS

    def __init__(
        self,
        findings: Iterable[Finding] = (),
        *,
        run: str = "",
        steps: tuple[int, int] = (0, 0),
        skipped: Iterable[tuple[str, str]] = (),
        baseline: Mapping[str, Any] | None = None,
        classification: Mapping[str, Any] | None = None,
        thresholds: Mapping[str, Mapping[str, float]] | None = None,
        lost: Iterable[Mapping[str, Any]] = (),
        not_watched: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        super().__init__(findings)
        self.run = run
        self.steps = steps
        self.skipped = list(skipped)
        self.baseline = baseline
        self.classification = classification
        self.lost = [dict(entry) for entry in lost]
        self.not_watched = [dict(entry) for entry in not_watched]
        self.thresholds = {code: dict(limits) for code, limits in (thresholds or {}).items()}

    @property
    def severities(self) -> list[Severity]:
        """The severity of every finding; what was lost counts as a warning."""
        return super().severities + ([Severity.WARNING] if self.lost else [])

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``triage --format json`` (docs/triage.md); ``baseline`` only where there is one."""
        document: dict[str, Any] = {
            "schema": JSON_SCHEMA,
            "run": self.run,
            "steps": list(self.steps),
            "verdict": self.verdict,
            "classification": dict(self.classification) if self.classification is not None else None,
            "findings": [finding.to_dict() for finding in self],
            "lost": self.lost,
            "not_watched": self.not_watched,
            "skipped": [{"code": code, "reason": reason} for code, reason in self.skipped],
            "thresholds": {code: {k: finite(v) for k, v in limits.items()} for code, limits in self.thresholds.items()},
        }
        return {**document, "baseline": without_nonfinite(self.baseline)} if self.baseline is not None else document

    def flat(self, finding: Finding) -> dict[str, Any]:
        """Return the values of a finding's line by column; first and last step are two."""
        return _flat(finding)
