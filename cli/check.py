"""``fp8debug check CHECKPOINT``: is a quantized checkpoint sound, by itself and against its original."""

from __future__ import annotations

import contextlib
import io

import click

from fp8debug.checkpoints import CHECKS, CheckReport, TensorFinding, check_checkpoint
from fp8debug.escaping import one_line
from fp8debug.rules import Severity
from fp8debug.rules.engine.config import load_settings

from .console import print_table, progress, write_file
from .output import MultilineCell, echo
from .triage import FORMATS, SEVERITIES, names, split_codes


@click.command("check")
@click.argument("checkpoint")
@click.option("--against", metavar="CHECKPOINT", help="Compare with this one: the BF16 original, or the master weights.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="table", show_default=True)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE; stdout by default.")
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "never"]),
    help="Exit with 1 when a finding is at least that severe.  [default: warning]",
)
@click.option("--select", metavar="CODES", help="Only these, e.g. F21,F203.  [default: all]")
@click.option("--ignore", metavar="CODES", help="All but these.")
@click.option("--tensors", "wants_tensors", is_flag=True, help="Also list every quantized weight with its numbers.")
@click.option("--config", metavar="FILE", help="TOML file with thresholds; by default the nearest pyproject.toml upwards.")
@click.pass_context
def command(
    ctx: click.Context,
    checkpoint: str,
    against: str | None,
    form: str,
    output: str,
    fail_on: str | None,
    select: str | None,
    ignore: str | None,
    wants_tensors: bool,
    config: str | None,
) -> None:
    """Judge the FP8, MX or NVFP4 weights of CHECKPOINT: scales, grids, codes, shards; each wrong tensor by name.

    CHECKPOINT is a safetensors file, an index file or a folder, local or s3://; nothing is loaded whole. Known are the layouts of
    DeepSeek, compressed-tensors and vLLM, Model Optimizer, torchao, Transformer Engine, OCP MX and NVFP4. Options win over
    [tool.fp8debug.check] in pyproject.toml. Exit code 0: nothing at or above --fail-on; 1: a finding is; 2: usage; 3: nothing of
    the checkpoint can be read.
    """
    settings = load_settings(config).of_checkpoints(CHECKS)
    limit = fail_on or settings.fail_on or "warning"
    with progress("checking") as show:
        report = check_checkpoint(
            checkpoint,
            against,
            select=(settings.select or ["F"]) if select is None else split_codes(select),
            ignore=(settings.ignore or []) if ignore is None else split_codes(ignore),
            thresholds=settings.thresholds,
            progress=show,
        )
    if form != "table":
        write_file(output, _rendered(report, form))
    elif output == "-":
        _print(report, wants_tensors=wants_tensors)
    else:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            _print(report, wants_tensors=wants_tensors)
        write_file(output, text.getvalue())
    if limit != "never" and report.reaches(Severity.parse(limit)):
        ctx.exit(1)


def _rendered(report: CheckReport, form: str) -> str:
    if form in ("json", "csv"):
        return report.to_json() if form == "json" else report.to_csv()
    from fp8debug.reports import checkpoint

    return {"github": checkpoint.to_github, "sarif": checkpoint.to_sarif, "html": checkpoint.to_html}[form](report)


def _print(report: CheckReport, *, wants_tensors: bool) -> None:
    number = f"{len(report)} finding{'' if len(report) == 1 else 's'}"
    echo(f"{one_line(report.checkpoint)}: {report.verdict}, {number}")
    echo(one_line(report.summary))
    if report:
        echo()
        header = ["code", "severity", "tensor", "what"]
        print_table(
            header, [_row(finding) for finding in report], wrap=["tensor", "what"], drop=["severity"], more="--format json"
        )
        echo(f"\nfp8debug explain {report[0].code} says more")
    if wants_tensors:
        echo()
        columns = ("tensor", "layout", "format", "granularity", "rms", "gain", "sqnr_db", "ideal_sqnr_db", "worst_block_sqnr_db")
        rows = [[entry[column] for column in columns] for entry in report.to_dict()["weights"]]
        print_table(columns, rows, wrap=["tensor"], more="--format json")


def _row(finding: TensorFinding) -> list[object]:
    text = [one_line(finding.message), f"cure: {one_line(finding.cure)}"]
    text += [f"also: {names(finding.also)}"] if finding.also else []
    return [finding.code, str(finding.severity), finding.tensor or finding.file, MultilineCell("\n".join(text))]
