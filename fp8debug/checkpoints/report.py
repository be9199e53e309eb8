"""``CheckReport``: what a check returns, and its documented, stable forms for programs (JSON, CSV)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fp8debug.checkpoints.rules.base import Judged, JudgedWeight, TensorFinding
from fp8debug.rules.base import finite
from fp8debug.rules.engine.report import Report

#: What each version of the JSON document changed. 1: first version; a new key makes no new version.
JSON_SCHEMA = 1
#: The columns of the CSV.
CSV_COLUMNS = (
    *("code", "name", "severity", "tensor", "module", "file", "layout", "value", "threshold", "unit", "message", "cure"),
    "also",
)


class CheckReport(Report[TensorFinding]):
    """Findings about a checkpoint, errors first, with what was looked at and what was not.

    Args:
        findings: in order.
        checkpoint: what the user called it.
        against: the same of the reference.
        judged: the facts.
        not_judged: tensors that were not judged, each with the reason.
        skipped: (code, reason) of each rule that was not asked.
        thresholds: in force, by code.
    """

    columns = CSV_COLUMNS

    def __init__(
        self,
        findings: Iterable[TensorFinding],
        *,
        checkpoint: str,
        against: str | None,
        judged: Judged,
        not_judged: Sequence[tuple[str, str]],
        skipped: Sequence[tuple[str, str]],
        thresholds: Mapping[str, Mapping[str, float]],
    ) -> None:
        super().__init__(findings)
        self.checkpoint, self.against, self.judged = checkpoint, against, judged
        self.not_judged, self.skipped = list(not_judged), list(skipped)
        self.thresholds = {code: dict(limits) for code, limits in thresholds.items()}

    @property
    def layouts(self) -> dict[str, int]:
        """Number of weights by layout, format and block, the commonest first."""
        return dict(Counter(_kind(one) for one in self.judged.weights).most_common())

    @property
    def summary(self) -> str:
        """One sentence: what was judged, and what was not."""
        weights, others = len(self.judged.weights), len(self.judged.plains)
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.layouts.items())
        text = f"{weights} quantized weight{'' if weights == 1 else 's'}{f' ({kinds})' if kinds else ''}, {others} other tensors"
        if self.against is not None:
            compared = sum(one.comparison is not None for one in self.judged.weights)
            text += f"; {compared} weights compared with {self.against}"
        if self.not_judged:
            name, reason = self.not_judged[0]
            text += f"; not judged: {len(self.not_judged)}, e.g. {name} ({reason})"
        return text

    def to_dict(self) -> dict[str, Any]:
        """Return the document of ``check --format json`` (docs/checkpoints.md)."""
        return {
            "schema": JSON_SCHEMA,
            "checkpoint": self.checkpoint,
            "against": self.against,
            "verdict": self.verdict,
            "layouts": self.layouts,
            "findings": [finding.to_dict() for finding in self],
            "weights": [_weight(one) for one in self.judged.weights],
            "not_judged": [{"tensor": name, "reason": reason} for name, reason in self.not_judged],
            "skipped": [{"code": code, "reason": reason} for code, reason in self.skipped],
            "thresholds": {code: {k: finite(v) for k, v in limits.items()} for code, limits in self.thresholds.items()},
        }


def _kind(one: JudgedWeight) -> str:
    weight = one.weight
    return f"{weight.layout} {weight.format} {weight.granularity}" if weight.scale else f"{weight.format} without scale"


def _weight(one: JudgedWeight) -> dict[str, Any]:
    weight, facts, against = one.weight, one.facts, one.comparison
    return {
        "tensor": weight.name,
        "file": weight.data.file.name,
        "layout": weight.layout,
        "format": weight.format,
        "granularity": weight.granularity if weight.scale is not None else None,
        "rows": weight.batch * weight.rows,
        "columns": weight.columns,
        "rms": finite(facts.rms),
        "amax_code": finite(facts.amax_code),
        "zero_rate": finite(facts.num_zero / facts.numel) if facts.numel else None,
        "gain": finite(against.gain) if against else None,
        "cosine": finite(against.cosine) if against else None,
        "sqnr_db": finite(against.sqnr_db) if against else None,
        "ideal_sqnr_db": finite(against.ideal_db) if against else None,
        "worst_block_sqnr_db": finite(against.worst_db) if against else None,
        "num_bad_blocks": against.num_bad_blocks if against else None,
        "num_blocks": weight.num_blocks if weight.scale is not None else None,
    }
