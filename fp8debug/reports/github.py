"""Findings as GitHub workflow commands: lines of a job's log that GitHub shows as annotations.

``::error title=TITLE::MESSAGE``; the escapes are those of GitHub's own toolkit: ``%``, CR and LF everywhere, ``:`` and ``,``
in a property too.
"""

from __future__ import annotations

from fp8debug.rules import Finding, Findings, Severity
from fp8debug.rules.reading.lost import Lost

COMMANDS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def to_github(findings: Findings) -> str:
    """Return one workflow command per finding, after one for the classification and one for each module that was lost."""
    lines = []
    if findings.classification is not None:
        words = f"{findings.verdict}: {findings.classification['what']}"
        lines.append(command_line("notice", f"fp8debug {findings.run}", words))
    for entry in findings.lost:
        lines.append(command_line("warning", "not recorded any more", str(Lost(**entry))))
    lines += [command_line(COMMANDS[f.severity], _title(f), f"{_place(f)}{f.message}\ncure: {f.cure}") for f in findings]
    return "".join(f"{line}\n" for line in lines)


def _title(finding: Finding) -> str:
    return f"{finding.code} {finding.name}" + (f" in {finding.module}" if finding.module else "")


def _place(finding: Finding) -> str:
    site = " ".join(word for word in (finding.module, finding.gemm, finding.tensor) if word)
    steps = "-".join(map(str, dict.fromkeys(finding.steps)))
    return f"{site}, steps {steps}: " if site else f"steps {steps}: "


def command_line(command: str, title: str, message: str) -> str:
    """Return one workflow command."""
    return f"::{command} title={escaped(title, in_property=True)}::{escaped(message)}"


def escaped(text: str, *, in_property: bool = False) -> str:
    """Return text as it may stand in a workflow command."""
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return text.replace(":", "%3A").replace(",", "%2C") if in_property else text
