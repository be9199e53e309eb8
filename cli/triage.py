"""``fp8debug triage RUN``: the findings, culprit first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fp8debug.rules import Finding, Findings, Severity, triage

from .console import cell, open_run, print_table, progress

SEVERITIES = [str(severity) for severity in reversed(Severity)]
#: Names of other modules that a table shows; JSON has them all.
MAX_NAMES = 4
#: Differences from a baseline that a table shows.
MAX_DIFFERENCES = 12


@click.command("triage")
@click.argument("run")
@click.option("--baseline", metavar="RUN", help="Compare loss and configuration with this run, usually one in BF16.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "never"]),
    default="warning",
    show_default=True,
    help="Exit with 1 when a finding is at least that severe.",
)
@click.option("--select", metavar="CODES", default="F", show_default=True, help="Only these, e.g. F10,F113.")
@click.option("--ignore", metavar="CODES", default="", help="All but these.")
@click.pass_context
def command(ctx: click.Context, run: str, baseline: str | None, form: str, fail_on: str, select: str, ignore: str) -> None:
    """Judge RUN by every rule and name the sick layer and the cause, the culprit first.

    Exit code 0: nothing at or above --fail-on; 1: a finding is; 2: usage; 3: the run cannot be read.
    """
    opened = open_run(run)
    against = open_run(baseline) if baseline else None
    with progress("judging") as report:
        findings = triage(opened, against, select=_codes(select), ignore=_codes(ignore), progress=report)
    if form == "json":
        click.echo(findings.to_json(), nl=False)
    elif form == "csv":
        click.echo(findings.to_csv(), nl=False)
    else:
        _print(findings)
    if fail_on != "never" and findings.reaches(Severity.parse(fail_on)):
        ctx.exit(1)


def _codes(text: str) -> list[str]:
    return [code.strip() for code in text.split(",") if code.strip()]


def _print(findings: Findings) -> None:
    first, last = findings.steps
    number = f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
    click.echo(f"{findings.run}: {findings.verdict}, {number}, steps {first} to {last}")
    if findings:
        click.echo()
        header = ["code", "severity", "module", "site", "steps", "what"]
        print_table(header, [_row(finding) for finding in findings], wrap=["what"])
        click.echo(f"\nfp8debug explain {findings[0].code} says more; fp8debug fallback RUN lists candidates")
    if findings.baseline is not None:
        _print_baseline(findings.baseline)
    for reason in dict.fromkeys(reason for _, reason in findings.skipped):
        codes = ", ".join(code for code, why in findings.skipped if why == reason)
        click.echo(f"skipped {codes}: {reason}", err=True)


def _row(finding: Finding) -> list[object]:
    site = " ".join(word for word in (finding.gemm, finding.tensor) if word)
    text = [finding.message, f"cure: {finding.cure}"]
    text += [f"{title}: {_names(names)}" for title, names in _others(finding) if names]
    steps = "-".join(map(str, dict.fromkeys(finding.steps)))
    return [finding.code, str(finding.severity), finding.module, site or None, steps, "\n".join(text)]


def _others(finding: Finding) -> list[tuple[str, tuple[str, ...]]]:
    return [("also", finding.also), ("victims", finding.victims)]


def _names(names: tuple[str, ...]) -> str:
    more = len(names[MAX_NAMES:])
    return ", ".join(names[:MAX_NAMES]) + (f" and {more} more" if more else "")


def _print_baseline(baseline: Mapping[str, Any]) -> None:
    click.echo(f"\nbaseline {baseline['run']}:")
    if baseline["steps"]:
        loss, other, gap = (cell(baseline[key]) for key in ("loss", "baseline_loss", "loss_gap"))
        click.echo(f"  median loss of steps {'-'.join(map(str, baseline['steps']))}: {loss} against {other} (gap {gap})")
    else:
        click.echo("  no step has a loss in both runs")
    differences = list(baseline["configuration"].items())
    for key, (theirs, ours) in differences[:MAX_DIFFERENCES]:
        click.echo(f"  {key}: {cell(theirs)} -> {cell(ours)}")
    if differences[MAX_DIFFERENCES:]:
        click.echo(f"  and {len(differences[MAX_DIFFERENCES:])} more; --format json has them all")
