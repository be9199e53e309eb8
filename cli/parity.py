"""``fp8debug parity TRAIN ROLLOUT``: where two paths of one model part on the same tokens, and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from fp8debug.errors import UsageError
from fp8debug.escaping import one_line
from fp8debug.parity import ParityReport, compare_paths
from fp8debug.parity.rules import PathFinding

from .console import print_table, progress, wide_option
from .finding_report import cause_cell, counted, end_with, report_options, write_report
from .output import echo


@click.command("parity")
@click.argument("train")
@click.argument("rollout")
@click.option("--repeat", metavar="DUMP", help="A second dump of one path: what it differs by is noise.")
@click.option("--names", "table", metavar="FILE", help="TOML table of names that the two stacks do not share.")
@report_options
@click.option("--modules", "wants_modules", is_flag=True, help="Also list every compared module with its numbers.")
@wide_option
@click.pass_context
def command(
    ctx: click.Context,
    train: str,
    rollout: str,
    repeat: str | None,
    table: str | None,
    form: str,
    output: str,
    fail_on: str | None,
    wants_modules: bool,
) -> None:
    """Name the first module at which TRAIN and ROLLOUT part given the input it got, and the cause.

    Both are dumps of the same tokens: fp8debug.parity.record_path(model, batch, DIR) writes one, and so does the hook file for
    inference engines; plain safetensors by module and two recorded runs do as well (docs/parity.md). Exit code 0: nothing at or
    above --fail-on; 1: a finding is; 2: usage; 3: a dump cannot be read, or the two have nothing in common.
    """
    if Path(train).resolve() == Path(rollout).resolve():
        raise UsageError(
            f"{train} was given twice: a path does not differ from itself; give the training's dump and the rollout's"
        )
    with progress("comparing") as show:
        report = compare_paths(train, rollout, repeat, names=table, progress=show)
    write_report(report, form, output, partial(_print, report, wants_modules=wants_modules), _documents(report))
    end_with(ctx, report, fail_on or "warning")


def _documents(report: ParityReport) -> dict[str, Callable[[], str]]:
    from fp8debug.reports import parity

    forms = {"github": parity.to_github, "sarif": parity.to_sarif, "html": parity.to_html}
    return {form: partial(render, report) for form, render in forms.items()}


def _print(report: ParityReport, *, wants_modules: bool) -> None:
    echo(f"{one_line(report.train)} and {one_line(report.rollout)}: {counted(report)}")
    echo(one_line(report.summary))
    for problem in report.problems:
        echo(f"note: {problem}")
    if report:
        echo()
        print_table(
            ["code", "severity", "module", "what"],
            [_row(finding) for finding in report],
            wrap=["module", "what"],
            below="what",
            drop=["severity"],
        )
        echo(f"\nfp8debug explain {report[0].code} says more")
    if wants_modules:
        echo()
        columns = ("module", "input_nmse", "output_nmse", "weight_nmse", "error_train", "error_rollout", "routing_flip_rate")
        rows = [[entry[column] for column in columns] for entry in report.to_dict()["modules"]]
        print_table(columns, rows, wrap=["module"])


def _row(finding: PathFinding) -> list[object]:
    return [finding.code, str(finding.severity), finding.module, cause_cell(finding, also=finding.also)]
