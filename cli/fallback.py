"""``fp8debug fallback RUN``: what to run in another cast or in BF16, for people or in a stack's own format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from fp8debug.exporters import EXPORTERS, Exporter
from fp8debug.exporters.json import FOLKLORE
from fp8debug.fallback import Fallback, positional_prior, recommend, scheduled
from fp8debug.fallback.policy import without_candidates
from fp8debug.rules import triage
from fp8debug.store.read.module_names import folded
from fp8debug.store.read.run import Run
from fp8debug.store.speed_file import cost_basis
from fp8debug.types import parse_share

from .console import cell, open_run, print_table, progress, wide_option, write_file
from .output import echo

HEADER = ["module", "gemms", "tensor", "run in", "when", "reasons", "costs", "damage", "cheaper"]


@click.command("fallback")
@click.argument("run")
@click.option("--budget", default="10%", show_default=True, help="Share of the FP8 speed-up that may be given back.")
@click.option("--to", "name", metavar="NAME", help=f"Write it for a consumer: {', '.join(EXPORTERS.names())}.")
@click.option("-o", "--output", metavar="FILE", default="-", help="File for --to; stdout by default.")
@click.option("--from-step", metavar="N", type=click.IntRange(min=0), help="BF16 entries hold from step N on: a cool-down.")
@click.option("--until-step", metavar="N", type=click.IntRange(min=1), help="BF16 entries hold until step N: a warm-up.")
@click.option("--fill", is_flag=True, help="Spend the budget on healthy GEMMs too, by damage.")
@wide_option
def command(
    run: str, budget: str, name: str | None, output: str, from_step: int | None, until_step: int | None, fill: bool
) -> None:
    """List candidates of RUN: hard faults first and always, then what the recorded errors ask for within the budget.

    They are candidates: run again with the list applied (fp8debug.apply) to prove them. What a format cannot say is
    printed on stderr.
    """
    exporter = EXPORTERS.get(name) if name else None
    if exporter is None and output != "-":
        raise click.UsageError("-o needs --to NAME, the format of the file")
    share = parse_share(budget)
    opened = open_run(run)
    with progress("judging") as report:
        findings = triage(opened, progress=report)
    fallbacks = recommend(opened, findings, share, fill=fill)
    if from_step is not None or until_step is not None:
        fallbacks = scheduled(fallbacks, from_step=from_step, until_step=until_step)
    if exporter is not None:
        _write(exporter, opened, fallbacks, output)
        return
    if fallbacks:
        spent = sum(fallback.cost for fallback in fallbacks)
        beyond = f", more than the budget of {share:.1%}: errors are cured whatever it is" if spent > share + 1e-9 else ""
        number = f"{len(fallbacks)} candidate{'' if len(fallbacks) == 1 else 's'}"
        echo(f"{opened.name}: {number}, together {spent:.1%} of the FP8 speed-up{beyond}\n")
        dropped = ["cheaper", "when", "damage", "tensor", "gemms", "reasons"]
        print_table(HEADER, _rows(fallbacks), wrap=["module", "cheaper", "run in", "reasons"], drop=dropped)
        echo()
        if basis := cost_basis(opened):
            echo(basis)
    else:
        echo(f"no candidates: {without_candidates(findings)}")
    prior = positional_prior(opened)
    if prior:
        echo(f"folklore ({FOLKLORE}): {', '.join(prior)}")


def _write(exporter: Exporter, run: Run, fallbacks: list[Fallback], output: str) -> None:
    for note in exporter.notes(run, fallbacks):
        echo(f"note: {exporter.name} {note}", err=True)
    files = exporter.files(run, fallbacks)
    if len(files) > 1 and output == "-":
        raise click.UsageError(f"{exporter.name} needs {len(files)} files, one per pipeline stage; give -o FILE")
    for part, text in files.items():
        path = Path(output)
        write_file(str(path.with_name(path.stem + part + path.suffix)) if part else output, text)


def _rows(fallbacks: Sequence[Fallback]) -> list[list[object]]:
    """Return a row for each entry; entries that differ in a layer's number, cost and damage alone are one, with the sums."""
    rows = [_row(fallback) for fallback in fallbacks]
    found = []
    for pattern, places in folded([one.module for one in fallbacks], [tuple(row[1:6]) for row in rows]):
        chosen = [fallbacks[place] for place in places]
        damages = [one.damage for one in chosen if one.damage is not None]
        numbers = [f"{sum(one.cost for one in chosen):.1%}", cell(sum(damages) if damages else None)]
        cheaper = ", ".join(dict.fromkeys(one.cheaper for one in chosen if one.cheaper)) or None
        found.append([pattern, *rows[places[0]][1:6], *numbers, cheaper])
    return found


def _row(fallback: Fallback) -> list[object]:
    gemms = " ".join(fallback.gemms)
    tensor = "all" if fallback.tensor == "*" else fallback.tensor
    cast = str(fallback.cast) if fallback.cast else "bf16"
    return [fallback.module, gemms, tensor, cast, fallback.span(), " ".join(fallback.reasons)]
