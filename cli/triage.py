"""``fp8debug triage RUN``: the class of the problem, then the findings, culprit first."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

import click

from fp8debug.escaping import one_line
from fp8debug.rules import Finding, Findings, Severity, triage
from fp8debug.rules.comparison.configuration import configuration_words, gap_words
from fp8debug.rules.engine.config import load_settings
from fp8debug.rules.reading.lost import Lost
from fp8debug.store.read.run import Run

from .console import cell, print_table, progress, write_file
from .engine_options import engine_options
from .output import MultilineCell, echo

SEVERITIES = [str(severity) for severity in reversed(Severity)]
FORMATS = ["table", "json", "csv", "github", "sarif", "html"]
#: Names of other modules, and differences from a baseline, that a table shows; JSON has them all.
MAX_NAMES, MAX_DIFFERENCES = 4, 12


@click.command("triage")
@click.argument("run", nargs=-1, required=True)
@click.option("--baseline", metavar="RUN", help="Compare loss and configuration with this run, usually one in BF16.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE; stdout by default.")
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "never"]),
    help="Exit with 1 when a finding is at least that severe.  [default: warning]",
)
@click.option("--select", metavar="CODES", help="Only these, e.g. F10,F113.  [default: all]")
@click.option("--ignore", metavar="CODES", help="All but these.")
@click.option("--config", metavar="FILE", help="TOML file with thresholds; by default the nearest pyproject.toml upwards.")
@engine_options
@click.pass_context
def command(
    ctx: click.Context,
    run: tuple[str, ...],
    baseline: str | None,
    form: str,
    output: str,
    fail_on: str | None,
    select: str | None,
    ignore: str | None,
    config: str | None,
    open_run: Callable[..., Run],
) -> None:
    """Judge RUN by every rule: the class of the problem, the sick layer and the cause, the culprit first.

    A run that was resumed into other folders is one run: give all of them. Options win over [tool.fp8debug] in
    pyproject.toml. Exit code 0: nothing at or above --fail-on; 1: a finding is, or a module was not recorded to the end, which
    counts as a warning; 2: usage; 3: the run cannot be read.
    """
    settings = load_settings(config)
    limit = fail_on or settings.fail_on or "warning"
    opened = open_run(*run)
    against = open_run(baseline) if baseline else None
    with progress("judging") as report:
        findings = triage(
            opened,
            against,
            select=(settings.select or ["F"]) if select is None else split_codes(select),
            ignore=(settings.ignore or []) if ignore is None else split_codes(ignore),
            thresholds=settings.thresholds,
            progress=report,
        )
    if form != "table":
        write_file(output, _rendered(opened, findings, form))
    elif output == "-":
        _print(findings)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            _print(findings)
        write_file(output, text.getvalue())
    for reason in dict.fromkeys(reason for _, reason in findings.skipped) if form == "table" else ():
        codes = ", ".join(code for code, why in findings.skipped if why == reason)
        echo(f"skipped {codes}: {reason}", err=True)
    if limit != "never" and findings.reaches(Severity.parse(limit)):
        ctx.exit(1)


def split_codes(text: str) -> list[str]:
    """Return the codes of an option, which commas part."""
    return [code.strip() for code in text.split(",") if code.strip()]


def _rendered(run: Run, findings: Findings, form: str) -> str:
    if form in ("json", "csv"):
        return findings.to_json() if form == "json" else findings.to_csv()
    if form == "github":
        from fp8debug.reports.github import to_github

        return to_github(findings)
    if form == "sarif":
        from fp8debug.reports.sarif import to_sarif

        return to_sarif(findings)
    from fp8debug.reports.page import to_html

    return to_html(run, findings)


def _print(findings: Findings) -> None:
    first, last = findings.steps
    number = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    echo(f"{findings.run}: {findings.verdict}, {number}, steps {first} to {last}")
    if findings.classification is not None:
        echo(f"class: {findings.classification['title']}: {findings.classification['what']}")
        for line in findings.classification["evidence"]:
            echo(f"  {line}")
    for entry in findings.lost:
        echo(f"warning: {one_line(str(Lost(**entry)))}")
    if findings:
        echo()
        header = ["code", "severity", "module", "site", "steps", "what"]
        rows = [_row(finding) for finding in findings]
        print_table(header, rows, wrap=["module", "what"], drop=["steps", "site", "severity"], more="--format json")
        echo(f"\nfp8debug explain {findings[0].code} says more; fp8debug fallback RUN lists candidates")
    if findings.baseline is not None:
        _print_baseline(findings.baseline)


def _row(finding: Finding) -> list[object]:
    site = " ".join(word for word in (finding.gemm, finding.tensor) if word)
    text = [one_line(finding.message), f"cure: {one_line(finding.cure)}"]
    text += [f"{title}: {names(found)}" for title, found in (("also", finding.also), ("victims", finding.victims)) if found]
    steps = "-".join(map(str, dict.fromkeys(finding.steps)))
    return [finding.code, str(finding.severity), finding.module, site or None, steps, MultilineCell("\n".join(text))]


def names(found: tuple[str, ...]) -> str:
    """Return the first names, and how many more there are."""
    more = len(found[MAX_NAMES:])
    return ", ".join(map(one_line, found[:MAX_NAMES])) + (f" and {more} more" if more else "")


def _print_baseline(baseline: Mapping[str, Any]) -> None:
    echo(f"\nbaseline {baseline['run']}:")
    echo(f"  {gap_words(baseline, (baseline['run'], 'this run'))}")
    differences = configuration_words(baseline["configuration"])
    for what, theirs, ours in differences[:MAX_DIFFERENCES]:
        echo(f"  {what}: {cell(theirs)} -> {cell(ours)}")
    if differences[MAX_DIFFERENCES:]:
        echo(f"  and {len(differences[MAX_DIFFERENCES:])} more; --format json has them all")
