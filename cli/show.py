"""``fp8debug show RUN``: recorded statistics as a table, CSV or JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from fp8debug.errors import UsageError
from fp8debug.store.read.run import Run, StepRange, parse_steps

from .console import open_run, print_table, to_csv, to_json, warn, wide_option
from .following import follow
from .output import write

#: What stands before the statistics in every row.
KEYS = ["step", "module", "gemm", "tensor", "reference", "actual", "cast_name"]
STATISTICS = ["sqnr_db", "cosine", "gain", "underflow_rate", "overflow_rate", "amax"]
#: What tells of NaN and Inf; statistics that either make NaN or Inf, and errors that then have no value.
COUNTS = ["num_nan", "num_inf", "numel"]
MAGNITUDES, ERRORS = ("amax", "rms"), ("amin", "sqnr_db", "cosine", "gain")
#: The order in which a narrow terminal loses keys and statistics.
SPARE_KEYS = ["actual", "reference", "cast_name", "gemm", "tensor"]
#: Keys that may say nothing beside the others, the widest first.
WIDEST_KEYS = ["cast_name", "actual"]
SPARE_STATISTICS = ["cosine", "gain", "overflow_rate", "underflow_rate"]
#: Width to which names wrap before a column is left out.
NARROW = 14


@click.command("show")
@click.argument("run")
@click.option("--module", metavar="GLOB", default="*", help="Modules by name, e.g. 'blocks.3.*'.")
@click.option("--gemm", metavar="GEMM", help="fprop, dgrad or wgrad.")
@click.option("--tensor", metavar="TENSOR", help="input, weight, grad_output, output, grad_input or grad_weight.")
@click.option("--steps", metavar="A:B", help="Steps from A to before B, either side may be empty; or one step.")
@click.option("--reference", metavar="NAME", help="operand, shadow or exact.")
@click.option("--actual/--what-if", default=None, help="Only casts that ran, or only those that did not.")
@click.option("--columns", metavar="A,B", help="Statistics to print; all keys stand before them.")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
@click.option("--limit", type=click.IntRange(min=0), default=100, show_default=True, help="Rows of a table; 0 for all.")
@click.option("--follow", "is_followed", is_flag=True, help="Print each step of a live run as it comes, until the run ends.")
@wide_option
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
    is_followed: bool,
) -> None:
    """Print what RUN recorded, one row per step, site, cast and reference; ranks are merged.

    A dash, an empty field or null is "not recorded" or "no data", never 0. Of a tensor that holds NaN or Inf the table says NaN
    or Inf; amax in CSV and JSON is that of its finite elements, and empty or null where it has none.
    """
    asked = STATISTICS if columns is None else [name.strip() for name in columns.split(",") if name.strip()]
    selected = {"module": module, "gemm": gemm, "tensor": tensor, "reference": reference, "actual": actual}
    shown = _Shown(asked, is_own_choice=columns is not None, form=form, limit=limit, selected=selected)
    if not is_followed:
        shown.show(open_run(run), steps)
        return
    if form == "json":
        raise UsageError("--follow prints a table or CSV: a JSON array ends with its run")
    first, end = parse_steps(steps)

    def step_by_step(opened: Run, new: list[int]) -> None:
        for step in new:
            if (first or 0) <= step and (end is None or step < end):
                shown.show(opened, (step, step + 1))

    follow([run], step_by_step)


class _Shown:
    """Printer of recorded rows.

    Args:
        asked: the statistics.
        is_own_choice: whether the user named them.
        form: ``table``, ``csv`` or ``json``.
        limit: rows of a table; 0 for all.
        selected: arguments of :meth:`Run.table` that select rows.
    """

    def __init__(self, asked: list[str], *, is_own_choice: bool, form: str, limit: int, selected: Mapping[str, Any]) -> None:
        self._asked, self._is_own_choice = asked, is_own_choice
        self._form, self._limit, self._selected = form, limit, selected
        self._has_header = False

    def show(self, opened: Run, steps: StepRange | None) -> None:
        """Print the rows of some steps; a second call goes on with the CSV of the first."""
        names = list(dict.fromkeys([*KEYS, *self._asked]))
        wanted = list(dict.fromkeys([*names, *(name for name in COUNTS if opened.has(name))]))
        table = opened.table(wanted, steps=steps, **self._selected)
        if not table.num_rows:
            warn("no recorded row matches")
        if self._form != "table":
            found = [{name: _recorded(name, row) for name in names} for row in table.to_pylist()]
            write(to_json(found) if self._form == "json" else to_csv(names, found, header=not self._has_header), nl=False)
            self._has_header = True
            return
        rows = (table.slice(0, min(self._limit, table.num_rows)) if self._limit else table).to_pylist()
        if not self._is_own_choice and any(_nonfinite(row) for row in rows):
            names += [name for name in COUNTS[:2] if name in wanted]
        cells = [[_shown(name, row) for name in names] for row in rows]
        dropped = _dropped(rows, self._asked, is_own_choice=self._is_own_choice)
        print_table(names, cells, wrap=["module", "cast_name"], drop=dropped, least=NARROW)
        if len(rows) < table.num_rows:
            warn(f"the first {len(rows)} of {table.num_rows} rows; --limit 0 prints all")


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

    Keys without which the rows are told apart all the same go first, the cast's name among them, then the statistics that matter
    least, then the other statistics from the right but the first, and at last the keys that tell rows apart. Statistics that were
    asked for by name outlive the keys.
    """
    keys = [key for key in SPARE_KEYS if key not in asked]
    idle = _idle_keys(rows, keys)
    spare = [] if is_own_choice else [name for name in SPARE_STATISTICS if name in asked]
    telling = [key for key in keys if key not in idle]
    rest = [name for name in reversed(asked) if name not in spare]
    own = [*telling, *rest[:-1]] if is_own_choice else [*rest[:-1], *telling]
    return list(dict.fromkeys([*idle, *spare, *own]))


def _idle_keys(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> list[str]:
    """Return keys that can go together without two rows becoming alike: first those of one value, then the widest."""
    idle = [key for key in keys if len({str(row[key]) for row in rows}) < 2]
    kept, num = list(KEYS), len({tuple(str(row[key]) for key in KEYS) for row in rows})
    for key in (*idle, *(key for key in WIDEST_KEYS if key in keys and key not in idle)):
        left = [name for name in kept if name != key]
        if len({tuple(str(row[name]) for name in left) for row in rows}) == num:
            kept = left
            idle += [key] if key not in idle else []
    return idle
