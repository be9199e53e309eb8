"""``fp8debug check CHECKPOINT``: is a quantized checkpoint sound, by itself and against its original."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import click

from fp8debug.checkpoints import CHECKS, CheckReport, TensorFinding, check_checkpoint
from fp8debug.escaping import one_line
from fp8debug.rules.engine.config import load_settings

from .console import print_table, progress, wide_option
from .finding_report import cause_cell, counted, end_with, report_options, split_codes, write_report
from .output import echo


@click.command("check")
@click.argument("checkpoint")
@click.option("--against", metavar="CHECKPOINT", help="Compare with this one: the BF16 original, or the master weights.")
@report_options
@click.option("--select", metavar="CODES", help="Only these, e.g. F21,F203.  [default: all]")
@click.option("--ignore", metavar="CODES", help="All but these.")
@click.option("--tensors", "wants_tensors", is_flag=True, help="Also list every quantized weight with its numbers.")
@click.option("--config", metavar="FILE", help="TOML file with thresholds; by default the nearest pyproject.toml upwards.")
@wide_option
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
    with progress("checking") as show:
        report = check_checkpoint(
            checkpoint,
            against,
            select=(settings.select or ["F"]) if select is None else split_codes(select),
            ignore=(settings.ignore or []) if ignore is None else split_codes(ignore),
            thresholds=settings.thresholds,
            progress=show,
        )
    write_report(report, form, output, partial(_print, report, wants_tensors=wants_tensors), _documents(report))
    end_with(ctx, report, fail_on or settings.fail_on or "warning")


def _documents(report: CheckReport) -> dict[str, Callable[[], str]]:
    from fp8debug.reports import checkpoint

    forms = {"github": checkpoint.to_github, "sarif": checkpoint.to_sarif, "html": checkpoint.to_html}
    return {form: partial(render, report) for form, render in forms.items()}


def _print(report: CheckReport, *, wants_tensors: bool) -> None:
    echo(f"{one_line(report.checkpoint)}: {counted(report)}")
    echo(one_line(report.summary))
    if report:
        echo()
        header = ["code", "severity", "tensor", "what"]
        print_table(header, [_row(finding) for finding in report], wrap=["tensor", "what"], drop=["severity"], below="what")
        echo(f"\nfp8debug explain {report[0].code} says more")
    if wants_tensors:
        echo()
        columns = ("tensor", "layout", "format", "granularity", "rms", "gain", "sqnr_db", "ideal_sqnr_db", "worst_block_sqnr_db")
        rows = [[entry[column] for column in columns] for entry in report.to_dict()["weights"]]
        print_table(columns, rows, wrap=["tensor"])


def _row(finding: TensorFinding) -> list[object]:
    return [finding.code, str(finding.severity), finding.tensor or finding.file, cause_cell(finding, also=finding.also)]
