"""``fp8debug import``: statistics of other tools become a run."""

from __future__ import annotations

import click

from fp8debug.tools.te_stats import import_te_stats

from .console import warn
from .output import echo


@click.group("import")
def command() -> None:
    """Turn another tool's statistics into a run: nobody trains again to get a diagnosis."""


@command.command("te-stats")
@click.argument("logs")
@click.option("-o", "--output", metavar="RUN", required=True, help="The run's folder, which must not hold one.")
@click.option("--recipe", metavar="NAME", help="The recipe that the job ran, e.g. blockwise_pow2.  [default: what the log says]")
def te_stats(logs: str, output: str, recipe: str | None) -> None:
    """Read Transformer Engine's statistics logs (nvdlfw_inspect: LogTensorStats, LogFp8TensorStats).

    LOGS is the folder that was given to Transformer Engine's debug tool, or one log file. Rules that can judge the run do;
    the others say what they lack. `fp8debug triage LOGS` does both at once.
    """
    done = import_te_stats(logs, output, recipe=recipe)
    if done.is_assumed:
        warn(f"the log does not name the recipe: {done.recipe} is assumed; --recipe names another")
    if done.unused:
        warn(f"not used: {', '.join(done.unused[:8])}{' ...' if len(done.unused) > 8 else ''}")
    if done.num_damaged:
        warn(f"{done.num_damaged} line{'' if done.num_damaged == 1 else 's'} cannot be read: cut off, or without a number")
    numbers = f"{done.num_modules} modules, {done.num_steps} steps, {done.num_ranks} rank{'' if done.num_ranks == 1 else 's'}"
    echo(f"Wrote {done.path}: {numbers}; fp8debug triage {done.path} judges it", err=True)
