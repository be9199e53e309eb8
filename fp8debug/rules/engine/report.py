"""Report of findings: verdict, and the documented, stable forms for programs (JSON, CSV) that all reports share."""

from __future__ import annotations

import csv
import io
import json
from abc import abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from fp8debug.escaping import field
from fp8debug.rules.base import Severity


class HasSeverity(Protocol):
    """A finding with a documented form."""

    @property
    def severity(self) -> Severity:
        """Severity of the cause."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as documented JSON values."""
        ...


F = TypeVar("F", bound=HasSeverity)


class Report(list[F], Generic[F]):
    """Findings in order, the culprit first.

    Attributes:
        columns: of the CSV.
    """

    columns: ClassVar[tuple[str, ...]]

    @property
    def severities(self) -> list[Severity]:
        """The severity of every finding."""
        return [finding.severity for finding in self]

    @property
    def verdict(self) -> str:
        """The highest severity, or ``ok``."""
        return str(max(self.severities, default="ok"))

    def reaches(self, severity: Severity) -> bool:
        """Return whether any finding is at least that severe."""
        return any(found >= severity for found in self.severities)

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``--format json``."""

    def to_json(self) -> str:
        """Return :meth:`to_dict` as text; strict JSON, without NaN or Infinity."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """Return one line per finding under the keys of the JSON; lists are joined by spaces."""
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(self.columns), lineterminator="\n")
        writer.writeheader()
        for finding in self:
            values = self.flat(finding).items()
            writer.writerow({key: field(" ".join(map(str, v)) if isinstance(v, list) else v) for key, v in values})
        return text.getvalue()

    def flat(self, finding: F) -> dict[str, Any]:
        """Return the values of a finding's line by column."""
        return finding.to_dict()
