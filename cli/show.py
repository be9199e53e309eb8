"""``fp8debug show RUN``: recorded statistics as a table, CSV or JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from .console import open_run, print_table, to_csv, to_json, warn

#: What stands before the statistics in every row.
KEYS = ["step", "module", "gemm", "tensor", "reference", "actual", "cast_name"]
STATISTICS = ["sqnr_db", "cosine", "gain", "underflow_rate", "overflow_rate", "amax"]
#: The order in which a narrow terminal loses keys and statistics.
SPARE_KEYS = ["actual", "reference", "cast_name", "gemm", "tensor"]
SPARE_STATISTICS = ["cosine", "gain", "overflow_rate", "underflow_rate"]


@click.command("show")
@click.argument("run")
@click.option("--module", metavar="GLOB", default="*", help="Modules by name, e.g. 'blocks.3.*'.")
@click.option("--gemm", metavar="GEMM", help="fprop, dgrad or wgrad.")
@click.option("--tensor", metavar="TENSOR", help="input, weight, grad_output, output, grad_input or grad_weight.")
@click.option("--steps", metavar="A:B", help="Steps from A to before B; either side may be empty.")
@click.option("--reference", metavar="NAME", help="operand, shadow or exact.")
@click.option("--actual/--what-if", default=None, help="Only casts that ran, or only those that did not.")
@click.option("--columns", metavar="A,B", help="Statistics to print; all keys stand before them.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(min=0), default=100, show_default=True, help="Rows of a table; 0 for all.")
def command(
    run: str,
    module: str,
    gemm: str | None,
    tensor: str | None,
    steps: str | None,
    reference: str | None,
    actual: bool | None,
    columns: str | None,
    form: str,
    limit: int,
) -> None:
    """Print what RUN recorded, one row per step, site, cast and reference; ranks are merged.

    A dash, an empty field or null is "not recorded" or "no data", never 0.
    """
    opened = open_run(run)
    asked = STATISTICS if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    names = list(dict.fromkeys([*KEYS, *asked]))
    table = opened.table(names, module=module, gemm=gemm, tensor=tensor, steps=steps, reference=reference, actual=actual)
    if not table.num_rows:
        warn("no recorded row matches")
    if form == "table":
        rows = (table.slice(0, min(limit, table.num_rows)) if limit else table).to_pylist()
        cells = [[row[name] for name in names] for row in rows]
        print_table(names, cells, wrap=["module", "cast_name"], drop=_dropped(rows, asked), more="--columns")
        if len(rows) < table.num_rows:
            warn(f"the first {len(rows)} of {table.num_rows} rows; --limit 0 prints all")
    else:
        text = to_csv(names, table.to_pylist()) if form == "csv" else to_json(table.to_pylist())
        click.echo(text, nl=False)


def _dropped(rows: Sequence[Mapping[str, Any]], asked: Sequence[str]) -> list[str]:
    """Return the order in which a narrow terminal loses columns.

    Keys that are the same in all rows go first, then the statistics that matter least, then keys by which rows differ.
    """
    alike = [key for key in SPARE_KEYS if len({str(row[key]) for row in rows}) < 2]
    statistics = [name for name in (*SPARE_STATISTICS, *reversed(asked)) if name in asked]
    keys = [key for key in SPARE_KEYS if key not in alike and key not in asked]
    return list(dict.fromkeys([*(key for key in alike if key not in asked), *statistics[:-1], *keys]))
