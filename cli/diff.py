"""``fp8debug diff A B...``: runs side by side with the first, configuration differences first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from fp8debug.escaping import one_line
from fp8debug.rules.comparison.configuration import configuration_words
from fp8debug.rules.comparison.runs import Differences, diff_runs
from fp8debug.rules.comparison.sites import SiteDifference

from .console import cell, open_run, print_table, to_csv, to_json_document, wide_option, write_file
from .output import echo

HEADER = ["diverges at", "module", "site", "against", "what", "SQNR dB", "rms"]
#: Differences of configuration that a table shows; JSON has them all.
MAX_DIFFERENCES = 20


@click.command("diff")
@click.argument("first")
@click.argument("second", nargs=-1, required=True)
@click.option("--module", metavar="GLOB", default="*", show_default=True, help="Modules by name, e.g. 'blocks.3.*'.")
@click.option("--steps", metavar="A:B", help="Steps from A to before B, either side may be empty; or one step.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(min=0), default=20, show_default=True, help="Sites of a table; 0 for all.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 when the runs differ beyond the noise.")
@click.option("-o", "--output", metavar="FILE", default="-", help="File for json or csv; stdout by default.")
@wide_option
@click.pass_context
def command(
    ctx: click.Context,
    first: str,
    second: tuple[str, ...],
    module: str,
    steps: str | None,
    form: str,
    limit: int,
    exit_code: bool,
    output: str,
) -> None:
    """Compare two runs: effective configuration, loss with its noise, and the first site and step at which they part.

    FIRST is usually the good run, or the one in BF16; each SECOND is compared with it by itself. CSV has one line per site
    and step that both runs sampled.
    """
    if form == "table" and output != "-":
        raise click.UsageError("-o needs --format json or csv")
    reference = open_run(first)
    found = [diff_runs(reference, open_run(path), module, steps) for path in second]
    if form == "json":
        write_file(output, to_json_document(_document(found)))
    elif form == "csv":
        write_file(output, _csv(found))
    else:
        for place, differences in enumerate(found):
            echo("" if not place else "\n", nl=False)
            _print(differences, limit)
    if exit_code and any(differences.differ for differences in found):
        ctx.exit(1)


def _document(found: Sequence[Differences]) -> dict[str, Any]:
    """Return the document of one comparison, or of several with the same first run."""
    if len(found) == 1:
        return found[0].to_dict()
    names = [found[0].names[0], *(differences.names[1] for differences in found)]
    return {"schema": 1, "runs": names, "comparisons": [differences.to_dict() for differences in found]}


def _csv(found: Sequence[Differences]) -> str:
    """Return one line per site and step; of several comparisons the name of the second run comes first."""
    if len(found) == 1:
        return to_csv(found[0].columns, found[0].rows)
    rows = [{"run": differences.names[1], **row} for differences in found for row in differences.rows]
    return to_csv(["run", *found[0].columns], rows)


def _print(found: Differences, limit: int) -> None:
    verdict = "they differ beyond the noise" if found.differ else "no difference beyond the noise"
    if (site := found.first) is not None:
        verdict += f", first {site.module} {site.gemm} {site.tensor} at step {site.diverges_at}"
    echo(f"{found.names[0]} -> {found.names[1]}: {one_line(verdict)}\n\nconfiguration differences:")
    lines = [f"  {what}: {cell(a)} -> {cell(b)}" for what, a, b in configuration_words(found.configuration)]
    for line in lines[:MAX_DIFFERENCES] or ["  no difference"]:
        echo(line)
    if lines[MAX_DIFFERENCES:]:
        echo(f"  and {len(lines[MAX_DIFFERENCES:])} more; --format json has them all")
    echo(f"\nloss:\n  {found.loss_words}")
    for name, only in zip(found.names, found.only, strict=True):
        if only:
            echo(f"\nonly in {name}: {', '.join(only[:8])}" + (f" and {len(only[8:])} more" if only[8:] else ""))
    echo(f"\nsites:\n  {found.site_words}")
    parted = [site for site in found.sites if site.diverges_at is not None]
    if parted:
        echo()
        rows = [_row(site) for site in (parted[:limit] if limit else parted)]
        print_table(HEADER, rows, wrap=["module", "what"], drop=["against"])
        if limit and parted[limit:]:
            echo(f"and {len(parted[limit:])} more; --limit 0 prints all")


def _row(site: SiteDifference) -> list[object]:
    pair = [" -> ".join(cell(value) for value in site.medians.get(name, [None, None])) for name in ("sqnr_db", "rms")]
    return [site.diverges_at, site.module, f"{site.gemm} {site.tensor}", site.reference, site.what, *pair]
