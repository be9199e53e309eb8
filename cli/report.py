"""``fp8debug report RUN -o FILE``: a run as one page of HTML to send around."""

from __future__ import annotations

import click

from .console import open_run, write_file


@click.command("report")
@click.argument("run", nargs=-1, required=True)
@click.option("-o", "--output", metavar="FILE", default="-", help="Write to FILE, e.g. report.html; stdout by default.")
@click.option("--against", metavar="RUN", help="Compare with this run, usually the good one or one in BF16.")
def command(run: tuple[str, ...], output: str, against: str | None) -> None:
    """Write RUN as one self-contained page of HTML: it opens from a mail, without a network and without scripts.

    The page has verdict, loss, modules by steps, findings with their evidence, coverage, configuration and, with --against, a
    comparison. A run that was resumed into other folders is one run: give all of them.
    """
    from fp8debug_dashboard.sharing.report import run_report

    opened = open_run(*run)
    write_file(output, run_report(opened, against=None if against is None else open_run(against)))
