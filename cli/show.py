"""``fp8debug show RUN``: recorded statistics as a table, CSV or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from .console import open_run, print_table, to_csv, to_json, warn

#: What stands before the statistics in every row.
KEYS = ["step", "module", "gemm", "tensor", "reference", "actual", "cast_name"]
STATISTICS = ["sqnr_db", "cosine", "gain", "underflow_rate", "overflow_rate", "amax"]
#: What tells of NaN and Inf; statistics that either make NaN or Inf, and errors that then have no value.
COUNTS = ["num_nan", "num_inf", "numel"]
MAGNITUDES, ERRORS = ("amax", "rms"), ("amin", "sqnr_db", "cosine", "gain")
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

    A dash, an empty field or null is "not recorded" or "no data", never 0. Of a tensor that holds NaN or Inf the table says NaN
    or Inf; amax in CSV and JSON is that of its finite elements, and empty or null where it has none.
    """
    opened = open_run(run)
    asked = STATISTICS if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    names = list(dict.fromkeys([*KEYS, *asked]))
    wanted = list(dict.fromkeys([*names, *(name for name in COUNTS if opened.has(name))]))
    table = opened.table(wanted, module=module, gemm=gemm, tensor=tensor, steps=steps, reference=reference, actual=actual)
    if not table.num_rows:
        warn("no recorded row matches")
    if form == "table":
        rows = (table.slice(0, min(limit, table.num_rows)) if limit else table).to_pylist()
        if columns is None and any(_nonfinite(row) for row in rows):
            names += [name for name in COUNTS[:2] if name in wanted]
        cells = [[_shown(name, row) for name in names] for row in rows]
        print_table(
            names,
            cells,
            wrap=["module", "cast_name"],
            drop=_dropped(rows, asked, is_own_choice=columns is not None),
            more="--columns",
        )
        if len(rows) < table.num_rows:
            warn(f"the first {len(rows)} of {table.num_rows} rows; --limit 0 prints all")
    else:
        found = [{name: _recorded(name, row) for name in names} for row in table.to_pylist()]
        click.echo(to_csv(names, found) if form == "csv" else to_json(found), nl=False)


def _nonfinite(row: Mapping[str, Any]) -> int:
    """Return how many elements of a row's tensor are NaN or Inf."""
    return int((row.get("num_nan") or 0) + (row.get("num_inf") or 0))


def _recorded(name: str, row: Mapping[str, Any]) -> Any:
    """Return a row's value for programs: the magnitudes of a tensor without a finite element are no data, not 0."""
    is_empty = name in MAGNITUDES and 0 < (row.get("numel") or 0) <= _nonfinite(row)
    return None if is_empty else row[name]


def _shown(name: str, row: Mapping[str, Any]) -> Any:
    """Return a row's value for people: what cannot be computed of a tensor that holds NaN or Inf is NaN or Inf itself."""
    num = _nonfinite(row)
    if not num or (name not in MAGNITUDES and (name not in ERRORS or row[name] is not None)):
        return row[name]
    return math.inf if name in MAGNITUDES and not row["num_nan"] else math.nan


def _dropped(rows: Sequence[Mapping[str, Any]], asked: Sequence[str], *, is_own_choice: bool) -> list[str]:
    """Return the order in which a narrow terminal loses columns.

    Keys that are the same in all rows go first, then the statistics that matter least, unless they were asked for by name, then
    keys by which rows differ, and at last the other statistics from the right.
    """
    keys = sorted((key for key in SPARE_KEYS if key not in asked), key=lambda key: len({str(row[key]) for row in rows}) > 1)
    num_alike = sum(len({str(row[key]) for row in rows}) < 2 for key in keys)
    spare = [] if is_own_choice else [name for name in SPARE_STATISTICS if name in asked]
    rest = [name for name in reversed(asked) if name not in spare]
    return list(dict.fromkeys([*keys[:num_alike], *spare, *keys[num_alike:], *rest[:-1]]))
