"""What a classification is, and how the findings near a step are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fp8debug.rules.base import Finding
from fp8debug.rules.evidence import sampled_steps

if TYPE_CHECKING:
    from fp8debug.store.read.run import Run

#: Sampled steps before the loss moves within which a change or a warning may be its cause.
NEAR = 5
#: ``kind`` in words; (a) to (c) are the three classes of an FP8 training problem.
TITLES = {
    "loss-spike": "(a) loss spike",
    "divergence": "(b) divergence",
    "loss-fine": "no loss problem",
    "unknown": "unknown",
}
MISMATCH_TITLE = "(c) loss fine, inference off"


@dataclass(frozen=True, kw_only=True)
class Classification:
    """The class, its cause, and why.

    Attributes:
        kind: ``loss-spike``, ``divergence``, ``loss-fine`` or ``unknown`` (no loss recorded).
        cause: ``fp8``, ``not-fp8``, ``undecided`` of a spike; ``at-once``, ``configuration``, ``numerical``, ``not-fp8``,
            ``undecided`` of a divergence; ``healthy``, ``not-judged`` (no FP8, or statistics that cannot be read), ``findings``,
            ``mismatch`` of a fine loss, ``incomplete`` where something was not recorded to the end; else ``no-loss``.
        what: one sentence.
        evidence: further sentences.
        step: at which the loss left its course; None when it did not.
        module: the origin; None when no layer is to blame.
        code: of the finding at the origin.
    """

    kind: str
    cause: str
    what: str
    evidence: tuple[str, ...] = ()
    step: int | None = None
    module: str | None = None
    code: str | None = None

    @property
    def title(self) -> str:
        """The class in words."""
        return MISMATCH_TITLE if self.cause == "mismatch" else TITLES[self.kind]

    def to_dict(self) -> dict[str, Any]:
        """Return the documented JSON values."""
        return {
            "class": self.kind,
            "title": self.title,
            "cause": self.cause,
            "what": self.what,
            "evidence": list(self.evidence),
            "step": self.step,
            "module": self.module,
            "code": self.code,
        }


def at_first(classification: Classification, culprits: Sequence[Finding]) -> Classification:
    """Return the classification with the first culprit as its origin."""
    if not culprits:
        return classification
    return replace(classification, module=culprits[0].module, code=culprits[0].code)


def begun_by(step: int, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of modules that began up to a step: what a later sampled step shows may be its consequence."""
    return [f for f in findings if f.module and f.steps[0] <= step]


def first_seen_after(run: Run, step: int, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings of modules that began at the first sampled step after a step that was not sampled itself."""
    until = min((s for s in sampled_steps(run) if s >= step), default=step)
    return [f for f in findings if f.module and step < f.steps[0] <= until]


def near_before(run: Run, step: int) -> int:
    """Return the sampled step ``NEAR`` sampled steps before a step."""
    return min([s for s in sampled_steps(run) if s <= step][-NEAR:], default=step)


def name_of(finding: Finding) -> str:
    """Return module, code and name."""
    return f"{finding.module or 'the run'} ({finding.code} {finding.name})"


def since(finding: Finding) -> str:
    """Return the same with the first step."""
    return f"{name_of(finding)} since step {finding.steps[0]}"


def number_of(findings: Sequence[Finding]) -> str:
    """Return how many there are."""
    return f"{len(findings) or 'no'} finding{'' if len(findings) == 1 else 's'}"
