"""``fp8debug parity TRAIN ROLLOUT``: where two paths of one model part on the same tokens, and why."""

from __future__ import annotations

import contextlib
import io

import click

from fp8debug.escaping import one_line
from fp8debug.parity import ParityReport, compare_paths
from fp8debug.parity.rules import PathFinding
from fp8debug.rules import Severity

from .console import print_table, progress, write_file
from .output import MultilineCell, echo
from .triage import FORMATS, SEVERITIES, names


@click.command("parity")
@click.argument("train")
@click.argument("rollout")
@click.option("--repeat", metavar="DUMP", help="A second dump of one path: what it differs by is noise.")
@click.option("--names", "table", metavar="FILE", help="TOML table of names that the two stacks do not share.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE; stdout by default.")
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "never"]),
    default="warning",
    show_default=True,
    help="Exit with 1 when a finding is at least that severe.",
)
@click.option("--modules", "wants_modules", is_flag=True, help="Also list every compared module with its numbers.")
@click.pass_context
def command(
    ctx: click.Context,
    train: str,
    rollout: str,
    repeat: str | None,
    table: str | None,
    form: str,
    output: str,
    fail_on: str,
    wants_modules: bool,
) -> None:
    """Name the first module at which TRAIN and ROLLOUT part given the input it got, and the cause.

    Both are dumps of the same tokens: fp8debug.parity.record_path(model, batch, DIR) writes one, and so does the hook file for
    inference engines; plain safetensors by module and two recorded runs do as well (docs/parity.md). Exit code 0: nothing at or
    above --fail-on; 1: a finding is; 2: usage; 3: a dump cannot be read, or the two have nothing in common.
    """
    with progress("comparing") as show:
        report = compare_paths(train, rollout, repeat, names=table, progress=show)
    if form != "table":
        write_file(output, _rendered(report, form))
    elif output == "-":
        _print(report, wants_modules=wants_modules)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            _print(report, wants_modules=wants_modules)
        write_file(output, text.getvalue())
    if fail_on != "never" and report.reaches(Severity.parse(fail_on)):
        ctx.exit(1)


def _rendered(report: ParityReport, form: str) -> str:
    if form in ("json", "csv"):
        return report.to_json() if form == "json" else report.to_csv()
    from fp8debug.reports import parity

    return {"github": parity.to_github, "sarif": parity.to_sarif, "html": parity.to_html}[form](report)


def _print(report: ParityReport, *, wants_modules: bool) -> None:
    number = f"{len(report)} finding{'' if len(report) == 1 else 's'}"
    echo(f"{one_line(report.train)} and {one_line(report.rollout)}: {report.verdict}, {number}")
    echo(one_line(report.summary))
    for problem in report.problems:
        echo(f"not read: {problem}")
    if report:
        echo()
        print_table(
            ["code", "severity", "module", "what"],
            [_row(finding) for finding in report],
            wrap=["module", "what"],
            drop=["severity"],
            more="--format json",
        )
        echo(f"\nfp8debug explain {report[0].code} says more")
    if wants_modules:
        echo()
        columns = ("module", "input_nmse", "output_nmse", "weight_nmse", "error_train", "error_rollout", "routing_flip_rate")
        rows = [[entry[column] for column in columns] for entry in report.to_dict()["modules"]]
        print_table(columns, rows, wrap=["module"], more="--format json")


def _row(finding: PathFinding) -> list[object]:
    text = [one_line(finding.message), f"cure: {one_line(finding.cure)}"]
    text += [f"also: {names(finding.also)}"] if finding.also else []
    return [finding.code, str(finding.severity), finding.module, MultilineCell("\n".join(text))]
