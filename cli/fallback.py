"""``fp8debug fallback RUN``: what to run in another cast or in BF16, for people or in a stack's own format."""

from __future__ import annotations

import click

from fp8debug.exporters import EXPORTERS
from fp8debug.exporters.json import FOLKLORE
from fp8debug.fallback import Fallback, parse_share, positional_prior, recommend
from fp8debug.rules import triage

from .console import cell, open_run, print_table, progress, write_file

HEADER = ["module", "gemms", "tensor", "run in", "reasons", "costs", "damage", "cheaper"]


@click.command("fallback")
@click.argument("run")
@click.option("--budget", default="10%", show_default=True, help="Share of the FP8 speed-up that may be given back.")
@click.option("--to", "name", metavar="NAME", help=f"Write it for a consumer: {', '.join(EXPORTERS.names())}.")
@click.option("-o", "--output", metavar="FILE", default="-", help="File for --to; stdout by default.")
def command(run: str, budget: str, name: str | None, output: str) -> None:
    """List candidates of RUN: hard faults first and always, then what the recorded damage asks for within the budget.

    They are candidates: run again with the list applied (fp8debug.apply) to prove them.
    """
    exporter = EXPORTERS.get(name) if name else None
    if exporter is None and output != "-":
        raise click.UsageError("-o needs --to NAME, the format of the file")
    share = parse_share(budget)
    opened = open_run(run)
    with progress("judging") as report:
        findings = triage(opened, progress=report)
    fallbacks = recommend(opened, findings, share)
    if exporter is not None:
        write_file(output, exporter.export(opened, fallbacks))
        return
    if fallbacks:
        print_table(HEADER, [_row(fallback) for fallback in fallbacks], wrap=["cheaper", "run in"])
    else:
        click.echo("no candidates: nothing found that another cast or BF16 would cure")
    prior = positional_prior(opened)
    if prior:
        click.echo(f"\nfolklore ({FOLKLORE}): {', '.join(prior)}")


def _row(fallback: Fallback) -> list[object]:
    gemms = " ".join(fallback.gemms)
    tensor = "all" if fallback.tensor == "*" else fallback.tensor
    cast = str(fallback.cast) if fallback.cast else "bf16"
    cost = f"{fallback.cost:.1%}"
    return [fallback.module, gemms, tensor, cast, " ".join(fallback.reasons), cost, cell(fallback.damage), fallback.cheaper]
