"""``fp8debug coverage RUN``: which modules run in FP8, under which casts, and why the others do not."""

from __future__ import annotations

import click

from fp8debug.errors import RunError

from .console import open_run, print_table, to_csv, to_json

COLUMNS = ["module", "kind", "fp8", "requested", "flops", "casts", "reason"]

#: The casts are those that the recorded steps ran, not those that were asked for.
MODULES = """
WITH recorded AS (
  SELECT module, string_agg(DISTINCT tensor || ': ' || cast_name, '; ' ORDER BY tensor || ': ' || cast_name) AS casts
  FROM sites WHERE actual AND reference = 'operand' GROUP BY module
)
SELECT fqn AS module, kind, coalesce(fp8, false) AS fp8, coalesce(requested, 'nobody asked') AS requested,
  round(100.0 * flops_per_token / sum(flops_per_token) OVER (), 2) || ' %' AS flops, casts,
  CASE WHEN NOT coalesce(fp8, false) THEN coalesce(reason, 'no reason recorded') WHEN NOT coalesce(observed, false)
  THEN coalesce(reason, 'not observed') END AS reason
FROM modules LEFT JOIN recorded ON recorded.module = modules.fqn ORDER BY call_index NULLS LAST, fqn
"""

TOTALS = """
SELECT count(*) FILTER (WHERE fp8) AS num_fp8, count(*) AS num,
  round(100.0 * sum(flops_per_token) FILTER (WHERE fp8) / sum(flops_per_token), 1) AS share FROM modules
"""


@click.command("coverage")
@click.argument("run")
@click.option("--format", "form", type=click.Choice(["table", "csv", "json"]), default="table", show_default=True)
def command(run: str, form: str) -> None:
    """Say which Linears of RUN run in FP8, what share of the FLOPs they have, under which casts, and why others do not."""
    opened = open_run(run)
    if not opened.manifest.get("modules"):
        raise RunError(f"{opened.name}: coverage was not recorded, manifest.json is missing or lists no modules")
    rows = opened.sql(MODULES).to_pylist()
    if form != "table":
        click.echo(to_csv(COLUMNS, rows) if form == "csv" else to_json(rows), nl=False)
        return
    totals = opened.sql(TOTALS).to_pylist()[0]
    share = f", {totals['share']} % of the Linear FLOPs" if totals["share"] is not None else ""
    click.echo(f"{opened.name}: {totals['num_fp8']} of {totals['num']} Linears in FP8{share}\n")
    print_table(COLUMNS, [[row[name] for name in COLUMNS] for row in rows], wrap=["casts", "reason"])
    for entry in opened.manifest.get("filters") or ():
        click.echo(f"{entry.get('kind')} {entry.get('pattern')!r}: {entry.get('matched')} modules")
