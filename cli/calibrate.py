"""``fp8debug calibrate RUN``: static scales from a recorded window, and a format and granularity for each operand."""

from __future__ import annotations

import click

from fp8debug.tools.calibration import Expected, calibrate

from .console import open_run, print_table, warn, wide_option, write_file
from .output import echo

HEADER = [
    *("module", "site", "amax", "largest", "scale_inv", "clip", "underflow", "SQNR dB"),
    *("ran, measured dB", "proposal", "its dB", "note"),
]


@click.command("calibrate")
@click.argument("run")
@click.option("-o", "--output", metavar="FILE", help="Write the scales as JSON; - is stdout, instead of the table.")
@click.option("--percentile", default=99.9, show_default=True, help="Of the amaxes over the sampled steps.")
@click.option("--margin", default=1.0, show_default=True, help="Factor on scale_inv; 2 leaves room for one binade of growth.")
@click.option("--steps", metavar="A:B", help="Steps from A to before B, either side may be empty; or one step.")
@wide_option
def command(run: str, output: str | None, percentile: float, margin: float, steps: str | None) -> None:
    """Turn a window of RUN into static tensorwise scales.

    The table says per operand what its scale will clip, flush to zero (share of the nonzero elements) and lose, by the exponent
    histogram, beside what ran; and the coarsest cast that holds. Train with fp8debug.convert(model, "scales.json").
    """
    found = calibrate(open_run(run), percentile=percentile, margin=margin, steps=steps)
    if (step := found.first_nonfinite) is not None:
        warn(f"operands hold NaN or Inf from step {step} on; calibrate on healthy steps: --steps :{step}")
    if output is not None:
        write_file(output, found.to_json())
    if output != "-":
        first, last = found.steps
        num = sum(site.is_static for site in found.sites)
        echo(f"{found.run}: {num} of {len(found.sites)} operands take a static scale, steps {first} to {last}\n")
        rows = []
        for site in found.sites:
            static = site.static
            scale_inv = float(static.cast.rpartition("(")[2].rstrip(")"))
            own = [site.amax, site.amax_max, scale_inv, static.clip_rate, static.underflow_rate, static.sqnr_db]
            ran = None if site.running is None else site.running.sqnr_db
            cells = [site.module, f"{site.gemm} {site.tensor}", *own, ran, _proposed(site.proposal)]
            rows.append([*cells, None if site.proposal is None else site.proposal.sqnr_db, site.note or None])
        print_table(HEADER, rows, wrap=["module", "proposal", "note"], drop=["note", "largest"])


def _proposed(proposal: Expected | None) -> str | None:
    """Return the proposal's name without its number, which has a column."""
    return None if proposal is None else proposal.cast.partition("(")[0]
