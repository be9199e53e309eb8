"""``Findings``: what triage returns, and its documented, stable forms for programs (JSON, CSV)."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

from fp8debug.escaping import field
from fp8debug.rules.base import Finding, Severity, finite
from fp8debug.rules.comparison.configuration import without_nonfinite

#: What each version of the JSON document changed. 1: first version (fp8debug 0.1); a new key makes no new version.
JSON_SCHEMA = 1


class Findings(list[Finding]):
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
    """

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
    ) -> None:
        super().__init__(findings)
        self.run = run
        self.steps = steps
        self.skipped = list(skipped)
        self.baseline = baseline
        self.classification = classification
        self.lost = [dict(entry) for entry in lost]
        self.thresholds = {code: dict(limits) for code, limits in (thresholds or {}).items()}

    @property
    def verdict(self) -> str:
        """The highest severity, at least ``warning`` where something was lost, or ``ok``."""
        severities = [finding.severity for finding in self] + ([Severity.WARNING] if self.lost else [])
        return str(max(severities)) if severities else "ok"

    def reaches(self, severity: Severity) -> bool:
        """Tell whether any finding is at least that severe; what was lost counts as a warning."""
        return any(finding.severity >= severity for finding in self) or (bool(self.lost) and severity <= Severity.WARNING)

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
            "skipped": [{"code": code, "reason": reason} for code, reason in self.skipped],
            "thresholds": {code: {k: finite(v) for k, v in limits.items()} for code, limits in self.thresholds.items()},
        }
        return {**document, "baseline": without_nonfinite(self.baseline)} if self.baseline is not None else document

    def to_json(self) -> str:
        """Return :meth:`to_dict` as text; strict JSON, without NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """Return one line per finding under the keys of the JSON; steps are two columns, lists are joined by spaces."""
        keys = list(CSV_COLUMNS)
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=keys, lineterminator="\n")
        writer.writeheader()
        for finding in self:
            writer.writerow(_flat(finding))
        return text.getvalue()


def _flat(finding: Finding) -> dict[str, Any]:
    values = finding.to_dict()
    first, last = values.pop("steps")
    flat = {**values, "first_step": first, "last_step": last}
    return {key: field(" ".join(map(str, value)) if isinstance(value, list) else value) for key, value in flat.items()}


#: The columns of the CSV.
CSV_COLUMNS = tuple(
    _flat(Finding(code="", name="", severity=Severity.INFO, steps=(0, 0), message="", cure="")),
)
