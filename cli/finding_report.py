"""Commands that report findings: their options, formats, exit code, and the cell that names a cause."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import click

from fp8debug.escaping import one_line
from fp8debug.rules import Severity
from fp8debug.rules.engine.report import Report
from fp8debug.store.read.module_names import folded

from .console import write_file
from .output import MultilineCell

SEVERITIES = [str(severity) for severity in reversed(Severity)]
FORMATS = ["table", "json", "csv", "github", "sarif", "html"]
#: Names of other modules that a table shows; JSON has them all.
MAX_NAMES = 4


class Cause(Protocol):
    """Message and cure of a finding of any command."""

    @property
    def message(self) -> str:
        """One sentence with the numbers."""
        ...

    @property
    def cure(self) -> str:
        """Remedies, the cheapest first."""
        ...


def report_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--format`` (as ``form``), ``--output`` and ``--fail-on``."""
    limits = click.Choice([*SEVERITIES, "never"])
    fails = "Exit with 1 when a finding is at least that severe.  [default: warning]"
    command = click.option("--fail-on", type=limits, help=fails)(command)
    command = click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE; stdout by default.")(command)
    return click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)(command)


def write_report(
    report: Report[Any], form: str, output: str, show: Callable[[], None], documents: Mapping[str, Callable[[], str]]
) -> None:
    """Write a report.

    Args:
        report: the findings.
        form: one of ``FORMATS``.
        output: a file; ``-`` for stdout.
        show: prints the table for people.
        documents: the functions that return the forms other than table, JSON and CSV.
    """
    if form != "table":
        write_file(output, {"json": report.to_json, "csv": report.to_csv, **documents}[form]())
    elif output == "-":
        show()
    else:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            show()
        write_file(output, text.getvalue())


def end_with(ctx: click.Context, report: Report[Any], fail_on: str) -> None:
    """Exit with 1 where a finding is at least as severe as ``--fail-on``."""
    if fail_on != "never" and report.reaches(Severity.parse(fail_on)):
        ctx.exit(1)


def cause_cell(finding: Cause, **others: tuple[str, ...]) -> MultilineCell:
    """Return message and cure, and under their titles the names of other modules."""
    text = [one_line(finding.message), f"cure: {one_line(finding.cure)}"]
    text += [f"{title}: {_names(found)}" for title, found in others.items() if found]
    return MultilineCell("\n".join(text))


def counted(report: Report[Any]) -> str:
    """Return the verdict and the number of findings."""
    return f"{report.verdict}, {len(report)} finding{'' if len(report) == 1 else 's'}"


def split_codes(text: str) -> list[str]:
    """Return the codes of an option, which commas part."""
    return [code.strip() for code in text.split(",") if code.strip()]


def _names(found: tuple[str, ...]) -> str:
    groups = folded(found)
    more = sum(len(places) for _, places in groups[MAX_NAMES:])
    return ", ".join(one_line(pattern) for pattern, _ in groups[:MAX_NAMES]) + (f" and {more} more" if more else "")
