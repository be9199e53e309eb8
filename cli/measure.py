"""``fp8debug measure FILE``: a dump under the cast that ran and under any other, every statistic beside each other."""

from __future__ import annotations

import importlib
from typing import Any

import click

from fp8debug.errors import UnknownNameError, UsageError
from fp8debug.store.dump_files import dumps_at

from .console import print_table, to_csv, to_json, wide_option
from .output import echo, write

#: What stands before the statistics in every row.
KEYS = ["file", "step", "rank", "module", "gemm", "tensor", "call", "cast_name", "actual"]


@click.command("measure")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option(
    "--cast", "casts", metavar="CAST", multiple=True, help="E.g. 'e4m3fn 1x128 current', or a recipe's name; repeat it."
)
@click.option("--columns", metavar="A,B", help="Only these statistics.")
@click.option("--format", "form", type=click.Choice(["table", "json", "csv"]), default="table", show_default=True)
@wide_option
def command(files: tuple[str, ...], casts: tuple[str, ...], columns: str | None, form: str) -> None:
    """Replay casts on dumps: files, folders of them, or globs in quotes.

    The cast that ran comes first, from the FP8 data in the file; the others quantize the reference anew. Needs torch.
    """
    dumps = [dump for path in files for dump in dumps_at(path)]
    try:
        replay = importlib.import_module("fp8debug.tools.replay").replay
    except ImportError as error:
        raise UsageError(f"measure computes with torch, which cannot be imported here: {error}") from None
    asked = None if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    rows: list[dict[str, Any]] = []
    for dump in dumps:
        found = replay(dump, casts)
        names = _names(found, asked)
        site = [dump.step, dump.rank, dump.module, dump.gemm, dump.tensor, dump.call]
        for cast_name, values in found.items():
            ran = dump.actual and cast_name == dump.cast_name
            keys = dict(zip(KEYS, [str(dump.path), *site, cast_name, ran], strict=True))
            rows.append({**keys, **{name: values[name] for name in names}})
        if form == "table":
            _print(dump, found, names)
    if form != "table":
        fields = list(rows[0]) if rows else KEYS
        write(to_json(rows) if form == "json" else to_csv(fields, rows), nl=False)


def _names(found: dict[str, dict[str, Any]], asked: list[str] | None) -> list[str]:
    known = list(next(iter(found.values()), {}))
    for name in asked or []:
        if found and name not in known:
            raise UnknownNameError("column", name, known)
    return [name for name in known if name != "log2_hist"] if asked is None else asked


def _print(dump: Any, found: dict[str, dict[str, Any]], names: list[str]) -> None:
    ran = "" if dump.actual else ", FP8 only tried"
    echo(f"{dump.module} {dump.gemm} {dump.tensor} {list(dump.shape)}, step {dump.step}, rank {dump.rank}{ran}")
    if not found:
        echo("read in high precision: no cast ran; try one with --cast\n")
        return
    rows = [[name, *(values[name] for values in found.values())] for name in names]
    print_table(["", *found], rows, wrap=list(found))
    echo()
