"""Situations from public bug reports, rebuilt small, with what a diagnosis has to say of each; ``reality.py`` keeps the score."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8debug.registry import register_all
from fp8debug.rules import Finding, Severity

#: Finding codes that blame no cast: a filter, the loss, a start that diverges everywhere at once, a gradient that never came.
BLAMES_NONE = ("F110", "F125", "F127", "F143")
#: ``wrong``: of a first meeting of which no more was kept.
OUTCOMES = ("right", "incomplete", "silent", "misled", "false alarm", "wrong")


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What is right, written down before the tool was tried on the situation.

    Attributes:
        codes: of the first finding; empty allows any.
        modules: of the first finding; empty allows any.
        gemms: the same.
        tensors: the same.
        words: one of them stands in its message or cure, or in the classification.
        misleading: words of a cure that would not have helped.
        quiet: no cast and no layer may be blamed; ``words`` still count, and the run is not ``healthy`` without them.
        clean: nothing is wrong, and nothing above information may be found.
    """

    codes: Sequence[str] = ()
    modules: Sequence[str] = ()
    gemms: Sequence[str] = ()
    tensors: Sequence[str] = ()
    words: Sequence[str] = ()
    misleading: Sequence[str] = ()
    quiet: bool = False
    clean: bool = False


@dataclass(frozen=True, kw_only=True)
class Situation:
    """One public report.

    Attributes:
        name: short, unique.
        round: of reports that the tool met together, 1 the oldest; the rules were sharpened on each before the next.
        reference: issue or pull request, ``owner/repository#number``.
        what: the fault in a few words.
        first: outcome when the tool first met it, which is never changed.
        expected: what is right.
        record: trains into ``folder/sick``, and ``folder/clean`` where it has a healthy twin.
    """

    name: str
    round: int
    reference: str
    what: str
    first: str
    expected: Expected
    record: Callable[[Path], None]


SITUATIONS: list[Situation] = []


def situation(
    met: int, reference: str, what: str, first: str, **expected: Any
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a function that records a situation, which the tool met in that round."""
    assert first in OUTCOMES, first

    def add(record: Callable[[Path], None]) -> Callable[[Path], None]:
        name = record.__name__
        assert name not in {one.name for one in SITUATIONS}
        right = Expected(**expected)
        SITUATIONS.append(
            Situation(name=name, round=met, reference=reference, what=what, first=first, expected=right, record=record)
        )
        return record

    return add


def print_diagnosis(findings: Sequence[Finding], classification: Mapping[str, Any], clean: Sequence[Finding]) -> None:
    """Print what triage said of a run, and of its healthy twin."""
    print(f"  {classification['class']}/{classification['cause']}: {classification['what']}")
    for f in findings:
        print(f"  {f.code} {f.name} {f.severity} {f.module} {f.gemm} {f.tensor} also {f.also}")
        print(f"    {f.message}\n    cure: {f.cure}")
    for f in clean:
        print(f"  clean: {f.code} {f.severity} {f.module} {f.gemm} {f.tensor}: {f.message}")


def print_counts(results: Sequence[tuple[str, str]]) -> None:
    """Print how often each outcome came, at first sight and now, to stderr."""
    for title, outcomes in (("first sight", [first for first, _ in results]), ("now", [now for _, now in results])):
        counts = Counter(outcomes)
        print(f"{title}: " + ", ".join(f"{counts[key]} {key}" for key in OUTCOMES if counts[key]), file=sys.stderr)


def outcome(findings: Sequence[Finding], classification: Mapping[str, Any], clean: Sequence[Finding], right: Expected) -> str:
    """Return how a diagnosis did.

    ``right``: site, cause and cure. ``incomplete``: the site, not the cause. ``silent``: nothing. ``misled``: another site, or
    a cure that would not have helped. ``false alarm``: a warning on the healthy twin.
    """
    told = [finding for finding in findings if finding.severity > Severity.INFO]
    if any(finding.severity > Severity.INFO for finding in clean):
        return "false alarm"
    unwatched = [line for line in classification["evidence"] if line.startswith("not watched")]
    told_of_run = [str(classification["what"]), *unwatched]
    said = " ".join([*told_of_run, *(f"{f.message} {f.cure} {f.name}" for f in findings[:1])]).lower()
    has_words = not right.words or any(word in said for word in right.words)
    if right.clean:
        return "false alarm" if told else "right"
    if right.quiet:
        if any(finding.code not in BLAMES_NONE for finding in told):
            return "misled"
        if classification["cause"] == "healthy" and not (right.words and has_words):
            return "silent"
        return "right" if has_words else "incomplete"
    if not findings:
        return "silent"
    first = findings[0]
    if any(word in first.cure.lower() for word in right.misleading):
        return "misled"
    if right.modules and first.module not in right.modules and not set(right.modules) & set(first.also):
        return "misled" if first.module else "silent"
    site = (not right.gemms or first.gemm in right.gemms) and (not right.tensors or first.tensor in right.tensors)
    return "right" if site and has_words and (not right.codes or first.code in right.codes) else "incomplete"


register_all(__name__, __path__)
