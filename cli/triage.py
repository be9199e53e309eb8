"""``fp8debug triage RUN``: the class of the problem, then the findings, culprit first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.escaping import one_line
from fp8debug.rules import Finding, Findings, triage
from fp8debug.rules.base import asks_for_cast
from fp8debug.rules.comparison.configuration import configuration_words, gap_words
from fp8debug.rules.engine.config import load_settings
from fp8debug.rules.reading.lost import Lost
from fp8debug.store.read.run import Run

from .console import cell, print_table, progress, wide_option
from .console import open_run as duckdb_run
from .engine_options import engine_options
from .finding_report import cause_cell, counted, end_with, report_options, split_codes, write_report
from .following import follow
from .output import echo

#: Differences from a baseline that a table shows; JSON has them all.
MAX_DIFFERENCES = 12


@click.command("triage")
@click.argument("run", nargs=-1, required=True)
@click.option("--baseline", metavar="RUN", help="Compare loss and configuration with this run, usually one in BF16.")
@report_options
@click.option("--select", metavar="CODES", help="Only these, e.g. F10,F113.  [default: all]")
@click.option("--ignore", metavar="CODES", help="All but these.")
@click.option("--config", metavar="FILE", help="TOML file with thresholds; by default the nearest pyproject.toml upwards.")
@click.option("--follow", "is_followed", is_flag=True, help="Judge a live run as it grows, until it ends; then as without.")
@wide_option
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
    is_followed: bool,
    open_run: Callable[..., Run],
) -> None:
    """Judge RUN by every rule: the class of the problem, the sick layer and the cause, the culprit first.

    A run that was resumed into other folders is one run: give all of them. Options win over [tool.fp8debug] in
    pyproject.toml. Exit code 0: nothing at or above --fail-on; 1: a finding is, or a module was not recorded to the end, which
    counts as a warning; 2: usage; 3: the run cannot be read.
    """
    settings = load_settings(config)
    against = open_run(baseline) if baseline else None
    judge = partial(
        triage,
        baseline=against,
        select=(settings.select or ["F"]) if select is None else split_codes(select),
        ignore=(settings.ignore or []) if ignore is None else split_codes(ignore),
        thresholds=settings.thresholds,
    )
    if is_followed:
        if open_run is not duckdb_run:
            raise UsageError("--follow reads with DuckDB: leave out --engine spark")
        _follow(run, judge)
    opened = open_run(*run)
    with progress("judging") as report:
        findings = judge(opened, progress=report)
    write_report(findings, form, output, partial(_print, findings), _documents(opened, findings))
    for reason in dict.fromkeys(reason for _, reason in findings.skipped) if form == "table" else ():
        codes = ", ".join(code for code, why in findings.skipped if why == reason)
        echo(f"skipped {codes}: {reason}", err=True)
    end_with(ctx, findings, fail_on or settings.fail_on or "warning")


def _follow(paths: Sequence[str], judge: Callable[[Run], Findings]) -> None:
    """Print on stderr each finding at the sampled steps after which it is first made, until the run ends."""
    known: set[tuple[str | None, ...]] = set()

    def show(opened: Run, steps: list[int]) -> None:
        findings = judge(opened)
        new = [f for f in findings if (f.code, f.module, f.gemm, f.tensor) not in known]
        known.update((f.code, f.module, f.gemm, f.tensor) for f in new)
        last = max([steps[-1], *(f.steps[0] for f in new)])  # the rules also see what is there of the steps that follow
        named = f"step {last}" if last == steps[0] else f"steps {steps[0]} to {last}"
        echo(f"{named}: {findings.verdict}" + (f", {len(new)} new" if new else ""), err=True)
        for finding in new:
            site = " ".join(word for word in (finding.module, finding.gemm, finding.tensor) if word) or "the whole run"
            echo(f"  {finding.code} {finding.severity} {one_line(site)}: {one_line(finding.message)}", err=True)

    follow(paths, show)


def _documents(run: Run, findings: Findings) -> dict[str, Callable[[], str]]:
    def to_github() -> str:
        from fp8debug.reports.github import to_github

        return to_github(findings)

    def to_sarif() -> str:
        from fp8debug.reports.sarif import to_sarif

        return to_sarif(findings)

    def to_html() -> str:
        from fp8debug.reports.page import to_html

        return to_html(run, findings)

    return {"github": to_github, "sarif": to_sarif, "html": to_html}


def _print(findings: Findings) -> None:
    first, last = findings.steps
    echo(f"{findings.run}: {counted(findings)}, steps {first} to {last}")
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
        print_table(header, rows, wrap=["module", "what"], drop=["steps", "site", "severity"], below="what")
        candidates = any(asks_for_cast(site) for finding in findings for site in finding.sites)
        more = "; fp8debug fallback RUN lists candidates" if candidates else ""
        echo(f"\nfp8debug explain {findings[0].code} says more{more}")
    if findings.baseline is not None:
        _print_baseline(findings.baseline, findings.thresholds.get("F125"))


def _row(finding: Finding) -> list[object]:
    site = " ".join(word for word in (finding.gemm, finding.tensor) if word)
    steps = "-".join(map(str, dict.fromkeys(finding.steps)))
    cause = cause_cell(finding, also=finding.also, victims=finding.victims)
    return [finding.code, str(finding.severity), finding.module, site or None, steps, cause]


def _print_baseline(baseline: Mapping[str, Any], limits: Mapping[str, float] | None) -> None:
    echo(f"\nbaseline {baseline['run']}:")
    echo(f"  {gap_words(baseline, (baseline['run'], 'this run'), limits)}")
    differences = configuration_words(baseline["configuration"])
    for what, theirs, ours in differences[:MAX_DIFFERENCES]:
        echo(f"  {what}: {cell(theirs)} -> {cell(ours)}")
    if differences[MAX_DIFFERENCES:]:
        echo(f"  and {len(differences[MAX_DIFFERENCES:])} more; --format json has them all")
